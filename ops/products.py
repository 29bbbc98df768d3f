"""Products of two matrices by the algorithm that was chosen for their shape, or else by torch.

fast/products.py chooses. Where it does not, on CPUs for example, torch multiplies.

    multiply                   what eager code calls
    product, sum_with_product  the operations, which compiled graphs call
"""
import torch

from ops import cublas_lt


def multiply(a, b):
    """Return a b, (m, n): a (m, k), b (k, n)."""
    return product(a, b) if cublas_lt.settings.measured else a @ b


@torch.library.custom_op("nanoshard::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a b, (m, n): a (m, k), b (k, n)."""
    plan = cublas_lt.plan_for(a, b)
    if plan is None:
        return torch.mm(a, b)
    out = a.new_empty(a.size(0), b.size(1))
    plan.multiply(a, b, out)
    return out


@product.register_fake
def _(a, b):
    return a.new_empty(a.size(0), b.size(1))


@torch.library.custom_op("nanoshard::sum_with_product", mutates_args=())
def sum_with_product(summand: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return summand + a b, (m, n): summand (m, n), a (m, k), b (k, n).

    torch copies the summand first, and adds the product to the copy.
    """
    plan = cublas_lt.plan_for(a, b, summand=summand)
    if plan is None:
        return torch.addmm(summand, a, b)
    out = a.new_empty(a.size(0), b.size(1))
    plan.multiply(a, b, out, summand=summand)
    return out


@sum_with_product.register_fake
def _(summand, a, b):
    return a.new_empty(a.size(0), b.size(1))
