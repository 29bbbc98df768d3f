"""Silent numerical faults that larger projects reported, planted here, each named by its thread.

test_faults.py has our own. Four checks detect them:
    layouts        a layout against one process
    plain PyTorch  one process against a plain loop
    resumes        a run that is stopped around the end of an epoch and resumed, against one that never stops
    overflows      a run in fp16 in which one rank of tp has a gradient that is not finite
"""
import functools
import re
import signal
from unittest import mock

import pytest
import test_faults as ours
import test_layouts
import torch
from faults import (
    DP,
    GPT2,
    LLAMA,
    MOE,
    PP,
    TP,
    group,
    nothing,
    router_loss_weight,
    run_with_faults,
    with_faults,
)
from pool import run_ranks
from runs import TINY, session
from shared import Masked

import prepare
from corpus.shards import open_tokens
from corpus.synthetic import Synthetic

ONE, CP, EP = (1, dict()), (2, dict(cp=2)), (2, dict(ep=2))
TP_EP, PP_DP, PP_ZERO = (2, dict(tp=2, ep=2)), (4, dict(pp=2)), (4, dict(pp=2, zero=1))
EDP_EP, RECOMPUTED = (4, dict(ep=2)), (2, dict(recompute="full"))
CAPACITY = dict(test_layouts.CAPACITY, micro_batch=2, n_layer=2)


# -----------------------------------------------------------------------------
# Functions that are called in the place of others

def tokens_of_this_rank(original, source, first, count, device):
    """trained_tokens that takes the share of one replica's sequences for the share of each."""
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return size * original(source, first + rank * (count // size), count // size, device)


def factor_on(original, bucket, axis, factor):
    """Bucket.count_factor times a factor in the buckets of one axis."""
    return original(bucket) * (factor if bucket.axis.name == axis else 1)


def count_factor_on(axis, factor):
    return "ddp.Bucket.count_factor", functools.partial(factor_on, axis=axis, factor=factor)


def experts_of_first_rank(original, bucket):
    """Bucket.count_factor that leaves out the experts of all ranks but the first."""
    return 0.0 if bucket.axis.name == "edp" and torch.distributed.get_rank() else original(bucket)


def experts_divided(original, bucket):
    """Bucket.wait_grads that divides the experts' gradients by the number of expert-parallel ranks."""
    original(bucket)
    if bucket.axis.name == "edp":
        bucket.grad.div_(torch.distributed.get_world_size())


def experts_over_their_replicas(original, bucket):
    """Bucket.wait_grads that takes the ranks with the same experts for all that send them tokens."""
    original(bucket)
    if bucket.axis.name == "edp":
        bucket.grad.mul_(torch.distributed.get_world_size() / bucket.axis.size)


def scaled_at_each_addition(original, total, grad, first):
    """ops.flat.accumulate that rescales the whole total at every micro-batch."""
    original(total, grad, first)
    total.div_(2)


def epsilon_of_every_rank(original, optimizer, grad_norm):
    """Optimizer.divisor whose 1e-6 is added once per rank."""
    return original(optimizer, grad_norm + 1e-6 * (torch.distributed.get_world_size() - 1))


def numbered_from_its_stage(original, shape, std, key, device):
    """normal_from_key as if the blocks of every stage, of which each has one, began with number 0."""
    return original(shape, std, re.sub(r"blocks\.\d+", "blocks.0", key), device)


def equal_shares(original, p):
    """own_share that is the first rank's share on every rank."""
    return tuple(slice(0, size) for size in p.shape)


# Experts

def no_router_gradient(original, *args, **kwargs):
    """GPT.forward whose router loss has a value and no gradient."""
    out, router_loss = original(*args, **kwargs)
    return out, router_loss.detach()


def gates_without_gradient(original, layer, x, gates, plan):
    """MoE.experts that does not tell the router what its gates did."""
    return original(layer, x, gates.detach(), plan)


def gates_of_own_experts(original, layer, x, gates, plan):
    """MoE.experts in which a gate has a gradient only if its expert is on this rank."""
    rank = layer.dispatcher.ep.rank
    start = sum(plan.send[:rank])
    is_own = torch.zeros(gates.numel(), dtype=torch.bool)
    is_own[plan.perm[start:start + plan.send[rank]]] = True
    return original(layer, x, torch.where(is_own.view_as(gates), gates, gates.detach()), plan)


def gates_once_per_rank(original, layer, x, gates, plan):
    """MoE.experts in which the gates' gradient counts once per ep rank."""
    ranks = layer.dispatcher.ep.size
    return original(layer, x, ranks * gates - (ranks - 1) * gates.detach(), plan)


def own_block_alone(original, ctx, grad):
    """_AllToAll.backward that loses the gradients of the rows that other ranks had."""
    grad, *others = original(ctx, grad)
    for rank, block in enumerate(grad.split(ctx.send)):
        if rank != ctx.axis.rank:
            block.zero_()
    return grad, *others


def garbage_in_empty_slots(original, ctx, x, perm, inv_perm, K=1, padded=False):
    """Permute.forward that leaves whatever was in memory in the slots that nobody fills."""
    out = original(ctx, x, perm, inv_perm, K, padded)
    return out.masked_fill((perm >= K * x.size(0)).unsqueeze(1), torch.nan)


# -----------------------------------------------------------------------------
# The faults

FAULTS = {  # thread: what went wrong there: (model, (ranks, layout), faults)
    "Megatron-LM #7452, finding 3: a loss divided by local numbers of tokens": (
        LLAMA, DP, ("corpus.batches.trained_tokens", tokens_of_this_rank)),
    "Megatron-LM #7452, finding 8: a sharded weight counted as replicated in the clipping norm": (
        LLAMA, TP, count_factor_on("dp", 1 / 2)),
    "Megatron-LM #7452, finding 10: the router's loss scaled by the count over tp": (
        MOE, TP, router_loss_weight(2)),
    "Megatron-LM #7452, finding 11: the norm of the heads not summed over tp": (
        dict(LLAMA, qk_norm="head"), TP, ("layers.Gain.__init__", functools.partial(
            ours.reduced_elsewhere, name="weight", group="dp"))),
    "Megatron-LM #5916: experts of later tp ranks left out of the norm": (
        MOE, TP_EP, ("ddp.Bucket.count_factor", experts_of_first_rank)),
    "Megatron-LM #7228: both copies of a tied weight counted in the norm": (
        GPT2, PP, count_factor_on("tied", 2)),
    "Megatron-LM #844: a tied gradient summed over the stages, but of one replica": (
        GPT2, PP_ZERO, group("tied", "pp")),
    "Megatron-LM #5956: experts' gradients as of all replicas, not of those of an expert": (
        MOE, EDP_EP, ("ddp.Bucket.wait_grads", experts_over_their_replicas)),
    "Megatron-LM #5047: the router's loss divided by tp": (
        MOE, TP, router_loss_weight(1 / 2)),
    "Megatron-LM #1628: experts summed over the ranks of the dense weights": (
        MOE, TP, group("edp", "dp")),
    "Megatron-LM #1464: attention's gradients under cp": (
        LLAMA, CP, ("parallel._GatherRows.backward", ours.own_rows)),
    "Megatron-LM #906: a loss scaled by cp": (
        LLAMA, CP, ours.token_count(1 / 2)),
    "Megatron-LM #560: positions of cp ranks": (
        LLAMA, CP, ("model.GPT._positions", ours.one_piece)),
    "Pai-Megatron-Patch #397: a gate on parts of the sequence, its gradient not summed over tp": (
        MOE, TP, group("stage", "dp")),
    "torchtitan #2972: a pipeline divides the logged loss alone": (
        LLAMA, PP, ("pipeline.several_stages", "out = out / n_trained  # the one division\n            "
                    "loss_part.add_(out.detach())", "loss_part.add_(out.detach() / n_trained)")),
    "torchtitan #1733: a total rescaled at each accumulation": (
        LLAMA, PP, ("ops.flat.accumulate", scaled_at_each_addition)),
    "torchtitan #2206: the mean of each micro-batch's mean": (
        LLAMA, DP, ("pipeline.one_stage", "loss / n_trained",
                    "loss / ((y >= 0).sum() * len(batches) * model.mesh.dp.size)")),
    "torchtitan #596: each stage clips by its own norm": (
        LLAMA, PP, ("optim.Optimizer.divisor", ours.divisor_by_local_norm)),
    "torchtitan #1551: experts' gradients divided by another number of ranks": (
        MOE, EP, ("ddp.Bucket.wait_grads", experts_divided)),
    "torchtitan #166: replicas that start from other weights": (
        LLAMA, DP, ("model.normal_from_key", ours.draw_of_this_rank)),
    "torchtitan #514: every stage draws from the same seed": (
        LLAMA, PP, ("model.normal_from_key", numbered_from_its_stage)),
    "torchtitan #1750: another tp, another loss": (
        LLAMA, TP, ("model.normal_from_key", ours.draw_of_this_rank)),
    "torchtitan #1878: the gradient of rows that all tp ranks use is not summed": (
        LLAMA, TP, ("parallel._GatherRows.backward", ours.own_rows)),
    "SkyRL #1886: the gradient of the head's input is not summed over tp": (
        LLAMA, TP, ("parallel._GatherRows.backward", ours.own_rows)),
    "nanotron #172: of the input's gradient only the rank's own rows are right": (
        LLAMA, TP, ("parallel._ScatterRows.backward", ours.repeated_grad)),
    "ms-swift #7944: tp ranks draw equal shares": (
        LLAMA, TP, ("model.own_share", equal_shares)),
    "Automodel #3817: the experts' norm not reduced over ep": (
        MOE, EP, ("optim.Optimizer.divisor", ours.divisor_by_local_norm)),
    "Automodel #1408: the balance loss has no gradient": (
        MOE, DP, ("model.GPT.forward", no_router_gradient)),
    "Automodel #3359: the balance loss not divided by the micro-batches": (
        MOE, DP, ("pipeline.one_stage", "(len(batches) * model.mesh.dp.size)", "model.mesh.dp.size")),
    "Automodel #2995: the router learns nothing from the loss": (
        MOE, EP, ("moe.MoE.experts", gates_without_gradient)),
    "Automodel #1260: rows get no gradient from other ranks' experts": (
        MOE, EP, ("parallel._AllToAll.backward", own_block_alone)),
    "transformers #48205, first: rows that nobody wrote": (
        CAPACITY, EP, ("ops.permute.Permute.forward", garbage_in_empty_slots)),
    "transformers #48205, second: the gates' gradients of ep ranks not summed": (
        MOE, EP, ("moe.MoE.experts", gates_of_own_experts)),
    "transformers #48687: the loss is right, the router's gradient is not": (
        MOE, EP, ("moe.MoE.experts", gates_once_per_rank)),
    "VeOmni #1115: gradients summed over dp without cp": (
        LLAMA, CP, group("stage", "dp"), group("dpcp", "dp")),
    "OLMo-core #828: recomputed dropout draws other masks": (
        dict(LLAMA, dropout=0.2), RECOMPUTED,
        ("model.Block.maybe_recompute", "self.draws", "False")),
    "pytorch #149768: the epsilon of clipping added by every rank": (
        LLAMA, DP, ("optim.Optimizer.divisor", epsilon_of_every_rank)),
    "pytorch #160285: experts' gradients ep times too large": (
        MOE, EP, ("ddp.Bucket.wait_grads", experts_over_their_replicas)),
    "pytorch #144530: no gradient of a pipeline is summed": (
        LLAMA, PP_DP, ("ddp.Bucket.start_sum", nothing), ("ddp.Bucket.wait_grads", nothing)),
    "picotron #5: gradients sent before the last micro-batch of 1F1B": (
        LLAMA, PP_DP, ("ddp.DataParallel.announce_backward", ours.always_last),
        ("ddp.Bucket.start_sum", ours.reduce_and_wait)),
    "trl #7245: no gradient is summed over the replicas": (
        LLAMA, DP, ("ddp.Bucket.start_sum", nothing), ("ddp.Bucket.wait_grads", nothing)),
    "AReaL #1273: a pipeline divides once more by its micro-batches": (
        LLAMA, PP, ours.token_count(4)),
    "modded-nanogpt #146: accumulated gradients are not divided": (
        LLAMA, ONE, ours.token_count(1 / 2)),
}
UNEQUAL = {"Megatron-LM #7452, finding 3", "torchtitan #2206"}  # ranks with other numbers of trained tokens


def kind_of(name):
    return Masked if name.partition(":")[0] in UNEQUAL else Synthetic


def unless_short(names, is_short):
    """Return pytest's parameters of these names; make long has those that are not short."""
    return [pytest.param(name, marks=[] if is_short(name) else [pytest.mark.long]) for name in names]


@pytest.mark.parametrize("name", unless_short(FAULTS, lambda name: FAULTS[name][1][0] <= 2))
def test_a_peers_fault_is_caught(name):
    base, place, *faults = FAULTS[name]
    check = run_with_faults(base, place, faults, kind=kind_of(name))
    with pytest.raises(AssertionError):
        check()


CONTROLS = {str((base, place, kind_of(name))): (base, place, kind_of(name))
            for name, (base, place, *_) in FAULTS.items()}


@pytest.mark.long
@pytest.mark.parametrize("key", CONTROLS, ids=lambda key: str(list(CONTROLS).index(key)))
def test_the_same_runs_without_faults_pass(key):
    base, place, kind = CONTROLS[key]
    run_with_faults(base, place, kind=kind)()


# -----------------------------------------------------------------------------
# Around the end of an epoch

LAST = 4  # steps of an epoch, each of 4 sequences of 16 tokens


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Token files whose training split has exactly LAST steps."""
    folder = tmp_path_factory.mktemp("epochs")
    text = "".join(chr(97 + i * i % 23) for i in range(322))  # of which 257 are for training
    (folder / "text.txt").write_text(text)
    argv = [str(folder / "text.txt"), "--name", "toy", "--tokenizer", "char", "--out", str(folder),
            "--val-fraction", "0.2"]
    assert prepare.main(argv) == 0
    assert open_tokens(str(folder / "toy"), "train", 16, 0).n_samples == 4 * LAST
    return folder / "toy"


def steps_of(toy, out, *flags, plan=None, faults=(), code=0):
    """Run a session on one rank. Return what each of its steps started with."""
    argv = [*TINY, f"--data={toy}", "--vocab-size=0", "--save-every=1", "--keep=0", "--steps=10",
            f"--out={out}", *flags]
    (result,) = run_ranks(1, with_faults, faults, session, argv, plan)
    assert result["code"] == code, result["err"] + result["out"]
    return result["steps"]


def an_epoch_too_early(original, source, epoch, windows):
    """shuffled_starts that takes the epoch in which it resumes for the first."""
    return original(source, max(epoch - 1, 0), windows)


def skipped_again(original, source, epoch, windows):
    """shuffled_starts that leaves out the first step's windows in later epochs as well."""
    return original(source, epoch, (windows + 4) % source.n_samples if epoch else windows)


def order_of_the_first_epoch(original, source, epoch, windows):
    """shuffled_starts that takes every epoch for the first."""
    return original(source, 0, windows)


def an_epoch_too_late(original, source, epoch, windows):
    """shuffled_starts of the epoch after."""
    return original(source, epoch + 1, windows)


def samples_since_the_resume(original, run, number):
    """Run.save that counts the samples of this process alone."""
    steps = number - run.first_step + 1
    with mock.patch.object(run.state, "samples", steps * run.full_batch):
        original(run, number)


RESUMES = {  # thread: what went wrong there: a fault of the resumed process
    "accelerate #2823: a resumed run has the order of another epoch": (
        "corpus.shards.Tokens.shuffled_starts", an_epoch_too_early),
    "accelerate #1451: what a resume skipped is skipped in later epochs": (
        "corpus.shards.Tokens.shuffled_starts", skipped_again),
    "accelerate #4071: a resume within an epoch has the order of the first one": (
        "corpus.shards.Tokens.shuffled_starts", order_of_the_first_epoch),
    "accelerate #4233: a resume within an epoch has the order of the next one": (
        "corpus.shards.Tokens.shuffled_starts", an_epoch_too_late),
}
SECOND_RESUMES = {  # the same of a process that was resumed and is stopped again
    "KempnerForge #57: the second resume in an epoch counts from the first": (
        "train.Run.save", samples_since_the_resume),
}


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    """The steps of a run of two and a half epochs that never stops."""
    return steps_of(toy, tmp_path_factory.mktemp("runs") / "whole")


@pytest.mark.parametrize("last", unless_short([LAST - 1, LAST, LAST + 1, 2 * LAST], lambda n: n == LAST))
def test_a_run_killed_around_the_end_of_an_epoch_goes_on_with_the_same_data(last, toy, whole, tmp_path):
    """It stops in step `last`; then a process resumes from the step before, as after a kill, and stops again
    one step later; and the next process, the second resume in an epoch, does the rest."""
    first = steps_of(toy, tmp_path, plan={last: signal.SIGTERM}, code=85)
    assert first == whole[:last]
    killed = f"--resume={tmp_path}/step_{last - 1:06d}"
    second = steps_of(toy, tmp_path, killed, plan={last + 1: signal.SIGTERM}, code=85)
    assert second == whole[last - 1:last + 1]
    assert steps_of(toy, tmp_path, "--resume=auto") == whole[last + 1:]
    assert len({step["data"] for step in whole}) == 10  # each step of each epoch has data of its own


@pytest.mark.parametrize("name", RESUMES)
def test_a_peers_fault_of_a_resume_is_caught(name, toy, whole, tmp_path):
    steps_of(toy, tmp_path, plan={LAST: signal.SIGTERM}, code=85)
    assert steps_of(toy, tmp_path, "--resume=auto", faults=[RESUMES[name]]) != whole[LAST:]


@pytest.mark.parametrize("name", SECOND_RESUMES)
def test_a_peers_fault_of_a_second_resume_is_caught(name, toy, whole, tmp_path):
    steps_of(toy, tmp_path, plan={1: signal.SIGTERM}, code=85)
    second = steps_of(toy, tmp_path, "--resume=auto", plan={2: signal.SIGTERM}, code=85,
                      faults=[SECOND_RESUMES[name]])
    assert second == whole[1:2]  # the fault does not show before the next resume
    assert steps_of(toy, tmp_path, "--resume=auto") != whole[2:]


# -----------------------------------------------------------------------------
# The scale of an fp16 loss

def scale_of_this_rank(original, optimizer, not_finite):
    """Optimizer.update_loss_scale that looks at the gradients of this rank alone."""
    is_refused = ~torch.isfinite(ours.local_norm(optimizer))
    original(optimizer, is_refused.to(not_finite.dtype))


OVERFLOWS = {
    "fairseq2 #1374: each rank of tp has its own loss scale": (
        "optim.Optimizer.update_loss_scale", scale_of_this_rank),
}


def fp16_steps(out, *faults):
    """Train 4 steps over tp 2; the last rank's gradient is not finite in step 2. Return each rank's steps."""
    argv = [*TINY, "--tp=2", "--dtype=fp16", "--steps=4", f"--out={out}"]
    results = run_ranks(2, with_faults, faults, session, argv, {2: "nan"})
    assert [result["code"] for result in results] == [0, 0], results[0]["err"] + results[0]["out"]
    return [result["steps"] for result in results]


@pytest.mark.parametrize("name", OVERFLOWS)
def test_a_peers_fault_of_an_overflow_is_caught(name, tmp_path):
    want = fp16_steps(tmp_path / "right")
    assert want == fp16_steps(tmp_path / "again") and len(want[0]) == 4
    assert want != fp16_steps(tmp_path / "wrong", OVERFLOWS[name])
