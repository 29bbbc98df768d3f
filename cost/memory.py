"""The bytes that a rank needs on a GPU, before it runs: weights, gradients, optimizer, activations.

Activations are counted tensor by tensor, as model.py and ops/ keep them for backward.
"""
import itertools
import os
from typing import NamedTuple

from config import pad_vocab
from cost.parameters import (
    dense_hidden,
    element_bytes,
    expert_rows,
    head_rows,
    held_layers,
    kv_width,
    local_buckets,
    local_parameters,
    local_trained,
    micro_batches,
    muon_shares,
    n_slices,
    owned_parameters,
    query_columns,
    rank_tokens,
    sharded_parameters,
    uncopied_gradients,
    unwidened_gradients,
)
from cost.step_time import allocated_row_factor, expected_choice
from fast.choose import choose, needs_row_limit
from model import DTYPES
from muon import batches_of, iteration_dtype
from ops.accelerator import total_memory
from ops.activations import GATED
from pipeline import rank_layers, schedule
from zero import uses_slot

GIB = 2**30
CONTEXT = 1.2 * GIB  # CUDA context, buffers of cuBLAS and NCCL: on the card, but not torch's
PROCESS = 0.25 * GIB  # Python with torch, on a CPU
# Rows of the fullest rank over the mean, dropless with ep > 1: moe-4b with its balance loss at step 20.
IMBALANCE = 1.44
# Of what a step allocates and frees, the part that torch's allocator reserves without using it.
FRAGMENTS = 0.05

# -----------------------------------------------------------------------------
# What a block keeps for backward

class BlockActivations(NamedTuple):
    """Bytes of one block, or of a part of it, in one micro-batch."""
    saved: float    # tensors that backward needs
    remains: float  # what stays of them under --recompute, and what selective keeps in their place
    peak: float     # the largest gradients that are alive at once in backward


def saved_activations(cfg, mesh, load_factor=0.0, choice=None):
    """Return the BlockActivations of one block. A test compares them with what autograd keeps.

    load_factor: rows of this rank's experts over the balanced number, dropless with ep > 1. 0 takes the
    largest number that there has to be memory for.
    """
    attention = _attention_activations(cfg, mesh)
    mlp = _mlp_activations(cfg, mesh)
    elements = rank_tokens(cfg, mesh) * cfg.n_embd  # of one (B*t, C) tensor
    saved = attention.saved + mlp.saved
    remains = attention.remains + mlp.remains
    peak = max(attention.peak, mlp.peak) + 2 * elements * element_bytes(cfg)[0]
    if cfg.dropout > 0:
        saved += 2 * elements / mesh.tp.size  # the masks of both residual branches, a byte per element
    if cfg.n_experts:
        experts = _expert_activations(cfg, mesh, load_factor, choice or expected_choice(cfg, mesh))
        saved += experts.saved
        remains += experts.remains
        peak += experts.peak
    return BlockActivations(saved, remains, peak)


def _attention_activations(cfg, mesh):
    """Of a block's input to the input of norm2."""
    weight_bytes, wide_bytes = element_bytes(cfg)
    rows = rank_tokens(cfg, mesh)
    C = cfg.n_embd
    q = query_columns(cfg) / mesh.tp.size
    kv = kv_width(cfg, mesh)
    qkv = q + 2 * kv
    uses_rope = cfg.pos == "rope"
    has_norm = cfg.qk_norm != "none"

    # Elements per token: the inputs of the block and of norm2, norm1's output as gathered, q k v side
    # by side, attention's output.
    row = 2 * C / mesh.tp.size + C + qkv + q
    if cfg.norm_place == "both":
        row += 2 * C / mesh.tp.size  # the inputs of the norms of attention's and the MLP's output
    if uses_rope or has_norm:
        row += q + kv  # q and k rotated, or normed
    saved = rows * row
    peak = 0
    if mesh.cp.size > 1:
        # Attention keeps keys and values of whole sequences. Besides its output it keeps the outputs
        # of the rank's two segments. Rotated queries are copies, so the original q k v can be freed.
        whole_sequences = 2 * kv * cfg.micro_batch * cfg.seq_len
        saved += whole_sequences + rows * q
        if uses_rope and not has_norm:
            saved -= rows * qkv
        peak = 3 * whole_sequences  # gradients of both segments' keys and values, and their sum
    if cfg.zero < 3:
        saved += C * qkv  # wq, wk and wv concatenated
    wide = 4 * rows * cfg.n_head / mesh.tp.size  # the softmax' log-sum-exp, in fp32
    remains = weight_bytes * rows * C / mesh.tp.size  # the block's input
    if cfg.recompute == "selective":
        # It keeps q k v, attention's output, and the product with wo as it is before the scatter.
        remains += weight_bytes * rows * (qkv + q + C) + wide
    if cfg.qk_norm == "all":  # q and k widened, and the same divided by their mean square's root
        wide += 2 * wide_bytes * rows * (q + kv)
    return BlockActivations(weight_bytes * saved + wide, remains, weight_bytes * peak)


def _mlp_activations(cfg, mesh):
    """Of the MLP or of the shared experts, with norm2's output."""
    hidden = dense_hidden(cfg) / mesh.tp.size
    if not hidden:
        return BlockActivations(0, 0, 0)
    weight_bytes, _ = element_bytes(cfg)
    rows = rank_tokens(cfg, mesh)
    C = cfg.n_embd
    gates = 2 if cfg.mlp in GATED else 1

    # Gate, up and their product (GEGLU also gelu(gate)), or the hidden layer before and after GELU.
    inner = rows * hidden * {"swiglu": 3, "geglu": 4}.get(cfg.mlp, 2)
    concatenated = 2 * hidden * C if gates == 2 else 0  # w1 and w3
    saved = rows * C + inner
    if cfg.zero < 3:
        saved += concatenated

    # With tp or cp a block is compiled in pieces, between its collectives.
    compiled_whole = cfg.compile and mesh.tp.size == mesh.cp.size == 1
    remains = 0
    if cfg.recompute == "selective" and cfg.n_experts:
        remains = inner + concatenated  # the shared experts are not recomputed
    elif cfg.recompute == "selective":
        remains = rows * hidden * gates  # the products with w1 and w3
        if not compiled_whole:
            # The product with w2 stays as it is before the scatter. Backward does not need it, so a
            # block that is compiled whole drops it.
            remains += rows * C
    elif cfg.recompute == "full" and compiled_whole and cfg.mlp == "swiglu" and not cfg.n_experts:
        remains = rows * hidden  # a Triton kernel's output is not recomputed (inferred from a run)
    return BlockActivations(weight_bytes * saved, weight_bytes * remains, weight_bytes * inner)


def _expert_activations(cfg, mesh, load_factor, choice):
    """Of the router and the routed experts alone."""
    weight_bytes, wide_bytes = element_bytes(cfg)
    C, F = cfg.n_embd, cfg.ffn_hidden
    n = rank_tokens(cfg, mesh) // mesh.tp.size

    held = expert_rows(cfg, n)  # rows of this rank's experts
    if needs_row_limit(cfg, mesh):
        # In a bad step the rows fill what a CUDA graph has for them. The first step does without a graph.
        room = allocated_row_factor(cfg, mesh) if choice.graph else 0
        held *= load_factor or max(room, IMBALANCE)
    # Of the router: its tensors, their input widened, and which copy goes where, in int64
    router = 2 * n * cfg.n_experts * wide_bytes
    if wide_bytes > weight_bytes:
        router += n * C * wide_bytes
    permutations = 3
    if choice.symm_mem:
        permutations = 2
    elif mesh.ep.size > 1:
        permutations = 5
    router += 8 * n * cfg.top_k * permutations

    recomputes = cfg.mlp == "swiglu" and cfg.dtype != "fp64"  # SwiGLUExperts keeps two of four
    row = (2 if recomputes or cfg.mlp not in GATED else 4) * F
    if not choice.symm_mem:
        row += C  # the input of the experts
    saved = router + weight_bytes * (held * row + n * cfg.top_k * C)
    remains = saved if cfg.recompute == "selective" else router
    norm2_output = weight_bytes * n * C
    return BlockActivations(saved, remains + norm2_output, weight_bytes * held * (2 * F + C))


# -----------------------------------------------------------------------------
# What stays from step to step

def gradient_bytes(cfg, mesh, vocab_size, choice):
    """Return the bytes of the gradients.

    Sums have at least fp32. A gradient to which nothing is added keeps the model's dtype. Peer copies
    also need this rank's slice of the sums, and room for the other ranks' part of a bucket. From ZeRO-2
    on a rank keeps only its slices of the sums, and two slots for whole buckets; peer copies leave the
    gradients in the slots unwidened.
    """
    weight_bytes, sum_bytes = element_bytes(cfg)
    local = local_trained(cfg, mesh, vocab_size)
    buckets = local_buckets(cfg, mesh, vocab_size)
    alone, copied = unwidened_gradients(mesh, local, choice)
    sliced = {}
    if cfg.zero > 1:
        sliced = {axis: n for axis, n in local.items() if uses_slot(getattr(mesh, axis))}

    whole = sum(n for axis, n in local.items() if axis not in sliced)
    unwidened = alone + sum(n for axis, n in copied.items() if axis not in sliced)
    slices = sum(n / n_slices(cfg, mesh, axis) for axis, n in {**copied, **sliced}.items())
    slot = max((n for axis in sliced for n in buckets[axis]), default=0)
    arriving = max((n for axis in copied for n in buckets[axis]), default=0)
    return ((whole - unwidened + slices) * sum_bytes + unwidened * weight_bytes + arriving * weight_bytes
            + 2 * slot * (weight_bytes if copied else sum_bytes))


def state_bytes(cfg, mesh, vocab_size, choice):
    """Return {part: bytes on this rank} of what stays from step to step: weights, gradients, optimizer."""
    weight_bytes, sum_bytes = element_bytes(cfg)
    local = local_parameters(cfg, mesh, vocab_size)
    owned = owned_parameters(cfg, mesh, local_trained(cfg, mesh, vocab_size))
    of_muon = sum(elements for _, elements, _ in muon_shares(cfg, mesh, vocab_size))
    masters = owned * (sum_bytes if sum_bytes > weight_bytes else 0)
    if cfg.dtype == "bf16":  # Those of AdamW are the 16 bits that a weight lacks.
        masters -= (owned - of_muon) * sum_bytes / 2
    moment_bytes = 2 if cfg.moments_dtype == "bf16" else sum_bytes
    moments = 2 * (owned - of_muon) * moment_bytes + of_muon * sum_bytes  # Muon has one moment, not two.

    # ZeRO-3 keeps this rank's slices in the place of all matrices, and two parts that are gathered.
    sharded, parts = sharded_parameters(cfg, mesh, vocab_size)
    gathered = max(sum((a + b).values()) for a, b in itertools.pairwise(parts))
    weights = sum(local.values()) + gathered
    weights -= sum(n * (1 - 1 / n_slices(cfg, mesh, axis)) for axis, n in sharded.items())
    if cfg.zero == 2 and choice.peer_copies:  # this rank's slice once more, for the others to read
        weights += owned
    return {"weights": weights * weight_bytes,
            "gradients": gradient_bytes(cfg, mesh, vocab_size, choice),
            "optimizer": masters + moments}


# -----------------------------------------------------------------------------
# The fullest moment of a step

def blocks_in_flight(cfg, mesh):
    """Return how many activations of one block and micro-batch this rank keeps at once, at most."""
    sizes = [end - first for first, end in rank_layers(cfg, mesh.pp)]
    # After the warm-up there are never more, so a few micro-batches are enough.
    few = min(micro_batches(cfg, mesh), 2 * mesh.pp.size)
    held = 0
    most = 0
    for op in schedule(mesh.pp.rank, mesh.pp.size, cfg.pp_chunks, few):
        held += sizes[op.chunk] if op.kind == "F" else -sizes[op.chunk]
        most = max(most, held)
    return most


def _logits_bytes(cfg, mesh, vocab_size):
    """Return the bytes of the head and the cross-entropy on the last stage."""
    weight_bytes, sum_bytes = element_bytes(cfg)
    C = cfg.n_embd
    v = pad_vocab(vocab_size) // mesh.tp.size
    rows = head_rows(cfg, mesh)
    is_fused = mesh.tp.size == 1 and not cfg.logit_softcap
    # On one rank the logits have the model's dtype, and their gradient overwrites them. Over tp there
    # are the softmax, its gradient, and the gradient scaled, all in fp32; with a soft-cap likewise.
    logits = rows * v * (weight_bytes if is_fused else 3 * sum_bytes)
    weight_grad = 0 if cfg.lora else v * C * weight_bytes
    tensors = 5 * rank_tokens(cfg, mesh)  # rows of the head's input, its norm and their gradients
    if cfg.objective == "mlm":
        tensors += 5 * rows  # the same around the dense layer, of the masked rows
    return logits + weight_grad + tensors * C * weight_bytes


def _backward_bytes(cfg, mesh, vocab_size, block):
    """Return the bytes that the first block's backward needs besides the activations in flight."""
    weight_bytes, _ = element_bytes(cfg)
    held = held_layers(cfg, mesh)
    needed = block.peak
    if not held.has_head or cfg.pp_chunks > 1:
        # There are a message to the next stage and one from it.
        needed += 2 * rank_tokens(cfg, mesh) * cfg.n_embd / mesh.tp.size * weight_bytes

    in_blocks = sum(local_trained(cfg, mesh, vocab_size).values())
    if not cfg.lora:
        tables = held.has_embedding + (held.has_head and not cfg.tied)
        in_blocks -= tables * pad_vocab(vocab_size) // mesh.tp.size * cfg.n_embd
    needed += max(0, in_blocks) / held.blocks * weight_bytes  # gradients before they reach the bucket
    if cfg.recompute != "none":
        needed += block.saved - block.remains
    return needed


def muon_workspace(cfg, mesh, vocab_size):
    """Return the bytes that Muon's update needs for a moment, when no activations are left.

    There are the vector of directions, under ZeRO twice more what is sent and received, and what the
    iteration of a batch of matrices needs.
    """
    most = 0
    for _, elements, owned in muon_shares(cfg, mesh, vocab_size):
        matrices = max(owned, key=len)
        batches = batches_of(matrices, elements)
        vectors = 3 if len(owned) > 1 else 1
        needed = max((len(batch) * matrices[batch[0]].workspace for batch in batches), default=0)
        most = max(most, vectors * elements + needed)
    return most * iteration_dtype(DTYPES[cfg.dtype]).itemsize


def memory(cfg, mesh, vocab_size, choice=None):
    """Return {part: bytes on this rank} at the fullest moment, on a GPU.

    weights, gradients, optimizer: as in state_bytes, without gradients that take the place of activations.
    activations: of all micro-batches in flight.
    logits: what the head and the cross-entropy need.
    workspace: what the first block's backward needs besides, if that is more than the logits; or Muon's
        update, if that is more than all these.
    symm_mem: the experts' symmetric memory.
    overhead: the CUDA context, and fragments.
    torch's allocator counts neither the last two nor weights and gradients that travel as peer copies.
    choice: the run's fast.choose.Choice, by default the expected one.
    """
    choice = choice or expected_choice(cfg, mesh)
    weight_bytes, _ = element_bytes(cfg)
    held = held_layers(cfg, mesh)
    block = saved_activations(cfg, mesh, choice=choice)

    kept = block.saved if cfg.recompute == "none" else block.remains
    activations = blocks_in_flight(cfg, mesh) * kept
    logits = _logits_bytes(cfg, mesh, vocab_size) if held.has_head else 0
    workspace = max(0, _backward_bytes(cfg, mesh, vocab_size, block) - logits,
                    muon_workspace(cfg, mesh, vocab_size) - logits - activations)
    symm_mem = 0
    if choice.symm_mem:  # One buffer of rows for each layer, two for all layers.
        rows = expert_rows(cfg, rank_tokens(cfg, mesh) // mesh.tp.size)
        if not cfg.capacity_factor:
            rows *= allocated_row_factor(cfg, mesh)
        symm_mem = (held.blocks + 2) * rows * cfg.n_embd * weight_bytes
    overhead = CONTEXT + FRAGMENTS * (activations + logits + workspace)
    state = state_bytes(cfg, mesh, vocab_size, choice)
    # A gradient that stays where backward wrote it has no memory before (LoneBucket). Backward makes
    # those of a block when it has freed the activations of the blocks behind it.
    made_late = uncopied_gradients(cfg, mesh, vocab_size, choice) * weight_bytes
    freed_before = activations * (held.blocks - 1) / held.blocks
    state["gradients"] -= min(made_late, freed_before)
    return {**state, "activations": activations, "logits": logits, "workspace": workspace,
            "symm_mem": symm_mem, "overhead": overhead}


# -----------------------------------------------------------------------------
# Does it fit?

def check_memory(cfg, mesh, vocab_size, world):
    """Raise ValueError, with numbers, if a step needs more memory than there is.

    On a CPU, where the kernel kills a process that takes too much, activations are counted, too. On a GPU
    they are not: what passes may still be too large, and torch says so.
    """
    choice = choose(cfg, mesh, world.device, lambda *_: True)  # at best: no rank is asked what it can reach
    needed = sum(state_bytes(cfg, mesh, vocab_size, choice).values())
    what = "weights, gradients and optimizer state alone take"
    have = total_memory(world.device)
    where = f"on {world.device} of rank {world.rank}"
    if world.device.type == "cpu":  # the ranks of a node share its memory
        parts = memory(cfg, mesh, vocab_size, choice)
        # Without a fused kernel there are the logits, their softmax and its gradient.
        needed += PROCESS + parts["activations"] + 3 * parts["logits"]
        needed *= world.local_size
        what = f"a step of micro-batches of {cfg.micro_batch} takes about"
        have = host_memory()
        where = f"for the {world.local_size} rank(s) of this node"
    if needed > have > 0:
        raise ValueError(f"{what} {needed / GIB:,.1f} GiB {where}, which has {have / GIB:,.1f} GiB; try "
                         "--zero 1 or 3, --tp or --pp on more devices, --recompute full, or a smaller "
                         "--micro-batch or --n-embd")


def host_memory():
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
