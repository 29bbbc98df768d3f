"""plan.py against the measured rows of bench/results: milliseconds of steps, and memory."""
import json
from functools import cache
from typing import NamedTuple
from unittest import mock

import pytest
from pool import ROOT

import plan
from cost import step_time
from cost.gpus import GPUS
from cost.memory import CONTEXT, GIB
from cost.parameters import Rank, stage_mesh
from interface.command_line import parse
from ops.cross_entropy import rows_per_block

RESULTS = ROOT / "bench/results"


def lines_of(name):
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


class Row(NamedTuple):
    """A time of ours. A step of other code than today's, which takes another time, has no row."""
    flags: str
    gpus: int
    gpu: str
    ms: float     # of a step; None where only memory was measured
    gib: float    # None where today's code keeps more
    whole: bool   # AdamW's masters of bf16 weights were whole: 4 bytes, of which 2 are kept today
    counts: str = "allocated and symmetric"  # what of torch's memory gib counts
    uneven: bool = False  # steps 30 to 60 of W2b where ranks share the experts: their routing is still uneven
    lease: str = ""  # where it was measured, and at which commit or for what
    measured: bool = False  # dense products by algorithms that were measured, 1 to 2 % faster than today
    blocks: bool = False  # the head had logits of some rows at a time, as today


ROWS = [Row(**line) for line in lines_of("rows.jsonl") + lines_of("rows-of-tables.jsonl")]
TIMED = [row for row in ROWS if row.ms]
UNEVEN = [row for row in ROWS if row.uneven]


@cache
def estimate(flags, gpus, gpu, uneven=False, blocks=True):
    """What plan.py expects, of a head that has the logits of some rows at a time, or of all."""
    cfg, _ = plan.check_gpus(parse(flags.split()), gpus)
    with mock.patch("cost.memory.rows_per_block", rows_per_block if blocks else lambda *_: 10**9):
        return plan.estimate(cfg, gpus, gpu, cfg.vocab_size, uneven)


@cache
def rank_0(flags, gpus):
    cfg, mesh = plan.check_gpus(parse(flags.split()), gpus)
    return Rank(cfg, mesh, cfg.vocab_size)


def bytes_of_whole_masters(row):
    """Return the bytes that a row's optimizer kept, read and wrote more than today's."""
    rank = rank_0(row.flags, row.gpus)
    if not row.whole or rank.cfg.dtype != "bf16":
        return 0
    return 2 * (rank.owned() - sum(elements for _, elements, _ in rank.muon_shares()))


def predicted_over_measured(row, uneven):
    longer = bytes_of_whole_masters(row) / GPUS[row.gpu].hbm * 1e3
    return (estimate(row.flags, row.gpus, row.gpu, uneven, row.blocks)["ms"] + longer) / row.ms


def predicted_gib(row):
    """Return what plan.py expects of the memory that a row counts."""
    parts = estimate(row.flags, row.gpus, row.gpu, row.uneven, row.blocks)["memory_gib"]
    outside = CONTEXT / GIB if "reserved" in row.counts else parts["overhead"]
    if "symmetric" not in row.counts:
        rank = rank_0(row.flags, row.gpus)
        copied = [bucket.elements for bucket in rank.trained if rank.gradient_kind(bucket) == "copied"]
        outside += parts["symm_mem"] + 4 * sum(copied) / GIB
    return sum(parts.values()) - outside + bytes_of_whole_masters(row) / GIB


def test_rows_of_each_kind_are_found():
    assert (len(ROWS), len(TIMED), len(UNEVEN)) == (235, 217, 7)


@pytest.mark.parametrize("row", TIMED, ids=str)
def test_step_within_16_percent_of_measured(row):
    assert predicted_over_measured(row, row.uneven) == pytest.approx(1, abs=0.165)


def test_steps_are_within_5_percent_in_the_mean():
    errors = [abs(predicted_over_measured(row, row.uneven) - 1) for row in TIMED]
    assert sum(errors) / len(errors) < 0.05


@pytest.mark.parametrize("row", [row for row in ROWS if row.gib], ids=str)
def test_memory_within_12_percent_of_measured(row):
    assert predicted_gib(row) == pytest.approx(row.gib, rel=0.12, abs=0.13)


# With 32 experts the routing was more even: the sum of settled routing is that of these rows, within 0.2 %.
@pytest.mark.parametrize("row", [row for row in UNEVEN if "--n-experts 32" not in row.flags], ids=str)
def test_uneven_routing_takes_longer_than_what_it_settles_to(row):
    """Predictions of settled routing are 10 to 11 % too low on two GPUs, and 16 to 24 % on four."""
    settled = predicted_over_measured(row, False)
    low, high = (0.885, 0.905) if row.gpus == 2 else (0.755, 0.84)
    assert low < settled < high


def test_synthetic_tokens_are_as_uneven_as_young_text():
    """They send the fullest of 4 ranks more than 2.3 times its share. Real tokens had settled at step 200:
    three runs of one command, ep 4, ended at row limits of 1.74, 1.85 and 1.93."""
    lines = [line for line in lines_of("h200-peer-copies.jsonl") if "--ep" in line["flags"]]
    [crowded] = [line for line in lines if "--data" not in line["flags"] and "capacity" not in line["flags"]]
    found = crowded["flags"], crowded["gpus"], "h200"
    assert estimate(*found, True)["ms"] == pytest.approx(crowded["ms"], rel=0.1)
    assert estimate(*found)["ms"] < 0.8 * crowded["ms"]
    settled = [line for line in lines if "--data" in line["flags"] and line["slack"] is not None]
    for line in settled:
        rank = rank_0(line["flags"], line["gpus"])
        in_worst_layer = 1 + 3 * (step_time.max_load_factor(rank.cfg, rank.mesh) - 1)
        limit = 1.1 * in_worst_layer
        assert limit == pytest.approx(line["slack"], rel=0.07)
    assert len(settled) == 2


WORKLOADS = {"W1": "dense-210m", "W2b": "moe-4b --ep 2",
             "G2": "gpt2 --no-bias --micro-batch 64 --global-batch 0 --vocab-size 50304"}


@pytest.mark.parametrize("name", WORKLOADS)
def test_what_the_compiler_brings_is_counted(name):
    """The step without --compile, less the step with it: as measured."""
    ms = {row["off"]: row["ms"] for row in lines_of("ladder-2-gpus-h200.jsonl") if row["workload"] == name}
    with_it, without = (estimate(f"{WORKLOADS[name]} --zero 1{flags}", 2, "h200")["ms"]
                        for flags in ("", " --no-compile"))
    assert without - with_it == pytest.approx(ms["compile"] - ms["nothing"], rel=0.3)


def test_the_bubble_waits_for_the_sums_of_gradients_too():
    """Four stages and eight micro-batches idle for 3/8 of all that a stage does in its turn."""
    found = estimate("dense-210m --pp 4 --micro-batch 1 --global-batch 8", 4, "h100")["ms_parts"]
    assert found["bubble"] == pytest.approx(3 / 8 * (found["compute"] + found["gradients"]))
    assert found["gradients"] > 0.01 * found["compute"]


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_uneven_is_what_the_loads_of_a_run_say(ep):
    rows = [row for row in lines_of("young-loads-h100.jsonl") if row["ep"] == ep and 30 <= row["step"] <= 60]
    mean = sum(row["mean_layer"] for row in rows) / len(rows)
    assert len(rows) == 31 and (mean - 1) / (ep - 1) == pytest.approx(step_time.UNEVEN, abs=0.01)
    assert max(row["worst_layer"] for row in rows) > 0.99 * ep


DENSE = parse(["dense-210m", "--dtype", "bf16"])


def test_a_ring_over_nodes_is_slower():
    h200 = GPUS["h200"]
    dp = stage_mesh(DENSE, 64, 0).dp
    assert step_time.ring_bandwidth(dp, 1, h200) == h200.link  # 8 adapters of 40 GB/s together
    assert step_time.ring_bandwidth(dp, 4, h200) == 2 * h200.net
    assert step_time.ring_bandwidth(dp, 8, h200) == h200.net


def test_what_compute_hides_of_messages():
    """Half of what travels while compute goes on."""
    h200 = GPUS["h200"]
    mesh = stage_mesh(DENSE, 2, 0)

    def exposed(seconds):
        sent = (seconds * h200.link, 1)
        return step_time.exposed_seconds(mesh, h200, {"dp": sent}, 1.0)
    assert exposed(10.0) == pytest.approx(10 - 1 / 2, abs=1e-4)  # more than compute could hide
    assert exposed(0.1) == pytest.approx(0.1 / 2, abs=1e-4)
