"""Small behaviours in which a mutant (mutants.py) of the code was noticed by no other test."""
import contextlib
import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import checkpoint
import plan
import plot
import prepare
import skip
from config import Config
from corpus import text
from cost.idle import pipeline_warnings, width_warnings
from fast.graph import BufferSizer, GraphedStep
from interface import files
from interface.tensor_file import safetensors_header
from ops import grouped_mm
from parallel import make_mesh
from runtime import agree, launch, log, watch
from runtime.launch import World

ONE = World()


# -----------------------------------------------------------------------------
# Skipping and giving up

def test_the_first_step_can_be_skipped():
    assert skip.Ranges([1, 1]).pairs == [(1, 1)]


def test_a_run_that_gave_up_names_a_checkpoint_from_a_hundred_steps_before(tmp_path):
    paths = [tmp_path / f"step_{step:06d}" for step in (250, 200, 100)]
    assert f"--resume {paths[1]} " in skip.give_up_message(paths, 300, 310, "spike")
    assert f"--resume {paths[2]} " in skip.give_up_message(paths, 299, 310, "spike")
    assert f"--resume {paths[0]} " in skip.give_up_message(paths[:1], 299, 310, "spike")


@pytest.mark.parametrize("sigma,waits", [(0, False), (0.5, True), (6, True)])
def test_an_update_waits_for_the_host_if_a_guard_may_veto_it(sigma, waits):
    step = SimpleNamespace(plain=SimpleNamespace(opt=SimpleNamespace(loss_scale=None)))
    assert GraphedStep.host_looks_first(step, SimpleNamespace(sigma=sigma)) == waits
    assert not GraphedStep.host_looks_first(step, None)


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


def test_stages_of_unequal_work_are_named():
    cfg = Config(n_layer=4, pp=2, micro_batch=1, global_batch=64)
    mesh = plan.stage_mesh(cfg, 2, 0)
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


def test_a_run_that_was_moved_aside_names_its_last_step(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in (1, 20, 40)))
    assert files.move_aside(out).name.endswith("_step40")


def test_a_run_without_a_history_begins_at_step_0(tmp_path):
    (tmp_path / "config.json").write_text('{"seed": 1}')
    log.Log._keep_history(SimpleNamespace(out=tmp_path), {"step": 30, "config": {"seed": 2}})
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [(row["step"], row["config"]["seed"]) for row in rows] == [(0, 1), (30, 2)]


def test_empty_stacks_of_another_run_are_removed_and_others_stay(tmp_path):
    (tmp_path / "rank_00000.old.txt").write_text("")
    (tmp_path / "rank_00000.hung.txt").write_text("a stack")
    hang = watch.HangFiles(0)
    hang.open(tmp_path, "new")
    hang.close()
    assert [path.name for path in tmp_path.iterdir()] == ["rank_00000.hung.txt"]


# -----------------------------------------------------------------------------
# Ranks and kernels

def test_the_batch_system_is_told_by_its_variables(monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    assert launch.scheduler() is None
    monkeypatch.setenv("PBS_JOBID", "7.pbs1")
    monkeypatch.setenv("PBS_NODEFILE", "/nodes")
    assert launch.scheduler() == ("PBS", "7.pbs1", "/nodes")


def test_only_rank_0_prints_help(monkeypatch):
    def parse(argv):
        print("the flags")
        return Config()

    said = []
    for rank in (0, 1):
        monkeypatch.setattr(launch, "env_rank", lambda rank=rank: rank)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            agree.parse_flags(parse, [])
        said.append(out.getvalue())
    assert said == ["the flags\n", ""]


@pytest.mark.parametrize("shape,fits", [((2, 16, 8), True), ((2, 12, 8), False), ((2, 8, 12), False)])
def test_the_library_multiplies_experts_whose_rows_have_whole_16_bytes(shape, fits, monkeypatch):
    monkeypatch.setattr(grouped_mm, "has_grouped_mm", lambda device: True)
    w = torch.zeros(shape, dtype=torch.bfloat16)
    assert grouped_mm.use_torch(w[0], w) == fits
    assert not grouped_mm.use_torch(w[0].float(), w)


def test_powers_of_two():
    assert [grouped_mm.next_power_of_2(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]


def test_the_first_step_chooses_the_size_of_the_experts_buffers():
    layer = SimpleNamespace(dispatcher=SimpleNamespace(rows_needed=torch.zeros(())))
    model = SimpleNamespace(cfg=Config(n_experts=4), mesh=make_mesh(ONE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fast.graph.moe_layers", lambda model: {"0": layer})
        sizer = BufferSizer(model, limit=2.5)
    assert sizer.steps + 1 == sizer.interval
