"""Attention by flash-attn-4, where the version that was tried is installed, on Hopper GPUs.

Its two kernels are operations of torch here: --compile leaves them whole, a CUDA graph captures them.
"""
import warnings

import torch

from config import head_width
from ops.backend import is_hopper, version_of

VERSION = "4.0.0b36"  # the two functions of it that are called below are not public
NAME = f"flash-attn-4 {VERSION}"


def library():
    from flash_attn.cute import interface
    warnings.filterwarnings("ignore", message="Argument aux_data")  # one that it gives itself
    return interface


@torch.library.custom_op("nanoshard::attention", mutates_args=())
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, T, h, D), k and v (B, T, g, D) -> output (B, T, h, D), log-sum-exp (B, h, T) fp32."""
    out, log_sum_exp, *_ = library()._flash_attn_fwd(q, k, v, causal=is_causal, return_lse=True)
    return out, log_sum_exp


@attention.register_fake
def _(q, k, v, is_causal):
    B, T, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, h, T, dtype=torch.float32)


@torch.library.custom_op("nanoshard::attention_backward", mutates_args=())
def attention_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                       out: torch.Tensor, log_sum_exp: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """The gradients of q, k and v side by side, (B, T, h + 2g, D), as the product that made them."""
    B, T, h, D = q.shape
    g = k.size(2)
    gradients = q.new_empty(B, T, h + 2 * g, D)
    dq, dk, dv = gradients.split([h, g, g], dim=2)
    library()._flash_attn_bwd(q, k, v, out, grad, log_sum_exp, causal=is_causal, dq=dq, dk=dk, dv=dv)
    return gradients


@attention_backward.register_fake
def _(grad, q, k, v, out, log_sum_exp, is_causal):
    return q.new_empty(q.size(0), q.size(1), q.size(2) + 2 * k.size(2), q.size(3))


def setup_context(ctx, inputs, output):
    q, k, v, ctx.is_causal = inputs
    ctx.save_for_backward(q, k, v, *output)


def backward(ctx, grad, _):
    q, k, v, out, log_sum_exp = ctx.saved_tensors
    gradients = attention_backward(grad.contiguous(), q, k, v, out, log_sum_exp, ctx.is_causal)
    return *gradients.split([q.size(2), k.size(2), k.size(2)], dim=2), None


attention.register_autograd(backward, setup_context=setup_context)


class FlashAttention:
    operation = torch.ops.nanoshard.attention.default  # --recompute selective keeps its result

    def __call__(self, q, k, v, is_causal):
        out, _ = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal)
        return out.transpose(1, 2)


def is_taken(cfg, device):
    """Whether a run attends by it: on a GPU, in shapes that were tried, where no mask is needed."""
    if device.index is None or version_of("flash-attn-4") != VERSION or not is_hopper(device):
        return False
    if cfg.dtype != "bf16" or cfg.dropout > 0 or cfg.cp > 1 or cfg.deterministic or cfg.seq_len % 128:
        return False
    widths = (64,) if cfg.objective == "mlm" else (64, 128)
    has_full_layer = 0 < cfg.full_every <= cfg.n_layer or not 0 < cfg.window < cfg.seq_len
    return head_width(cfg) in widths and has_full_layer and cfg.doc_mask != "on"
