"""--compile: torch.compile of a model's blocks; with tp 1 and cp 1 each is one graph."""
import torch

import attention
import parallel


def compile_blocks(model):
    """Compile the blocks of a model, in place.

    In a block with experts, only attention and router are compiled, because the number of rows per expert
    varies.
    """
    # Python counts the bytes of collectives, so the collectives stay outside the compiled graphs.
    keep_eager(parallel, "_uncompiled")
    keep_eager(parallel.Axis, "_all_reduce")
    keep_eager(attention, "attend_segments")

    whole = model.mesh.tp.size * model.mesh.cp.size == 1  # collectives over tp and cp stand between graphs
    for block in model.blocks.values():
        if block.moe is None:
            block.compile(fullgraph=whole)
        else:
            block.attention_half = torch.compile(block.attention_half, fullgraph=whole)
            block.moe.route = torch.compile(block.moe.route, fullgraph=whole)
    if model.norm is not None:
        model.norm.compile(fullgraph=True)


def keep_eager(place, name):
    """Replace a function of a module or class by one that torch.compile leaves out of its graphs."""
    setattr(place, name, torch.compiler.disable(getattr(place, name)))
