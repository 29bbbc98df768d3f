"""report.html: its pictures, what it escapes, its size and time, which runs leave one, two runs together."""
import json
import re
import signal
import xml.etree.ElementTree as ET

import pytest
from runs import TINY, session

import plot
from interface import report
from runtime.launch import World

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</pre><script>alert(1)</script>\x1b[31m\x00 & \ud800 \u202e"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder, **config):
    folder.mkdir(parents=True)
    rows = []
    for i in range(1, 41):
        row = {"step": i, "time": 1e9 + 2 * i, "loss": 4 - i / 20, "lr": 1e-3, "grad_norm": 1.0,
               "ms": 5.0 + i, "tokens": 100 * i}
        if i % 20 == 0:
            row["val_loss"] = 3.0 - i / 100
        rows.append(row)
    write_rows(folder / "metrics.jsonl", rows)
    write_rows(folder / "notes.jsonl", [{"step": 20, "sample": HOSTILE}, {"step": 40, "sample": "Once\n\n"}])
    config = {"preset": "tiny", "steps": 40, "seed": 1337, "init_from": "", "world": 2,
              "argv": ["/a/train.py", "tiny", "--prompt", "<b>"], "launcher": "hydra",
              "machine": {"host": HOSTILE}, **config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def elements_of(text):
    """The page as XML; that there is nothing in it which a browser would fetch or run."""
    tree = ET.fromstring(text)
    addresses = re.findall(r"https?://[^\"' <)]+", text)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}, addresses
    tags = {element.tag.removeprefix(SVG) for element in tree.iter()}
    assert not tags & {"script", "img", "link", "iframe", "image", "use", "a"}, tags
    assert not any(name.startswith("on") or name in ("href", "src") for e in tree.iter() for name in e.attrib)
    assert "default-src 'none'" in text
    return tree


def test_a_long_curve_is_thinned_and_drawn_to_its_end():
    values = [(step, step % 7) for step in range(5 * report.MOST_POINTS)]
    points = re.search(r'points="(.*?)"', report.chart("loss", [values]))[1].split()
    assert len(points) <= report.MOST_POINTS
    assert float(points[-1].split(",")[0]) == pytest.approx(report.RIGHT, abs=5)


def test_a_page_holds_all_of_a_run_and_no_markup_of_its_texts(tmp_path):
    run = make_run(tmp_path / "a<b", seed=7)
    report.write_report(tmp_path / "x.html", [report.Run(run, "stopped by SIGTERM after step 40")])
    text = (tmp_path / "x.html").read_text()
    tree = elements_of(text)
    said = " ".join("".join(tree.itertext()).split())
    for words in ("stopped by SIGTERM after step 40", "lowest validation loss 2.6000 at step 40", "a<b",
                  "Once",
                  r"</pre><script>alert(1)</script>\x1b[31m\x00 & \ud800 \u202e",
                  "mpiexec -n 2 python /a/train.py tiny --prompt '<b>'", "--seed7"):
        assert words in said, words
    titles = [e.text for e in tree.iter(f"{SVG}text") if e.get("class") == "title"]
    assert "<pre>Once</pre>" in text
    assert titles == ["Loss, nats per token; dots: validation, refused steps", "Learning rate",
                      "Gradient norm", "Milliseconds per step"]
    assert len(list(tree.iter(f"{SVG}circle"))) == 2


def test_a_curve_goes_through_its_points():
    drawn = ET.fromstring(report.chart("Loss", [[], [(1, 4.0), (5, 0.0), (9, 2.0)]]))
    line = list(drawn.iter(f"{SVG}polyline"))[1]
    assert line.get("points") == "60.0,30.0 264.0,204.0 468.0,117.0"
    assert line.get("stroke") == report.colour_of(1)
    assert [e.text for e in drawn.iter(f"{SVG}text")] == ["Loss", "4", "0", "step 1", "9"]
    assert report.chart("Loss", [[]]) == ""
    one = ET.fromstring(report.chart("lr", [[(3, 0.0)]]))  # a constant is drawn, too
    assert next(one.iter(f"{SVG}polyline")).get("points") == "60.0,204.0"


def test_two_runs_side_by_side(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=8)
    assert plot.main(["a", "b", "--html", "x.html"]) == 0
    tree = elements_of((tmp_path / "x.html").read_text())
    assert len(list(tree.iter(f"{SVG}svg"))) == 4
    assert {e.get("stroke") for e in tree.iter(f"{SVG}polyline")} == set(report.COLOURS[:2])
    rows = [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]
    for row in (["", "flag", "a", "b"], ["", "--steps", "40", "40"], ["* ", "--seed", "1337", "8"]):
        assert row in rows
    with pytest.raises(SystemExit):
        plot.main(["a", "--html", "no/x.html"])


def test_a_run_leaves_its_page_also_after_a_stop_and_never_fails_for_it(tmp_path):
    flags = [*TINY, "--steps=2", "--save-every=0"]
    got = session(World(), [*flags, f"--out={tmp_path / 'a'}"], {1: signal.SIGTERM})
    said = "".join(elements_of((tmp_path / "a" / "report.html").read_text()).itertext())
    assert got["code"] == 85 and "stopped by SIGTERM after step 1" in said
    assert "Memory, GB" in said
    assert got["out"].endswith(f"stopped by SIGTERM after step 1: {tmp_path / 'a'}/ holds step_000001\n")
    (tmp_path / "c" / "report.html" / "x").mkdir(parents=True)
    got = session(World(), [*flags, "--resume=auto", f"--out={tmp_path / 'c'}"])
    lines = [line for line in got["err"].splitlines() if "report.html" in line]
    assert got["code"] == 0 and len(lines) == 1 and "going on without it" in lines[0], got["err"]
