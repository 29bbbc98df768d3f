"""Experts' products by quack-kernels, with --kernels quack: the fast twin of the two in ops/grouped_mm.py.

    pip install quack-kernels==0.6.5        (the version that was run; flash-attn-4 installs it, too)

The library compiles a kernel when it is first called, and keeps it on the disk. Products of the kinds that
are taken equalled torch's to the bit where they ran alone on a GPU. A whole run by them was not tried there,
so --kernels auto does not take them. docs/machines.md has the shapes and what they may save.

    by_quack       makes a token dispatcher say that quack multiplies the rows of its experts
    QuackProducts  what ops/routed_experts.py and SwiGLUExperts call in the place of ops/grouped_mm.py
    is_taken       whether a run takes it, which fast/choose.py asks; why_not: why it cannot, in words
"""
import functools

import torch.nn.functional as F

from fast import libraries
from ops import grouped_mm
from ops.backend import is_hopper

PACKAGE = "quack-kernels"
TESTED = "0.6.5"
WIDTHS = 64  # Widths of the model and of an expert that are no multiple were not run.

# (rows, columns, whether two tiles take turns, blocks of a cluster along rows, along columns), each with
# the rows of an expert in the mean from which on it is taken. Of the tiles that were tried on an H200 it was
# the fastest, or within 4 % of that, for gate and up together, and NARROW_TILE for down from fewer rows.
PRODUCT_TILES = {4096: (128, 192, True, 2, 1), 1024: (128, 256, False, 1, 1), 0: (128, 192, True, 1, 1)}
NARROW_TILE = (128, 256, False, 1, 2)
GRADIENT_TILES = {1024: (128, 256, False, 2, 1), 0: (128, 128, True, 2, 1)}


@functools.cache
def library():
    """Return the module of quack-kernels that has its products."""
    from quack import gemm_interface
    return gemm_interface


@functools.cache
def config(rows, columns, pingpong, cluster_rows, cluster_columns):
    """Return the library's description of a tile, as PRODUCT_TILES has it."""
    from quack.gemm_config import GemmConfig
    return GemmConfig(tile_m=rows, tile_n=columns, pingpong=pingpong, cluster_m=cluster_rows,
                      cluster_n=cluster_columns, is_dynamic_persistent=False, device_capacity=9)


def product_tile(rows, narrows):
    """Return the tile of a product for experts of `rows` rows. narrows: results are shorter than x."""
    if narrows and rows < max(PRODUCT_TILES):
        return config(*NARROW_TILE)
    return config(*by_rows(PRODUCT_TILES, rows))


def gradient_tile(rows):
    """Return the tile of a weight gradient for experts of `rows` rows."""
    return config(*by_rows(GRADIENT_TILES, rows))


def by_rows(tiles, rows):
    """Return the tile of the largest number of rows that is at most `rows`."""
    return tiles[max(least for least in tiles if least <= rows)]


class QuackProducts:
    """The products of one layer and micro-batch. ends (e,) int32: where each expert's rows end."""

    def __init__(self, ends):
        self.bounds = F.pad(ends, (1, 0))  # (e+1,) int32; expert i has the rows bounds[i] to bounds[i+1]

    def rows(self, x):
        """Return how many of the rows x (R, I) an expert has in the mean."""
        return x.size(0) // (self.bounds.numel() - 1)

    def experts_mm(self, x, w, ends, plus=None, out=None):
        """grouped_mm.experts_mm, which also adds a second product: one kernel of ours does that."""
        if plus is not None:
            return grouped_mm.experts_mm(x, w, ends, plus, out)
        y = x.new_empty(x.size(0), w.size(2)) if out is None else out[:x.size(0)]
        library().gemm_tuned.fn(x.contiguous(), w, y, cu_seqlens_m=self.bounds,
                                config=product_tile(self.rows(x), narrows=w.size(2) < w.size(1)))
        return y

    def experts_wgrad(self, grad, x, ends):
        """grouped_mm.experts_wgrad, whose kernel for many rows is taken: for down it was faster."""
        if grouped_mm.has_many_rows(x, ends):
            return grouped_mm.experts_wgrad(grad, x, ends)
        grad_w = x.new_empty(ends.numel(), grad.size(1), x.size(1))
        library().gemm_tuned.fn(grad.contiguous().mT, x.contiguous(), grad_w, cu_seqlens_k=self.bounds,
                                config=gradient_tile(self.rows(x)))
        return grad_w


def by_quack(make_dispatcher):
    """Return make_dispatcher(cfg, mesh) of a token dispatcher (moe.py) whose rows quack multiplies."""
    def make(cfg, mesh):
        dispatcher = make_dispatcher(cfg, mesh)
        dispatcher.products = QuackProducts
        return dispatcher
    return make


def is_taken(cfg, device):
    """Whether the library multiplies experts' rows in a run. plan.py's device has no index."""
    is_planned = device.index is None
    return not is_planned and cfg.kernels == "quack" and not why_not(cfg, device)


def why_not(cfg, device):
    """Return why a run that asks for the library cannot take it, or ""."""
    if not is_hopper(device):
        return "it has kernels for Hopper GPUs"
    if not fits(cfg):
        return (f"it was tried with dropless SwiGLU experts, in bf16, of widths that {WIDTHS} divides, "
                "without --deterministic")
    return problem()


def fits(cfg):
    """Whether the experts, and the widths of their matrices, are of the kind that was run on a GPU."""
    is_dropless = cfg.n_experts > 0 and cfg.capacity_factor == 0
    if not is_dropless or cfg.mlp != "swiglu" or cfg.dtype != "bf16" or cfg.deterministic:
        return False
    return cfg.n_embd % WIDTHS == 0 and cfg.ffn_hidden % WIDTHS == 0


def version():
    """Return the version of quack-kernels that is installed, or ""."""
    return libraries.version_of(PACKAGE)


@functools.cache
def problem():
    """Return why the library cannot be taken, or "". The function of it that we call is not public."""
    return libraries.problem_of(PACKAGE, version(), TESTED, library)
