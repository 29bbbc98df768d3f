"""What a number of ranks can have: which values of the flags fit a layout and each other.

    check_ranks     whether the ranks can be a mesh; how many replicas they are
    check_layout    whether they can train the model
    check_flags     both, without a mesh; check_alone: in one process, where the layout may need more
    command         the command line that starts a number of ranks
    stage_layers    which blocks each pipeline stage holds

train.py refuses a layout that cannot be, plan.py leaves it out. cost/memory.py asks whether memory suffices.
"""
import itertools
import math
import shlex
from types import SimpleNamespace

from config import ceil_div, head_width, largest_divisor, must_divide, typed

FP8_MULTIPLE = 16  # --fp8: torch's product takes matrices whose rows have a multiple of 16 bytes


def check_ranks(n, tp, pp, ep, n_experts=0, cp=1, *, shard=0):
    """Return dp, the number of replicas, of n ranks as a mesh.

    ValueError: the ranks do not divide. The --ep to try divides n_experts, too.
    """
    model = tp * cp * pp
    if n % model:
        if n % (cp * pp):
            hint = f"start a multiple of {model} ranks"
        else:
            hint = f"try --tp {largest_divisor(tp, n // (cp * pp))}"
        by = f"tp {tp} * cp {cp} * pp {pp}" if cp > 1 else f"tp {tp} * pp {pp}"
        raise ValueError(f"{n} ranks do not divide by {by}; {hint}")
    stage = n // pp
    if stage % ep:
        raise ValueError(f"ep {ep} does not divide the {stage} ranks of a stage, {n} / pp {pp}; "
                         f"try --ep {largest_divisor(ep, stage, n_experts)}")
    if shard:
        check_shard(shard, stage // tp, tp, ep)
    return stage // (tp * cp)


def check_shard(shard, replicas, tp, ep):
    """Raise ValueError unless --shard cuts the dp * cp replicas, and each expert's copies, into equal groups.

    A group is shard * tp neighbours. If ep is larger than a group, no two of its ranks hold the same expert.
    """
    def fits(size):
        return replicas % size == 0 and (size * tp % ep == 0 or ep % (size * tp) == 0)
    if fits(shard):
        return
    sizes = [size for size in range(1, min(shard, replicas) + 1) if fits(size)]
    fix = f"try --shard {sizes[-1]}" if sizes else "leave out --shard"
    if replicas % shard:
        raise ValueError(f"shard {shard} does not divide the {replicas} data-parallel ranks, dp * cp; {fix}")
    raise ValueError(f"ep {ep} and the {shard * tp} ranks of a group, shard {shard} * tp {tp}, do not divide "
                     f"each other; {fix}")


def check_layout(cfg, mesh, batch):
    """Raise ValueError, with the fix, for values that are wrong on this mesh. batch: sequences per step."""
    if cfg.pdb >= mesh.world.size:
        raise ValueError(f"--pdb {cfg.pdb}: the ranks are 0 to {mesh.world.size - 1}")
    if cfg.n_experts % mesh.ep.size:
        fit = largest_divisor(mesh.ep.size, cfg.n_experts, mesh.stage.size)
        raise ValueError(f"n-experts {cfg.n_experts} do not divide by ep {mesh.ep.size}; try --ep {fit}")
    check_tensor_parallel(cfg, mesh.tp.size, mesh.world.size // mesh.pp.size)
    check_sequence(cfg, mesh.cp.size, mesh.tp.size)
    check_batch(cfg, mesh.dp.size, batch)
    check_pipeline(cfg, mesh.pp.size, mesh.cp.size)
    if cfg.fp8:
        check_fp8(cfg, mesh.cp.size, mesh.tp.size)


def check_tensor_parallel(cfg, tp, stage):
    """Raise ValueError unless heads, MLP and vocabulary divide by tp. stage: ranks of a stage."""
    must_divide("n-head", cfg.n_head, "tp", tp, stage)
    if cfg.n_kv_head % tp and tp % cfg.n_kv_head:
        raise ValueError(f"n-kv-head {cfg.n_kv_head} neither divides by tp {tp} nor divides it; "
                         f"try --tp {cfg.n_kv_head}")
    if cfg.ffn_hidden % tp:
        raise ValueError(f"ffn-hidden {cfg.ffn_hidden} does not divide by tp {tp}; "
                         f"try --ffn-hidden {next_multiple(cfg.ffn_hidden, tp)}")
    if 128 % tp:
        raise ValueError(f"the vocabulary is padded to a multiple of 128, which tp {tp} does not divide; "
                         "try --tp 2 or 4")


def check_sequence(cfg, cp, tp):
    """Raise ValueError unless a sequence divides by cp, and a rank's tokens by tp."""
    if cp > 1 and cfg.seq_len % (2 * cp):
        raise ValueError(f"seq-len {cfg.seq_len} does not divide by 2 * cp {cp} segments; "
                         f"try --seq-len {next_multiple(cfg.seq_len, 2 * cp)}")
    if cfg.micro_batch * cfg.seq_len // cp % tp:
        by = f"cp {cp} * tp {tp}" if cp > 1 else f"tp {tp}"
        raise ValueError(f"micro-batch {cfg.micro_batch} * seq-len {cfg.seq_len} tokens do not divide by "
                         f"{by}; try --micro-batch {tp}")


def check_batch(cfg, dp, batch):
    """Raise ValueError unless the global batch and each phase of its ramp are whole micro-batches."""
    unit = cfg.micro_batch * dp
    if batch % unit:
        whole = max(1, round(batch / unit)) * unit
        raise ValueError(f"global-batch {batch} does not divide by micro-batch {cfg.micro_batch} * dp {dp}; "
                         f"try --global-batch {whole}")
    check_ramp(batch, cfg.rampup_batch_size, unit)


def check_ramp(full, ramp, unit):
    """Raise ValueError if the batch of some phase of the ramp does not divide by unit = micro-batch * dp."""
    if not ramp:
        return
    start, increment, over = ramp
    flag = f"--rampup-batch-size {start} {increment} {over}"
    for size in start, min(full, start + increment):  # If these two divide, all that follow do.
        if size % unit:
            raise ValueError(f"{flag} has a phase of {size}, which does not divide by micro-batch * dp = "
                             f"{unit}; try --rampup-batch-size {next_multiple(start, unit)} "
                             f"{next_multiple(increment, unit)} {over}")
    if start > full or (full - start) % increment:
        reached = start + next_multiple(max(0, full - start), increment)
        raise ValueError(f"{flag} does not reach global-batch {full} in whole increments; "
                         f"try --global-batch {reached}")


def check_pipeline(cfg, pp, cp):
    """Raise ValueError for parts that do not go together, and for stages that do not fit the blocks."""
    if cfg.zero == 3 and pp > 1:
        raise ValueError(f"--zero 3 does not go with --pp {pp}: a stage goes to and fro between "
                         "micro-batches and would gather all the time; try --zero 2, or --pp 1")
    if cp > 1 and cfg.recompute == "selective" and cfg.objective == "causal":
        raise ValueError(f"--recompute selective does not go with --cp {cp}, whose mask it cannot make; "
                         "try --recompute full")
    if cfg.pp_chunks > 1 and pp == 1:
        raise ValueError(f"--pp-chunks {cfg.pp_chunks} interleaves the stages of several ranks; try --pp 2")
    if cfg.pp_chunks > 1 and cfg.zero > 1:
        raise ValueError(f"--pp-chunks {cfg.pp_chunks} does not go with --zero {cfg.zero}, which sums the "
                         "gradients of one stage per micro-batch; try --zero 1")
    stage_layers(cfg, pp * cfg.pp_chunks)


def check_fp8(cfg, cp, tp):
    """Raise ValueError unless a GPU can multiply this rank's part of each matrix, and its tokens, as fp8."""
    columns = head_width(cfg) * (cfg.n_head // tp)
    kv_columns = head_width(cfg) * max(1, cfg.n_kv_head // tp)
    hidden = cfg.ffn_hidden
    if cfg.n_experts:
        hidden *= cfg.n_shared_experts
    sizes = {"--n-embd": cfg.n_embd,
             "--micro-batch * --seq-len / cp": cfg.micro_batch * cfg.seq_len // cp,
             "--n-head / tp * the width of a head": columns,
             "the width of a rank's queries, keys and values together": columns + 2 * kv_columns,
             "--ffn-hidden / tp": hidden // tp}
    for what, size in sizes.items():
        if size % FP8_MULTIPLE:
            raise ValueError(f"--fp8 multiplies matrices whose sides are multiples of {FP8_MULTIPLE}, and "
                             f"{what} is {size}; leave out --fp8")


def next_multiple(n, of):
    """Return the smallest multiple of `of` that is at least n."""
    return ceil_div(n, of) * of


# -----------------------------------------------------------------------------
# The ranks that flags ask for

def needed(cfg):
    """Return the least number of ranks on which the layout of the flags is possible."""
    stage = cfg.tp * cfg.cp
    if cfg.zero and cfg.shard:
        stage = math.lcm(stage, cfg.tp * cfg.shard)
    return cfg.pp * math.lcm(stage, cfg.ep)


def check_flags(cfg, ranks):
    """Raise ValueError, with the fix, unless the flags fit a number of ranks. A mesh is not made."""
    dp = check_ranks(ranks, cfg.tp, cfg.pp, cfg.ep, cfg.n_experts, cfg.cp, shard=cfg.shard)
    sizes = {"world": ranks, "stage": ranks // cfg.pp, "dp": dp, "tp": cfg.tp, "cp": cfg.cp, "pp": cfg.pp,
             "ep": cfg.ep}
    mesh = SimpleNamespace(**{axis: SimpleNamespace(size=size) for axis, size in sizes.items()})
    check_layout(cfg, mesh, cfg.global_batch or cfg.micro_batch * dp)


def check_alone(cfg, argv, program="train.py"):
    """Raise ValueError if one process is started for a layout of several ranks: say what starts them."""
    ranks = needed(cfg)
    check_flags(cfg, ranks)
    if ranks > 1:
        asked = [f"{typed(axis)} {getattr(cfg, axis)}" for axis in ("tp", "cp", "pp", "ep", "shard")
                 if getattr(cfg, axis) > 1]
        raise ValueError(f"{' '.join(asked)} needs {ranks} ranks: {command(ranks, argv, program=program)}")


def command(ranks, argv, starter="mpiexec", program="train.py", nodes=1):
    """Return the command that starts a program on `ranks` ranks. starter: torchrun, srun, or any other.

    nodes: the number of nodes. torchrun is typed on each of them, and HOST is the name of the first.
    """
    program = shlex.join([program, *argv])
    if starter == "torchrun" and nodes > 1 and ranks % nodes == 0:
        return (f"torchrun --nnodes {nodes} --nproc-per-node {ranks // nodes} --rdzv-backend c10d "
                f"--rdzv-endpoint HOST:29500 {program}")
    if starter == "torchrun":
        return f"torchrun --nproc-per-node {ranks} {program}"
    if starter == "srun":
        return f"srun -n {ranks} python {program}"
    return f"mpiexec -n {ranks} python {program}"


# -----------------------------------------------------------------------------
# The blocks of each stage

def stage_layers(cfg, stages):
    """Return the blocks of each stage, [(first, last + 1)].

    ValueError: --pp-layers does not fit, or a stage would be empty.
    """
    if cfg.n_layer < stages:
        pp = stages // cfg.pp_chunks
        fix = f"--pp-chunks {cfg.n_layer // pp}" if cfg.n_layer >= pp else f"--pp {cfg.n_layer}"
        raise ValueError(f"n-layer {cfg.n_layer} is less than pp {pp} * pp-chunks {cfg.pp_chunks}, a stage "
                         f"would be empty; try {fix}")
    counts = balanced_counts(cfg.n_layer, stages)
    if cfg.pp_layers:
        proposal = ",".join(map(str, counts))
        counts = []
        for text in cfg.pp_layers.split(","):
            counts.append(int(text) if text.strip().isdecimal() else -1)
        if len(counts) != stages or sum(counts) != cfg.n_layer or min(counts) < 1:
            if stages == 1:
                raise ValueError(f"--pp-layers {cfg.pp_layers} is for several stages, and one stage has all "
                                 "blocks; leave out --pp-layers")
            raise ValueError(f"--pp-layers {cfg.pp_layers} is not {stages} counts of at least 1 that sum to "
                             f"n-layer {cfg.n_layer}; try --pp-layers {proposal}")
    ends = list(itertools.accumulate(counts))
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]


def balanced_counts(n_layer, stages):
    """Return each stage's number of blocks, such that the largest stage is as small as possible.

    The embedding and the head each count as a block.
    """
    counts = [1] * stages
    # The middle comes first, the ends last.
    order = sorted(range(stages), key=lambda stage: -min(stage, stages - 1 - stage))
    inner = order[:-2]
    left = n_layer - stages
    for stage in inner[:left]:  # up to the load of the ends
        counts[stage] += 1
    left = max(0, left - len(inner))
    for i, stage in enumerate(order):
        counts[stage] += left // stages
        if i < left % stages:
            counts[stage] += 1
    return counts
