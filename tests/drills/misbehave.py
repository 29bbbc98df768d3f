"""python misbehave.py FAULT STEP [flags of train.py]: a run whose last rank fails at that step.

    sleep     never returns                     held   the same in C, with the interpreter's lock
    mismatch  a collective that the other ranks do not call
    raise     an exception                      slow   50 ms more in this and every later step
    flip      one bit of one weight changes
"""
import ctypes
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

import train


def sleep_for_ever():
    time.sleep(10**6)


def main(fault, at, argv):
    built, micro_batches, build = {}, train.micro_batches, train.build
    seen = {"step": 0}

    def remember(parts):
        built["model"] = parts[0]
        return parts

    def wrong(cfg, mesh, source, first, count, device):
        seen["step"] += 1
        is_last = mesh.world.rank == mesh.world.size - 1
        if is_last and (seen["step"] == at or fault == "slow" and seen["step"] > at):
            if fault == "sleep":
                sleep_for_ever()
            elif fault == "held":
                ctypes.PyDLL(None).sleep(10**6)
            elif fault == "mismatch":
                mesh.world.record("broadcast", torch.zeros(3))
                dist.broadcast(torch.zeros(3), 0)
            elif fault == "raise":
                raise RuntimeError(f"rank {mesh.world.rank} has had enough")
            elif fault == "slow":
                time.sleep(0.05)
            elif fault == "flip":
                p = next(p for n, p in built["model"].named_parameters() if p.ndim == 2)
                p.data.view(torch.int32).view(-1)[3] ^= 1 << 20
        return micro_batches(cfg, mesh, source, first, count, device)

    train.micro_batches, train.build = wrong, lambda *a: remember(build(*a))
    train.main(argv)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
