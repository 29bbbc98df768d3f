"""Bytes on a rank, before it runs: its parameters, and what model.py and fused.py keep for backward, tensor
by tensor. plan.py prints them.

Parameters are counted by building the rank's model on the meta device: no formula to drift from model.py.
"""
import dataclasses
import math
from collections import Counter
from functools import cache
from types import SimpleNamespace

import torch

from config import stage_layers
from cost.step_time import SIZE
from fast.graph import bounded, static_shapes
from model import GPT, padded
from parallel import Axis, Mesh

GIB = 2**30
NODE = 8  # GPUs of a node, of all in cost.GPUS
BUCKET = 16_000_000  # elements that parallel.DataParallel reduces together
CONTEXT = 1.2 * GIB  # CUDA context, cuBLAS and NCCL buffers: on the card, but not torch's
IMBALANCE = 1.44  # dropless, ep > 1: rows of the fullest rank over the mean; moe-4b's aux loss at step 20
FRAGMENTS = 0.05  # of what comes and goes: reserved by the caching allocator, and in no use


@cache
def _spans(n_layer, pp_layers, pp):
    return stage_layers(SimpleNamespace(n_layer=n_layer, pp_layers=pp_layers), pp)


def spans(cfg, pp):
    """config.stage_layers, once per split: a search asks for the same ones a hundred times."""
    return _spans(cfg.n_layer, cfg.pp_layers, pp)


@cache
def _parameters(cfg, mesh, vocab_size, layers):
    with torch.device("meta"):
        model = GPT(cfg, mesh, vocab_size, layers)
    count, buckets, open_ = Counter(), {}, Counter()
    for p in reversed(list(model.parameters())):  # as parallel.DataParallel fills them
        key = p.reduce, p.ndim >= 2
        count[p.reduce] += p.numel()
        open_[key] += p.numel()
        if open_[key] >= BUCKET:
            buckets.setdefault(p.reduce, []).append(open_.pop(key))
    for key, n in sorted(open_.items(), key=lambda item: item[1]):  # vectors, then the embedding's
        buckets.setdefault(key[0], []).append(n)
    return count, buckets


def local_parameters(cfg, mesh, vocab_size, buckets=False):
    """-> {axis name whose ranks sum the gradient: parameters on this rank}, or of each of its buckets"""
    first, last = spans(cfg, mesh.pp.size)[mesh.pp.rank]
    # one entry of the cache for all layouts that cut the model alike
    alike = dataclasses.replace(cfg, micro_batch=1, global_batch=0, zero=0, recompute="none", pp=1, tp=1,
                                ep=1)
    where = [Axis(name, 0, getattr(mesh, name).size if name in ("tp", "ep") else 1)
             for name in Mesh.__annotations__]
    middle = first > 0 and last < cfg.n_layer
    layers = (1, 1 + last - first) if middle else (first, last)
    return _parameters(alike, Mesh(*where), vocab_size, layers)[buckets]


def graphed(cfg, mesh):
    """Whether a GPU would replay the step as one CUDA graph; dropless over ep then works through windows."""
    return static_shapes(cfg, mesh, torch.device("cuda"))


def windows(cfg, mesh):
    """Rows of each of the experts' windows on a rank, 0 without."""
    if not (cfg.n_experts and 1 < mesh.ep.size <= NODE and cfg.dtype == "bf16" and graphed(cfg, mesh)):
        return 0
    n = cfg.micro_batch * cfg.seq_len // mesh.tp.size
    return slots(cfg, n) if cfg.capacity_factor else n * cfg.top_k * min(cfg.ep_slack, mesh.ep.size)


def slots(cfg, n):
    """Copies of n rows that reach an expert, balanced: K each, or the capacities."""
    K, E = cfg.top_k, cfg.n_experts
    return E * min(math.ceil(n * K / E * cfg.capacity_factor), n) if cfg.capacity_factor else n * K


def kept(cfg, mesh, fill=0.0):
    """-> (bytes of a block's tensors that backward needs, of those that stay under --recompute full, of the
    largest gradients alive at once in backward), one micro-batch. A test compares with autograd.
    fill: the experts' rows over the balanced number, dropless and ep > 1; 0: the most that memory sees."""
    size, tp, C, F = SIZE[cfg.dtype], mesh.tp.size, cfg.n_embd, cfg.ffn_hidden
    rows, D = cfg.micro_batch * cfg.seq_len, C // cfg.n_head
    q, kv = C / tp, max(cfg.n_kv_head // tp, 1) * D
    glued = cfg.mlp == "swiglu"
    # per token: the block's input, norm1's output as gathered, q k v side by side, attention's output,
    # norm2's input
    row = C / tp + C + (q + 2 * kv) + q + C / tp
    if cfg.pos == "rope":
        row += q + kv  # q and k turned
    fixed = C * (q + 2 * kv)  # together()'s copy of wq, wk, wv
    stays = rows * C / tp
    hidden = cfg.n_shared_experts * F if cfg.n_experts else F
    peak = 0.0
    if hidden:
        # norm2's output; gate, up and their product, or before and after GELU
        row += C + (3 if glued else 2) * hidden / tp
        fixed += 2 * hidden / tp * C if glued else 0  # together()'s copy of w1, w3
        peak = rows * (3 if glued else 2) * hidden / tp
        if cfg.compile and glued and not cfg.n_experts:
            stays += rows * hidden / tp  # a Triton kernel's output is not recomputed (inferred from a run)
    own = 4 * rows * cfg.n_head / tp  # bytes: softmax's log-sum-exp, fp32
    stays *= size
    if cfg.n_experts:
        n, K, E = rows / tp, cfg.top_k, cfg.n_experts
        held, rooms = slots(cfg, n), windows(cfg, mesh)
        if bounded(cfg, mesh):  # in a bad step rows fill the windows; the first step does without
            held = fill * held if fill else max(rooms, IMBALANCE * held)
        wide = max(4, size)
        route = n * C * wide * (wide > size) + 2 * n * E * wide
        # who is where
        route += 8 * n * K * (2 if rooms else 5 if mesh.ep.size > 1 else 3)
        halves = 2 if cfg.dtype == "bf16" or not glued else 4  # fused.ExpertMLP makes two of them again
        own += route + size * (held * (C * (not rooms) + halves * F) + n * K * C)  # x a b; the copies
        stays += route + size * n * C  # norm2's output
        peak += held * (2 * F + C)
    own += 2 * rows * C / tp * (cfg.dropout > 0)  # the masks, one byte each
    return size * (rows * row + fixed) + own, stays, size * (peak + 2 * rows * C)


def memory(cfg, mesh, vocab_size):
    """-> {part: bytes on this rank} at the fullest moment, on a GPU: weights, gradients, optimizer;
    activations of all micro-batches in flight (1F1B: up to stages - stage); logits; workspace, what
    backward's first block needs beside them and more than the logits did; the experts' windows, and overhead,
    which are not of torch's allocator. Nor are the weights and gradients of near()."""
    weight, grad = SIZE[cfg.dtype], max(4, SIZE[cfg.dtype])
    count = local_parameters(cfg, mesh, vocab_size)
    n = sum(count.values())
    shard = sum(p / (getattr(mesh, name).size if cfg.zero else 1) for name, p in count.items())
    masters = 0 if weight == grad else grad
    close = near(cfg, mesh, count)
    sums = n * grad - (lone(cfg, mesh, count) + sum(close.values())) * (grad - weight)
    sums += sum(p / getattr(mesh, name).size for name, p in close.items()) * grad  # NearBucket's totals
    biggest = max((p for name, buckets in local_parameters(cfg, mesh, vocab_size, True).items()
                   if name in close for p in buckets), default=0)
    sums += biggest * weight  # where the others' gradients come in, less this rank's
    tp, C, V = mesh.tp.size, cfg.n_embd, padded(vocab_size)
    rows = cfg.micro_batch * cfg.seq_len
    first, last = spans(cfg, mesh.pp.size)[mesh.pp.rank]
    block, stays, peak = kept(cfg, mesh)
    again = cfg.recompute == "full"
    flying = min(mesh.pp.size - mesh.pp.rank, micro_batches(cfg, mesh))
    activations = flying * (last - first) * (stays if again else block)
    logits = 0
    if last == cfg.n_layer:
        # one rank: in the model's dtype, the gradient in their place. tp: softmax, its gradient, that scaled,
        # in fp32. besides the head's input, normed, gradients; its weight's gradient
        logits = rows * V / tp * (weight if tp == 1 else 3 * grad)
        logits += rows * C * weight * 5 + V / tp * C * weight
    else:
        peak += 2 * rows * C / tp * weight  # a message each way
    ends = sum(V // tp * C for end in (first == 0, last == cfg.n_layer and not cfg.tied) if end)
    a_block = max(0, n - ends) / (last - first) * weight  # its gradients before they reach the bucket
    work = peak + a_block + (block - stays if again else 0)
    comes_and_goes = activations + logits + max(0, work - logits)
    return {"weights": n * weight, "gradients": sums, "optimizer": shard * (masters + 2 * grad),
            "activations": activations, "logits": logits, "workspace": max(0, work - logits),
            # window.open_windows: one for each layer, two for all
            "windows": (last - first + 2) * windows(cfg, mesh) * cfg.n_embd * weight,
            "overhead": CONTEXT + FRAGMENTS * comes_and_goes}


def lone(cfg, mesh, count):
    """Parameters whose gradient nothing is added to: it stays in the model's dtype (parallel.Bucket)."""
    if cfg.dtype != "bf16" or micro_batches(cfg, mesh) > 1:
        return 0
    return sum(n for name, n in count.items() if getattr(mesh, name).size == 1)


def near(cfg, mesh, count):
    """-> {axis name: parameters} whose weights and gradients lie in windows (near.NearBucket)."""
    if (cfg.dtype != "bf16" or not cfg.zero or mesh.pp.size > 1 or not 1 < mesh.stage.size <= NODE
            or micro_batches(cfg, mesh) > 1):
        return {}
    return {name: n for name, n in count.items() if getattr(mesh, name).size > 1}


def micro_batches(cfg, mesh, batch=0):
    """Of one data-parallel rank and step."""
    least = cfg.micro_batch * mesh.dp.size
    return max(1, (batch or cfg.global_batch) // least)
