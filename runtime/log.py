"""What a run prints and leaves behind: metrics.jsonl, config.json, profiles. Its plots: plot.py.

    Log          rank 0: a row of metrics.jsonl and a printed line per logged step
    metrics_row  what a row is made of; phase_times and expert_metrics add to it

metrics.jsonl is the record that a resumed run goes on from. Everything else may fail without ending the run.
"""
import contextlib
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from config import Outcome, largest_divisor
from corpus.shards import first_folder
from cost.parameters import flops_per_token
from cost.step_time import peak_flops
from cost.traffic import traffic
from fast.symm_mem import bytes_allocated
from generate import generate
from interface.files import Rows, folded, must_write, warn, write_whole
from ops.accelerator import peak_memory
from parallel import MAX
from runtime.timing import slow_on_cpu
from skip import not_finite

# -----------------------------------------------------------------------------
# the numbers of a step

def phase_times(timers, steps, mesh):
    """-> {t_PHASE: ms per step of the slowest rank}, empty without --timers; with stages also bubble: what
    all micro-batches take longer than forward and backward of the slowest stage, over these: the bubble of
    cost/step_time.py, with messages. Collective over the world."""
    if not timers.on:
        return {}
    own = dict(zip(timers.PHASES, timers.per_step(steps), strict=True))
    busy = own["forward"] + own["backward"]
    ms = torch.tensor([*own.values(), busy, busy + own["pipeline"]])
    mesh.world.all_reduce(ms, MAX)  # a number per phase and two more on the host, over the world
    *phases, busy, everything = ms.tolist()
    row = {f"t_{phase}": t for phase, t in zip(timers.PHASES, phases, strict=True)}
    if mesh.pp.size > 1 and steps:
        row["bubble"] = everything / busy - 1
    return row


def metrics_row(cfg, world, state, batch, lr, stats, reason, clock, vocab_size):
    """-> (a row of metrics.jsonl, steps since the row before). Collective over the world.

    stats: the step's (loss, grad_norm, num_zeros, param_norm), () fp64 each; None if its range is skipped.
    reason: why the step was not taken, or None; the loss of such a step is not logged. clock: a Clock."""
    steps, samples, ms = clock.steps, clock.samples, clock.per_step()
    row = {"step": state.step, "tokens": state.samples * cfg.seq_len, "samples": state.samples,
           "global_batch": batch, "lr": lr, "skipped": state.skipped,
           "nan_steps": state.nan_steps, "skip_reason": "range" if stats is None else reason}
    if stats is not None and reason is None:
        values = dict(zip(stats._fields, torch.stack(tuple(stats)).tolist(), strict=True))  # sync point
        finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        values["num_zeros"] = int(values["num_zeros"]) if finite else 0
        row.update(values if finite else {"skip_reason": not_finite(values["loss"], values["grad_norm"])})
    if steps:
        batch = samples / steps  # the mean since the row before: the batch may grow
        per_gpu = batch * cfg.seq_len / ms * 1e3 / world.size  # tokens per second
        flops, causal = (per_gpu * f for f in flops_per_token(cfg, vocab_size))
        peak = peak_flops(world.device)
        row.update(ms=ms, ms_per_sample=ms / batch, tok_s=per_gpu * world.size, tok_s_gpu=per_gpu,
                   tflops=flops / 1e12, tflops_causal=causal / 1e12, mfu=flops / peak if peak else None)
    if peaks := peak_memory(world.device):
        memory = torch.tensor((peaks[1] + bytes_allocated()) / 2**30)
        world.axis.all_reduce(memory, MAX)  # one number on the host, over the world
        row["mem_gb"] = memory.item()
    return row, steps


def expert_metrics(layers):
    """{layer: {load, dropped, aux, z, entropy}} -> their keys of metrics.jsonl: means over the layers, and
    the load of the busiest expert of any layer (1.0 is balanced)."""
    def mean(key):
        return sum(layer[key] for layer in layers.values()) / len(layers)
    busiest = max(max(layer["load"]) * len(layer["load"]) for layer in layers.values())
    return {"aux_loss": mean("aux"), "z_loss": mean("z"), "dropped": mean("dropped"),
            "expert_load_max": busiest}


def report_traffic(predicted, sent):
    """Print the bytes that this rank sent in the first step, by axis: predicted, and as its collectives
    counted them (Axis.sent). Both {axis name: bytes}."""
    if predicted:
        rows = [f"\n  {axis:6}{n / 1e6:10.4g} / {sent[axis] / 1e6:.4g}" for axis, n in predicted.items()]
        print("comm per step, MB sent by rank 0, predicted / measured:", *rows, sep="", flush=True)


# -----------------------------------------------------------------------------
# the files

def git_revision():
    """-> the commit of this code, with -dirty where files differ from it; "unknown" outside of git."""
    try:
        argv = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40",
                "--exclude=*"]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextlib.contextmanager
def best_effort(what, errors=OSError):
    """Run the body; a full disk or a missing directory costs what it writes, not the run."""
    try:
        yield
    except errors as e:
        warn(f"{what}: {e}; going on without it")


def make_log(cfg, mesh, world, out, state, source):
    """-> the Log of rank 0. Also keeps what sample.py needs: the tokenizer, and mlm's [MASK] (of source)."""
    mask, vocab_size = {"mask_token": source.mask_token} if cfg.objective == "mlm" else {}, state.vocab_size
    config = {**dataclasses.asdict(cfg), "vocab_size_used": vocab_size, **mask, "git": git_revision(),
              "argv": sys.argv, "world": world.size, "launcher": world.launcher, "dp": mesh.dp.size,
              "torch": torch.__version__}
    folder = Path(first_folder(cfg.data)) if cfg.data != "synthetic" else None
    for line in slow_on_cpu(cfg, mesh, flops_per_token(cfg, vocab_size)[1], world.device):
        warn(line)
    for line in groups_over_nodes(cfg, mesh, world.nodes, vocab_size):
        print(line, flush=True)
    with must_write(out):
        out.mkdir(parents=True, exist_ok=True)
        for name in ("meta.json", "tokenizer.json") if folder else ():
            if (folder / name).exists():
                shutil.copy(folder / name, out / f"{name}.part")
                os.replace(out / f"{name}.part", out / name)
        return Log(out, config, state.step, cfg.wandb, state.changed)


NETWORK = 25e9  # B/s of a GPU's share of a fabric, 200 Gb/s: a scale, nothing here was measured


def groups_over_nodes(cfg, mesh, nodes, vocab_size):
    """nodes: the node of each rank -> lines: whether the groups of tp, cp and ep stay inside a node; where
    they do not, the bytes that this costs, by the formulas of ring algorithms, and what to change."""
    lines, here = [], min(Counter(nodes).values(), default=0)  # here: ranks of a node, of the smallest one
    sent = traffic(cfg, mesh, vocab_size, cfg.global_batch or cfg.micro_batch * mesh.dp.size)
    for name, size, stride in (("tp", cfg.tp, 1), ("cp", cfg.cp, cfg.tp), ("ep", cfg.ep, 1)):
        span = size * stride  # make_mesh: every stride-th of so many consecutive ranks is a group
        groups = [nodes[i + j:i + span:stride] for i in range(0, len(nodes), span) for j in range(stride)]
        apart = [group for group in groups if len(set(group)) > 1]
        if not apart:
            if size > 1 and len(set(nodes)) > 1:
                lines.append(f"{name} {size}: each group stays inside a node")
            continue
        share = max(sum(node != group[0] for node in group) for group in apart) / (size - 1)  # of its peers
        crossing = share * sent[name] if name == "ep" else sent[name]  # a ring's neighbour gets all bytes
        cure = ("place the ranks node by node (srun --distribution=block, mpiexec --map-by slot)"
                if here % span == 0 else f"try --{name} {largest_divisor(size, size, max(1, here // stride))}"
                + f", or a multiple of {span} ranks on each node" * (here > span))
        lines.append(f"note: {len(apart)} of {len(groups)} groups of {name} {size} span nodes, of "
                     f"{here} rank{'s' * (here > 1)}: {crossing / 1e6:.4g} MB per rank and step cross the "
                     f"network, {crossing / NETWORK * 1e3:.3g} ms at {NETWORK / 1e9:.0f} GB/s; {cure}")
    return lines


def print_sample(model, tokenizer, prompt, seed):
    """--prompt: print how the model continues the text prompt, on rank 0. Collective over the world."""
    ids = generate(model, tokenizer.encode(prompt), max_new_tokens=100, temperature=0.8, top_k=50, seed=seed)
    if model.mesh.world.rank == 0:
        print(f"--- {tokenizer.decode(ids)}\n---", flush=True)


def started(cfg, model, resumed, batch, n_samples, skip):
    """Print what begins. resumed: path of the checkpoint or None; batch: sequences per step, after the ramp;
    n_samples: of the training data; skip: the steps to skip."""
    n, mesh = sum(p.numel() for p in model.parameters()), model.mesh
    how = f"resumed {resumed}" if resumed else "started"
    print(folded(f"{how}: {n:,} parameters on this rank, dp {mesh.dp.size} "
                 f"tp {cfg.tp}{f' cp {cfg.cp}' * (cfg.cp > 1)} pp {cfg.pp} ep {cfg.ep} zero {cfg.zero}"),
          folded(f"  {batch} x {cfg.seq_len} tokens per step, {n_samples:,} training samples"
                 + f", skipping steps {skip}" * bool(skip.pairs)), sep="\n", flush=True)


def farewell(outcome, stop_reason, state, out, saved):
    """Print how the run ended and what its directory holds. saved: step of the last checkpoint, or 0."""
    how = {Outcome.STOPPED: f"stopped by {stop_reason}", Outcome.GAVE_UP: "gave up",
           Outcome.REPLICAS_DIFFER: "gave up", Outcome.FAILED: "lost its last save"}.get(outcome, "done")
    names = "metrics.jsonl", "loss.txt", "config.json", "profile.html", "trace.json", f"step_{saved:06d}"
    print(folded(f"{how} after step {state.step}: {out}/ holds "
                 f"{', '.join(name for name in names if (out / name).exists()) or 'nothing'}"), flush=True)
    if "val_loss" in state.best and (out / state.best_name()).is_dir():
        print(f"lowest validation loss {state.best['val_loss']:.4f} in {state.best_name()}", flush=True)


class Log:
    """metrics.jsonl, experts.jsonl, history.jsonl (a row per start) and the printed line. resumed: completed
    steps of the checkpoint that the run goes on from; rows of later steps are removed, because they will be
    written again. changed: {flag: [before, now]} since that checkpoint."""

    def __init__(self, out, config, resumed=0, wandb="off", changed=None):
        self.out = Path(out)
        self.out.mkdir(parents=True, exist_ok=True)
        self._keep_history({"step": resumed, "time": time.time(), "changed": changed or {},
                            "config": config})
        write_whole(self.out / "config.json", json.dumps(config, indent=1))
        self.metrics = Rows(self.out / "metrics.jsonl", resumed or -1, create=True)
        self.expert_rows, self.last_experts = Rows(self.out / "experts.jsonl", resumed or -1), None
        self.wandb = self._wandb(wandb, config) if wandb != "off" else None
        # plots are unicode; an ascii terminal gets question marks, a notebook's stdout cannot be an ascii one
        getattr(sys.stdout, "reconfigure", dict)(errors="replace")

    def _keep_history(self, row):
        """Append the row of this start, after the config.json of a run that began without history.jsonl."""
        rows, is_first = [row], not (self.out / "history.jsonl").exists()
        if is_first and row["step"]:
            with contextlib.suppress(OSError, ValueError):
                rows.insert(0, {"step": 0, "config": json.loads((self.out / "config.json").read_text())})
        history = Rows(self.out / "history.jsonl", math.inf, create=True)
        for row in rows:
            history.add(row)
        history.close()

    def row(self, **values):
        """Write and print one logged step. A key whose value is None does not apply and is left out."""
        values = {k: v for k, v in values.items() if v is not None}
        self.metrics.add(values)
        print(format_row(values), flush=True)
        if self.wandb is not None:
            try:
                self.wandb.log(values, step=values["step"])
            except Exception as e:  # an outage of wandb must not stop a run
                warn(f"wandb: {e}; going on without it")
                self.wandb = None

    def experts(self, step, layers):
        """Write experts.jsonl: per layer the load of every expert, dropped, aux, z, router entropy."""
        self.expert_rows.add({"step": step, "layers": layers})
        self.last_experts = layers

    def _wandb(self, mode, config):
        try:
            import wandb
            wandb.setup(wandb.Settings(silent=True))  # else init() asks for a missing key, and waits
            return wandb.init(project="nanoshard", name=self.out.resolve().name, dir=self.out, config=config,
                              mode=mode)
        except Exception as e:  # not installed, no key, no network
            warn(f"wandb: {e}; going on without it")
            return None

    def close(self):
        """The run has ended: say what could not be written."""
        if self.metrics.waiting:
            warn(f"{self.out}/metrics.jsonl is not complete; its last rows:")
            print(self.metrics.waiting.decode(), file=sys.stderr, flush=True)
        self.metrics.close()
        self.expert_rows.close()
        if self.wandb is not None:
            with best_effort("wandb", Exception):
                self.wandb.finish()


def format_row(r):
    """A row of metrics.jsonl -> the printed lines, of 100 columns: the step; below it experts, --timers."""
    s = f"step={r['step']}"
    if "loss" in r:
        s += f" loss={r['loss']:.4f}"
    if "val_loss" in r:
        s += f" val_loss={r['val_loss']:.4f}"
    s += f" lr={r['lr']:.2e}"
    if "grad_norm" in r:
        s += f" gnorm={r['grad_norm']:.3f}"
    if "ms" in r:
        s += f" dt={r['ms']:.1f}ms tok/s={r['tok_s']:.0f}"
        s += f" tok/s/gpu={r['tok_s_gpu']:.0f}" * ("mem_gb" in r and r["tok_s"] > r["tok_s_gpu"])
    if "mfu" in r:
        s += f" mfu={100 * r['mfu']:.1f}%"
    s += f" ({r['skip_reason']})" if r.get("skip_reason") else ""
    s += "".join(f" {key}={r[key]}" for key in ("skipped", "nan_steps") if r.get(key))
    if "aux_loss" in r:
        s += f"\n  aux={r['aux_loss']:.3f} load_max={r['expert_load_max']:.2f} dropped={r['dropped']:.1%}"
    timers = " ".join(f"{k[2:]}={v:.1f}" for k, v in r.items() if k.startswith("t_"))
    s += f"\n  ms: {timers}" if timers else ""
    s += f" bubble={r['bubble']:.1%}" if "bubble" in r else ""
    return "\n".join(map(folded, s.split("\n")))


# -----------------------------------------------------------------------------
# profiles

def start_profile(on):
    """--profile: -> a running pyinstrument profiler, or None."""
    if on:
        with best_effort("--profile needs pyinstrument (pip install pyinstrument)", ImportError):
            from pyinstrument import Profiler
            profiler = Profiler()
            profiler.start()
            return profiler


def end_profile(profiler, out):
    """Write what start_profile() began: OUT/profile.html and profile.txt."""
    if profiler is not None:
        profiler.stop()
        with best_effort(out / "profile.html"):
            (out / "profile.html").write_text(profiler.output_html())
            (out / "profile.txt").write_text(profiler.output_text(unicode=False, color=False))


def tracer(on, out):
    """--trace: -> torch's profiler over steps 3 to 5, as a context; call its step() after every step. It
    writes OUT/trace.json. Without --trace the context yields None."""
    if not on:
        return contextlib.nullcontext()
    from torch.profiler import profile, schedule  # repeat: else such steps are traced again and again
    def ready(p):
        p.export_chrome_trace(str(out / "trace.json"))
        print(f"trace: {out}/trace.json; open it in https://ui.perfetto.dev", flush=True)
    return profile(schedule=schedule(wait=1, warmup=1, active=3, repeat=1), on_trace_ready=ready)
