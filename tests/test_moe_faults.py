"""Planted faults in the experts: one thing goes wrong, as in test_faults.py, and a test must fail.

test_peers_faults.py has more, which larger projects reported. These tests detect the faults here:
    layouts     every layout against one process              sums, splits, pieces
    loop        a block against the loop over tokens          faults that a layout and its reference share
    recompute   the number of routings
    checkpoint  saved in one layout, loaded in another
"""
import functools
from unittest import mock

import pytest
import test_layouts
import test_moe
import test_moe_run
import torch
from faults import (
    EP,
    MOE,
    TP,
    assert_caught,
    balance_loss_of_this_rank,
    controls,
    first_share,
    not_over,
    planted,
    run_with_faults,
    with_faults,
)
from pool import run_ranks

CAPACITY, SIGMOID = (
    dict(base, n_layer=2, micro_batch=2) for base in (test_layouts.CAPACITY, test_layouts.SIGMOID))


# -----------------------------------------------------------------------------
# Functions that are called in the place of others

def capacity_of_two_ranks(original, cfg, n):
    """expert_capacity of twice the rows."""
    return original(cfg, 2 * n)


def plan_by_sender(original, dispatcher, *args):
    """AllToAll.plan that leaves the received rows by sender."""
    plan = original(dispatcher, *args)
    rows = torch.arange(plan.by_expert.numel())
    return plan._replace(by_expert=rows, by_sender=rows)


def last_of_equals(original, scores, K):
    """stable_top_k that prefers the highest column."""
    return scores.size(1) - 1 - original(scores.flip(1), K)


def smallest_gates(original, dispatcher, expert_ids, gates):
    """Capacity.plan that keeps the smallest gates."""
    return original(dispatcher, expert_ids, -gates)


def loss_with_bias(original, layer, *args):
    """MoE.balance_loss that counts what the router chose with its bias."""
    with mock.patch.object(layer.router, "bias", None):
        return original(layer, *args)


def loss_of_one_choice(original, layer, *args):
    """MoE.balance_loss without the 1/K."""
    with mock.patch.object(layer, "K", 1):
        return original(layer, *args)


def routed_again(original, layer, *args):
    """MoE.route that backward runs again."""
    return layer.maybe_recompute(functools.partial(original, layer), *args)


def pieces_without_buffers(original, data_parallel, *args, **kwargs):
    """runtime.pieces.own_pieces without the routers' biases."""
    with mock.patch.object(data_parallel, "buffers", {}):
        return original(data_parallel, *args, **kwargs)


def pieces_of_first_experts(original, *args, owned_only=True):
    """runtime.pieces.own_pieces that reads the first rank's w1 on every rank."""
    pieces = original(*args, owned_only=owned_only)
    for i, piece in enumerate(pieces):
        if ".w1" in piece.name and not owned_only:
            pieces[i] = piece._replace(offset=(0, *piece.offset[1:]))
    return pieces


# -----------------------------------------------------------------------------
# Layouts

FAULTS = {  # name: (model, (ranks, layout), faults as arguments of planted)
    "balance loss of a tp rank's own tokens": (MOE, TP, ("moe.MoE.balance_loss", balance_loss_of_this_rank)),
    "router bias updated with this rank's loads only": (
        SIGMOID, EP, ("parallel.Axis.all_reduce", functools.partial(not_over, name="stage"))),
    "capacity computed from all ranks' rows": (CAPACITY, TP, ("moe.expert_capacity", capacity_of_two_ranks)),
    "all ranks start with the same experts": (MOE, EP, ("model.initial_weights", first_share)),
    "rows stay sorted by sender, dropless": (MOE, EP, ("moe.AllToAll.plan", plan_by_sender)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_layouts_detect_the_fault(name):
    base, place, *faults = FAULTS[name]
    assert_caught(base, place, *faults)


@pytest.mark.parametrize("base,place", controls(FAULTS))
def test_runs_without_faults_pass(base, place):
    run_with_faults(base, place)()


# -----------------------------------------------------------------------------
# One process

def loop(router, K):
    return lambda: test_moe.test_block_equals_the_loop_over_tokens(router, K)


SHARED_FAULTS = {  # faults that one process has, too: (a fault as above, the test that detects it)
    "ties go to the last expert": ("moe.stable_top_k", last_of_equals, loop("softmax", 1)),
    "drop policy probs keeps the smallest gates": ("moe.Capacity.plan", smallest_gates, loop("softmax", 1)),
    "the router bias changes the balance loss": (
        "moe.MoE.balance_loss", loss_with_bias, loop("sigmoid bias", 2)),
    "balance loss without the 1/K": (
        "moe.MoE.balance_loss", loss_of_one_choice,
        lambda: test_moe.test_balance_loss_is_1_when_balanced_E_over_K_when_collapsed("softmax", 2)),
    "routing recomputed in backward": (
        "moe.MoE.route", routed_again, lambda: test_moe_run.test_recompute_routes_once({})),
}


@pytest.mark.parametrize("name", SHARED_FAULTS)
def test_one_process_detects_the_fault(name):
    *fault, test = SHARED_FAULTS[name]
    test()
    with planted(*fault), pytest.raises(AssertionError):
        test()


# -----------------------------------------------------------------------------
# Checkpoints

CHECKPOINT_FAULTS = {  # name: (the function with the fault, a fault as above, what the error says)
    "router bias not saved": (
        "save_in_layout", ("runtime.pieces.own_pieces", pieces_without_buffers), "moe.router.bias"),
    "experts read from the first rank's offset": (
        "load_in_layout", ("runtime.pieces.own_pieces", pieces_of_first_experts), "after loading with"),
}


@pytest.mark.parametrize("name", CHECKPOINT_FAULTS)
def test_loading_in_another_layout_detects_the_fault(name, tmp_path):
    function, fault, words = CHECKPOINT_FAULTS[name]

    def run_with_fault(n, fn, *args):
        return run_ranks(n, with_faults, [fault] if fn.__name__ == function else [], fn, *args)
    with mock.patch.object(test_moe_run, "run_ranks", run_with_fault), \
            pytest.raises(AssertionError, match=words):
        test_moe_run.check_load_in_other_layouts(*test_moe_run.LAYOUT_CHANGES[0], tmp_path)
