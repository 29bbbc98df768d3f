"""--compile: torch.compile of a model's blocks; with tp 1 each is one graph."""
import torch

from parallel import disable_compile_for_collectives


def compile_blocks(model):
    """Compile in place. Of a block with experts only attention and router: the experts' row counts vary."""
    whole = model.mesh.tp.size == 1  # collectives over tp stand between graphs
    disable_compile_for_collectives()
    for block in model.blocks.values():
        if block.moe is None:
            block.compile(fullgraph=whole)
        else:
            block.attention_half = torch.compile(block.attention_half, fullgraph=whole)
            block.moe.route = torch.compile(block.moe.route, fullgraph=whole)
    if model.norm is not None:
        model.norm.compile(fullgraph=True)
