"""Planted faults in the experts: each replaces one line, as in test_faults.py, and a test must fail.

The faults are those that larger projects shipped. These tests detect them:
    layouts     every layout against one process              sums, splits, shards
    loop        a block against the loop over tokens          faults that a layout and its reference share
    balance     the balance loss's gradient alone             its weight, its counts
    recompute   the number of routings, the counted tokens
    checkpoint  saved in one layout, loaded in another
"""
import functools
from unittest import mock

import pytest
import test_moe
from faults import BALANCE, ONE_STAGE, SEVERAL_STAGES, group, planted, run_with_faults, with_faults
from pool import run_ranks
from test_layouts import CAPACITY, MOE, SIGMOID, run

BATCH = 8
MOE, CAPACITY, SIGMOID = (dict(base, n_layer=2, micro_batch=2) for base in (MOE, CAPACITY, SIGMOID))
EP, EDP, TP, EP_TP = (2, dict(ep=2)), (4, dict(ep=2)), (2, dict(tp=2)), (4, dict(tp=2, ep=2))  # ranks, layout
PP = (4, dict(pp=2, ep=2, zero=1))


def scaled_experts(original, bucket, power):
    """Bucket.wait_grads that multiplies the experts' gradients by a power of their 2 ranks."""
    original(bucket)
    if bucket.axis.name == "edp":
        bucket.grad.mul_(2.0 ** power)


def half_for_experts(original, bucket):
    """Bucket.replica_weight that counts experts as if two ranks held them."""
    return original(bucket) / (2 if bucket.axis.name == "edp" else 1)


LAYOUT_FAULTS = {  # name: (model, (ranks, layout), a fault as arguments of planted)
    # sums of the experts' gradients
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
        MOE, EP, "optim.Optimizer.sum_of_squares", "square() * self.replica_weights",
        "square() * self.replica_weights * torch.tensor([b.axis.name != 'edp' for b in self.dp.buckets])"),
    "the gradient norm counts experts as replicated": (
        MOE, EP, "ddp.Bucket.replica_weight", half_for_experts),
    # sums over tp and over micro-batches
    "router and norms not summed over tp": (
        MOE, TP, *group("stage", "dp")),
    "balance loss not divided by dp": (
        MOE, EP, ONE_STAGE, BALANCE, "router_loss / len(batches)"),
    "balance loss lost on all stages except the last": (
        MOE, PP, SEVERAL_STAGES, "if router_loss.requires_grad:",
        "if router_loss.requires_grad and is_last(model, chunk):"),
    "balance loss counts only this tp rank's tokens": (
        MOE, TP, "moe.MoE.balancing_losses", "tp.all_reduce(chosen", "(chosen"),
    "balance and z-loss averaged over this tp rank's tokens": (
        MOE, TP, "moe.MoE.balancing_losses", "rows = n * tp.size", "rows = n"),
    "router bias updated with this rank's loads only": (
        SIGMOID, EP, "moe.update_router_bias", "layer.mesh.stage.all_reduce(load)", "pass"),
    # the capacity depends on this rank's rows only
    "capacity computed from all tp ranks' rows": (
        CAPACITY, TP, "moe.Capacity.assign", "expert_ids.size(0)", "expert_ids.size(0) * 2"),
    # the wrong experts, the wrong rows
    "all ranks start with the same experts": (
        MOE, EP, "model.init_weights", "{p.offset[0] + i}", "{i}"),
    "rows stay sorted by sender, dropless": (
        MOE, EP, "moe.AllToAll.plan", "expert.argsort(stable=True)", "torch.arange(expert.numel())"),
    "rows stay sorted by sender, capacity": (
        CAPACITY, EP, "moe.Capacity.dispatch",
        "x.transpose(0, 1).flatten(1, 2)", "x.flatten(0, 2).unflatten(0, (self.e, -1))"),
    "rows come back sorted by expert, capacity": (
        CAPACITY, EP, "moe.Capacity.combine",
        ".transpose(0, 1)", ""),
    "gradients of the rows not sent back": (
        CAPACITY, EP, "parallel._AllToAll.backward",
        "ctx.axis.all_to_all(grad, ctx.receive, ctx.send)", "grad"),
    # the shards that a rank owns
    "only one rank's experts are saved": (
        MOE, EP_TP, "ops.flat.bucket_pieces", "chosen_rank(name, bucket.axis) != bucket.axis.rank",
        "zlib.crc32(name.encode()) % 4 != torch.distributed.get_rank()"),
    "experts are saved without their offset": (
        MOE, EP, "ops.flat.bucket_pieces", "zip(offset, p.offset, strict=True)",
        "zip(offset, [0] * 9, strict=False)"),
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
    balance_gradient(2, 2, {}, (ONE_STAGE, BALANCE, BALANCE))


SHARED_FAULTS = {  # faults that one process has too: (function, line, faulty line, the test that detects it)
    "gates detached": (
        "moe.MoE.route", "probabilities.gather(1", "probabilities.detach().gather(1",
        loop("softmax", 2)),
    "gates' gradient lost on the way back": (
        "ops.permute.unpermute_backward",
        ".scatter_(0, perm, of_slot)", "",
        loop("sigmoid", 1)),
    "ties go to the last expert": (
        "moe.stable_top_k", "rest.max(1).indices", "rest.size(1) - 1 - rest.flip(1).max(1).indices",
        loop("softmax", 1)),
    "drop policy probs keeps the smallest gates": (
        "moe.Capacity.assign", "descending=True", "descending=False", loop("softmax", 1)),
    "of equal gates the later row is kept": (
        "moe.Capacity.assign", "torch.arange(expert.numel(), device=expert.device)",
        "torch.arange(expert.numel()).flip(0)", loop("softmax", 1)),
    "capacity one row too small": (
        "ops.permute.assign_slots", "torch.where(queue < capacity,",
        "torch.where(queue < capacity - 1,", loop("softmax-topk", 2)),
    "the router bias changes the balance loss": (
        "moe.MoE.balancing_losses", "if self.router.bias is None", "if True",
        loop("sigmoid bias", 2)),
    "the router bias changes the gates": (
        "moe.MoE.route", "scores.gather(1", "(scores if bias is None else scores + bias).gather(1",
        loop("sigmoid bias", 2)),
    "softmax-topk takes the softmax over all experts": (
        "moe.MoE.route", "logits.gather(1, expert_ids).softmax(1)", "probabilities.gather(1, expert_ids)",
        loop("softmax-topk", 2)),
    "balance loss not used": (
        "moe.MoE.forward", "return y, aux", "return y, aux.detach()",
        loop("softmax", 1)),
    "balance loss without the 1/K": (
        "moe.MoE.balancing_losses", "/ (K * rows * rows)", "/ (rows * rows)",
        lambda: test_moe.test_balance_loss_is_1_when_balanced_E_over_K_when_collapsed("softmax", 2)),
    "balance loss counts rows after dropping": (
        "moe.MoE.balancing_losses", "chosen.to(",
        "chosen.clamp(max=expert_capacity(self.cfg, n) if self.cfg.capacity_factor else n).to(",
        test_moe.test_balance_loss_does_not_depend_on_the_capacity),
    "routing recomputed in backward": (
        "moe.MoE.forward", "self.route(x)", "run(self.route, x)",
        lambda: test_moe.test_recompute_routes_once({})),
    "gradient of a rank without rows is garbage": (
        "ops.grouped_mm.grouped_mm", "return F.linear(x, w[0])",
        "return x @ torch.full_like(w[0].T, torch.nan) + w.mean() * torch.nan",
        test_moe.test_grouped_mm_without_rows),
}


@pytest.mark.parametrize("name", SHARED_FAULTS)
def test_one_process_detects_the_fault(name):
    where, old, new, test = SHARED_FAULTS[name]
    test()
    with planted(where, old, new), pytest.raises(AssertionError):
        test()


WEIGHT_FAULTS = {  # weight of the balance loss: (ranks, micro-batches on each, layout), the faulty weight
    "dropped in backward": ((1, 2, {}), "router_loss.detach()"),
    "summed over micro-batches": ((1, 2, {}), "router_loss / model.mesh.dp.size"),
    "summed over dp": ((2, 1, {}), "router_loss / len(batches)"),
    "divided by tp twice": ((2, 2, dict(tp=2)), f"{BALANCE} / model.mesh.tp.size"),
}


@pytest.mark.parametrize("name", WEIGHT_FAULTS)
def test_balance_gradient_detects_the_fault(name):
    place, new = WEIGHT_FAULTS[name]
    with pytest.raises(AssertionError, match="balance loss's gradient is wrong"):
        balance_gradient(*place, (ONE_STAGE, BALANCE, new))


CHECKPOINT_FAULTS = {  # name: (the function with the fault, then as above)
    "router bias not saved": (
        "save_in_layout", "runtime.resume.shards", "dp.buffers.items()", "{}.items()"),
    "experts read from the first rank's offset": (
        "load_in_layout", "runtime.resume.load", "shards(dp, opt, owned_only=False)",
        "[(n, t, f, (0, *o[1:]) if '.w1' in n else o) for n, t, f, o in shards(dp, opt, owned_only=False)]"),
}


@pytest.mark.parametrize("name", CHECKPOINT_FAULTS)
def test_loading_in_another_layout_detects_the_fault(name, tmp_path):
    function, *fault = CHECKPOINT_FAULTS[name]

    def run_with_fault(n, fn, *args):
        return run_ranks(n, with_faults, [fault] if fn.__name__ == function else [], fn, *args)
    with mock.patch.object(test_moe, "run_ranks", run_with_fault), pytest.raises(AssertionError):
        test_moe.check_load_in_other_layouts(*test_moe.LAYOUT_CHANGES[0], tmp_path)


def test_swapped_split_sizes_are_refused_by_torch():
    """Backward returns blocks of different sizes: torch refuses sizes that do not match the tensor."""
    base, (n, layout) = MOE, EP
    fault = ("parallel._AllToAll.backward", "ctx.receive, ctx.send", "ctx.send, ctx.receive")
    with pytest.raises(AssertionError, match="[Ss]plit"):
        run_ranks(n, with_faults, [fault], run, dict(base, **layout), BATCH)
