"""--compile: torch.compile of a model's blocks; with tp 1 and cp 1 a dense one is one graph."""

import functools

import torch

import attention
import moe
import muon
import parallel
from ops import cross_entropy, products


def compile_blocks(model):
    """Compile the blocks of a model, in place.

    The first block that runs is compiled, and the others use its graph, because a block's weights are inputs
    of the graph. The experts are not compiled, because the number of rows per expert varies.
    """
    prepare_compiler()
    multiply_by_library(products.quack is not None)
    # Python counts the bytes of collectives, so the collectives stay outside the compiled graphs.
    keep_eager(parallel, "_uncompiled")
    keep_eager(parallel.Axis, "start_all_reduce")
    keep_eager(attention, "attend_segments")
    keep_eager(moe.MoE, "forward")  # the experts

    for block in model.blocks.values():
        if block.attn.flex is not None:
            block.attn.flex.prepare()  # Its import cannot be part of a graph.
    whole = model.mesh.tp.size * model.mesh.cp.size == 1  # collectives over tp and cp stand between graphs
    for block in model.blocks.values():
        compile_block(block, whole)
    if model.norm is not None:
        model.norm.compile(fullgraph=True)
    compile_function(cross_entropy, "scale_rows")
    compile_function(muon, "add_gradient")
    compile_function(muon, "update_masters")


def compile_block(block, whole):
    """Compile a block. whole: it can be one graph, or before and after its experts one each.

    If the block is not whole, torch compiles nothing of what --recompute full runs again in backward, unless
    the function is compiled by itself. So each function is, and what only calls them is not.
    """
    if whole:
        block.compile(fullgraph=block.moe is None)
        if block.moe is not None and block.moe.shared is not None:
            block.moe.shared.compile()
        return
    if block.cfg.recompute != "selective":  # It looks for single operations.
        compile_method(block, "compute" if block.moe is None else "attention_half")
    if block.moe is not None:
        compile_method(block.moe, "route")
        if block.moe.shared is not None:
            block.moe.shared.compile()


def compile_method(module, name):
    setattr(module, name, torch.compile(getattr(module, name)))


def compile_function(module, name):
    setattr(module, name, torch.compile(getattr(module, name), dynamic=True))


def prepare_compiler():
    """Start the compiler's processes, and let its cache keep graphs with functions such as SwiGLU's."""
    from torch._functorch import config
    from torch._inductor import async_compile
    if hasattr(async_compile, "maybe_warm_pool"):
        async_compile.maybe_warm_pool()  # Otherwise they start when the model has been traced.
    # An autograd.Function may keep what the cache does not see. Those inside our graphs keep tensors, and
    # constants that the traced graph has too.
    if hasattr(config, "autograd_cache_allow_custom_autograd_functions"):
        config.autograd_cache_allow_custom_autograd_functions = True


def keep_eager(place, name):
    setattr(place, name, torch.compiler.disable(getattr(place, name)))


def multiply_by_library(on):
    """Let what torch.compile compiles from here on multiply by ops/products.py, or by torch."""
    from torch._dynamo import reset
    from torch._inductor import config
    now = library_pass() if on else None
    if config.post_grad_custom_post_pass is not now:
        config.post_grad_custom_post_pass = now
        reset()  # What was compiled otherwise is compiled again.


@functools.cache
def library_pass():
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class LibraryPass(CustomGraphPass):
        def __call__(self, graph):
            for node in graph.nodes:
                if node.target is torch.ops.aten.mm.default and is_served(*node.args, products.TILES):
                    node.target = torch.ops.nanoshard.product.default
                elif node.target is torch.ops.aten.addmm.default and is_served_sum(*node.args, **node.kwargs):
                    node.target = torch.ops.nanoshard.add_product.default

        def uuid(self):
            return get_hash_for_files((__file__, products.__file__))

    return LibraryPass()


def is_served(a, b, tiles):
    """Whether the library multiplies two factors, nodes of the compiler's graph, faster."""
    a, b = a.meta["val"], b.meta["val"]
    return a.dtype == torch.bfloat16 and products.is_faster(*a.shape, b.size(1), tiles)


def is_served_sum(c, a, b, **alpha_or_beta):
    shape = a.meta["val"].size(0), b.meta["val"].size(1)
    is_whole = c.meta["val"].shape == shape  # and no bias
    return is_whole and not alpha_or_beta and is_served(a, b, products.TILES_OF_SUM)
