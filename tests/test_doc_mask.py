"""--doc-mask: a token attends to its own document alone. The oracle is each document alone through the model.

In the layouts, one rank is the oracle.
"""
import contextlib
import dataclasses
import io
import json

import pytest
import torch
import torch.nn.functional as F
from faults import assert_caught, planted
from runs import TINY, assert_refused, rows, session
from test_graph import graphed_session
from test_layouts import GPT2, LLAMA, MOE, compare
from test_model import MESH, randomize

import prepare
import train
from config import Config, check
from corpus import samples, shards
from corpus.samples import Synthetic, document_places, open_data
from model import GPT
from ops.cross_entropy import IGNORE
from parallel import make_mesh
from runtime import init_from
from runtime.launch import World

EOD = 0


class Documents(Synthetic):
    """Synthetic samples in documents of 1 to 5 tokens, whose first tokens are EOD. Not all begin with one."""

    def __init__(self, *args):
        super().__init__(*args)
        self.has_documents = True

    def batch(self, first, n):
        tokens, last = super().batch(first, n)
        tokens = torch.cat([tokens, last[:, -1:]], dim=1).clamp(min=1)  # (n, T+1)
        for number, row in enumerate(tokens, first):
            draw = torch.Generator().manual_seed(number)
            row[torch.rand(len(row), generator=draw) < 0.35] = EOD
        return tokens[:, :-1], tokens[:, 1:]

    def places(self, first, x):
        return document_places(x, EOD)


# -----------------------------------------------------------------------------
# Each document alone

SHORT = dict(LLAMA, n_layer=2, micro_batch=2)
EXPERTS = {flag: MOE[flag] for flag in ("n_experts", "top_k", "capacity_factor", "aux_coef", "z_coef")}
FORMS = {
    "llama": SHORT,
    "gpt2": dict(GPT2, n_layer=2, micro_batch=2),
    "windows": dict(SHORT, window=3, full_every=2, no_rope_every=2),
    "nanochat": dict(SHORT, window=3, qk_norm="head", mlp="relu2", logit_softcap=0.5),
    "full": dict(SHORT, recompute="full"),
    "selective": dict(SHORT, recompute="selective"),
    "experts": dict(SHORT, **EXPERTS)}


def documents_of(row, eod=EOD):
    """Return the pairs (first, end) of the documents of a list of tokens."""
    firsts = sorted({0, *(i for i, token in enumerate(row) if token == eod)})
    return list(zip(firsts, [*firsts[1:], len(row)], strict=True))


def alone(model, x, first, end):
    """Return the logits (end - first, V) of a document, through the model without anything around it.

    x (T,). Learned positions go on from the window's start, so the document meets the rows of its place.
    """
    weights = {}
    if model.wpe is not None:
        weights["wpe.weight"] = model.wpe.weight.roll(-first, 0)
    logits, _ = torch.func.functional_call(model, weights, (x[None, first:end],))
    return logits


def check_against_documents_alone(form):
    """The loss of every token and every gradient, to 1e-10."""
    cfg = dataclasses.replace(Config(**FORMS[form]), seq_len=24)
    model = GPT(cfg, MESH, cfg.vocab_size).double()
    randomize(model)
    source = Documents(cfg.vocab_size, cfg.seq_len, 1)
    x, y = source.batch(0, 3)
    parts = [(row, *span) for row in x for span in documents_of(row.tolist())]
    lengths = [end - first for _, first, end in parts]
    assert len(parts) > 12 and max(lengths) > 4 and min(lengths) == 1

    def losses_and_gradients(logits):
        losses = F.cross_entropy(logits, y.flatten(), reduction="none")
        grads = torch.autograd.grad(losses.sum(), list(model.parameters()))
        return losses.detach(), grads

    together = losses_and_gradients(model(x, None, source.places(0, x))[0])
    each = losses_and_gradients(torch.cat([alone(model, *part) for part in parts]))
    torch.testing.assert_close(together[0], each[0], rtol=0, atol=1e-10)
    for name, got, want in zip(dict(model.named_parameters()), together[1], each[1], strict=True):
        largest = max(want.abs().max().item(), 1e-4)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10 * largest, msg=name)
    return together[0], F.cross_entropy(model(x)[0], y.flatten(), reduction="none").detach()


@pytest.mark.parametrize("form", [
    pytest.param(form, marks=[] if form in ("gpt2", "windows") else [pytest.mark.long]) for form in FORMS])
def test_a_window_of_documents_is_each_document_alone(form):
    masked, unmasked = check_against_documents_alone(form)
    assert (masked - unmasked).abs().max() > 0.01, "without the mask the losses are others"


def one_key_more(original, *args, places=None, **options):
    """attend in which a query sees the last token before its document."""
    return original(*args, places=None if places is None else places + 1, **options)


def test_a_fault_in_the_mask_is_found():
    with planted("attention.attend", one_key_more), pytest.raises(AssertionError):
        check_against_documents_alone("llama")


# -----------------------------------------------------------------------------
# Layouts

LAYOUTS = [  # form, ranks, sequences, layout; a sequence of 8 tokens has segments of 2 or 1 under cp
    ("llama", 4, 4, dict(cp=2, pp=2)), ("windows", 4, 4, dict(tp=2, cp=2)),  # these two are fast
    ("llama", 2, 4, dict(tp=2)), ("llama", 4, 4, dict(cp=4)), ("llama", 2, 4, dict(zero=3)),
    ("llama", 4, 8, dict(tp=2, zero=3)), ("llama", 4, 8, dict(cp=2, zero=1)),
    ("llama", 2, 6, dict(pp=2, pp_chunks=2, n_layer=4)), ("gpt2", 4, 4, dict(tp=2, pp=2)),
    ("gpt2", 4, 4, dict(tp=2, cp=2)), ("gpt2", 4, 8, dict(cp=2, zero=2)), ("windows", 4, 4, dict(cp=4)),
    ("windows", 4, 4, dict(cp=2, pp=2, recompute="full")), ("windows", 2, 4, dict(pp=2, zero=1)),
    ("llama", 2, 4, dict(tp=2, recompute="selective")), ("nanochat", 4, 4, dict(tp=2, cp=2)),
    ("experts", 4, 4, dict(tp=2, ep=2)), ("experts", 4, 8, dict(cp=2, ep=4, zero=1, recompute="full")),
    ("experts", 4, 4, dict(pp=2, ep=2, recompute="selective"))]


@pytest.mark.parametrize("form,n,batch,layout", [
    pytest.param(*row, marks=[] if i < 2 else [pytest.mark.long], id=f"{row[0]}-{row[1]}-{row[3]}")
    for i, row in enumerate(LAYOUTS)])
def test_a_layout_equals_one_rank(form, n, batch, layout):
    layers = {"n_layer": layout.pop("n_layer")} if "n_layer" in layout else {}
    compare(dict(FORMS[form], **layers), n, batch, Documents, **layout)


def places_of_own_segments(original, *args):
    """micro_batches() that counts places in the rank's own tokens."""
    return [(x, y, document_places(x, EOD)) for x, y, _ in original(*args)]


def without_places(original, model, tokens, targets=None, places=None, hidden=None, **options):
    """GPT.forward that knows no documents on later stages."""
    return original(model, tokens, targets, None if hidden is not None else places, hidden, **options)


@pytest.mark.parametrize("place,fault", [
    ((2, dict(cp=2)), ("corpus.samples.micro_batches", places_of_own_segments)),
    ((2, dict(pp=2)), ("model.GPT.forward", without_places))],
    ids=["documents of a rank's own tokens", "later stages without documents"])
def test_a_fault_in_a_layout_is_found(place, fault):
    assert_caught(SHORT, place, fault, kind=Documents)


# -----------------------------------------------------------------------------

def test_a_masked_language_model_refuses_it():
    with pytest.raises(ValueError, match="--doc-mask on .* leave out --doc-mask"):
        check(Config(objective="mlm", doc_mask="on"))
    check(Config(objective="mlm"))


# -----------------------------------------------------------------------------
# Data sets

WIDTH = 96  # of a window: it has room for several conversations
SMALL = dict(n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_hidden=32, seq_len=WIDTH, dtype="fp64",
             micro_batch=2, eval_iters=3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder with the data sets text, chat, and characters, which has no <|endoftext|>."""
    folder = tmp_path_factory.mktemp("documents")
    texts = [f"{a} + {a}? It is {a + a}." for a in range(300)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    lines = []
    for text in texts[:200]:
        question, answer = text.split("? ")
        lines.append(json.dumps({"messages": [{"role": "user", "content": question + "?"},
                                              {"role": "assistant", "content": answer}]}))
    (folder / "chat.jsonl").write_text("\n".join(lines))
    common = ["--out", str(folder)]
    for argv in (["text.jsonl", "--name=text", "--vocab-size=300"],
                 ["text.jsonl", "--name=characters", "--tokenizer=char"],
                 ["chat", "chat.jsonl", "--name=chat", f"--tokenizer={folder}/text", f"--seq-len={WIDTH}"],
                 ["text.jsonl", "--name=more", f"--tokenizer={folder}/chat", "--val-fraction=0.2"]):
        argv = [str(folder / word) if word.endswith(".jsonl") else word for word in argv]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert not prepare.main([*argv, *common])
    return folder


def opened(folder, names, doc_mask="auto"):
    """Return the training samples of data sets of a folder."""
    return samples.open_tokens(",".join(str(folder / name) for name in names), "train", WIDTH, 3, doc_mask)


def test_conversations_have_documents_and_text_has_on_demand(data):
    for name, doc_mask, has_documents in [
            ("chat", "auto", True), ("chat", "off", False), ("chat", "on", True), ("text", "auto", False),
            ("text", "on", True), ("characters", "auto", False)]:
        source = opened(data, [name], doc_mask)
        assert source.has_documents == has_documents
        assert samples.settled_doc_mask(str(data / name), doc_mask) == ("on" if has_documents else "off")
    eod = shards.load_meta(data / "chat")["eod"]
    source = opened(data, ["chat"])
    x, _ = source.batch(0, 8)
    for row, places in zip(x.tolist(), source.places(0, x).tolist(), strict=True):
        assert row[0] == eod and row.count(eod) > 2, "several conversations in a window"
        expected = [place for first, end in documents_of(row, eod) for place in range(1, end - first + 1)]
        assert places == expected


def test_a_blend_separates_the_documents_of_its_conversations_alone(data):
    source = opened(data, ["chat", "more"])
    assert source.has_documents and samples.settled_doc_mask(f"{data}/chat,{data}/more", "auto") == "auto"
    x, y = source.batch(5, 24)
    whole = [*range(1, WIDTH + 1)]
    for row, targets, places in zip(x.tolist(), y.tolist(), source.places(5, x).tolist(), strict=True):
        is_chat = IGNORE in targets
        assert (places == whole) != is_chat and row.count(source.parts[0].eod) > 2
    everywhere = opened(data, ["chat", "more"], "on")
    assert torch.equal(everywhere.places(5, x), document_places(x, source.parts[0].eod))


@pytest.mark.parametrize("flags,words", [
    (["--data=synthetic"], "--data synthetic has no documents; leave out --doc-mask"),
    (["--data={}/characters"], "its vocabulary has no <|endoftext|>; leave out --doc-mask")])
def test_data_without_documents_are_refused(flags, words, data, tmp_path):
    flags = [flag.format(data) for flag in flags]
    assert_refused(session(World(), [*flags, "--doc-mask=on", f"--out={tmp_path}/x"]), words)


def test_steps_and_evaluations_see_each_conversation_alone(data):
    """train.py's own step and evaluation, against a loop over the conversations."""
    cfg = Config(**SMALL, data=str(data / "chat"))
    source, val, vocab_size, _ = open_data(cfg)
    mesh = make_mesh(World())
    model, data_parallel, opt = train.build(cfg, mesh, vocab_size, CPU)
    randomize(model)

    def loop(source, n):
        total, count = 0.0, 0
        for x, y in zip(*source.batch(0, n), strict=True):
            for first, end in documents_of(x.tolist(), source.eod):
                total += model(x[None, first:end], y[None, first:end])[0].item()
                count += (y[first:end] != IGNORE).sum().item()
        return total / count

    with torch.no_grad():
        want = loop(source, 6)
        n = 2 * min(cfg.eval_iters, val.n_samples // 2)
        assert train.evaluate(cfg, model, val, 2, CPU) == pytest.approx(loop(val, n), rel=1e-12)
    batches = train.corrupt_targets(train.micro_batches(cfg, mesh, source, 0, 6, CPU))
    assert [len(batch) for batch in batches] == [3, 3, 3], "a spike keeps the documents"
    batches = train.micro_batches(cfg, mesh, source, 0, 6, CPU)
    step = train.Step(cfg, model, data_parallel, opt)
    stats, _ = step(batches, 1, n_trained=train.trained_tokens(source, 0, 6, CPU))
    assert stats.loss.item() == pytest.approx(want, rel=1e-12)


def test_a_graph_reads_the_documents_of_each_step(data, tmp_path):
    """Three steps warm it up, the fourth is captured. The run says that its documents are separate."""
    flags = [flag for flag in TINY if not flag.startswith(("--vocab", "--data", "--seq-len"))]
    flags += [f"--data={data}/chat", f"--seq-len={WIDTH}", "--steps=6"]
    said = session(World(), [*flags, f"--out={tmp_path}/plain"])
    assert said["code"] == 0 and "each document attends to itself alone (--doc-mask)" in said["out"]
    said, seen = graphed_session(World(), [*flags, f"--out={tmp_path}/graph"])
    assert said["code"] == 0 and (seen["captures"], seen["replays"]) == (1, 3), said["err"]
    assert rows(tmp_path / "plain") == rows(tmp_path / "graph")


@pytest.mark.parametrize("name,there,here,refused", [
    ("chat", None, "auto", True),  # a checkpoint from before the flag
    ("chat", None, "off", False), ("text", None, "auto", False), ("text", None, "on", True),
    ("chat", "auto", "on", False), ("chat", "auto", "off", True), ("text", "auto", "off", False),
    ("chat,more", None, "auto", True), ("chat,more", "auto", "auto", False)])
def test_a_resume_goes_on_with_the_same_attention(name, there, here, refused, data):
    """With None the checkpoint does not name the flag."""
    spec = ",".join(str(data / part) for part in name.split(","))
    cfg = Config(**SMALL, data=spec, doc_mask=here)
    before = dataclasses.asdict(cfg)
    before["doc_mask"] = there
    if there is None:
        del before["doc_mask"]
    meta = {"shape": {}, "flags": before, "seed": cfg.seed, "world": 1, "data": "hash"}
    compared = (cfg, "step_1", json.loads(json.dumps(meta)), 1, "hash", 300)
    if not refused:
        assert init_from.changed_flags(*compared) == {}
        return
    with pytest.raises(ValueError, match="--resume-changed doc-mask"):
        init_from.changed_flags(*compared)
    compared = (dataclasses.replace(cfg, resume_changed="doc-mask"), *compared[1:])
    assert list(init_from.changed_flags(*compared)) == ["doc_mask"]
