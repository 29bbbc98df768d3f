"""Attention by flash-attn-4, where that is installed: the fast twin of torch's scaled_dot_product_attention.

    pip install flash-attn-4==4.0.0b36        (the version that was run; for NVIDIA's Hopper GPUs)

Its two kernels, forward and backward, are two operations of torch here. So --compile leaves each of them
whole, and a CUDA graph captures them. The library compiles a kernel when it is first called. Backward adds up
the gradient of the queries in any order, as cuDNN's does, so --deterministic takes torch's attention.
bench/README.md says what it saves.

    flash_attention   which attention a run takes: a FlashAttention, or None for torch's
"""
import functools
import importlib.metadata
import warnings
from collections.abc import Sequence

import torch

from config import head_width

HEAD_WIDTHS = (64, 128)  # those that were measured
PACKAGE = "flash-attn-4"
TESTED = "4.0.0b36"


@functools.cache
def library():
    """Return the module of flash-attn-4 that has its kernels."""
    from flash_attn.cute import interface
    # The library gives its own compiler an argument that this does not know, for each kernel.
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
                       is_causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v. grad (B, T, h, D): the gradient of attention's output.

    kept: q, k, v, the output and the log-sum-exp.
    """
    q, k, v, out, log_sum_exp = kept
    gradients = [t.new_empty(t.shape) for t in (q, k, v)]
    of_q, of_k, of_v = gradients
    library()._flash_attn_bwd(q, k, v, out, grad, log_sum_exp, causal=is_causal, dq=of_q, dk=of_k, dv=of_v)
    return of_q, of_k, of_v


@attention_backward.register_fake
def _(grad, kept, is_causal):
    return tuple(t.new_empty(t.shape) for t in kept[:3])


def keep_for_backward(ctx, inputs, output):
    q, k, v, ctx.is_causal = inputs
    ctx.save_for_backward(q, k, v, *output)


def backward(ctx, grad, _):
    gradients = attention_backward(grad.contiguous(), ctx.saved_tensors, ctx.is_causal)
    return *gradients, None


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


def flash_attention(cfg, device):
    """Return a FlashAttention, or None where torch's attention runs.

    All layers of a run take the same one. A part of them may hide keys, and go another way.
    """
    if cfg.kernels == "plain" or not fits(cfg) or not is_hopper(device) or problem():
        return None
    return FlashAttention()


def fits(cfg):
    """Whether some layers of a run attend without a mask, and as was measured."""
    hides_keys = cfg.doc_mask == "on" or (0 < cfg.window < cfg.seq_len and not cfg.full_every)
    is_plain = cfg.dropout == 0 and cfg.cp == 1 and not cfg.deterministic
    return is_plain and not hides_keys and cfg.dtype == "bf16" and head_width(cfg) in HEAD_WIDTHS


def is_hopper(device):
    """Whether the device is a GPU of NVIDIA's Hopper, which the library was measured on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def version():
    """Return the version of flash-attn-4 that is installed, or ""."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def problem():
    """Return why the library cannot be taken, or "". The two functions of it that we call are not public."""
    if version() != TESTED:
        return f"version {version()} was not tried, {TESTED} was" if version() else "it is not installed"
    try:
        library()
    except Exception as e:
        return f"it cannot be imported: {e}"
    return ""
