"""A checksum of a tensor's bits, computed on its device."""
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
