"""What a run prints and leaves: metrics.jsonl, config.json, report.html. plot.py draws its plots.

metrics.jsonl is the record from which a resumed run goes on. Everything else may fail without ending the run.
"""
import contextlib
import dataclasses
import json
import math
import os
import platform
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import plot
from config import FLAGS, Config, Outcome, has_effect, typed
from corpus.samples import first_folder
from cost.parameters import Rank, flops_per_token
from cost.step_time import peak_flops
from cost.traffic import bytes_between_nodes, traffic
from fast.compile import compile_seconds
from fast.symm_mem import bytes_allocated
from interface.files import Rows, must_write, write_whole
from interface.presets import PRESETS
from interface.terminal import clock, say, short, show, warn
from moe import expert_stats
from ops.accelerator import device_name, peak_memory, peak_resident
from optim import learning_rate
from pipeline import generate
from runtime import ending, profiles, timing, watch
from runtime.layer_norms import LayerNorms
from skip import not_finite_reason

# -----------------------------------------------------------------------------
# The numbers of a step

class Metrics:
    """What a rank measures from one row of metrics.jsonl to the next."""

    def __init__(self, cfg, mesh, device):
        self.clock = timing.Clock(device)
        self.timers = timing.Timers(device) if cfg.timers else contextlib.nullcontext
        self.stragglers = watch.Stragglers(mesh, device)
        self.layer_norms = None

    def start(self, run):
        """Count what is sent from here on: the first step of a train.Run comes next."""
        if run.cfg.log_layers:
            self.layer_norms = LayerNorms(run.cfg, run.data_parallel, run.opt)
        for axis in run.mesh.axes().values():
            axis.sent.clear()

    def row(self, run, batch, stats):
        """Return the row of the step that a train.Run has done on `batch` sequences.

        stats: its optim.StepStats, or None if --train-range-to-skip names the step. The times are means since
        the row before. Collective: some values are maxima over the ranks.
        """
        cfg = run.cfg
        sent = {name: sum(axis.sent.values()) for name, axis in run.mesh.axes().items()}
        steps = self.clock.steps
        row = metrics_row(cfg, run.world, run.state, self.clock, batch, stats, run.guard.reason)
        row.update(self.stragglers.report())
        if cfg.timers:
            row.update(phase_times(self.timers, steps, run.mesh))
        if run.opt.loss_scale is not None:
            row["loss_scale"] = run.opt.loss_scale.item()
        if self.layer_norms is not None:
            row.update(self.layer_norms.report())
        if stats is not None and cfg.n_experts:
            experts = expert_stats(run.model, batch // cfg.micro_batch)  # of every layer, on every rank
            row.update(expert_metrics(experts))
            if run.log_file is not None:
                run.log_file.experts(run.state.step, experts)
        if stats is not None and run.state.step == run.first_step and run.log_file is not None:
            settled = dataclasses.replace(cfg, doc_mask="on" if run.train_data.has_documents else "off")
            predicted = traffic(Rank(settled, run.mesh, run.state.vocab_size, run.choice), batch)
            counted = report_traffic(predicted, sent, run.mesh, run.world.nodes)
            if counted:
                run.log_file.note(run.state.step, traffic=counted)
            if cfg.compile:
                row["compile_s"] = compile_seconds()
        return row


def metrics_row(cfg, world, state, clock, batch, stats, refusal):
    """Return a row of metrics.jsonl. Collective over the world.

    clock: a timing.Clock, whose counts start again at zero. stats: see Metrics.row. refusal: why the step was
    not taken, if the host knows.
    """
    steps, samples = clock.steps, clock.samples
    ms = clock.per_step()
    row = {"step": state.step, "tokens": state.samples * cfg.seq_len, "samples": state.samples,
           "global_batch": batch, "lr": learning_rate(cfg, state.step), "skipped": state.skipped,
           "nan_steps": state.nan_steps, **step_statistics(stats, refusal)}
    if steps:
        mean_batch = samples / steps  # the batch may have grown since the row before
        row.update(rates(cfg, world, mean_batch, ms, state.vocab_size))
    held = peak_resident()  # the most bytes, of the host's memory
    if world.device.type != "cpu":
        _, held = peak_memory(world.device) or (None, None)  # allocated, reserved
        if held is not None:
            held += bytes_allocated()
    if held is not None:
        gib = held / 2**30
        most, least = world.everyone.maximum([gib, -gib])  # two numbers from each rank to all
        row.update(mem_gb=most, mem_gb_min=-least)
    return row


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
    """Return the keys that follow from ms, the milliseconds of a step of `batch` sequences."""
    tokens_per_gpu = batch * cfg.seq_len / ms * 1e3 / world.size  # per second
    full, causal = flops_per_token(cfg, vocab_size)
    peak = peak_flops(world.device)
    return {"ms": ms, "ms_per_sample": ms / batch,
            "tok_s": tokens_per_gpu * world.size, "tok_s_gpu": tokens_per_gpu,
            "tflops": tokens_per_gpu * full / 1e12, "tflops_causal": tokens_per_gpu * causal / 1e12,
            "mfu": tokens_per_gpu * full / peak if peak else None}


def phase_times(timers, steps, mesh):
    """Return {t_PHASE: ms per step of the slowest rank}, for --timers. Collective over the world.

    Of several stages also the bubble: by how much all micro-batches take longer than forward and backward of
    the slowest stage.
    """
    own = timers.per_step(steps)
    busy = own["forward"] + own["backward"]
    # A number per phase and two more go from each rank to all, over the world.
    *phases, busy, everything = mesh.world.everyone.maximum([*own.values(), busy, busy + own["pipeline"]])
    row = {f"t_{phase}": t for phase, t in zip(own, phases, strict=True)}
    if mesh.pp.size > 1 and steps:
        row["bubble"] = everything / busy - 1
    return row


def expert_metrics(layers):
    """Return means over the layers, and the load of the busiest expert of any layer (1.0 is balanced)."""
    row = {}
    for key, name in (("aux_loss", "aux"), ("z_loss", "z"), ("dropped", "dropped")):
        row[key] = statistics.fmean(layer[name] for layer in layers.values())
    row["expert_load_max"] = max(max(layer["load"]) * len(layer["load"]) for layer in layers.values())
    return row


def report_traffic(predicted, sent, mesh, nodes):
    """Print the bytes that this rank sent in the first step, by axis: predicted, and counted (Axis.sent).

    predicted, sent: {axis name: bytes}. nodes: the node of each rank of the mesh. Return {axis name, or on
    several nodes "to other nodes": [predicted, counted]}.
    """
    pairs = {axis: [nbytes, sent[axis]] for axis, nbytes in predicted.items()}
    if len(set(nodes)) > 1:
        leaving = [bytes_between_nodes(mesh, dict(zip(pairs, column, strict=True)), lambda rank: nodes[rank])
                   for column in zip(*pairs.values(), strict=True)]
        pairs["to other nodes"] = leaving
    if pairs:
        say("comm per step, MB sent by rank 0, predicted / measured:")
    for axis, (expected, counted) in pairs.items():
        say(f"  {axis:14}{expected / 1e6:10.4g} / {counted / 1e6:.4g}")
    return pairs


# -----------------------------------------------------------------------------
# Both ends of a run

def begin(run, found):
    """Say on rank 0 what kind of run begins, from a checkpoint's path or None, and return its Log."""
    cfg = run.cfg
    run.stop.watch_file(run.out)
    log_file = make_log(run)
    started(cfg, run.model, found, run.batch, run.train_data, run.skip)
    say_what_has_no_effect(cfg)
    log_file.profiler = profiles.start_profile(cfg.profile)
    if cfg.trace:
        run.step = profiles.traced(run)
    return log_file


def end(run):
    """Write on rank 0 what a run leaves besides checkpoints, and say how it ended."""
    profiles.end_profile(run.log_file.profiler, run.out)
    run.log_file.close()
    is_finished = run.outcome in (Outcome.DONE, Outcome.FAILED)  # a run that goes on draws its plot later
    plot.at_end(run.out, run.log_file.last_experts, run.cfg.plot and is_finished)
    if run.log_file.speeds:
        say(run.log_file.speed())
    ending.report_ending(run)


def make_log(run):
    """Return the Log of rank 0."""
    cfg = run.cfg
    world = run.world
    device = f"CPU, {os.cpu_count()} cores" if world.device.type == "cpu" else device_name(world.device)
    config = {**dataclasses.asdict(cfg), "vocab_size_used": run.state.vocab_size, "git": git_revision(),
              "argv": sys.argv, "world": world.size, "nodes": world.n_nodes, "launcher": world.launcher,
              "dp": run.mesh.dp.size, "torch": torch.__version__, "attention": run.choice.attention_by(),
              "machine": {"host": platform.node(), "device": device, "python": platform.python_version()}}
    if cfg.objective == "mlm":
        config["mask_token"] = run.train_data.mask_token
    with must_write(run.out):
        tokenizer = {}
        if cfg.data != "synthetic":
            paths = [Path(first_folder(cfg.data), name) for name in ("meta.json", "tokenizer.json")]
            tokenizer = {path.name: path.read_bytes() for path in paths if path.exists()}
        return Log(run.out, config, run.state.step, cfg.wandb, run.state.changed, tokenizer)


def git_revision():
    """Return the commit of this code, with -dirty if files differ from it, or "unknown" outside of git."""
    command = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40",
               "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def started(cfg, model, resumed, batch, source, skip):
    """Print what kind of run begins. batch: sequences per step, after the ramp."""
    n_parameters = sum(p.numel() for p in model.parameters())
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    how = f"resumed {resumed}" if resumed else "started"
    cp = f" cp {cfg.cp}" if cfg.cp > 1 else ""
    here = " on this rank" if model.mesh.world.size > 1 else ""
    if cfg.lora:
        here += f", of which {n_trained:,} train"
    say(f"{how}: {n_parameters:,} parameters{here}, dp {model.mesh.dp.size} "
        f"tp {cfg.tp}{cp} pp {cfg.pp} ep {cfg.ep} zero {cfg.zero}")
    samples = "synthetic data without end"
    if cfg.data != "synthetic":
        samples = f"{source.n_samples:,} training samples"
    skipping = f", skipping steps {skip}" if skip.pairs else ""
    say(f"  {batch} x {cfg.seq_len} tokens per step, {samples}{skipping}")
    if source.has_documents:
        say("  each document attends to itself alone (--doc-mask)")


def say_what_has_no_effect(cfg):
    """Name the flags that differ from the preset's and change nothing in this run."""
    preset = Config(**PRESETS[cfg.preset])
    for name, said in FLAGS.items():
        value = getattr(cfg, name)
        if value != getattr(preset, name) and not has_effect(name, cfg):
            other = " ".join(typed(said["needs"]).split("="))
            say(f"  {typed(name)} {value} has no effect without {other}")


def print_sample(model, tokenizer, prompt, seed):
    """For --prompt: print on rank 0 how the model continues the text `prompt`, and return it; other ranks
    return "". Collective over the world."""
    ids = generate(model, tokenizer.encode(prompt), max_new_tokens=100, temperature=0.8, top_k=50, seed=seed)
    if model.mesh.world.rank != 0:
        return ""
    text = tokenizer.decode(ids)
    show(f"--- {text}\n---\n")
    return text


# -----------------------------------------------------------------------------
# The files

class Log:
    """metrics.jsonl, experts.jsonl, history.jsonl (a row per start) and the printed line; notes.jsonl, what
    report.html shows besides.

    resumed: completed steps of the checkpoint from which the run goes on; rows of later steps are removed.
    changed: {flag: [before, now]} since that checkpoint. others: {name: bytes} of the tokenizer's files.
    """

    def __init__(self, out, config, resumed=0, wandb="off", changed=None, others=None):
        self.out = Path(out)
        self.begun = {"step": resumed, "time": time.time(), "changed": changed or {}, "config": config}
        self.out.mkdir(parents=True, exist_ok=True)
        for name, content in {"config.json": json.dumps(config, indent=1), **(others or {})}.items():
            write_whole(self.out / name, content)
        history = Rows(self.out / "history.jsonl", math.inf, create=True)
        history.add(self.begun)
        history.close()
        self.metrics = Rows(self.out / "metrics.jsonl", resumed or -1, create=True)
        self.expert_rows = Rows(self.out / "experts.jsonl", resumed or -1)
        self.notes = Rows(self.out / "notes.jsonl", resumed or -1)
        self.last_experts = None
        self.last_row = {}
        self.first_done = None  # (when, which) the first step of this start was done
        self.speeds = []  # (ms, tok_s) of the rows behind it
        self.profiler = None  # of --profile
        self.tracker = None if wandb == "off" else Tracker(wandb, self.out, config)

    def row(self, **values):
        """Write and print one logged step. A key whose value is None does not apply and is left out."""
        values = {key: value for key, value in values.items() if value is not None}
        self.metrics.add(values)
        self.last_row = values
        steps = self.begun["config"].get("steps")
        left = self.seconds_left(values["step"], steps)
        if left is not None and "ms" in values:
            self.speeds.append((values["ms"], values["tok_s"]))
        say(format_row(values, steps, left))
        if self.tracker is not None:
            self.tracker.add(values)

    def seconds_left(self, step, steps):
        """Return the seconds until the last step, by the mean of all since the first, or None.

        The first step of a start also compiles and warms up, so it does not count.
        """
        now = time.monotonic()
        if self.first_done is None:
            self.first_done = now, step
        when, first = self.first_done
        if steps is None or step == first:
            return None
        return (now - when) / (step - first) * (steps - step)

    def speed(self):
        """Return how fast this start was: 400 steps in 1:52, median 240 ms, 17,000 tok/s."""
        ms, tok_s = map(statistics.median, zip(*self.speeds, strict=True))
        steps = self.last_row["step"] - self.begun["step"]
        took = clock(time.time() - self.begun["time"])
        return f"{steps} steps in {took}, median {ms:.0f} ms, {tok_s:,.0f} tok/s"

    def experts(self, step, layers):
        """Write a row of experts.jsonl. layers: of moe.expert_stats()."""
        self.expert_rows.add({"step": step, "layers": layers})
        self.last_experts = layers

    def note(self, step, **what):
        """Write notes.jsonl: the samples of --prompt, and the bytes that the first step sent."""
        self.notes.add({"step": step, **what})

    def close(self):
        """Write what waits, and say what could not be written."""
        for rows in (self.metrics, self.expert_rows, self.notes):
            rows.close()
        if self.tracker is not None:
            self.tracker.close()


# What the line of a step says of its row, if the row has it: {key: how it is printed}
WORDS = {"loss": "loss={:.4f}", "val_loss": "val_loss={:.4f}", "lr": "lr={:.2e}", "grad_norm": "gnorm={:.3f}",
         "ms": "dt={:.1f}ms", "tok_s": "tok/s={:.0f}", "mfu": "mfu={:.1%}"}


def format_row(row, steps=None, left=None):
    """Return the printed lines of a row: the step, and below it experts and --timers.

    steps: the last step. left: the seconds until then, or None.
    """
    words = [f"step={row['step']}/{steps}" if steps else f"step={row['step']}"]
    words += [form.format(row[key]) for key, form in WORDS.items() if key in row]
    if "tokens" in row:
        words.append(f"tokens={short(row['tokens'])}")
    if left:
        words.append(f"left={clock(left)}")
    if row.get("skip_reason"):
        words.append(f"({row['skip_reason']})")
    words += [f"{key}={row[key]}" for key in ("skipped", "nan_steps") if row.get(key)]
    lines = [" ".join(words)]
    if "aux_loss" in row:
        lines.append(f"  aux={row['aux_loss']:.3f} load_max={row['expert_load_max']:.2f} "
                     f"dropped={row['dropped']:.1%}")
    timers = [f"{key.removeprefix('t_')}={value:.1f}" for key, value in row.items() if key.startswith("t_")]
    if "bubble" in row:
        timers.append(f"bubble={row['bubble']:.1%}")
    if timers:
        lines.append(f"  ms: {' '.join(timers)}")
    return "\n".join(lines)


# -----------------------------------------------------------------------------
# Weights & Biases

class Tracker:
    """A run of wandb, whose own process sends the rows: add() waits for no network.

    OUT/wandb_id keeps its id, so that all starts of a run are one curve. WANDB_PROJECT, WANDB_NAME, WANDB_DIR
    and WANDB_MODE count. If the server is not reached, the run is recorded in OUT/wandb/, and close() prints
    the command that sends it later. Whatever fails costs one line.
    """

    def __init__(self, mode, out, config):
        self.run = None
        kept = out / "wandb_id"
        with self.one_line():
            import wandb
            told = wandb.setup(wandb.Settings(silent=True)).settings  # else a terminal is asked for a key
            if not kept.exists():
                write_whole(kept, secrets.token_hex(4))
            how = dict(project=told.project or "nanoshard", name=told.run_name or out.resolve().name, dir=out,
                       id=kept.read_text(), resume="allow", config=config,
                       settings=wandb.Settings(init_timeout=10))
            if Path(told.root_dir) != Path.cwd():
                how["dir"] = told.root_dir
            if told.mode in ("offline", "disabled"):
                mode = told.mode
            try:
                self.run = wandb.init(mode=mode, **how)
            except wandb.errors.CommError as e:
                why = str(e).splitlines()[0]
                warn(f"wandb: no answer within 10 s, so this run is recorded offline ({why})")
                self.run = wandb.init(mode="offline", **how)
            if self.run.url:
                say(f"wandb: {self.run.url}")

    @contextlib.contextmanager
    def one_line(self):
        """Run the body. If it fails, one line says why, and the run goes on without wandb."""
        try:
            yield
        except Exception as e:  # an outage of wandb must not stop a run
            warn(f"wandb (pip install wandb): {e}; going on without it")
            self.run = None

    def add(self, row):
        """Send a row of metrics.jsonl, some time."""
        with self.one_line():
            if self.run is not None:
                self.run.log(row, step=row["step"])

    def close(self):
        """Send what is left. Say how to send what could not be sent."""
        with self.one_line():
            if self.run is not None:
                self.run.finish()
                if self.run.settings.mode == "offline":
                    say("wandb: this run was recorded offline; to send it: wandb sync "
                        f"{self.run.settings.sync_dir}")
