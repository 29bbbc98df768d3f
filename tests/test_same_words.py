"""An exported run says in transformers what it says in sample.py: greedy text, and answers.

test_convert.py compares logits, gradients and tokenizers.
"""
import json

import pytest
from pool import ROOT
from runs import TINY, go
from test_chat import chat_session
from test_convert import SYSTEM, TALKS, asked, same_bytes

import convert
import prepare
import sample
from corpus import tokenizer
from runtime.launch import World

NO_VOCAB = [f for f in TINY if "vocab" not in f]
QWEN3 = ["--qk-norm=head", "--head-dim=12", "--norm-eps=1e-6"]
LORA = ["--lora=8", "--lora-alpha=16"]


@pytest.mark.parametrize("kind,model", [
    ("bpe", "llama"), ("char", "llama"), ("bpe", "qwen3"), ("bpe", "lora")])
def test_greedy_text_is_that_of_transformers(kind, model, hf, tmp_path, capsys):
    """50 tokens: by sample.py on the run, on the exported directory and on what import makes of it.

    The run of adapters is on top of a Qwen3; the export merges them.
    """
    source = (ROOT / "tests/test_convert.py").read_text()
    (tmp_path / "text.txt").write_text("".join(filter(str.isascii, 2 * source)))
    vocab = ["--vocab-size=400"] * (kind == "bpe")
    prepare.main([str(tmp_path / "text.txt"), "--name=d", f"--out={tmp_path}", f"--tokenizer={kind}", *vocab,
                  "--val-fraction=0.3"])
    flags = [f"--data={tmp_path}/d", "--save-every=12", "--seq-len=96", *QWEN3 * (model != "llama")]
    go(1, tmp_path / "run", *flags, "--steps=12", base=NO_VOCAB)
    run = tmp_path / "run"
    if model == "lora":
        run = tmp_path / "tuned"
        go(1, run, *flags, *LORA, f"--init-from={tmp_path}/run", "--steps=12", "--lr=3e-2", base=NO_VOCAB)
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


# -----------------------------------------------------------------------------
# Conversations

TUNING = {  # {model: (flags of both runs, what the first one reads and its steps, flags of the second)}
    "llama": ([], "text", 1, ["--steps=40"]),
    "qwen3": (QWEN3, "text", 1, ["--steps=40"]),
    # Adapters train no embedding, so the base has learnt the tokens of conversations, but not to answer.
    "lora": (QWEN3, "talks", 8, [*LORA, "--steps=80"])}


@pytest.fixture(scope="module", params=TUNING)
def tuned(request, tmp_path_factory):
    """Return a folder with three directories.

    pre/ is the first run, on text for most models. tuned/ is a run on conversations that starts from the
    weights of pre/. hf/ is the export of tuned/.
    """
    folder = tmp_path_factory.mktemp("tuned")
    lines = [{"messages": [SYSTEM] * (i % 2) + [{"role": "user", "content": f"{i} + {i}?"}, {
        "role": "assistant", "content": "It is much."}]} for i in range(60)]
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "text.txt").write_text("".join(f"{i} + {i}? It is much. Be brief.\n" for i in range(999)))
    argv = [f"--out={folder}", "--val-fraction=0.3"]
    prepare.main([f"{folder}/text.txt", "--name=text", "--vocab-size=280", "--workers=1", *argv])
    prepare.main(["chat", f"{folder}/talks.jsonl", "--name=talks", f"--tokenizer={folder}/text", *argv,
                  "--seq-len=48"])
    common, first, steps, tuning = TUNING[request.param]
    flags = [*common, "--seq-len=48", "--save-every=80", "--lr=3e-2"]
    go(1, folder / "pre", f"--data={folder}/{first}", *flags, f"--steps={steps}", base=NO_VOCAB)
    go(1, folder / "tuned", f"--data={folder}/talks", *flags, *tuning, f"--init-from={folder}/pre",
       base=NO_VOCAB)
    convert.main(["export", f"{folder}/tuned", f"--out={folder}/hf"])
    return folder


def test_transformers_answers_as_the_run_does_and_stops(hf, tuned, tmp_path):
    """Greedily, to a system and a user: transformers, and sample.py --chat on the run, on the exported
    directory and on what import makes of it, whose export has the same tensors."""
    vocabulary, there = tokenizer.load(tuned / "tuned"), tuned / "hf"
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
    for folder in (tuned / "tuned", there, tmp_path / "back"):
        argv = [str(folder), "--chat", "--temperature=0", "--system=Be brief."]
        code, out, err = chat_session(World(), argv, "3 + 3?\n")
        assert not code and out == answer + "\n", (folder, out, err)


def test_the_card_of_a_chat_model(hf, tuned):
    """It names flags and no paths."""
    card = (tuned / "hf" / "README.md").read_text()
    assert "--seq-len 48" in card and "--lr 0.03" in card
    assert str(tuned) not in card and not any(word in card for word in ("--plot", "--init", "--data"))
