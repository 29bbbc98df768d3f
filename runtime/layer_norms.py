"""--log-layers: the gradient's norm of each layer in the rows of metrics.jsonl, whatever the layout is."""
import math

import torch

from runtime.pieces import bucket_pieces


def layer_of(name):
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]  # "blocks.3", "wte"


class LayerNorms:
    """The norms of one step's gradients by layer, of the whole global batch, before clipping."""

    def __init__(self, cfg, data_parallel, opt):
        self.data_parallel = data_parallel
        self.opt = opt
        self.layers = ["wte", "wpe", *(f"blocks.{i}" for i in range(cfg.n_layer)), "norm", "head", "mlm"]
        self.squares = None  # (layers,) fp64: this rank's part, after measure()

    @torch.no_grad()
    def measure(self):
        """Compute this rank's part, without waiting for the device or for other ranks."""
        device = self.data_parallel.buckets[0].flat.device
        squares = torch.zeros(len(self.layers), dtype=torch.float64, device=device)
        for bucket in self.data_parallel.buckets:
            grad = bucket.grad_total
            pieces = bucket_pieces(bucket, grad, prefix="", owned_only=False)
            if not pieces:
                continue  # This rank's slice is padding.
            norms = torch._foreach_norm([piece.view for piece in pieces], 2,
                                        dtype=torch.promote_types(grad.dtype, torch.float32))
            # fp16's loss scale changes in the update, so it is taken out here.
            norms = self.opt.unscale(torch.stack(norms).double())
            numbers = [self.layers.index(layer_of(piece.name)) for piece in pieces]
            # a slice that k ranks hold counts 1/k on each
            squares.index_add_(0, torch.tensor(numbers, device=device), norms.square() * bucket.count_factor)
        self.squares = squares

    def report(self):
        """Return {"grad_norm/LAYER": its norm, if it is finite}; {} if no step was measured. Collective."""
        if self.squares is None:  # The step was skipped, on all ranks.
            return {}
        # SUM of a number per layer, over the world
        sums = self.data_parallel.mesh.world.all_reduce(self.squares)
        self.squares = None
        norms = zip(self.layers, sums.sqrt().tolist(), strict=True)
        return {f"grad_norm/{layer}": norm for layer, norm in norms if 0 < norm < math.inf}
