"""--log-layers: the gradient's norm of each layer in the rows of metrics.jsonl, whatever the layout is."""
import math

import torch

from runtime.pieces import bucket_pieces


def layer_of(name):
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]  # "blocks.3", "wte"


class LayerNorms:
    """The norms of one step's gradients by layer, of the whole global batch, before clipping."""

    def __init__(self, cfg):
        self.layers = ["wte", "wpe", *(f"blocks.{i}" for i in range(cfg.n_layer)), "norm", "head", "mlm"]
        self.squares = None  # (layers,) fp64: this rank's part, after measure()

    @torch.no_grad()
    def measure(self, data_parallel, opt):
        """Compute this rank's part, without waiting for the device or for other ranks."""
        device = data_parallel.buckets[0].flat.device
        self.squares = torch.zeros(len(self.layers), dtype=torch.float64, device=device)
        for bucket in data_parallel.buckets:
            grad = bucket.grad_total
            dtype = torch.promote_types(grad.dtype, torch.float32)
            for piece in bucket_pieces(bucket, grad, prefix="", owned_only=False):
                norm = torch.linalg.vector_norm(piece.view, dtype=dtype)
                # fp16's loss scale changes in the update, so it is taken out here.
                square = opt.unscale(norm.double()).square()
                # a slice that k ranks hold counts 1/k on each
                self.squares[self.layers.index(layer_of(piece.name))] += square * bucket.count_factor

    def report(self, world):
        """Return {"grad_norm/LAYER": its norm, if it is finite}; {} if no step was measured. Collective over
        `world`, an Axis."""
        if self.squares is None:  # The step was skipped, on all ranks.
            return {}
        sums = world.all_reduce(self.squares)  # SUM of a number per layer, over the world
        self.squares = None
        norms = zip(self.layers, sums.sqrt().tolist(), strict=True)
        return {f"grad_norm/{layer}": norm for layer, norm in norms if 0 < norm < math.inf}
