"""Whole runs of train.main on the pool's ranks; the pool stands in for launch()."""
import contextlib
import hashlib
import io
import json
import os
import signal
from pathlib import Path

import torch
from pool import run_ranks

import checkpoint

SHAPE = ["--n-layer=2", "--n-embd=16", "--n-head=2", "--n-kv-head=1", "--ffn-hidden=32", "--seq-len=16",
         "--vocab-size=100"]
TINY = [*SHAPE, "--data=synthetic", "--micro-batch=2", "--global-batch=4", "--lr=1e-2", "--warmup=2",
        "--log-every=1", "--eval-every=0", "--no-plot", "--weight-decay=0.1"]
TIMES = {"time", "ms", "ms_per_sample", "tok_s", "tok_s_gpu", "tflops", "tflops_causal", "mfu", "mem_gb",
         "step_ms_min", "step_ms_max", "slowest_rank"}


def session(world, argv, plan=None):
    """train.main(argv) on this rank -> {code, out, err, steps}; steps: data and state before each step.
    plan: {step: what goes wrong in it}, on the last rank only: a signal's number, or "nan" for a gradient."""
    import train
    from runtime import launch
    plan, steps = plan or {}, []
    real = {(m, n): getattr(m, n) for m, n in [(launch, "launch"), (launch, "shutdown"), (train, "Run"),
                                               (train, "Step")]}
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)}

    class RecordingRun(train.Run):
        def next_batches(self, number, batch):
            first, batches = self.state.samples, super().next_batches(number, batch)
            state = hashlib.sha256()
            opt = self.parts.opt
            for m in opt.masters:
                for t in (m, opt.adam.state[m]["exp_avg"], opt.adam.state[m]["exp_avg_sq"]):
                    state.update(t.detach().numpy().tobytes())
            for t in self.parts.model.buffers():  # the routers' biases
                state.update(t.numpy().tobytes())
            data = hashlib.sha256(b"".join(t.numpy().tobytes() for pair in batches for t in pair)).hexdigest()
            steps.append({"first": first, "data": data, "state": state.hexdigest(),
                          "adam_t": int(opt.adam_t())})
            planned = plan.get(number)
            if isinstance(planned, int) and world.rank == world.size - 1:
                os.kill(os.getpid(), planned)
            return batches

    class StepWithNan(train.Step):
        def gradients(self, batches, number, *args, **kwargs):
            loss = super().gradients(batches, number, *args, **kwargs)
            if plan.get(number) == "nan" and world.rank == world.size - 1:
                bucket = self.dp.buckets[0]
                bucket.grad[bucket.shard.start] = float("nan")  # in the slice that this rank owns
            return loss

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    try:
        launch.launch, launch.shutdown = (lambda *a, **k: world), (lambda w: None)
        train.Run, train.Step = RecordingRun, StepWithNan
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                train.main(argv)
                code = 0
            except SystemExit as e:
                code = e.code
    finally:
        for (module, name), value in real.items():
            setattr(module, name, value)
        for s, handler in handlers.items():
            signal.signal(s, handler)
    return {"code": code, "steps": steps, "out": out.buffer.getvalue().decode(),
            "err": err.buffer.getvalue().decode()}


def assert_refused(result, *words):
    """Exit code 2, and on stderr exactly one line 'nanoshard: ...' that contains all of words."""
    lines = result["err"].splitlines()
    assert result["code"] == 2 and len(lines) == 1 and lines[0].startswith("nanoshard: "), result
    for word in words:
        assert word in lines[0], f"{word!r} is not in {lines[0]!r}"


def go(n, out, *flags, plan=None, code=0, base=TINY):
    """A session on each of n ranks, all of which must end with exit code `code` -> rank 0's session."""
    results = run_ranks(n, session, [*base, f"--out={out}", *map(str, flags)], plan)
    assert [r["code"] for r in results] == [code] * n, results[0]["err"] + results[0]["out"]
    return results[0]


def rows(out, drop=TIMES):
    """The rows of metrics.jsonl without times and rates."""
    lines = Path(out, "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in drop and not k.startswith("t_")}
            for line in lines]


def final(out, step):
    """The checkpoint of a step -> {name: full weight or moment}, the counters in its index."""
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
    """Make token files of a few thousand characters -> their directory, folder/toy."""
    import prepare
    words = ["ab", "cab", "bead", "face", "egg", "dig", "hide\n"]
    source = folder / "text.txt"
    source.write_text(" ".join(words[(i * i + i // 7) % len(words)] for i in range(2000)))
    assert prepare.main([str(source), "--name", "toy", "--tokenizer", "char", "--out", str(folder)]) == 0
    return folder / "toy"
