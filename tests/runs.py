"""Whole runs of train.main on the ranks of the pool, and comparisons of what they leave behind.

    session         one run on one rank
    go              the same on n ranks, at once
    rows, final     what a run leaves behind: metrics, a checkpoint
    same            whether two runs left the same bits
    assert_refused  a run that ended with one line about its wrong input
"""
import contextlib
import hashlib
import io
import json
import os
from pathlib import Path
from unittest import mock

import torch
from pool import run_ranks

import checkpoint
import prepare
import train
from runtime import launch

SHAPE = ["--n-layer=2", "--n-embd=16", "--n-head=2", "--n-kv-head=1", "--ffn-hidden=32", "--seq-len=16",
         "--vocab-size=100"]
TINY = [*SHAPE, "--data=synthetic", "--micro-batch=2", "--global-batch=4", "--lr=1e-2", "--warmup=2",
        "--log-every=1", "--eval-every=0", "--no-plot", "--weight-decay=0.1"]
TIMES = {"time", "ms", "ms_per_sample", "tok_s", "tok_s_gpu", "tflops", "tflops_causal", "mfu", "mem_gb",
         "step_ms_min", "step_ms_max", "slowest_rank"}


def session(world, argv, plan=None):
    """Run train.main(argv) on this rank. Return {code, out, err, steps}.

    This stands in for a process that a launcher starts. Such a process finds its rank in the
    environment, joins the others, prints, and ends with an exit code; to start it takes seconds. The
    workers of the pool have started and joined already, so main() runs inside of them, with these
    replacements:
        launch.launch     returns the World that the worker has
        launch.shutdown   does nothing: the pool leaves the process group
        stdout, stderr    are kept: out, err
        SystemExit        is caught: code
        train.Run         notes what each step starts with: steps, of record_steps()
        train.Step        makes a gradient NaN, and Run sends signals, where the plan says so

    plan: {number of a step: what goes wrong in it on the last rank}, a signal's number or "nan".
    """
    plan = plan or {}
    steps = []
    out, err = text_file(), text_file()
    with mock.patch.multiple(launch, launch=lambda *args: world, shutdown=lambda world: None), \
            mock.patch.multiple(train, Run=record_steps(steps, plan), Step=plant_nan(plan)), \
            contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            train.main(argv)
            code = 0
        except SystemExit as leaving:
            code = leaving.code
    return {"code": code, "steps": steps, "out": text_of(out), "err": text_of(err)}


def text_file():
    """Return a file like stdout, with a buffer of bytes below the text."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def text_of(file):
    return file.buffer.getvalue().decode()


def is_last(world):
    return world.rank == world.size - 1


def record_steps(steps, plan):
    """Return a train.Run that appends to steps, before each step, a dict of what the step starts with.

    first: the number of its first sample. data, state: hashes of this rank's micro-batches, and of its
    masters, moments and router biases. adam_t: the number of updates so far. Then it sends the signal
    that the plan has for the step.
    """
    class RecordingRun(train.Run):
        def next_batches(self, number, batch):
            first = self.state.samples
            batches = super().next_batches(number, batch)
            optimizer = self.parts.opt
            state = [*self.parts.model.buffers()]  # the routers' biases
            for master in optimizer.masters:
                moments = optimizer.adam.state[master]
                state += [master.detach(), moments["exp_avg"], moments["exp_avg_sq"]]
            data = [tensor for pair in batches for tensor in pair]
            steps.append({"first": first, "data": hash_of(data), "state": hash_of(state),
                          "adam_t": int(optimizer.adam_t())})
            planned = plan.get(number)
            if isinstance(planned, int) and is_last(self.world):
                os.kill(os.getpid(), planned)
            return batches
    return RecordingRun


def hash_of(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def plant_nan(plan):
    """Return a train.Step whose gradient holds a NaN on the last rank in the steps that are planned "nan"."""
    class StepWithNan(train.Step):
        def gradients(self, batches, number, *args, **kwargs):
            loss = super().gradients(batches, number, *args, **kwargs)
            if plan.get(number) == "nan" and is_last(self.model.mesh.world):
                bucket = self.data_parallel.buckets[0]
                bucket.grad[bucket.own_slice.start] = float("nan")  # in the slice that this rank owns
            return loss
    return StepWithNan


def assert_refused(result, *words):
    """Exit code 2, and on stderr exactly one line 'nanoshard: ...' that contains all of words."""
    lines = result["err"].splitlines()
    assert result["code"] == 2 and len(lines) == 1 and lines[0].startswith("nanoshard: "), result
    for word in words:
        assert word in lines[0], f"{word!r} is not in {lines[0]!r}"


def go(n, out, *flags, plan=None, code=0, base=TINY):
    """Do a session on each of n ranks. All must end with exit code `code`. Return rank 0's session."""
    results = run_ranks(n, session, [*base, f"--out={out}", *map(str, flags)], plan)
    assert [r["code"] for r in results] == [code] * n, results[0]["err"] + results[0]["out"]
    return results[0]


def rows(out, drop=TIMES):
    """Return the rows of metrics.jsonl without times and rates."""
    lines = Path(out, "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in drop and not k.startswith("t_")}
            for line in lines]


def final(out, step):
    """Return the checkpoint of a step: {name: full weight or moment}, and the meta of its index."""
    path = Path(out, f"step_{step:06d}")
    return checkpoint.full_tensors(path), checkpoint.check(path)["meta"]


def same(a, b, step):
    """Assert that two runs' checkpoints have equal bits: weights, moments, Adam's t and every counter."""
    (x, meta_x), (y, meta_y) = final(a, step), final(b, step)
    assert x.keys() == y.keys() and len(x) > 20 and {n.split("/")[0] for n in x} >= {"exp_avg", "exp_avg_sq"}
    for name in x:
        assert torch.equal(x[name], y[name]), f"{name} differs by {(x[name] - y[name]).abs().max()}"
    for key in ("step", "samples", "skipped", "nan_steps", "adam_t"):
        assert meta_x[key] == meta_y[key], key


def chars(folder):
    """Make token files of a few thousand characters. Return their directory, folder/toy."""
    words = ["ab", "cab", "bead", "face", "egg", "dig", "hide\n"]
    source = folder / "text.txt"
    source.write_text(" ".join(words[(i * i + i // 7) % len(words)] for i in range(2000)))
    assert prepare.main([str(source), "--name", "toy", "--tokenizer", "char", "--out", str(folder)]) == 0
    return folder / "toy"
