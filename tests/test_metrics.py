"""Every number of metrics.jsonl and experts.jsonl against a computation of its own, in one process; losses,
norms and the experts' loads from the weights of each step's checkpoint."""
import dataclasses
import json
import math
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from faults import with_faults
from pool import run_ranks
from runs import TINY, final, go, rows, session
from safetensors.torch import load_file
from shared import one_process_model, parameters

import plot
import train
from config import Config
from corpus.samples import Synthetic
from interface.command_line import parse
from optim import StepStats
from parallel import make_mesh
from runtime import agree, log, resume, timing, watch
from runtime.launch import World
from runtime.saver import Saver
from skip import Guard

FLAGS = [*[f for f in TINY if "global-batch" not in f], "--global-batch=8", "--dtype=fp64", "--clip=0.05",
         "--min-lr=3e-3", "--decay-steps=4", "--steps=5"]
EXPERTS = ["--n-experts=4", "--top-k=2", "--z-coef=0.01", "--aux-coef=0.5"]
RUNS = {"dp 2": (2, ["--zero=2"]), "tp 2": (2, ["--tp=2"]), "pp 2": (2, ["--pp=2", "--tied"]), "one": (1, []),
        "cp 2": (2, ["--cp=2", "--zero=3"]), "shard 2": (4, ["--zero=2", "--shard=2", "--micro-batch=1"]),
        "moe ep 2": (2, [*EXPERTS, "--ep=2"]), "moe pp 2": (2, [*EXPERTS, "--pp=2"]),
        "moe, capacity": (2, [*EXPERTS, "--capacity-factor=0.75"]),
        "moe, sigmoid": (2, [*EXPERTS, "--router=sigmoid", "--router-bias-rate=0.02", "--zero=1"])}


def routing(cfg, logits, bias):
    """A micro-batch's router logits (n, E) of one layer -> (copies per expert, dropped, aux, z, entropy)."""
    n, E, K = *logits.shape, cfg.top_k
    if cfg.router == "sigmoid":
        scores = torch.sigmoid(logits)
        probs, choice = scores / scores.sum(1, keepdim=True), scores + bias
    else:
        probs = choice = torch.softmax(logits, 1)

    def copies(values):
        return torch.bincount(values.topk(K).indices.flatten(), minlength=E).double()
    capacity = math.ceil(n * K / E * cfg.capacity_factor) if cfg.capacity_factor else n
    aux = E * (copies(probs) / (n * K) * probs.mean(0)).sum().item()
    entropy = -(probs * probs.log()).sum(1).mean().item()
    return (copies(choice), (copies(choice) - capacity).clamp(min=0).sum().item(), aux,
            logits.logsumexp(1).square().mean().item(), entropy)


def plain_step(cfg, weights, number):
    """The step's forward and backward in one process, micro-batch after micro-batch, with full weights
    Return loss, gradients, {layer: its row of experts.jsonl}"""
    model = one_process_model(cfg)
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        t.data.copy_(weights.get(name, t.data))
    seen = {}
    for i, block in model.blocks.items():
        if cfg.n_experts:
            bias = block.moe.router.bias
            block.moe.router.register_forward_hook(
                lambda module, x, out, i=i, bias=bias: seen.setdefault(i, []).append(
                    routing(cfg, out.detach(), bias)))
    source, loss = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed), 0.0
    n, size = cfg.global_batch // cfg.micro_batch, cfg.micro_batch
    for j in range(n):
        out, aux = model(*source.batch((number - 1) * cfg.global_batch + j * size, size))
        ce = out / (cfg.global_batch * cfg.seq_len)
        (ce + aux / n).backward()
        loss += ce.item()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    layers = {}
    for i, batches in seen.items():
        load, dropped, aux, z, entropy = map(sum, zip(*batches, strict=True))
        layers[i] = {"load": (load / load.sum()).tolist(), "dropped": dropped / load.sum().item(),
                     "aux": aux / n, "z": z / n, "entropy": entropy / n}
    return loss, grads, layers, torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()


@pytest.mark.parametrize("name", parameters(RUNS, [
    "tp 2", "pp 2", "moe pp 2", "moe, capacity", "moe, sigmoid"]))
def test_every_logged_number_of_a_step(name, tmp_path):
    n, layout = RUNS[name]
    argv = [*FLAGS, *layout, "--save-every=1", "--keep=0", "--log-layers", "--timers"]
    before = time.time()
    go(n, tmp_path / "run", "--dump-grads", tmp_path / "dump", base=argv)
    cfg, table = parse(argv), rows(tmp_path / "run", ())
    assert [r["step"] for r in table] == [1, 2, 3, 4, 5]
    experts = [json.loads(line) for line in (tmp_path / "run/experts.jsonl").read_text().splitlines()] \
        if cfg.n_experts else []
    for row in table:
        number = row["step"]
        weights = final(tmp_path / "run", number - 1)[0] if number > 1 else {}
        loss, grads, layers, size = plain_step(cfg, weights, number)
        if number == 1:
            check_dump(load_file(tmp_path / "dump"), grads, row)
        check_layers(row, cfg, grads)
        grads = list(grads.values())
        norm = torch.stack([g.norm() for g in grads]).norm().item()
        assert row["loss"] == pytest.approx(loss, rel=1e-10)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-9) and norm > 2 * cfg.clip, "before clipping"
        assert row["param_norm"] == pytest.approx(size, rel=1e-12)
        assert row["num_zeros"] == sum((g == 0).sum().item() for g in grads)
        lr = {1: 0.005, 2: 0.01, 3: (0.01 + 0.003) / 2, 4: 0.003, 5: 0.003}[number]  # warmup 2, cosine 2
        assert row["lr"] == pytest.approx(lr, rel=1e-12)
        assert (row["global_batch"], row["samples"], row["tokens"]) == (8, 8 * number, 8 * number * 16)
        assert (row["skipped"], row["nan_steps"]) == (0, 0)
        assert row.keys().isdisjoint(["skip_reason", "mfu", "loss_scale", "val_loss"])
        assert 0.05 < row["mem_gb"] < 64, "what a process with torch occupies"
        assert before <= row["time"] <= time.time()
        assert row["t_forward"] > 0 and row["t_backward"] > 0
        if n > 1:
            assert 0 < row["step_ms_min"] <= row["step_ms_max"] and row["slowest_rank"] in range(n)
        if cfg.n_experts:
            logged = experts[number - 1]
            assert logged["step"] == number and logged["layers"].keys() == layers.keys() == {"0", "1"}
            for i, want in layers.items():
                for key, value in want.items():
                    assert logged["layers"][i][key] == pytest.approx(value, rel=1e-9), (i, key)
            for key, of in (("aux_loss", "aux"), ("z_loss", "z"), ("dropped", "dropped")):
                assert row[key] == pytest.approx((layers["0"][of] + layers["1"][of]) / 2, rel=1e-9), key
            assert row["expert_load_max"] == pytest.approx(4 * max(max(x["load"]) for x in layers.values()))
            assert (row["dropped"] > 0) == (cfg.capacity_factor > 0)
        check_rates(row, cfg, n)
    assert not cfg.n_experts or "heaviest layer" in (tmp_path / "run/expert_load.txt").read_text()


def check_layers(row, cfg, grads):
    """--log-layers: the norm of each block and of what is in none, before clipping."""
    layers = ["wte", "blocks.0", "blocks.1", "norm"]
    if not cfg.tied:
        layers.append("head")
    logged = {key: value for key, value in row.items() if key.startswith("grad_norm/")}
    assert list(logged) == [f"grad_norm/{layer}" for layer in layers]
    for layer in layers:
        of_layer = [g.norm() for name, g in grads.items() if name.startswith(f"{layer}.")]
        want = torch.stack(of_layer).norm().item()
        assert logged[f"grad_norm/{layer}"] == pytest.approx(want, rel=1e-10), layer
    assert math.hypot(*logged.values()) == pytest.approx(row["grad_norm"], rel=1e-10)


def check_dump(dumped, grads, row):
    """--dump-grads: unclipped gradients of the first step and the weights before it, without padding."""
    assert dumped.keys() == {*grads, *(f"grad/{name}" for name in grads)} | {
        name for name in dumped if name.endswith("router.bias")}
    for name, g in grads.items():
        g = g[:100] if name in ("wte.weight", "head.weight") else g
        error = (dumped[f"grad/{name}"] - g).abs().max().item()
        assert dumped[name].shape == g.shape and error <= 1e-10 * g.abs().max().item(), name
    size = torch.cat([dumped[name].flatten() for name in grads]).norm().item()
    assert size == pytest.approx(row["param_norm"], rel=1e-12)


def check_rates(row, cfg, ranks):
    token = 6 * (2 * (2 * 16 * 16 + 2 * 16 * 8) + 128 * 16)  # attention's matrices, the head
    token += 6 * 2 * 3 * 16 * 32 * (cfg.top_k if cfg.n_experts else 1)  # SwiGLU: three matrices, both layers
    attention = 12 * 2 * 16 * 16  # layers, width, sequence
    per_rank = row["tokens"] / row["step"] / row["ms"] * 1e3 / ranks
    for key, want in (("tok_s_gpu", per_rank), ("tok_s", per_rank * ranks), ("ms_per_sample", row["ms"] / 8),
                      ("tflops", per_rank * (token + attention) / 1e12),
                      ("tflops_causal", per_rank * (token + attention / 2) / 1e12)):
        assert row[key] == pytest.approx(want, rel=1e-9), key
    assert row["ms"] > 0


def layer_norms(out, *flags, ranks=1, faults=(), plan=None):
    """Return {layer: norm} of each row of a run with --log-layers, and its grad_norm."""
    argv = [*FLAGS, f"--out={out}", "--log-layers", *flags]
    results = run_ranks(ranks, with_faults, faults, session, argv, plan)
    assert [result["code"] for result in results] == [0] * ranks, results[0]["err"]
    return [({key: value for key, value in row.items() if key.startswith("grad_norm/")}, row.get("grad_norm"))
            for row in rows(out, ())]


@pytest.fixture(scope="module")
def norms_of_one(tmp_path_factory):
    [(norms, _)] = layer_norms(tmp_path_factory.mktemp("one"), "--steps=1")
    return norms


def check_norms(found, norm, want, tolerance=1e-10):
    assert found == pytest.approx(want, rel=tolerance)
    assert math.hypot(*found.values()) == pytest.approx(norm)


def without_blocks(original, name):
    """layer_of that takes the blocks of each stage for its first."""
    return original("blocks.0.of_a_stage" if name.startswith("blocks.") else name)


def test_norms_of_other_layers_are_found(norms_of_one, tmp_path):
    fault = "runtime.log.layer_of", without_blocks
    [row] = layer_norms(tmp_path, "--steps=1", "--pp=2", ranks=2, faults=[fault])
    with pytest.raises(AssertionError):
        check_norms(*row, norms_of_one)


def test_norms_of_layers_have_no_loss_scale(norms_of_one, tmp_path):
    [row] = layer_norms(tmp_path, "--steps=1", "--dtype=fp16")
    check_norms(*row, norms_of_one, 1e-2)


def test_norms_of_layers_in_steps_that_are_not_taken(tmp_path):
    """In a step that is not finite, the layers whose gradient is not finite are missing."""
    table = layer_norms(tmp_path, "--train-range-to-skip", "2", "2", plan={4: "nan"})
    assert [len(layers) for layers, _ in table] == [5, 0, 5, 4, 5]


# -----------------------------------------------------------------------------
# Rates and times

class Ticks:
    """A Stopwatch whose time is that of the list."""

    def __init__(self, *times):
        self.times = list(times)

    def mark(self):
        return self.times.pop(0)

    def ms(self, begin, end):
        return end - begin


def test_the_clock_means_over_steps_and_leaves_pauses_out():
    clock = timing.Clock(torch.device("cpu"))
    clock.watch = Ticks(0, 10, 13, 20, 25)
    clock.resume()
    clock.steps = 1
    clock.pause()
    clock.resume()  # 3 ms of a save
    clock.steps = 2
    assert clock.per_step()["step"] == (10 + 7) / 2
    assert (clock.steps, clock.samples, clock.spans) == (0, 0, [])
    assert clock.per_step()["step"] == 5, "and goes on from there"


def test_timers_mean_over_steps():
    timers = timing.Clock(torch.device("cpu"))
    timers.watch = Ticks(0, 0, 5, 7, 8, 20, 21, 22, 22)
    timers.resume()
    for phase in ("forward", "backward", "forward"):
        with timers(phase):
            pass
    nothing = dict.fromkeys(("step", *timing.Clock.PHASES), 0.0)
    timers.steps = 2
    assert timers.per_step() == nothing | {"step": 11.0, "forward": 3.0, "backward": 0.5}
    assert timers.per_step() == nothing
    mesh = make_mesh(World())
    keys = log.phase_times(nothing, mesh).keys()
    assert keys == {f"t_{phase}{end}" for end in ("", "_min") for phase in (
        "data", "forward", "backward", "pipeline", "grad_sync", "norm", "optimizer", "param_gather")}
    timers.watch = Ticks(0, 6, 6, 8, 8, 20, 22)
    for phase in ("forward", "pipeline", "backward"):
        with timers(phase):
            pass
    other = iter([[0, 5, 12, 1, 0, 0, 0, 0, 17, 18], [0, -5, -12, -1, 0, 0, 0, 0]])  # of the other stage
    everyone = SimpleNamespace(maximum=lambda own: [max(pair) for pair in zip(own, next(other), strict=True)])
    stages = SimpleNamespace(world=SimpleNamespace(everyone=everyone), pp=SimpleNamespace(size=2))
    row = log.phase_times(timers.per_step(), stages)
    assert row.pop("bubble") == pytest.approx(20 / 18 - 1) and row.keys() == keys
    assert log.format_row({"step": 1, "lr": 0.0, "bubble": 1 / 9, **row}, 1, {}).endswith(
        "ms: data=0.0 forward=5.0-6.0 backward=12.0 pipeline=1.0-2.0 grad_sync=0.0 norm=0.0 optimizer=0.0 "
        "param_gather=0.0 bubble=11.1%")


def test_a_row_after_several_steps_of_a_growing_batch(monkeypatch):
    """ms and rates are means since the row before; loss and norms those of this step."""
    cfg = Config(n_layer=1, lr=0.02, warmup=14)
    state = resume.State(step=7, samples=40, skipped=2, nan_steps=1, vocab_size=99)
    metrics = SimpleNamespace(clock=SimpleNamespace(steps=4, samples=20, per_step=lambda: {"step": 50.0}),
                              stragglers=SimpleNamespace(report=dict), layer_norms=None)
    run = SimpleNamespace(cfg=cfg, world=World(size=3), state=state, mesh=SimpleNamespace(axes=dict),
                          opt=SimpleNamespace(loss_scale=None), guard=SimpleNamespace(reason=None),
                          first_step=1, log_file=None)
    stats = StepStats(*torch.tensor([2.5, 0.75, 9.0, 12.0], dtype=torch.float64))
    monkeypatch.setattr(log, "peak_flops", lambda device: 4e12)
    monkeypatch.setattr(log, "flops_per_token", lambda cfg, vocab: (1000.0, 600.0) if vocab == 99 else None)
    monkeypatch.setattr(log, "peak_resident", lambda: 3 * 2**28)
    row = log.Metrics.row(metrics, run, 6, stats)
    per_rank = 5 * 128 / 50.0 * 1e3 / 3
    assert row == {
        "step": 7, "tokens": 40 * 128, "samples": 40, "global_batch": 6, "lr": 0.01, "skipped": 2,
        "nan_steps": 1, "skip_reason": None, "loss": 2.5, "grad_norm": 0.75, "num_zeros": 9,
        "param_norm": 12.0, "ms": 50.0, "ms_per_sample": 10.0, "tok_s": pytest.approx(3 * per_rank),
        "tok_s_gpu": pytest.approx(per_rank), "tflops": pytest.approx(per_rank * 1000 / 1e12),
        "tflops_causal": pytest.approx(per_rank * 600 / 1e12), "mfu": pytest.approx(per_rank * 1000 / 4e12),
        "mem_gb": 0.75, "mem_gb_min": 0.75}
    counts = {"step", "tokens", "samples", "global_batch", "lr", "skipped", "nan_steps", "skip_reason",
              "mem_gb", "mem_gb_min"}
    metrics.clock.steps = 0
    not_finite = stats._replace(loss=torch.tensor(math.nan).double())
    for given, reason, why, more in (
            (None, None, "range", {}), (not_finite, None, "not finite: loss nan, gradient norm 0.75", {}),
            (stats, "spike: so", "spike: so", {"spike_loss": 2.5, "spike_grad_norm": 0.75})):
        run.guard.reason = reason
        row = log.Metrics.row(metrics, run, 6, given)
        assert row.keys() == counts | more.keys() and row.items() >= {"skip_reason": why, **more}.items()


def test_evaluations_saves_and_comparisons_are_no_part_of_a_step(toy, tmp_path, monkeypatch):
    """Each of them takes 1000 seconds on a clock of the test's own. The watchdog waits for longer."""
    late, real, beat, told, phases = [0.0], time.perf_counter, watch.Watch.heartbeat, [], set()
    monkeypatch.setattr(time, "perf_counter", lambda: real() + late[0])

    def takes_long(f):
        def slow(*args):
            late[0] += 1000.0
            phases.add((f.__name__, told[-1]))
            return f(*args)
        return slow
    for module, name in ((train, "evaluate"), (resume, "save"), (agree, "replica_differences"),
                         (log, "print_sample")):
        monkeypatch.setattr(module, name, takes_long(getattr(module, name)))

    def noted(watchdog, *step):
        beat(watchdog, *step)
        told.append((watchdog.what, watchdog.limit))
    monkeypatch.setattr(watch.Watch, "heartbeat", noted)
    flags = ["--vocab-size=0", f"--data={toy}", "--prompt=a", "--eval-every=2", "--eval-iters=1"]
    got = session(World(), [*TINY, *flags, "--save-every=2", "--check-every=3", "--steps=7",
                            f"--out={tmp_path}"])
    assert got["code"] == 0 and late[0] == 1000 * (4 + 4 + 2 + 4), got["err"]
    longer = {("evaluate", ("evaluation", 1200.0)), ("save", ("save", 1200.0))}  # of --timeout 600
    assert phases >= longer and ("", 600.0) in told
    assert all(0 < r["ms"] < 100e3 for r in rows(tmp_path, ())) and len(rows(tmp_path)) == 7


# -----------------------------------------------------------------------------
# Which steps, which batch, which words

def test_the_first_the_last_and_each_evaluation_is_logged(tmp_path):
    flags = ["--log-every=3", "--eval-every=4", "--eval-iters=1", "--steps=10"]
    go(1, tmp_path, *flags)
    table = rows(tmp_path)
    assert [r["step"] for r in table] == [1, 3, 4, 6, 8, 9, 10]
    assert [r["step"] for r in table if "val_loss" in r] == [4, 8, 10]
    go(1, tmp_path / "plain", "--log-every=4", "--steps=6")
    assert [r["step"] for r in rows(tmp_path / "plain")] == [1, 4, 6]


@pytest.mark.parametrize("layout,batch", [([], 6), (["--tp=2"], 2)], ids=str)
def test_the_default_batch_is_a_micro_batch_per_replica(layout, batch, tmp_path):
    base, n = [f for f in TINY if "global-batch" not in f], 3 if batch == 6 else 2
    got = go(n, tmp_path, *layout, "--steps=2", base=base)
    assert [s["first"] for s in got["steps"]] == [0, batch]
    assert [(r["global_batch"], r["samples"], r["tokens"]) for r in rows(tmp_path)] == \
        [(batch, batch, 16 * batch), (batch, 2 * batch, 32 * batch)]
    assert f"\n  {batch} x 16 tokens per step" in got["out"] and f"dp {batch // 2} tp" in got["out"]
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["world"], saved["dp"], saved["vocab_size_used"]) == (n, batch // 2, 100)


@pytest.mark.parametrize("layout", [["--tp=2"], [], ["--pp=2"],
                                    [*EXPERTS, "--capacity-factor=1", "--ep=2"]], ids=str)
def test_the_printed_traffic_is_as_predicted(layout, tmp_path):
    """Of the first step alone: what was sent before it, and later, is not in it."""
    got = go(2, tmp_path, *layout, "--steps=3")
    (table,) = re.findall(r"^comm per step.*measured:\n((?:  .*\n)+)", got["out"], re.M)
    pairs = [re.findall(r"([\d.]+ M?B)(?: /|$)", line) for line in table.splitlines()]
    assert pairs and all(a == b and float(a.split()[0]) > 0 for a, b in pairs), (
        "cost/traffic.py predicts other bytes than the ranks sent. The first number of an axis is the "
        f"prediction, the second was measured:\n{table}")


def test_experts_jsonl_of_a_resumed_run_has_each_step_once(tmp_path):
    for steps in (3, 2, 5):
        start = f"--resume={tmp_path}/step_000002" if steps == 5 else "--resume=auto"
        go(1, tmp_path, *EXPERTS, f"--steps={steps}", "--save-every=2", "--keep=0", start)
    assert [json.loads(x)["step"] for x in (tmp_path / "experts.jsonl").read_text().splitlines()] == \
        [r["step"] for r in rows(tmp_path)] == [1, 2, 3, 4, 5]


def test_the_printed_line():
    row = dict(step=12, loss=2.34567, val_loss=2.5, lr=1.5e-3, grad_norm=0.98765, ms=12.34, tok_s=4000.4,
               tok_s_gpu=2000.2, aux_loss=1.0321, expert_load_max=1.756, dropped=0.0123, mfu=0.4321,
               tflops=101.23, loss_scale=65536.0, val_ppl=12.18249, tokens=778240, left=62, batch=32)
    assert log.format_row(row, 99, {}) == (
        "step=12/99 loss=2.3457 lr=1.50e-03 gnorm=0.988 dt=12.3ms tok/s=4000 tflops=101.2 mfu=43.2% "
        "scale=65536 tokens=778.2k left=1:02 batch=32 val_loss=2.5000 val_ppl=12.182\n"
        "  aux=1.032 load_max=1.76 dropped=1.2%")
    assert log.format_row(dict(step=3, lr=0.0, skipped=2, nan_steps=0, skip_reason="range", t_data=1.25,
                               t_data_min=1.25), 9, {}) == (
        "step=3/9 lr=0.00e+00 (range) skipped=2\n  ms: data=1.2")


def test_columns_align_and_only_a_terminal_gets_colours(tmp_path, monkeypatch, capsys):
    """tflops of a CPU would be 0.0. batch= stands there while the batch grows."""
    config = {"steps": 100, "rampup_batch_size": [4, 4, 8], "global_batch": 8}
    run_log = log.Log(tmp_path, {**config, "machine": {"device": "NVIDIA H200"}})
    common = dict(lr=0.1, tflops=9.5, tokens=10)
    run_log.row(step=1, loss=2.0, grad_norm=10.0, val_loss=2.5, global_batch=4, **common)
    run_log.row(step=20, loss=1.5, grad_norm=2.0, val_loss=800.0, global_batch=8, **common)
    run_log.row(step=99, skip_reason="range", global_batch=8, **common)
    assert capsys.readouterr().out.splitlines() == [
        "step=1/100 loss=2.0000   lr=1.00e-01 gnorm=10.000 tflops=9.5 tokens=10 batch=4 val_loss=2.5000 "
        "val_ppl=12.182",
        "step=20/100 loss=1.5000  lr=1.00e-01 gnorm=2.000  tflops=9.5 tokens=10         val_loss=800.0000 "
        "val_ppl=1.0142e+304",
        "step=99/100              lr=1.00e-01              tflops=9.5 tokens=10 (range)"]
    assert [r.get("val_ppl", 0) for r in rows(tmp_path)] == [math.exp(2.5), math.exp(700), 0]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    log.Log(tmp_path, config).row(step=1, loss=2.0, val_loss=2.5, global_batch=8, tflops=0.1)
    assert capsys.readouterr().out == (
        "step=1/100 \x1b[36mloss=2.0000\x1b[0m   \x1b[33mval_loss=2.5000\x1b[0m val_ppl=12.182\n")


def test_expert_loads_are_drawn():
    bars = plot.load_bars({0: {"load": [0.5, 0.25, 0.25]}, 1: {"load": [0.0, 0.75, 0.25]}}, width=10)
    assert bars.splitlines() == [
        "expert load, 1.00 is balanced", "expert   0 #####      0.75  (heaviest layer 1.50)",
        "expert   1 ########## 1.50  (heaviest layer 2.25)",
        "expert   2 #####      0.75  (heaviest layer 0.75)"]


# -----------------------------------------------------------------------------
# The state that a checkpoint holds

def counts_after_a_resume(world, folder):
    """Save a State of odd numbers, load it into a new model -> both."""
    cfg = Config(n_layer=1, n_embd=16, ffn_hidden=16, seq_len=8, vocab_size=50)
    mesh, state = make_mesh(world), resume.State(7, 28, 3, 2, "d", [2, 3, 9, 9], [[1.5, 0.5]], 5,
                                                best={"step": 5, "val_loss": 1.25})
    model, data_parallel, opt = train.build(cfg, mesh, 50, world.device)
    opt.adam.step_count.fill_(5)
    saver = Saver(folder, world.everyone)
    resume.save(cfg, mesh, data_parallel, opt, saver, state)
    assert saver.wait()
    model, data_parallel, opt = train.build(cfg, mesh, 50, world.device)
    loaded = resume.load(cfg, data_parallel, opt, folder / "step_000007", "d")
    guard = Guard(cfg, world, loaded)
    guard.refused_flags = [(8, torch.ones(()))]
    guard.count_refused()
    return state, loaded, opt.adam.step_count.item(), (loaded.streak, loaded.nan_steps)


def test_every_counter_survives_a_resume(tmp_path):
    for state, loaded, t, after in run_ranks(1, counts_after_a_resume, tmp_path):
        assert t == 5 and after == (6, 3)
        assert dataclasses.replace(loaded, streak=5, nan_steps=2) == state
