"""Small behaviours in which a mutant (mutants.py) of the code was noticed by no other test."""
import collections
import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pool import ROOT

import checkpoint
import config
import model as model_
import moe
import plan
import plot
import prepare
import skip
import train
from config import Config
from corpus import text
from cost.fits import larger_zero
from cost.idle import pipeline_warnings, width_warnings
from cost.meshes import stage_mesh
from fast import choose, graph
from fast.choose import Choice
from fast.graph import BufferSizer, GraphedStep
from fast.host_buffers import HostBuffers
from interface import files, nearest, paths
from interface.layout import balanced_counts
from interface.tensor_file import safetensors_header
from ops import checksum, grouped_mm, permute, tiles
from optim import Optimizer
from parallel import Axis, CompletedWork, make_mesh
from pipeline import Op, Ring
from runtime import agree, launcher, log, progress, resume, session, timing
from runtime.launch import World
from zero import SlotBucket

ONE = World()


# -----------------------------------------------------------------------------
# Skipping and giving up

def test_the_first_step_can_be_skipped():
    assert skip.Ranges([1, 1]).pairs == [(1, 1)]


def test_a_run_that_gave_up_names_a_checkpoint_from_a_hundred_steps_before(tmp_path):
    paths = [tmp_path / f"step_{step:06d}" for step in (250, 200, 100)]
    assert f"--resume {paths[1]} " in skip.give_up_message(paths, 300, 310, "spike", 1000)
    assert f"--resume {paths[2]} " in skip.give_up_message(paths, 299, 310, "spike", 1000)
    assert f"--resume {paths[0]} " in skip.give_up_message(paths[:1], 299, 310, "spike", 1000)
    assert "without --init-from" not in skip.give_up_message(paths, 300, 310, "spike", 1000)
    assert (f"command without --init-from and with --resume {paths[1]} "
            in skip.give_up_message(paths, 300, 310, "spike", 1000, "out/base"))


def test_ranges_that_overlap_are_one():
    assert skip.Ranges([1, 10, 2, 5]).pairs == [(1, 10)]
    assert skip.Ranges([2, 5, 1, 3, 6, 7, 9, 9]).pairs == [(1, 7), (9, 9)]


def test_a_spike_of_another_rank_is_one_here():
    tree = SimpleNamespace(any=lambda found: True)
    state = SimpleNamespace(window=[])
    guard = skip.Guard(Config(skip_spikes=6.0), SimpleNamespace(tree=tree), state)
    stats = [torch.tensor(1.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)]
    assert guard.veto(stats) and guard.reason == "spike: seen by another rank" and not state.window


def test_the_window_of_the_guard_keeps_the_last_steps():
    tree = SimpleNamespace(any=lambda found: found)
    state = SimpleNamespace(window=[(1.0, float(i)) for i in range(skip.WINDOW)])
    guard = skip.Guard(Config(skip_spikes=1e9), SimpleNamespace(tree=tree), state)
    assert not guard.veto([torch.tensor(1.0, dtype=torch.float64), torch.tensor(999.0, dtype=torch.float64)])
    assert [norm for _, norm in state.window] == [*map(float, range(1, skip.WINDOW)), 999.0]


def test_targets_that_take_no_part_stay_so_in_a_planted_spike():
    x, y = torch.ones(1, 3), torch.tensor([[5, -100, 0]])
    assert skip.corrupt_targets([(x, y)])[0][1].tolist() == [[0, -100, 0]]


@pytest.mark.parametrize("sigma,waits", [(0, False), (0.5, True), (6, True)])
def test_an_update_waits_for_the_host_if_a_guard_may_veto_it(sigma, waits):
    opt = SimpleNamespace(loss_scale=None, before_update=[])
    step = SimpleNamespace(plain=SimpleNamespace(opt=opt))
    assert GraphedStep.host_looks_first(step, SimpleNamespace(sigma=sigma)) == waits
    assert not GraphedStep.host_looks_first(step, None)
    opt.before_update.append(print)  # --dump-grads writes a file, which a void step would write twice
    assert GraphedStep.host_looks_first(step, None)


# -----------------------------------------------------------------------------
# Texts and data

def test_each_line_belongs_to_one_span_wherever_a_file_is_cut(tmp_path):
    path = tmp_path / "a.txt"
    whole = b"a\n\n\nbc\n\nd\n"
    path.write_bytes(whole)
    for cut in range(1, len(whole)):
        spans = [SimpleNamespace(path=path, start=0, stop=cut),
                 SimpleNamespace(path=path, start=cut, stop=len(whole))]
        lines = [line for span in spans for line in text.plain_lines(span, pytest.fail)]
        assert b"".join(line for _, line in lines) == whole
        assert [at for at, _ in lines] == [0, 2, 3, 4, 7, 8]


def test_a_shard_is_on_the_disk_when_it_is_named(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    stream = SimpleNamespace(take=lambda n: [np.arange(n, dtype=np.uint16)])
    prepare.write_shard(tmp_path / "train_00000.bin", np.uint16, stream, 5)
    assert synced == [4096 + 5 * 2]


@pytest.mark.parametrize("length", range(1, 9))
def test_the_header_of_a_tensor_file_is_padded_to_eight_bytes(length):
    tensor = torch.zeros(2, 3)
    header = safetensors_header({"a" * length: tensor}, {})
    assert len(header) % 8 == 0
    assert json.loads(header) == {"a" * length: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    assert len(header.rstrip()) > len(header) - 8


def test_a_tensor_is_read_in_blocks_of_rows():
    reader = checkpoint.Reader.__new__(checkpoint.Reader)
    reader.index = {"tensors": {"vector": {"shape": [10], "dtype": "float32"},
                                "matrix": {"shape": [4, 3], "dtype": "float32"},
                                "nothing": {"shape": [3, 0], "dtype": "float32"}}}
    reader.fill = lambda name, block, full, at: None
    assert [(at, len(block)) for at, block in reader.blocks("vector", 4)] == [(0, 4), (4, 4), (8, 2)]
    assert [(at, list(block.shape)) for at, block in reader.blocks("matrix", 7)] == [(0, [2, 3]), (6, [2, 3])]
    assert [tuple(block.shape) for _, block in reader.blocks("nothing")] == [(3, 0)]


def test_a_seed_has_63_bits():
    config.check(Config(seed=2**63 - 1))
    with pytest.raises(ValueError, match="--seed"):
        config.check(Config(seed=2**63))


# -----------------------------------------------------------------------------
# The planner

def test_the_share_of_the_peak_follows_from_the_rate(capsys):
    plan.main(["tiny", "--gpus", "2", "--pp", "2", "--json", "--data", "synthetic"])
    row = json.loads(capsys.readouterr().out)
    peak = row["flops"]["full"] / row["ms"] * 1e3 / 2 / row["mfu"]
    assert peak == pytest.approx(row["tflops"] * 1e12 / row["mfu"])
    assert 5e13 < peak < 5e15


@pytest.mark.parametrize("pp,drawn", [(1, False), (2, True)])
def test_a_plan_of_several_stages_draws_their_schedule(pp, drawn, capsys):
    plan.main(["tiny", "--gpus", "2", f"--pp={pp}", "--data", "synthetic"])
    assert ("F0" in capsys.readouterr().out) == drawn


def test_the_planner_is_a_program():
    job = subprocess.run([sys.executable, "plan.py", "tiny", "--data=synthetic", "--json"], check=True,
                         cwd=plan.__file__.removesuffix("plan.py"), capture_output=True, text=True)
    assert json.loads(job.stdout)["fits"]


def test_a_masked_model_has_one_symbol_more():
    assert plan.vocabulary(Config(data="synthetic")) == 256
    assert plan.vocabulary(Config(data="synthetic", objective="mlm")) == 257


def test_a_masked_model_of_prepared_data_has_one_symbol_more(monkeypatch):
    monkeypatch.setattr(plan, "load_blend_meta", lambda data: {"vocab_size": 1000})
    assert plan.vocabulary(Config(data="x")) == 1000
    assert plan.vocabulary(Config(data="x", objective="mlm")) == 1001


def test_a_flag_that_the_planner_does_not_count_is_named(monkeypatch, capsys):
    monkeypatch.setattr(plan, "COUNTED", ("n_layer",))
    plan.main(["tiny", "--data", "synthetic", "--norm", "layer", "--json"])
    assert "plan.py does not count what --norm layer costs" in capsys.readouterr().err


@pytest.mark.parametrize("replicas,zero,shard,pp,said", [
    (1, 0, 0, 1, ""), (2, 0, 0, 1, "--zero 1, "), (2, 1, 0, 1, "--zero 3, "), (2, 1, 0, 2, ""),
    (2, 3, 0, 1, ""), (4, 3, 2, 1, "a larger --shard, "), (4, 3, 4, 1, "")])
def test_a_model_that_does_not_fit_is_told_of_a_larger_zero(replicas, zero, shard, pp, said):
    mesh = SimpleNamespace(dpcp=SimpleNamespace(size=replicas), pp=SimpleNamespace(size=pp))
    assert larger_zero(Config(zero=zero, shard=shard), mesh) == said


def test_stages_of_unequal_work_are_named():
    cfg = Config(n_layer=4, pp=2, micro_batch=1, global_batch=64)
    mesh = stage_mesh(cfg, 2, 0)
    assert not pipeline_warnings(cfg, mesh, [10.0, 10.2])
    assert "1.33 times the mean (10, 20 ms)" in pipeline_warnings(cfg, mesh, [10.0, 20.0])[0]


@pytest.mark.parametrize("width,multiple", [(256, 0), (192, 128), (160, 64), (132, 8)])
def test_widths_that_a_kernel_does_not_like_are_named(width, multiple):
    said = width_warnings(Config(n_embd=width, n_head=1, ffn_hidden=512))
    said = [line for line in said if "n-embd" in line]
    assert len(said) == bool(multiple)
    for line in said:
        assert line.startswith(f"n-embd is {width}, no multiple of {multiple}")


# -----------------------------------------------------------------------------
# What a run leaves

def test_the_heaviest_layer_of_an_expert():
    said = plot.load_bars({"0": {"load": [0.5, 0.5]}, "1": {"load": [0.1, 0.9]}})
    assert "expert   0" in said and "0.60  (heaviest layer 1.00)" in said
    assert "1.40  (heaviest layer 1.80)" in said


def test_plots_can_begin_at_step_0():
    assert plot.read_flags(["run", "--steps", "0", "5"]).steps == (0, 5)


def test_a_folder_that_cannot_be_read_is_left_out_of_the_table(tmp_path, monkeypatch):
    def is_run(path):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(paths, "is_run", is_run)
    table, left_out = plot.table_of_runs(tmp_path)
    assert not table and left_out[-1] == "closed is left out: Permission denied"


def test_a_run_has_metrics_or_a_checkpoint(tmp_path):
    (tmp_path / "config.json").touch()  # as a model of Hugging Face has
    (tmp_path / "a/step_000001").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").mkdir()
    assert [paths.is_run(tmp_path / name) for name in ("none", "a/step_000001", "a", "")] == [0, 0, 1, 1]


def test_a_picture_is_written_by_matplotlib(tmp_path, monkeypatch):
    said = []

    class Figure:
        def __init__(self, figsize, layout):
            said.append(figsize)

        def subplots(self, n, squeeze):
            axes = SimpleNamespace(plot=lambda *args, **named: said.append((*args, *named.values())),
                                   set=lambda **named: said.append(tuple(named.values())),
                                   legend=lambda **named: None)
            return np.array([[axes]] * n, dtype=object)

        def savefig(self, path, format):
            path.write_text(f"drawn as {format}")

    module = SimpleNamespace(Figure=Figure)
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(figure=module))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    found = {"loss": [("loss", "", [(1, 2.0)]), ("val_loss", "x", [(2, 3.0)])], "lr": [("lr", "", [])]}
    plot.picture(found, tmp_path / "a.svg", True)
    assert (tmp_path / "a.svg").read_text() == "drawn as svg"
    assert said == [(9, 8), ([1], [2.0], "-", "loss"), ([2], [3.0], "x", "val_loss"), ("loss", "step", "log"),
                    ([], [], "-", "lr"), ("lr", "step", "log")]


def test_a_prompt_is_continued_on_rank_0_only(monkeypatch, capsys):
    tokenizer = SimpleNamespace(encode=lambda text: [len(text)], decode=lambda ids: f"text of {ids}")
    monkeypatch.setattr(log, "generate", lambda model, ids, **named: [*ids, named["max_new_tokens"]])
    for rank, said in ((1, ""), (0, "--- text of [3, 100]\n---\n")):
        model = SimpleNamespace(mesh=SimpleNamespace(world=SimpleNamespace(rank=rank)))
        log.print_sample(model, tokenizer, "abc", 1)
        assert capsys.readouterr().out == said


def test_a_dump_of_gradients_has_no_padding_and_leaves_no_parts(tmp_path):
    rows = {"wte.weight": torch.zeros(256, 4), "grad/wte.weight": torch.ones(256, 4),
            "norm.weight": torch.ones(256)}
    parts = tmp_path / "parts"
    checkpoint.write_part(parts / "step_000001.tmp", 0, [(name, x, x.shape, (0,) * x.ndim)
                                                         for name, x in rows.items()])
    checkpoint.commit(parts / "step_000001.tmp", 1, {}, checkpoint.Writers(size=1))
    path = tmp_path / "grads.safetensors"
    resume.write_full(parts, path, 200)
    from safetensors.torch import load_file
    assert {name: len(x) for name, x in load_file(path).items()} == {
        "wte.weight": 200, "grad/wte.weight": 200, "norm.weight": 256}


def test_a_dump_of_gradients_is_one_file(tmp_path, monkeypatch):
    x = torch.ones(2, 3)
    monkeypatch.setattr(resume, "own_pieces", lambda *args: [("w", x, x.shape, (0, 0))])
    opt = SimpleNamespace(masters=[], grads=[])
    resume.dump_grads(tmp_path / "grads.safetensors", ONE, None, opt, 200)
    assert [path.name for path in tmp_path.iterdir()] == ["grads.safetensors"]


@pytest.mark.parametrize("mode,timeout,waits", [
    ("auto", 6.0, 3.0), ("auto", 1e6, files.LOCK_WAIT), ("none", 6.0, 0)])
def test_only_a_run_that_goes_on_waits_for_the_lock(mode, timeout, waits, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(files, "lock", lambda out, wait, job: seen.append(wait))
    resume.prepare_out_dir(Config(resume=mode, timeout=timeout), World(), tmp_path / "run")
    assert seen == [waits]


def test_a_resume_names_the_later_checkpoints_that_it_moves(tmp_path, capsys, monkeypatch):
    for moved, said in (([], ""), (["a", "b"], "going on from X: later checkpoints are now a, b\n")):
        monkeypatch.setattr(checkpoint, "archive_later", lambda out, step, moved=moved: moved)
        resume.set_aside(Config(resume="auto"), tmp_path, SimpleNamespace(step=3), "X")
        assert capsys.readouterr().out == said


def test_a_missing_checkpoint_is_named_before_anything_is_read(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(checkpoint, "read_index", asked.append)
    monkeypatch.setattr(resume, "check_together", lambda *args: None)
    path = str(tmp_path / "step_000001")
    assert str(resume.find_checkpoint(Config(resume=path), World(), tmp_path)) == path
    assert asked == [path]


def test_a_dense_mlp_becomes_every_expert(monkeypatch):
    own = torch.zeros(2, 3, 4)
    piece = ("blocks.0.moe.w1", own, (8, 6, 4), (2, 3, 0))
    monkeypatch.setattr(resume, "own_pieces", lambda *args, **named: [piece])
    opt = SimpleNamespace(data_parallel=None, masters=None)
    found = resume.weights_to_read(opt, 256, upcycles=True)
    assert [(name, list(part.shape), full, where) for name, part, full, where in found] == [
        ("blocks.0.mlp.w1.weight", [3, 4], (6, 4), (3, 0))] * 2


def test_the_file_stop_is_looked_for_again_after_a_whole_second(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stop = agree.Stop(2.0)
    stop.watch_file(tmp_path)
    assert stop.poll(World()) is None
    (tmp_path / "stop").touch()
    now[0] = 100.0 + agree.LOOK_EVERY
    assert stop.poll(World()) == "the file stop"
    (tmp_path / "stop").unlink()
    assert stop.poll(World()) == "the file stop"  # once asked for, it stays


def test_a_run_stops_before_its_minutes_have_passed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stop = agree.Stop(2.0)
    now[0] = 219.9
    assert stop.poll(World()) is None
    now[0] = 220.1
    assert stop.poll(World()) == "max-minutes"


def test_a_stopwatch_of_a_gpu_has_events_that_know_the_time(monkeypatch):
    made = []

    class Event:
        def __init__(self, device, **flags):
            made.append((device.type, flags))

        def record(self):
            made.append("recorded")
    monkeypatch.setattr(torch, "Event", Event)
    timing.Stopwatch(torch.device("cuda", 0)).mark()
    assert made == [("cuda", {"enable_timing": True}), "recorded"]


def test_a_run_that_was_moved_aside_names_its_last_step(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in (1, 20, 40)))
    assert files.move_aside(out).name.endswith("_step40")


def test_a_run_without_a_history_begins_at_step_0(tmp_path):
    (tmp_path / "config.json").write_text('{"seed": 1}')
    log.Log(tmp_path, {"seed": 2}, resumed=30)
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [(row["step"], row["config"]["seed"]) for row in rows] == [(0, 1), (30, 2)]


# -----------------------------------------------------------------------------
# Ranks and kernels

def test_a_message_to_a_neighbour_is_recorded_with_its_bytes(monkeypatch):
    sent = []
    calls = SimpleNamespace(record=lambda kind, name, tensor: sent.append((kind, name)))
    axis = Axis("pp", rank=0, size=2, ranks=(0, 7), calls=calls)
    ring = Ring.__new__(Ring)
    ring.axis, ring.n_chunks, ring.in_flight, ring.inbox = axis, 1, [], {}
    ring.like, ring.shape = torch.zeros(1), (3, 4)
    monkeypatch.setattr("pipeline.dist.P2POp", lambda operation, tensor, peer, group: peer)
    monkeypatch.setattr("pipeline.Exchange", lambda operations: operations)
    ring.start_exchange([Op("F", 0, 0), None], torch.zeros(3, 4))
    ring.start_exchange([None, Op("B", 0, 0)], None)
    assert sent == [("send", "pp"), ("receive", "pp")] and ring.in_flight == [[7], [7]]
    assert axis.sent == {"send": 48, "receive": 0}


def test_a_rank_waits_until_its_input_is_there():
    class Exchange:
        def __init__(self):
            self.is_here = False
            self.n_asked = 0

        @property
        def arrived(self):
            self.n_asked += 1
            assert self.n_asked < 9, "nobody waits for it"
            return self.is_here

        def wait(self):
            self.is_here = True

    ring = Ring.__new__(Ring)
    first, second, third = exchanges = [Exchange() for _ in range(3)]
    ring.in_flight = collections.deque(exchanges)
    ring.timers = lambda phase: contextlib.nullcontext()
    ring.inbox = {"op": ("input", second)}
    assert ring.receive("op") == "input" and ring.receive("op") is None
    assert (first.arrived, second.arrived, third.arrived) == (True, True, False)


def test_a_broadcast_comes_from_the_first_rank_of_the_axis(monkeypatch):
    asked = []
    monkeypatch.setattr("parallel.dist.broadcast", lambda x, source, group: asked.append(source))
    calls = SimpleNamespace(record=lambda *args: asked.append(args[:2]))
    axis = Axis("tp", rank=1, size=2, ranks=(4, 5), calls=calls)
    axis.broadcast(torch.zeros(3))
    assert asked == [("broadcast", "tp"), 4] and axis.sent["broadcast"] == 0
    axis.broadcast(torch.zeros(3), 1)
    assert asked[-1] == 5 and axis.sent["broadcast"] == 12


def test_a_bucket_in_which_gradients_are_missing_is_still_reduced():
    started = []
    summed = []
    bucket = SlotBucket.__new__(SlotBucket)
    bucket.contents = SimpleNamespace(params=[0, 1])
    bucket.comm = SimpleNamespace(start_replica_sum=lambda b: summed.append(b) or CompletedWork())
    bucket.reset()
    bucket.start_sum = lambda: started.append(len(bucket.missing))
    bucket.wait_grads()  # no gradient came
    bucket.on_grad_ready(1, True)
    bucket.wait_grads()  # one came
    bucket.missing, bucket.total_is_empty = {0, 1}, False
    bucket.wait_grads()  # all came before
    assert started == [2, 1] and summed == [bucket], "a step has one sum over the replicas"


def test_one_rank_dispatches_plainly_under_a_graph():
    choice = Choice(graph=True, symm_mem=False, peer_copies=False, single_microbatch=False)
    assert choice.dispatcher_maker(Config(n_experts=4)) is moe.plain_dispatcher
    assert choice.dispatcher_maker(Config(n_experts=4, ep=2)) is not moe.plain_dispatcher
    assert choice.dispatcher_maker(Config(n_experts=4, ep=2, capacity_factor=1.0)) is moe.plain_dispatcher


def test_gpus_on_which_the_library_multiplies_experts(monkeypatch):
    capability = {0: (8, 0), 1: (9, 0), 2: (10, 0), 3: (12, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[device.index])
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(grouped_mm.F, "grouped_mm", None, raising=False)
    ask = grouped_mm.has_grouped_mm.__wrapped__
    assert [ask(torch.device("cuda", i)) for i in range(4)] == [False, True, True, False]
    assert not ask(torch.device("cpu"))


def test_an_expert_without_rows_has_a_gradient_of_zero():
    w = torch.ones(1, 3, 2, requires_grad=True)
    y = grouped_mm.grouped_mm(torch.zeros(0, 2), w, torch.tensor([0]))
    y.sum().backward()
    assert y.shape == (0, 3) and w.grad.tolist() == [[[0.0, 0.0]] * 3]


def test_the_buffers_of_the_owners_are_laid_out_in_torch():
    counts = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])  # 2 ranks, 4 experts
    needed = torch.tensor(0)
    starts, ends = permute.layout_from_counts(counts, 1, 100, 12, needed)
    assert starts.tolist() == [1, 8, 103, 114] and ends.tolist() == [10, 12] and needed.item() == 22


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_checkpoint_of_any_dtype_is_refused_with_nan(dtype):
    good = ("good", torch.full((3,), 1e30, dtype=dtype), (3,), (0,))
    checksum.refuse_not_finite([good])
    bad = torch.tensor([1.0, float("nan")], dtype=dtype)
    with pytest.raises(ValueError, match="bad holds values that are not finite"):
        checksum.refuse_not_finite([good, ("bad", bad, (2,), (0,))])


@pytest.mark.parametrize("rank,stops", [(-1, []), (0, [4]), (1, [4])])
def test_the_debugger_stops_before_the_first_step(rank, stops, monkeypatch):
    """Which rank stops, and how, is test_pdb.py's."""
    stopped = []
    monkeypatch.setattr(train.debugger, "break_on_rank", lambda *args: stopped.append(run.state.step + 1))
    monkeypatch.setattr(train.session.signals, "can_save", False)
    run = train.Run.__new__(train.Run)
    run.cfg = Config(pdb=rank, steps=6)
    run.state = SimpleNamespace(step=3, samples=0)
    run.first_step = 4
    run.out, run.world = None, World(rank=1)
    run.parts = SimpleNamespace(mesh=make_mesh(ONE, groups=False))
    run.ending = SimpleNamespace(outcome=train.Outcome.DONE)
    for name in ("begin_step", "next_batches", "take_step", "log", "check_replicas", "poll_stop", "save"):
        setattr(run, name, lambda *args, **named: None)
    run.end_step = lambda number, batch: setattr(run.state, "step", number)
    run.leave = lambda profiler: "left"
    assert run.train() == "left" and stopped == stops


@pytest.mark.parametrize("wrong", [None, "--lr is wrong"])
def test_ranks_with_wrong_flags_meet_the_others_to_say_so(wrong, monkeypatch):
    def launched(timeout, quiet, joining, waits):
        raise KeyError(quiet)

    monkeypatch.setattr(train.session, "surround", contextlib.nullcontext)
    monkeypatch.setattr(train.session, "parse_flags", lambda parse, argv: (None, wrong, 5.0))
    monkeypatch.setattr(train.launch, "deterministic", lambda on: None)
    dog = SimpleNamespace(joining=None)
    monkeypatch.setattr(train.watch, "Watch", lambda rank, timeout: contextlib.nullcontext(dog))
    monkeypatch.setattr(train.launch, "launch", launched)
    with pytest.raises(KeyError) as found:
        train.main([])
    assert found.value.args == (wrong is not None,)


def test_an_update_waits_for_the_copies_of_a_save():
    waited = []
    opt = Optimizer.__new__(Optimizer)
    opt.before_update = [lambda: waited.append("function")]
    opt.snapshot_done = SimpleNamespace(wait=lambda: waited.append("event"))
    opt.divisor = lambda grad_norm: 1 / 0
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            opt.step(0.1, torch.tensor(1.0))
    assert waited == ["function", "event", "function"]


def test_one_gpu_computes_head_and_loss_in_one(monkeypatch):
    seen = []
    loss = SimpleNamespace(apply=lambda x, w, targets, n, bias: seen.append((targets.shape, n)) or x.sum())
    monkeypatch.setattr(model_, "LinearCrossEntropy", loss)
    mesh = make_mesh(ONE, groups=False)
    with torch.device("meta"):
        gpt = model_.GPT(Config(n_layer=1, seq_len=16), mesh, 256)
        tokens = torch.zeros(2, 16, dtype=torch.long)
        gpt(tokens, tokens)
    assert seen == [((32,), 256)]


def test_weights_of_another_run_become_the_models(monkeypatch):
    did = []
    index = {"meta": {"shape": {"n_experts": 0}}, "tensors": {}}
    values = {"check_together": None, "sent_index": index, "check_source": None, "count_symbols": 256,
              "weights_to_read": []}
    for name, value in values.items():
        monkeypatch.setattr(resume, name, lambda *args, value=value: value)
    monkeypatch.setattr(resume, "load_tensors", lambda *args: did.append("read"))
    model = SimpleNamespace(mesh=make_mesh(ONE), cfg=Config(), vocab_size=256)
    opt = SimpleNamespace(masters_to_model=lambda: did.append("rounded"))
    assert "fresh optimizer" in resume.init_from(model, opt, "run")
    assert did == ["read", "rounded"]


def test_the_example_of_the_experts_buffers(monkeypatch):
    """The four steps of BufferSizer's docstring."""
    monkeypatch.setattr(graph, "free_memory", lambda device: 2**30)
    sizer = BufferSizer.__new__(BufferSizer)
    sizer.world = make_mesh(ONE).world
    sizer.layers = [SimpleNamespace(w1=torch.zeros(1, 2, 3))]
    sizer.copies, sizer.ep, sizer.limit, sizer.interval = 160, 4, 2.5, 50
    sizer.slack, sizer.n_retries, sizer.n_misses, sizer.wait = 0.0, 0, 0, 1
    sizer.rows_needed = torch.tensor(200)
    assert sizer.resize(False) and sizer.rows(sizer.slack) == 224
    sizer.rows_needed.fill_(300)
    assert sizer.resize(True) and sizer.rows(sizer.slack) == 400 and sizer.n_retries == 1
    sizer.rows_needed.fill_(180)
    assert [sizer.resize(False) for _ in range(50)] == [False] * 49 + [True]
    assert sizer.rows(sizer.slack) == 200
    sizer.rows_needed.fill_(440)
    assert sizer.resize(True) and sizer.rows(sizer.slack) == 584 and sizer.limit == sizer.slack


def test_pinned_memory_comes_in_blocks(monkeypatch):
    empty = torch.empty
    made = []

    def without_gpu(n, dtype, pin_memory=False):
        made.append((n, pin_memory))
        return empty(n, dtype=dtype)

    monkeypatch.setattr(torch, "empty", without_gpu)
    buffers = HostBuffers()
    assert len(buffers.allocate(5)) == 5
    buffers.stream, buffers.BLOCK = object(), 256
    starts = []
    for n in (1, 65, 64, 1, 300, 60, 128):
        piece = buffers.allocate(n)
        assert len(piece) == n
        starts.append(piece.storage_offset())
    # The blocks are 256, 256 and 512 bytes long. The ends of all of them are used.
    assert starts == [0, 64, 192, 0, 0, 64, 128]
    assert made == [(5, False), (256, True), (256, True), (512, True)]

def test_the_batch_system_is_told_by_its_variables(monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    assert launcher.scheduler() is None
    monkeypatch.setenv("PBS_JOBID", "7.pbs1")
    monkeypatch.setenv("PBS_NODEFILE", "/nodes")
    assert launcher.scheduler() == ("PBS", "7.pbs1", "/nodes")


def test_only_rank_0_prints_help(monkeypatch):
    def parse(argv):
        print("the flags")
        return Config()

    said = []
    for rank in (0, 1):
        monkeypatch.setattr(launcher, "env_rank", lambda rank=rank: rank)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            session.parse_flags(parse, [])
        said.append(out.getvalue())
    assert said == ["the flags\n", ""]


@pytest.mark.parametrize("shape,fits", [((2, 16, 8), True), ((2, 12, 8), False), ((2, 8, 12), False)])
def test_the_library_multiplies_experts_whose_rows_have_whole_16_bytes(shape, fits, monkeypatch):
    monkeypatch.setattr(grouped_mm, "has_grouped_mm", lambda device: True)
    w = torch.zeros(shape, dtype=torch.bfloat16)
    assert grouped_mm.use_torch(w[0], w) == fits
    assert not grouped_mm.use_torch(w[0].float(), w)


def test_powers_of_two():
    assert [tiles.next_power_of_2(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]


def test_the_first_step_chooses_the_size_of_the_experts_buffers():
    layer = SimpleNamespace(dispatcher=SimpleNamespace(rows_needed=torch.zeros(())))
    model = SimpleNamespace(cfg=Config(n_experts=4), mesh=make_mesh(ONE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fast.graph.moe_layers", lambda model: {"0": layer})
        sizer = BufferSizer(model, 2.5)
    assert sizer.slack == 0 and sizer.wait == 1


def test_numbers_of_flags():
    """Those of --rope-scaling and --train-range-to-skip; the defaults that a page states in brackets."""
    config.check_rope_scaling((8.0, 1.0, 4.0, 8192.0))
    with pytest.raises(ValueError, match="LOW below HIGH"):
        config.check_rope_scaling((8.0, 4.0, 4.0, 8192.0))
    assert balanced_counts(10, 4) == [2, 3, 3, 2] and balanced_counts(7, 4) == [1, 3, 2, 1]
    config.check_run(Config(train_range_to_skip=(5, 6)))
    with pytest.raises(ValueError, match="train-range-to-skip"):
        config.check_run(Config(train_range_to_skip=(5, 6, 7)))
    assert f"`--check-every` ({Config.check_every})" in (ROOT / "docs/checkpoints.md").read_text()


# -----------------------------------------------------------------------------
# What a machine offers, and what is said

@pytest.mark.parametrize("user, ranks, flags", [
    (0, 1, ["--allow-run-as-root"]), (1000, 1, []), (1000, 10**6, ["--oversubscribe"])])
def test_open_mpi_is_told_what_it_would_refuse(user, ranks, flags, tmp_path, monkeypatch):
    (tmp_path / "orterun").write_text("#!/bin/sh\n")
    (tmp_path / "orterun").chmod(0o755)
    (tmp_path / "mpiexec").symlink_to(tmp_path / "orterun")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert nearest.flags_of_openmpi(ranks) == flags


def test_experts_without_a_kernel_of_their_own_are_no_graph(monkeypatch):
    """The loop over experts reads row counts on the host. A recorded step would repeat the first counts."""
    monkeypatch.setattr(choose, "has_cuda_api", lambda device: True)
    mesh = SimpleNamespace(pp=Axis("pp"), ep=Axis("ep"))
    gpu = torch.device("cuda")
    cfg = Config(n_experts=4, dtype="bf16")
    assert choose.static_shapes(cfg, mesh, gpu)
    assert not choose.static_shapes(dataclasses.replace(cfg, dtype="fp64"), mesh, gpu)


def test_a_long_text_is_announced_with_its_size(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "make_tokenizer", lambda flags, units: SimpleNamespace(
        save=lambda path: path.write_text("")))
    flags = SimpleNamespace(tokenizer="bpe")
    for megabytes in (3, 5):
        units = [[SimpleNamespace(size=megabytes * 10**6)]]
        prepare.keep_tokenizer(flags, units, tmp_path / f"{megabytes}.json")
    assert capsys.readouterr().out == (
        "trains a vocabulary on 5 MB of 5 MB of text, then encodes all of it\n")


def test_plan_asks_the_data_whether_documents_are_kept_apart(monkeypatch):
    monkeypatch.setattr(plan, "settled_doc_mask", lambda data, mask: f"{data}: {mask}")
    assert plan.documents(Config(data="data/chat", doc_mask="auto")) == "data/chat: auto"
    assert plan.documents(Config(data="", doc_mask="auto")) == "auto"


def test_only_the_main_rank_speaks(capsys):
    for is_main in (False, True):
        progress.Progress.say(SimpleNamespace(is_main=is_main), f"main: {is_main}")
    assert capsys.readouterr().out == "main: True\n"


def test_what_lies_in_a_folder_is_offered_before_its_neighbours(tmp_path):
    for name in ("run", "run/a", "run/b", "rum"):
        (tmp_path / name).mkdir()
    found = paths.close_paths(tmp_path / "run", tmp_path, lambda path: path.name != "a")
    assert found == [tmp_path / "run/b"]
    assert paths.close_paths(tmp_path / "runn", tmp_path, Path.is_dir) == [tmp_path / "run"]


@pytest.mark.parametrize("argv, changes, changed", [
    ("--bias --qkv-bias --tp 2", {"qkv_bias": False, "bias": 2}, "--tp 2 --qkv-bias False --bias 2"),
    ("--bias true --tp 2", {"bias": None}, "--tp 2"),
    ("--rope-scaling 8 4 1 0 --tp 2", {"rope_scaling": None}, "--tp 2"),
    ("--rope-scaling 8 -1 --tp 2", {"rope_scaling": (1.0, 2.0)}, "--tp 2 --rope-scaling 1.0 2.0"),
    ("a --tp=2 --lr 1 b", {"tp": 4, "lr": None}, "a b --tp 4"), ("--tp", {"tp": 1}, "--tp 1")])
def test_a_fix_changes_all_words_of_a_flag_and_no_others(argv, changes, changed):
    assert " ".join(nearest.change_words(argv.split(), changes)) == changed
    typed = nearest.as_flags({"rope_scaling": (8.0, 1.0), "tp": 2, "lr": None})
    assert typed == "--rope-scaling 8.0 1.0 --tp 2 without --lr"
