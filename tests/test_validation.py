"""The validation loss, in whole runs of train.py with dropout: each val_loss is recomputed from the step's
checkpoint and the bytes of the val files, by the model written out in plain tensor operations.
"""
import itertools
import json
import random

import numpy as np
import pytest
import torch
from plain_model import val_loss
from pool import run_ranks
from runs import SHAPE, final, go, rows, same

import prepare
import train
from config import Config
from corpus.samples import Synthetic
from interface.command_line import parse
from parallel import make_mesh

T = 16  # of SHAPE
GPT2 = ["--n-kv-head=2", "--norm=layer", "--mlp=gelu", "--pos=learned", "--bias", "--tied"]
EXPERTS = ["--n-experts=4", "--aux-coef=0.05", "--z-coef=0.01"]
SIGMOID = [*EXPERTS, "--router=sigmoid", "--router-bias-rate=0.01", "--n-shared-experts=1"]
CAPACITY = [*EXPERTS, "--capacity-factor=0.75", "--top-k=1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two data sets of characters with one tokenizer; their val splits are 10 and 7 times T tokens, so that
    the last window lacks the token after its end, and in files of 100 tokens, which windows cross."""
    out = tmp_path_factory.mktemp("val")
    for name, size, how in (("a", 1600, "char"), ("b", 1120, str(out / "a"))):
        (out / f"{name}.txt").write_text("".join(random.Random(size).choices("abcdefghij", k=size)))
        assert prepare.main([str(out / f"{name}.txt"), "--name", name, "--out", str(out), "--tokenizer", how,
                             "--shard-tokens", "100"]) == 0
        meta = json.loads((out / name / "meta.json").read_text())
        assert meta["tokens"]["val"] == size // 10 and len(meta["shards"]["val"]) > 1
    return out


def windows_of_file(folder):
    """Return the windows of the val split, (n, T+1), in the order of the text, read without corpus/."""
    files = sorted(folder.glob("val_*.bin"))
    stream = np.concatenate([np.fromfile(path, "<u2", offset=4096) for path in files])
    n = (len(stream) - 1) // T  # a window needs a token after it
    return [stream[i * T : i * T + T + 1].astype(np.int64) for i in range(n)]


def windows_of(data, folders, vocab, seed):
    """--data -> (windows of validation in order, without end; how many until they repeat)."""
    if data == "synthetic":  # endless: the same rule with the next seed
        pairs = (Synthetic(vocab, T, seed + 1).batch(i, 1) for i in itertools.count())
        return (np.append(x[0], y[0, -1:]) for x, y in pairs), 1 << 40
    a, b = windows_of_file(folders / "a"), windows_of_file(folders / "b")
    assert (len(a), len(b)) == (9, 6)
    if data == "blend":  # equal weights: one of each in turn, until the shorter one is used up
        return (w for pair in zip(itertools.cycle(a), itertools.cycle(b), strict=True) for w in pair), 12
    return itertools.cycle({"a": a, "b": b}[data]), {"a": 9, "b": 6}[data]


RUNS = {  # name: (ranks, data, flags)
    "one-process-every-window": (1, "a", ["--micro-batch=1", "--global-batch=1", "--eval-iters=1000"]),
    "dp2-zero1-ramp": (2, "a", ["--zero=1", "--global-batch=8", "--rampup-batch-size", "4", "4", "16",
                                "--eval-iters=1"]),
    "tp2-gpt2-batch-of-more-than-all": (2, "b", [*GPT2, "--tp=2", "--global-batch=8", "--eval-iters=3"]),
    "pp2-gpt2-synthetic": (2, "synthetic", [*GPT2, "--n-layer=4", "--pp=2", "--pp-chunks=2", "--eval-iters=3",
                                            "--seed=5"]),
    "cp4": (4, "a", ["--cp=4", "--eval-iters=3"]),
    "dp2-tp2-ep4-blend": (4, "blend", [*SIGMOID, "--tp=2", "--ep=4", "--eval-iters=1000"]),
    "tp2-pp2": (4, "b", ["--tp=2", "--pp=2", "--eval-iters=0"]),
    "ep2-capacity-skipped-step": (2, "a", [*CAPACITY, "--ep=2", "--eval-iters=2", "--train-range-to-skip",
                                           "4", "4"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_validation_loss_is_that_of_the_val_split_without_dropout(name, folders, tmp_path):
    n, data, flags = RUNS[name]
    spec = {"blend": f"{folders}/a:0.5,{folders}/b:0.5", "synthetic": data}.get(data, str(folders / data))
    flags = [*SHAPE, f"--data={spec}", "--micro-batch=2", "--global-batch=4", "--dtype=fp64", "--dropout=0.3",
             "--lr=0.03", "--warmup=2", "--no-plot", "--steps=5", "--log-every=5", "--eval-every=2",
             "--save-every=2", "--keep=0", *flags]
    printed, cfg = go(n, tmp_path / "run", base=flags)["out"], parse(flags)
    seen = {row["step"]: row for row in rows(tmp_path / "run")}
    assert list(seen) == [1, 2, 4, 5], "logged: the first, those with an evaluation, the last"
    assert [step for step, row in seen.items() if "val_loss" in row] == [2, 4, 5]
    losses = []
    for step in (2, 4, 5):  # the evaluation is after the step's update, and so is its checkpoint
        weights = final(tmp_path / "run", step)[0]
        batch = cfg.global_batch  # also while --rampup-batch-size trains on less
        windows, available = windows_of(data, folders, cfg.vocab_size, cfg.seed)
        count = batch * max(1, min(cfg.eval_iters, available // batch))
        windows = np.stack(list(itertools.islice(windows, count)))
        losses.append(val_loss(cfg, weights, cfg.vocab_size, windows))
        assert seen[step]["val_loss"] == pytest.approx(losses[-1], rel=1e-12, abs=0)
        assert f"val_loss={losses[-1]:.4f}" in printed
    assert max(losses) - min(losses) > 1e-3 * losses[0], "weights that hardly change show no wrong step"


def test_no_evaluation_without_eval_every_and_one_at_the_end_with_a_large_one(tmp_path):
    base = [*SHAPE, "--data=synthetic", "--micro-batch=1", "--steps=3", "--log-every=1", "--save-every=0",
            "--no-plot", "--eval-iters=1"]
    for every, steps in ((0, []), (100, [3]), (1, [1, 2, 3])):
        go(1, tmp_path / "run", f"--eval-every={every}", base=base)
        assert [row["step"] for row in rows(tmp_path / "run") if "val_loss" in row] == steps


def test_an_evaluation_changes_nothing(tmp_path):
    """Dropout goes on afterwards, and the experts' statistics are those of training: all rows, all bits."""
    base = [*SHAPE, *SIGMOID, "--data=synthetic", "--micro-batch=2", "--dropout=0.2", "--zero=1", "--ep=2",
            "--steps=4", "--log-every=1", "--save-every=4", "--no-plot", "--eval-iters=2"]
    for every in (0, 1):
        go(2, tmp_path / str(every), f"--eval-every={every}", base=base)
    with_losses = rows(tmp_path / "1")
    assert len({row.pop("val_loss") for row in with_losses}) == 4
    assert len({row.pop("val_ppl") for row in with_losses}) == 4
    assert with_losses == rows(tmp_path / "0")
    same(tmp_path / "0", tmp_path / "1", 4)


def losses_of_a_bf16_model(world):
    """Return losses of an evaluation and of a step over 32 micro-batches, and the mean of each alone."""
    cfg = Config(n_layer=1, n_head=2, n_embd=16, ffn_hidden=32, seq_len=T, vocab_size=100, micro_batch=1,
                 dtype="bf16", dropout=0.3, eval_iters=2)
    mesh, source = make_mesh(world), Synthetic(100, T, 1)
    model, data_parallel, opt = train.build(cfg, mesh, 100, world.device)
    with torch.no_grad():
        alone = [model.eval()(*source.batch(i, 1))[0].double().item() / T for i in range(32)]
        got = train.evaluate(cfg, model, source, 16, world.device)
    assert model.training and all(module.training for module in model.modules()), "training goes on"
    model.eval()  # without dropout the step's loss is comparable
    loss = train.Step(cfg, model, data_parallel, opt).gradients([source.batch(i, 1) for i in range(32)], 1)
    return got, loss.item(), sum(alone) / 32


def test_bf16_losses_are_summed_in_fp32():
    (got, loss, want), = run_ranks(1, losses_of_a_bf16_model)
    assert got == pytest.approx(want, rel=1e-6) and loss == pytest.approx(want, rel=1e-6)
