"""Whether a layout computes what one process computes: losses, norms, every gradient, weight and moment.

    train_steps     train.py's own model, step and optimizer for a few steps; keeps each rank's pieces
    assemble        the pieces of all ranks -> full arrays, in which every element stands exactly once
    errors          how far a layout's arrays are from one process's, by name
    check_replicas  the weights that ranks compute with are those that their owners hold

tests/test_layouts.py, gpu_matrix.py and equal_one.py compare through these functions, in fp64: small faults
drown in the rounding of shorter numbers.
"""
import numpy as np
import torch

import moe
import train
from interface.layout import check_layout
from ops.split_master import whole
from parallel import make_mesh
from runtime.resume import own_pieces
from zero import ShardedBucket

MOE_FORWARD = moe.MoE.forward


def forward_in_chunks(chunks, cp):
    """Return a MoE.forward that does on one rank what cp x chunks ranks do.

    The whole micro-batch was routed, but the rows of each rank have their own capacity. Rank r of cp has
    segments r and 2 cp - 1 - r of each sequence, and every tp rank has a part of these rows.
    """
    def forward(self, x, p, ids):
        rows, y = torch.arange(x.size(0), device=x.device), torch.zeros_like(x)
        rows = rows.view(-1, 2 * cp, self.cfg.seq_len // (2 * cp))
        for r in range(cp):
            for i in rows[:, [r, -1 - r]].flatten().chunk(chunks):
                y = y.index_copy(0, i, self.experts(x[i], p[i], self.dispatcher.plan(ids[i], p[i])))
        return y
    return forward


def capacity_ranks(flags, layout):
    """Return (tp, cp) ranks that choose among their own rows, (1, 1) where nothing is dropped.

    flags, layout: dicts of flags of train.py.
    """
    return tuple(layout.get(axis, 1) if flags.get("capacity_factor") else 1 for axis in ("tp", "cp"))


def to_numpy(t):
    """A copy as numpy; bf16, which numpy does not have, becomes fp32."""
    return whole(t).detach().to("cpu", torch.promote_types(t.dtype, torch.float32), copy=True).numpy()


def wait_for_all_weights(model, data_parallel):
    """The whole model's weights are there after this, as nothing but a comparison needs them under ZeRO-3."""
    for bucket in data_parallel.buckets:
        if isinstance(bucket, ShardedBucket):
            bucket.fetch()
    model.provide_weights(model)


def train_steps(world, cfg, vocab_size, source, batch, steps, *, chunks=1, cp=1):
    """Train for `steps` steps of `batch` sequences, and return what this rank has seen, as numpy.

    stats     loss, gradient norm, zero gradients and weight norm of each step
    pieces    [(name, array, full shape, offset)] of what this rank owns: the gradients of each step, and the
              weights and moments at the end
    replicas  {name: the weights that this rank computes with}; offsets {name: (full shape, offset)} of these
    experts   the statistics of each MoE layer

    chunks, cp: with a capacity, the number of tp and cp ranks whose dropping of rows this rank reproduces.
    """
    moe.MoE.forward = forward_in_chunks(chunks, cp) if chunks * cp > 1 else MOE_FORWARD
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, cp=cfg.cp, shard=cfg.shard)
    check_layout(cfg, world.size)
    model, data_parallel, opt = train.build(cfg, mesh, vocab_size, world.device)
    seen = {"stats": [], "pieces": []}

    def keep(prefix, vectors):
        for name, t, full, offset in own_pieces(data_parallel, opt, vectors):
            seen["pieces"].append((prefix + name, to_numpy(whole(t)), full, offset))

    train_step = train.Step(cfg, model, data_parallel, opt)
    for step in range(1, steps + 1):
        first = (step - 1) * batch
        batches = train.micro_batches(cfg, mesh, source, first, batch, world.device)
        train_step.before_update = lambda step: keep(f"step {step} grad ", {"": opt.grads})
        tokens = train.trained_tokens(source, first, batch, world.device)
        stats, _ = train_step(batches, step, n_trained=tokens)
        seen["stats"].append(torch.stack(stats).tolist())
    wait_for_all_weights(model, data_parallel)
    keep("end ", None)
    if cfg.n_experts:
        seen["experts"] = moe.expert_stats(model, batch // cfg.micro_batch)
    seen["replicas"] = {n: to_numpy(p) for n, p in model.named_parameters() if p.requires_grad}
    seen["offsets"] = {n: (p.full_shape, p.offset) for n, p in model.named_parameters()}
    return seen


def slices(offset, shape):
    """Return the index of a piece of this shape in its full tensor."""
    return tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))


def assemble(results):
    """Shards of all ranks -> {name: full array}. AssertionError unless each element is in exactly one."""
    whole, count = {}, {}
    for seen in results:
        for name, t, full, offset in seen["pieces"]:
            where = slices(offset, t.shape)
            whole.setdefault(name, np.full(full, np.nan))[where] = t
            count.setdefault(name, np.zeros(full, int))[where] += 1
    wrong = {name: c for name, c in count.items() if (c != 1).any()}
    for name, c in wrong.items():
        held = f"elements held {c.min()} to {c.max()} times, in {len(wrong)} of {len(count)} tensors"
        raise AssertionError(f"{name}: {held}; a reduction axis is not that of the ranks that hold a copy")
    return whole


def scale(name, want, flags):
    """Return what 1e-10 is relative to: the largest element of the tensor `want`. Key biases are compared
    absolutely: without RoPE they shift all scores of a query alike, which softmax ignores. Their gradient is
    nothing but rounding errors, and Adam divides one of those by another."""
    shifts = name.endswith("attn.wk.bias") and flags["pos"] == "learned"
    return 1.0 if shifts else max(1e-4, np.abs(want).max())


def errors(got, want, flags):
    """Return {name: the largest difference of an element, relative to scale()} of two assembled runs.

    AssertionError: one of them has tensors that the other has not. A NaN in either is an error of NaN, so ask
    whether an error is small, not whether it is large.
    """
    assert got.keys() == want.keys(), f"other tensors: {sorted(got.keys() ^ want.keys())[:4]}"
    return {name: np.abs(got[name] - whole).max() / scale(name, whole, flags)
            for name, whole in want.items()}


def stats_errors(seen, want):
    """Return the largest relative difference, over the steps, of each number that a step reports."""
    got, expected = np.array(seen["stats"]), np.array(want["stats"])
    ratio = np.abs(got / np.where(expected == 0, 1, expected) - (expected != 0)).max(axis=0)
    return {"loss": ratio[0], "gradient norm": ratio[1], "weight norm": ratio[3]}  # number 2 counts zeros


def check_replicas(results, whole):
    """AssertionError unless every rank computes with the weights that their owners hold, to the bit."""
    for rank, seen in enumerate(results):
        for name, local in seen["replicas"].items():
            _, offset = seen["offsets"][name]
            held = whole["end " + name][slices(offset, local.shape)]
            assert np.array_equal(local, held), f"rank {rank} computes with other weights {name} than it owns"
