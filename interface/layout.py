"""Which values of the flags fit a number of ranks and each other; the command that starts the ranks."""
import itertools
import math
import shlex

from config import ceil_div, must_divide


def check_ranks(n, tp, pp, ep, cp=1, *, shard=0):
    """Return dp, the number of replicas, of n ranks as a mesh. ValueError: the ranks do not divide."""
    model = tp * cp * pp
    if n % model:
        raise ValueError(f"{n} ranks do not divide by tp {tp} * cp {cp} * pp {pp}; "
                         f"start a multiple of {model} ranks")
    must_divide("the number of ranks of a stage,", n // pp, "ep", ep)
    replicas = n // pp // tp
    if shard:
        must_divide("the number of data-parallel ranks, dp * cp =", replicas, "shard", shard)
    group = shard * tp  # neighbours; if ep is larger, no two of them hold the same expert
    if shard and group % ep and ep % group:
        raise ValueError(f"ep {ep} and the {group} ranks of a group, shard {shard} * tp {tp}, do not divide "
                         "each other; leave out --shard")
    return replicas // cp


def check_layout(cfg, ranks):
    """Raise ValueError, with the fix, for values that so many ranks cannot have. Return dp."""
    tp = cfg.tp
    cp = cfg.cp
    pp = cfg.pp
    if cfg.pdb >= ranks:
        raise ValueError(f"--pdb {cfg.pdb}: the ranks are 0 to {ranks - 1}")
    must_divide("n-experts", cfg.n_experts, "ep", cfg.ep)
    must_divide("n-head", cfg.n_head, "tp", tp)
    if tp % cfg.n_kv_head:  # else some ranks hold copies of a key/value head
        must_divide("n-kv-head", cfg.n_kv_head, "tp", tp)
    must_divide("ffn-hidden", cfg.ffn_hidden, "tp", tp)
    must_divide("the padded vocabulary, a multiple of", 128, "tp", tp)
    if cp > 1 and cfg.seq_len % (2 * cp):
        raise ValueError(f"seq-len {cfg.seq_len} does not divide by 2 * cp {cp} segments; "
                         f"try --seq-len {ceil_div(cfg.seq_len, 2 * cp) * 2 * cp}")
    must_divide("the tokens of a micro-batch,", cfg.micro_batch * cfg.seq_len // cp, "tp", tp)
    if cfg.pp_chunks > 1 and pp == 1:
        raise ValueError(f"--pp-chunks {cfg.pp_chunks} interleaves the stages of several ranks; try --pp 2")
    stage_layers(cfg, pp * cfg.pp_chunks)
    dp = check_ranks(ranks, tp, pp, cfg.ep, cp, shard=cfg.shard)

    # The global batch and each phase of its ramp are whole micro-batches.
    unit = cfg.micro_batch * dp
    batch = cfg.global_batch or unit
    if batch % unit:
        raise ValueError(f"global-batch {batch} does not divide by micro-batch {cfg.micro_batch} * dp {dp}; "
                         f"try --global-batch {ceil_div(batch, unit) * unit}")
    if cfg.rampup_batch_size:
        start, increment, over = cfg.rampup_batch_size
        if start % unit or increment % unit or start > batch or (batch - start) % increment:
            raise ValueError(f"--rampup-batch-size {start} {increment} {over} does not lead to global-batch "
                             f"{batch} in multiples of micro-batch * dp = {unit}; "
                             f"try --rampup-batch-size {unit} {unit} {over}")

    if cfg.zero == 3 and pp > 1:
        raise ValueError(f"--zero 3 gathers a stage anew for each micro-batch of --pp {pp}; try --zero 2")
    if cp > 1 and cfg.recompute == "selective" and cfg.objective == "causal":
        raise ValueError(f"--recompute selective cannot make the mask of --cp {cp}; try --recompute full")
    if cfg.pp_chunks > 1 and cfg.zero > 1:
        raise ValueError(f"--pp-chunks {cfg.pp_chunks} does not go with --zero {cfg.zero}, which sums the "
                         "gradients of one stage per micro-batch; try --zero 1")
    return dp


# The ranks that flags ask for

def ranks_needed(cfg):
    """Return the fewest ranks that a layout has room on."""
    stage = cfg.tp * cfg.cp
    if cfg.zero and cfg.shard:
        stage = math.lcm(stage, cfg.tp * cfg.shard)
    return cfg.pp * math.lcm(stage, cfg.ep)


def check_alone(cfg, argv, program="train.py"):
    """Raise ValueError if one process is started for a layout of several ranks: say what starts them."""
    ranks = ranks_needed(cfg)
    check_layout(cfg, ranks)
    if ranks > 1:
        raise ValueError(f"this layout needs {ranks} ranks: {command(ranks, argv, program=program)}")


def command(ranks, argv, starter="mpiexec", program="train.py", nodes=1):
    """Return the command that starts a program on `ranks` ranks. starter: torchrun, srun, or any other."""
    program = shlex.join([program, *argv])
    if starter == "torchrun" and nodes == 1:
        return f"torchrun --nproc-per-node {ranks} {program}"
    return f"{starter if starter == 'srun' else 'mpiexec'} -n {ranks} python {program}"


# The blocks of each stage

def stage_layers(cfg, stages):
    """Return the blocks of each stage, [(first, last + 1)]. ValueError: --pp-layers does not fit them."""
    if cfg.n_layer < stages:
        raise ValueError(f"n-layer {cfg.n_layer} is less than pp * pp-chunks = {stages}, so a stage would be "
                         f"empty; try --n-layer {stages}")
    # Balanced, where the embedding and the head each count as a block
    counts = [1] * stages
    order = sorted(range(stages), key=lambda stage: -min(stage, stages - 1 - stage))  # the middle first
    for _ in range(cfg.n_layer - stages):
        lightest = min(order, key=lambda stage: counts[stage] + (stage in (0, stages - 1)))
        counts[lightest] += 1
    if cfg.pp_layers:
        proposal = ",".join(map(str, counts))
        counts = [int(text) if text.strip().isdecimal() else 0 for text in cfg.pp_layers.split(",")]
        if len(counts) != stages or sum(counts) != cfg.n_layer or 0 in counts:
            raise ValueError(f"--pp-layers {cfg.pp_layers} is not {stages} counts of at least 1 that sum to "
                             f"n-layer {cfg.n_layer}; try --pp-layers {proposal}")
    ends = list(itertools.accumulate(counts))
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]
