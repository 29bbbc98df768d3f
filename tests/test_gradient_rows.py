"""Several ranks' gradients (fast/peer.py): the kernel that adds them up, and those that read them as rows."""
import pytest
import torch
from test_kernels import DEVICE, assert_near, kernels, randn, torch_twin, with_fault

from ops import flat

__all__ = ["kernels"]  # a fixture


@pytest.mark.parametrize("ranks", [2, 4])
def test_sum_shards(ranks):
    """The sum is in fp32: 1 + 2^-8 + ... of bf16 numbers is not rounded."""
    own, others = randn(5000), randn(ranks - 1, 5000)
    total = torch.full((5000,), torch.nan, device=DEVICE)
    flat.sum_slices(total, own, others)
    assert_near(total, own.double() + others.double().sum(0), 1e-6)
    want = torch.empty(5000, dtype=torch.float64, device=DEVICE)
    torch_twin(flat.sum_slices, want, own, others)
    assert_near(total, want, 1e-6)


def check_rows(kernels, ranks):
    """The kernels that read each rank's gradients do what they do with their fp32 sum, to the bit."""
    n = 5000
    rows = randn(ranks, n)  # in bf16
    total = flat.sum_of_rows(rows)
    assert_near(total, rows.double().sum(0), 1e-6)
    scalars = torch.tensor([0.1, 0.5, 2.0, 0.0], device=DEVICE)
    divisor, zero = scalars[2:]
    grid = (-(-n // 128),)
    results = []
    for grad in (rows, total):
        w, m, v, out, momentum, direction = torch.ones(6, n, device=DEVICE)
        same = dict(ROWS=flat.number_of_rows(grad), BLOCK=128, num_warps=4)
        kernels.adamw[grid](w, grad, m, v, out, scalars, 0.9, 0.1, 0.05, 1e-8, n, OUT=True, SPLIT=False,
                            **same)
        kernels.muon_direction[grid](momentum, grad, direction, divisor, zero, 0.9, n, **same)
        squares = flat.sums_of_squares([grad, grad], torch.float32)
        results.append([w, m, v, out, momentum, direction, squares.float()])
    for found, want in zip(*results, strict=True):
        assert torch.equal(found, want) and found.isfinite().all()
    twin = flat.sums_of_squares([rows.double()], torch.float64)
    assert_near(results[0][-1][:1], twin, 1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_of_gradients_are_added_up(kernels, ranks):
    check_rows(kernels, ranks)


@pytest.mark.parametrize("text, planted", [
    ("total += tl.load(x_ptr + at, mask=at", "total = tl.load(x_ptr + at, mask=at"),
    ("        x_ptr += n\n        total += tl.load(x_ptr", "        total += tl.load(x_ptr")])
def test_a_fault_in_the_sum_of_rows_is_detected(kernels, text, planted, tmp_path):
    """The last row alone; the first row several times."""
    faulty = with_fault(kernels, text, planted, tmp_path)
    with pytest.raises(AssertionError):
        check_rows(faulty, 2)
