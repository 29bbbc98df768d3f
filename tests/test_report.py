"""report.html: its pictures, what it escapes, its size and time, which runs leave one, two runs together."""
import json
import re
import signal
import time
import xml.etree.ElementTree as ET

import pytest
from browser import browser
from runs import TINY, session

import plot
from interface import report, svg
from interface.files import spaced_rows
from runtime.launch import World

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</pre><script>alert(1)</script>\x1b[31m\x00 & \ud800 \u202e"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder, **config):
    """A run of 40 steps with experts, samples and traffic, whose texts are hostile."""
    folder.mkdir(parents=True)
    write_rows(folder / "history.jsonl", [{"step": 0, "time": 1e9}, {"step": 30, "time": 1e9 + 5000}])
    rows = []
    for i in range(1, 41):
        row = {"step": i, "time": 1e9 + 2 * i, "loss": 4 - i / 20, "lr": 1e-3, "grad_norm": 1.0,
               "ms": 5.0 + i, "tokens": 100 * i}
        if i > 30:
            row["time"] += 4940  # step 30 is at 60 seconds, the second start at 5000
        if i % 20 == 0:
            row["val_loss"] = 3.0 - i / 100
        rows.append(row)
    rows[6]["grad_norm"] = 90.0
    write_rows(folder / "metrics.jsonl", rows)
    load = {"load": [0.1, 0.2, 0.7, 0.0], "dropped": 0.0}
    write_rows(folder / "experts.jsonl", [{"step": i, "layers": {"0": {"load": [0.25] * 4}, "1": load}}
                                          for i in range(1, 41)])
    write_rows(folder / "notes.jsonl", [{"step": 1, "traffic": {"tp<": [2e6, 1.5e6], "x": ["?"]}},
                                        {"step": 20, "sample": HOSTILE}, {"step": 40, "sample": "Once\n\n"}])
    (folder / "step_000040").mkdir()
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


def test_a_page_holds_all_of_a_run_and_no_markup_of_its_texts(tmp_path):
    run = make_run(tmp_path / "a<b", seed=7)
    report.write_report(tmp_path / "x.html", [report.read_run(run, "stopped by SIGTERM after step 40")])
    text = (tmp_path / "x.html").read_text()
    tree = elements_of(text)
    said = " ".join("".join(tree.itertext()).split())
    for words in ("stopped by SIGTERM after step 40", "lowest validation loss 2.6000 at step 40", "a<b",
                  "by rank 0 in step 1", "tp<21.5", "Once",
                  r"</pre><script>alert(1)</script>\x1b[31m\x00 & \ud800 \u202e",
                  "mpiexec -n 2 python train.py tiny --prompt '<b>' --resume auto --steps 80",
                  "--config", "seed7", "begun 2001-09-", "ran 1:20 in 2 starts", "init-from-",
                  "python sample.py", "python plot.py"):
        assert words in said, words
    titles = [e.text for e in tree.iter(f"{SVG}text") if e.get("class") == "title"]
    assert "<pre>Once</pre>" in text
    assert titles == ["Loss, nats per token; dots: validation", "Learning rate", "Gradient norm",
                      "Milliseconds per step", "Load of the busiest expert"]
    assert "1 above, up to 90" in said and "highest 2.80" in said
    assert [e.text for e in tree.iter(f"{SVG}title")] == ["validation, step 20: 2.8000",
                                                          "validation, step 40: 2.6000"]


def test_a_curve_goes_through_its_points():
    drawn = ET.fromstring(svg.chart("Loss", [(1, False, [(1, 4.0), (5, 0.0), (9, 2.0)])]))
    line = next(drawn.iter(f"{SVG}polyline"))
    assert line.get("points") == "60.0,30.0 264.0,204.0 468.0,117.0" and line.get("class") == "curve s1"
    labels = [e.text for e in drawn.iter(f"{SVG}text")]
    assert labels == ["Loss", "0", "1", "2", "3", "4", "step", "2", "4", "6", "8"]
    assert svg.chart("Loss", [(0, False, [])]) == ""
    one = ET.fromstring(svg.chart("lr", [(0, False, [(3, 0.0)])]))  # a constant has an axis, too
    assert next(one.iter(f"{SVG}polyline")).get("points") == "60.0,117.0"


def test_a_heat_map_shows_each_layer_and_step():
    rows = [{"step": 1, "layers": {"0": {"load": [0.5, 0.5]}, "1": {"load": [1.0, 0.0]}}},
            {"step": 5, "layers": {"0": {"load": [0.5, 0.5]}, "1": {"load": "x"}}}, {"step": 6, "layers": 1}]
    drawn = ET.fromstring(svg.heat_map("t", rows, 0))
    paths = {e.get("fill-opacity"): e.get("d").count("M") for e in drawn.iter(f"{SVG}path")}
    assert paths == {str(svg.opacity(0)): 2, str(svg.opacity(5)): 1}  # 1 and 2 times the balanced load
    assert svg.heat_map("t", [], 0) == ""


def test_a_heat_map_of_the_norms_of_layers(tmp_path):
    """--log-layers: each norm over the mean of its row; the first layer that is drawn has a name, too."""
    write_rows(tmp_path / "metrics.jsonl", [
        {"step": 1, "loss": 3.0, "grad_norm/wte": 1.0, "grad_norm/blocks.0": 3.0, "grad_norm/head": 2.0},
        {"step": 2, "loss": 3.0}, {"step": 3, "grad_norm/wte": 1.0, "grad_norm/blocks.0": "x"},
        {"step": 4, "grad_norm/wte": 0.0}])
    run = report.read_run(tmp_path)
    assert report.layer_norms(run) == [{"step": 1, "layers": {"wte": 0.5, "0": 1.5, "head": 1.0}},
                                       {"step": 3, "layers": {"wte": 1.0}}]
    tree = elements_of(report.page([run]))
    [drawn] = [e for e in tree.iter(f"{SVG}svg") if e.get("aria-label") == "Gradient norm of a layer"]
    paths = {e.get("fill-opacity"): e.get("d").count("M") for e in drawn.iter(f"{SVG}path")}
    assert paths == {str(svg.opacity(2)): 1, str(svg.opacity(4)): 2, str(svg.opacity(5)): 1}
    said = "".join(drawn.itertext())
    assert "highest 1.50" in said and "wte" in said and "head" in said


def test_a_long_curve_keeps_its_highest_and_lowest_points():
    points = [(i, 1.0) for i in range(100_000)]
    points[31_000], points[77_777] = (31_000, 9.0), (77_777, -2.0)
    kept = svg.thinned(points)
    assert len(kept) <= svg.MOST_POINTS and (31_000, 9.0) in kept and (77_777, -2.0) in kept
    assert kept == sorted(kept) and kept[0][0] == 0


def test_a_large_run_is_read_in_part_and_its_page_is_small_and_quick(tmp_path):
    run = make_run(tmp_path / "a")
    row = '{"step": %d, "loss": 2.5, "grad_norm": 1.0, "lr": 0.001, "ms": 5.0, "x": "' + "x" * 300 + '"}\n'
    (run / "metrics.jsonl").write_text("".join(row % i for i in range(1, 60_001)))  # 22 MB
    layers = json.dumps({str(i): {"load": [1 / 64] * 64} for i in range(48)})
    (run / "experts.jsonl").write_text("".join(f'{{"step": {i}, "layers": {layers}}}\n' for i in range(500)))
    write_rows(run / "notes.jsonl", [{"step": i, "sample": "<" * 5000} for i in range(1000)])
    begun = time.process_time()
    report.write_report(tmp_path / "x.html", [report.read_run(run)])
    assert time.process_time() - begun < 2
    text = (tmp_path / "x.html").read_text()
    assert len(text) < 2e6 and len(elements_of(text)) == 2 and text.count("&lt;" * report.MOST_LETTERS) == 12
    rows, is_whole = spaced_rows(run / "metrics.jsonl")
    steps = [row["step"] for row in rows]
    assert not is_whole and steps[0] == 1 and steps[-1] == 60_000 and 4000 < len(steps) < 9000
    assert steps == sorted(set(steps)) and f"{len(rows)} rows of a longer file" in text
    assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) < 20


def test_foreign_and_missing_files_give_a_page_too(tmp_path):
    elements_of(report.page([report.read_run(tmp_path / "none")]))
    run = make_run(tmp_path / "a", argv=5, machine=[1], steps=None, preset=["x"], world="2")
    for name, row in (("metrics", {"step": 10**30, "loss": True, "ms": 1e308}),
                      ("experts", {"layers": {"0": 3}}), ("notes", {"traffic": [1], "sample": 3})):
        write_rows(run / f"{name}.jsonl", [{"step": -1, "loss": "x"}, {"step": 0, **row}, row])
    elements_of(report.page([report.read_run(run)]))


def test_two_runs_side_by_side(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=8)
    assert plot.main(["a", "b", "--html", "x.html"]) == 0
    tree = elements_of((tmp_path / "x.html").read_text())
    assert len(list(tree.iter(f"{SVG}svg"))) == 6  # four curves together, and a heat map each
    assert {e.get("class") for e in tree.iter(f"{SVG}polyline")} == {"curve s0", "curve s1"}
    assert [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")][4:7] == [
        ["flag", "a", "b"], ["steps", "40", "40"], ["seed", "1337", "8"]]
    assert plot.main(["b", "--html", "x.html"]) == 0  # a page of ours may be written again
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    refused = {"mine.html": "no page of ours", "x.txt": ".html",
               "no/x.html": "; make its folder, or give another --html"}
    for name, words in refused.items():
        with pytest.raises(SystemExit) as end:
            plot.main(["a", "--html", name])
        assert end.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"


def test_a_flag_that_two_presets_set_differently_is_told(tmp_path):
    """Each run has what its preset has, so no flag was typed, and yet they differ."""
    runs = [report.read_run(make_run(tmp_path / preset, preset=preset, bias=bias))
            for preset, bias in (("tiny", False), ("gpt2", True))]
    assert [report.usual(run, "bias") for run in runs] == [False, True]
    told, _, _ = report.configuration(runs).partition("<details>")
    assert "<td>bias</td><td>False</td><td>True</td>" in told and "<td>world</td>" not in told


def test_a_run_leaves_its_page_also_after_a_stop_and_never_fails_for_it(tmp_path):
    flags = [*TINY, "--steps=2", "--save-every=0", "--n-experts=4"]
    got = session(World(), [*flags, f"--out={tmp_path / 'a'}"], {1: signal.SIGTERM})
    said = "".join(elements_of((tmp_path / "a" / "report.html").read_text()).itertext())
    assert got["code"] == 85 and "stopped by SIGTERM after step 1" in said
    assert "busiest expert" in said and "Memory, GB" in said
    *_, held, again = got["out"].splitlines()
    assert "report.html" in held and again.startswith("to go on, type: ") and "--resume auto" in again
    got = session(World(), [*flags, "--no-report", f"--out={tmp_path / 'b'}"])
    assert got["code"] == 0 and not (tmp_path / "b" / "report.html").exists()
    (tmp_path / "c" / "report.html" / "x").mkdir(parents=True)
    got = session(World(), [*flags, "--resume=auto", f"--out={tmp_path / 'c'}"])
    lines = [line for line in got["err"].splitlines() if "report.html" in line]
    assert got["code"] == 0 and len(lines) == 1 and "going on without it" in lines[0], got["err"]


# -----------------------------------------------------------------------------
# In a browser

@pytest.mark.long
def test_pages_fit_into_three_widths_and_ask_for_nothing(tmp_path):
    run = report.read_run(make_run(tmp_path / "a"))
    report.write_report(tmp_path / "one.html", [run])
    report.write_report(tmp_path / "two.html", [run, report.read_run(make_run(tmp_path / "b", seed=8))])
    pages = [tmp_path / "one.html", tmp_path / "two.html"]
    with browser() as chromium:
        for path in pages:
            for width in (375, 800, 1400):
                view = chromium.new_page(viewport={"width": width, "height": 900})
                said = []
                view.on("console", lambda message, said=said: said.append(message.text))
                view.on("pageerror", lambda error, said=said: said.append(str(error)))
                view.on("request", lambda request, said=said: said.append(request.url))
                view.goto(path.as_uri())
                assert view.evaluate("document.documentElement.scrollWidth") <= width, (path.name, width)
                assert said == [path.as_uri()]
                boxes = view.evaluate("[...document.querySelectorAll('svg')].map(e => e.clientWidth)")
                assert boxes and min(boxes) > 300, (path.name, width, boxes)
                letters = view.evaluate("[...document.querySelectorAll('svg .title')].map((e) => "
                                        "e.getBoundingClientRect().height)")
                assert all(12 <= height < 22 for height in letters), (path.name, width, letters)
                if letters and width >= 800:  # two charts stand side by side
                    first, second, *_ = view.locator(".grid svg").all()
                    assert first.bounding_box()["y"] == second.bounding_box()["y"], (path.name, width)
                view.close()
