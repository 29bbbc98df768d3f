"""What a run leaves behind: config.json, metrics.jsonl, text plots, a line per logged step, wandb if asked.

Only rank 0 builds a Log; metrics.jsonl is the truth, everything else may fail without stopping the run.
"""
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bf16 FLOP/s by the vendor's datasheets
PLOTS = ("loss", "val_loss", "grad_norm", "lr", "tok_s", "ms", "mem_gb")


class Stopwatch:
    """Marks on the device's own time line: events on a GPU (a host clock would time
    launches), the clock on a CPU."""

    def __init__(self, device):
        self.cpu, self.device = device.type == "cpu", device

    def mark(self):
        if self.cpu:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def ms(self, begin, end):
        if self.cpu:
            return (end - begin) * 1e3
        end.synchronize()  # sync point: a true time needs the work to be over
        return begin.elapsed_time(end)


class Clock:
    """Mean milliseconds of a step, without the pauses (evaluation, saving)."""

    def __init__(self, device):
        self.watch, self.steps, self.samples, self.total = Stopwatch(device), 0, 0, 0.0
        self.resume()

    def resume(self):
        self.began = self.watch.mark()

    def pause(self):
        end = self.watch.mark()
        self.total += self.watch.ms(self.began, end)
        self.began = end

    def per_step(self):
        """-> mean ms per step since the last call, and start anew."""
        self.pause()
        ms = self.total / max(1, self.steps)
        self.steps, self.samples, self.total = 0, 0, 0.0
        return ms


class Timers:
    """--timers: milliseconds per step in each phase. forward holds param_gather; pipeline is the
    wait for neighbours."""
    PHASES = ("data", "forward", "backward", "pipeline", "grad_sync", "norm", "optimizer", "param_gather")

    def __init__(self, device, on):
        self.watch, self.on = Stopwatch(device), on
        self.spans = []  # (phase, begin, end)

    @contextlib.contextmanager
    def __call__(self, phase):
        if not self.on:
            yield
            return
        begin = self.watch.mark()
        yield
        self.spans.append((phase, begin, self.watch.mark()))

    def read(self, steps):
        """-> [ms per step of each of PHASES], and start anew."""
        total = dict.fromkeys(self.PHASES, 0.0)
        for phase, begin, end in self.spans:
            total[phase] += self.watch.ms(begin, end) / max(1, steps)
        self.spans = []
        return list(total.values())


def peak_flops(device):
    """-> the chip's dense bf16 FLOP/s, or None when it is not in the table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for chip, peak in PEAK.items() if chip in name), None)


def git_revision():
    try:
        here = Path(__file__).parent
        rev = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True,
                             check=True).stdout
        dirty = subprocess.run(["git", "-C", here, "status", "--porcelain"], capture_output=True,
                               text=True).stdout
        return rev.strip() + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # no git here: the run is as good


def warn(text):
    print(f"nanoshard: {' '.join(text.split()) if len(text) < 500 else text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def going_on(what, errors=OSError):
    """A full disk or a vanished directory costs what was to be written there, not the run."""
    try:
        yield
    except errors as e:
        warn(f"{what}: {e}; going on without it")


class Log:
    """metrics.jsonl and the printed line. resumed: completed steps of a resumed run; later rows are cut."""

    def __init__(self, out, config, resumed=0, wandb="off"):
        self.out = Path(out)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "config.json").write_text(json.dumps(config, indent=1))
        path = self.out / "metrics.jsonl"
        rows = self.rows() if resumed and path.exists() else []
        kept = [r for r in rows if r["step"] <= resumed]
        aside = path.with_suffix(".part")
        aside.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(aside, path)
        self.file, self.backlog = open(path, "ab", buffering=0), b""
        self.loads = None  # the last step's experts
        path = self.out / "experts.jsonl"
        if path.exists():
            lines = [x for x in path.read_text().splitlines() if resumed and json.loads(x)["step"] <= resumed]
            path.write_text("".join(x + "\n" for x in lines))
        self.wandb = self._wandb(wandb, config) if wandb != "off" else None
        sys.stdout.reconfigure(errors="replace")  # plots are unicode; an ascii terminal gets question marks

    def rows(self):
        rows = []
        for text in (self.out / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # a kill, or a full disk, in the middle of a row
                rows.append(json.loads(text))
        return rows

    def row(self, **values):
        """One logged step. Keys that are None do not apply and are left out."""
        values = {k: v for k, v in values.items() if v is not None}
        self.backlog += (json.dumps(values) + "\n").encode()
        try:
            while self.backlog:  # unbuffered: what was not written is still here, and goes with the next row
                self.backlog = self.backlog[self.file.write(self.backlog):]
        except OSError as e:
            warn(f"{self.out}/metrics.jsonl: {e}; its rows wait in memory")
        print(line(values), flush=True)
        if self.wandb is not None:
            try:
                self.wandb.log(values, step=values["step"])
            except Exception as e:  # an outage of wandb never stops a run
                warn(f"wandb: {e}; going on without it")
                self.wandb = None

    def experts(self, step, layers):
        """experts.jsonl: per layer the load of every expert, dropped fraction, aux, z and router entropy."""
        with going_on(self.out / "experts.jsonl"), open(self.out / "experts.jsonl", "a") as f:
            f.write(json.dumps({"step": step, "layers": layers}) + "\n")
        self.loads = layers

    def _wandb(self, mode, config):
        try:
            import wandb
            return wandb.init(project="nanoshard", dir=self.out, config=config, mode=mode,
                              settings=wandb.Settings(silent=True))
        except Exception as e:  # not installed, no key, no network
            warn(f"wandb: {e}; going on without it")
            return None

    def close(self, draw):
        """Write the plots and the experts' bars as text files; draw (--plot): print the loss and the bars."""
        if self.backlog:
            warn(f"{self.out}/metrics.jsonl is not whole; its last rows:\n{self.backlog.decode()}")
        self.file.close()
        if self.wandb is not None:
            with going_on("wandb", Exception):
                self.wandb.finish()
        if self.loads is not None:
            text = load_bars(self.loads)
            if draw:
                print(text, flush=True)
            with going_on(self.out / "expert_load.txt"):
                (self.out / "expert_load.txt").write_text(text + "\n", encoding="utf-8")
        try:
            with going_on(f"plots in {self.out}"):
                plots(self.rows(), self.out, draw)
        except ImportError:
            print("plotext is not installed: no plots (pip install 'plotext<6')", flush=True)


def line(r):
    """The readable form of a row."""
    s = f"step={r['step']}"
    if "loss" in r:
        s += f" loss={r['loss']:.4f}"
    if "val_loss" in r:
        s += f" val_loss={r['val_loss']:.4f}"
    s += f" lr={r['lr']:.2e}"
    if "grad_norm" in r:
        s += f" gnorm={r['grad_norm']:.3f}"
    if "ms" in r:
        s += f" dt={r['ms']:.1f}ms tok/s={r['tok_s']:.0f} tok/s/gpu={r['tok_s_gpu']:.0f}"
    if "aux_loss" in r:
        s += f" aux={r['aux_loss']:.3f} load_max={r['expert_load_max']:.2f} dropped={100 * r['dropped']:.1f}%"
    if "mfu" in r:
        s += f" mfu={100 * r['mfu']:.1f}%"
    if r.get("skip_reason"):
        s += f" ({r['skip_reason']})"
    for key in ("skipped", "nan_steps"):
        if r.get(key):
            s += f" {key}={r[key]}"
    timers = " ".join(f"{k[2:]}={v:.1f}" for k, v in r.items() if k.startswith("t_"))
    return s + (f" | ms: {timers}" if timers else "")


def expert_keys(layers):
    """{layer: {load, dropped, aux, z, entropy}} summed up for metrics.jsonl: means, and the heaviest load."""
    def mean(key):
        return sum(layer[key] for layer in layers.values()) / len(layers)
    heaviest = max(max(layer["load"]) * len(layer["load"]) for layer in layers.values())
    return {"aux_loss": mean("aux"), "z_loss": mean("z"), "dropped": mean("dropped"),
            "expert_load_max": heaviest}


def load_bars(layers, width=40):
    """One bar per expert: its share of all layers' routed copies (1.00 is balanced), the heaviest layer's."""
    loads = [layer["load"] for layer in layers.values()]  # L x E
    E = len(loads[0])
    mean = [sum(load[e] for load in loads) / len(loads) * E for e in range(E)]
    worst = [max(load[e] for load in loads) * E for e in range(E)]
    top = max(*mean, 1.0)
    bars = [f"expert {e:3d} {'#' * round(width * m / top):{width}s} {m:.2f}  (heaviest layer {w:.2f})"
            for e, (m, w) in enumerate(zip(mean, worst, strict=True))]
    return "\n".join(["expert load, 1.00 is balanced", *bars])


def plots(rows, out, draw):
    """OUT/loss.txt and one file per other metric; the loss also in the terminal."""
    import plotext as plt
    for name in PLOTS:
        points = [(r["step"], r[name]) for r in rows if name in r and math.isfinite(r[name])]
        if not points:
            continue
        plt.clear_figure()
        plt.theme("clear")
        plt.plot_size(90, 24)
        plt.plot(*zip(*points, strict=True), marker="braille", label=name)
        val = [(r["step"], r["val_loss"]) for r in rows if "val_loss" in r and math.isfinite(r["val_loss"])]
        if name == "loss" and val:
            plt.scatter(*zip(*val, strict=True), marker="x", label="val_loss")
        plt.title(name)
        plt.xlabel("step")
        text = plt.uncolorize(plt.build())
        (out / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
        if name == "loss" and draw:
            print(text, flush=True)


def start_profile(on):
    if not on:
        return None
    try:
        from pyinstrument import Profiler
    except ImportError:
        print("pyinstrument is not installed: no profile (pip install pyinstrument)", flush=True)
        return None
    profiler = Profiler()
    profiler.start()
    return profiler


def end_profile(profiler, out):
    if profiler is not None:
        profiler.stop()
        with going_on(out / "profile.html"):
            (out / "profile.html").write_text(profiler.output_html())
            (out / "profile.txt").write_text(profiler.output_text(unicode=False, color=False))


def tracer(on, out):
    if not on:
        return contextlib.nullcontext()
    from torch.profiler import profile, schedule
    return profile(schedule=schedule(wait=1, warmup=1, active=3),
                   on_trace_ready=lambda p: p.export_chrome_trace(str(out / "trace.json")))
