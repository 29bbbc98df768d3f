"""Whether these ranks can train a model: train.py refuses a layout that cannot, plan.py leaves it out."""
import contextlib
import dataclasses
import os
from pathlib import Path

from config import largest_divisor, must_divide
from corpus.rampup import check_ramp
from cost.memory import GIB, state_bytes
from fast.choose import choose
from ops.accelerator import total_memory
from pipeline import stage_layers


def check_layout(cfg, mesh, batch):
    """ValueError, with the fix, for values that are wrong on this mesh. batch: sequences per step."""
    tp, cp, dp = mesh.tp.size, mesh.cp.size, mesh.dp.size
    if cfg.pdb >= mesh.world.size:
        raise ValueError(f"--pdb {cfg.pdb}: the ranks are 0 to {mesh.world.size - 1}")
    if cfg.n_experts % mesh.ep.size:
        fit = largest_divisor(mesh.ep.size, cfg.n_experts, mesh.stage.size)
        raise ValueError(f"n-experts {cfg.n_experts} do not divide by ep {mesh.ep.size}; try --ep {fit}")
    must_divide("n-head", cfg.n_head, "tp", tp, mesh.world.size // mesh.pp.size)
    if cfg.n_kv_head % tp and tp % cfg.n_kv_head:
        raise ValueError(f"n-kv-head {cfg.n_kv_head} neither divides by tp {tp} nor divides it; "
                         f"try --tp {cfg.n_kv_head}")
    if cfg.ffn_hidden % tp:
        raise ValueError(f"ffn-hidden {cfg.ffn_hidden} does not divide by tp {tp}; "
                         f"try --ffn-hidden {-(-cfg.ffn_hidden // tp) * tp}")
    if 128 % tp:
        raise ValueError(f"the vocabulary is padded to a multiple of 128, which tp {tp} does not divide; "
                         "try --tp 2 or 4")
    if cp > 1 and cfg.seq_len % (2 * cp):
        raise ValueError(f"seq-len {cfg.seq_len} does not divide by 2 * cp {cp} chunks; "
                         f"try --seq-len {-(-cfg.seq_len // (2 * cp)) * 2 * cp}")
    if cfg.micro_batch * cfg.seq_len // cp % tp:
        raise ValueError(f"micro-batch {cfg.micro_batch} * seq-len {cfg.seq_len} tokens do not divide by "
                         f"{f'cp {cp} * ' * (cp > 1)}tp {tp}; try --micro-batch {tp}")
    if batch % (cfg.micro_batch * dp):
        whole = max(1, round(batch / (cfg.micro_batch * dp))) * cfg.micro_batch * dp
        raise ValueError(f"global-batch {batch} does not divide by micro-batch {cfg.micro_batch} * dp {dp}; "
                         f"try --global-batch {whole}")
    check_ramp(batch, cfg.rampup_batch_size, cfg.micro_batch * dp)
    if cfg.zero == 3 and mesh.pp.size > 1:
        raise ValueError(f"--zero 3 does not go with --pp {mesh.pp.size}: a stage goes to and fro between "
                         "micro-batches and would gather all the time; try --zero 2, or --pp 1")
    if cp > 1 and cfg.recompute == "selective" and cfg.objective == "causal":
        raise ValueError(f"--recompute selective does not go with --cp {cp}, whose mask it cannot make; "
                         "try --recompute full")
    if cfg.pp_chunks > 1 and mesh.pp.size == 1:
        raise ValueError(f"--pp-chunks {cfg.pp_chunks} interleaves the stages of several ranks; try --pp 2")
    if cfg.pp_chunks > 1 and cfg.zero > 1:
        raise ValueError(f"--pp-chunks {cfg.pp_chunks} does not go with --zero {cfg.zero}, which sums the "
                         "gradients of one stage per micro-batch; try --zero 1")
    stage_layers(cfg, mesh.pp.size * cfg.pp_chunks)


def check_memory(cfg, mesh, vocab_size, world):
    """ValueError, with the numbers, if weights, gradients and optimizer state alone exceed the memory of this
    rank's device. Activations are not counted: what passes may still be too large."""
    choice = choose(cfg, mesh, world.device, lambda *_: True)  # at best: no rank is asked what it can reach

    def need(stage):
        at = dataclasses.replace(mesh, pp=dataclasses.replace(mesh.pp, rank=stage))
        return sum(state_bytes(cfg, at, vocab_size, choice).values())

    needed, have, who = need(mesh.pp.rank), 0, f"on {world.device} of rank {world.rank}"
    if world.device.type == "cpu":  # the ranks of a node share its memory; the others need this much at least
        needed += (world.local_size - 1) * min(map(need, range(mesh.pp.size)))
        have, who = host_memory(), f"with {world.local_size} ranks on this node"
    else:
        have = total_memory(world.device)
    if needed > have > 0:
        zero = "--zero 1, " if not cfg.zero else "--zero 3, " * (cfg.zero < 3 and mesh.pp.size == 1)
        zero *= mesh.dpcp.size > 1
        raise ValueError(f"weights, gradients and optimizer state alone take {needed / GIB:,.1f} GiB {who}, "
                         f"which has {have / GIB:,.1f} GiB; try {zero}--tp {2 * cfg.tp} or --pp {2 * cfg.pp} "
                         "on more devices, or a smaller --n-embd")


def host_memory(groups="/proc/self/cgroup", root="/sys/fs/cgroup"):
    """-> bytes that the processes of this node may use together: of the machine, or of a control group that
    this process is in (a container, a batch job)."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):  # not Linux
        for line in Path(groups).read_text().splitlines():
            _, kinds, name = line.split(":", 2)
            if kinds not in ("", "memory"):
                continue
            file = "memory.limit_in_bytes" if kinds else "memory.max"  # versions 1 and 2
            folder = Path(root, kinds, name.lstrip("/"))
            for f in (folder, *folder.parents):
                with contextlib.suppress(OSError, ValueError):  # "max": no limit
                    limits.append(int((f / file).read_text()))
    return min(limits)
