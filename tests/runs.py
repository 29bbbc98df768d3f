"""Whole runs of train.main inside the pool's ranks, where only launch() is answered by the pool."""

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

SHAPE = [
    "--n-layer=2",
    "--n-embd=16",
    "--n-head=2",
    "--n-kv-head=1",
    "--ffn-hidden=32",
    "--seq-len=16",
    "--vocab-size=100",
]
TINY = [
    *SHAPE,
    "--data=synthetic",
    "--micro-batch=2",
    "--global-batch=4",
    "--lr=1e-2",
    "--warmup=2",
    "--log-every=1",
    "--eval-every=0",
    "--no-plot",
    "--weight-decay=0.1",
]
TIMES = {"time", "ms", "ms_per_sample", "tok_s", "tok_s_gpu", "tflops", "tflops_causal", "mfu", "mem_gb",
         "step_ms_min", "step_ms_max", "slowest_rank"}


def session(world, argv, plan=None):
    """train.main(argv) as this rank -> {code, out, err, steps}; steps: what stood before each training step.
    plan: {step: what goes wrong in it}, on the last rank only: a signal, or "nan": a bad gradient."""
    import train
    from runtime import launch


    plan, steps, runs = plan or {}, [], []
    real = {(m, n): getattr(m, n) for m, n in [(launch, "launch"), (launch, "shutdown"), (train, "Run"),
                                               (train, "Step")]}
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)}

    class WatchedRun(train.Run):
        def __init__(self, *args):
            runs.append(self)
            super().__init__(*args)

        def next_batches(self, number, batch):
            first, batches = self.state.samples, super().next_batches(number, batch)
            state = hashlib.sha256()
            for m in self.opt.masters:
                for t in (m, self.opt.adam.state[m]["exp_avg"], self.opt.adam.state[m]["exp_avg_sq"]):
                    state.update(t.detach().numpy().tobytes())
            for t in self.model.buffers():  # the routers' biases
                state.update(t.numpy().tobytes())
            data = hashlib.sha256(b"".join(t.numpy().tobytes() for pair in batches for t in pair)).hexdigest()
            steps.append({"first": first, "data": data, "state": state.hexdigest(),
                          "adam_t": int(self.opt.adam_t())})
            what = plan.get(number)
            if isinstance(what, int) and world.rank == world.size - 1:
                os.kill(os.getpid(), what)
            return batches

    class PoisonedStep(train.Step):
        def gradients(self, batches, number):
            loss = super().gradients(batches, number)
            if plan.get(number) == "nan" and world.rank == world.size - 1:
                bucket = self.dp.buckets[0]
                bucket.grad[bucket.shard.start] = float("nan")  # in the slice that this rank owns
            return loss

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    try:
        launch.launch, launch.shutdown = (lambda *a, **k: world), (lambda w: None)
        train.Run, train.Step = WatchedRun, PoisonedStep
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
    return {
        "code": code,
        "steps": steps,
        **{k: f.buffer.getvalue().decode() for k, f in (("out", out), ("err", err))},
    }


def go(n, out, *flags, plan=None, code=0, base=TINY):
    """Run on n ranks; every rank must leave with that exit code. -> rank 0's session."""
    results = run_ranks(n, session, [*base, f"--out={out}", *map(str, flags)], plan)
    assert [r["code"] for r in results] == [code] * n, results[0]["err"] + results[0]["out"]
    return results[0]


def rows(out, drop=TIMES):
    """metrics.jsonl without what a clock measured."""
    lines = Path(out, "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k not in drop and not k.startswith("t_")}
        for line in lines
    ]


def final(out, step):
    """Weights and moments as stored, whole, and the index's counters."""
    path = Path(out, f"step_{step:06d}")
    return checkpoint.full_tensors(path), checkpoint.check(path)["meta"]


def same(a, b, step, *, b_step=None):
    """Bit for bit: every weight, both moments, Adam's t and every counter."""
    (x, meta_x), (y, meta_y) = final(a, step), final(b, b_step or step)
    assert x.keys() == y.keys() and len(x) > 20 and {n.split("/")[0] for n in x} >= {"exp_avg", "exp_avg_sq"}
    for name in x:
        assert torch.equal(x[name], y[name]), f"{name} differs by {(x[name] - y[name]).abs().max()}"
    for key in ("step", "samples", "skipped", "nan_steps", "adam_t"):
        assert meta_x[key] == meta_y[key], key


def chars(folder):
    """A few thousand characters as token files -> their directory."""
    import prepare

    words = ["ab", "cab", "bead", "face", "egg", "dig", "hide\n"]
    text = " ".join(words[(i * i + i // 7) % len(words)] for i in range(2000))
    (folder / "text.txt").write_text(text)
    assert (
        prepare.main([str(folder / "text.txt"), "--name", "toy", "--tokenizer", "char", "--out", str(folder)])
        == 0
    )
    return folder / "toy"
