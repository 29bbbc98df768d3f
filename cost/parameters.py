"""How many parameters a model has, how many of them one rank holds, and how much work one token is.

Parameters are counted on the model itself, built on the meta device, which allocates nothing.
"""
import dataclasses
from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import torch

import ddp
from config import head_width, n_masked, pad_vocab
from fast.choose import choose
from model import DTYPES, GPT
from moe import expert_capacity
from muon import owned_matrices, shapes_of
from parallel import Axis, Mesh, make_mesh
from pipeline import rank_layers
from zero import uses_slot

AXES = tuple(Mesh.__annotations__)

# The model on the meta device

class BucketSize(NamedTuple):
    axis: str       # the name of the axis whose ranks sum its gradients
    decayed: bool
    name: str       # of one of its parameters
    elements: int   # of all its parameters
    matrices: list  # (shape on this rank, full shape) of each, if Muon updates them
    trained: bool   # False for weights that --lora freezes, which are in no bucket but ZeRO-3's
    lone: bool      # whether one parameter fills it


@cache
def _build(cfg, vocab_size, sizes, first, blocks):
    """Return ([BucketSize], numbers of parameters) of a rank that holds these consecutive blocks.

    The buckets are in backward's order. cfg: _without_layout(). sizes: those of AXES.
    """
    axes = [Axis(name, size=size) for name, size in zip(AXES, sizes, strict=True)]
    lone_axes = [axis.name for axis in axes if axis.size == 1]
    mesh = Mesh(*axes)
    with torch.device("meta"):
        model = GPT(cfg, mesh, vocab_size, [(first, first + blocks)])
    position = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    found = []
    for named_parameters in (ddp.trained_parameters(model), ddp.frozen_parameters(model)):
        groups = ddp.assign_buckets(named_parameters, cfg.zero, optimizer=cfg.optimizer, lone_axes=lone_axes)
        # Backward reaches the first layers last, so it completes the bucket with the last name first.
        groups.sort(key=lambda group: -position[group[-1][0]])
        for group in groups:
            name, p = group[0]
            params = [p for _, p in group]
            is_muons = ddp.updated_by(name, p, cfg.optimizer) == "muon"
            found.append(BucketSize(p.reduction_axis, ddp.uses_weight_decay(p), name,
                                    sum(p.numel() for p in params), shapes_of(params) if is_muons else [],
                                    p.requires_grad, lone=len(group) == 1))
    return found, _count(cfg, model, vocab_size)


@cache
def _without_layout(cfg):  # so that all layouts that cut the model alike are one
    zero = 0 if cfg.zero == 1 else cfg.zero
    return dataclasses.replace(cfg, micro_batch=1, global_batch=0, recompute="none", pp=1, tp=1, cp=1, ep=1,
                               shard=0, pp_chunks=1, pp_layers="", zero=zero)


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
    shared ones, without the router. embedding: the input tables.
    """
    return _build(_without_layout(cfg), vocab_size, (1,) * len(AXES), 0, cfg.n_layer)[1]


# Work

def flops_per_token(cfg, vocab_size):
    """Return (full, causal): floating-point operations of forward and backward for one token.

    6 for each parameter that the token is multiplied with (4 for a weight that --lora freezes), plus 12 L C T
    for attention, or half of that behind the causal mask (arXiv:2104.04473, appendix). C is the width of all
    heads. A masked language model has no such mask, and its head sees the masked tokens only.
    """
    attention = 12 * cfg.n_layer * cfg.n_head * head_width(cfg) * attended_length(cfg)
    count = count_parameters(cfg, vocab_size)
    each = 4 if cfg.lora else 6
    products = each * count["matmul"] + (6 - each) * count["adapters"]
    if cfg.objective == "mlm":
        head = cfg.n_embd * (pad_vocab(vocab_size) + cfg.n_embd)
        products -= each * (1 - n_masked(cfg.seq_len) / cfg.seq_len) * head
        return products + attention, products + attention
    return products + attention, products + attention / 2


def attended_length(cfg):
    """Return twice the keys that a query sees, in the mean over a causal sequence and all layers."""
    T = cfg.seq_len
    if not 0 < cfg.window < T:
        return T
    full = cfg.n_layer // cfg.full_every if cfg.full_every else 0
    in_window = 2 * cfg.window - cfg.window**2 / T  # the first queries see fewer keys
    return (full * T + (cfg.n_layer - full) * in_window) / cfg.n_layer


# The mesh of a layout before there are ranks

@cache
def rank_mesh(gpus, rank, *, tp=1, pp=1, ep=1, cp=1, shard=0):
    """Return the mesh as one rank of `gpus` sees it, without process groups."""
    world = SimpleNamespace(rank=rank, size=gpus, calls=None)
    return make_mesh(world, tp=tp, pp=pp, ep=ep, cp=cp, shard=shard, groups=False)


def stage_mesh(cfg, gpus, stage):
    """Return the mesh as the first rank of a pipeline stage sees it, without process groups."""
    first_rank = stage * (gpus // cfg.pp)
    return rank_mesh(gpus, first_rank, tp=cfg.tp, pp=cfg.pp, ep=cfg.ep, cp=cfg.cp, shard=cfg.shard)


def micro_batches(cfg, mesh, batch=0):
    """Return a rank's micro-batches in a step of `batch` sequences, by default --global-batch."""
    sequences = batch or cfg.global_batch
    return max(1, sequences // (cfg.micro_batch * mesh.dp.size))


# One rank

class Rank:
    """What one rank holds of a model, and what of a micro-batch passes it.

    choice: the run's fast.choose.Choice, by default that of GPUs, of which `node` reach each other's memory.
    """

    def __init__(self, cfg, mesh, vocab_size, choice=None, node=8):
        self.cfg = cfg
        self.mesh = mesh
        self.choice = choice
        if choice is None:
            self.choice = choose(cfg, mesh, torch.device("cuda"), lambda _, axis, device: axis.size <= node)
        dtype = DTYPES[cfg.dtype]
        self.weight_bytes = dtype.itemsize
        self.sum_bytes = torch.promote_types(dtype, torch.float32).itemsize  # of summed gradients, masters

        stages = rank_layers(cfg, mesh.pp)
        self.blocks = sum(end - first for first, end in stages)
        self.has_embedding = stages[0][0] == 0
        self.has_head = stages[-1][1] == cfg.n_layer
        # Consecutive blocks stand for those of this rank, since nothing depends on their numbers.
        first = min(stages[0][0], 1)
        if self.has_head:
            first = cfg.n_layer - self.blocks
        sizes = tuple(getattr(mesh, name).size for name in AXES)
        self.buckets, _ = _build(_without_layout(cfg), vocab_size, sizes, first, self.blocks)
        self.trained = [bucket for bucket in self.buckets if bucket.trained]

        # Of a micro-batch: rows of whole layers, of a rank of tp between the blocks, and at the head
        self.rows = cfg.micro_batch * cfg.seq_len // mesh.cp.size
        self.split_rows = self.rows // mesh.tp.size
        most = n_masked(cfg.seq_len) if cfg.objective == "mlm" else cfg.seq_len
        self.head_rows = cfg.micro_batch * min(most, cfg.seq_len // mesh.cp.size)
        # Columns: of queries, of keys, of the hidden layer that every token passes, of the head
        self.q = cfg.n_head * head_width(cfg) // mesh.tp.size
        self.kv = max(cfg.n_kv_head // mesh.tp.size, 1) * head_width(cfg)
        dense = cfg.n_shared_experts if cfg.n_experts else 1
        self.hidden = dense * cfg.ffn_hidden // mesh.tp.size
        self.vocab = pad_vocab(vocab_size) // mesh.tp.size

    def expert_rows(self):
        """Return the rows that it sends to the experts: copies, or with a capacity all that they accept."""
        if self.cfg.capacity_factor:
            return self.cfg.n_experts * expert_capacity(self.cfg, self.split_rows)
        return self.split_rows * self.cfg.top_k

    def parameters(self):
        return sum(bucket.elements for bucket in self.buckets)

    def n_slices(self, bucket):  # into which ZeRO cuts it
        return getattr(self.mesh, bucket.axis).sharing(self.cfg.zero).shard.size

    def owned(self):
        """Return the number of parameters whose optimizer state this rank keeps."""
        return sum(bucket.elements / self.n_slices(bucket) for bucket in self.trained)

    def padded(self, bucket):
        return ddp.padded_elements(bucket.elements, self.n_slices(bucket))

    def is_sharded(self, bucket):
        """Whether ZeRO-3 keeps slices of a bucket's weights, and gathers them for each use."""
        return self.cfg.zero == 3 and bucket.decayed and uses_slot(getattr(self.mesh, bucket.axis))

    def gathered(self):
        """Return what ZeRO-3 gathers for the embedding, each block and the head: [{axis name: elements}]."""
        parts = [Counter() for _ in range(self.cfg.n_layer + 2)]
        for bucket in filter(self.is_sharded, self.buckets):
            module, number = bucket.name.split(".")[:2]
            part = 0  # the embedding
            if module == "blocks":
                part = int(number) + 1
            elif module in ("head", "mlm"):
                part = -1
            parts[part][bucket.axis] += self.padded(bucket)
            if self.cfg.tied and module == "wte":  # the head reads the embedding, too
                parts[-1][bucket.axis] += self.padded(bucket)
        return parts

    def gradient_kind(self, bucket):
        """Return how the gradient of a trained bucket is kept.

        "summed": in fp32. The others keep the model's dtype: "copied" between GPUs, "alone" on an axis of one
        rank, where nothing is added to it, and "lone" if it stays where backward wrote it (LoneBucket).
        """
        axis = getattr(self.mesh, bucket.axis)
        if self.choice.peer_copies and axis.sharing().shard.size > 1:
            return "copied"
        if self.choice.single_microbatch and axis.size == 1:
            return "lone" if bucket.lone else "alone"
        return "summed"

    def muon_shares(self):
        """Return (shard, elements of this rank's slices, [Matrices of each rank]) of Muon on each axis."""
        by_axis = {}
        for bucket in self.buckets:
            if bucket.matrices:
                by_axis.setdefault(bucket.axis, []).append(bucket)
        found = []
        for name, buckets in by_axis.items():
            shard = getattr(self.mesh, name).sharing(self.cfg.zero).shard
            lengths = [self.padded(bucket) // shard.size for bucket in buckets]
            owned = owned_matrices([bucket.matrices for bucket in buckets], lengths, shard.size)
            found.append((shard, sum(lengths), owned))
        return found
