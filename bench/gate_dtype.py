"""Gates in the model's dtype or in fp32: their gradients against fp64's, and the loss of short runs on a CPU.

    python bench/gate_dtype.py tiny-moe --data DIR --dtype bf16 --micro-batch 2 --global-batch 2 --steps 200

MoE.route rounds the gates to the model's dtype. Three ways to go on from there are compared:
    now      as on a CPU: the weighted sum of the experts' results is in the model's dtype, too
    kernel   rounded gates, and sums in fp32, as in the Triton kernels: so on a GPU
    fp32     sums in fp32, and gates that are not rounded
Every way gets the weights, the sequences and the choice of experts of the fp64 run. The weights are those
of the start and those after half of the steps. Then --seed, and the two seeds after it, train with `now`
and with `fp32`.
"""
import contextlib
import dataclasses
import sys
from unittest import mock

import common  # noqa: F401  the repository's modules are found from here on
from runtime.launch import World

import torch

import moe
import train
from config import Config
from corpus.batches import micro_batches, open_data, trained_tokens
from interface.command_line import parse
from ops import permute as rows
from parallel import make_mesh

route = moe.MoE.route
LAST = 20  # steps whose training losses are averaged


# -----------------------------------------------------------------------------
# The three ways

def sum_in_fp32(y, inv_perm, K, padded, gates=None):
    """ops.permute.unpermute with the arithmetic of the Triton kernel."""
    copies = rows.rows_or_zeros(y, inv_perm, padded).unflatten(0, (-1, K)).float()
    if gates is not None:
        copies = copies * gates.float().unsqueeze(2)
    return copies.sum(1).to(y.dtype)


def gradients_in_fp32(y, gates, perm, padded, grad):
    """ops.permute.unpermute_backward with the arithmetic of the Triton kernel."""
    grads = rows.permute(grad, perm, gates.size(1), padded).float()
    of_slot = (y.float() * grads).sum(1)
    grad_gates = grads.new_zeros(gates.numel() + 1).scatter_(0, perm, of_slot)[:-1].view_as(gates)
    gate = rows.rows_or_zeros(gates.flatten(), perm, padded).float()
    return (grads * gate.unsqueeze(1)).to(y.dtype), grad_gates.to(gates.dtype)


@contextlib.contextmanager
def way(name):
    """Compute the experts' layer in one of the three ways."""
    with contextlib.ExitStack() as stack:
        if name != "now":
            stack.enter_context(mock.patch.multiple(
                rows, unpermute=sum_in_fp32, unpermute_backward=gradients_in_fp32))
        if name == "fp32":  # The scores are in fp32 in any case.
            stack.enter_context(mock.patch.object(
                moe.MoE, "route", lambda layer, x: route(layer, x.float())))
        yield


# -----------------------------------------------------------------------------
# Gradients

def gradients(cfg, vocab, weights, batches, choices, is_first):
    """Return {name: gradient} and the gradients of all gates, in fp64.

    choices: the experts' numbers in the order of the layers; the first run fills the list.
    """
    model, data_parallel, step = build(cfg, vocab)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    top_k = moe.stable_top_k
    experts = moe.MoE.experts
    left = list(choices)
    of_gates = {}  # {number of the layer: gradient}

    def choose(scores, K):
        if is_first:
            choices.append(top_k(scores, K))
            return choices[-1]
        return left.pop(0)

    def watched(layer, x, gates, plan):
        number = len(of_gates)
        of_gates[number] = None
        gates.register_hook(lambda grad: of_gates.update({number: grad.double().flatten()}))
        return experts(layer, x, gates, plan)

    with mock.patch.object(moe, "stable_top_k", choose), mock.patch.object(moe.MoE, "experts", watched):
        step.gradients(batches, 1)
    found = {name: window.double().flatten() for bucket in data_parallel.buckets
             for name, window in zip(bucket.names, bucket.grad_windows, strict=True)}
    return found, torch.cat(list(of_gates.values()))


def compare(cfg, vocab, weights, batches):
    """Print how far each way is from fp64: the norm of the difference as a share of the norm."""
    choices = []
    exact = dataclasses.replace(cfg, dtype="fp64")
    want, want_gates = gradients(exact, vocab, weights, batches, choices, is_first=True)
    routers = [name for name in want if "router" in name]
    for name in ("now", "kernel", "fp32"):
        with way(name):
            got, gates = gradients(cfg, vocab, weights, batches, choices, is_first=False)
        of_routers = off(*joined(routers, got, want))
        of_all = off(*joined(want, got, want))
        print(f"  {name:6}  gates {off(gates, want_gates):.2%}  routers {of_routers:.2%}"
              f"  all weights {of_all:.2%}", flush=True)


def joined(names, *dicts):
    return [torch.cat([values[name] for name in names]) for values in dicts]


def off(got, want):
    return ((got - want).norm() / want.norm()).item()


# -----------------------------------------------------------------------------
# Runs

def build(cfg, vocab):
    mesh = make_mesh(World())
    model, data_parallel, opt = train.build(cfg, mesh, vocab, torch.device("cpu"))
    return model, data_parallel, train.Step(cfg, model, data_parallel, opt)


def trained(cfg, vocab, source, val, steps):
    """Return the mean training loss of the last steps, the validation loss and the weights."""
    model, _, step = build(cfg, vocab)
    losses = []
    for number in range(1, steps + 1):
        first = (number - 1) * cfg.global_batch
        batches = micro_batches(cfg, model.mesh, source, first, cfg.global_batch, torch.device("cpu"))
        n_trained = trained_tokens(source, first, cfg.global_batch, torch.device("cpu"))
        stats, _ = step(batches, number, n_trained=n_trained)
        losses.append(stats[0].item())
    val_loss = train.evaluate(cfg, model, val, cfg.global_batch, torch.device("cpu"))
    model.provide_weights(model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return sum(losses[-LAST:]) / len(losses[-LAST:]), val_loss, weights


def main(argv=None):
    torch.set_num_threads(1)
    first = parse(sys.argv[1:] if argv is None else argv, Config, "gate_dtype.py", __doc__)
    for seed in range(first.seed, first.seed + 3):
        cfg = dataclasses.replace(first, seed=seed)
        source, val, vocab, _ = open_data(cfg, 0)
        unseen = cfg.steps * cfg.global_batch
        mesh = make_mesh(World())
        batches = micro_batches(cfg, mesh, source, unseen, cfg.global_batch, torch.device("cpu"))
        for steps in (0, cfg.steps // 2):
            weights = start_of(cfg, vocab) if steps == 0 else trained(cfg, vocab, source, val, steps)[2]
            print(f"seed {seed}, gradients after {steps} steps, off fp64:")
            compare(cfg, vocab, weights, batches)
        for name in ("now", "fp32"):
            with way(name):
                loss, val_loss, _ = trained(cfg, vocab, source, val, cfg.steps)
            print(f"  {name:6}  loss {loss:.4f}  validation {val_loss:.4f}", flush=True)


def start_of(cfg, vocab):
    model, _, _ = build(cfg, vocab)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


if __name__ == "__main__":
    main()
