"""--log-layers: the gradient's norm of each layer in the rows of metrics.jsonl, whatever the layout is."""
import math

import torch

from runtime.pieces import bucket_pieces

PREFIX = "grad_norm/"  # of the keys in a row: grad_norm/blocks.0


def layers_of(cfg):
    """Return the names of what is told apart: the blocks, and what stands before and behind them."""
    names = ["wte"]
    if cfg.pos == "learned":
        names.append("wpe")
    names += [f"blocks.{i}" for i in range(cfg.n_layer)]
    names.append("norm")
    if not cfg.tied:
        names.append("head")
    if cfg.objective == "mlm":
        names.append("mlm")
    return names


def layer_of(name):
    """Return the layer of a parameter: "blocks.3", "wte"."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def dtype_of_norms(grad):
    """Return the dtype of a norm: at least fp32, and fp64 on a CPU, whose fp32 norm is a plain sum."""
    wide = torch.float64 if grad.device.type == "cpu" else torch.float32
    return torch.promote_types(grad.dtype, wide)


class LayerNorms:
    """The norms of one step's gradients by layer, of the whole global batch, before clipping.

    measure() waits neither for the device nor for other ranks; report() sums over them.
    """

    def __init__(self, cfg, data_parallel, opt):
        self.data_parallel = data_parallel
        self.opt = opt
        self.layers = layers_of(cfg)
        self.squares = None  # (layers,) fp64: this rank's part, after measure()

    @torch.no_grad()
    def measure(self):
        """Compute this rank's part of the squared norms from its slices of the gradients."""
        device = self.data_parallel.buckets[0].flat.device
        number_of = {name: i for i, name in enumerate(self.layers)}
        squares = torch.zeros(len(self.layers), dtype=torch.float64, device=device)
        for bucket in self.data_parallel.buckets:
            grad = bucket.grad_total
            pieces = bucket_pieces(bucket, grad, prefix="", owned_only=False)
            if not pieces:
                continue  # This rank's slice is padding.
            norms = torch._foreach_norm([piece.view for piece in pieces], 2, dtype=dtype_of_norms(grad))
            # fp16's loss scale changes in the update, so it is taken out here.
            norms = self.opt.unscale(torch.stack(norms).double())
            numbers = torch.tensor([number_of[layer_of(piece.name)] for piece in pieces], device=device)
            # A slice that k ranks hold counts 1/k on each.
            squares.index_add_(0, numbers, norms.square() * bucket.count_factor)
        self.squares = squares

    def report(self):
        """Return {"grad_norm/LAYER": its norm, if it is finite}; {} if no step was measured. Collective."""
        if self.squares is None:  # The step was skipped, on all ranks.
            return {}
        # SUM of a number per layer, over the world
        sums = self.data_parallel.mesh.world.all_reduce(self.squares)
        self.squares = None
        norms = zip(self.layers, sums.sqrt().tolist(), strict=True)
        return {PREFIX + layer: norm for layer, norm in norms if math.isfinite(norm)}
