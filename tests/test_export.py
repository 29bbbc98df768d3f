"""What convert.py export leaves: masked language models, the same greedy text; a whole folder or none.

Besides, what import refuses in one line: a table of malformed inputs for each reader.
"""
import json
import math
import os
import shutil
import signal

import pytest
import torch
from pool import ROOT
from runs import TINY, chars, go, model_of, refused
from safetensors.torch import load_file, save_file
from test_chat import chat_session
from test_convert import SYSTEM, TALKS, asked, same_bytes
from test_import import VOCAB, change, change_tensors, make

import checkpoint
import convert
import prepare
import sample
from corpus import tokenizer
from runtime.launch import World

NO_VOCAB = [f for f in TINY if "vocab" not in f]
BERT = ["--objective=mlm", "--norm=layer", "--mlp=gelu", "--pos=learned", "--n-kv-head=2"]
QWEN3 = ["--qk-norm=head", "--head-dim=12", "--norm-eps=1e-6"]
LORA = ["--lora=8", "--lora-alpha=16"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run that made one step, on characters."""
    folder = tmp_path_factory.mktemp("export")
    chars(folder)
    go(1, folder / "run", f"--data={folder}/toy", "--steps=1", "--save-every=1", base=NO_VOCAB)
    return folder / "run"


# -----------------------------------------------------------------------------
# BERT

@pytest.mark.parametrize("flags", [["--tied", "--bias"], []], ids=str)
def test_an_exported_bert_has_the_same_logits(flags, hf, tmp_path):
    """In fp64, without and with an attention mask, tied and not. Where the run has no biases, zeros stand."""
    go(1, tmp_path / "run", "--steps=2", "--save-every=2", "--lr=0.3", "--seq-len=32", *BERT, *flags)
    convert.main(["export", f"{tmp_path}/run", f"--out={tmp_path}/hf", "--dtype=fp64"])
    theirs, said = hf.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float64, attn_implementation="eager", output_loading_info=True)
    assert type(theirs).__name__ == "MegatronBertForMaskedLM"
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), said

    ours = model_of(tmp_path / "run", dtype="fp64")
    x = torch.randint(ours.vocab_size, (2, 32), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        a = theirs.eval()(x, attention_mask=torch.ones_like(x)).logits.flatten(0, 1)
        b = ours(x)[0][:, :ours.vocab_size]
    assert a.shape == b.shape and b.abs().max() > 0.1
    assert (a - b).abs().max() <= 1e-10 * b.abs().max()


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_transformers_fills_the_gaps_of_a_bert(kind, hf, tmp_path, capsys):
    """With the likeliest token of sample.py --fill. Its [MASK] is the tokenizer's."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the {word} sat on the mat.\n\n" for word in ("cat", "dog", "owl")) * 300)
    vocab = ["--vocab-size=270"] * (kind == "bpe")
    prepare.main([str(text), "--name=d", f"--out={tmp_path}", f"--tokenizer={kind}", "--val-fraction=0.3",
                  *vocab])
    go(1, tmp_path / "run", f"--data={tmp_path}/d", "--steps=20", "--save-every=20", "--seq-len=48", *BERT,
       "--tied", base=NO_VOCAB)
    convert.main(["export", f"{tmp_path}/run", f"--out={tmp_path}/hf"])
    mask = json.loads((tmp_path / "run/config.json").read_text())["mask_token"]
    words = hf.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (words.mask_token, words.mask_token_id) == ("[MASK]", mask)
    found = hf.pipeline("fill-mask", str(tmp_path / "hf"))("the c[MASK]t sat on the mat.")
    capsys.readouterr()
    sample.main([f"{tmp_path}/run", "--fill=the c[MASK]t sat on the mat."])
    out = capsys.readouterr().out.splitlines()
    best = f"[MASK] 1: {words.decode([found[0]['token']])!r} {100 * found[0]['score']:.1f} %"
    assert out[1].startswith(best), (out, best)
    refused(convert.main, ["import", tmp_path / "hf", f"--out={tmp_path}/back"], "megatron-bert")


# -----------------------------------------------------------------------------
# The same words

@pytest.mark.parametrize("kind,model", [("char", "llama"), ("bpe", "qwen3")])
def test_greedy_text_is_that_of_transformers(kind, model, hf, tmp_path, capsys):
    """50 tokens: by sample.py on the run, on the exported directory and on what import makes of it.

    A padded batch changes nothing.
    """
    source = (ROOT / "tests/test_convert.py").read_text()
    (tmp_path / "text.txt").write_text("".join(filter(str.isascii, 2 * source)))
    vocab = ["--vocab-size=400"] * (kind == "bpe")
    prepare.main([str(tmp_path / "text.txt"), "--name=d", f"--out={tmp_path}", f"--tokenizer={kind}", *vocab,
                  "--val-fraction=0.3"])
    flags = [f"--data={tmp_path}/d", "--save-every=12", "--seq-len=96", *QWEN3 * (model != "llama")]
    run = tmp_path / "run"
    go(1, run, *flags, "--steps=12", base=NO_VOCAB)
    there, back = str(tmp_path / "hf"), str(tmp_path / "back")
    convert.main(["export", str(run), f"--out={there}"])
    convert.main(["import", there, f"--out={back}"])
    model, words = hf.AutoModelForCausalLM.from_pretrained(there), hf.AutoTokenizer.from_pretrained(there)
    ids = model.generate(**words("def main(", return_tensors="pt"), max_new_tokens=50, min_new_tokens=50,
                         do_sample=False)[0]
    vocabulary, said = tokenizer.load(run), []
    assert len(ids) == 50 + len(vocabulary.encode("def main(")) and len(set(ids.tolist())) > 3
    for folder in (run, there, back):
        capsys.readouterr()
        sample.main([str(folder), "--prompt=def main(", "--max-new-tokens=50", "--temperature=0"])
        said.append(capsys.readouterr().out)
    assert said == [words.decode(ids) + "\n"] * 3

    if kind == "bpe":
        ask, how = hf.pipeline("text-generation", there), {"max_new_tokens": 8, "do_sample": False}
        given = ["def", "import json", "a + b ="]
        together = [found[0]["generated_text"] for found in ask(given, batch_size=3, **how)]
        assert together == [ask(text, **how)[0]["generated_text"] for text in given]


TUNING = {  # {model: (flags of both runs, what the first one reads and its steps, flags of the second)}
    "llama": ([], "text", 1, ["--steps=40"]),
    # Adapters train no embedding, so the base has learnt the tokens of conversations, but not to answer.
    "lora": (QWEN3, "talks", 8, [*LORA, "--steps=80"])}


@pytest.mark.parametrize("model", TUNING)
def test_transformers_answers_as_the_run_does_and_stops(model, hf, tmp_path):
    """Greedily, to a system and a user: transformers, and sample.py --chat on the run, on the exported
    directory and on what import makes of it, whose export has the same tensors."""
    lines = [{"messages": [SYSTEM] * (i % 2) + [{"role": "user", "content": f"{i} + {i}?"}, {
        "role": "assistant", "content": "It is much."}]} for i in range(60)]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "text.txt").write_text("".join(f"{i} + {i}? It is much. Be brief.\n" for i in range(999)))
    argv = [f"--out={tmp_path}", "--val-fraction=0.3"]
    prepare.main([f"{tmp_path}/text.txt", "--name=text", "--vocab-size=280", "--workers=1", *argv])
    prepare.main(["chat", f"{tmp_path}/talks.jsonl", "--name=talks", f"--tokenizer={tmp_path}/text", *argv,
                  "--seq-len=48"])
    common, first, steps, tuning = TUNING[model]
    flags = [*common, "--seq-len=48", "--save-every=80", "--lr=3e-2"]
    go(1, tmp_path / "pre", f"--data={tmp_path}/{first}", *flags, f"--steps={steps}", base=NO_VOCAB)
    go(1, tmp_path / "tuned", f"--data={tmp_path}/talks", *flags, *tuning, f"--init-from={tmp_path}/pre",
       base=NO_VOCAB)
    there = tmp_path / "hf"
    convert.main(["export", f"{tmp_path}/tuned", f"--out={there}"])

    vocabulary = tokenizer.load(tmp_path / "tuned")
    ids = asked(vocabulary, TALKS[1])
    model, words = hf.AutoModelForCausalLM.from_pretrained(there), hf.AutoTokenizer.from_pretrained(there)
    assert model.generation_config.eos_token_id == [vocabulary.eod, vocabulary.special["<|end|>"]]
    given = words.apply_chat_template(TALKS[1], add_generation_prompt=True, return_dict=True,
                                      return_tensors="pt")
    got = model.generate(**given, max_new_tokens=30, do_sample=False)[0].tolist()
    assert got[:len(ids)] == ids and got[-1] == vocabulary.special["<|end|>"] and len(got) < len(ids) + 30
    answer = vocabulary.decode(got[len(ids):-1])
    assert answer == "It is much."

    convert.main(["import", str(there), f"--out={tmp_path}/back"])
    convert.main(["export", f"{tmp_path}/back", f"--out={tmp_path}/again"])
    same_bytes(there, tmp_path / "again")
    for name in "generation_config.json", "tokenizer_config.json":
        assert json.loads((there / name).read_text()) == json.loads((tmp_path / "again" / name).read_text())
    for folder in (tmp_path / "tuned", there, tmp_path / "back"):
        argv = [str(folder), "--chat", "--temperature=0", "--system=Be brief."]
        code, out, err = chat_session(World(), argv, "3 + 3?\n")
        assert not code and out == answer + "\n", (folder, out, err)


# -----------------------------------------------------------------------------
# A folder that is whole, or not there

@pytest.fixture(scope="module")
def model(run):
    """Return the run as a directory of Hugging Face, which import reads. Its tokenizer needs no library."""
    folder = run.parent / "model"
    convert.main(["export", str(run), f"--out={folder}"])
    (folder / "tokenizer.json").write_bytes((run / "tokenizer.json").read_bytes())
    return folder


@pytest.mark.parametrize("command", ["export", "import"])
def test_a_killed_command_leaves_no_result_and_what_it_left_is_not_replaced(command, run, model, tmp_path):
    """The next one says what to delete, and then writes the whole result."""
    argv = [command, str(run if command == "export" else model), f"--out={tmp_path}/deep/out"]
    child = os.fork()
    if not child:
        def kill(*_):
            os.kill(os.getpid(), signal.SIGKILL)
        convert.write_json = kill
        convert.main(argv)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert os.listdir(tmp_path / "deep") == ["out.tmp"]
    refused(convert.main, argv, f"{tmp_path}/deep/out.tmp is there: another command writes it, or one was")
    assert os.listdir(tmp_path / "deep") == ["out.tmp"]
    shutil.rmtree(tmp_path / "deep/out.tmp")
    convert.main(argv)
    assert os.listdir(tmp_path / "deep") == ["out"] and (tmp_path / "deep/out/config.json").exists()
    if command == "import":
        checkpoint.check(tmp_path / "deep/out/step_000000")


def test_an_import_and_an_export_give_the_same_weights(model, tmp_path):
    convert.main(["import", str(model), f"--out={tmp_path}/ours"])
    convert.main(["export", f"{tmp_path}/ours", f"--out={tmp_path}/again"])
    assert (tmp_path / "again/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    refused(convert.main, ["export", tmp_path / "ours", f"--out={tmp_path}/again"], "give a new directory")


# -----------------------------------------------------------------------------
# Malformed inputs, for each reader: one line, and nothing is written

def fields(without=(), **values):
    return lambda folder: change(folder, without, **values)


def rewritten(file, change_bytes):
    """A file of which other bytes are left."""
    return lambda folder: (folder / file).write_bytes(change_bytes((folder / file).read_bytes()))


def held(**tensors):
    return lambda folder: change_tensors(folder, **tensors)


def adapter(**fields):
    def replace(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return replace


def adapter_tensors(**tensors):
    def replace(folder):
        path = folder / "adapter_model.safetensors"
        save_file({**load_file(path), **tensors}, path)
    return replace


CONFIG = "config.json"
WEIGHTS = "model.safetensors"
Q_NORM = "model.layers.0.self_attn.q_proj.weight"
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
MALFORMED = {  # {reader: [(what happens to a directory, a word of the line)]}
    "config.json": [
        (fields(model_type="qwen3"), "Qwen3ForCausalLM"), (fields(model_type="qwen2_moe"), "qwen2_moe"),
        (fields(num_attention_heads=0), CONFIG),
        (fields(head_dim=6), "q_proj.weight is ("), (fields(vocab_size=9), "embed_tokens"),
        (fields(num_hidden_layers=3), "layers.2.input_layernorm.weight is not there"),
        (fields(num_hidden_layers=1), "no place for model.layers.1"),
        (fields(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (rewritten(CONFIG, lambda data: data[:len(data) // 2]), CONFIG)],
    "model.safetensors": [
        (lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"), "is not there"),
        (rewritten(WEIGHTS, lambda data: data[:len(data) // 2]), f"{WEIGHTS} is damaged"),
        (held(more=torch.ones(3)), "no place for more"),
        (held(**{Q_NORM: torch.ones(3)}), f"{Q_NORM} is ((3,), 'F32')"),
        (held(**{Q_NORM: torch.full((16, 16), math.nan)}), f"{Q_NORM} holds nan"),
        (held(**{Q_NORM: torch.ones(16, 16, dtype=torch.int32)}), f"{Q_NORM} is ((16, 16), 'I32')")],
    "tokenizer.json": [
        (lambda folder: tokenizer.train_char(["".join(map(chr, range(40, 300)))]).save(
            folder / "tokenizer.json"), "260 ids and the model 50 rows")],
    "adapters": [
        (adapter(peft_type="LOHA"), "peft_type is 'LOHA'"), (adapter(use_dora=True), "use_dora is True"),
        (adapter(use_rslora=True), "use_rslora is True"),
        (adapter(bias="all"), "bias is 'all'"), (adapter(rank_pattern={"q_proj": 4}), "rank_pattern"),
        (adapter(modules_to_save=["lm_head"]), "modules_to_save"),
        (adapter(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"), (adapter(r=3), "floats"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
        (adapter_tensors(more=torch.ones(2)), "no place for more"),
        (adapter_tensors(**{A: torch.ones(2, 16, dtype=torch.int32)}), f"{A} is torch.int32"),
        (adapter_tensors(**{A.replace("0", "9"): torch.ones(2, 16)}), "has no partner"),
        (adapter_tensors(**{A: torch.full((2, 16), math.nan)}), f"{A} holds nan")],
}


@pytest.fixture(scope="module")
def sound(hf, tmp_path_factory):
    """Return a folder: hf/, a Llama with a tokenizer of characters; base/, its import; adapters/ of base/."""
    folder = tmp_path_factory.mktemp("sound")
    make(hf, folder / "hf", "llama")
    tokenizer.train_char(["some words"]).save(folder / "hf/tokenizer.json")
    convert.main(["import", f"{folder}/hf", f"--out={folder}/base"])
    go(1, folder / "tuned", f"--init-from={folder}/base", "--n-embd=16", "--n-head=4", "--n-kv-head=2",
       "--ffn-hidden=24", "--norm-eps=1e-6", f"--vocab-size={VOCAB}", "--lora=2", "--steps=1",
       "--save-every=1")
    convert.main(["peft", f"{folder}/tuned", f"--out={folder}/adapters"])
    return folder


@pytest.mark.parametrize("reader", MALFORMED)
def test_a_malformed_input_is_one_line_and_nothing_is_written(reader, sound, tmp_path):
    kind = "adapters" if reader == "adapters" else "hf"
    base = [f"--base={sound}/base"] if reader == "adapters" else []
    for i, (spoil_it, word) in enumerate(MALFORMED[reader]):
        folder = tmp_path / str(i)
        shutil.copytree(sound / kind, folder)
        spoil_it(folder)
        refused(convert.main, ["import", folder, f"--out={tmp_path}/out", *base], word)
        assert not list(tmp_path.glob("out*")), (i, word)
    convert.main(["import", str(sound / kind), f"--out={tmp_path}/out", *base])
