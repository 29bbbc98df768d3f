"""Sampling: from logits to a token exactly, the same text in every layout, sample.py's flags and weights."""
import functools
import json
import math
import re
import shutil

import pytest
import torch
from pool import run_ranks
from runs import TINY, called, chars, final, go, hash_of, model_of, refused, session

import checkpoint
import pipeline
import sample
import train
from config import Config
from corpus import tokenizer
from parallel import make_mesh
from runtime.launch import World

FLAT = dict(n_layer=4, n_head=4, n_kv_head=2, n_embd=16, ffn_hidden=24, seq_len=8, micro_batch=2,
            dtype="fp64", vocab_size=100, dropout=0.3)  # of which generate() must see nothing


@pytest.fixture
def drawn(monkeypatch):
    """Return [(probabilities, number, generator)] of the draws; each takes the likeliest."""
    seen = []

    def multinomial(p, n, generator):
        seen.append((p, n, generator))
        return p.argmax().view(1)
    monkeypatch.setattr(torch, "multinomial", multinomial)
    return seen


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, None, 1, 4, 11, 12, 500])
def test_a_token_is_drawn_from_the_softmax_of_the_k_largest(temperature, top_k, drawn):
    logits, rng = torch.randn(12, generator=torch.Generator().manual_seed(1)), object()
    token = pipeline.sample_token(logits.clone(), temperature, top_k, rng)
    ((p, n, generator),) = drawn
    kept = logits.argsort(descending=True)[:top_k or 12]
    want = torch.zeros(12)
    want[kept] = torch.softmax(logits[kept] / temperature, 0)
    torch.testing.assert_close(p, want)
    assert (p > 0).sum() == min(top_k or 12, 12) and (n, generator) == (1, rng) and token == logits.argmax()


def test_temperature_0_takes_the_likeliest_and_draws_nothing(drawn):
    for k in (0, 1, 7):
        assert pipeline.sample_token(torch.tensor([0.5, 3.0, -1.0, 2.9]), 0.0, k, None) == 1
    assert drawn == []


def texts(world, flags):
    """Return the tokens that this rank gets, greedy and drawn, past the end of the window."""
    cfg = Config(**dict(FLAT, **flags))
    model, _, _ = train.build(cfg, make_mesh(world, cfg.tp, cfg.pp, cfg.ep, cp=cfg.cp), 100,
                              world.device)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.ndim > 1 else 1)  # else every token is as likely as any other
    prompt = [(7 * i + 3) % 100 for i in range(11)]
    model.train()
    out = []
    for n, how in (11, dict(temperature=0)), (3, dict(temperature=0.9, top_k=20, seed=5)), (1, dict(seed=6)):
        out.append(pipeline.generate(model, prompt[:n], 9, **how))
        assert model.training and out[-1][:n] == prompt[:n]
    return out


FAMILIES = {"llama": {}, "gpt2": dict(norm="layer", mlp="gelu", pos="learned", bias=True, tied=True),
            "moe": dict(n_experts=4, top_k=2), "qwen3": dict(qk_norm="head", head_dim=6)}


@functools.cache
def texts_of_one_rank(family):
    (want,) = run_ranks(1, texts, FAMILIES[family])
    return want


@pytest.mark.parametrize("family,n,layout", [
    ("llama", 2, dict(tp=2)), ("gpt2", 4, dict(tp=2, pp=2)), ("moe", 2, dict(ep=2)),
    ("llama", 2, dict(pp=2, pp_chunks=2)), ("qwen3", 4, dict(tp=4)),
    ("gpt2", 2, dict(cp=2)), ("moe", 4, dict(cp=2, tp=2, ep=4))], ids=str)
def test_every_rank_of_every_layout_writes_the_same_text(family, n, layout):
    want = texts_of_one_rank(family)
    assert [len(t) for t in want] == [20, 12, 10] and max(map(max, want)) < 100
    assert all(len(set(drawn)) > 5 for drawn in want[1:])
    for got in run_ranks(n, texts, dict(FAMILIES[family], **layout)):
        assert got == want


def test_a_window_that_is_full_goes_on_with_its_last_half(monkeypatch):
    """What the model is given, token by token: the prompt, then one new token at its own position."""
    given = []

    def next_logits(model, tokens, cache):
        given.append((tokens[0].tolist(), cache.length))
        cache.length += tokens.size(1)
        return torch.nn.functional.one_hot(torch.tensor(len(given)), 100).float()
    monkeypatch.setattr("pipeline.next_logits", next_logits)
    model = train.build(Config(**FLAT), make_mesh(World()), 100, torch.device("cpu"))[0]
    assert pipeline.generate(model, list(range(50, 56)), 6, 0) == [*range(50, 56), 1, 2, 3, 4, 5, 6]
    assert given == [
        ([50, 51, 52, 53, 54, 55], 0), ([1], 6), ([2], 7), ([55, 1, 2, 3], 0), ([4], 4), ([5], 5)]
    given.clear()
    assert pipeline.generate(model, list(range(50, 61)), 2, 0) == [*range(50, 61), 1, 2]
    assert given == [([53, 54, 55, 56, 57, 58, 59, 60], 0), ([58, 59, 60, 1], 0)]


# -----------------------------------------------------------------------------
# sample.py, and the samples of a run

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    chars(folder)
    base = [f for f in TINY if "vocab" not in f]
    go(1, folder / "run", f"--data={folder / 'toy'}", "--steps=2", "--save-every=1", "--seed=7",
       "--dropout=0.3", base=base)
    return folder / "run"


def all_sampled(monkeypatch, *argv):
    seen, original = [], sample.new_ids

    def recorded(model, prompt, flags):
        seen.append((model, (prompt, flags.max_new_tokens, flags.temperature, flags.top_k, flags.seed)))
        return original(model, prompt, flags)
    with monkeypatch.context() as patch:
        patch.setattr(sample, "new_ids", recorded)
        return called(sample.main, argv)["out"], seen


def test_sample_py_passes_its_flags_on(run, monkeypatch):
    words = tokenizer.load(run)
    text, ((_, args),) = all_sampled(monkeypatch, run, "--prompt", "ab ", "--max-new-tokens", 7,
                                     "--temperature", 0.5, "--top-k", 3, "--seed", 11)
    assert args == (words.encode("ab "), 7, 0.5, 3, 11)
    assert text.startswith("ab ") and len(text) == 3 + 7 + 1
    assert all_sampled(monkeypatch, run)[1][0][1] == (words.encode("\n"), 200, 0.8, 50, 1337)


def test_a_model_of_experts_with_a_capacity_drops_no_row_where_text_is_made(tmp_path):
    """In training an expert takes one row of two tokens here. One read is then other logits than 16 reads."""
    go(1, tmp_path / "run", "--steps=1", "--save-every=1", "--n-experts=4", "--capacity-factor=0.5")
    model = model_of(tmp_path / "run")
    tokens = torch.arange(16).unsqueeze(0) * 7 % 100
    cache = pipeline.Cache()
    for i in range(16):
        one_by_one = pipeline.next_logits(model, tokens[:, i:i + 1], cache)
    at_once = pipeline.next_logits(model, tokens, pipeline.Cache())
    torch.testing.assert_close(one_by_one, at_once)
    assert sample.read_run(tmp_path / "run")[0].capacity_factor == 0.5 and model.cfg.capacity_factor == 0


def test_sample_py_draws_several_samples_of_several_prompts(run, monkeypatch):
    """The model is read once. Each sample is what a call with its own prompt and seed gives."""
    flags = [run, "--max-new-tokens", 9, "--temperature", 2.0]
    text, seen = all_sampled(monkeypatch, *flags, "--prompt", "ab ", "--prompt=egg", "--n", 2, "--seed", 5)
    assert len({id(model) for model, _ in seen}) == 1 and len(seen) == 4
    pairs = [("ab ", 5), ("ab ", 6), ("egg", 5), ("egg", 6)]
    alone = [all_sampled(monkeypatch, *flags, f"--prompt={prompt}", f"--seed={seed}")[0]
             for prompt, seed in pairs]
    assert text == "".join(f"--- sample {i} of 4, --seed {seed}\n{one}"
                           for i, ((_, seed), one) in enumerate(zip(pairs, alone, strict=True), 1))
    assert len(set(alone)) == 4


def test_sample_py_reads_the_newest_checkpoint_or_the_one_that_is_named(run):
    for path, step in ((run, 2), (run / "step_000001", 1)):
        cfg, vocab_size, weights, *_ = sample.read_run(path)
        want, _ = final(run, step)
        for name, p in sample.load_model(cfg, vocab_size, weights).named_parameters():
            assert torch.equal(p, want[name]), (path, name)
    saved = json.loads((run / "config.json").read_text())
    assert vocab_size == saved["vocab_size_used"] == tokenizer.load(run).n_vocab
    assert (cfg.n_layer, cfg.seq_len, cfg.n_head) == (2, 16, 2)


def test_sample_py_takes_the_lowest_validation_loss(run, tmp_path):
    for step in (1, 2):
        meta = {"best": {"step": 1, "val_loss": 2.5}, "shape": json.loads((run / "config.json").read_text())}
        checkpoint.save(tmp_path, step, [("w", torch.ones(2), (2,), (0,))], meta)
    shutil.copy(run / "config.json", tmp_path)
    assert sample.read_run(tmp_path)[2].path.name == "step_000001"
    (tmp_path / "step_000001" / "index.json").write_text("{}")
    with pytest.raises(ValueError, match="step_000001 was damaged"):
        sample.read_run(tmp_path)
    assert sample.read_run(tmp_path / "step_000002")[2].path.name == "step_000002"
    shutil.rmtree(tmp_path / "step_000001")  # then the newest
    assert sample.read_run(tmp_path)[2].path.name == "step_000002"


def scores(*argv):
    return [json.loads(line) for line in called(sample.main, argv)["out"].splitlines()]


def test_score_predicts_each_token_once(run, tmp_path):
    """Against a loop over the tokens, each alone from its context: half a window of it, or all before it."""
    text = "ab egg cab bead fed a face cafe deaf abba\n"[:-1]
    (tmp_path / "one.txt").write_text(text)
    lines = [json.dumps({"text": t}) + "\n" for t in (text, "a", "", text[:9])]
    (tmp_path / "docs.jsonl").write_text("".join(lines))
    model, ids = model_of(run), tokenizer.load(run).encode(text)
    T, want = model.cfg.seq_len, []
    for j in range(1, len(ids)):
        # The first window ends after T inputs, each further one T/2 later, the last one with the document
        end = next((e for e in range(T, len(ids) - 1, T // 2) if j <= e), len(ids) - 1)
        context = ids[max(0, end - T):j]
        assert min(j, T // 2) <= len(context) <= T
        with torch.no_grad():
            logits = model(torch.tensor([context]))[0][-1, :model.vocab_size].float()
        want.append(-torch.log_softmax(logits, 0)[ids[j]].item())
    assert len(want) > 2 * T
    found = scores(run, "--score", tmp_path / "docs.jsonl")
    for row, losses in zip(found, (want, [], [], want[:8]), strict=True):
        assert row["tokens"] == len(losses)
        assert row["loss"] == (pytest.approx(sum(losses) / len(losses), rel=1e-6) if losses else None)
        assert row["perplexity"] == (math.exp(row["loss"]) if losses else None)
    assert scores(run, "--score", tmp_path / "one.txt") == found[:1]


def test_score_starts_a_document_after_end_of_document(tmp_path, monkeypatch):
    (tmp_path / "one.txt").write_text("to be or not to be")
    words = tokenizer.train_bpe(["to be or not to be"], 260)
    seen = []
    monkeypatch.setattr(sample, "total_loss", lambda model, ids: seen.append(ids) or 0.0)
    sample.print_scores(None, words, sample.Flags("run", score=str(tmp_path / "one.txt")))
    assert seen == [[words.eod, *words.encode("to be or not to be")]]


def test_wrong_inputs_are_one_line(run, tmp_path):
    (tmp_path / "foreign.txt").write_text("ab \u00e9")
    for file, words in ("none", "is not a file"), ("foreign", "U+00E9"):
        refused(sample.main, [run, "--score", tmp_path / f"{file}.txt"], words)
    refused(sample.main, [run, "--score", tmp_path, "--n=5", "--top-k=2"], "does not read --n, --top-k")
    refused(sample.main, [run, "--score", tmp_path, "--prompt=a"], "prompt does not read --score")
    go(1, tmp_path / "run", "--data=synthetic", "--steps=1", "--save-every=1", base=TINY)
    refused(sample.main, [tmp_path / "run", "--prompt", "a"], "no tokenizer.json", "--data data/stdlib")
    tokenizer.train_char(["one line"]).save(tmp_path / "run/tokenizer.json")
    refused(sample.main, [tmp_path / "run", "--prompt", "a"], "the character 'a'")
    sample.main([str(tmp_path / "run"), "--max-new-tokens=1"])  # begins with the first character it has


@pytest.mark.parametrize("more", [["--train-range-to-skip", "3", "4"],  # read and dropped
                                  ["--rampup-batch-size", "4", "4", "8"], []], ids=str)
def test_step_prints_what_each_rank_read(more, run, tmp_path, capsys):
    flags = [f for f in TINY if "vocab" not in f and "batch" not in f]
    flags += [f"--data={run.parent / 'toy'}", f"--out={tmp_path}/run", "--steps=4", "--save-every=4",
              "--micro-batch=2", "--global-batch=8", "--tp=2", *more]
    ranks = run_ranks(4, session, flags)
    sample.main([str(tmp_path / "run"), "--step=4"])
    printed = capsys.readouterr().out
    cfg, _ = sample.read_run_config(tmp_path / "run/config.json")
    source, words = sample.open_data(cfg)[0], tokenizer.load(run)
    read = [[], []]
    for number, rank, within in re.findall(r"--- sample (\d+): rank (\d) of dp, micro-batch (\d)\n", printed):
        x, _ = source.batch(int(number), 1)
        if int(number) % 2 == 0:  # a micro-batch of two begins
            read[int(rank)] += source.batch(int(number), 2)
        assert f"micro-batch {within}\n{words.decode(x[0].tolist())}\n" in printed
        assert int(within) == len(read[int(rank)]) // 2 - 1
    assert [hash_of(batches) for batches in read] == [rank["steps"][3]["data"] for rank in ranks[::2]]


def test_the_samples_of_a_run_are_drawn_with_its_seed(run, capsys, monkeypatch):
    """--prompt: 100 tokens at temperature 0.8 among the 50 likeliest, printed by rank 0 alone."""
    words = tokenizer.load(run)
    seen = []
    monkeypatch.setattr(train.log, "generate",
                        lambda model, ids, **how: seen.append(dict(how, ids=ids)) or ids)
    for rank in 0, 1:
        model = object.__new__(train.GPT)
        object.__setattr__(model, "mesh", make_mesh(World(rank=rank, size=2), groups=False))
        train.log.print_sample(model, words, "bead", 7)
    assert seen == 2 * [dict(ids=words.encode("bead"), max_new_tokens=100, temperature=0.8, top_k=50, seed=7)]
    assert capsys.readouterr().out == "--- bead\n---\n"
