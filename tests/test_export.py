"""What convert.py export leaves: masked language models, tokens by name, the card.

Besides, the halves that export and import leave when they are stopped.

test_convert.py compares the functions of the other families, and the tokenizers.
"""
import contextlib
import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from runs import TINY, chars, go, refused

import checkpoint
import convert
import prepare
import sample
from config import Config
from corpus import chat, hugging_face, tokenizer, tokenizer_json
from interface import half, host_lines

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
    code = card.split("```python\n")[1].split("```")[0].replace('"."', repr(str(tmp_path / "hf")))
    exec(code.replace("a[MASK] in a text", "the c[MASK]t"), {})
    assert len(capsys.readouterr().out.splitlines()) == 5
    refused(convert.main, ["import", tmp_path / "hf", f"--out={tmp_path}/back"], "megatron-bert")


def test_a_bert_that_transformers_has_not_is_refused(tmp_path):
    bert = Config(objective="mlm", norm="layer", mlp="gelu", pos="learned", n_kv_head=4)
    assert hugging_face.family_of(bert) == "megatron-bert"
    for change, word in (dict(norm="rms"), "--norm layer"), (dict(n_kv_head=2), "--n-kv-head 4"), (
            dict(n_experts=4), "--n-experts 0"), (dict(pos="rope"), "--pos learned"):
        with pytest.raises(ValueError, match=word):
            hugging_face.family_of(dataclasses.replace(bert, **change))
    (tmp_path / "config.json").write_text('{"mask_token": 7}')
    with pytest.raises(ValueError, match=r"\[MASK\] as 7, by tokenizer.json it is 3"):
        convert.with_mask(tokenizer.train_char(["abc"]), tmp_path)


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


def test_a_batch_is_padded_with_end_of_document(talker):
    vocabulary, words = talker
    batch = words(["a", "a longer text"], padding=True, return_tensors="pt")
    n = len(vocabulary.encode("a longer text")) - 1
    assert words.pad_token == tokenizer.EOD and words.pad_token_id == vocabulary.eod and n > 1
    assert batch["input_ids"][0].tolist() == [vocabulary.eod] * n + vocabulary.encode("a")
    assert batch["attention_mask"].tolist() == [[0] * n + [1], [1] * (n + 1)]


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
    written = hugging_face.config_json(cfg, hugging_face.family_of(cfg), 100, None, "float32")
    assert written["n_ctx"] == written["n_positions"] == 96


# -----------------------------------------------------------------------------
# The card

def test_the_card_begins_with_yaml(run, tmp_path, capsys):
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers and gguf")
    strange = tmp_path / "- x: #y"
    os.symlink(run, strange)
    convert.main(["export", str(strange), f"--out={tmp_path}/my hf"])
    _, head, rest = (tmp_path / "my hf/README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head) == {"library_name": "transformers", "pipeline_tag": "text-generation",
                                    "model_name": "- x: #y", "tags": ["nanoshard"]}
    assert "# - x: #y, step 1" in rest
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == f"to publish it: hf upload YOUR_NAME/'- x: #y' '{tmp_path}/my hf'"


# -----------------------------------------------------------------------------
# A half

def contents(folder):
    """Return [(path, bytes)] of all files below a folder, without the locks of a process that was killed."""
    return sorted((path, path.read_bytes()) for path in folder.rglob("*")
                  if path.is_file() and path.suffix != ".lock" and path.name != ".lock")


def killed_export(run, out):
    """Export in a process that is killed when it writes tokenizer.json; return its half."""
    child = os.fork()
    if not child:
        def kill(path, content):
            if path.name == "tokenizer.json":
                os.kill(os.getpid(), signal.SIGKILL)
            path.write_text(json.dumps(content))
        convert.write_json = kill
        convert.main(["export", str(run), f"--out={out}"])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return out.with_name(f"{out.name}.half")


def test_a_killed_export_leaves_a_half_that_the_same_command_replaces(run, tmp_path):
    out = tmp_path / "hf"
    left = killed_export(run, out)
    assert not out.exists() and "model.safetensors" in os.listdir(left)
    assert "was stopped" in (left / half.MARKER).read_text()
    convert.main(["export", str(run), f"--out={out}"])
    assert sorted(os.listdir(out)) == ["README.md", "config.json", "generation_config.json",
                                       "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("change", ["a file of another", "no marker", "another marker", "a link", "a folder",
                                    "a file in its place", "a link in its place"])
def test_what_is_not_ours_is_not_replaced(change, run, tmp_path):
    left = tmp_path / "hf.half"
    left.mkdir()
    (left / half.MARKER).write_bytes(half.TEXT)
    (left / "config.json").write_text("mine")
    if change == "a file of another":
        (left / "notes.txt").write_text("mine")
    elif change == "no marker":
        (left / half.MARKER).unlink()
    elif change == "another marker":
        (left / half.MARKER).write_bytes(half.TEXT[:-1] + b"!")
    elif change == "a link":
        os.symlink("/dev/null", left / "model.safetensors")
    elif change == "a folder":
        (left / "README.md").mkdir()
    else:
        left.rename(tmp_path / "elsewhere")
        if change.startswith("a link"):
            left.symlink_to(tmp_path / "elsewhere")
        else:
            left.write_text("mine")
    before = contents(tmp_path)
    refused(convert.main, ["export", run, f"--out={tmp_path}/hf"],
            "hf.half", "move it away, or give another --out")
    assert before == contents(tmp_path)
    assert not (tmp_path / "hf").exists()


def test_two_exports_at_once_meet_a_lock(run, tmp_path, monkeypatch):
    """The second one says who is there, and the first one ends well."""
    write, codes = convert.write_json, []

    def write_and_try(path, content):
        if not codes:
            child = os.fork()
            if not child:
                with contextlib.suppress(BaseException):
                    refused(convert.main, ["export", run, f"--out={tmp_path}/hf"],
                            f"is in use by process {os.getppid()}")
                    os._exit(7)
                os._exit(1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        write(path, content)
    monkeypatch.setattr(convert, "write_json", write_and_try)
    convert.main(["export", str(run), f"--out={tmp_path}/hf"])
    assert codes == [7] and (tmp_path / "hf/tokenizer.json").exists() and os.listdir(tmp_path) == ["hf"]


def test_an_empty_folder_is_filled_and_a_mount_point_refused(run, tmp_path, monkeypatch):
    (tmp_path / "hf").mkdir()
    convert.main(["export", str(run), f"--out={tmp_path}/hf"])
    assert (tmp_path / "hf/config.json").exists()
    refused(convert.main, ["export", run, f"--out={tmp_path}/hf"], "give a new directory")
    refused(convert.main, ["export", run, "--out=/proc/1"], "--out /proc/1")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume")
    refused(convert.main, ["export", run, f"--out={tmp_path}/volume"], f"try --out {tmp_path}/volume/model")


@pytest.fixture(scope="module")
def model(run):
    """Return the run as a directory of Hugging Face, which import reads. Its tokenizer needs no library."""
    folder = run.parent / "model"
    convert.main(["export", str(run), f"--out={folder}"])
    (folder / "tokenizer.json").write_bytes((run / "tokenizer.json").read_bytes())
    return folder


def killed_import(model, out, at):
    """Import in a process that is killed when the file `at` gets its name, or is written; return its half.

    at: "a line" stands for the list of the pieces.
    """
    child = os.fork()
    if not child:
        replace, write, append = os.replace, convert.write_json, host_lines.append

        def kill(path):
            if Path(path).name == at:
                os.kill(os.getpid(), signal.SIGKILL)

        def kill_or_replace(part, path):
            kill(path)
            replace(part, path)

        def kill_or_write(path, content):
            kill(path)
            write(path, content)

        def kill_or_append(folder, value):
            kill("a line")
            append(folder, value)
        os.replace, convert.write_json, host_lines.append = kill_or_replace, kill_or_write, kill_or_append
        convert.main(["import", str(model), f"--out={out}"])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return out.with_name(f"{out.name}.half")


@pytest.mark.parametrize("at,left_there", [("a line", "step_000000.0.tmp/rank_00000.safetensors"),
                                           ("index.json", "step_000000.0.tmp/node_here.jsonl"),
                                           ("config.json", "step_000000/index.json")])
def test_a_killed_import_leaves_a_half_that_the_same_command_replaces(at, left_there, model, tmp_path,
                                                                      capsys, monkeypatch):
    monkeypatch.setattr(host_lines, "host", lambda: "here")
    out = tmp_path / "ours"
    left = killed_import(model, out, at)
    assert not out.exists() and (left / left_there).exists()
    assert "was stopped" in (left / half.MARKER).read_text()
    capsys.readouterr()
    convert.main(["import", str(model), f"--out={out}"])
    printed = capsys.readouterr().out
    assert f"python train.py --data data/NAME --init-from {out}/step_000000\n" in printed
    assert f"python sample.py {out} --prompt ..." in printed
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*")) == [
        "config.json", "step_000000", "step_000000/index.json", "step_000000/rank_00000.safetensors",
        "tokenizer.json"]
    assert os.listdir(tmp_path) == ["ours"]
    checkpoint.check(out / "step_000000")
    convert.main(["export", str(out), f"--out={tmp_path}/again"])
    assert (tmp_path / "again/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize("change", ["a file in the step", "a folder", "a link in the place of the step",
                                    "no marker", "another folder"])
def test_an_import_replaces_nothing_that_is_not_ours(change, model, tmp_path):
    left = killed_import(model, tmp_path / "ours", "config.json")
    words = ["ours.half", "move it away, or give another --out"]
    if change == "a file in the step":
        (left / "step_000000/notes.txt").write_text("mine")
    elif change == "a folder":
        (left / "step_000001").mkdir()
    elif change == "no marker":
        (left / half.MARKER).unlink()
    elif change == "another folder":
        left.rename(tmp_path / "ours")
        words = [f"--out {tmp_path}/ours: give a new directory"]
    else:
        (left / "step_000000").rename(tmp_path / "elsewhere")
        (left / "step_000000").symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path)
    refused(convert.main, ["import", model, f"--out={tmp_path}/ours"], *words)
    assert before == contents(tmp_path)


def test_two_imports_at_once_meet_a_lock(model, tmp_path, monkeypatch):
    """The second one says who is there, and the first one ends well."""
    save, codes = checkpoint.save, []

    def save_and_try(*args):
        child = os.fork()
        if not child:
            checkpoint.save = save
            with contextlib.suppress(BaseException):
                refused(convert.main, ["import", model, f"--out={tmp_path}/ours"],
                        f"is in use by process {os.getppid()}")
                os._exit(7)
            os._exit(1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return save(*args)
    monkeypatch.setattr(checkpoint, "save", save_and_try)
    convert.main(["import", str(model), f"--out={tmp_path}/ours"])
    assert codes == [7] and (tmp_path / "ours/config.json").exists() and os.listdir(tmp_path) == ["ours"]


def test_an_import_that_finds_damaged_weights_leaves_nothing(model, tmp_path, monkeypatch):
    killed_import(model, tmp_path / "ours", "config.json")
    monkeypatch.setattr(checkpoint, "is_finite", lambda block: False)
    refused(convert.main, ["import", model, f"--out={tmp_path}/ours"], "holds nan or infinite weights")
    assert not os.listdir(tmp_path)
