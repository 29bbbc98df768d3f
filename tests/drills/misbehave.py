"""python misbehave.py FAULT STEP [flags of train.py]: a run whose last rank fails at that step.

    sleep     sleeps for ever                   held   sleeps for ever in C, holding the interpreter's lock
    mismatch  a collective that the other ranks do not call
    raise     an exception                      slow   50 ms more in this step and every later one
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
    micro_batches, build = train.micro_batches, train.build
    seen = {"step": 0}

    def build_and_keep(*args):
        model, data_parallel, opt = build(*args)
        seen["model"] = model
        return model, data_parallel, opt

    def micro_batches_with_fault(cfg, mesh, source, first, count, device):
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
                raise RuntimeError(f"the planted exception of rank {mesh.world.rank}")
            elif fault == "slow":
                time.sleep(0.05)
            elif fault == "flip":
                p = next(p for n, p in seen["model"].named_parameters() if p.ndim == 2)
                p.data.view(torch.int32).view(-1)[3] ^= 1 << 20
        return micro_batches(cfg, mesh, source, first, count, device)

    train.micro_batches, train.build = micro_batches_with_fault, build_and_keep
    train.main(argv)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
