"""Bytes on a rank before it runs: parameters, gradients, optimizer, and what model.py and ops/ keep for
backward, tensor by tensor. plan.py prints them.
"""
import itertools
from typing import NamedTuple

from config import pad_vocab
from cost.parameters import (
    element_bytes,
    expert_rows,
    head_rows,
    held_layers,
    kv_width,
    local_buckets,
    local_parameters,
    micro_batches,
    owned_parameters,
    rank_tokens,
    sharded_parameters,
    unwidened_gradients,
)
from cost.step_time import expected_choice
from fast.choose import needs_row_limit
from ops.activations import GATED
from pipeline import rank_layers, schedule
from zero import uses_slot

GIB = 2**30
CONTEXT = 1.2 * GIB  # CUDA context, buffers of cuBLAS and NCCL: on the card, but not torch's
IMBALANCE = 1.44  # dropless, ep > 1: rows of the fullest rank over the mean; moe-4b's aux loss at step 20
FRAGMENTS = 0.05  # of what is allocated and freed in a step: reserved by torch's allocator, but not in use


def buffer_rows(cfg, mesh, choice):
    """Rows of each symmetric-memory buffer through which rows reach the experts; 0 where there is none."""
    if not choice.symm_mem:
        return 0
    n = rank_tokens(cfg, mesh) // mesh.tp.size
    return expert_rows(cfg, n) * (1 if cfg.capacity_factor else min(cfg.ep_slack, mesh.ep.size))


class BlockActivations(NamedTuple):
    """Bytes of one block and micro-batch."""
    saved: float       # tensors that backward needs
    remains: float     # those of them that stay under --recompute, and what selective keeps in their place
    peak: float        # the largest gradients that are alive at once in backward


def saved_activations(cfg, mesh, load_factor=0.0, choice=None):
    """-> BlockActivations. A test compares them with what autograd keeps. load_factor: rows of this rank's
    experts over the balanced number, dropless and ep > 1; 0: the most that memory sees."""
    size, tp, C, F = element_bytes(cfg)[0], mesh.tp.size, cfg.n_embd, cfg.ffn_hidden
    rows, q, kv = rank_tokens(cfg, mesh), C / tp, kv_width(cfg, mesh)
    gated = cfg.mlp in GATED
    # elements per token: the block's input, norm1's output as gathered, q k v side by side, attention's
    # output, norm2's input
    row = C / tp + C + (q + 2 * kv) + q + C / tp
    if cfg.pos == "rope":
        row += q + kv  # q and k rotated
    gathered = 2 * kv * cfg.micro_batch * cfg.seq_len if mesh.cp.size > 1 else 0  # k and v of whole sequences
    if gathered:  # they are kept in the place of this rank's own v, and two outputs beside both as one
        row += gathered / rows + q - (q + 2 * kv if cfg.pos == "rope" else 0)
    whole = cfg.compile and tp == mesh.cp.size == 1  # else a block is compiled in pieces, between collectives
    keeps = cfg.zero < 3  # the concatenated copies of weights that share one product
    fixed = C * (q + 2 * kv) * keeps  # wq, wk, wv
    remains = rows * C / tp
    hidden = cfg.n_shared_experts * F if cfg.n_experts else F
    peak = 3 * gathered  # of both chunks' keys and values, and their sum
    if hidden:
        # norm2's output; gate, up and their product, or before and after GELU
        row += C + (3 if gated else 2) * hidden / tp
        fixed += 2 * hidden / tp * C * keeps if gated else 0  # w1, w3
        peak = max(peak, rows * (3 if gated else 2) * hidden / tp)
        if whole and cfg.recompute == "full" and cfg.mlp == "swiglu" and not cfg.n_experts:
            remains += rows * hidden  # a Triton kernel's output is not recomputed (inferred from a run)
    own = 4 * rows * cfg.n_head / tp  # bytes: softmax's log-sum-exp, fp32
    if cfg.recompute == "selective":
        # input, q k v, attention's output; the products with wo and w2 as they are before the scatter, w1 w3.
        # a compiled block drops that of w2, which nothing needs
        kept = (q + 2 * kv) + q + C
        if not cfg.n_experts:
            kept += C * (not whole) + (2 if gated else 1) * hidden / tp
        remains += rows * kept + own / size
        if cfg.n_experts and hidden:  # the shared expert: all, and its copy of w1, w3
            remains += rows * (3 if gated else 2) * hidden / tp + (2 * hidden / tp * C if gated else 0)
    own += 2 * rows * C / tp * (cfg.dropout > 0)  # the masks, one byte each
    dense = size * (rows * row + fixed) + own, size * remains, size * (peak + 2 * rows * C)
    if not cfg.n_experts:
        return BlockActivations(*dense)
    experts = expert_activations(cfg, mesh, load_factor, choice)
    return BlockActivations(*(a + b for a, b in zip(dense, experts, strict=True)))


def expert_activations(cfg, mesh, load_factor, choice=None):
    """saved_activations of the router and the routed experts alone -> BlockActivations"""
    choice = choice or expected_choice(cfg, mesh)
    (size, wide), C, F, K, E = element_bytes(cfg), cfg.n_embd, cfg.ffn_hidden, cfg.top_k, cfg.n_experts
    n = rank_tokens(cfg, mesh) // mesh.tp.size
    held, buffer, back = expert_rows(cfg, n), buffer_rows(cfg, mesh, choice), n * K
    if varying := needs_row_limit(cfg, mesh):  # in a bad step the rows fill what a graph has for them
        room = held * min(cfg.ep_slack, mesh.ep.size) * choice.graph  # the first step does without it
        held = load_factor * held if load_factor else max(room, IMBALANCE * held)
    router = n * C * wide * (wide > size) + 2 * n * E * wide
    router += 8 * n * K * (2 if buffer else 5 if mesh.ep.size > 1 else 3)  # int64: which copy goes where
    if varying and choice.graph and not buffer:  # fast/padded.py: messages of `held` rows, also back
        router, back = router + 24 * (held - n * K), held
    recomputes = cfg.mlp == "swiglu" and cfg.dtype != "fp64"  # SwiGLUExperts: two of four
    hidden = 2 if recomputes or cfg.mlp not in GATED else 4
    saved = router + size * (held * (C * (not buffer) + hidden * F) + back * C)  # x a b; the copies
    remains = saved if cfg.recompute == "selective" else router
    return BlockActivations(saved, remains + size * n * C,  # norm2's output
                            size * held * (2 * F + C))


def gradient_bytes(cfg, mesh, vocab_size, choice):
    """Bytes of the gradients: sums in at least fp32, or the model's dtype where nothing is added to them.
    Peer copies also need this rank's slice of the sums, and room for the other ranks' part of a bucket. From
    ZeRO-2 on the slices are all, beside two slots for whole buckets, which peer copies leave unwidened."""
    weight, grad = element_bytes(cfg)
    local, buckets = local_parameters(cfg, mesh, vocab_size), local_buckets(cfg, mesh, vocab_size)
    alone, copied = unwidened_gradients(mesh, local, choice)
    sliced = {axis: n for axis, n in local.items() if cfg.zero > 1 and uses_slot(getattr(mesh, axis))}
    whole = sum(n for axis, n in copied.items() if axis not in sliced)
    out = (sum(local.values()) - sum(sliced.values())) * grad - (alone + whole) * (grad - weight)
    out += sum(n / getattr(mesh, axis).size for axis, n in {**copied, **sliced}.items()) * grad
    out += 2 * max((n for axis in sliced for n in buckets[axis]), default=0) * (weight if copied else grad)
    return out + max((n for axis in copied for n in buckets[axis]), default=0) * weight


def state_bytes(cfg, mesh, vocab_size, choice):
    """-> {part: bytes on this rank} of what stays from step to step: weights, gradients, optimizer."""
    weight, grad = element_bytes(cfg)
    local = local_parameters(cfg, mesh, vocab_size)
    masters = 0 if weight == grad else grad
    # ZeRO-3: in the place of all matrices this rank's slices, and two parts of the model that are gathered
    sharded, parts = sharded_parameters(cfg, mesh, vocab_size)
    weights = sum(local.values()) + max(sum((a + b).values()) for a, b in itertools.pairwise(parts))
    weights -= sum(n * (1 - 1 / getattr(mesh, axis).size) for axis, n in sharded.items())
    if cfg.zero == 2 and choice.peer_copies:  # this rank's slice once more, for the others to read
        weights += owned_parameters(cfg, mesh, local)
    return {"weights": weights * weight,
            "gradients": gradient_bytes(cfg, mesh, vocab_size, choice),
            "optimizer": owned_parameters(cfg, mesh, local) * (masters + 2 * grad)}


def blocks_in_flight(cfg, mesh):
    """Blocks of this rank times micro-batches whose activations are kept at once, at most."""
    sizes, held, most = [end - first for first, end in rank_layers(cfg, mesh.pp)], 0, 0
    few = min(micro_batches(cfg, mesh), 2 * mesh.pp.size)  # there are no more after the warm-up
    for kind, _, chunk in schedule(mesh.pp.rank, mesh.pp.size, cfg.pp_chunks, few):
        held += sizes[chunk] if kind == "F" else -sizes[chunk]
        most = max(most, held)
    return most


def memory(cfg, mesh, vocab_size, choice=None):
    """-> {part: bytes on this rank} at the fullest moment, on a GPU: weights, gradients, optimizer;
    activations of all micro-batches in flight (blocks_in_flight); logits; workspace, what the
    first block's backward needs beside them and more than the logits did; symm_mem, the experts' symmetric
    memory; overhead. The last two are not of torch's allocator, nor are the weights and gradients that
    travel as peer copies. choice: the run's fast.choose.Choice, by default the expected one."""
    choice = choice or expected_choice(cfg, mesh)
    weight, grad = element_bytes(cfg)
    n = sum(local_parameters(cfg, mesh, vocab_size).values())
    tp, C, V = mesh.tp.size, cfg.n_embd, pad_vocab(vocab_size)
    rows = rank_tokens(cfg, mesh)
    blocks, is_first, is_last = held_layers(cfg, mesh)
    block = saved_activations(cfg, mesh, choice=choice)
    recompute, peak = cfg.recompute != "none", block.peak
    activations = blocks_in_flight(cfg, mesh) * (block.remains if recompute else block.saved)
    logits = 0
    if is_last:
        # one rank: logits in the model's dtype, overwritten by their gradient. tp: softmax, its gradient,
        # that scaled, in fp32. then the head's input, its norm, their gradients; that of the head's weight.
        # mlm: as many of the masked rows, around its dense layer
        logits = head_rows(cfg, mesh) * V / tp * (weight if tp == 1 else 3 * grad)
        logits += head_rows(cfg, mesh) * C * weight * 5 * (cfg.objective == "mlm")
        logits += rows * C * weight * 5 + V / tp * C * weight
    if not is_last or cfg.pp_chunks > 1:
        peak += 2 * rows * C / tp * weight  # a message to the next stage and one from it
    tables = sum(V // tp * C for here in (is_first, is_last and not cfg.tied) if here)
    block_grads = max(0, n - tables) / blocks * weight  # before they reach the bucket
    work = peak + block_grads + (block.saved - block.remains if recompute else 0)
    workspace = max(0, work - logits)
    # symmetric memory: a buffer for each layer, two for all layers
    buffers = (blocks + 2) * buffer_rows(cfg, mesh, choice) * C * weight
    return {**state_bytes(cfg, mesh, vocab_size, choice), "activations": activations, "logits": logits,
            "workspace": workspace, "symm_mem": buffers,
            "overhead": CONTEXT + FRAGMENTS * (activations + logits + workspace)}
