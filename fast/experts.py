"""Experts' products by quack-kernels, where that is installed: a fast twin of ops/grouped_mm.py.

    pip install quack-kernels==0.6.5        (the version that was run; flash-attn-4 installs it, too)

The library compiles a kernel when it is first called, if it does not find it on the disk. Its products
equalled ours to the bit on a GPU. docs/machines.md says what it saves, and in which shapes it was run.

    by_quack       makes a token dispatcher say that quack multiplies the rows of its experts
    QuackProducts  has experts_mm and experts_wgrad of ops/grouped_mm.py: what multiplies in their place
    QUACK          the library: fast/choose.py asks whether a run takes it

For each number of rows that it has seen, the library keeps a plan of the launch for ever. So with --ep it
multiplies where rows stand in a buffer, and not where each message has its exact size.
"""
import functools

import torch.nn.functional as F

from config import ceil_div
from fast.libraries import Library
from ops import grouped_mm

WIDTHS = 64  # Widths of the model and of an expert that are no multiple were not run.

# A tile: (rows, columns, whether two tiles take turns, blocks of a cluster along rows, along columns). A tile
# whose columns do not divide the result's computes some for nothing. 20 tiles were timed on an H100 for 25
# products. By the mean of a burst and of sustained work, those that are taken here need at most 7 % more time
# than the fastest way, ours among them. One gradient needs 10 % more.
SMALL_TILE = (128, 128, True, 2, 1)
# A result of fewer numbers gets small tiles, so that all of the GPU works, but not if each is a sum of many
# terms.
FEW_NUMBERS = 2**24
MANY_TERMS = 2048
PRODUCT_TILES = ((128, 256, False, 1, 1), (128, 192, True, 2, 1))
COLUMN_TILE = (128, 176, True, 2, 1)  # for matrices whose columns are contiguous; with others it is slow
ANY_PRODUCT_TILE = (256, 128, False, 1, 2)
GRADIENT_TILES = ((128, 256, False, 2, 1), (128, 192, True, 2, 1))
ODD_GRADIENT_TILE = (128, 256, False, 1, 2)  # the first of them, where O is an odd number of tiles
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
    if R * O < FEW_NUMBERS and I < MANY_TERMS:
        return SMALL_TILE
    tiles = (*PRODUCT_TILES, COLUMN_TILE) if by_column else PRODUCT_TILES
    for tile in tiles:
        if O % tile[1] == 0:
            return tile
    return ANY_PRODUCT_TILE


def gradient_tile(R, e, O, I):
    """Return the tile for the gradients (e, O, I) of e experts' weights, from R rows."""
    rows_per_expert = R / e
    if e * O * I < FEW_NUMBERS and rows_per_expert < MANY_TERMS:
        return SMALL_TILE
    for tile in GRADIENT_TILES:
        rows, columns, *_ = tile
        if I % columns == 0:
            is_odd = columns == 256 and ceil_div(O, rows) % 2 == 1
            return ODD_GRADIENT_TILE if is_odd else tile
    return ANY_GRADIENT_TILE


class QuackProducts:
    """The products of one layer and micro-batch.

    ends (e,) int32: where each expert's rows end. balanced: how many rows this rank's experts have if the
    load is balanced. Tiles follow from it and not from the size of a buffer, which changes: so a run needs
    few kernels. A buffer that grows or shrinks across a border can still need another one.
    """

    def __init__(self, ends, balanced):
        self.bounds = F.pad(ends, (1, 0))  # (e+1,) int32; expert i has the rows bounds[i] to bounds[i+1]
        self.balanced = balanced

    def experts_mm(self, x, w, ends, plus=None, out=None):
        """Do what grouped_mm.experts_mm does. The sum of two products stays one kernel of ours."""
        if plus is not None:
            return grouped_mm.experts_mm(x, w, ends, plus, out)
        R, I = x.shape
        O = w.size(2)
        y = x.new_empty(R, O) if out is None else out[:R]
        tile = product_tile(self.balanced, I, O, by_column=w.stride(1) == 1)
        library().gemm_tuned.fn(x.contiguous(), w, y, cu_seqlens_m=self.bounds, config=config(*tile))
        return y

    def experts_wgrad(self, grad, x, ends):
        """Do what grouped_mm.experts_wgrad does."""
        O = grad.size(1)
        I = x.size(1)
        e = ends.numel()
        grad_w = x.new_empty(e, O, I)
        tile = gradient_tile(self.balanced, e, O, I)
        library().gemm_tuned.fn(grad.contiguous().mT, x.contiguous(), grad_w, cu_seqlens_k=self.bounds,
                                config=config(*tile))
        return grad_w


class QuackProductsOverRanks(QuackProducts):
    """QuackProducts of rows that come from other ranks, and stand in a buffer."""

    def experts_wgrad(self, grad, x, ends):
        """Return the library's gradients, and ours where the buffer has many rows per expert.

        Where few experts had most of these rows, the library took 7 to 21 % longer than our kernel.
        """
        if grouped_mm.has_many_rows(x, ends):
            return grouped_mm.experts_wgrad(grad, x, ends)
        return super().experts_wgrad(grad, x, ends)


def by_quack(make_dispatcher):
    """Return make_dispatcher(cfg, mesh) of a token dispatcher (moe.py) whose rows quack multiplies."""
    def make(cfg, mesh):
        dispatcher = make_dispatcher(cfg, mesh)
        kind = QuackProducts if mesh.ep.size == 1 else QuackProductsOverRanks
        balanced = balanced_rows(cfg)
        dispatcher.make_multiplier = functools.partial(kind, balanced=balanced)
        return dispatcher
    return make


def balanced_rows(cfg):
    """Return how many rows a rank's experts have if the load is balanced."""
    return cfg.micro_batch * cfg.seq_len // (cfg.cp * cfg.tp) * cfg.top_k


def fits(cfg):
    """Whether the experts, and the widths of their matrices, are of the kind that was run on a GPU."""
    is_dropless = cfg.n_experts > 0 and cfg.capacity_factor == 0
    if not is_dropless or cfg.mlp != "swiglu" or cfg.dtype != "bf16" or cfg.deterministic:
        return False
    return cfg.n_embd % WIDTHS == 0 and cfg.ffn_hidden % WIDTHS == 0


# Only this version is taken, because the function of it that we call is not public.
QUACK = Library("quack-kernels", tested="0.6.5", load=library, fits=fits)
