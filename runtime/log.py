"""What a run prints and leaves: metrics.jsonl, config.json, report.html. plot.py draws its plots.

    Metrics        every rank: what a run measures from one row of metrics.jsonl to the next
    Log            rank 0: the row and a printed line per logged step
    begin, end     what rank 0 does besides at both ends of a run

metrics.jsonl is the record from which a resumed run goes on. Everything else may fail without ending the run.
"""
import contextlib
import dataclasses
import json
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

import plot
from config import FLAGS, Config, Outcome, has_effect
from corpus.samples import first_folder
from cost.parameters import flops_per_token
from cost.step_time import peak_flops
from cost.traffic import bytes_between_nodes, traffic
from fast import flash
from fast.compile import compilation
from fast.symm_mem import bytes_allocated
from interface import report
from interface.command_line import one_line
from interface.files import (
    Rows,
    must_write,
    write_whole,
)
from interface.presets import PRESETS
from interface.schema import load_json
from interface.terminal import clock, say, short, show
from moe import expert_stats
from ops.accelerator import device_name, peak_memory, peak_resident
from optim import learning_rate
from pipeline import generate
from runtime import ending, profiles, session, timing, watch
from runtime.launch import print_node
from runtime.layer_norms import LayerNorms
from runtime.tracker import Tracker
from skip import WINDOW, not_finite_reason

# -----------------------------------------------------------------------------
# The numbers of a step

class Metrics:
    """What a rank measures from one row of metrics.jsonl to the next."""

    def __init__(self, cfg, mesh, device):
        self.clock = timing.Clock(device)
        self.timers = timing.Timers(device) if cfg.timers else contextlib.nullcontext
        self.stragglers = watch.Stragglers(mesh, device)
        self.layer_norms = None
        self.graphed = None  # a step that knows how its steps were done

    def start(self, run):
        """Count what is sent from here on: the first step of a train.Run comes next."""
        if run.cfg.log_layers:
            self.layer_norms = LayerNorms(run.cfg, run.data_parallel, run.opt)
        if run.choice.graph:
            self.graphed = run.step
        for axis in run.mesh.axes().values():
            axis.sent.clear()

    def row(self, run, batch, stats):
        """Return the row of the step that a train.Run has done on `batch` sequences.

        stats: its optim.StepStats, or None if --train-range-to-skip names the step. The times are means since
        the row before. Collective: some values are maxima over the ranks.
        """
        cfg = run.cfg
        state = run.state
        sent = {name: sum(axis.sent.values()) for name, axis in run.mesh.axes().items()}
        steps = self.clock.steps
        row = metrics_row(cfg, run.world, state, self.clock, batch, stats, run.guard.reason)
        row.update(self.stragglers.report())
        if cfg.timers:
            row.update(phase_times(self.timers, steps, run.mesh))
        if self.graphed is not None:
            row.update(self.graphed.path_shares())
        if run.opt.loss_scale is not None:
            row["loss_scale"] = run.opt.loss_scale.item()
        if self.layer_norms is not None:
            row.update(self.layer_norms.report())
        if stats is None:
            return row
        if cfg.n_experts:
            # The statistics of every layer, on every rank.
            experts = expert_stats(run.model, batch // cfg.micro_batch)
            row.update(expert_metrics(experts))
            if run.log_file is not None:
                run.log_file.experts(state.step, experts)
        if state.step == run.first_step and run.log_file is not None:
            predicted = traffic(cfg, run.mesh, state.vocab_size, batch, run.choice)
            counted = report_traffic(predicted, sent, run.mesh, run.world.nodes)
            if counted:
                run.log_file.note(state.step, traffic=counted)
            if cfg.compile:
                row["compile_s"] = report_compilation(row["ms"] / 1e3)
            row.update(session.start_seconds())
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

    nbytes = most_memory(world.device)
    if nbytes is not None:
        [row["mem_gb"]] = world.tree.maximum([nbytes / 2**30])  # one number from each rank to all
    return row


def most_memory(device):
    """Return the most bytes that this rank has held: of the device, or of the host if it trains on a CPU.

    None where nobody counts.
    """
    if device.type == "cpu":
        return peak_resident()
    peaks = peak_memory(device)
    if peaks is None:
        return None
    _, reserved = peaks
    return reserved + bytes_allocated()


def step_statistics(stats, refusal):
    """Return {skip_reason, loss, ...} of a step; only the reason if the step was not taken."""
    if stats is None:
        return {"skip_reason": "range"}
    if refusal is not None:
        return {"skip_reason": refusal}

    numbers = torch.stack(tuple(stats)).tolist()  # sync point
    values = dict(zip(stats._fields, numbers, strict=True))
    if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
        return {"skip_reason": not_finite_reason(values["loss"], values["grad_norm"])}
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
    """Return {t_PHASE: ms per step of the slowest rank}, for --timers.

    With several stages, the result also has the bubble: the fraction by which all micro-batches take longer
    than the forward and backward of the slowest stage. It is the bubble of cost/step_time.py, plus messages.
    Collective over the world.
    """
    own = timers.per_step(steps)
    busy = own["forward"] + own["backward"]
    own_ms = [*own.values(), busy, busy + own["pipeline"]]
    # A number per phase and two more go from each rank to all, over the world.
    *phases, busy, everything = mesh.world.tree.maximum(own_ms)

    row = {f"t_{phase}": t for phase, t in zip(own, phases, strict=True)}
    if mesh.pp.size > 1 and steps:
        row["bubble"] = everything / busy - 1
    return row


def expert_metrics(layers):
    """{layer: {load, dropped, aux, z, entropy}} -> {key of metrics.jsonl: number}.

    The numbers are means over the layers, and the load of the busiest expert of any layer (1.0 is balanced).
    """
    def mean(key):
        return sum(layer[key] for layer in layers.values()) / len(layers)

    busiest = max(max(layer["load"]) * len(layer["load"]) for layer in layers.values())
    return {"aux_loss": mean("aux"), "z_loss": mean("z"), "dropped": mean("dropped"),
            "expert_load_max": busiest}


def report_traffic(predicted, sent, mesh=None, nodes=()):
    """Print the bytes that this rank sent in the first step, by axis: predicted, and counted (Axis.sent).

    predicted, sent: {axis name: bytes}. nodes: the node of each rank of the mesh; on several nodes, a line
    says how many of the bytes leave the node. Return {axis name, or "to other nodes": [predicted, counted]}.
    """
    if not predicted:
        return {}
    pairs = {axis: [nbytes, sent[axis]] for axis, nbytes in predicted.items()}
    if len(set(nodes)) > 1:
        leaving = [bytes_between_nodes(mesh, dict(zip(pairs, column, strict=True)), lambda rank: nodes[rank])
                   for column in zip(*pairs.values(), strict=True)]
        pairs["to other nodes"] = leaving
    width = max(6, *map(len, pairs))
    lines = ["comm per step, MB sent by rank 0, predicted / measured:"]
    for axis, (expected, counted) in pairs.items():
        lines.append(f"  {axis:{width}}{expected / 1e6:10.4g} / {counted / 1e6:.4g}")
    print("\n".join(lines), flush=True)
    return pairs


def report_compilation(first_step):
    """Print what share of the first step was compilation, of this rank's blocks. Return its seconds.

    first_step: the seconds that the step took.
    """
    cost = compilation()
    parts = cost.cached + cost.compiled
    say(f"  the first step took {first_step:.1f} s, {cost.seconds:.1f} s of them to compile "
        f"{cost.graphs} graphs; {cost.cached} of their {parts} parts were in the cache, "
        f"{cost.folder}")
    return cost.seconds


# -----------------------------------------------------------------------------
# Start of a run

def begin(run, found):
    """Say on rank 0 what kind of run begins, a train.Run, and return its Log.

    found: path of the checkpoint from which it goes on, or None. OSError: OUT cannot be written.
    """
    cfg = run.cfg
    run.stop.watch_file(run.out)
    say_other_attention(found, run.choice.attention_by())
    log_file = make_log(run)
    log_file.prepare_for_kill(run.watchdog)
    started(cfg, run.model, found, run.batch, run.train_data, run.skip)
    say_what_has_no_effect(cfg, run.mesh)
    log_file.profiler = profiles.start_profile(cfg.profile)
    if cfg.trace:
        run.step = profiles.traced(run)
    return log_file


def end(run):
    """Write on rank 0 what a run leaves besides checkpoints, and say how it ended."""
    profiles.end_profile(run.log_file.profiler, run.out)
    run.log_file.close()
    plot.at_end(run.out, run.log_file.last_experts, run.cfg.plot and ending.is_finished(run))
    ending.report_ending(run)
    if run.outcome is Outcome.STOPPED:
        run.log_file.print_how_to_go_on()


def make_log(run):
    """Return the Log of rank 0, after notes about the machine. OUT also gets what sample.py needs: the
    tokenizer and, with mlm, the [MASK] token."""
    cfg = run.cfg
    mesh = run.mesh
    world = run.world
    config = {**dataclasses.asdict(cfg), "vocab_size_used": run.state.vocab_size}
    if cfg.objective == "mlm":
        config["mask_token"] = run.train_data.mask_token
    config.update(git=git_revision(), argv=sys.argv, world=world.size, nodes=world.n_nodes,
                  launcher=world.launcher, dp=mesh.dp.size, torch=torch.__version__, machine=machine(world),
                  attention=run.choice.attention_by())

    if world.n_nodes == 1:
        print_node(world)
    with must_write(run.out):
        tokenizer = {}
        if cfg.data != "synthetic":
            tokenizer = read_tokenizer(Path(first_folder(cfg.data)))
        return Log(run.out, config, run.state.step, cfg.wandb, run.state.changed, tokenizer,
                   on_gpus=world.device.type != "cpu")


def say_other_attention(found, now):
    """Say on a resume if another kernel attends than before. found: the checkpoint's path, or None.

    now: what attends, as the choice names it.
    """
    if found is None:
        return
    with contextlib.suppress(OSError, ValueError):  # a checkpoint that was copied out of its run
        before = load_json(found.parent / "config.json")
        if isinstance(before, dict) and before.get("attention", now) != now:
            say(f"resume: attention {one_line(before['attention'])} -> {now}, equal but for rounding")


def machine(world):
    """Return what computes, in words: {"host", "device", "system", "python"}."""
    device = device_name(world.device)
    if world.device.type == "cpu":
        device = f"CPU, {os.cpu_count()} cores"
    return {"host": platform.node(), "device": device, "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version()}


def read_tokenizer(folder):
    """Return {name: bytes} of the files of a data folder that describe its tokenizer."""
    names = ("meta.json", "tokenizer.json")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def git_revision():
    """Return the commit of this code, with -dirty if files differ from it, or "unknown" outside of git."""
    command = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40",
               "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def started(cfg, model, resumed, batch, source, skip):
    """Print what kind of run begins.

    resumed: path of the checkpoint, or None. batch: sequences per step, after the ramp. source: the
    training data. skip: the steps to skip.
    """
    n_parameters = sum(p.numel() for p in model.parameters())
    how = f"resumed {resumed}" if resumed else "started"
    cp = f" cp {cfg.cp}" if cfg.cp > 1 else ""
    here = " on this rank" if model.mesh.world.size > 1 else ""
    if cfg.lora:
        here += f", of which {sum(p.numel() for p in model.parameters() if p.requires_grad):,} train"
    say(f"{how}: {n_parameters:,} parameters{here}, dp {model.mesh.dp.size} "
        f"tp {cfg.tp}{cp} pp {cfg.pp} ep {cfg.ep} zero {cfg.zero}")
    skipping = f", skipping steps {skip}" if skip.pairs else ""
    samples = f"{source.n_samples:,} training samples"
    if cfg.data == "synthetic":
        samples = "synthetic data without end"
    say(f"  {batch} x {cfg.seq_len} tokens per step, {samples}{skipping}")
    if cfg.skip_spikes:
        say(f"  --skip-spikes {cfg.skip_spikes:g} skips none before {WINDOW // 2} steps were "
            "taken, for comparison")
    if cfg.compile:
        say("  --compile: the first step compiles the blocks, which can take a minute and more")
    if cfg.fp8 and not torch.accelerator.is_available():
        say("  --fp8: a CPU rounds to fp8 and multiplies as without it, which takes longer")
    has_flash = any(getattr(module, "flash", None) is not None for module in model.modules())
    if has_flash and not source.has_documents:  # Documents need a mask in every layer.
        say(f"  attention without a mask by {flash.NAME}, whose kernels are compiled first")
    has_kernel = any(getattr(module, "flex", None) is not None for module in model.modules())
    if has_kernel:
        how = "in a flash kernel that skips hidden keys (flex_attention): the first step compiles it"
    else:
        how = ("through a mask, which the flash kernels of GPUs do not take: attention is slower and keeps "
               "more memory")
    if source.has_documents:
        say(f"  each document attends to itself alone (--doc-mask), {how}")
    if 0 < cfg.window < cfg.seq_len:
        say(f"  --window {cfg.window}: its layers attend {how}")


def say_what_has_no_effect(cfg, mesh):
    """Name the flags that differ from the preset's and change nothing in this run."""
    preset = Config(**PRESETS[cfg.preset])
    for name, said in FLAGS.items():
        value = getattr(cfg, name)
        if value != getattr(preset, name) and not has_effect(name, cfg):
            other = " ".join(said["needs"].replace("_", "-").split("="))
            typed = " ".join(map(str, value)) if isinstance(value, tuple) else value
            say(f"  --{name.replace('_', '-')} {typed} has no effect without --{other}")
    # Norms are shared by the ranks of a stage, a tied embedding by two stages.
    shares_embedding = cfg.tied and mesh.pp.size > 1
    if cfg.zero and mesh.stage.size == 1 and not shares_embedding:
        say(f"  --zero {cfg.zero} has no effect: no other rank holds the same weights")


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

    resumed: completed steps of the checkpoint from which the run goes on. Rows of later steps are removed,
    because they will be written again. changed: {flag: [before, now]} since that checkpoint.
    others: {name: bytes} of files that readers of OUT need beside config.json. on_gpus: whether the ranks
    train on GPUs.
    """

    def __init__(self, out, config, resumed=0, wandb="off", changed=None, others=None, *, on_gpus=False):
        self.out = Path(out)
        self.on_gpus = on_gpus
        self.begun = {"step": resumed, "time": time.time(), "changed": changed or {}, "config": config}
        self.others = others or {}
        self._write_start()
        self.metrics = Rows(self.out / "metrics.jsonl", resumed or -1, create=True)
        self.expert_rows = Rows(self.out / "experts.jsonl", resumed or -1)
        self.last_experts = None
        self.last_row = {}
        self.first_done = None  # (when, which) the first step of this start was done
        self.profiler = None  # of --profile
        self.notes = Rows(self.out / "notes.jsonl", resumed or -1)
        self.tracker = None if wandb == "off" else Tracker(wandb, self.out, config)

    def _write_start(self):
        """Write what is known at the start: history.jsonl, config.json, and the tokenizer."""
        self.out.mkdir(parents=True, exist_ok=True)
        rows = self._history()  # config.json may be that of an earlier part
        write_whole(self.out / "config.json", json.dumps(self.begun["config"], indent=1))
        for name, content in self.others.items():
            write_whole(self.out / name, content)
        self._keep_history(rows)

    def _history(self):
        """Return the row of this start, behind the config.json of a run that began without history.jsonl."""
        rows = [self.begun]
        if self.begun["step"] and not (self.out / "history.jsonl").exists():
            with contextlib.suppress(OSError, ValueError):
                config = load_json(self.out / "config.json")
                rows.insert(0, {"step": 0, "config": config})
        return rows

    def _keep_history(self, rows):
        """Append the rows to history.jsonl."""
        history = Rows(self.out / "history.jsonl", math.inf, create=True)
        for row in rows:
            history.add(row)
        history.close()

    def row(self, **values):
        """Write and print one logged step. A key whose value is None does not apply and is left out."""
        values = {key: value for key, value in values.items() if value is not None}
        self.metrics.add(values)
        self.last_row = values
        steps = self.begun["config"].get("steps")
        left = None if steps is None else self.seconds_left(values["step"], steps)
        print(format_row(values, steps, left, self.on_gpus), flush=True)
        if self.tracker is not None:
            self.tracker.add(values)

    def seconds_left(self, step, steps):
        """Return the seconds until the last step, by the mean of all since the first, or None.

        The first step of a start also compiles and warms up, so it does not count.
        """
        now = time.monotonic()
        if self.first_done is None:
            self.first_done = now, step
            return None
        when, first = self.first_done
        return (now - when) / (step - first) * (steps - step)

    def experts(self, step, layers):
        """Write experts.jsonl: per layer the load of each expert, dropped, aux, z and router entropy."""
        self.expert_rows.add({"step": step, "layers": layers})
        self.last_experts = layers

    def note(self, step, **what):
        """Write notes.jsonl: the samples of --prompt, and the bytes that the first step sent."""
        self.notes.add({"step": step, **what})

    def print_how_to_go_on(self):
        """Print the command that goes on with a run that was stopped."""
        say(f"to go on, type: {self._command(resume='auto')}")

    def prepare_for_kill(self, watchdog):
        """Tell the watchdog, a watch.Watch, what to type after a kill of this run."""
        if session.is_program():
            again = self._command(resume="auto")
            watchdog.if_killed(self.out, again, self._command())
            session.signals.again = again

    def _command(self, **changes):
        """Return the command line of this run, with other values of some flags."""
        if not session.is_program():
            return "the same flags with --resume auto"
        return report.command_of(self.begun["config"], changes)

    def close(self):
        """Say what could not be written, when the run has ended."""
        self.metrics.close()
        self.expert_rows.close()
        self.notes.close()
        if self.tracker is not None:
            self.tracker.close()


def format_row(row, steps=None, left=None, on_gpus=False):
    """Return the printed lines of a row: the step, and below it experts and --timers.

    steps: the last step. left: the seconds until then, or None. on_gpus: whether the ranks train on GPUs.
    """
    lines = [" ".join(_words_of_step(row, steps, left, on_gpus))]
    if "aux_loss" in row:
        lines.append(f"  aux={row['aux_loss']:.3f} load_max={row['expert_load_max']:.2f} "
                     f"dropped={row['dropped']:.1%}")
    timers = [f"{key.removeprefix('t_')}={value:.1f}" for key, value in row.items() if key.startswith("t_")]
    if "bubble" in row:
        timers.append(f"bubble={row['bubble']:.1%}")
    if timers:
        lines.append(f"  ms: {' '.join(timers)}")
    return "\n".join(lines)


USUAL_SHARES = {"graph": 1.0, "redone": 0.0}  # of steps on a GPU: all replay a graph, none is done again


def _words_of_step(row, steps, left, on_gpus):
    """Return the printed line of a step as a list of words."""
    words = [f"step={row['step']}/{steps}" if steps else f"step={row['step']}"]
    if "loss" in row:
        words.append(f"loss={row['loss']:.4f}")
    if "val_loss" in row:
        words.append(f"val_loss={row['val_loss']:.4f}")
    words.append(f"lr={row['lr']:.2e}")
    if "grad_norm" in row:
        words.append(f"gnorm={row['grad_norm']:.3f}")
    if "ms" in row:
        words += [f"dt={row['ms']:.1f}ms", f"tok/s={row['tok_s']:.0f}"]
        if on_gpus and row["tok_s"] > row["tok_s_gpu"]:
            words.append(f"tok/s/gpu={row['tok_s_gpu']:.0f}")
    if "mfu" in row:
        words.append(f"mfu={100 * row['mfu']:.1f}%")
    for path in ("graph", "redone"):
        share = row.get(f"{path}_share", USUAL_SHARES[path])
        if share != USUAL_SHARES[path]:
            words.append(f"{path}={share:.0%}")
    if "tokens" in row:
        words.append(f"tokens={short(row['tokens'])}")
    if left:
        words.append(f"left={clock(left)}")
    if row.get("skip_reason"):
        words.append(f"({row['skip_reason']})")
    for key in ("skipped", "nan_steps"):
        if row.get(key):
            words.append(f"{key}={row[key]}")
    return words
