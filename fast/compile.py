"""--compile: torch.compile of a model's blocks; with tp 1 and cp 1 each is one graph."""
import torch

import model as model_
import parallel


def compile_blocks(model):
    """Compile in place. Of a block with experts only attention and router: the experts' row counts vary."""
    whole = model.mesh.tp.size * model.mesh.cp.size == 1  # collectives over tp and cp stand between graphs
    for place, name in ((parallel, "_uncompiled"), (parallel.Axis, "_all_reduce"), (model_, "attend_chunks")):
        setattr(place, name, torch.compiler.disable(getattr(place, name)))  # python counts their bytes
    for block in model.blocks.values():
        if block.moe is None:
            block.compile(fullgraph=whole)
        else:
            block.attention_half = torch.compile(block.attention_half, fullgraph=whole)
            block.moe.route = torch.compile(block.moe.route, fullgraph=whole)
    if model.norm is not None:
        model.norm.compile(fullgraph=True)
