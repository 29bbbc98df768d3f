"""plot.py: several runs in one plot, other metrics, a picture; train.py --list; the README's first run."""
import importlib
import json
import sys

import pytest
from pool import ROOT
from runs import go, rows

import plot
import prepare
from interface import files

sys.path[:0] = [str(ROOT / "bench")]
first_run = importlib.import_module("first_run")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, height in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        rows = [{"step": i, "loss": height, "grad_norm": 10.0 ** i, **({"val_loss": 3.0} if i == 4 else {})}
                for i in range(1, 9)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with open(tmp_path / "b" / "metrics.jsonl", "a") as f:
        f.write('5\n{"step": 9, "loss": NaN}\n{"step": 10, "loss": "x"}\n{"step": 11, "loss": 1e999}\n')
    return tmp_path


def marks(text, mark):
    return sum(line.count(mark) for line in text.splitlines() if "\u2502" in line or "\u2524" in line)


def test_two_runs_share_a_plot_and_the_legend_is_below_it(runs, capsys):
    assert plot.main(["a", "b"]) == 0
    text = capsys.readouterr().out
    *drawn, legend = text.rstrip().splitlines()
    assert legend.split("   ") == ["  a a loss", "A a val_loss", "b b loss", "B b val_loss"]
    assert marks(text, "a") > 50 and marks(text, "b") > 50 and marks(text, "B") == 1
    lines = [[i for i, line in enumerate(drawn) if letter in line] for letter in "ab"]
    assert len(lines[0]) == len(lines[1]) == 1 and lines[0] > lines[1]  # 1.0 is below 2.0


def test_one_run_its_steps_and_a_logarithmic_axis(runs, capsys):
    assert plot.main(["a"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("\u28c0 loss   x val_loss")
    plot.main(["a", "--metric", "grad_norm", "--steps", "2", "5"])
    text = capsys.readouterr().out
    assert text.split("\u2518")[1].split()[:4] == ["2", "3", "4", "5"] and " 50050" in text  # not 10^3.5
    straight = plot.draw("", [("", "g", [(i, 10.0 ** i) for i in range(9)])], log=True)
    rows = [line.index("g") for line in straight.splitlines() if "g" in line]
    assert len(rows) > 10 and rows == sorted(rows, reverse=True)  # a straight line, not a corner
    (runs / "a" / "metrics.jsonl").write_text('{"step": 1, "loss": -1.0}\n')
    assert plot.main(["a", "--log"]) == 0 and "no loss to draw" in capsys.readouterr().out


def test_follow_draws_a_run_that_has_no_row_yet(runs, capsys, monkeypatch):
    (runs / "new").mkdir()
    (runs / "new" / "metrics.jsonl").touch()
    seen = []

    def sleep(seconds):
        seen.append((seconds, capsys.readouterr().out))
        if len(seen) == 2:
            raise KeyboardInterrupt
        (runs / "new" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    monkeypatch.setattr("time.sleep", sleep)
    assert plot.main(["new", "--follow", "--every", "7"]) == 0
    assert seen[0][0] == 7 and "no loss to draw" in seen[0][1] and "\u28c0 loss" in seen[1][1]


def test_the_plots_that_a_run_leaves(runs, capsys):
    (runs / "a/experts.jsonl").write_text('{"step": 1, "layers": {"0": {"load": [0.5, 0.5]}}}\n')
    for show in (True, False):
        plot.at_end(runs / "a", show)
        said = capsys.readouterr().out
        assert ("expert   1 " in said and "\u28c0 loss" in said) == show
    assert {path.name for path in (runs / "a").glob("*.txt")} == {
        "loss.txt", "val_loss.txt", "grad_norm.txt", "expert_load.txt"}


def test_the_table_of_runs_reads_only_and_survives_foreign_folders(runs, capsys):
    for name, text in (("a", {"steps": 8}), ("b", {"steps": "\x1b[31m"}), ("c", [1])):
        (runs / name / "step_000005").mkdir(parents=True)
        (runs / name / "config.json").write_text(json.dumps(text))
    (runs / "d").mkdir(), (runs / "e" / "step_x").mkdir(parents=True), (runs / "e" / "config.json").mkdir()
    (runs / "d" / "metrics.jsonl").write_text('{"step": 3, "loss": 1e250}\n\x00\n')
    (runs / "f/metrics.jsonl").mkdir(parents=True)
    files.lock(runs / "c")
    before = {p: p.lstat().st_mtime_ns for p in runs.rglob("*")}
    plot.print_runs(runs)
    assert before == {p: p.lstat().st_mtime_ns for p in runs.rglob("*")}
    files.unlock()
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert [" ".join(line.split()) for line in said.splitlines() if line.strip()] == [
        "state steps loss val_loss run", "step_000005 8/8 1 3 a", "step_000005 11/\\x1b[31m 2 3 b",
        "running 0/? - - c", "no checkpoint 3/? 1e+250 - d"]


# -----------------------------------------------------------------------------
# The README's pictures

def test_the_readme_shows_the_first_run_as_it_was():
    page = first_run.README.read_text()
    results = json.loads(first_run.RESULTS.read_text())
    assert first_run.with_pictures(page, results) == page, "python bench/first_run.py writes them again"
    losses = {tuple(row["loss"] for row in rows) for rows in results["layouts"].values()}
    assert len({tuple(f"{loss:.4f}" for loss in row) for row in losses}) == 1, "five layouts, the same losses"


# The losses of two steps of `tiny` on a text that is the same everywhere, and its validation loss: what
# decides the README's numbers besides the text. Machines round to 1e-6.
FIRST_STEPS = (5.732450, 5.617015, 5.421145)


@pytest.mark.parametrize("ranks,layout", [(1, []), (2, ["--tp=2"])], ids=str)
def test_the_first_run_is_still_the_one_of_the_readme(ranks, layout, tmp_path):
    text = "".join(f"def f{(17 * i * i + i // 3) % 97}(x): return x + {i % 7}\n" for i in range(4000))
    (tmp_path / "text.txt").write_text(text)
    prepare.main([str(tmp_path / "text.txt"), "--name=fixed", "--vocab-size=300", "--workers=1",
                  f"--out={tmp_path}"])
    flags = ["tiny", f"--data={tmp_path}/fixed", "--micro-batch=2", "--global-batch=4", "--steps=2",
             "--log-every=1", "--eval-iters=1", "--save-every=0", "--no-plot", "--no-report"]
    go(ranks, tmp_path / "run", *layout, base=flags)
    first, second = rows(tmp_path / "run")
    losses = first["loss"], second["loss"], second["val_loss"]
    assert losses == pytest.approx(FIRST_STEPS, abs=1e-4, rel=0), (
        "the first run changed: run `make train && make picture` and `python bench/first_run.py "
        "--layouts`, and write these losses into FIRST_STEPS")
