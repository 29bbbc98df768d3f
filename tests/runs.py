"""Whole runs of train.main on the ranks of the pool, and comparisons of what they leave behind."""
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import signal
import time
from pathlib import Path
from unittest import mock

import torch
from pool import run_ranks

import checkpoint
import prepare
import sample
import train
from cost.memory import state_bytes
from cost.parameters import Rank
from fast.choose import Choice
from interface.command_line import parse
from ops.split_master import whole
from parallel import make_mesh
from runtime import launch
from runtime.launch import World
from runtime.session import STOPPING, signals

SHAPE = ["--n-layer=2", "--n-embd=16", "--n-head=2", "--n-kv-head=1", "--ffn-hidden=32", "--seq-len=16",
         "--vocab-size=100"]
TINY = [*SHAPE, "--data=synthetic", "--micro-batch=2", "--global-batch=4", "--lr=1e-2", "--warmup=2",
        "--log-every=1", "--eval-every=0", "--no-plot", "--weight-decay=0.1"]
TIMES = {"time", "ms", "ms_per_sample", "tok_s", "tok_s_gpu", "tflops", "tflops_causal", "mfu", "mem_gb",
         "mem_gb_min", "step_ms_min", "step_ms_max", "slowest_rank"}


def session(world, argv, plan=None):
    """Run train.main(argv) on this rank. Return {code, out, err, steps}.

    This stands in for a process that a launcher starts, which takes seconds. The workers of the pool have
    already started and joined, so main() runs inside them; see record_steps for `steps`.

    plan: {number of a step: a signal's number or "nan"}, which is what goes wrong there on the last rank.
    """
    plan = plan or {}
    steps = []
    start = launch.Start("single" if world.size == 1 else "hydra", world.rank, world.size, world.rank)
    before = [signal.getsignal(number) for number in STOPPING]
    signals.__init__()
    signals.catch()
    with mock.patch.multiple(launch, launch=lambda *_, **__: world, shutdown=lambda world: None,
                             started_by=lambda: start), \
            mock.patch.multiple(train, Run=record_steps(steps, plan), Step=plant_nan(plan)):
        result = {**called(train.main, argv), "steps": steps}
    for number, handler in zip(STOPPING, before, strict=True):
        signal.signal(number, handler)
    return result


def called(main, argv):
    """Return {code, out, err} of a program's main."""
    out, err = text_file(), text_file()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in argv]) or 0
        except SystemExit as leaving:
            code = leaving.code
    return {"code": code, "out": text_of(out), "err": text_of(err)}


def text_file():
    """Return a file like stdout, with a buffer of bytes below the text."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def text_of(file):
    return file.buffer.getvalue().decode()


def is_last(world):
    return world.rank == world.size - 1


def record_steps(steps, plan):
    """Return a train.Run that records in `steps` what each step starts with.

    Before a step it appends a dict:
        first     the number of the step's first sample
        data      a hash of this rank's micro-batches
        state     a hash of this rank's masters, moments and router biases
        adam_t    the number of updates so far
    Then it sends its process the signal that the plan has for the step.
    """
    class RecordingRun(train.Run):
        def next_batch(self, number):
            first = self.state.samples
            batches, *rest = super().next_batch(number)
            optimizer = self.opt
            state = [*self.model.buffers()]  # the routers' biases
            for slices in ([whole(m).detach() for m in optimizer.masters], *optimizer.moments().values()):
                state += [piece for piece in slices if piece is not None]
            data = [tensor for pair in batches for tensor in pair]
            steps.append({"first": first, "data": hash_of(data), "state": hash_of(state),
                          "adam_t": int(optimizer.adam.step_count)})
            planned = plan.get(number)
            if isinstance(planned, int) and is_last(self.world):
                os.kill(os.getpid(), planned)
                while signal.getsignal(planned) != signal.SIG_IGN and not signals.number:
                    time.sleep(0.001)  # its thread answers
            return batches, *rest
    return RecordingRun


def hash_of(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())  # numpy knows no bf16
    return digest.hexdigest()


def plant_nan(plan):
    """Return a train.Step that puts a NaN into the last rank's gradient where the plan says "nan"."""
    class StepWithNan(train.Step):
        def gradients(self, batches, number, *args, **kwargs):
            loss = super().gradients(batches, number, *args, **kwargs)
            if plan.get(number) == "nan" and is_last(self.model.mesh.world):
                bucket = max(self.data_parallel.buckets, key=lambda bucket: bucket.filled)
                assert bucket.own_slice.start < bucket.filled, "padding is never written again"
                bucket.grad[bucket.own_slice.start] = float("nan")  # in the slice that this rank owns
            return loss
    return StepWithNan


def assert_refused(result, *words):
    """Assert exit code 2 and exactly one line on stderr, 'nanoshard: ...', that contains all words."""
    lines = result["err"].splitlines()
    assert result["code"] == 2 and len(lines) == 1 and lines[0].startswith("nanoshard: "), result
    for word in words:
        assert word in lines[0], f"{word!r} is not in {lines[0]!r}"


def refused(main, argv, *words):
    """Assert that a program's main ends with exit code 2 and one line on stderr that contains all words.

    Return the line.
    """
    result = called(main, argv)
    assert_refused(result, *words)
    return result["err"]


def go(n, out, *flags, plan=None, code=0, base=TINY):
    """Run a session on each of n ranks, assert that all exit with `code`, and return rank 0's session."""
    results = run_ranks(n, session, [*base, f"--out={out}", *map(str, flags)], plan)
    assert [r["code"] for r in results] == [code] * n, results[0]["err"] + results[0]["out"]
    return results[0]


def rows(out, drop=TIMES):
    """Return the rows of metrics.jsonl without times and rates."""
    lines = Path(out, "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in drop and not (drop and k.startswith("t_"))}
            for line in lines]


def final(out, step):
    """Return the checkpoint of a step: {name: full weight or moment}, and the meta of its index."""
    path = Path(out, f"step_{step:06d}")
    return checkpoint.full_tensors(path), checkpoint.check(path)["meta"]


def model_of(run, **changed):
    """Return the model of a run or a directory of Hugging Face, with other flags; in fp64 if they say so."""
    cfg, vocab_size, weights, _, _ = sample.read_run(run)
    cfg = dataclasses.replace(cfg, **changed)
    torch.set_default_dtype(torch.float64 if cfg.dtype == "fp64" else torch.float32)
    try:
        return sample.load_model(cfg, vocab_size, weights).eval()
    finally:
        torch.set_default_dtype(torch.float32)


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
    argv = [str(source), "--name=toy", "--tokenizer=char", "--workers=1", f"--out={folder}"]
    assert prepare.main(argv) == 0  # a worker of the pool may start no process
    return folder / "toy"


def optimizer_as_planned(*flags):
    """Assert that masters and moments of tiny with these flags take the planned bytes on one rank.

    Return the Optimizer.
    """
    cfg = parse(["tiny", "--data=synthetic", "--vocab-size=200", *flags])
    mesh = make_mesh(World())
    _, _, opt = train.build(cfg, mesh, cfg.vocab_size, torch.device("cpu"))
    used = 0
    is_16_bit = cfg.dtype in ("bf16", "fp16")  # In a wider model the masters are the weights.
    for master in opt.masters if is_16_bit else ():
        tensor = getattr(master, "low", master)
        used += tensor.numel() * tensor.element_size()
    for slices in opt.moments().values():
        used += sum(piece.numel() * piece.element_size() for piece in slices if piece is not None)
    planned = state_bytes(Rank(cfg, mesh, cfg.vocab_size, Choice(False, False, False, False)))
    assert used == planned["optimizer"]
    return opt


def assert_resume_is_equal(n, folder, *flags):
    """Assert that four steps on n ranks leave the same bits as two steps and, resumed, two more."""
    flags = [*flags, "--save-every=2"]
    go(n, folder / "a", *flags, "--steps=4")
    go(n, folder / "b", *flags, "--steps=2", "--decay-steps=4")
    go(n, folder / "b", *flags, "--steps=4", "--resume=auto")
    same(folder / "a", folder / "b", 4)
