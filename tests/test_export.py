"""What convert.py export leaves: masked language models, tokens by name, the card; a whole folder or none.

Besides, what import refuses in one line: a table of malformed inputs for each reader.

test_convert.py compares the functions of the other families, and the tokenizers.
"""
import dataclasses
import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from runs import TINY, chars, go, refused
from safetensors.torch import load_file, save_file
from test_import import VOCAB, change, change_tensors, make

import checkpoint
import convert
import prepare
import sample
from config import Config
from corpus import chat, tokenizer
from hub import families
from hub import tokenizer as tokenizer_json

NO_VOCAB = [f for f in TINY if "vocab" not in f]
BERT = ["--objective=mlm", "--norm=layer", "--mlp=gelu", "--pos=learned", "--n-kv-head=2"]
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 3?"},
        {"role": "assistant", "content": "  It is\n6. "}, {"role": "user", "content": "é?"},
        {"role": "assistant", "content": "Yes."}]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run that made one step, on characters."""
    folder = tmp_path_factory.mktemp("export")
    chars(folder)
    go(1, folder / "run", f"--data={folder}/toy", "--steps=1", "--save-every=1", base=NO_VOCAB)
    return folder / "run"


# -----------------------------------------------------------------------------
# BERT

@pytest.mark.parametrize("flags", [["--tied", "--bias"], ["--bias"], ["--tied"]], ids=str)
def test_an_exported_bert_has_the_same_logits(flags, hf, tmp_path):
    """In fp64, without and with an attention mask, tied and not. Where the run has no biases, zeros stand."""
    go(1, tmp_path / "run", "--steps=2", "--save-every=2", "--lr=0.3", "--seq-len=32", *BERT, *flags)
    convert.main(["export", f"{tmp_path}/run", f"--out={tmp_path}/hf", "--dtype=fp64"])
    theirs, said = hf.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float64, attn_implementation="eager", output_loading_info=True)
    assert type(theirs).__name__ == "MegatronBertForMaskedLM"
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), said

    cfg, vocab_size, weights, _, _ = convert.read_run(tmp_path / "run")
    cfg = dataclasses.replace(cfg, dtype="fp64")
    torch.set_default_dtype(torch.float64)
    try:
        ours = sample.load_model(cfg, vocab_size, weights).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    x = torch.randint(vocab_size, (2, 32), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        a = theirs.eval()(x, attention_mask=torch.ones_like(x)).logits.flatten(0, 1)
        b = ours(x)[0][:, :vocab_size]
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
    card = (tmp_path / "hf/README.md").read_text()
    assert "pipeline_tag: fill-mask" in card
    refused(convert.main, ["import", tmp_path / "hf", f"--out={tmp_path}/back"], "megatron-bert")


def test_a_bert_that_transformers_has_not_is_refused():
    bert = Config(objective="mlm", norm="layer", mlp="gelu", pos="learned", n_kv_head=4)
    assert families.family_of(bert) == "megatron-bert"
    for other, word in (dict(norm="rms"), "--norm layer"), (dict(n_kv_head=2), "--n-kv-head 4"), (
            dict(n_experts=4), "--objective causal"), (dict(pos="rope"), "--pos learned"):
        with pytest.raises(ValueError, match=word):
            families.family_of(dataclasses.replace(bert, **other))


# -----------------------------------------------------------------------------
# Tokens

@pytest.fixture(scope="module")
def talker(tmp_path_factory, hf):
    """Return a tokenizer of ours with the tokens of conversations, and transformers' of its export."""
    folder = tmp_path_factory.mktemp("talker")
    vocabulary = tokenizer.train_bpe([Path(__file__).read_text()], 300).with_special(chat.MARKERS)
    for name, content in tokenizer_json.export_tokenizer(vocabulary, 64).items():
        (folder / name).write_text(json.dumps(content))
    return vocabulary, hf.AutoTokenizer.from_pretrained(folder)


def test_a_batch_gives_the_answers_of_its_texts_alone(hf, tmp_path):
    """A pipeline with a batch: the padding on the left changes nothing."""
    (tmp_path / "text.txt").write_text("".join(f"{i} + {i} is much.\n\n" for i in range(2000)))
    prepare.main([f"{tmp_path}/text.txt", "--name=d", f"--out={tmp_path}", "--vocab-size=270",
                  "--val-fraction=0.3"])
    go(1, tmp_path / "run", f"--data={tmp_path}/d", "--steps=10", "--save-every=10", "--seq-len=48",
       base=NO_VOCAB)
    convert.main(["export", f"{tmp_path}/run", f"--out={tmp_path}/hf"])
    ask = hf.pipeline("text-generation", str(tmp_path / "hf"))
    given = ["7", "12 + 12 is", "much. 5 +"]
    how = {"max_new_tokens": 8, "do_sample": False}
    alone = [ask(text, **how)[0]["generated_text"] for text in given]
    together = [found[0]["generated_text"] for found in ask(given, batch_size=3, **how)]
    assert alone == together
    # No row of the embedding is the padding's: its gradient would be dropped
    assert json.loads((tmp_path / "hf/config.json").read_text())["pad_token_id"] is None


def test_a_tokenizer_of_theirs_without_padding_gets_some(talker, tmp_path):
    for name, content in tokenizer_json.export_tokenizer(talker[0], 64).items():
        (tmp_path / name).write_text(json.dumps(content))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for given, want in (None, tokenizer.EOD), ("<|user|>", "<|user|>"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": given}))
        again = tokenizer_json.export_tokenizer(tokenizer.load(tmp_path), 64)["tokenizer_config.json"]
        assert again["pad_token"] == want


def test_the_masks_of_the_assistant_are_those_of_our_training(talker):
    vocabulary, words = talker
    ids, trained = chat.Template(vocabulary).conversation(TALK)
    found = words.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert found["input_ids"] == ids and 5 < sum(trained) < len(ids)
    assert found["assistant_masks"] == trained


def test_gpt2_has_its_older_name_of_the_sequence():
    """As llama.cpp's convert_hf_to_gguf.py asks for it."""
    cfg = Config(norm="layer", mlp="gelu", pos="learned", n_kv_head=4, seq_len=96)
    written = families.config_json(cfg, families.family_of(cfg), 100, None, "float32")
    assert written["n_ctx"] == written["n_positions"] == 96


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
        def kill(path, content):
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


def test_an_import_and_an_export_give_the_same_weights(model, tmp_path, capsys):
    convert.main(["import", str(model), f"--out={tmp_path}/ours"])
    printed = capsys.readouterr().out
    assert f"python train.py --data data/NAME --init-from {tmp_path}/ours/step_000000\n" in printed
    assert f"python sample.py {tmp_path}/ours --prompt ..." in printed
    convert.main(["export", f"{tmp_path}/ours", f"--out={tmp_path}/again"])
    assert (tmp_path / "again/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_an_empty_folder_is_filled_and_a_full_one_refused(run, tmp_path):
    (tmp_path / "hf").mkdir()
    convert.main(["export", str(run), f"--out={tmp_path}/hf"])
    assert (tmp_path / "hf/config.json").exists()
    refused(convert.main, ["export", run, f"--out={tmp_path}/hf"], "give a new directory")


def test_an_import_that_finds_damaged_weights_leaves_nothing(model, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "is_finite", lambda block: False)
    refused(convert.main, ["import", model, f"--out={tmp_path}/ours"], "holds nan or infinite weights")
    assert not os.listdir(tmp_path)


# -----------------------------------------------------------------------------
# Malformed inputs, for each reader: one line, and nothing is written

def fields(without=(), **values):
    return lambda folder: change(folder, without, **values)


def text(file, content):
    return lambda folder: (folder / file).write_text(content)


def rewritten(file, change_bytes):
    """A file of which other bytes are left."""
    return lambda folder: (folder / file).write_bytes(change_bytes((folder / file).read_bytes()))


def listed(content):
    """An index in the place of model.safetensors."""
    def replace(folder):
        (folder / "model.safetensors").rename(folder / "other.safetensors")
        (folder / "model.safetensors.index.json").write_text(content)
    return replace


def held(**tensors):
    return lambda folder: change_tensors(folder, **tensors)


def only(**tensors):
    return lambda folder: save_file(tensors, folder / "model.safetensors", {"format": "pt"})


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
        (fields(model_type=3), "model_type"), (fields(["model_type"]), "model_type"),
        (fields(architectures="LlamaForCausalLM"), "architectures"),
        (fields(hidden_act=["silu"]), "hidden_act"),
        (fields(num_attention_heads="2"), "num_attention_heads"), (fields(num_attention_heads=0), CONFIG),
        (fields(num_attention_heads=3), "config.json"), (fields(head_dim=6), "q_proj.weight is ("),
        (fields(hidden_size=None), "hidden_s"), (fields(vocab_size=9), "embed_tokens"),
        (fields(num_hidden_layers=3), "layers.2.input_layernorm.weight is not there"),
        (fields(num_hidden_layers=1), "no place for model.layers.1"),
        (fields(num_key_value_heads=3), "n-kv-head 3"), (fields(rms_norm_eps=7.0), "--norm-eps 7"),
        (fields(intermediate_size=1.5), "intermediate_size"), (fields(tie_word_embeddings="no"), "tie_word"),
        (fields(rope_scaling=3), "rope_parameters"),
        (fields(rope_parameters={"rope_type": "llama3"}), "rope_p"),
        (fields(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (fields(rope_parameters={"rope_theta": "x"}), "rope_base"),
        (fields(rope_interleaved=True), "rope_int"),
        (fields(layer_types=["sliding_attention"] * 2), "layer_types"),
        (text(CONFIG, ""), CONFIG), (text(CONFIG, "[1]"), CONFIG),
        (rewritten(CONFIG, lambda data: data[:len(data) // 2]), CONFIG),
        (lambda folder: (folder / CONFIG).unlink(), CONFIG)],
    "model.safetensors": [
        (lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"), ".bin"),
        (rewritten(WEIGHTS, lambda data: data[:len(data) // 2]), f"{WEIGHTS} is damaged"),
        (rewritten(WEIGHTS, lambda data: b""), f"{WEIGHTS} is damaged"),
        (rewritten(WEIGHTS, lambda data: data + b"more"), f"{WEIGHTS} is damaged"),
        (only(a=torch.ones(3, dtype=torch.int8)), "a is I8"), (only(), "embed_tokens.weight is not there"),
        (held(more=torch.ones(3)), "no place for more"),
        (held(**{Q_NORM: torch.ones(3)}), f"{Q_NORM} is (3,)"),
        (held(**{Q_NORM: torch.full((16, 16), math.nan)}), f"{Q_NORM} holds nan"),
        (held(**{Q_NORM: torch.ones(16, 16, dtype=torch.int32)}), f"{Q_NORM} is I32"),
        (listed('{"weight_map": {"a": 3}}'), "weight_map"),
        (listed('{"weight_map": {"a": "x.safetensors"}}'), "x.safetensors is not there"),
        (listed("{"), "index.json"), (listed('{"weight_map": {}}'), "embed_tokens.weight is not there")],
    "tokenizer.json": [
        (text("tokenizer.json", "[]"), "tokenizer.json"),
        (lambda folder: tokenizer.train_char(["".join(map(chr, range(40, 300)))]).save(
            folder / "tokenizer.json"), "260 ids and the model 50 rows")],
    "adapters": [
        (adapter(peft_type="LOHA"), "peft_type is 'LOHA'"), (adapter(use_dora=True), "use_dora is True"),
        (adapter(bias="all"), "bias is 'all'"), (adapter(fan_in_fan_out=True), "fan_in_fan_out"),
        (adapter(rank_pattern={"q_proj": 4}), "rank_pattern"),
        (adapter(alpha_pattern={"q_proj": 4}), "alpha_p"),
        (adapter(modules_to_save=["lm_head"]), "modules_to_save"),
        (adapter(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"), (adapter(r=3), "it should be"),
        (adapter(lora_alpha=0), "lora_alpha is 0"),
        (text("adapter_config.json", "{"), "adapter_config.json"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
        (adapter_tensors(more=torch.ones(2)), "no place for more"),
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
