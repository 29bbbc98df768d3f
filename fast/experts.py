"""Experts' products by quack-kernels, where that is installed: the fast twin of the two in ops/grouped_mm.py.

    pip install quack-kernels==0.6.5        (the version that was run; flash-attn-4 installs it, too)

The library compiles a kernel when it is first called, and keeps it on the disk. Its products equalled ours to
the bit on a GPU. docs/machines.md says what it saves, and in which shapes it was run.

    by_quack       makes a token dispatcher say that quack multiplies the rows of its experts
    QuackProducts  what ops/routed_experts.py and SwiGLUExperts call in the place of ops/grouped_mm.py
    is_taken       whether a run takes it, which fast/choose.py asks; why_not: why it cannot, in words
"""
import functools

import torch.nn.functional as F

from config import ceil_div
from fast import libraries
from ops import grouped_mm
from ops.backend import is_hopper

PACKAGE = "quack-kernels"
TESTED = "0.6.5"
WIDTHS = 64  # Widths of the model and of an expert that are no multiple were not run.

# A tile: (rows, columns, whether two tiles take turns, blocks of a cluster along rows, along columns). Of 20
# tiles that were timed on an H100, for 25 products, those below take at most 6 % longer than the fastest,
# but for one gradient (10 %). A tile whose columns do not divide the result's computes some for nothing.
FEW_NUMBERS = 2**24  # A result of fewer is cut into small tiles, so that all of the GPU works,
SHORT_SUM = 2048     # if each of its numbers is a sum of fewer terms than this.
SMALL_TILE = (128, 128, True, 2, 1)
PRODUCT_TILES = ((128, 256, False, 1, 1), (128, 192, True, 2, 1), (128, 176, True, 2, 1))
ANY_PRODUCT_TILE = (256, 128, False, 1, 2)
GRADIENT_TILES = ((128, 256, False, 2, 1), (128, 192, True, 2, 1))
ODD_GRADIENT_TILE = (128, 256, False, 1, 2)  # the first one, where rows have an odd number of tiles
ANY_GRADIENT_TILE = (256, 128, False, 2, 1)


@functools.cache
def library():
    """Return the module of quack-kernels that has its products."""
    from quack import gemm_interface
    return gemm_interface


@functools.cache
def config(rows, columns, pingpong, cluster_rows, cluster_columns):
    """Return the library's description of a tile."""
    from quack.gemm_config import GemmConfig
    return GemmConfig(tile_m=rows, tile_n=columns, pingpong=pingpong, cluster_m=cluster_rows,
                      cluster_n=cluster_columns, is_dynamic_persistent=False, device_capacity=9)


def product_tile(R, I, O, by_column):
    """Return the tile for rows (R, I) times matrices (I, O). by_column: their columns are contiguous."""
    if R * O < FEW_NUMBERS and I < SHORT_SUM:
        return SMALL_TILE
    for tile in PRODUCT_TILES:
        columns = tile[1]
        needs_columns = columns == 176  # Other matrices are slow with it.
        if O % columns == 0 and (by_column or not needs_columns):
            return tile
    return ANY_PRODUCT_TILE


def gradient_tile(R, e, O, I):
    """Return the tile for the gradients (e, O, I) of e experts' weights, from R rows."""
    rows_per_expert = R / e
    if e * O * I < FEW_NUMBERS and rows_per_expert < SHORT_SUM:
        return SMALL_TILE
    for tile in GRADIENT_TILES:
        rows, columns, *_ = tile
        if I % columns == 0:
            is_odd = columns == 256 and ceil_div(O, rows) % 2 == 1
            return ODD_GRADIENT_TILE if is_odd else tile
    return ANY_GRADIENT_TILE


class QuackProducts:
    """The products of one layer and micro-batch. ends (e,) int32: where each expert's rows end."""

    def __init__(self, ends):
        self.bounds = F.pad(ends, (1, 0))  # (e+1,) int32; expert i has the rows bounds[i] to bounds[i+1]

    def experts_mm(self, x, w, ends, plus=None, out=None):
        """grouped_mm.experts_mm, which also adds a second product: one kernel of ours does that."""
        if plus is not None:
            return grouped_mm.experts_mm(x, w, ends, plus, out)
        R, I = x.shape
        O = w.size(2)
        y = x.new_empty(R, O) if out is None else out[:R]
        tile = product_tile(R, I, O, by_column=w.stride(1) == 1)
        library().gemm_tuned.fn(x.contiguous(), w, y, cu_seqlens_m=self.bounds, config=config(*tile))
        return y

    def experts_wgrad(self, grad, x, ends):
        """grouped_mm.experts_wgrad."""
        R, O = grad.shape
        I = x.size(1)
        e = ends.numel()
        grad_w = x.new_empty(e, O, I)
        library().gemm_tuned.fn(grad.contiguous().mT, x.contiguous(), grad_w, cu_seqlens_k=self.bounds,
                                config=config(*gradient_tile(R, e, O, I)))
        return grad_w


class QuackProductsOverRanks(QuackProducts):
    """QuackProducts of rows that come from other ranks, in buffers that grow while the routing is uneven."""

    def experts_wgrad(self, grad, x, ends):
        """grouped_mm.experts_wgrad, whose kernel for many rows is taken.

        Where few experts have most of the rows, the library's took 7 to 21 % longer than ours.
        """
        if grouped_mm.has_many_rows(x, ends):
            return grouped_mm.experts_wgrad(grad, x, ends)
        return super().experts_wgrad(grad, x, ends)


def by_quack(make_dispatcher):
    """Return make_dispatcher(cfg, mesh) of a token dispatcher (moe.py) whose rows quack multiplies."""
    def make(cfg, mesh):
        dispatcher = make_dispatcher(cfg, mesh)
        dispatcher.products = QuackProducts if mesh.ep.size == 1 else QuackProductsOverRanks
        return dispatcher
    return make


def multiplies_for(dispatcher):
    """Whether quack multiplies the rows of a token dispatcher."""
    return dispatcher.products in (QuackProducts, QuackProductsOverRanks)


def is_taken(cfg, device):
    """Whether the library multiplies experts' rows in a run. plan.py's device has no index."""
    is_planned = device.index is None
    return not is_planned and version() == TESTED and would_fit(cfg, device) and not problem()


def why_not(cfg, device):
    """Return why a run cannot take the library that is installed for it, or ""."""
    return problem() if version() and would_fit(cfg, device) else ""


def would_fit(cfg, device):
    """Whether the library would multiply here, where it is installed."""
    return cfg.kernels != "plain" and fits(cfg) and is_hopper(device)


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
