"""What plan.py, plot.py and a run print is, word for word and number for number, what printed.txt holds.

A printed number is easily another (a factor, a column, a condition), and a reader does not see it. So a
change of what is printed must be intended. If it is, write the file again and read its diff:

    python tests/test_printed.py --write
"""
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import golden
import torch

import plan
import plot
from config import Config, Outcome
from cost.meshes import rank_mesh
from cost.plan_tables import draw_schedule
from interface import checkpoint_report
from optim import StepStats
from parallel import make_mesh
from runtime import ending, log, timing
from runtime.launch import World
from skip import Ranges

os.environ["COLUMNS"] = "100"  # the terminal in which the lines are folded
STORED = Path(__file__).with_name("printed.txt")


def said_by(function, *args, **named):
    """Return what a call prints on stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(*args, **named)
    return out.getvalue()


# -----------------------------------------------------------------------------
# plan.py

GPT = "gpt2 --vocab-size 50257"
LLAMA = "llama-7b --n-layer 8"
PLANS = [
    "tiny --data synthetic",
    "tiny --data none --objective mlm --gpus 2 --cp 2 --gpu h100 --lr-schedule wsd --steps 1000",
    f"{GPT} --n-layer 8 --gpus 8 --tp 2 --pp 2 --pp-chunks 2 --zero 1 --micro-batch 4 --global-batch 64 "
    "--tokens 1e9 --rampup-batch-size 16 16 100000",
    f"{GPT} --n-layer 4 --gpus 4 --pp 4 --global-batch 240 --micro-batch 8 --tokens 2e9 --zero 1",
    "tiny-moe --data synthetic --gpus 16 --ep 16 --n-experts 16 --ep-slack 1.2 --dtype bf16 --gpu a100-40",
    f"{LLAMA} --gpus 32 --tp 16 --n-head 32 --n-kv-head 8 --micro-batch 16 --recompute selective",
    f"{LLAMA} --n-embd 8192 --ffn-hidden 32768 --gpu a100-40",
    f"{LLAMA} --gpus 64 --cp 16 --seq-len 32768 --dtype bf16 --zero 3",
    "tiny --data synthetic --gpus 2 --search --global-batch 4 --tokens 1e9",
    "tiny-moe --data synthetic --gpus 2 --search --n-layer 1 --n-experts 2 --global-batch 2",
    "dense-210m --n-layer 4 --zero 1 --micro-batch 8 --global-batch 8 --scaling 1,8,64",
    "moe-4b --n-layer 4 --ep 4 --zero 1 --global-batch 32 --micro-batch 8 --scaling 4,8,16 --gpu a100-40",
    "moe-4b --gpus 4 --ep 4 --zero 1",
    "moe-4b --n-layer 4 --zero 1 --micro-batch 8 --global-batch 8 --scaling 1,2",
    "moe-4b --n-layer 2 --gpus 2 --micro-batch 8 --global-batch 16 --search"]


def plan_pages():
    pages = {}
    for line in PLANS:
        pages[f"plan.py {line}"] = said_by(plan.main, line.split())
    for shape in ((2, 1, 4), (3, 2, 3), (4, 2, 8), (4, 1, 12)):
        pages[f"schedule of {shape}"] = "\n".join(draw_schedule(*shape))
    pages["batches of a ramp"] = "\n".join(
        f"{args}: {dict(plan.batch_schedule(*args))}"
        for args in ((1000, 64), (1000, 64, (16, 16, 600)), (500, 64, (16, 16, 600)), (97, 64, (32, 32, 96))))
    experts = Config(n_layer=4, n_experts=6, seq_len=4096, n_head=6, global_batch=12)
    dense = Config(n_layer=3, micro_batch=2, n_embd=192, cp=2, n_head=3)
    layouts = [*plan.layouts(experts, 6, "h200"), *plan.layouts(dense, 4, "a100-40")]
    rows = [[str(getattr(cfg, name)) for name in plan.LAYOUT] for cfg in layouts]
    pages[f"layouts ({' '.join(plan.LAYOUT)})"] = "\n".join(" ".join(row) for row in rows[::7])
    return pages


# -----------------------------------------------------------------------------
# plot.py

class Plotext(ModuleType):
    """Stands in the place of plotext, whose drawings vary with its version: it writes down each call."""

    def __init__(self):
        super().__init__("plotext")
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **named):
            self.calls.append(f"{name}{args}{named or ''}")
            return "<drawing>"
        return call


def drawn(function, *args, **named):
    """Return the calls of plotext in a call, and what it returns."""
    plotext = Plotext()
    with mock.patch.dict(sys.modules, plotext=plotext):
        result = function(*args, **named)
    return "\n".join([*plotext.calls, f"-> {result!r}"])


def plot_pages(folder):
    values = [(1, 2.0), (2, -1.0), (3, 0.5)]
    pages = {"plot.draw": drawn(plot.draw, "loss", [("loss", "", values), ("val_loss", "x", values[:1]),
                                                    ("b loss", "b", values), ("b val", "B", [])]),
             "plot.draw --log": drawn(plot.draw, "lr", [("lr", "", values)], (40, 10), log=True),
             "plot.draw of nothing": drawn(plot.draw, "lr", [("lr", "", [(1, 0.0)])], log=True)}
    rows = [{"step": 5, "loss": 1.5, "ok": True}, {"step": 10, "loss": 1e290}, {"step": 15, "loss": -1e289},
            {"step": 10**15, "loss": 2}, {"step": 10**15 + 1, "loss": 2}, {"step": 20, "loss": "x"}]
    pages["plot.points"] = "\n".join(str(plot.points(rows, *args)) for args in (
        ("loss",), ("loss", (5, 15)), ("loss", (6, 14)), ("ok",), ("lr",)))
    bars = {"0": {"load": [0.1, 0.2, 0.7, 0.0]}, "1": {"load": [0.3, 0.2, 0.1, 0.4]}}
    even = {"0": {"load": [0.25] * 4}}
    pages["plot.load_bars"] = "\n".join([plot.load_bars(bars), plot.load_bars(even, 10)])

    run = folder / "run"
    run.mkdir()
    rows = [{"step": i, "loss": 3 - i / 10, "ms": 2.0 * i, **({"val_loss": 2.5} if i == 4 else {})}
            for i in range(1, 6)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pages["plot.at_end --plot"] = drawn(said_by, plot.at_end, run, bars, True)
    pages["plot.at_end --no-plot"] = drawn(said_by, plot.at_end, run, None, False).splitlines()[-1]
    pages["plot.at_end, its files"] = "\n".join(
        f"{path.name}: {path.read_text()!r}" for path in sorted(run.glob("*.txt")))

    flags = {"preset": "gpt2", "world": 4, "steps": 5, "beta1": 0.8, "bias": False, "out": "x",
             "resume": "auto"}
    (run / "config.json").write_text(json.dumps(flags))
    pages["plot.describe"] = plot.describe(run)
    long = folder / ("a" * 42)
    long.mkdir()
    (long / "step_000030").mkdir()
    pages["plot.describe, without files"] = plot.describe(long)
    (folder / ("b" * 41)).mkdir()
    pages["plot.describe, no checkpoint"] = plot.describe(folder / ("b" * 41))
    pages["plot.last_value"] = " ".join(plot.last_value([{"step": 1, "x": x}], "x")
                                        for x in (1.234567, 1e9, "a"))
    return pages


# -----------------------------------------------------------------------------
# A run

def run_pages():
    row = {"step": 20, "lr": 0.00123, "loss": 2.34567, "val_loss": 2.5, "grad_norm": 1.23456, "ms": 12.34,
           "tok_s": 12345.6, "tok_s_gpu": 6172.8, "mem_gb": 1.0, "mfu": 0.4567, "aux_loss": 1.01234,
           "expert_load_max": 1.567, "dropped": 0.0123, "t_forward": 4.56, "t_backward": 7.89,
           "bubble": 0.125, "skipped": 3, "nan_steps": 2, "skip_reason": "spike: loss"}
    bare = {"step": 1, "lr": 1.0, "skipped": 0, "nan_steps": 0, "skip_reason": None}
    pages = {"a row": log.format_row(row, on_gpus=True), "a bare row": log.format_row(bare),
             "a row of graphs": log.format_row({**bare, "graph_share": 1.0, "redone_share": 0.0}),
             "a row with other steps": log.format_row({**bare, "graph_share": 0.875, "redone_share": 0.1}),
             "a row with the time left": log.format_row({**row, "tokens": 1234567}, 400, 4567.8, True),
             "a row of one GPU": log.format_row({**bare, "ms": 12.34, "tok_s": 9.0, "tok_s_gpu": 9.0,
                                                 "mem_gb": 1.0}, on_gpus=True),
             "a row of a CPU": log.format_row({**bare, "ms": 3.0, "tok_s": 9.0, "tok_s_gpu": 3.0,
                                              "mem_gb": 1.0}),
             "traffic": said_by(log.report_traffic, {"tp": 1234567.0, "world": 64.0},
                                {"tp": 1.2e6, "world": 64}) + said_by(log.report_traffic, {}, {})}

    stats = StepStats(*torch.tensor([2.5, 0.5, 3.0, 7.0], dtype=torch.float64))
    result = log.StepResult(64, 1e-3, stats, None)
    for title, change in (("taken", {}), ("refused", {"refusal": "spike"}), ("in a range", {"stats": None}),
                          ("nan", {"stats": StepStats(*torch.tensor([2.5, float("nan"), 0.0, 0.0]))}),
                          ("inf", {"stats": StepStats(*torch.tensor([float("inf"), 1.0, 0.0, 0.0]))})):
        pages[f"statistics of a step {title}"] = str(log.step_statistics(result._replace(**change)))

    cfg = Config(seq_len=64, n_layer=2)
    with mock.patch.object(log, "peak_flops", lambda device: 1e12):
        pages["rates"] = json.dumps(golden.plain(log.rates(cfg, World(size=4), 32, 50.0, 256)))
    pages["rates of a CPU"] = json.dumps(golden.plain(log.rates(cfg, World(), 32.5, 50.0, 256)))
    layers = {"0": {"load": [0.5, 0.25, 0.25], "aux": 1.0, "z": 2.0, "dropped": 0.25},
              "2": {"load": [0.2, 0.2, 0.6], "aux": 1.5, "z": 4.0, "dropped": 0.0}}
    pages["numbers of the experts"] = str(golden.plain(log.expert_metrics(layers)))
    pages.update(clock_pages(cfg))
    pages.update(node_pages())
    return pages


def clock_pages(cfg):
    """A row of metrics.jsonl and the times of phases, on a clock that ticks 1, 2, 3 ... seconds."""
    ticks = iter(range(1000))
    device = torch.device("cpu")
    with mock.patch("time.perf_counter", lambda: next(ticks) ** 2):
        clock = timing.Clock(device)
        for samples in (8, 12):
            clock.count(samples)
        clock.pause()
        clock.resume()
        state = SimpleNamespace(step=7, samples=99, skipped=1, nan_steps=2)
        result = log.StepResult(12, 1e-3, None, None)
        gpu = World(device=torch.device("cuda"))
        with mock.patch.object(log, "peak_resident", lambda: 2**29), \
                mock.patch.object(log, "peak_memory", lambda device: (2**29, 2**30)), \
                mock.patch.object(log, "bytes_allocated", lambda: 2**28):
            rows = [log.metrics_row(cfg, world, state, result, clock, 256)
                    for world in (World(), World(), gpu)]

        alone = SimpleNamespace(tree=SimpleNamespace(maximum=list))
        mesh = SimpleNamespace(pp=SimpleNamespace(size=2), world=alone)
        timers = timing.Timers(device, True)
        phases = []
        for n_steps in (2, 0):
            for phase in ("forward", "backward", "backward", "pipeline", "optimizer"):
                with timers(phase):
                    next(ticks)
            phases.append(log.phase_times(timers, n_steps, mesh))
        off = timing.Timers(device, False)
        with off("data"):
            pass
        phases += [log.phase_times(off, 1, mesh), off.spans]
    cpu = make_mesh(World(), groups=False)
    two = make_mesh(World(size=2), groups=False)
    times = {torch.bfloat16: 3.0, torch.float16: 10.0, torch.float64: 2.0}
    with mock.patch("torch.get_num_threads", lambda: 2), mock.patch.object(timing, "times_slower", times.get):
        slow = [timing.slow_on_cpu(Config(dtype=dtype, steps=steps, seq_len=2048), mesh, flops, where)
                for dtype, steps, mesh, flops, where in (
                    ("fp32", 1000, cpu, 1e8, device), ("fp32", 1000, two, 2e8, device),
                    ("bf16", 5000, cpu, 1e9, device), ("fp16", 10, cpu, 1.0, device),
                    ("fp64", 10, cpu, 1e9, device),
                    ("fp64", 10, cpu, 1e9, torch.device("cuda")))]
    return {"rows of metrics.jsonl": "\n".join(json.dumps(golden.plain(row)) for row in rows),
            "times of the phases": "\n".join(map(str, golden.plain(phases))),
            "slow on a CPU": "\n".join(map(str, slow))}


def node_pages():
    """Which groups of ranks reach over nodes; how a run starts and ends."""
    lines = []
    for nodes, flags in (([0] * 8, dict(tp=2)), ([0] * 4 + [1] * 4, dict(tp=2, cp=2)),
                         ([0] * 4 + [1] * 4, dict(tp=8)), ([0] * 4 + [1] * 4, dict(tp=2, cp=4)),
                         ([0, 1] * 4, dict(tp=2)), ([0, 0, 0, 1, 1, 1, 2, 2], dict(tp=2, ep=4, n_experts=8)),
                         ([0, 0, 0, 0, 0, 1, 1, 1], dict(ep=8, n_experts=8)), (range(8), dict(cp=2))):
        mesh = rank_mesh(8, 0, tp=flags.get("tp", 1), cp=flags.get("cp", 1), ep=flags.get("ep", 1),
                         n_experts=flags.get("n_experts", 0))
        lines.append(f"{list(nodes)} {flags}")
        lines += log.groups_over_nodes(Config(n_head=8, n_kv_head=8, **flags), mesh, list(nodes), 256)

    model = torch.nn.Linear(4, 3)
    model.mesh = make_mesh(World(), groups=False)
    text = SimpleNamespace(n_samples=1234567, has_documents=False)
    chat = SimpleNamespace(n_samples=10, has_documents=True)
    starts = [said_by(log.started, Config(), model, None, 64, text, Ranges([])),
              said_by(log.started, Config(tp=2, cp=2, zero=1), model, Path("out/a/step_000010"), 8, chat,
                      Ranges([3, 5, 6, 9]))]
    ends = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        out = Path("run")
        (out / "step_000040").mkdir(parents=True)
        state = SimpleNamespace(step=41, best={}, best_name=lambda: "step_000040")
        for name in ("DONE", "STOPPED", "GAVE_UP", "REPLICAS_DIFFER", "FAILED"):
            outcome = Outcome[name]
            ends.append(said_by(ending.farewell, outcome, "SIGTERM", state, out, 40))
        (out / "loss.txt").touch()
        state.best = {"val_loss": 1.23456}
        ends.append(said_by(ending.farewell, Outcome.DONE, None, state, out, 0))
        ends.append(said_by(ending.farewell, Outcome.DONE, None, state, Path("none"), 0))
    return {"groups over nodes": "\n".join(lines), "how a run starts": "".join(starts),
            "how a run ends": "".join(ends)}


# -----------------------------------------------------------------------------
# checkpoint.py show and diff

class Reader:
    """A checkpoint in memory: what checkpoint.Reader offers."""

    def __init__(self, path, meta, tensors):
        entries = {}
        for name, x in tensors.items():
            dtype = str(x.dtype).removeprefix("torch.")
            entries[name] = {"dtype": dtype, "shape": list(x.shape), "pieces": [0, 1]}
        self.path = path
        self.tensors = tensors
        self.index = {"step": 7, "meta": meta, "tensors": entries,
                      "files": {"a": {"bytes": 1_250_000}, "b": {"bytes": 500_000}}}

    def blocks(self, name):
        flat = self.tensors[name].reshape(-1)
        return [(0, flat[:2]), (2, flat[2:])] if len(flat) > 2 else [(0, flat)]


def checkpoint_pages():
    nan = float("nan")
    one = {"w": torch.tensor([[1.0, -4.0], [nan, 0.0]]), "gone": torch.zeros(2), "v": torch.ones(3),
           "same": torch.ones(4), "t": torch.tensor([0.0, 0.0, 0.0])}
    two = {"w": torch.tensor([[1.0, -4.0], [nan, -0.0]]), "new": torch.zeros(2), "v": torch.ones(4),
           "same": torch.ones(4), "t": torch.tensor([0.0, 1.0, nan])}
    meta = {"samples": 5, "world": 2, "flags": {"a": 1, "b": 2}, "best": {"step": 1},
            "window": list(range(9)), "name": "x" * 50}
    a = Reader("A", meta, one)
    changed = {"samples": 6, "streak": 3, "world": 1, "flags": {"a": 1, "b": 3, "c": 4}, "more": {"x": 1}}
    b = Reader("B", {**meta, **changed}, two)
    half = Reader("C", meta, {"w": one["w"].half() * 1.5})
    pages = {}
    said = []
    checkpoint_report.describe("out/step_000007", a.index, said.append)
    pages["checkpoint.py show"] = "\n".join(said)
    for title, x, y in (("diff", a, b), ("diff with itself", a, a), ("diff of dtypes", a, half)):
        said = []
        said.append(f"-> {checkpoint_report.compare(x, y, said.append)}")
        pages[f"checkpoint.py {title}"] = "\n".join(said)
    return pages


# -----------------------------------------------------------------------------

def all_pages():
    with tempfile.TemporaryDirectory() as folder:
        return {**plan_pages(), **plot_pages(Path(folder)), **run_pages(), **checkpoint_pages()}


def test_every_printed_page_is_the_stored_one():
    golden.compare_pages(STORED, all_pages())


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    golden.write_pages(STORED, all_pages())
