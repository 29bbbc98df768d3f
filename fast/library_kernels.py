"""Compiles kernels of flash-attn-4 and quack-kernels for a Hopper GPU before a run launches them.

    python -m fast.library_kernels FLAGS     FLAGS: those of early.FLAGS_OF_KERNELS with their values, as JSON

fast/ahead.py starts it as a process that sees no GPU. It calls the libraries as the run will, with tensors
that have shapes and no memory (torch's FakeTensorMode). flash-attn-4 then compiles and launches nothing.
quack-kernels compiles, and then finds no GPU. Both keep the kernels on the disk, where the run finds them:
launcher.keep_library_kernels. A kernel that no run launches costs nothing but the time of an idle core.
"""
import contextlib
import json
import os
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from config import Config, head_width
from fast import experts, flash
from fast.ahead import fork


def compile_all(cfg):
    """Compile the kernels of a run's Config, each call of a library in a process of its own."""
    calls = []
    for library, calls_of in ((flash.FLASH_ATTN, attention_calls), (experts.QUACK, product_calls)):
        if library.version() == library.tested and library.is_wanted(cfg) and not library.problem:
            calls += calls_of(cfg)
    compile_call(len, [(1,)])  # The first such tensor imports much, here once for all processes.
    children = [fork(compile_call, *call) for call in calls]
    for pid in children:
        os.waitpid(pid, 0)


def compile_call(function, shapes, *args):
    """Call function(tensors, *args), with bf16 tensors of these shapes on a GPU that is not there.

    An error is expected: quack-kernels compiles first, and then cannot launch. What was not compiled, the run
    compiles itself, and shows why that fails.
    """
    with FakeTensorMode(), contextlib.suppress(Exception):
        function([torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes], *args)


def attention_calls(cfg):
    """Return the calls of forward and of backward that one rank makes, as arguments of compile_call."""
    B = cfg.micro_batch
    T = cfg.seq_len
    D = head_width(cfg)
    h = cfg.n_head // cfg.tp
    g = max(cfg.n_kv_head // cfg.tp, 1)
    shapes = [(B, T, h, D), (B, T, g, D), (B, T, g, D)]
    is_causal = cfg.objective == "causal"
    return [(attend, shapes, is_causal), (attend_backward, shapes, is_causal)]


def attend(tensors, is_causal):
    flash.forward_kernel(*tensors, is_causal)


def attend_backward(tensors, is_causal):
    q, k, v = tensors
    B, T, h, _ = q.shape
    log_sum_exp = q.new_empty(B, h, T, dtype=torch.float32)
    flash.backward_kernels(q, (q, k, v, q, log_sum_exp), is_causal)


def product_calls(cfg):
    """Return the calls of ops/routed_experts.py and ops/grouped_mm.py that one rank makes."""
    C = cfg.n_embd
    F = cfg.ffn_hidden
    e = cfg.n_experts // cfg.ep
    R = experts.balanced_rows(cfg)
    rows = (R, C)
    hidden = (R, F)
    up = (e, F, C)
    down = (e, C, F)
    # Forward takes the matrices turned, and backward as they are.
    products = [(rows, up, True), (hidden, down, True), (rows, down, False)]
    calls = [(multiply, (x, w), is_turned) for x, w, is_turned in products]
    return calls + [(multiply_gradients, pair, e) for pair in ((rows, hidden), (hidden, rows))]


def multiply(tensors, is_turned):
    x, w = tensors
    ends = w.new_empty(w.size(0), dtype=torch.int32)
    products = experts.QuackProducts(ends, balanced=x.size(0))
    products.experts_mm(x, w.transpose(1, 2) if is_turned else w, ends)


def multiply_gradients(tensors, e):
    grad, x = tensors
    ends = x.new_empty(e, dtype=torch.int32)
    experts.QuackProducts(ends, balanced=x.size(0)).experts_wgrad(grad, x, ends)


if __name__ == "__main__":
    compile_all(Config(**json.loads(sys.argv[1])))
