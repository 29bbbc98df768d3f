"""Training with AdamW or Muon, written out for one process: the papers' formulas, one matrix after another.
With --lora, AdamW trains the adapters alone.

It shares no line with muon.py, optim.py and model.py: plain_model.py computes the loss. Only the first
weights, the tokens and the learning rate are train.py's.
"""
import math

import torch
from plain_model import total_loss
from shared import one_process_model
from test_layouts import STEPS

from config import Config
from corpus.samples import Synthetic
from optim import learning_rate


def orthogonalised(matrix):
    """Newton-Schulz as in torch.optim.Muon, in the dtype of the matrix."""
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


def muon(weight, grad, momentum, lr, beta, decay, dtype=None):
    """Return the new (weight, momentum) of one matrix. dtype: of the iteration, by default the gradient's."""
    momentum = beta * momentum + (1 - beta) * grad
    ahead = beta * momentum + (1 - beta) * grad
    update = orthogonalised(ahead.to(dtype or grad.dtype)).to(weight.dtype)
    rows, columns = weight.shape
    weight = weight - lr * decay * weight
    return weight - lr * 0.2 * math.sqrt(max(rows, columns)) * update, momentum


def adamw(weight, grad, mean, mean_square, t, lr, cfg):
    """Return the new (weight, mean, mean square) of update number t, arXiv:1711.05101."""
    mean = cfg.beta1 * mean + (1 - cfg.beta1) * grad
    mean_square = cfg.beta2 * mean_square + (1 - cfg.beta2) * grad * grad
    decay = cfg.weight_decay if weight.ndim > 1 else 0.0
    unbiased = mean / (1 - cfg.beta1 ** t)
    root = (mean_square / (1 - cfg.beta2 ** t)).sqrt()
    return weight - lr * decay * weight - lr * unbiased / (root + 1e-8), mean, mean_square


def is_muons(cfg, name):
    """Whether Muon updates the weight of this name: the matrices inside blocks."""
    is_matrix = name.startswith("blocks.") and "norm" not in name and not name.endswith("bias")
    return cfg.optimizer == "muon" and is_matrix


def update(cfg, weights, moments, grads, t):
    """Update all weights and moments in place. moments: {name: list}."""
    lr = learning_rate(cfg, t)
    for name, grad in grads.items():
        if not is_muons(cfg, name):
            weights[name], *moments[name] = adamw(weights[name], grad, *moments[name], t, lr, cfg)
            continue
        of_muon = (lr * cfg.muon_lr_factor, cfg.momentum, cfg.weight_decay)
        old = [weights[name], grad, moments[name][0]]
        if grad.ndim == 2:
            weights[name], moments[name][0] = muon(*old, *of_muon)
            continue
        experts = [muon(*one, *of_muon) for one in zip(*old, strict=True)]
        weights[name], moments[name][0] = map(torch.stack, zip(*experts, strict=True))


def with_adapters(cfg, weights):
    merged = {}
    for name, weight in weights.items():
        a, b = (weights.get(name.removesuffix("weight") + factor) for factor in ("lora.A", "lora.B"))
        if a is not None:
            weight = weight + cfg.lora_alpha / cfg.lora * b @ a
        merged[name] = weight
    return merged


def reference(flags, batch, tokens=Synthetic):
    """Train STEPS steps -> (stats of each step, {name: full array}, None), in fp64."""
    cfg = Config(**flags)
    model = one_process_model(cfg)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = {name: weight for name, weight in start.items() if not cfg.lora or ".lora." in name}
    moments = {name: [torch.zeros_like(w) for _ in range(1 if is_muons(cfg, name) else 2)]
               for name, w in weights.items()}
    source = tokens(cfg.vocab_size, cfg.seq_len, cfg.seed)
    stats, want = [], {}
    for t in range(1, STEPS + 1):
        for weight in weights.values():
            weight.requires_grad_()
        first = (t - 1) * batch
        batches = [source.batch(i, cfg.micro_batch) for i in range(first, first + batch, cfg.micro_batch)]
        loss, minimized = total_loss(cfg, with_adapters(cfg, {**start, **weights}), cfg.vocab_size, batches)
        found = torch.autograd.grad(minimized, list(weights.values()))
        grads = dict(zip(weights, found, strict=True))
        want.update({f"step {t} grad {name}": grad.numpy() for name, grad in grads.items()})
        norm = torch.cat([grad.flatten() for grad in found]).norm()
        weights = {name: weight.detach() for name, weight in weights.items()}
        size = torch.cat([weight.flatten() for weight in weights.values()]).norm()
        zeros = sum((grad == 0).sum().item() for grad in found)
        stats.append([loss.item(), norm.item(), zeros, size.item()])
        clipped = {name: grad * min(1.0, cfg.clip / (norm + 1e-6)) for name, grad in grads.items()}
        update(cfg, weights, moments, clipped, t)
    for name, weight in weights.items():
        want["end " + name] = weight.numpy()
        names = ["momentum"] if is_muons(cfg, name) else ["exp_avg", "exp_avg_sq"]
        want.update({f"end {key}/{name}": moment.numpy()
                     for key, moment in zip(names, moments[name], strict=True)})
    return stats, want, None
