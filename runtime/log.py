"""What a run prints and leaves: metrics.jsonl, config.json, report.html. plot.py draws its plots.

metrics.jsonl is the record from which a resumed run goes on. Everything else may fail without ending the run.
"""
import contextlib
import dataclasses
import functools
import json
import math
import os
import platform
import re
import secrets
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import checkpoint
import plot
from config import FLAGS, Config, Outcome, has_effect, typed
from corpus.samples import first_folder
from cost.parameters import Rank, flops_per_token
from cost.step_time import peak_flops
from cost.traffic import bytes_between_nodes, traffic
from fast.symm_mem import bytes_allocated
from interface import report
from interface.files import Rows, best_effort, write_whole
from interface.presets import PRESETS
from interface.terminal import clock, complain, say, short, show, warn
from moe import expert_stats
from ops.accelerator import device_name, peak_memory, peak_resident
from optim import learning_rate
from pipeline import generate
from runtime import launch, profiles, timing, watch
from runtime.pieces import bucket_pieces
from runtime.session import signals
from skip import give_up_message, not_finite_reason

# The numbers of a step

class Metrics:
    """What a rank measures from one row of metrics.jsonl to the next."""

    def __init__(self, cfg, mesh, device):
        self.clock = timing.Clock(device)
        self.timers = self.clock if cfg.timers else contextlib.nullcontext
        self.stragglers = watch.Stragglers(mesh, device)
        self.layer_norms = LayerNorms(cfg) if cfg.log_layers else None

    def row(self, run, batch, stats):
        """Return the row of the step that a train.Run has done on `batch` sequences. Collective.

        The times are means since the row before. stats: the step's optim.StepStats, or None if
        --train-range-to-skip names it.
        """
        cfg = run.cfg
        state = run.state
        self.sent = {name: sum(axis.sent.values()) for name, axis in run.mesh.axes().items()}
        steps = self.clock.steps
        mean_batch = self.clock.samples / max(1, steps)  # it may have grown since the row before
        times = self.clock.per_step()  # which sets both to zero
        row = {"step": state.step, "tokens": state.samples * cfg.seq_len, "samples": state.samples,
               "global_batch": batch, "lr": learning_rate(cfg, state.step), "skipped": state.skipped,
               "nan_steps": state.nan_steps, **step_statistics(stats, run.guard.reason)}
        if steps:
            row.update(rates(cfg, run.world, mean_batch, times["step"], state.vocab_size))
        counted = peak_memory(run.world.device)  # (allocated, reserved); None on a CPU: the host's memory
        held = peak_resident() if counted is None else counted[1] + bytes_allocated()
        most, least = run.world.everyone.maximum([held, -held])  # two numbers from each rank to all
        row.update(mem_gb=most / 2**30, mem_gb_min=-least / 2**30)
        row.update(self.stragglers.report())
        if cfg.timers:
            row.update(phase_times(times, run.mesh))
        if run.opt.loss_scale is not None:
            row["loss_scale"] = run.opt.loss_scale.item()
        if self.layer_norms is not None:
            row.update(self.layer_norms.report(run.mesh.world))
        if stats is not None and cfg.n_experts:
            experts = expert_stats(run.model, batch // cfg.micro_batch)  # of every layer, on every rank
            for key, name in (("aux_loss", "aux"), ("z_loss", "z"), ("dropped", "dropped")):
                row[key] = statistics.fmean(layer[name] for layer in experts.values())
            busiest = max(max(layer["load"]) * len(layer["load"]) for layer in experts.values())
            row["expert_load_max"] = busiest  # of any layer; 1.0 is balanced
            if run.log_file is not None:
                run.log_file.experts.add({"step": run.state.step, "layers": experts})
        return row


def layer_of(name):
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]  # "blocks.3", "wte"


class LayerNorms:
    """--log-layers: the norms of one step's gradients by layer, before clipping, whatever the layout is."""

    def __init__(self, cfg):
        self.layers = ["wte", "wpe", *(f"blocks.{i}" for i in range(cfg.n_layer)), "norm", "head", "mlm"]
        self.squares = None  # (layers,) fp64: this rank's part, after measure()

    @torch.no_grad()
    def measure(self, data_parallel, opt):
        """Compute this rank's part, without waiting for the device or for other ranks."""
        device = data_parallel.buckets[0].flat.device
        self.squares = torch.zeros(len(self.layers), dtype=torch.float64, device=device)
        for bucket in data_parallel.buckets:
            grad = bucket.grad_total
            dtype = torch.promote_types(grad.dtype, torch.float32)
            for piece in bucket_pieces(bucket, grad, prefix="", owned_only=False):
                norm = torch.linalg.vector_norm(piece.view, dtype=dtype)
                # fp16's loss scale changes in the update, so it is taken out here.
                square = opt.unscale(norm.double()).square()
                # a slice that k ranks hold counts 1/k on each
                self.squares[self.layers.index(layer_of(piece.name))] += square * bucket.count_factor

    def report(self, world):
        """Return {"grad_norm/LAYER": its norm, if it is finite}; {} if no step was measured. Collective over
        `world`, an Axis."""
        if self.squares is None:  # The step was skipped, on all ranks.
            return {}
        sums = world.all_reduce(self.squares)  # SUM of a number per layer, over the world
        self.squares = None
        norms = zip(self.layers, sums.sqrt().tolist(), strict=True)
        return {f"grad_norm/{layer}": norm for layer, norm in norms if 0 < norm < math.inf}


def step_statistics(stats, refusal):
    """Return {skip_reason, loss, ...} of a step; if it was not taken, the reason and what the spike had."""
    if stats is None:
        return {"skip_reason": "range"}

    numbers = torch.stack(tuple(stats)).tolist()  # sync point
    values = dict(zip(stats._fields, numbers, strict=True))
    if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
        return {"skip_reason": not_finite_reason(values["loss"], values["grad_norm"])}
    if refusal is not None:
        return {"skip_reason": refusal, "spike_loss": values["loss"], "spike_grad_norm": values["grad_norm"]}
    values["num_zeros"] = int(values["num_zeros"])
    return {"skip_reason": None, **values}


def rates(cfg, world, batch, ms, vocab_size):
    tokens_per_gpu = batch * cfg.seq_len / ms * 1e3 / world.size  # per second
    full, causal = flops_per_token(cfg, vocab_size)
    peak = peak_flops(world.device)
    return {"ms": ms, "ms_per_sample": ms / batch,
            "tok_s": tokens_per_gpu * world.size, "tok_s_gpu": tokens_per_gpu,
            "tflops": tokens_per_gpu * full / 1e12, "tflops_causal": tokens_per_gpu * causal / 1e12,
            "mfu": tokens_per_gpu * full / peak if peak else None}


def phase_times(times, mesh):
    """Return {t_PHASE: ms per step of the slowest rank, t_PHASE_min: of the fastest}, for --timers.

    Of several stages also the bubble: how much longer all takes than the slowest stage's work. Collective.
    """
    own = {phase: times[phase] for phase in timing.Clock.PHASES}
    busy = own["forward"] + own["backward"]
    # Two numbers per phase and two more go from each rank to all, over the world.
    everyone = mesh.world.everyone
    *most, busy, everything = everyone.maximum([*own.values(), busy, busy + own["pipeline"]])
    least = everyone.maximum([-ms for ms in own.values()])
    row = {}
    for phase, high, low in zip(own, most, least, strict=True):
        row.update({f"t_{phase}": high, f"t_{phase}_min": -low})
    if mesh.pp.size > 1 and busy:
        row["bubble"] = everything / busy - 1
    return row


def report_traffic(run, batch):
    """Print and note the bytes that this rank sent in the first step, by axis: predicted, and counted. Where
    there are several nodes, what leaves them has a line of its own."""
    mesh = run.mesh
    nodes = run.world.nodes
    settled = dataclasses.replace(run.cfg, doc_mask="on" if run.train_data.has_documents else "off")
    predicted = traffic(Rank(settled, mesh, run.state.vocab_size, run.choice), batch)
    counted = {axis: run.metrics.sent[axis] for axis in predicted}
    pairs = {axis: [nbytes, counted[axis]] for axis, nbytes in predicted.items()}
    if len(set(nodes)) > 1:
        leaving = [bytes_between_nodes(mesh, by_axis, nodes.__getitem__) for by_axis in (predicted, counted)]
        pairs["to other nodes"] = leaving
    if pairs:
        say("comm per step, sent by rank 0, predicted / measured:")
        run.log_file.notes.add({"step": run.state.step, "traffic": pairs})
    for axis, pair in pairs.items():
        expected, found = (f"{n / 1e6:.4g} MB" if n >= 1e5 else f"{n:.0f} B" for n in pair)
        say(f"  {axis:14}{expected:>10} / {found}")


# Both ends of a run

def begin(run, found):
    """Say on rank 0 what kind of run begins, from a checkpoint's path or None, and return its Log."""
    cfg = run.cfg
    world = run.world
    run.stop.watch_file(run.out)
    for axis in run.mesh.axes().values():
        axis.sent.clear()  # what is sent from here on counts: the first step comes next
    device = f"CPU, {os.cpu_count()} cores" if world.device.type == "cpu" else device_name(world.device)
    config = {**dataclasses.asdict(cfg), "vocab_size_used": run.state.vocab_size, "git": git_revision(),
              "argv": sys.argv, "world": world.size, "nodes": world.n_nodes, "launcher": world.launcher,
              "job": launch.job_id(), "dp": run.mesh.dp.size, "torch": torch.__version__,
              "attention": run.choice.attention_by(),
              "machine": {"host": platform.node(), "device": device, "python": platform.python_version()}}
    if cfg.objective == "mlm":
        config["mask_token"] = run.train_data.mask_token
    log_file = Log(run.out, config, run.state.step, cfg.wandb, run.state.changed)
    tokenizer = Path(first_folder(cfg.data), "tokenizer.json")
    if cfg.data != "synthetic" and tokenizer.exists():  # sample.py reads it in OUT
        write_whole(run.out / tokenizer.name, tokenizer.read_bytes())

    how = f"resumed {found}" if found else "started"
    n_parameters = sum(p.numel() for p in run.model.parameters())
    here = " on this rank" if run.world.size > 1 else ""
    cp = f" cp {cfg.cp}" if cfg.cp > 1 else ""
    say(f"{how}: {n_parameters:,} parameters{here}, "
        f"dp {run.mesh.dp.size} tp {cfg.tp}{cp} pp {cfg.pp} ep {cfg.ep} zero {cfg.zero}")
    samples = "synthetic data without end"
    if cfg.data != "synthetic":
        samples = f"{run.train_data.n_samples:,} training samples"
    skipping = ", skipping steps " + ", ".join(f"{a}-{b}" for a, b in run.skip) if run.skip else ""
    say(f"  {run.batch} x {cfg.seq_len} tokens per step, {samples}{skipping}")
    if run.train_data.has_documents:
        say("  each document attends to itself alone (--doc-mask)")
    preset = Config(**PRESETS.get(cfg.preset, {}))
    for name, said in FLAGS.items():
        value = getattr(cfg, name)
        if value != getattr(preset, name) and not has_effect(name, cfg):
            other = " ".join(typed(said["needs"]).split("="))
            say(f"  {typed(name)} {value} has no effect without {other}")

    log_file.profiler = profiles.start_profile(cfg.profile)
    if cfg.trace:
        run.step = profiles.traced(run)
    return log_file


def end(run):
    if run.cfg.trace:
        run.step.stop()
    profiles.end_profile(run.log_file.profiler, run.out)
    run.log_file.close()
    is_finished = run.outcome in (Outcome.DONE, Outcome.FAILED)  # a run that goes on draws its plot later
    plot.at_end(run.out, run.cfg.plot and is_finished)
    if run.log_file.speeds:
        say(run.log_file.speed())
    report_ending(run)


def report_ending(run):
    """Write the report, and print how a train.Run ended and what can be typed next, on rank 0."""
    out = run.out
    state = run.state
    outcome = run.outcome
    how = {Outcome.DONE: "done", Outcome.STOPPED: f"stopped by {run.stop_reason}",
           Outcome.FAILED: "lost its last save"}.get(outcome, "gave up")
    how = f"{how} after step {state.step}"
    saved = checkpoint.steps(out)
    if outcome is Outcome.GAVE_UP:
        why = run.guard.reason or run.log_file.last_row.get("skip_reason")
        complain(give_up_message(saved, *run.guard.given_up, why, run.cfg.steps))
    if outcome is Outcome.REPLICAS_DIFFER:
        complain(f"nanoshard: replicas differ after step {state.step}")
        for line in run.differences:
            complain(line)
    if run.cfg.report:
        with best_effort(out / "report.html", Exception):
            report.write_report(out / "report.html", [report.Run(out, how)])

    say(f"{how}: {out}/ holds {saved[0].name if saved else 'no checkpoint'}")
    if "val_loss" in state.best and (out / state.best_name()).is_dir():
        say(f"lowest validation loss {state.best['val_loss']:.4f} in {state.best_name()}")
    config = run.log_file.begun["config"]
    if outcome is Outcome.STOPPED and signals.parsed:  # a notebook has no command line
        say(f"to go on, type: {report.command_of(config, goes_on=True)}")
    if outcome is Outcome.DONE and signals.parsed:
        writes_text = config.get("data") != "synthetic" and config.get("objective") != "mlm"
        if writes_text and run.saver.saved:
            say(f"try it:       python sample.py {shlex.quote(str(out))}")
        say(f"draw curves:  python plot.py {out}")
        if (out / "report.html").exists():
            say(f"see it all:   {out}/report.html, in a browser")


def git_revision():
    """Return the commit of this code, with -dirty if files differ from it, or "unknown" outside of git."""
    folder = shlex.quote(str(Path(__file__).parent))
    describe = f"git -C {folder} describe --always --dirty --abbrev=40 '--exclude=*' 2>/dev/null"
    return subprocess.getoutput(describe) or "unknown"


def print_sample(model, tokenizer, prompt, seed):
    """For --prompt: print on rank 0 how the model continues the text `prompt`, and return it; other ranks
    return "". Collective over the world."""
    ids = generate(model, tokenizer.encode(prompt), max_new_tokens=100, temperature=0.8, top_k=50, seed=seed)
    if model.mesh.world.rank != 0:
        return ""
    text = tokenizer.decode(ids)
    show(f"--- {text}\n---\n")
    return text


# The files

class Log:
    """The printed line, metrics.jsonl, experts.jsonl, history.jsonl (a row per start) and notes.jsonl (the
    samples of --prompt, and the bytes that the first step sent).

    resumed: completed steps of the checkpoint from which the run goes on; rows of later steps are removed.
    changed: {flag: [before, now]} since that checkpoint.
    """

    def __init__(self, out, config, resumed=0, wandb="off", changed=None):
        self.out = Path(out)
        self.begun = {"step": resumed, "time": time.time(), "changed": changed or {}, "config": config}
        self.out.mkdir(parents=True, exist_ok=True)
        write_whole(self.out / "config.json", json.dumps(config, indent=1))
        history = Rows(self.out / "history.jsonl", math.inf, create=True)
        history.add(self.begun)
        history.close()
        self.metrics = Rows(self.out / "metrics.jsonl", resumed or -1, create=True)
        self.experts = Rows(self.out / "experts.jsonl", resumed or -1)
        self.notes = Rows(self.out / "notes.jsonl", resumed or -1)
        self.last_row = {}
        self.speeds = []  # (ms, tok_s) of the rows behind the first, which also compiles
        self.widths = {"step": len("step={0}/{0} loss=1.0000".format(config["steps"]))}
        self.profiler = None  # of --profile
        self.tracker = None if wandb == "off" else start_wandb(wandb, self.out, config)

    def row(self, **values):
        """Write and print one logged step. A key whose value is None does not apply and is left out."""
        values = {key: value for key, value in values.items() if value is not None}
        if "val_loss" in values:
            values["val_ppl"] = math.exp(min(values["val_loss"], 700))  # more is no float
        self.metrics.add(values)
        config = self.begun["config"]
        steps = config["steps"]
        shown = dict(values)
        if self.last_row and "ms" in values:
            self.speeds.append((values["ms"], values["tok_s"]))
            if values["step"] < steps:
                shown["left"] = (steps - values["step"]) * values["ms"] / 1e3
        self.last_row = values
        if config.get("rampup_batch_size") and values["global_batch"] != config["global_batch"]:
            shown["batch"] = values["global_batch"]
        if config.get("machine", {}).get("device", "CPU").startswith("CPU"):
            shown.pop("tflops", None)
        line = format_row(shown, steps, self.widths)
        if sys.stdout.isatty():
            line = re.sub(r"\bloss=\S+", "\x1b[36m\\g<0>\x1b[0m", line)  # cyan
            line = re.sub(r"\bval_loss=\S+", "\x1b[33m\\g<0>\x1b[0m", line)  # yellow
        say(line)
        if self.tracker is not None:
            try:
                self.tracker.log(values, step=values["step"])
            except Exception as e:  # an outage of wandb must not stop a run
                warn(f"{WANDB}: {e}; going on without it")
                self.tracker = None

    def close(self):
        for rows in (self.metrics, self.experts, self.notes):
            rows.close()
        if self.tracker is not None:
            with best_effort(WANDB, Exception):
                self.tracker.finish()

    def speed(self):
        """Return how fast this start was: 400 steps in 1:52, median 240 ms, 17,000 tok/s."""
        ms, tok_s = map(statistics.median, zip(*self.speeds, strict=True))
        steps = self.last_row["step"] - self.begun["step"]
        took = clock(time.time() - self.begun["time"])
        return f"{steps} steps in {took}, median {ms:.0f} ms, {tok_s:,.0f} tok/s"


# The words of a step's line; a row may lack some: {key: how it is printed}
WORDS = {"step": "step={}".format, "lr": "lr={:.2e}".format, "grad_norm": "gnorm={:.3f}".format,
         "ms": "dt={:.1f}ms".format, "tok_s": "tok/s={:.0f}".format, "tflops": "tflops={:.1f}".format,
         "mfu": "mfu={:.1%}".format, "loss_scale": "scale={:.5g}".format,
         "tokens": lambda n: f"tokens={short(n)}", "left": lambda seconds: f"left={clock(seconds)}",
         "batch": "batch={}".format, "val_loss": "val_loss={:.4f}".format, "val_ppl": "val_ppl={:.5g}".format}


def format_row(row, steps, widths):
    """Return the printed lines of a row of a run of so many steps; below the first, experts and --timers.

    widths: {word: characters of its longest so far}, which grow: words stand below each other.
    """
    row = {**row, "step": f"{row['step']}/{steps}"}
    if "loss" in row:
        row["step"] += f" loss={row['loss']:.4f}"
    line = []
    for key, form in WORDS.items():
        word = form(row[key]) if key in row else ""
        widths[key] = max(widths.get(key, 0), len(word))
        if widths[key]:
            line.append(word.ljust(widths[key]))
    line = [" ".join(line).rstrip()]
    if row.get("skip_reason"):
        line.append(f"({row['skip_reason']})")
    line += [f"{key}={row[key]}" for key in ("skipped", "nan_steps") if row.get(key)]
    lines = [" ".join(line)]
    if "aux_loss" in row:
        lines.append(f"  aux={row['aux_loss']:.3f} load_max={row['expert_load_max']:.2f} "
                     f"dropped={row['dropped']:.1%}")
    timers = []
    for phase in timing.Clock.PHASES:
        if f"t_{phase}" in row:
            span = f"{row[f't_{phase}_min']:.1f}", f"{row[f't_{phase}']:.1f}"
            timers.append(f"{phase}={'-'.join(dict.fromkeys(span))}")  # one number if they are equal
    if "bubble" in row:
        timers.append(f"bubble={row['bubble']:.1%}")
    if timers:
        lines.append(f"  ms: {' '.join(timers)}")
    return "\n".join(lines)


# Weights & Biases

WANDB = "wandb (pip install wandb)"


def start_wandb(mode, out, config):
    """Return a run of wandb, whose own process sends the rows, or None where that fails: one line says why.

    OUT/wandb_id keeps its id, so that all starts of a run are one curve. WANDB_PROJECT, WANDB_NAME, WANDB_DIR
    and WANDB_MODE count. If the server is not reached, the run is recorded in OUT/wandb/.
    """
    with best_effort(WANDB, Exception):
        import wandb
        told = wandb.setup(wandb.Settings(silent=True)).settings  # else a terminal is asked for a key
        kept = out / "wandb_id"
        if not kept.exists():
            write_whole(kept, secrets.token_hex(4))
        folder = out if Path(told.root_dir) == Path.cwd() else told.root_dir
        start = functools.partial(wandb.init, project=told.project or "nanoshard",
                                  name=told.run_name or out.resolve().name, dir=folder, id=kept.read_text(),
                                  resume="allow", config=config, settings=wandb.Settings(init_timeout=10))
        try:
            tracker = start(mode=told.mode if mode == "online" else mode)
        except wandb.errors.CommError as e:
            warn(f"wandb: no answer within 10 s, so it is recorded offline ({e}); wandb sync sends it")
            tracker = start(mode="offline")
        if tracker.url:
            say(f"wandb: {tracker.url}")
        return tracker
