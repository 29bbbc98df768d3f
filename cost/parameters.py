"""How many parameters a model has, how many of them a rank holds, and how much work a token is.

A rank's parameters are counted on the model itself, built on the meta device, which allocates nothing, and
ddp.assign_buckets says which bucket each belongs to: no formula can drift from what trains. Only
count_parameters is a formula, because it also counts what one token meets; tests compare it with the model.
"""
import dataclasses
from collections import Counter
from functools import cache

import torch

from config import n_masked, pad_vocab
from ddp import assign_buckets
from model import DTYPES, GPT
from moe import expert_capacity
from ops.activations import GATED
from ops.flat import padded_elements
from parallel import Axis, Mesh
from pipeline import rank_layers
from zero import uses_slot

# -----------------------------------------------------------------------------
# the whole model

def count_parameters(cfg, vocab_size):
    """-> {total, matmul, embedding}, numbers of parameters: all of them; those that one token is multiplied
    with (the head too; of the experts only the top-k and the shared ones; not the router, as in the reports
    that we compare with); those of the input tables."""
    C, D, E = cfg.n_embd, cfg.n_embd // cfg.n_head, cfg.n_experts
    matrices = 3 if cfg.mlp in GATED else 2
    attn = 2 * C * C + 2 * C * cfg.n_kv_head * D
    expert = matrices * C * cfg.ffn_hidden
    shared = expert * cfg.n_shared_experts if E else 0
    head = pad_vocab(vocab_size) * C
    mlm = cfg.objective == "mlm"  # its head: a dense layer, a norm, a bias on the logits
    norms = (2 * cfg.n_layer + 1 + mlm) * C * (2 if cfg.norm == "layer" and cfg.bias else 1)
    bias = 2 * C + 2 * cfg.n_kv_head * D  # of q, o, k, v
    hidden = cfg.n_shared_experts * cfg.ffn_hidden if E else cfg.ffn_hidden  # routed experts have no biases
    bias += C + hidden * (matrices - 1) if hidden else 0
    embedding = head + (cfg.seq_len * C if cfg.pos == "learned" else 0)
    matmul = cfg.n_layer * (attn + expert * (cfg.top_k if E else 1) + shared) + head
    total = (cfg.n_layer * (attn + shared + (E * (expert + C) if E else expert) + (bias if cfg.bias else 0))
             + norms + embedding + (0 if cfg.tied else head))
    if mlm:
        matmul, total = matmul + C * C, total + C * C + (C + pad_vocab(vocab_size) if cfg.bias else 0)
    return {"total": total, "matmul": matmul, "embedding": embedding}


def flops_per_token(cfg, vocab_size):
    """-> (full, causal): floating-point operations of forward and backward for one token: 6 for each
    parameter that it is multiplied with, plus 12 L C T for attention, or half of that because the causal mask
    hides half (Megatron-LM's formula, arXiv:2104.04473, appendix). mlm has no such mask, and a head for the
    masked tokens only: the mean over the tokens is given."""
    attention, C = 12 * cfg.n_layer * cfg.n_embd * cfg.seq_len, cfg.n_embd
    products = 6 * count_parameters(cfg, vocab_size)["matmul"]
    if cfg.objective == "mlm":
        products -= 6 * (1 - n_masked(cfg.seq_len) / cfg.seq_len) * C * (pad_vocab(vocab_size) + C)
        return products + attention, products + attention
    return products + attention, products + attention / 2


# -----------------------------------------------------------------------------
# one rank

def micro_batches(cfg, mesh, batch=0):
    """Micro-batches of one data-parallel rank in a step of `batch` sequences, by default --global-batch."""
    return max(1, (batch or cfg.global_batch) // (cfg.micro_batch * mesh.dp.size))


def rank_tokens(cfg, mesh):
    """Tokens of a micro-batch that pass a rank's layers, B*t: cp splits the sequences."""
    return cfg.micro_batch * cfg.seq_len // mesh.cp.size


def head_rows(cfg, mesh):
    """Rows of a micro-batch that pass the head: of a masked language model those of the masked tokens, all
    of which one rank of cp may hold."""
    most = n_masked(cfg.seq_len) if cfg.objective == "mlm" else cfg.seq_len
    return cfg.micro_batch * min(most, cfg.seq_len // mesh.cp.size)


def element_bytes(cfg):
    """-> (bytes of a weight, bytes of a summed gradient or a master weight, which have at least fp32)."""
    dtype = DTYPES[cfg.dtype]
    return dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize


def kv_width(cfg, mesh):
    """Columns of the keys, and of the values, that a rank computes."""
    return max(cfg.n_kv_head // mesh.tp.size, 1) * (cfg.n_embd // cfg.n_head)


def expert_rows(cfg, n):
    """Rows that a rank with n token rows sends to the experts: top-k copies of each, or with a capacity as
    many as all experts take."""
    return cfg.n_experts * expert_capacity(cfg, n) if cfg.capacity_factor else n * cfg.top_k


def held_layers(cfg, mesh):
    """-> (blocks of this rank's stages together, whether one is the first stage, whether one is the last)"""
    layers = rank_layers(cfg, mesh.pp)
    return sum(end - first for first, end in layers), layers[0][0] == 0, layers[-1][1] == cfg.n_layer


@cache
def _build_buckets(cfg, mesh, vocab_size, first, blocks):
    with torch.device("meta"):
        model = GPT(cfg, mesh, vocab_size, [(first, first + blocks)])
    position = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    buckets = assign_buckets(model.named_parameters(), cfg.zero)
    buckets.sort(key=lambda bucket: -position[bucket[2][-1]])  # backward reaches the first layers last
    return [(axis, decayed, names[0], sum(p.numel() for p in params))
            for axis, decayed, names, params in buckets]


def _buckets(cfg, mesh, vocab_size):
    """-> [(axis name, decayed, name of a parameter, elements)] of this rank's buckets, in the order in which
    backward completes them."""
    blocks, is_first, is_last = held_layers(cfg, mesh)
    # one entry of the cache for all layouts that cut the model alike
    alike = dataclasses.replace(cfg, micro_batch=1, global_batch=0, zero=cfg.zero * (cfg.zero > 1),
                                recompute="none", pp=1, tp=1, cp=1, ep=1, pp_chunks=1, pp_layers="")
    axes = [Axis(name, 0, getattr(mesh, name).size if name in ("tp", "cp", "ep") else 1)
            for name in Mesh.__annotations__]
    # nothing depends on the layers' numbers but which of embedding and head are there
    first = 0 if is_first else cfg.n_layer - blocks if is_last else 1
    return _build_buckets(alike, Mesh(*axes), vocab_size, first, blocks)


def local_buckets(cfg, mesh, vocab_size):
    """-> {name of the axis whose ranks sum the gradient: [parameters of each bucket on this rank]}"""
    out = {}
    for axis, _, _, n in _buckets(cfg, mesh, vocab_size):
        out.setdefault(axis, []).append(n)
    return out


def sharded_parameters(cfg, mesh, vocab_size):
    """-> {axis name: elements of this rank's buckets, padded, that ZeRO-3 shards}, [{axis name: elements that
    it gathers}] of the embedding, each block and the head; empty without ZeRO-3."""
    sharded, parts = Counter(), [Counter() for _ in range(cfg.n_layer + 2)]
    for axis, decayed, name, n in _buckets(cfg, mesh, vocab_size) if cfg.zero == 3 else ():
        if decayed and uses_slot(getattr(mesh, axis)):
            word, number = name.split(".")[:2]
            n = padded_elements(n, getattr(mesh, axis).size)
            sharded[axis] += n
            parts[int(number) + 1 if word == "blocks" else -1 if word in ("head", "mlm") else 0][axis] += n
            parts[-1][axis] += n * (word == "wte" and cfg.tied)
    return sharded, parts


def local_parameters(cfg, mesh, vocab_size):
    """-> {name of the axis whose ranks sum the gradient: parameters on this rank}"""
    return {axis: sum(buckets) for axis, buckets in local_buckets(cfg, mesh, vocab_size).items()}


def owned_parameters(cfg, mesh, local):
    """Parameters whose optimizer state this rank keeps; local: local_parameters. ZeRO divides them among the
    ranks of their axis."""
    return sum(n / (getattr(mesh, axis).size if cfg.zero else 1) for axis, n in local.items())


def unwidened_gradients(mesh, local, choice):
    """-> (parameters of axes of one rank, {axis name: parameters that travel as peer copies}): those whose
    gradient keeps the model's dtype, because nothing is added to it on this rank. local: local_parameters;
    choice: fast.choose.Choice."""
    alone = sum(n for axis, n in local.items() if getattr(mesh, axis).size == 1)
    copied = {axis: n for axis, n in local.items() if getattr(mesh, axis).size > 1}
    return alone if choice.single_microbatch else 0, copied if choice.peer_copies else {}
