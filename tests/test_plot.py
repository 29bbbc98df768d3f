"""plot.py: several runs in one plot, their legend, other metrics, wrong input; foreign rows are left out."""
import copy
import importlib
import json
import sys

import pytest
from pool import ROOT
from runs import go, rows

import plot
import prepare
import train
from interface import files

sys.path[:0] = [str(ROOT / "bench")]
first_run = importlib.import_module("first_run")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs, a and b; b's file also holds what is no row, and a loss that is not finite."""
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
    """How many cells of the plot hold the mark; the legend does not count."""
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
    assert "2.00" in text and "5.00" in text and "8.0" not in text.split("\u2514")[1]
    straight = plot.draw("", [("", "g", [(i, 10.0 ** i) for i in range(9)])], log=True)
    rows = [line.index("g") for line in straight.splitlines() if "g" in line]
    assert len(rows) > 10 and rows == sorted(rows, reverse=True)  # a straight line, not a corner
    assert plot.draw("", [("", "g", [(1, -1.0)])], log=True) == ""


@pytest.mark.parametrize("value,flags", [("1e299", []), ("-1.0", ["--log"]), ("2.0", ["--steps", "5", "6"])])
def test_rows_that_cannot_be_drawn_are_told(value, flags, runs, capsys):
    (runs / "a" / "metrics.jsonl").write_text(f'{{"step": 1, "loss": {value}}}\n')
    assert plot.main(["a", *flags]) == 0
    assert "nothing to draw yet" in capsys.readouterr().out


def test_a_step_of_a_run_asks_for_the_run(runs, capsys):
    (runs / "a/step_000020").mkdir()
    with pytest.raises(SystemExit):
        plot.main(["a/step_000020"])
    assert "a/step_000020 holds no metrics.jsonl; give a" in capsys.readouterr().err


@pytest.mark.parametrize("argv,words", [
    ([], "no RUN"), (["none"], "none holds no metrics.jsonl"), (["a", "--metric", "x"], "grad_norm, loss"),
    (["a", "--steps", "3"], "FIRST LAST"), (["a", "--every", "nan"], "--every"),
    (["a", "--width", "1"], "20")])
def test_wrong_input_is_one_line(argv, words, runs, capsys):
    with pytest.raises(SystemExit) as e:
        plot.main(argv)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and words in err


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
    assert seen[0][0] == 7 and "nothing to draw yet" in seen[0][1] and "\u28c0 loss" in seen[1][1]


def test_a_picture_needs_matplotlib(runs, capsys):
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(SystemExit):
            plot.main(["a", "b", "--png", "x.png"])
        assert "pip install matplotlib" in capsys.readouterr().err
    else:
        plot.main(["a", "b", "--png", "x.png"])
        assert (runs / "x.png").read_bytes()[1:4] == b"PNG"


def test_the_table_of_runs_reads_only_and_survives_foreign_folders(runs, capsys, monkeypatch):
    for name, text in (("a", {"steps": 8, "preset": "tiny-moe", "world": 2, "seed": 7, "plot": True,
                        "report": False}),
                       ("b", {"steps": 20, "preset": ["\x1b[31m"], "top_k": 10**30}), ("c", [1])):
        (runs / name / "step_000005").mkdir(parents=True)
        (runs / name / "config.json").write_text(json.dumps(text))
    (runs / "d").mkdir(), (runs / "e" / "step_x").mkdir(parents=True), (runs / "e" / "config.json").mkdir()
    (runs / "d" / "metrics.jsonl").write_text('{"step": 3, "loss": 1e250}\n\x00\n')
    files.lock(runs / "c")
    before = {p: p.lstat().st_mtime_ns for p in runs.rglob("*")}
    plot.print_runs(runs)
    assert before == {p: p.lstat().st_mtime_ns for p in runs.rglob("*")}
    files.unlock()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100 and not any("\x1b" in line for line in lines)
    assert [" ".join(line.split()) for line in lines if line[0] != " "] == [
        "run state steps loss val_loss", "a done 8/8 1 3", "b stopped at 5 11/20 2 3",
        "c running 0/? - -", "d no checkpoint 3/? 1e+250 -"]
    assert lines[2] == "    tiny-moe on 2 ranks --steps=8 --seed=7 --no-report" and "--top-k=1000" in lines[4]


def test_an_imported_model_is_no_stopped_run(tmp_path):
    (tmp_path / "step_000000").mkdir()
    assert plot.state(tmp_path, 0, 400) == "imported"
    (tmp_path / "step_000003").mkdir()
    assert plot.state(tmp_path, 3, 400) == "stopped at 3"


def test_a_flag_as_a_shell_takes_it():
    assert plot.words_of_flag("prompt", "def main(") == "--prompt='def main('"
    assert plot.words_of_flag("rope_scaling", [8, 1]) == "--rope-scaling 8 1"
    assert plot.words_of_flag("min_lr", 0.1) == "--min-lr=0.1"


@pytest.mark.parametrize("argv", [["--list", "none"], ["tiny", "--list"], ["--list", "a", "b"]])
def test_wrong_flags_beside_list(argv, runs, capsys):
    with pytest.raises(SystemExit) as end:
        train.main(argv)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and "give one folder of runs" in said
    assert ("--list none: there is no such folder" in said) == ("none" in argv)


# -----------------------------------------------------------------------------
# The README's pictures

def test_the_readme_shows_the_first_run_as_it_was():
    page = first_run.README.read_text()
    results = json.loads(first_run.RESULTS.read_text())
    assert first_run.with_pictures(page, results) == page, "python bench/first_run.py writes them again"
    losses = {tuple(row["loss"] for row in rows) for rows in results["layouts"].values()}
    assert len({tuple(f"{loss:.4f}" for loss in row) for row in losses}) == 1, "five layouts, the same losses"
    changed = copy.deepcopy(results)
    changed["first"]["rows"][-1]["loss"] = 3.0
    changed["first"]["texts"]["400"] = "x"
    changed["layouts"]["python $RUN"][-1]["val_loss"] = 3.0
    new = first_run.with_pictures(page, changed)
    assert "step=400/400 loss=3.0000 val_loss=" in new and "--- step 400\nx\n```\n" in new
    assert "| 3.0000 |\n" in new and first_run.with_pictures(new, results) == page


# The losses of two steps of `tiny` on a text that is the same everywhere, and its validation loss: what
# decides the README's numbers besides the text. Machines round to 1e-6.
FIRST_STEPS = (5.732450, 5.617015, 5.421145)


def two_steps(folder):
    """Return the losses like FIRST_STEPS of one process, and of two ranks with --tp 2."""
    text = "".join(f"def f{(17 * i * i + i // 3) % 97}(x): return x + {i % 7}\n" for i in range(4000))
    (folder / "text.txt").write_text(text)
    prepare.main([str(folder / "text.txt"), "--name=fixed", "--vocab-size=300", "--workers=1",
                  f"--out={folder}"])
    flags = ["tiny", f"--data={folder}/fixed", "--micro-batch=2", "--global-batch=4", "--steps=2",
             "--log-every=1", "--eval-iters=1", "--save-every=0", "--no-plot", "--no-report"]
    found = []
    for ranks, layout in ((1, []), (2, ["--tp=2"])):
        go(ranks, folder / f"run{ranks}", *layout, base=flags)
        first, second = rows(folder / f"run{ranks}")
        found.append((first["loss"], second["loss"], second["val_loss"]))
    return found


def test_the_first_run_is_still_the_one_of_the_readme(tmp_path):
    for losses in two_steps(tmp_path):
        assert losses == pytest.approx(FIRST_STEPS, abs=1e-4, rel=0), (
            "the first run changed: run `make train && make picture` and `python bench/first_run.py "
            "--layouts`, and write these losses into FIRST_STEPS")


def test_what_the_readme_shows_is_taken_from_a_run(runs):
    (runs / "b" / "notes.jsonl").write_text('{"step": 4, "sample": "def"}\n{"step": 8, "traffic": {}}\n')
    found = first_run.take(runs / "b")
    assert found["texts"] == {"4": "def"} and found["rows"][3] == {
        "step": 4, "loss": 2.0, "val_loss": 3.0, "grad_norm": 10.0 ** 4}
    with pytest.raises(ValueError, match="no line <!-- make picture: curve -->"):
        first_run.with_pictures("", json.loads(first_run.RESULTS.read_text()))


def test_the_plot_of_the_loss_alone_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plot, "draw", lambda name, series: f"plot of {name}\n")
    for show, said in ((True, "plot of loss\n"), (False, "")):
        plot.write_plots(tmp_path, [], show)
        assert capsys.readouterr().out == said
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.txt" for name in plot.AT_END}
