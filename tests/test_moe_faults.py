"""Deliberate faults in the experts: each edits one line of ours, as in test_faults.py, and a test must fail.

They are the bug classes of our peers' issue trackers. Who must see them:
    layouts    every layout against one process              sums, splits, shards
    loop       a block against the loop over tokens          what every layout would share with its reference
    balance    the balancing loss's gradient, capacity-free  its weight, its counts
    recompute  routing happens once, counters count once
    saved      saved in one layout, loaded in another
"""
from unittest import mock

import pytest
import test_layouts
import test_moe
from pool import run_ranks
from test_faults import planted, with_faults
from test_layouts import CAPACITY, MOE, SIGMOID, compare, run

BATCH = 8
MOE, CAPACITY, SIGMOID = (dict(base, n_layer=2, micro_batch=2) for base in (MOE, CAPACITY, SIGMOID))
EP, EDP, TP, EP_TP = (2, dict(ep=2)), (4, dict(ep=2)), (2, dict(tp=2)), (4, dict(tp=2, ep=2))  # ranks, layout
PP = (4, dict(pp=2, ep=2, zero=1))

LAYOUTS = {  # name: (model, (ranks, layout), function, its line, the faulty line)
    # 1, 4: the sums of the experts' gradients
    "expert gradients ep times too large": (
        MOE, EP, "parallel.Bucket.wait_grads", "self.reduce_handle.wait()",
        "self.reduce_handle.wait(), self.grad.mul_(2 if self.axis.name == 'edp' else 1)"),
    "expert gradients averaged over edp": (
        MOE, EDP, "parallel.Bucket.wait_grads", "self.reduce_handle.wait()",
        "self.reduce_handle.wait(), self.grad.div_(self.axis.size if self.axis.name == 'edp' else 1)"),
    "expert gradients summed over dp": (
        MOE, EP, "parallel.parameter", '"edp" if', '"dp" if'),
    "expert gradients not summed over edp": (
        MOE, EDP, "parallel.parameter", '"edp" if', '"pp" if'),
    # 2: the norm
    "the norm skips experts": (
        MOE, EP, "optim.Optimizer.sum_of_squares", "square() * self.replica_weights",
        "square() * self.replica_weights * torch.tensor([b.axis.name != 'edp' for b in self.dp.buckets])"),
    "the norm counts experts as replicated": (
        MOE, EP, "parallel.Bucket.__init__", "1 / (axis.size // self.shards)",
        "1 / (axis.size // self.shards) / (2 if axis.name == 'edp' else 1)"),
    # 3, 7: sums over tp and over micro-batches
    "router and norms not summed over tp": (
        MOE, TP, "parallel.parameter", '"stage" if', '"dp" if'),
    "balancing loss not divided by dp": (
        MOE, EP, "pipeline.forward_backward", "aux / (n * model.mesh.dp.size)", "aux / n"),
    "balancing loss lost on all but the last stage": (
        MOE, PP, "pipeline.forward_backward", "if aux.requires_grad:",
        "if aux.requires_grad and model.is_last:"),
    "balancing loss counts the own tp rank's tokens": (
        MOE, TP, "moe.MoE.balance", "tp.all_reduce(chosen.to(probs.dtype))", "chosen.to(probs.dtype)"),
    "losses averaged over the own tp rank's tokens": (
        MOE, TP, "moe.MoE.balance", "rows = n * tp.size", "rows = n"),
    "bias steered by the own rank's loads": (
        SIGMOID, EP, "moe.update_router_bias", "moe.mesh.stage.all_reduce(load)", "pass"),
    # capacity is a matter of the rows of this rank
    "capacity of all tp ranks' rows": (
        CAPACITY, TP, "moe.Capacity.assign", "expert_capacity(self.cfg, ids.size(0))",
        "expert_capacity(self.cfg, ids.size(0) * 2)"),
    # the same experts everywhere, the wrong rows
    "all ranks start with the same experts": (
        MOE, EP, "model.init_weights", "{p.offset[0] + i}", "{i}"),
    "rows stay by sender, dropless": (
        MOE, EP, "moe.AllToAll.plan", "expert.argsort(stable=True)", "torch.arange(expert.numel())"),
    "rows stay by sender, capacity": (
        CAPACITY, EP, "moe.Capacity.dispatch",
        "return x.transpose(0, 1).flatten(1, 2)", "return x.flatten(0, 2).unflatten(0, (self.e, -1))"),
    "rows come back by expert, capacity": (
        CAPACITY, EP, "moe.Capacity.combine",
        "y = y.unflatten(1, (self.ep.size, -1)).transpose(0, 1)", "y = y.unflatten(1, (self.ep.size, -1))"),
    "gradients of the rows not sent back": (
        CAPACITY, EP, "parallel._AllToAll.backward", "ctx.axis.all_to_all(g, ctx.receive, ctx.send)", "g"),
    # 10: what a rank answers for
    "one rank's experts only saved": (
        MOE, EP_TP, "runtime.resume.shards", "% b.axis.size != b.axis.rank",
        "% dp.mesh.stage.size != dp.mesh.stage.rank"),
    "experts saved without their offset": (
        MOE, EP, "runtime.resume.shards", "zip(offset, p.offset, strict=True)",
        "zip(offset, [0] * 9, strict=False)"),
}


def look(base, place, faults=()):
    """-> a function that compares a run under the faults. The run is over by then: a crash is none."""
    n, layout = place
    chunks = layout.get("tp", 1) if base["capacity_factor"] else 1
    test_layouts.reference(dict(base), BATCH, chunks)  # remembered
    results = run_ranks(n, with_faults, faults, run, dict(base, **layout), BATCH)

    def judge():
        with mock.patch.object(test_layouts, "run_ranks", lambda *job: results):
            compare(base, n, BATCH, **layout)
    return judge


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layouts_see_it(name):
    base, place, *fault = LAYOUTS[name]
    judge = look(base, place, [fault])
    with pytest.raises(AssertionError):
        judge()


CONTROLS = {str((base, place)): (base, place) for base, place, *_ in LAYOUTS.values()}


@pytest.mark.parametrize("key", CONTROLS, ids=lambda key: str(list(CONTROLS).index(key)))
def test_no_fault_no_failure(key):
    look(*CONTROLS[key])()


def loop(router, K):
    return lambda: test_moe.test_equals_the_loop_over_tokens(router, K)


def balance_gradient(n, micro_batches, layout, fault):
    """The gradient test with the fault in the ranks."""
    with mock.patch.object(test_moe, "run_ranks", lambda n, *job: run_ranks(n, with_faults, [fault], *job)):
        test_moe.check_aux_gradient(n, micro_batches, layout)


def test_the_gradient_test_sees_no_fault_where_none_is():
    balance_gradient(2, 2, {}, ("pipeline.forward_backward", "n_backward += 1", "n_backward += 1"))


ALIKE = {  # in one process and in many alike: (function, line, faulty line, the test that sees it)
    "gates detached": (
        "moe.MoE.route", "p = probs.gather(1, ids) if", "p = probs.detach().gather(1, ids) if",
        loop("softmax", 2)),
    "gates' gradient lost on the way back": (
        "ops.permute.unpermute_backward",
        "dp = y.new_zeros(p.numel() + 1).scatter_(0, perm, (y * rows).sum(1))[:-1]",
        "dp = torch.zeros_like(p)",
        loop("sigmoid", 1)),
    "ties go to the last expert": (
        "moe.stable_top_k", "rest.max(1).indices", "rest.size(1) - 1 - rest.flip(1).max(1).indices",
        loop("softmax", 1)),
    "probs keeps the smallest gates": (
        "moe.Capacity.assign", "descending=True", "descending=False", loop("softmax", 1)),
    "a later row before an earlier one": (
        "moe.Capacity.assign", "torch.arange(expert.numel(), device=expert.device)",
        "torch.arange(expert.numel()).flip(0)", loop("softmax", 1)),
    "room for one more": (
        "ops.permute.assign_capacity_slots", "torch.where(queue < capacity,",
        "torch.where(queue < capacity - 1,", loop("softmax-topk", 2)),
    "the bias counts in the balancing loss": (
        "moe.MoE.balance", "ids if self.router.bias is None else stable_top_k(probs, K)", "ids",
        loop("sigmoid bias", 2)),
    "the bias is in the gate": (
        "moe.MoE.route", "p = scores.gather(1, ids)", "p = (scores + (0 if self.router.bias is None else "
        "self.router.bias)).gather(1, ids)", loop("sigmoid bias", 2)),
    "gates of the top-k before the softmax": (
        "moe.MoE.route", "logits.gather(1, ids).softmax(1)", "probs.gather(1, ids)", loop("softmax-topk", 2)),
    "balancing loss not used": (
        "moe.MoE.forward", "return (y if self.shared is None else y + recompute(self.shared, x)), aux",
        "return (y if self.shared is None else y + recompute(self.shared, x)), aux.detach()",
        loop("softmax", 1)),
    "balancing loss without the 1/K": (
        "moe.MoE.balance", "/ (K * rows * rows)", "/ (rows * rows)",
        lambda: test_moe.test_balance_loss_is_1_when_balanced_E_over_K_when_collapsed("softmax", 2)),
    "balancing loss counted after the drop": (
        "moe.MoE.balance", "chosen.to(probs.dtype)",
        "chosen.clamp(max=expert_capacity(self.cfg, n) if "
        "self.cfg.capacity_factor else n).to(probs.dtype)",
        test_moe.test_balance_loss_does_not_see_the_capacity),
    "routing recomputed": (
        "moe.MoE.forward", "p, ids, aux = self.route(x)", "p, ids, aux = recompute(self.route, x)",
        lambda: test_moe.test_recompute_routes_once({})),
    "an empty rank's gradient is garbage": (
        "ops.grouped_mm.grouped_mm", "return F.linear(x, w[0])",
        "return x @ torch.full_like(w[0].T, torch.nan) + w.mean() * torch.nan",
        test_moe.test_grouped_without_rows),
}


@pytest.mark.parametrize("name", ALIKE)
def test_somebody_sees_it(name):
    where, old, new, judge = ALIKE[name]
    judge()
    with planted(where, old, new), pytest.raises(AssertionError):
        judge()


FORWARD = "pipeline.forward_backward"
WEIGHTS = {  # of the balancing loss: (ranks, micro-batches on each, layout), line, faulty line
    "dropped in backward": ((1, 2, {}), "if aux.requires_grad:", "if False:"),
    "summed over micro-batches": ((1, 2, {}), "aux / (n * model.mesh.dp.size)", "aux / model.mesh.dp.size"),
    "summed over dp": ((2, 1, {}), "aux / (n * model.mesh.dp.size)", "aux / n"),
    "divided by tp once more": (
        (2, 2, dict(tp=2)), "aux / (n * model.mesh.dp.size)",
        "aux / (n * model.mesh.dp.size * model.mesh.tp.size)"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_balancing_gradient_sees_it(name):
    place, old, new = WEIGHTS[name]
    with pytest.raises(AssertionError, match="balancing gradient wrong"):
        balance_gradient(*place, (FORWARD, old, new))


SAVED = {  # who does it wrong: first_half saves, second_half loads
    "steering bias not saved": ("first_half", "runtime.resume.shards", "dp.buffers.items()", "{}.items()"),
    "experts read from the first rank's place": (
        "second_half", "runtime.resume.load", "shards(dp, opt, owned_only=False)",
        "[(n, t, f, (0, *o[1:]) if '.w1' in n else o) for n, t, f, o in shards(dp, opt, owned_only=False)]"),
}


@pytest.mark.parametrize("name", SAVED)
def test_loading_in_another_layout_sees_it(name, tmp_path):
    who, *fault = SAVED[name]

    def run_with_fault(n, fn, *args):
        return run_ranks(n, with_faults, [fault] if fn.__name__ == who else [], fn, *args)
    with mock.patch.object(test_moe, "run_ranks", run_with_fault), pytest.raises(AssertionError):
        test_moe.check_other_layout(*test_moe.CHANGES[0], tmp_path)


def test_swapped_splits_do_not_pass():
    """Uneven blocks one way, the same blocks back: torch itself refuses what does not add up."""
    base, (n, layout) = MOE, EP
    fault = ("parallel._AllToAll.backward", "ctx.receive, ctx.send", "ctx.send, ctx.receive")
    with pytest.raises(AssertionError, match="[Ss]plit"):
        run_ranks(n, with_faults, [fault], run, dict(base, **layout), BATCH)
