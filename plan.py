"""What a layout will cost, before it runs: bytes sent per axis and step, and memory per rank.

Parameters are counted by building this rank's model on the meta device: no formula to drift from model.py.
"""
from collections import Counter

import torch

from config import stage_layers
from model import GPT

SIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def local_parameters(cfg, mesh, vocab_size):
    """-> {axis name whose ranks sum the gradient: parameters on this rank}"""
    with torch.device("meta"):
        model = GPT(cfg, mesh, vocab_size, stage_layers(cfg, mesh.pp.size)[mesh.pp.rank])
    count = Counter()
    for p in model.parameters():
        count[p.reduce] += p.numel()
    return count


def traffic(cfg, mesh, vocab_size, batch):
    """-> {axis name: bytes that this rank sends per optimizer step}, by ring algorithms.
    parallel.Axis.sent measures the same."""
    weight, grad = SIZE[cfg.dtype], max(4, SIZE[cfg.dtype])
    micro = batch // (cfg.micro_batch * mesh.dp.size)  # micro-batches of this rank
    rows = cfg.micro_batch * cfg.seq_len  # (B*T, C) on every tp rank when gathered
    first, last = stage_layers(cfg, mesh.pp.size)[mesh.pp.rank]
    out = Counter()
    # gradients: an all-reduce is a reduce-scatter and an all-gather of fp32; ZeRO-1 gathers weights instead
    for name, n in local_parameters(cfg, mesh, vocab_size).items():
        size = getattr(mesh, name).size
        out[name] += (size - 1) / size * n * (grad + (weight if cfg.zero else grad))
    # tensor parallelism: attention and MLP each gather and scatter (B*T, C), backward does both adjoints
    t = (mesh.tp.size - 1) / mesh.tp.size
    passes = 3 if cfg.recompute == "full" else 2
    blocks = (last - first) * 4 * passes
    ends = 2 * (first == 0) + 2 * (last == cfg.n_layer)  # embedding: scatter; head: gather; again in backward
    out["tp"] += t * micro * (blocks + ends) * rows * cfg.n_embd * weight
    if last == cfg.n_layer:  # cross-entropy: the maximum, and two sums, over the vocabulary
        out["tp"] += t * micro * 2 * 3 * rows * grad
    # pipeline: one activation forwards, one gradient backwards
    neighbours = (first > 0) + (last < cfg.n_layer)
    out["pp"] += micro * neighbours * rows // mesh.tp.size * cfg.n_embd * weight
    out["world"] += 2 * (mesh.world.size - 1) / mesh.world.size * 4 * 8  # loss and norms: four fp64
    return {name: b for name, b in out.items() if b}


def memory(cfg, mesh, vocab_size):
    """-> {part: bytes on this rank}: weights, gradients, optimizer, activations, logits. Activations: what
    autograd keeps of a block for backward, counted from model.py's forward; 1F1B keeps up to (stages - stage)
    micro-batches of them."""
    weight, grad = SIZE[cfg.dtype], max(4, SIZE[cfg.dtype])
    count = local_parameters(cfg, mesh, vocab_size)
    n = sum(count.values())
    shard = sum(p / (getattr(mesh, name).size if cfg.zero else 1) for name, p in count.items())
    masters = 0 if weight == grad else grad
    tp, C, F = mesh.tp.size, cfg.n_embd, cfg.ffn_hidden
    rows = cfg.micro_batch * cfg.seq_len
    kv = 2 * cfg.n_kv_head * (C // cfg.n_head) / min(tp, cfg.n_kv_head)
    # kept per row: norms' inputs (2 C, sharded over tp), their outputs as gathered (2 C), q, attention's
    # output, kv, MLP
    gathered = (2 * C + (3 if cfg.pos == "rope" else 2) * C / tp + kv
                + (4 if cfg.mlp == "swiglu" else 2) * F / tp)
    block = rows * weight * (2 * C / tp + gathered)
    first, last = stage_layers(cfg, mesh.pp.size)[mesh.pp.rank]
    flying = mesh.pp.size - mesh.pp.rank
    if cfg.recompute == "full":
        activations = flying * (last - first) * rows * C / tp * weight + block
    else:
        activations = flying * (last - first) * block
    V = -(-vocab_size // 128) * 128
    # logits in the model's dtype, in fp32, and the softmax or its gradient beside them
    logits = rows * V / tp * (2 * weight + 2 * grad) if last == cfg.n_layer else 0
    return {"weights": n * weight, "gradients": n * grad, "optimizer": shard * (masters + 2 * grad),
            "activations": activations, "logits": logits}
