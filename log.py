"""What a run leaves behind: config.json, metrics.jsonl, plots as text, a line per logged step, wandb if asked.

Only rank 0 builds a Log; metrics.jsonl is the truth, everything else may fail without stopping the run.
"""
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


class Clock:
    """Milliseconds of device time, without the pauses (evaluation, saving): events on a GPU, the host clock on a CPU."""

    def __init__(self, device):
        self.device, self.steps, self.total = device, 0, 0.0
        self.resume()

    def _now(self):
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def resume(self):
        self.began = self._now()

    def pause(self):
        end = self._now()
        if self.device.type == "cpu":
            self.total += (end - self.began) * 1e3
        else:
            end.synchronize()  # sync point: a true time needs the work to be over
            self.total += self.began.elapsed_time(end)
        self.began = end

    def per_step(self):
        """-> mean ms per step since the last call, and start anew."""
        self.pause()
        ms = self.total / max(1, self.steps)
        self.steps, self.total = 0, 0.0
        return ms


def peak_flops(device):
    """-> the chip's dense bf16 FLOP/s, or None when it is not in the table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for chip, peak in PEAK.items() if chip in name), None)


def git_revision():
    try:
        here = Path(__file__).parent
        rev = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
        dirty = subprocess.run(["git", "-C", here, "status", "--porcelain"], capture_output=True, text=True).stdout
        return rev.strip() + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # no git here: the run is as good


class Log:
    """metrics.jsonl and the printed line. resumed: completed steps of a resumed run, whose later rows are cut off."""

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
        self.file = open(path, "a")
        self.wandb = self._wandb(wandb, config) if wandb != "off" else None
        sys.stdout.reconfigure(errors="replace")  # plots draw in unicode; an ascii terminal gets question marks

    def rows(self):
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    def row(self, **values):
        """One logged step. Keys that are None do not apply and are left out."""
        values = {k: v for k, v in values.items() if v is not None}
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        print(line(values), flush=True)
        if self.wandb is not None:
            try:
                self.wandb.log(values, step=values["step"])
            except Exception as e:  # an outage of wandb never stops a run
                print(f"wandb: {e}; going on without it", flush=True)
                self.wandb = None

    def _wandb(self, mode, config):
        try:
            import wandb
            return wandb.init(project="nanoshard", dir=self.out, config=config, mode=mode,
                              settings=wandb.Settings(silent=True))
        except Exception as e:  # not installed, no key, no network
            print(f"wandb: {' '.join(str(e).split())}; going on without it", flush=True)
            return None

    def close(self, draw):
        """Write the plots; draw: also show the loss in the terminal."""
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish()
        try:
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
    if "mfu" in r:
        s += f" mfu={100 * r['mfu']:.1f}%"
    if r.get("skip_reason"):
        s += f" ({r['skip_reason']})"
    for key in ("skipped", "nan_steps"):
        if r.get(key):
            s += f" {key}={r[key]}"
    timers = " ".join(f"{k[2:]}={v:.1f}" for k, v in r.items() if k.startswith("t_"))
    return s + (f" | ms: {timers}" if timers else "")


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
