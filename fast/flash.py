"""Attention by flash-attn-4, where that is installed: the fast twin of torch's scaled_dot_product_attention.

    pip install flash-attn-4==4.0.0b36        (the version that was run; for NVIDIA's Hopper GPUs)

Its two kernels, forward and backward, are two operations of torch here. So --compile leaves each of them
whole, and a CUDA graph captures them. The library compiles a kernel when it is first called, if it does not
find it on the disk. Backward adds up the gradient of the queries in any order, as cuDNN's does, so
--deterministic takes torch's attention.
docs/machines.md says what it saves, and in which shapes it was run.

    FlashAttention   what attention.attend calls in the place of torch's function
    is_taken         whether a run takes it
"""
import functools
import warnings
from collections.abc import Sequence

import torch

from config import head_width
from interface.packages import version_of
from ops.backend import is_hopper

PACKAGE = "flash-attn-4"
VERSION = "4.0.0b36"  # Only this one is taken, because the two functions of it that we call are not public.
NAME = f"{PACKAGE} {VERSION}"
HEAD_WIDTHS = {"causal": (64, 128), "mlm": (64,)}  # by objective: those that were run on a GPU
TOKENS = 128  # Sequences whose length is no multiple were not run.


@functools.cache
def library():
    """Return the module of flash-attn-4 that has its kernels."""
    from flash_attn.cute import interface
    # For each kernel, its compiler warns of an argument that the library itself gives it.
    warnings.filterwarnings("ignore", message="Argument aux_data")
    return interface


@torch.library.custom_op("nanoshard::attention", mutates_args=())
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, T, h, D), and the log-sum-exp of each query (B, h, T) fp32, for backward.

    q (B, T, h, D), k and v (B, T, g, D), bf16, with strides of any kind but in the last dimension.
    """
    out, log_sum_exp, *_ = library()._flash_attn_fwd(q, k, v, causal=is_causal, return_lse=True)
    return out, log_sum_exp


@attention.register_fake
def _(q, k, v, is_causal):
    B, T, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, h, T, dtype=torch.float32)


@torch.library.custom_op("nanoshard::attention_backward", mutates_args=())
def attention_backward(grad: torch.Tensor, kept: Sequence[torch.Tensor],
                       is_causal: bool) -> torch.Tensor:
    """Return the gradients of q, k and v side by side, (B, T, h + 2g, D).

    grad (B, T, h, D): the gradient of attention's output. kept: q, k, v, the output and the log-sum-exp.
    """
    q, k, v, out, log_sum_exp = kept
    gradients = empty_beside(q, k, v)
    of_q, of_k, of_v = split_heads(gradients, q, k, v)
    library()._flash_attn_bwd(q, k, v, out, grad, log_sum_exp, causal=is_causal, dq=of_q, dk=of_k, dv=of_v)
    return gradients


def empty_beside(q, k, v):
    """Return a tensor for q (B, T, h, D), k and v (B, T, g, D) side by side: (B, T, h + 2g, D)."""
    B, T, h, D = q.shape
    return q.new_empty(B, T, h + k.size(2) + v.size(2), D)


def split_heads(gradients, q, k, v):
    """Return the parts of gradients (B, T, h + 2g, D) that belong to q, k and v, in their shapes."""
    return gradients.split([q.size(2), k.size(2), v.size(2)], dim=2)


@attention_backward.register_fake
def _(grad, kept, is_causal):
    return empty_beside(*kept[:3])


def keep_for_backward(ctx, inputs, output):
    q, k, v, ctx.is_causal = inputs
    ctx.save_for_backward(q, k, v, *output)


def backward(ctx, grad, _):
    kept = ctx.saved_tensors  # A recomputed block gives them only once.
    gradients = attention_backward(grad.contiguous(), kept, ctx.is_causal)
    # Where q, k and v were parts of one product, the compiler sees that its gradient is this tensor as it is.
    return *split_heads(gradients, *kept[:3]), None


attention.register_autograd(backward, setup_context=keep_for_backward)


class FlashAttention:
    """Called as attention.attend calls it. All layers share one.

    operation: its name among torch's operations, by which --recompute selective keeps its result.
    """
    operation = torch.ops.nanoshard.attention.default

    def __call__(self, q, k, v, is_causal):
        """Attention of q (B, h, queries, D) to k and v (B, g, keys, D): (B, h, queries, D)

        is_causal: a query sees the keys up to its own, and there are as many queries as keys.
        """
        out, _ = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal)
        return out.transpose(1, 2)


def fits(cfg):
    """Whether some layers attend without a mask, and all that was run on a GPU."""
    if cfg.dtype != "bf16" or cfg.dropout > 0 or cfg.cp > 1 or cfg.deterministic:
        return False
    if head_width(cfg) not in HEAD_WIDTHS[cfg.objective] or cfg.seq_len % TOKENS:
        return False
    has_full_layer = 0 < cfg.full_every <= cfg.n_layer or not 0 < cfg.window < cfg.seq_len
    # With "auto" the data says whether there are documents; then no layer calls the library.
    return has_full_layer and cfg.doc_mask != "on"


def is_taken(cfg, device):
    """Whether a run attends by the library. plan.py's device has no index."""
    return is_wanted(cfg, device) and not problem()


def why_not(cfg, device):
    """Return why a run cannot take the library that is installed for it, or ""."""
    return problem() if is_wanted(cfg, device) else ""


def is_wanted(cfg, device):
    """Whether the library is installed, in any version, and has kernels for this run on this GPU.

    Where it is not installed nothing is asked about the GPU: a torch that was built for CPUs alone could not
    answer.
    """
    if device.index is None or not fits(cfg) or not version_of(PACKAGE):
        return False
    return is_hopper(device)


@functools.cache
def problem():
    """Return why the installed library cannot be taken, or "". An import that failed is not tried again."""
    version = version_of(PACKAGE)
    if version != VERSION:
        return f"version {version} was not tried, {VERSION} was; pip install {PACKAGE}=={VERSION}"
    try:
        library()
    except Exception as e:
        return f"it cannot be imported: {e}"
    return ""
