"""Planted faults in the experts: each replaces one line, as in test_faults.py, and a test must fail.

The faults are those that larger projects shipped. These tests detect them:
    layouts     every layout against one process              sums, splits, pieces
    loop        a block against the loop over tokens          faults that a layout and its reference share
    balance     the balance loss's gradient alone             its weight, its counts
    recompute   the number of routings, the counted tokens
    checkpoint  saved in one layout, loaded in another
"""
import contextlib
import functools
import zlib
from unittest import mock

import pytest
import test_moe
import test_moe_run
import torch
from faults import group, not_over, planted, router_loss_weight, run_with_faults, with_faults
from pool import run_ranks
from test_layouts import CAPACITY, MOE, SIGMOID, run

from pipeline import is_last_stage

BATCH = 8
MOE, CAPACITY, SIGMOID = (dict(base, n_layer=2, micro_batch=2) for base in (MOE, CAPACITY, SIGMOID))
EP, EDP, TP, EP_TP = (2, dict(ep=2)), (4, dict(ep=2)), (2, dict(tp=2)), (4, dict(tp=2, ep=2))  # ranks, layout
PP = (4, dict(pp=2, ep=2, zero=1))


# -----------------------------------------------------------------------------
# Functions that are called in the place of others

def scaled_experts(original, bucket, power):
    """Bucket.wait_grads that multiplies the experts' gradients by a power of their 2 ranks."""
    original(bucket)
    if bucket.axis.name == "edp":
        bucket.grad.mul_(2.0 ** power)


def half_for_experts(original, bucket):
    """Bucket.count_factor that counts experts as if two ranks held them."""
    return original(bucket) / (2 if bucket.axis.name == "edp" else 1)


def without_experts(original, optimizer, slices):
    """Optimizer.sum_of_squares that skips the experts."""
    pairs = zip(slices, optimizer.data_parallel.buckets, strict=True)
    kept = [piece * (bucket.axis.name != "edp") for piece, bucket in pairs]
    return original(optimizer, kept)


def router_loss_of_last_stage(original, model, *args, chunk=0, **options):
    """GPT.forward whose router loss has a gradient on the last stage only."""
    out, router_loss = original(model, *args, chunk=chunk, **options)
    return out, router_loss if is_last_stage(model, chunk) else router_loss.detach()


def capacity_of_two_ranks(original, cfg, n):
    """expert_capacity of twice the rows."""
    return original(cfg, 2 * n)


def plan_by_sender(original, dispatcher, *args):
    """AllToAll.plan that leaves the received rows by sender."""
    plan = original(dispatcher, *args)
    rows = torch.arange(plan.by_expert.numel())
    return plan._replace(by_expert=rows, by_sender=rows)


def grad_not_sent(original, ctx, grad):
    """_AllToAll.backward that sends nothing back."""
    return grad, None, None, None


def swapped_sizes(original, ctx, grad):
    """_AllToAll.backward with the sizes of forward."""
    ctx.send, ctx.receive = ctx.receive, ctx.send
    return original(ctx, grad)


def chosen_rank_of_world(original, name, axis):
    """chosen_rank that chooses one of four ranks of the world; -1 on the others."""
    return axis.rank if zlib.crc32(name.encode()) % 4 == torch.distributed.get_rank() else -1


def pieces_without_offset(original, bucket, *args):
    """bucket_pieces as if every rank's share of a parameter began at 0."""
    with contextlib.ExitStack() as stack:
        for p in bucket.params:
            stack.enter_context(mock.patch.object(p, "offset", (0,) * p.ndim))
        return original(bucket, *args)


def detached_gates(original, layer, x):
    """MoE.route whose gates have no gradient."""
    gates, expert_ids, router_loss = original(layer, x)
    return gates.detach(), expert_ids, router_loss


def zero_gradient_of_gates(original, *args):
    """unpermute_backward that loses the gates' gradient."""
    grad_y, grad_gates = original(*args)
    return grad_y, torch.zeros_like(grad_gates)


def last_of_equals(original, scores, K):
    """stable_top_k that prefers the highest column."""
    return scores.size(1) - 1 - original(scores.flip(1), K)


def smallest_gates(original, dispatcher, expert_ids, gates):
    """Capacity.assign that keeps the smallest gates."""
    return original(dispatcher, expert_ids, -gates)


def unused_router_loss(original, layer, x, call):
    """MoE.before_experts whose router loss has no gradient."""
    routing = original(layer, x, call)
    return routing._replace(router_loss=routing.router_loss.detach())


def detached_router_loss(original, model, *args, **kwargs):
    """GPT.forward whose router loss has no gradient."""
    out, router_loss = original(model, *args, **kwargs)
    return out, router_loss.detach()


def pieces_without_buffers(original, data_parallel, *args, **kwargs):
    """ops.flat.own_pieces without the routers' biases."""
    with mock.patch.object(data_parallel, "buffers", {}):
        return original(data_parallel, *args, **kwargs)


def pieces_of_first_experts(original, *args, owned_only=True):
    """ops.flat.own_pieces that reads the first rank's w1 on every rank."""
    pieces = original(*args, owned_only=owned_only)
    for i, piece in enumerate(pieces):
        if ".w1" in piece.name and not owned_only:
            pieces[i] = piece._replace(offset=(0, *piece.offset[1:]))
    return pieces


# -----------------------------------------------------------------------------
# Layouts

LAYOUT_FAULTS = {  # name: (model, (ranks, layout), a fault as arguments of planted)
    # Sums of the experts' gradients
    "expert gradients ep times too large": (
        MOE, EP, "ddp.Bucket.wait_grads", functools.partial(scaled_experts, power=1)),
    "expert gradients averaged over edp": (
        MOE, EDP, "ddp.Bucket.wait_grads", functools.partial(scaled_experts, power=-1)),
    "expert gradients summed over dp": (
        MOE, EP, *group("edp", "dp")),
    "expert gradients not summed over edp": (
        MOE, EDP, *group("edp", "pp")),
    # the gradient norm
    "the gradient norm skips experts": (
        MOE, EP, "optim.Optimizer.sum_of_squares", without_experts),
    "the gradient norm counts experts as replicated": (
        MOE, EP, "ddp.Bucket.count_factor", half_for_experts),
    # Sums over tp and over micro-batches
    "router and norms not summed over tp": (
        MOE, TP, *group("stage", "dp")),
    "balance loss not divided by dp": (
        MOE, EP, *router_loss_weight(2)),  # of 2 ranks
    "balance loss lost on all stages except the last": (
        MOE, PP, "model.GPT.forward", router_loss_of_last_stage),
    "balance loss counts only this tp rank's tokens": (
        MOE, TP, "moe.MoE.router_loss", "tp.all_reduce(chosen", "(chosen"),
    "balance and z-loss averaged over this tp rank's tokens": (
        MOE, TP, "moe.MoE.router_loss", "rows = n * tp.size", "rows = n"),
    "router bias updated with this rank's loads only": (
        SIGMOID, EP, "parallel.Axis.all_reduce", functools.partial(not_over, name="stage")),
    # The capacity depends on this rank's rows only
    "capacity computed from all tp ranks' rows": (
        CAPACITY, TP, "moe.expert_capacity", capacity_of_two_ranks),
    # Wrong experts or wrong rows
    "all ranks start with the same experts": (
        MOE, EP, "model.initial_weights", "p.offset[0] + ", ""),
    "rows stay sorted by sender, dropless": (
        MOE, EP, "moe.AllToAll.plan", plan_by_sender),
    "rows stay sorted by sender, capacity": (
        CAPACITY, EP, "moe.Capacity.dispatch", "x.transpose(0, 1).flatten(1, 2)",
        "x.flatten(0, 2).unflatten(0, (self.e, -1))"),
    "rows come back sorted by expert, capacity": (
        CAPACITY, EP, "moe.Capacity.combine", ".transpose(0, 1)", ""),
    "gradients of the rows not sent back": (
        CAPACITY, EP, "parallel._AllToAll.backward", grad_not_sent),
    # The pieces that a rank owns
    "only one rank's experts are saved": (
        MOE, EP_TP, "ops.flat.chosen_rank", chosen_rank_of_world),
    "experts are saved without their offset": (
        MOE, EP, "ops.flat.bucket_pieces", pieces_without_offset),
}


@pytest.mark.parametrize("name", LAYOUT_FAULTS)
def test_layouts_detect_the_fault(name):
    base, place, *fault = LAYOUT_FAULTS[name]
    check = run_with_faults(base, place, [fault], BATCH)
    with pytest.raises(AssertionError):
        check()


CONTROLS = {str((base, place)): (base, place) for base, place, *_ in LAYOUT_FAULTS.values()}


@pytest.mark.parametrize("key", CONTROLS, ids=lambda key: str(list(CONTROLS).index(key)))
def test_runs_without_faults_pass(key):
    run_with_faults(*CONTROLS[key], batch=BATCH)()


def loop(router, K):
    return lambda: test_moe.test_block_equals_the_loop_over_tokens(router, K)


def balance_gradient(n, micro_batches, layout, fault):
    """test_moe's test of the balance loss's gradient with the fault planted in the ranks."""
    with mock.patch.object(test_moe, "run_ranks", lambda n, *job: run_ranks(n, with_faults, [fault], *job)):
        test_moe.check_aux_gradient(n, micro_batches, layout)


def test_balance_gradient_without_a_fault_passes():
    balance_gradient(2, 2, {}, router_loss_weight(1))


SHARED_FAULTS = {  # faults that one process has, too: (a fault as above, the test that detects it)
    "gates detached": (
        "moe.MoE.route", detached_gates, loop("softmax", 2)),
    "gates' gradient lost on the way back": (
        "ops.permute.unpermute_backward", zero_gradient_of_gates, loop("sigmoid", 1)),
    "ties go to the last expert": (
        "moe.stable_top_k", last_of_equals, loop("softmax", 1)),
    "drop policy probs keeps the smallest gates": (
        "moe.Capacity.assign", smallest_gates, loop("softmax", 1)),
    "of equal gates the later row is kept": (
        "moe.Capacity.assign", "device=expert.device)", "device=expert.device).flip(0)",
        loop("softmax", 1)),
    "capacity one row too small": (
        "ops.permute.assign_slots", "queue < capacity,", "queue < capacity - 1,",
        loop("softmax-topk", 2)),
    "the router bias changes the balance loss": (
        "moe.MoE.router_loss", "if self.router.bias is None", "if True",
        loop("sigmoid bias", 2)),
    "the router bias changes the gates": (
        "moe.MoE.route", "scores.gather(1", "(scores if bias is None else scores + bias).gather(1",
        loop("sigmoid bias", 2)),
    "softmax-topk takes the softmax over all experts": (
        "moe.MoE.route", "logits.gather(1, expert_ids).softmax(1)", "probabilities.gather(1, expert_ids)",
        loop("softmax-topk", 2)),
    "balance loss not used": (
        "moe.MoE.before_experts", unused_router_loss, loop("softmax", 1)),
    "balance loss without the 1/K": (
        "moe.MoE.router_loss", "K * rows * rows", "rows * rows",
        lambda: test_moe.test_balance_loss_is_1_when_balanced_E_over_K_when_collapsed("softmax", 2)),
    "balance loss counts rows after dropping": (
        "moe.MoE.router_loss", "chosen.to(",
        "chosen.clamp(max=expert_capacity(self.cfg, n) if self.cfg.capacity_factor else n).to(",
        test_moe.test_balance_loss_does_not_depend_on_the_capacity),
    "routing recomputed in backward": (
        "moe.MoE.before_experts", "self.route(x)", "maybe_recompute(self.route, x)",
        lambda: test_moe_run.test_recompute_routes_once({})),
    "gradient of a rank without rows is garbage": (
        "ops.grouped_mm.grouped_mm", "F.linear(x, w[0])",
        "x @ torch.full_like(w[0].T, torch.nan) + w.mean() * torch.nan",
        test_moe.test_grouped_mm_without_rows),
}


@pytest.mark.parametrize("name", SHARED_FAULTS)
def test_one_process_detects_the_fault(name):
    *fault, test = SHARED_FAULTS[name]
    test()
    with planted(*fault), pytest.raises(AssertionError):
        test()


WEIGHT_FAULTS = {  # of the balance loss: (ranks, micro-batches on each, layout), a fault as above
    "dropped in backward": ((1, 2, {}), "model.GPT.forward", detached_router_loss),
    "summed over micro-batches": ((1, 2, {}), *router_loss_weight(2)),
    "summed over dp": ((2, 1, {}), *router_loss_weight(2)),
    "divided by tp twice": ((2, 2, dict(tp=2)), *router_loss_weight(1 / 2)),
}


@pytest.mark.parametrize("name", WEIGHT_FAULTS)
def test_balance_gradient_detects_the_fault(name):
    place, *fault = WEIGHT_FAULTS[name]
    with pytest.raises(AssertionError, match="balance loss's gradient is wrong"):
        balance_gradient(*place, fault)


CHECKPOINT_FAULTS = {  # name: (the function with the fault, then as above)
    "router bias not saved": (
        "save_in_layout", "ops.flat.own_pieces", pieces_without_buffers),
    "experts read from the first rank's offset": (
        "load_in_layout", "ops.flat.own_pieces", pieces_of_first_experts),
}


@pytest.mark.parametrize("name", CHECKPOINT_FAULTS)
def test_loading_in_another_layout_detects_the_fault(name, tmp_path):
    function, *fault = CHECKPOINT_FAULTS[name]

    def run_with_fault(n, fn, *args):
        return run_ranks(n, with_faults, [fault] if fn.__name__ == function else [], fn, *args)
    with mock.patch.object(test_moe_run, "run_ranks", run_with_fault), pytest.raises(AssertionError):
        test_moe_run.check_load_in_other_layouts(*test_moe_run.LAYOUT_CHANGES[0], tmp_path)


def test_swapped_split_sizes_are_refused_by_torch():
    """Backward returns blocks of different sizes: torch refuses sizes that do not match the tensor."""
    base, (n, layout) = MOE, EP
    fault = ("parallel._AllToAll.backward", swapped_sizes)
    with pytest.raises(AssertionError, match="[Ss]plit"):
        run_ranks(n, with_faults, [fault], run, dict(base, **layout), BATCH)
