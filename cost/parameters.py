"""How many parameters a model has, how many of them one rank holds, and how much work one token is.

Parameters are counted on the model itself. It is built on the meta device, which allocates nothing, and
ddp.assign_buckets says which bucket each parameter belongs to. So no formula can drift from the model that
trains.
"""
import dataclasses
from collections import Counter
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import NamedTuple

import torch

import ddp
from config import Config, head_width, n_masked, pad_vocab
from model import DTYPES, GPT
from moe import expert_capacity
from muon import owned_matrices, shapes_of
from parallel import Axis, Mesh, make_mesh
from pipeline import rank_layers
from zero import uses_slot

# The flags of a layout but zero, and values that cut nothing: mesh and blocks say what these flags say.
LAYOUT = dict(micro_batch=1, global_batch=0, recompute="none", pp=1, tp=1, cp=1, ep=1, pp_chunks=1,
              pp_layers="")
_flags_of_any_layout = attrgetter(*(f.name for f in dataclasses.fields(Config)
                                    if f.name not in {*LAYOUT, "zero"}))

# -----------------------------------------------------------------------------
# The model on the meta device

class BucketSize(NamedTuple):
    """One bucket of a rank."""
    axis: str      # the name of the axis whose ranks sum its gradients
    decayed: bool
    name: str      # of one of its parameters
    elements: int  # of all its parameters
    matrices: list  # (shape on this rank, full shape) of each, if Muon updates them
    trained: bool  # False for weights that --lora freezes, which are in no bucket but ZeRO-3's
    lone: bool  # whether one parameter fills it


_built = {}  # {what a model depends on: (its BucketSizes, its numbers of parameters)}


def _build(cfg, vocab_size, cut, lone_axes, first, blocks, zero=0):
    """Return ([BucketSize], numbers of parameters) of a rank that holds these consecutive blocks.

    The buckets are in the order in which backward fills them. cut: {axis that cuts the model: its size}.
    lone_axes: the names of the axes of one rank.
    """
    # All layouts that cut the model alike share one entry. A search asks thousands of times, so the key is
    # a plain tuple: to make another Config and to hash it takes half of a search.
    key = (_flags_of_any_layout(cfg), vocab_size, *cut.items(), lone_axes, first, blocks, zero)
    if key not in _built:
        cfg = dataclasses.replace(cfg, **LAYOUT, zero=zero)
        mesh = Mesh(*(Axis(name, size=cut.get(name, 1)) for name in Mesh.__annotations__))
        with torch.device("meta"):
            model = GPT(cfg, mesh, vocab_size, [(first, first + blocks)])
        _built[key] = _bucket_sizes(cfg, model, lone_axes), _count(cfg, model, vocab_size)
    return _built[key]


def _bucket_sizes(cfg, model, lone_axes):
    position = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    sizes = []
    for named_parameters in (ddp.trained_parameters(model), ddp.frozen_parameters(model)):
        groups = ddp.assign_buckets(named_parameters, cfg.zero, optimizer=cfg.optimizer, lone_axes=lone_axes)
        # Backward reaches the first layers last, so it completes the bucket with the last name first.
        groups.sort(key=lambda group: -position[group[-1][0]])
        for group in groups:
            name, first = group[0]
            params = [p for _, p in group]
            is_muons = ddp.updated_by(name, first, cfg.optimizer) == "muon"
            sizes.append(BucketSize(first.reduction_axis, ddp.uses_weight_decay(first), name,
                                    sum(p.numel() for p in params), shapes_of(params) if is_muons else [],
                                    first.requires_grad, lone=len(group) == 1))
    return sizes


def _count(cfg, model, vocab_size):
    found = Counter()
    for name, p in model.named_parameters():
        found["total"] += p.numel()
        if name.startswith(("wte.", "wpe.")):
            found["embedding"] += p.numel()
        if ".lora." in name:
            found["adapters"] += p.numel()
        in_block = name.startswith("blocks.") and p.ndim > 1 and "router" not in name
        if in_block and p.ndim == 3:  # of the experts' matrices, (E, out, in), a token meets top-k
            found["matmul"] += p.numel() * cfg.top_k // cfg.n_experts
        elif in_block or name == "mlm.dense.weight":
            found["matmul"] += p.numel()
    found["matmul"] += pad_vocab(vocab_size) * cfg.n_embd  # the head, which may be the embedding
    return found


def count_parameters(cfg, vocab_size):
    """Return the numbers of parameters of the whole model: {"total", "matmul", "embedding", "adapters"}.

    matmul: those that one token is multiplied with: the head, and of the experts only the top-k and the
    shared ones. The router is left out, as in the reports that we compare with. embedding: the input tables.
    adapters: those of --lora.
    """
    _, count = _build(cfg, vocab_size, {}, tuple(Mesh.__annotations__), 0, cfg.n_layer)
    return count


# -----------------------------------------------------------------------------
# Work

def dense_hidden(cfg):
    """Return the hidden width of the MLP that every token passes.

    In a model with experts these are the shared experts, side by side; 0 if there are none.
    """
    return cfg.ffn_hidden * (cfg.n_shared_experts if cfg.n_experts else 1)


def query_columns(cfg):
    """Return the columns of the queries of all heads together."""
    return cfg.n_head * head_width(cfg)


def flops_per_token(cfg, vocab_size):
    """Return (full, causal): floating-point operations of forward and backward for one token.

    They are 6 for each parameter that the token is multiplied with, plus 12 L C T for attention, or
    half of that because the causal mask hides half (Megatron-LM's formula, arXiv:2104.04473,
    appendix). C is here the width of all heads, and a window shortens T. mlm has no such mask, and its
    head sees the masked tokens only: the result is the mean over all tokens. A weight that --lora
    freezes has no gradient, so it costs 4 operations in the place of 6.
    """
    attention = 12 * cfg.n_layer * query_columns(cfg) * attended_length(cfg)
    count = count_parameters(cfg, vocab_size)
    each = 4 if cfg.lora else 6
    products = each * count["matmul"] + (6 - each) * count["adapters"]
    if cfg.objective == "mlm":
        head = cfg.n_embd * (pad_vocab(vocab_size) + cfg.n_embd)
        products -= each * (1 - n_masked(cfg.seq_len) / cfg.seq_len) * head
        return products + attention, products + attention
    return products + attention, products + attention / 2


def attended_length(cfg):
    """Return twice the keys that a query sees, in the mean over a causal sequence and all layers.

    Without a window that is the length of the sequence.
    """
    T = cfg.seq_len
    if not 0 < cfg.window < T:
        return T
    full = cfg.n_layer // cfg.full_every if cfg.full_every else 0
    in_window = 2 * cfg.window - cfg.window**2 / T  # the first queries see fewer keys
    return (full * T + (cfg.n_layer - full) * in_window) / cfg.n_layer


# -----------------------------------------------------------------------------
# The mesh of a layout before there are ranks

@cache
def rank_mesh(gpus, rank, *, tp=1, pp=1, ep=1, cp=1, n_experts=0, shard=0):
    """Return the mesh as one rank of `gpus` sees it, without process groups."""
    world = SimpleNamespace(rank=rank, size=gpus, calls=None)
    return make_mesh(world, tp=tp, pp=pp, ep=ep, cp=cp, n_experts=n_experts, shard=shard, groups=False)


def stage_mesh(cfg, gpus, stage):
    """Return the mesh as the first rank of a pipeline stage sees it, without process groups."""
    first_rank = stage * (gpus // cfg.pp)
    return rank_mesh(gpus, first_rank, tp=cfg.tp, pp=cfg.pp, ep=cfg.ep, cp=cfg.cp,
                     n_experts=cfg.n_experts, shard=cfg.shard)


# -----------------------------------------------------------------------------
# The tokens of one rank

def micro_batches(cfg, mesh, batch=0):
    """Return the number of micro-batches of one data-parallel rank in a step.

    batch: sequences of the step, by default --global-batch.
    """
    sequences = batch or cfg.global_batch
    return max(1, sequences // (cfg.micro_batch * mesh.dp.size))


def rank_tokens(cfg, mesh):
    """Return the tokens of a micro-batch that pass a rank's layers, B*t: cp splits the sequences."""
    return cfg.micro_batch * cfg.seq_len // mesh.cp.size


def head_rows(cfg, mesh):
    """Return the rows of a micro-batch that pass the head.

    In a masked language model these are the masked tokens, and one rank of cp may hold all of them.
    """
    most = n_masked(cfg.seq_len) if cfg.objective == "mlm" else cfg.seq_len
    return cfg.micro_batch * min(most, cfg.seq_len // mesh.cp.size)


def element_bytes(cfg):
    """Return (bytes of a weight, bytes of a summed gradient).

    Master weights and moments are as wide as a summed gradient, which has at least fp32.
    """
    dtype = DTYPES[cfg.dtype]
    return dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize


def kv_width(cfg, mesh):
    """Return the columns of the keys, and of the values, that a rank computes."""
    heads = max(cfg.n_kv_head // mesh.tp.size, 1)
    return heads * head_width(cfg)


def expert_rows(cfg, n):
    """Return the rows that a rank with n token rows sends to the experts.

    Dropless, these are top-k copies of each row; with a capacity, all rows that all experts accept.
    """
    if cfg.capacity_factor:
        return cfg.n_experts * expert_capacity(cfg, n)
    return n * cfg.top_k


# -----------------------------------------------------------------------------
# The parameters of one rank

class HeldLayers(NamedTuple):
    """What of the model a rank's stages hold together."""
    blocks: int
    has_embedding: bool
    has_head: bool


def held_layers(cfg, mesh):
    """Return the HeldLayers of this rank."""
    stages = rank_layers(cfg, mesh.pp)
    blocks = sum(end - first for first, end in stages)
    return HeldLayers(blocks, has_embedding=stages[0][0] == 0, has_head=stages[-1][1] == cfg.n_layer)


def _buckets(cfg, mesh, vocab_size):
    """Return the BucketSize of each of this rank's buckets, in the order in which backward fills them."""
    held = held_layers(cfg, mesh)
    # Consecutive blocks stand for those of this rank, since nothing depends on their numbers.
    first = 1
    if held.has_embedding:
        first = 0
    elif held.has_head:
        first = cfg.n_layer - held.blocks
    cut = {name: getattr(mesh, name).size for name in ("tp", "cp", "ep")}
    lone_axes = tuple(name for name in Mesh.__annotations__ if getattr(mesh, name).size == 1)
    zero = 0 if cfg.zero == 1 else cfg.zero
    buckets, _ = _build(cfg, vocab_size, cut, lone_axes, first, held.blocks, zero)
    return buckets


def local_buckets(cfg, mesh, vocab_size):
    """Return {name of the axis whose ranks sum the gradient: [parameters of each bucket]}.

    Weights that are not trained are left out.
    """
    sizes = {}
    for bucket in _buckets(cfg, mesh, vocab_size):
        if bucket.trained:
            sizes.setdefault(bucket.axis, []).append(bucket.elements)
    return sizes


def muon_shares(cfg, mesh, vocab_size):
    """Return (shard, elements of this rank's slices, [Matrices of each rank]) of Muon's buckets, by axis."""
    by_axis = {}
    for bucket in _buckets(cfg, mesh, vocab_size):
        if bucket.matrices:
            by_axis.setdefault(bucket.axis, []).append(bucket)
    found = []
    for name, buckets in by_axis.items():
        shard = getattr(mesh, name).sharing(cfg.zero).shard
        lengths = [ddp.padded_elements(bucket.elements, shard.size) // shard.size for bucket in buckets]
        owned = owned_matrices([bucket.matrices for bucket in buckets], lengths, shard.size)
        found.append((shard, sum(lengths), owned))
    return found


def local_parameters(cfg, mesh, vocab_size):
    """Return {name of the axis whose ranks hold the same: parameters on this rank}."""
    held = Counter()
    for bucket in _buckets(cfg, mesh, vocab_size):
        held[bucket.axis] += bucket.elements
    return held


def local_trained(cfg, mesh, vocab_size):
    """Return {name of the axis whose ranks sum the gradient: parameters of this rank that are trained}."""
    return {axis: sum(sizes) for axis, sizes in local_buckets(cfg, mesh, vocab_size).items()}


def sharded_parameters(cfg, mesh, vocab_size, trained_alone=False):
    """Return what ZeRO-3 shards, and what it gathers for each part of the model.

    The first is {axis name: elements of this rank's buckets, padded}. The second is a list of the same
    for the embedding, each block and the head. Without ZeRO-3 all are empty. trained_alone: leave out
    weights that are not trained.
    """
    sharded = Counter()
    parts = [Counter() for _ in range(cfg.n_layer + 2)]
    for bucket in _buckets(cfg, mesh, vocab_size) if cfg.zero == 3 else []:
        axis = getattr(mesh, bucket.axis)
        if not (bucket.decayed and uses_slot(axis)):
            continue
        if trained_alone and not bucket.trained:
            continue
        n = ddp.padded_elements(bucket.elements, axis.sharing().shard.size)
        module, number = bucket.name.split(".")[:2]
        part = 0  # the embedding
        if module == "blocks":
            part = int(number) + 1
        elif module in ("head", "mlm"):
            part = -1
        sharded[bucket.axis] += n
        parts[part][bucket.axis] += n
        if cfg.tied and module == "wte":  # the head reads the embedding, too
            parts[-1][bucket.axis] += n
    return sharded, parts


def owned_parameters(cfg, mesh, local):
    """Return the number of parameters whose optimizer state this rank keeps.

    ZeRO divides them among the ranks that share them. local: local_trained.
    """
    return sum(n / n_slices(cfg, mesh, axis) for axis, n in local.items())


def n_slices(cfg, mesh, axis):
    """Return into how many slices ZeRO cuts the buckets of an axis, given by its name."""
    return getattr(mesh, axis).sharing(cfg.zero).shard.size


def unwidened_gradients(mesh, local, choice):
    """Return the numbers of parameters whose gradient keeps the model's dtype: nothing is added to it here.

    The first number is that of all axes of one rank. The second is {axis name: parameters that travel as
    peer copies}. local: local_trained. choice: a fast.choose.Choice.
    """
    alone, copied = 0, {}
    for name, n in local.items():
        axis = getattr(mesh, name)
        if axis.size == 1:
            alone += n if choice.single_microbatch else 0
        elif choice.peer_copies and axis.sharing().shard.size > 1:
            copied[name] = n
    return alone, copied


def uncopied_gradients(cfg, mesh, vocab_size, choice):
    """Return the number of parameters whose gradient the optimizer reads where backward wrote it.

    Such a gradient fills a LoneBucket of fast/buckets.py. choice: a fast.choose.Choice.
    """
    if not choice.single_microbatch:
        return 0
    buckets = [bucket for bucket in _buckets(cfg, mesh, vocab_size) if bucket.lone and bucket.trained]
    return sum(bucket.elements for bucket in buckets if getattr(mesh, bucket.axis).size == 1)
