"""The bytes that a rank needs on a GPU, before it runs: weights, gradients, optimizer, activations."""
import itertools

from cost.parameters import Rank, micro_batches
from cost.step_time import allocated_row_factor
from fast.choose import choose, needs_row_limit
from ops.accelerator import total_memory
from ops.activations import GATED
from ops.cross_entropy import rows_per_block
from pipeline import rank_layers, schedule
from zero import uses_slot

GIB = 2**30
CONTEXT = 1.2 * GIB  # CUDA context, buffers of cuBLAS and NCCL: on the card, but not torch's
FRAGMENTS = 0.05  # of what a step allocates and frees, what torch's allocator reserves without using it
GRADIENTS = 1 / 3  # of what a block keeps for backward, the largest gradients that are alive at once

# What a block keeps for backward, in bytes of one micro-batch, tensor by tensor

def saved_activations(rank):
    """Return (saved, remains) of one block: what backward needs, and what is kept of it under --recompute."""
    parts = [_attention_activations(rank), _mlp_activations(rank)]
    if rank.cfg.n_experts:
        parts.append(_expert_activations(rank))
    saved, remains = map(sum, zip(*parts, strict=True))
    if rank.cfg.dropout > 0:
        saved += 2 * rank.split_rows * rank.cfg.n_embd  # the masks of both branches, a byte per element
    return saved, remains


def _attention_activations(rank):  # of a block's input to the input of norm2
    cfg = rank.cfg
    rows = rank.rows
    C = cfg.n_embd
    qkv = rank.q + 2 * rank.kv
    has_norm = cfg.qk_norm != "none"

    # The inputs of the block and of norm2, norm1's output as gathered, q k v, attention's output
    row = 2 * C / rank.mesh.tp.size + C + qkv + rank.q
    if cfg.norm_place == "both":
        row += 2 * C / rank.mesh.tp.size  # the inputs of the norms of attention's and the MLP's output
    if cfg.pos == "rope" or has_norm:
        row += rank.q + rank.kv  # q and k rotated, or normed
    saved = rows * row
    if rank.mesh.cp.size > 1:
        # Attention keeps keys and values of whole sequences, and the outputs of the rank's two segments.
        # Rotated queries are copies, so the original q k v can be freed.
        saved += 2 * rank.kv * cfg.micro_batch * cfg.seq_len + rows * rank.q
        if cfg.pos == "rope" and not has_norm:
            saved -= rows * qkv
    if cfg.zero < 3:
        saved += C * qkv  # wq, wk and wv concatenated
    wide = 4 * rows * cfg.n_head / rank.mesh.tp.size  # the softmax' log-sum-exp, in fp32
    remains = rank.weight_bytes * rows * C / rank.mesh.tp.size  # the block's input
    if cfg.recompute == "selective":
        # It keeps q k v, attention's output, and the product with wo as it is before the scatter.
        remains += rank.weight_bytes * rows * (qkv + rank.q + C) + wide
    if cfg.qk_norm == "all":  # q and k widened, and the same divided by their mean square's root
        wide += 2 * rank.sum_bytes * rows * (rank.q + rank.kv)
    return rank.weight_bytes * saved + wide, remains


def _mlp_activations(rank):  # of the MLP or of the shared experts, with norm2's output
    cfg = rank.cfg
    if not rank.hidden:
        return 0, 0
    gates = 2 if cfg.mlp in GATED else 1
    # Gate, up and their product (GEGLU also gelu(gate)), or the hidden layer before and after GELU.
    inner = rank.rows * rank.hidden * {"swiglu": 3, "geglu": 4}.get(cfg.mlp, 2)
    concatenated = 2 * rank.hidden * cfg.n_embd if gates == 2 else 0  # w1 and w3
    saved = rank.rows * cfg.n_embd + inner
    if cfg.zero < 3:
        saved += concatenated
    remains = 0
    if cfg.recompute == "selective" and cfg.n_experts:
        remains = inner + concatenated  # the shared experts are not recomputed
    elif cfg.recompute == "selective":
        remains = rank.rows * (rank.hidden * gates + cfg.n_embd)  # all products
    return rank.weight_bytes * saved, rank.weight_bytes * remains


def _expert_activations(rank):  # of the router and the routed experts alone
    cfg = rank.cfg
    n = rank.split_rows
    held = rank.expert_rows()  # rows of this rank's experts
    if needs_row_limit(cfg, rank.mesh):
        held *= allocated_row_factor(cfg, rank.mesh)
    # Of the router: its tensors, their input widened, and which copy goes where, in int64
    router = 2 * n * cfg.n_experts * rank.sum_bytes + 8 * n * cfg.top_k * 3
    if rank.sum_bytes > rank.weight_bytes:
        router += n * cfg.n_embd * rank.sum_bytes

    recomputes = cfg.mlp == "swiglu" and cfg.dtype != "fp64"  # SwiGLUExperts keeps two of four
    row = (2 if recomputes or cfg.mlp not in GATED else 4) * cfg.ffn_hidden
    if not rank.choice.symm_mem:
        row += cfg.n_embd  # the input of the experts
    saved = router + rank.weight_bytes * (held * row + n * cfg.top_k * cfg.n_embd)
    remains = saved if cfg.recompute == "selective" else router
    return saved, remains + rank.weight_bytes * n * cfg.n_embd  # norm2's output


# What stays from step to step

def gradient_bytes(rank):
    """Return the bytes of the gradients, each as Rank.gradient_kind says."""
    total = 0
    slot = 0  # of a whole bucket: from ZeRO-2 on there are two, and only slices of the sums
    arriving = 0  # of peer copies: the other ranks' part of a bucket
    for bucket in rank.trained:
        kind = rank.gradient_kind(bucket)
        whole = bucket.elements * (rank.sum_bytes if kind == "summed" else rank.weight_bytes)
        uses_slots = rank.cfg.zero > 1 and uses_slot(getattr(rank.mesh, bucket.axis))
        if uses_slots:
            slot = max(slot, whole)
        else:
            total += whole
        if uses_slots or kind == "copied":
            total += bucket.elements / rank.n_slices(bucket) * rank.sum_bytes
        if kind == "copied":
            arriving = max(arriving, whole)
    return total + 2 * slot + arriving


def state_bytes(rank):
    """Return {part: bytes} of what stays from step to step: weights, gradients, optimizer."""
    cfg = rank.cfg
    of_muon = sum(elements for _, elements, _ in rank.muon_shares())
    of_adam = rank.owned() - of_muon
    moment_bytes = 2 if cfg.moments_dtype == "bf16" else rank.sum_bytes
    optimizer = 2 * of_adam * moment_bytes + of_muon * rank.sum_bytes  # Muon has one moment, not two.
    if cfg.dtype == "bf16":  # AdamW's masters are the 16 bits that a weight lacks.
        optimizer += of_adam * 2 + of_muon * rank.sum_bytes
    elif rank.sum_bytes > rank.weight_bytes:
        optimizer += (of_adam + of_muon) * rank.sum_bytes

    # ZeRO-3 keeps this rank's slices in the place of all matrices, and two parts that are gathered.
    weights = max(sum((a + b).values()) for a, b in itertools.pairwise(rank.gathered()))
    for bucket in rank.buckets:
        weights += bucket.elements
        if rank.is_sharded(bucket):
            weights -= rank.padded(bucket) * (1 - 1 / rank.n_slices(bucket))
    if cfg.zero == 2 and rank.choice.peer_copies:  # this rank's slice once more, for the others to read
        weights += rank.owned()
    return {"weights": weights * rank.weight_bytes, "gradients": gradient_bytes(rank), "optimizer": optimizer}


# The fullest moment of a step

def blocks_in_flight(cfg, mesh):
    """Return how many activations of one block and micro-batch this rank keeps at once, at most."""
    sizes = [end - first for first, end in rank_layers(cfg, mesh.pp)]
    # After the warm-up there are never more, so a few micro-batches are enough.
    few = min(micro_batches(cfg, mesh), 2 * mesh.pp.size)
    ops = schedule(mesh.pp.rank, mesh.pp.size, cfg.pp_chunks, few)
    changes = [sizes[op.chunk] if op.kind == "F" else -sizes[op.chunk] for op in ops]
    return max(itertools.accumulate(changes))


def logits_bytes(rank):
    """Return the bytes of the head and the cross-entropy, on the last stage."""
    cfg = rank.cfg
    # The logits have the model's dtype, and on one rank their gradient overwrites them. Over tp there are
    # the softmax, its gradient, and the gradient scaled, too, all in fp32; with a soft-cap likewise.
    logit_bytes = rank.weight_bytes
    if rank.mesh.tp.size > 1 or cfg.logit_softcap:
        logit_bytes += 3 * rank.sum_bytes
    rows = rank.head_rows
    if not cfg.logit_softcap:
        rows = min(rows, rows_per_block(rank.vocab, rank.weight_bytes))
    weight_grad = rank.vocab * cfg.n_embd * rank.weight_bytes
    return rows * rank.vocab * logit_bytes + weight_grad


def memory(rank):
    """Return {part: bytes} at the fullest moment, on a GPU. workspace: of a block's backward, beyond logits.

    torch's allocator counts neither overhead, nor symm_mem, nor what travels as peer copies.
    """
    cfg = rank.cfg
    saved, remains = saved_activations(rank)
    activations = blocks_in_flight(cfg, rank.mesh) * (saved if cfg.recompute == "none" else remains)
    logits = logits_bytes(rank) if rank.has_head else 0
    workspace = GRADIENTS * saved
    if cfg.recompute != "none":  # One block's activations come back.
        workspace += saved - remains
    workspace = max(0, workspace - logits)  # The logits are gone by then.
    symm_mem = 0
    if rank.choice.symm_mem:  # One buffer of rows for each layer, two for all layers.
        rows = rank.expert_rows() * allocated_row_factor(cfg, rank.mesh)
        symm_mem = (rank.blocks + 2) * rows * cfg.n_embd * rank.weight_bytes
    state = state_bytes(rank)
    # A lone gradient has no memory until backward makes it, when it has freed other blocks' activations.
    lone = sum(bucket.elements for bucket in rank.trained if rank.gradient_kind(bucket) == "lone")
    state["gradients"] -= min(lone * rank.weight_bytes, activations * (rank.blocks - 1) / rank.blocks)
    return {**state, "activations": activations, "logits": logits, "workspace": workspace,
            "symm_mem": symm_mem, "overhead": CONTEXT + FRAGMENTS * (activations + logits + workspace)}


# Does it fit?

def check_memory(cfg, mesh, vocab_size, world):
    """Raise ValueError if a step needs more memory than there is: of a GPU the state alone is counted, since
    torch says what is too much. The kernel of a CPU's node would kill the run without a line.
    """
    rank = Rank(cfg, mesh, vocab_size, choose(cfg, mesh, world.device, lambda *_: True))
    needed = sum(state_bytes(rank).values())
    if world.device.type == "cpu":
        parts = memory(rank)
        needed = world.local_size * (sum(parts.values()) - parts["overhead"])
    have = total_memory(world.device)
    if needed > have > 0:
        raise ValueError(f"a step takes at least {needed / GIB:,.1f} GiB, and {have / GIB:,.1f} are there; "
                         "try --zero, --tp or --pp on more devices, or a smaller --micro-batch or --n-embd")
