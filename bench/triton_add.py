"""One Triton kernel, which adds two vectors: bench/doctor.py runs it to know whether Triton works here."""
import torch
import triton
import triton.language as tl

N = 1000
BLOCK = 256


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)


def adds(device):
    """Whether the kernel's sum of two vectors equals torch's."""
    x = torch.arange(N, dtype=torch.float32, device=device)
    y = 3 * x
    out = torch.full_like(x, -1)
    add_kernel[(triton.cdiv(N, BLOCK),)](x, y, out, N, BLOCK=BLOCK)
    return torch.equal(out, x + y)
