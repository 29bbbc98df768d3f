"""Two checks before weights are trusted: a checksum of a tensor's bits, and whether its values are finite."""
import numpy as np
import torch

BLOCK = 2**24  # elements that checksum widens at once
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def checksum(t):
    """Return the plain and the position-weighted sum of the bit pattern of t, (2,) int64."""
    bits = t.detach().reshape(-1).view(INTEGERS[t.element_size()])  # (n,)
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)

    # A widened element takes 8 bytes, in several tensors at a time: the whole tensor might not fit.
    for first in range(0, bits.numel(), BLOCK):
        part = bits[first:first + BLOCK].long()
        weight = torch.arange(first, first + part.numel(), device=bits.device) * 2 + 1
        sums += torch.stack([part.sum(), (part * weight).sum()])  # The second changes with a swap.
    return sums


def refuse_not_finite(pieces):
    """Refuse host copies of tensors that hold nan or inf: --keep would delete a good checkpoint for them."""
    for name, t, _, _ in pieces:
        if t.dtype == torch.bfloat16:
            t = t.float()
        # NumPy computes here, because torch's threads are busy with the training.
        if not np.isfinite(t.detach().numpy()).all():
            raise ValueError(f"{name} holds values that are not finite")
