"""bench/layouts.py on two CPU ranks: every layout becomes a row, also one whose ranks fail, die or hang."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import plan
from cost.gpus import kind_of
from interface.command_line import parse

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"ranks": 2, "steps": 3, "global-batch": 8, "micro-batch": 2, "n-layer": 2, "n-embd": 32,
         "ffn-hidden": 48, "seq-len": 16, "dtype": "fp64"}
FLAGS = [f"--{name}={value}" for name, value in SMALL.items()]
# The ranks are forks, so they inherit this patch: a step that breaks rank 1 of three layouts while rank 0
# waits in a collective.
BREAK = """
import os, signal, sys, torch
sys.path[:0] = ["bench", "."]
import layouts
from training import Training
step, run = Training.step, layouts.run_layout
layouts.run_layout = lambda cfg, n, limit, say: run(cfg, n, 0.5 if cfg.recompute == "full" else limit, say)

def broken_step(self, *args):
    if self.world.rank == 1 and self.cfg.micro_batch == 4:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
    if self.world.rank == 1 and self.cfg.micro_batch == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when the host has no memory left
    if self.world.rank == 1 and self.cfg.recompute == "full":
        signal.pause()  # hangs
    return step(self, *args)

Training.step = broken_step
raise SystemExit(layouts.main(sys.argv[1:]))
"""


def sweep(*argv, script=("bench/layouts.py",)):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run([sys.executable, *script, *argv], cwd=ROOT, env={**env, "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=240)


@pytest.mark.long
def test_every_layout_becomes_a_row(tmp_path):
    layouts = "mbs4; mbs1; recompute; tp3; dp3; zero4; dp2; tp2; pp2,zero1"
    out = sweep("tiny", *FLAGS, "--layouts", layouts, "--json", tmp_path / "rows.json", "--gpu", "h100",
                script=("-c", BREAK))
    assert out.returncode == 0, out.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    by = {row["layout"]: row for row in rows}
    assert list(by) == [s.strip() for s in layouts.split(";")]
    assert by["mbs4"]["note"].startswith("out of memory on rank 1: CUDA out of memory")
    assert by["mbs1"]["note"] == "rank 1 died with exit code -9"
    assert by["recompute"]["note"] == "given up after 0.5 s, waiting for rank 0, 1"
    assert by["tp3"]["note"] == "refused: 2 ranks do not divide by tp 3 * pp 1; try --tp 2"
    assert by["dp3"]["note"] == "refused: dp 3 * tp 1 * cp 1 * pp 1 are not 2 ranks; try dp2"
    assert "try dp4 tp2" in by["zero4"]["note"]
    for name, dp, tp, pp in (("dp2", 2, 1, 1), ("tp2", 1, 2, 1), ("pp2,zero1", 1, 1, 2)):
        row = by[name]
        assert (row["dp"], row["tp"], row["pp"], row["mbs"], row["gbs"]) == (dp, tp, pp, 2, 8)
        assert abs(row["loss"] - by["dp2"]["loss"]) < 1e-10, "layouts compute the same thing"
        assert abs(row["tok_s_gpu"] * row["seconds"] * 2 - 8 * 16) < 1e-6 and row["predicted"] > 0
    for name, row in by.items():  # predicted for all that train.py accepts, also if it failed later
        assert ("predicted_s" in row) == ("predicted" in row) == (name not in ("tp3", "dp3", "zero4"))
    flags = [f for f in FLAGS if not f.startswith(("--ranks", "--steps"))]
    cfg, _ = plan.check_gpus(parse(["tiny", *flags, "--data=synthetic", "--tp=2"]), 2)
    assert by["tp2"]["predicted_s"] == plan.estimate(cfg, 2, "h100", 256)["ms"] / 1e3
    # In torch 2.8, gloo prints lines of its own, and two ranks may print at once
    assert max(len(line) for line in out.stdout.splitlines() if "[Gloo]" not in line) <= 100
    head, *table = out.stdout.split("\n\n")[-1].splitlines()
    names = re.split(" (?!GiB|s/it)", " ".join(head.split()))
    bloom = ("dp", "tp", "pp", "mbs", "mem GiB", "sec/it", "TFLOP/s")  # the order of its planning document
    places = [names.index(name) for name in bloom]
    assert places == sorted(places) and names.index("plan s/it") == names.index("sec/it") + 1
    assert names.index("plan GiB") == names.index("mem GiB") + 1
    shown = dict(zip(names, next(line for line in table if line.endswith("  tp2")).split(), strict=True))
    assert float(shown["plan s/it"]) == round(by["tp2"]["predicted_s"], 4)
    assert float(shown["plan GiB"]) == round(by["tp2"]["predicted"], 2)
    seconds = [float(line.split()[names.index("sec/it")]) for line in table[:3]]
    assert seconds == sorted(seconds) and [line.split(":")[0] for line in table[3:]] == \
        [name for name in by if "note" in by[name]]  # they come last
    assert "tp3: refused: 2 ranks do not divide by tp 3 * pp 1; try --tp 2" in table[3:]


def test_the_gpu_found_is_one_that_plan_knows():
    found = [kind_of(*device) for device in (("NVIDIA H200", 139.8), ("NVIDIA A100-SXM4-40GB", 39.4),
                                             ("NVIDIA A100 80GB PCIe", 79.3), ("AMD Instinct MI250X", 64.0),
                                             ("NVIDIA GH200 480GB", 95.0), ("NVIDIA H100 NVL", 93.1),
                                             ("NVIDIA H200 MIG 1g.18gb", 16.0))]
    assert found == ["h200", "a100-40", "a100-80", "", "", "", ""]


def test_wrong_flags_are_one_line(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "bench")
    import layouts
    with pytest.raises(SystemExit) as exit_:
        layouts.main(["tiny", "--layouts", "dp2", "--n-layr", "3"])
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and len(said.splitlines()) == 1 and "--n-layer" in said
    with pytest.raises(SystemExit) as exit_:
        layouts.main(["tiny", "--layouts", "dp2", "--json", f"{__file__}/rows.json"])
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and len(said.splitlines()) == 1 and "give another --json" in said
