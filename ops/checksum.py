"""What is looked at before weights are trusted: a checksum of a tensor's bits, and whether it is finite."""
import numpy as np
import torch

CHUNK = 2**24  # elements that checksum widens at once


def checksum(t):
    """(2,) int64: plain and position-weighted sum of the bit pattern. Equal bits give equal pairs; a swap of
    two elements changes the second."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    v = t.detach().reshape(-1).view(bits)  # (n,)
    sums = torch.zeros(2, dtype=torch.int64, device=v.device)
    for first in range(0, v.numel(), CHUNK):  # widened, an element takes 8 bytes, more than once
        part = v[first:first + CHUNK].long()
        weight = torch.arange(first, first + part.numel(), device=v.device) * 2 + 1
        sums += torch.stack([part.sum(), (part * weight).sum()])
    return sums


def refuse_not_finite(shards):
    """ValueError, with the tensor, where an element of the host copies is nan or inf: such a checkpoint is of
    no use, and --keep would delete a good one for it. numpy: torch's threads are those of the training."""
    for name, t, _, _ in shards:
        values = (t.float() if t.dtype == torch.bfloat16 else t).detach().numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            finite = np.isfinite(values.sum()) or np.isfinite(values).all()  # a sum is nan or inf if one is
        if not finite:
            raise ValueError(f"{name} holds values that are not finite")
