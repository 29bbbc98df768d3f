"""The bytes that a rank needs on a GPU, before it runs: weights, gradients, optimizer, activations.

Activations are counted tensor by tensor, as model.py and ops/ keep them for backward. plan.py prints
the result.
"""
import itertools
import os
from typing import NamedTuple

from config import pad_vocab
from cost.muon import muon_elements, workspace_bytes
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
    if not cfg.n_experts:
        return BlockActivations(saved, remains, peak)

    experts = _expert_activations(cfg, mesh, load_factor, choice)
    return BlockActivations(saved + experts.saved, remains + experts.remains, peak + experts.peak)


def _attention_activations(cfg, mesh):
    """Return the BlockActivations from a block's input to the input of norm2."""
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
    wide = 0
    if cfg.qk_norm == "all":  # q and k widened, and the same divided by their mean square's root
        wide = 2 * wide_bytes * rows * (q + kv)
    softmax = 4 * rows * cfg.n_head / mesh.tp.size  # bytes of its log-sum-exp, in fp32
    remains = weight_bytes * rows * C / mesh.tp.size  # the block's input
    if cfg.recompute == "selective":
        # It keeps q k v, attention's output, and the product with wo as it is before the scatter.
        remains += weight_bytes * rows * (qkv + q + C) + softmax
    return BlockActivations(weight_bytes * saved + wide + softmax, remains, weight_bytes * peak)


def _mlp_activations(cfg, mesh):
    """Return the BlockActivations of the MLP or of the shared experts, with norm2's output."""
    hidden = dense_hidden(cfg) / mesh.tp.size
    if not hidden:
        return BlockActivations(0, 0, 0)
    weight_bytes, _ = element_bytes(cfg)
    rows = rank_tokens(cfg, mesh)
    C = cfg.n_embd
    is_gated = cfg.mlp in GATED

    # Gate, up and their product (GEGLU also gelu(gate)), or the hidden layer before and after GELU.
    inner = rows * hidden * {"swiglu": 3, "geglu": 4}.get(cfg.mlp, 2)
    concatenated = 2 * hidden * C if is_gated else 0  # w1 and w3
    saved = rows * C + inner
    if cfg.zero < 3:
        saved += concatenated

    # With tp or cp a block is compiled in pieces, between its collectives.
    compiled_whole = cfg.compile and mesh.tp.size == mesh.cp.size == 1
    remains = 0
    if cfg.recompute == "selective" and cfg.n_experts:
        remains = inner + concatenated  # the shared experts are not recomputed
    elif cfg.recompute == "selective":
        remains = rows * hidden * (2 if is_gated else 1)  # the products with w1 and w3
        if not compiled_whole:
            # The product with w2 stays as it is before the scatter. Backward does not need it, so a
            # block that is compiled whole drops it.
            remains += rows * C
    elif cfg.recompute == "full" and compiled_whole and cfg.mlp == "swiglu" and not cfg.n_experts:
        remains = rows * hidden  # a Triton kernel's output is not recomputed (inferred from a run)
    return BlockActivations(weight_bytes * saved, weight_bytes * remains, weight_bytes * inner)


def _expert_activations(cfg, mesh, load_factor, choice=None):
    """Return the BlockActivations of the router and the routed experts alone."""
    choice = choice or expected_choice(cfg, mesh)
    weight_bytes, _ = element_bytes(cfg)
    C, F = cfg.n_embd, cfg.ffn_hidden
    n = rank_tokens(cfg, mesh) // mesh.tp.size
    through_buffers = buffer_rows(cfg, mesh, choice) > 0
    has_row_limit = needs_row_limit(cfg, mesh)

    held = expert_rows(cfg, n)
    if has_row_limit:
        held = _rows_of_fullest_rank(cfg, mesh, load_factor, held, choice)
    returned = n * cfg.top_k
    router = _router_bytes(cfg, mesh, n, through_buffers)
    if has_row_limit and choice.graph and not through_buffers:
        # fast/padded.py sends messages of `held` rows, also on the way back.
        router += 24 * (held - returned)
        returned = held
    recomputes = cfg.mlp == "swiglu" and cfg.dtype != "fp64"  # SwiGLUExperts keeps two of four
    hidden_tensors = 2 if recomputes or cfg.mlp not in GATED else 4
    row = hidden_tensors * F
    if not through_buffers:
        row += C  # the input of the experts
    saved = router + weight_bytes * (held * row + returned * C)
    remains = saved if cfg.recompute == "selective" else router
    norm2_output = weight_bytes * n * C
    return BlockActivations(saved, remains + norm2_output, weight_bytes * held * (2 * F + C))


def _rows_of_fullest_rank(cfg, mesh, load_factor, balanced, choice):
    """Return the most rows that a rank's dropless experts hold. balanced: the mean over the ranks."""
    if load_factor:
        return load_factor * balanced
    # In a bad step the rows fill what a CUDA graph has for them. The first step does without a graph.
    room = balanced * allocated_row_factor(cfg, mesh) if choice.graph else 0
    return max(room, IMBALANCE * balanced)


def _router_bytes(cfg, mesh, n, through_buffers):
    """Return the bytes that the router of n rows keeps: its tensors, and which copy goes where."""
    weight_bytes, wide_bytes = element_bytes(cfg)
    kept = 2 * n * cfg.n_experts * wide_bytes
    if wide_bytes > weight_bytes:
        # The input, widened
        kept += n * cfg.n_embd * wide_bytes
    permutations = 3
    if through_buffers:
        permutations = 2
    elif mesh.ep.size > 1:
        permutations = 5
    return kept + 8 * n * cfg.top_k * permutations  # int64


def buffer_rows(cfg, mesh, choice):
    """Return the rows of each symmetric-memory buffer through which rows reach the experts.

    0 where there is none.
    """
    if not choice.symm_mem:
        return 0
    rows = expert_rows(cfg, rank_tokens(cfg, mesh) // mesh.tp.size)
    if cfg.capacity_factor:
        return rows
    return rows * allocated_row_factor(cfg, mesh)


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
    slot = _largest_bucket(buckets, sliced)

    total = (whole - unwidened) * sum_bytes + unwidened * weight_bytes
    total += slices * sum_bytes
    total += 2 * slot * (weight_bytes if copied else sum_bytes)
    return total + _largest_bucket(buckets, copied) * weight_bytes


def _largest_bucket(buckets, axes):
    """Return the elements of the largest bucket that is reduced over one of the axes, or 0."""
    return max((n for axis in axes for n in buckets[axis]), default=0)


def state_bytes(cfg, mesh, vocab_size, choice):
    """Return {part: bytes on this rank} of what stays from step to step: weights, gradients, optimizer."""
    weight_bytes, sum_bytes = element_bytes(cfg)
    local = local_parameters(cfg, mesh, vocab_size)
    owned = owned_parameters(cfg, mesh, local_trained(cfg, mesh, vocab_size))
    master_bytes = sum_bytes if sum_bytes > weight_bytes else 0

    of_muon = muon_elements(cfg, mesh, vocab_size)
    masters = owned * master_bytes
    if cfg.dtype == "bf16":  # Those of AdamW are half as long.
        masters -= (owned - of_muon) * master_bytes / 2
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
    if cfg.pp_chunks == 1:  # 1F1B: a stage begins as many as there are stages from it to the last
        return sizes[0] * min(mesh.pp.size - mesh.pp.rank, micro_batches(cfg, mesh))
    # After the warm-up there are never more, so a few micro-batches are enough.
    few = min(micro_batches(cfg, mesh), 2 * mesh.pp.size)
    held = 0
    most = 0
    for op in schedule(mesh.pp.rank, mesh.pp.size, cfg.pp_chunks, few):
        if op.kind == "F":
            held += sizes[op.chunk]
        else:
            held -= sizes[op.chunk]
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
    """Return the bytes that the first block's backward needs besides the activations in flight.

    block: its BlockActivations.
    """
    weight_bytes, _ = element_bytes(cfg)
    held = held_layers(cfg, mesh)
    needed = block.peak
    if not held.has_head or cfg.pp_chunks > 1:
        # There are a message to the next stage and one from it.
        needed += 2 * rank_tokens(cfg, mesh) * cfg.n_embd / mesh.tp.size * weight_bytes

    table = pad_vocab(vocab_size) // mesh.tp.size * cfg.n_embd
    in_blocks = sum(local_trained(cfg, mesh, vocab_size).values())
    if held.has_embedding and not cfg.lora:
        in_blocks -= table
    if held.has_head and not cfg.tied and not cfg.lora:
        in_blocks -= table
    needed += max(0, in_blocks) / held.blocks * weight_bytes  # gradients before they reach the bucket
    if cfg.recompute != "none":
        needed += block.saved - block.remains
    return needed


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
                    workspace_bytes(cfg, mesh, vocab_size) - logits - activations)
    buffers = held.blocks + 2  # one for each layer, two for all layers
    symm_mem = buffers * buffer_rows(cfg, mesh, choice) * cfg.n_embd * weight_bytes
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
                         f"{larger_zero(cfg, mesh)}--tp {2 * cfg.tp} or --pp {2 * cfg.pp} on more devices, "
                         "--recompute full, or a smaller --micro-batch or --n-embd")


def host_memory():
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def larger_zero(cfg, mesh):
    """Return the --zero, and a comma, that would share out more; "" if there is none."""
    if mesh.dpcp.size == 1:  # there are no replicas to share with
        return ""
    if 0 < cfg.shard < mesh.dpcp.size:
        return "a larger --shard, "
    if not cfg.zero:
        return "--zero 1, "
    if cfg.zero < 3 and mesh.pp.size == 1:
        return "--zero 3, "
    return ""
