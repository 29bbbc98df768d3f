"""The same mathematics in other people's code: HF transformers' Mixtral block and Megatron-core's router.

    python bench/oracles.py

nanoshard requires neither package: a package that is not installed is skipped, with the reason. To install
them outside this environment: pip install --no-deps --target DIR transformers megatron-core (and what they
import), then set PYTHONPATH=DIR. Every figure is the largest difference between ours and theirs, relative to
the largest value; "map" and "kept" count entries that differ. Everything runs in fp32, in one CPU process.
"""
import importlib
import logging
import warnings
from dataclasses import dataclass

from common import read_flags, start
from runtime.launch import World

import torch

from config import Config, Outcome
from moe import MoE
from parallel import make_mesh

T, E, C, F = 96, 8, 32, 48  # tokens, experts, width, hidden width
FACTORS = (0.5, 0.75, 1.0, 1.25)  # of the capacity


@dataclass(frozen=True)
class Flags:
    """No flag but --help."""


def block(**flags):
    """Return our MoE layer on one rank with seeded weights, and its input (T, C)."""
    cfg = Config(n_experts=E, n_embd=C, ffn_hidden=F, **flags)
    layer = MoE(cfg, make_mesh(World(rank=0, size=1)))
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0.0, p.size(-1) ** -0.5, generator=rng)
    return layer, torch.randn(T, C, generator=rng)


def difference(a, b):
    """Return the largest difference, relative to the largest value of b."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).abs().max() / b.abs().max()).item()


def dense(p, ids):
    """Return the gates (n, E), zero for experts not chosen, and the map of the chosen. p, ids: (n, K)."""
    gates = torch.zeros(p.size(0), E).scatter(1, ids, p)
    return gates, torch.zeros(p.size(0), E, dtype=torch.bool).scatter(1, ids, True)


def mixtral():
    """Compare the whole block with copied weights, output and every gradient: {case: {tensor: difference}}.

    Mixtral renormalises the gates, as our softmax-topk router does.
    """
    module = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    config = importlib.import_module("transformers").MixtralConfig
    out = {}
    for K in (2, 4):
        ours, x = block(router="softmax-topk", top_k=K, aux_coef=1.0)
        theirs = module.MixtralSparseMoeBlock(config(
            hidden_size=C, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K, hidden_act="silu",
            experts_implementation="eager")).float()
        with torch.no_grad():
            theirs.gate.weight.copy_(ours.router.weight)
            theirs.experts.gate_up_proj.copy_(torch.cat([ours.w1, ours.w3], 1))
            theirs.experts.down_proj.copy_(ours.w2)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        gates, expert_ids, router_loss = ours.route(a)
        y = ours(a, gates, expert_ids)
        z = theirs(b.unsqueeze(0)).squeeze(0)
        seed = torch.randn(T, C, generator=torch.Generator().manual_seed(2))
        logits = x @ ours.router.weight.T
        balance = module.load_balancing_loss_func((logits,), E, K)  # without Megatron's 1/K: K times ours
        y.backward(seed)
        z.backward(seed)
        w13 = theirs.experts.gate_up_proj.grad.chunk(2, dim=1)
        out[f"Mixtral block k={K}"] = {
            "output": difference(y, z), "grad x": difference(a.grad, b.grad),
            "grad router": difference(ours.router.weight.grad, theirs.gate.weight.grad),
            "grad w1": difference(ours.w1.grad, w13[0]), "grad w3": difference(ours.w3.grad, w13[1]),
            "grad w2": difference(ours.w2.grad, theirs.experts.down_proj.grad),
            "aux (theirs/K)": difference(router_loss, balance / K)}
    return out


def megatron():
    """Compare the router on the same logits: {case: {quantity: difference}}.

    The quantities are the gates, their map, both losses, the gradient, and the dropped copies.
    """
    their = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    out = {}
    for router, K, steers in (("softmax", 1, 0.0), ("softmax", 2, 0.0), ("softmax-topk", 2, 0.0),
                              ("sigmoid", 2, 0.0), ("sigmoid", 4, 0.01)):
        score = router.partition("-")[0]
        ours, x = block(router=router, top_k=K, aux_coef=1.0, router_bias_rate=steers)
        if steers:
            ours.router.bias.copy_(torch.linspace(-0.2, 0.2, E))
        weight = ours.router.weight
        logits = x @ weight.T
        p, ids, router_loss = ours.route(x)
        gates, chosen = dense(p, ids)
        their_gates, their_map = their.topk_routing_with_score_function(
            logits, K, use_pre_softmax=router == "softmax", score_function=score,
            expert_bias=ours.router.bias)
        visits, scores = their.compute_routing_scores_for_aux_loss(logits, K, score)
        balance = their.switch_load_balancing_loss_func(scores, visits.sum(0), T, K, E, 1.0)
        losses = router_loss, balance
        (ga,), (gb,) = (torch.autograd.grad(loss, weight, retain_graph=True) for loss in losses)
        z = their.z_loss_func(logits, 1.0)
        zs, _ = block(router=router, top_k=K, aux_coef=0.0, z_coef=1.0)
        row = {"gates": difference(gates, their_gates), "map": (chosen != their_map).sum().item(),
               "aux": difference(router_loss, balance), "grad aux": difference(ga, gb),
               "z": difference(zs.route(x)[2], z)}
        for factor in FACTORS:
            _, kept = their.apply_router_token_dropping(their_gates, their_map, K, factor, "probs")
            cut, _ = block(router=router, top_k=K, capacity_factor=factor)
            cut.route(x)
            slots = E * cut.capacity(T)  # a copy whose slot is `slots` is dropped
            slot = cut.plan(p, ids).slot.view(T, K)
            mine = torch.zeros(T, E, dtype=torch.bool).scatter(1, ids, slot < slots)
            row[f"kept at {factor}"] = (mine != kept).sum().item()
        bias = " bias" if steers else ""
        out[f"Megatron {router} k={K}{bias}"] = row
    return out


def main(argv=None):
    read_flags(Flags, argv, "oracles.py", __doc__)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    worst = 0.0
    for package, oracle in (("transformers", mixtral), ("megatron.core", megatron)):
        try:
            version = importlib.import_module(package).__version__
            rows = oracle()
        except ImportError as e:
            print(f"{package}: skipped, {e}")
            continue
        print(f"{package} {version}, torch {torch.__version__}")
        for name, row in rows.items():
            print(f"  {name:28s} " + "  ".join(f"{k} {v:.2g}" for k, v in row.items()))
            worst = max(worst, *row.values())
    return Outcome.DONE if worst < 1e-5 else Outcome.FAILED


if __name__ == "__main__":
    start(main)
