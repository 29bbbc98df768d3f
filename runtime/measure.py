"""The numbers of a run: where they are kept, and what a row of metrics.jsonl is made of."""
import dataclasses
import math
import shutil
import sys
from pathlib import Path

import torch

from corpus import blend
from fast.window import in_use
from model import flops_per_token
from parallel import MAX
from runtime import log
from skip import not_finite


def make_logger(cfg, mesh, world, out, state, vocab_size):
    """Rank 0's log.Log; beside it what sample.py needs."""
    config = {**dataclasses.asdict(cfg), "vocab_size_used": vocab_size, "git": log.git_revision(),
              "argv": sys.argv, "world": world.size, "launcher": world.launcher, "dp": mesh.dp.size,
              "torch": torch.__version__}
    logger = log.Log(out, config, state.step, cfg.wandb)
    if cfg.data != "synthetic":  # so that sample.py needs the run's directory only
        folder = Path(blend.first(cfg.data))
        for name in ("meta.json", "tokenizer.json"):
            if (folder / name).exists():
                shutil.copy(folder / name, out / name)
    return logger


def measure(cfg, world, state, batch, lr, totals, reason, clock, vocab_size):
    """-> (the row of metrics.jsonl, steps since the last one). Every rank calls this: memory is the maximum.
    reason: why the step was not taken; its loss does not belong to the curve then. clock: a log.Clock."""
    steps, samples, ms = clock.steps, clock.samples, clock.per_step()
    row = {"step": state.step, "tokens": state.samples * cfg.seq_len, "samples": state.samples,
           "global_batch": batch, "lr": lr, "skipped": state.skipped,
           "nan_steps": state.nan_steps, "skip_reason": "range" if totals is None else reason}
    if totals is not None and reason is None:
        loss, grad_norm, zeros, param_norm = totals.tolist()  # sync point
        if math.isfinite(loss) and math.isfinite(grad_norm):
            row.update(loss=loss, grad_norm=grad_norm, param_norm=param_norm, num_zeros=int(zeros))
        else:
            row.update(skip_reason=not_finite(loss, grad_norm))
    if steps:
        batch = samples / steps  # on average since the last row: the batch may grow
        per_gpu = batch * cfg.seq_len / ms * 1e3 / world.size  # tokens per second
        flops, causal = (per_gpu * f for f in flops_per_token(cfg, vocab_size))
        peak = log.peak_flops(world.device)
        row.update(ms=ms, ms_per_sample=ms / batch, tok_s=per_gpu * world.size, tok_s_gpu=per_gpu,
                   tflops=flops / 1e12, tflops_causal=causal / 1e12, mfu=flops / peak if peak else None)
    if world.device.type == "cuda":
        memory = torch.tensor((torch.cuda.max_memory_reserved() + in_use()) / 2**30)
        world.axis.all_reduce(memory, MAX)  # one number on the host, over the world
        row["mem_gb"] = memory.item()
    return row, steps


def timing(timers, steps, mesh):
    """{t_phase: ms per step, the slowest rank's}; empty without --timers."""
    if not timers.on:
        return {}
    ms = torch.tensor(timers.read(steps))
    mesh.world.all_reduce(ms, MAX)  # one number per phase on the host, over the world
    return {f"t_{phase}": t for phase, t in zip(timers.PHASES, ms.tolist(), strict=True)}


def report_traffic(cfg, mesh, vocab_size, batch, chief, windows):
    """Bytes sent in the first step: predicted by plan.py, measured by the counters of every collective."""
    from plan import traffic
    predicted = traffic(cfg, mesh, vocab_size, batch, windows)
    if chief and predicted:
        axes = {axis: sum(getattr(mesh, axis).sent.values()) for axis in predicted}
        print("comm per step, MB sent by rank 0, predicted / measured: " + ", ".join(
            f"{axis} {predicted[axis] / 1e6:.4g} / {axes[axis] / 1e6:.4g}" for axis in axes), flush=True)
