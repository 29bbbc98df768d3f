"""The step as a CUDA graph, on a CPU: capturing runs the step, a replay runs it again on the captured inputs.
What a real graph adds is tested by bench/gpu_matrix.py.
"""
import contextlib
import dataclasses
from unittest import mock

import pytest
import torch
from pool import run_ranks
from runs import TINY, rows, same, session
from shared import CapturedStreams, Masked, SharedBuffer, parameters

import ddp
import train
from config import Config
from corpus.samples import Synthetic, micro_batches, trained_tokens
from fast import buckets, choose, graph, symm_mem
from fast.graph import WARMUP_STEPS, DeferredGather, GraphedStep
from parallel import make_mesh
from runtime.launch import World

MOE = ["--n-experts=4", "--top-k=1", "--aux-coef=0.01", "--ep=2"]


class DefaultGenerator:
    """The default generator of a GPU. What it draws is drawn by the CPU's.

    registered: the states that the graph being captured may use.
    """

    def __init__(self):
        self.registered = []
        self.capturing = False

    def graphsafe_get_state(self):
        return torch.default_generator.clone_state()

    def graphsafe_set_state(self, generator):
        assert not self.capturing or generator in self.registered
        torch.default_generator.set_state(generator.get_state())

    def register(self, generator):
        assert not self.capturing
        self.registered.append(generator)


class EmulatedStep(GraphedStep):
    """A GraphedStep whose replays run the step again, on the captured inputs."""
    latest = None  # the one that was made last

    def __init__(self, *args):
        super().__init__(*args)
        EmulatedStep.latest = self

    def replay(self, generator):
        states = iter(generator.registered)
        buckets = self.data_parallel.buckets
        before = [bucket.grad_total for bucket in buckets]
        self.output = self.body(self.inputs, 0, self.n_trained,
                                lambda _: generator.graphsafe_set_state(next(states)))
        assert next(states, None) is None, "every micro-batch draws from its own generator"
        for bucket, captured, held in zip(buckets, self.grad_totals, before, strict=True):
            if captured is not bucket.grad_total:  # A replay writes where the capture wrote,
                captured.copy_(bucket.grad_total)
            bucket.grad_total = held  # and it runs no Python.


@contextlib.contextmanager
def graphs_on_a_cpu(seen):
    """Give CPU tensors torch.cuda's graphs, and the copies between GPUs torch.cuda's streams.

    seen: counts captures and replays.
    """
    if torch.cuda.is_available():
        torch.cuda.init()  # It sets default_generators, which would be set back below.
    streams = CapturedStreams()
    generator = DefaultGenerator()

    def replay():
        seen["replays"] += 1
        EmulatedStep.latest.replay(generator)

    def new_graph():
        generator.registered = []
        return mock.Mock(replay=replay, register_generator_state=generator.register)

    @contextlib.contextmanager
    def capture(_):
        seen["captures"] += 1
        generator.capturing = True
        with streams.captured():
            yield
        generator.capturing = False

    patches = [(choose, "static_shapes", lambda *_: True), (symm_mem, "SymmetricBuffer", SharedBuffer),
               (buckets, "SymmetricBuffer", SharedBuffer), (buckets, "stream_module", lambda device: streams),
               (graph, "GraphedStep", EmulatedStep),
               (torch.cuda, "graph", capture), (torch.cuda, "CUDAGraph", new_graph),
               (torch.cuda, "default_generators",
                {None: generator, **dict(enumerate(torch.cuda.default_generators))}),
               (torch.cuda, "synchronize", lambda: None),
               (torch.cuda, "is_current_stream_capturing", lambda: generator.capturing)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(EmulatedStep, "latest", None))
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield


def graphed_session(world, argv):
    seen = {"captures": 0, "replays": 0}
    with graphs_on_a_cpu(seen):
        return session(world, argv), seen


@pytest.mark.parametrize("flags", [
    [], ["--zero=1", "--ep-slack=1", *MOE], pytest.param(["--zero=1"], marks=pytest.mark.long),
    pytest.param(["--zero=1", *MOE], marks=pytest.mark.long)],
    ids=["ddp", "experts-that-overflow", "zero1", "experts"])
def test_a_run_with_a_graph_is_the_run_without(flags, tmp_path):
    """Logged every step, evaluated, checked, saved, a range skipped, resumed: weights, moments, every row."""
    common = [*TINY, "--lr=1e-3", *flags, "--eval-every=3", "--eval-iters=2", "--check-every=2",
              "--save-every=6", "--decay-steps=14", "--train-range-to-skip", "8", "9", "--out"]
    plain = run_ranks(2, session, [*common, str(tmp_path / "plain"), "--steps=14"])
    assert [r["code"] for r in plain] == [0, 0], plain[0]["err"]
    for steps, more in ((6, []), (14, ["--resume=auto"])):  # 14: two are skipped
        argv = [*common, str(tmp_path / "graph"), f"--steps={steps}", *more]
        for result, seen in run_ranks(2, graphed_session, argv):
            assert result["code"] == 0, result["err"]
            if "--ep-slack=1" not in flags:
                assert seen == {"captures": 1, "replays": 6 - WARMUP_STEPS}
    same(tmp_path / "plain", tmp_path / "graph", 14)
    assert rows(tmp_path / "plain") == rows(tmp_path / "graph")


# -----------------------------------------------------------------------------
# The two steps side by side

SMALL = dict(n_layer=2, n_head=2, n_kv_head=1, n_embd=16, ffn_hidden=32, seq_len=16, vocab_size=100,
             micro_batch=2, lr=1e-2, warmup=0, steps=20, weight_decay=0.1, eval_iters=2)
ACCUMULATED = dict(SMALL, dropout=0.2, global_batch=12)  # three micro-batches on each of two ranks
EXPERTS = dict(SMALL, n_experts=4, top_k=2, aux_coef=0.01, ep=2)
# The flags of today's models, in as few runs as hold all of them. A window goes through a mask here.
FORMS = {
    "head-norms-softcap-scaled-rotation": dict(
        SMALL, zero=1, qk_norm="head", mlp="relu2", logit_softcap=0.5, rope_scaling=(4.0, 0.5, 2.0, 8.0),
        window=5, full_every=2, no_rope_every=2),
    "norms-of-all-heads-after-tp2": dict(
        SMALL, tp=2, qk_norm="all", norm_place="after", qkv_bias=True, logit_softcap=0.5, recompute="full"),
    "four-norms": dict(
        SMALL, zero=1, norm="rms1p", mlp="geglu", norm_place="both", qk_norm="head", embed_scale=True,
        window=5, full_every=2, window_rope_base=20.0, tied=True, recompute="selective"),
    "experts-norms-after": dict(EXPERTS, zero=1, qk_norm="all", norm_place="after", mlp="relu2"),
}
FLAGS = {
    "ddp-dropout": ACCUMULATED, "zero1-recompute": dict(SMALL, zero=1, recompute="full"),
    "zero1-tp2-dropout": dict(ACCUMULATED, zero=1, tp=2, global_batch=6),
    "experts-accumulated": dict(EXPERTS, global_batch=8),
    "experts-zero1-recompute": dict(EXPERTS, zero=1, recompute="full"),
    "experts-cp2-zero1-dropout": dict(EXPERTS, cp=2, zero=1, dropout=0.2),
    "experts-that-overflow-dropout": dict(EXPERTS, zero=1, dropout=0.2, ep_slack=1.0), **FORMS}
STEPS = 7  # without a graph, captured, and replayed


def take_steps(world, flags, graphed, evaluated=(), kind=Synthetic):
    """Take STEPS steps on the same batches, graphed or plain, without waiting for weights in between.

    evaluated: the steps right after which the validation loss is computed.

    Return the StepStats and refused of each step; the validation losses; the final weights of the whole
    model, masters and moments; and the path of each step.
    """
    cfg, seen, device = Config(**flags), {"captures": 0, "replays": 0}, torch.device("cpu")
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, cp=cfg.cp, shard=cfg.shard)
    data, val_data = (kind(cfg.vocab_size, cfg.seq_len, seed) for seed in (0, 1))
    batch = cfg.global_batch or cfg.micro_batch * mesh.dp.size
    with graphs_on_a_cpu(seen) if graphed else contextlib.nullcontext():
        choice = choose.choose(cfg, mesh, device)
        model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, device, choice=choice)
        step = graph.make_step(train.Step(cfg, model, data_parallel, opt), choice)
        assert isinstance(step, GraphedStep) == graphed
        results, val_losses, paths = [], [], []
        for number in range(1, STEPS + 1):
            batches = micro_batches(cfg, mesh, data, (number - 1) * batch, batch, device)
            tokens = trained_tokens(data, (number - 1) * batch, batch, device)
            stats, refused = step(batches, number, n_trained=tokens)
            results.append((*torch.stack(stats).tolist(), refused.item()))
            paths.append(getattr(step, "path", None))
            outside = getattr(step, "eager_buckets", ())  # their weights travel before the graph begins
            deferred = [isinstance(b.gather_handle, DeferredGather)
                        for b in data_parallel.buckets if b.n_slices > 1 and b not in outside]
            assert bool(deferred) == bool(cfg.zero) and set(deferred) <= {graphed}
            if number in evaluated:
                val_losses.append(train.evaluate(cfg, model, val_data, batch, device))
        model.provide_weights(model)
    moments = [opt.adam.state[m][k] for m in opt.masters for k in ("exp_avg", "exp_avg_sq")]
    moments.append(opt.adam.step_count)
    weights = [p.detach() for p in model.parameters()]
    return results, val_losses, [[t.numpy().copy() for t in tensors] for tensors in
                                 (weights, opt.masters, moments)], paths


def same_bits(a, b):
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", parameters(FLAGS, [
    "ddp-dropout", "zero1-tp2-dropout", "experts-zero1-recompute", "experts-that-overflow-dropout",
    "four-norms"]))
def test_both_steps_give_the_same_bits(name):
    assert_same_bits(2, FLAGS[name])


def assert_same_bits(n, flags, kind=Synthetic, take=None, take_plain=None):
    """Compare loss, norms, weights, masters and moments of the plain step and of the graphed one on n ranks.

    take, take_plain: what takes the graphed and the plain steps, take_steps() by default. Return the paths of
    the graphed ones, alike on all ranks.
    """
    plain = run_ranks(n, take_plain or take_steps, flags, False, (), kind)
    graphed = run_ranks(n, take or take_steps, flags, True, (), kind)
    for (results, _, tensors, _), (expected, _, want, _) in zip(graphed, plain, strict=True):
        assert results == expected
        for got_tensors, want_tensors in zip(tensors, want, strict=True):
            assert same_bits(got_tensors, want_tensors)
    [paths] = {tuple(paths) for *_, paths in graphed}
    assert "graph" in paths[WARMUP_STEPS:]
    losses = [row[0] for row in plain[0][0]]
    assert len(set(losses)) == STEPS, "a step that changes nothing proves nothing"
    return paths


class Crowded(Synthetic):
    """Synthetic samples; those of step PLANTED are one token, which goes to one expert."""
    PLANTED = 6
    batch_size = 8

    def batch(self, first, n):
        if first // self.batch_size == self.PLANTED - 1:
            return torch.full((n, self.seq_len), 7), torch.full((n, self.seq_len), 7)
        return super().batch(first, n)


class CrowdedOver8(Crowded):
    batch_size = 16


def through_messages(*args):
    with mock.patch.object(choose, "peer_access", lambda *_: False):
        return take_steps(*args)


def in_small_buckets(*args):
    with mock.patch.dict(ddp.DataParallel.__init__.__kwdefaults__, bucket_elements=1):
        return take_steps(*args)


def in_lone_buckets(*args):
    """The same, where no rank adds anything to gradients. After a void step the buffers stay as they are, as
    they do if the loss was not finite but no buffer overflowed."""
    real_choose = choose.choose
    real_resize = graph.BufferSizer.resize
    made = []

    def resize(sizer, overflowed):
        return not overflowed and real_resize(sizer, overflowed)

    def choose_single(*arguments):
        return real_choose(*arguments)._replace(single_microbatch=True)

    class Counted(buckets.LoneBucket):
        def reset(self):
            super().reset()
            made.append(self.names)

    with contextlib.ExitStack() as stack:
        for patch in ((choose, "choose", choose_single), (choose, "LoneBucket", Counted),
                      (graph.BufferSizer, "resize", resize)):
            stack.enter_context(mock.patch.object(*patch))
        result = in_small_buckets(*args)
    experts = [names for names in made if "moe.w" in names[0]]
    assert experts and all(len(names) == 1 for names in made)
    return result


def with_a_guard(*args):
    """In lone buckets, where the host reads the loss before each update, as with --skip-spikes."""
    with mock.patch.object(GraphedStep, "host_looks_first", lambda *_: True):
        return in_lone_buckets(*args)


def through_peer_copies(world, *args):
    """In small buckets, whose gradients and weights are copied between the ranks."""
    real_choose = choose.choose
    copy_streams = []

    def choose_copies(*arguments):
        return real_choose(*arguments)._replace(peer_copies=True, single_microbatch=True)

    class Listed(buckets.CopyStream):
        def __init__(self, device):
            super().__init__(device)
            copy_streams.append(self)
    buckets.copy_stream.cache_clear()
    with mock.patch.object(choose, "choose", choose_copies), mock.patch.object(buckets, "CopyStream", Listed):
        result = in_small_buckets(world, *args)
    buckets.copy_stream.cache_clear()
    [copies] = copy_streams
    assert copies.stream.work > 0
    return result


@pytest.mark.parametrize("n, flags", [
    (2, dict(SMALL, zero=1)), (4, dict(SMALL, zero=1, shard=2)),
    pytest.param(2, dict(EXPERTS, zero=1), marks=pytest.mark.long)], ids=["all", "shard-2", "experts"])
def test_copies_between_gpus_are_captured(n, flags):
    """Also with --shard, where NCCL sums what the copies have brought."""
    assert_same_bits(n, flags, take=through_peer_copies, take_plain=in_small_buckets)


BEFORE = ("plain",) * WARMUP_STEPS + ("graph", "graph")  # the steps before Crowded.PLANTED
UNEVEN = dict(EXPERTS, top_k=1, ep=4, zero=1, ep_slack=3.0)


@pytest.mark.parametrize("n, flags, kind, take", [
    (4, UNEVEN, Crowded, None), pytest.param(4, UNEVEN, Crowded, through_messages, marks=pytest.mark.long),
    pytest.param(8, dict(EXPERTS, n_experts=8, top_k=1, ep=8, ep_slack=2.5), CrowdedOver8, None,
                 marks=pytest.mark.long)], ids=["ep4", "between-nodes", "ep8"])
def test_one_step_of_uneven_routing_keeps_the_graph(n, flags, kind, take):
    """All rows of a step go to one rank, over --ep-slack. That step alone is done again, with the bits of the
    plain step, and the buffers grow."""
    assert assert_same_bits(n, flags, kind, take) == (*BEFORE, "redone", "graph")


@pytest.mark.parametrize("take", [in_lone_buckets, pytest.param(with_a_guard, marks=pytest.mark.long)])
def test_gradients_that_are_not_copied_give_the_same_bits(take):
    """The optimizer reads the experts' gradients where backward, or the graph, wrote them. After
    a plain step the graph is captured again, and writes elsewhere."""
    assert assert_same_bits(4, UNEVEN, Crowded, take, in_small_buckets) == (*BEFORE, "redone", "graph")


def test_a_replay_divides_by_its_own_number_of_trained_tokens():
    assert_same_bits(2, ACCUMULATED, Masked)


@pytest.mark.parametrize("flags", [
    dict(SMALL, zero=1), pytest.param(dict(EXPERTS, zero=1, ep=1), marks=pytest.mark.long)],
    ids=["dense", "experts"])
def test_no_reader_sees_stale_weights(flags):
    """ZeRO-1 with gathers that wait for the next captured step: an evaluation right after a step reads the
    new weights of all ranks, and after wait_weights all replicas are equal."""
    evaluated = (2, 5, STEPS)  # after a step without a graph, after replays, after the last one
    plain, graphed, quiet = (run_ranks(2, take_steps, flags, yes, when) for yes, when in
                             ((False, evaluated), (True, evaluated), (True, ())))
    for (_, val_losses, *_), (_, expected, *_) in zip(graphed, plain, strict=True):
        assert val_losses == expected and len(set(expected)) == len(evaluated)
    for ranks in (graphed, quiet):  # quiet: nothing but the last wait reads the last weights
        (_, _, (weights, *_), _), (_, _, (others, *_), _) = ranks
        assert same_bits(weights, others) and same_bits(weights, plain[0][2][0])


@pytest.mark.parametrize("flags", [
    {}, dict(n_experts=4, ep=2, zero=1), dict(n_experts=4, capacity_factor=1.0)])
def test_dropout_and_recompute_each_have_a_cuda_graph_but_not_both(flags, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))  # it asks the driver
    plain = Config(n_layer=2, n_head=2, n_embd=64, ffn_hidden=64, vocab_size=100, dtype="bf16", **flags)
    mesh = make_mesh(World(rank=0, size=2), ep=plain.ep, groups=False)
    for change, has_graph in (
            ({}, True), (dict(dropout=0.5), True), (dict(recompute="full"), True),
            (dict(global_batch=64), True), (dict(dropout=1e-6, recompute="full"), False),
            (dict(timers=True), False), (dict(cuda_graph=False), False)):
        cfg = dataclasses.replace(plain, **change)
        choice = choose.choose(cfg, mesh, torch.device("cuda:0"), reach=lambda *_: True)
        assert choice.graph == has_graph and (has_graph or not choice.symm_mem), change
    assert not choose.choose(plain, mesh, torch.device("cpu"), reach=lambda *_: True).graph
