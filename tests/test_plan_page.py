"""plan.py --serve: the page asks over HTTP, and has the numbers and the lines of plan.py in a terminal."""
import functools
import json
import threading
from unittest import mock

import pytest
from runs import refused
from test_serve import ask

import plan
from cost.plan_flags import arguments
from interface.serve import Server

EXAMPLE = ["smol-1.7b", "--gpus", "8", "--pp", "4", "--zero", "1", "--global-batch", "64"]


@pytest.fixture(scope="module")
def server():
    made = Server("127.0.0.1", 0)
    made.serve_forever = functools.partial(made.serve_forever, 0.01)
    with mock.patch.object(plan, "Server", lambda host, port: made):
        thread = threading.Thread(target=plan.main, args=([*EXAMPLE, "--serve", "--port", "0"],))
        thread.start()
        while not hasattr(made, "talk"):
            thread.join(0.01)
        yield made
        made.shutdown()
        thread.join()


def printed(argv, capsys):
    plan.main([*argv, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("argv", [
    EXAMPLE, ["tiny", "--data", "synthetic"], ["tiny-moe", "--gpus", "4", "--ep", "4", "--tp", "2"],
    ["dense-210m", "--gpus", "8", "--pp", "2", "--pp-chunks", "3", "--micro-batch", "2", "--tokens", "1e9"]])
def test_the_page_has_the_numbers_of_the_terminal(argv, server, capsys):
    status, text = ask(server, {"words": argv})
    found = json.loads(text)
    assert status == 200 and found["plan"] == printed(argv, capsys)
    assert arguments(found["words"])[0] == arguments(argv)[0]
    cfg, _ = arguments([*argv, "--json"])
    assert (found["schedule"] is None) == (cfg.pp == 1)


@pytest.mark.parametrize("words", [
    ["smol-1.7b", "--gpus", "8", "--tp", "3"], ["smol-17b"],
    ["tiny", "--gpus", "1", "--pp", "2"], ["gpt2", "--gpus", "7"]])
def test_wrong_flags_are_the_line_of_the_terminal(words, server):
    line = refused(plan.main, words).removeprefix("nanoshard: ")
    assert ask(server, {"words": words}) == (400, line)
    assert ask(server, {"words": ["tiny"]})[0] == 200, "the next question is answered"


def test_the_page_is_one_file_for_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    status, page = ask(server, method="GET")
    assert status == 200 and "NONCE" not in page and "SETTINGS" not in page
    for word in ("https://", "innerHTML", "src=", "@import"):
        assert word not in page


def test_the_words_of_the_page_give_the_same_flags_in_a_terminal():
    argv = ["gpt2", "--gpus", "2", "--tp", "2", "--no-compile", "--qk-norm", "head", "--data", "data/stdlib",
            "--lr", "1e-3", "--rampup-batch-size", "32", "32", "4800", "--tied", "--min-lr", "0"]
    cfg, _ = arguments(argv)
    assert arguments(["tiny-moe", "--tp", "2", "--ep", "4", "--pp", "2"])[0].gpus == 8, "as few as it needs"
    found = plan.filled(cfg)
    assert arguments(found["words"])[0] == cfg
    del found["values"]["preset"]
    form = [word for pair in found["values"].items() for word in pair]
    assert arguments([*argv, *form])[0] == cfg, "each field is read as it stands in the form"
    serving, _ = arguments([*EXAMPLE, "--serve", "--port", "1"])
    assert plan.page_settings(serving)["words"] == EXAMPLE


def test_the_schedule_that_is_drawn():
    """Each micro-batch goes forward and backward through each chunk of each rank, one after the other."""
    cfg, _ = arguments(["tiny", "--gpus", "2", "--pp", "2", "--pp-chunks", "2", "--micro-batch", "2",
                        "--global-batch", "8"])
    drawn = plan.schedule(cfg)
    assert drawn["micro_batches"] == 4
    for rank in range(2):
        ops = [op for op in drawn["ops"] if op["rank"] == rank]
        assert len({(op["kind"], op["micro_batch"], op["chunk"]) for op in ops}) == len(ops) == 16
        assert all(one["end"] <= other["begin"] for one, other in zip(ops, ops[1:], strict=False))
        assert sum(op["end"] - op["begin"] for op in ops) == 24
    last = max(op["end"] for op in drawn["ops"])
    assert last / 24 - 1 == pytest.approx(drawn["idle"])


@pytest.mark.long
def test_the_page_in_a_browser(server, view, capsys):
    view.goto(f"http://127.0.0.1:{server.server_address[1]}/")
    view.wait_for_selector(".rank div")
    assert view.inner_text("#command") == f"python plan.py {' '.join(EXAMPLE)}"
    view.select_option("select[name=preset]", "moe-4b")
    view.wait_for_selector("#command:has-text('moe-4b')")
    assert view.input_value("[name=--n-experts]") == "64" and view.input_value("[name=--gpus]") == "8"
    view.fill("input[name=--ep]", "4")
    words = ["moe-4b", "--gpus", "8", "--ep", "4"]
    view.wait_for_selector(f"#headline:has-text('{printed(words, capsys)['ms']:,.1f} ms')")
    assert view.inner_text("#command") == f"python plan.py {' '.join(words)}"
    view.fill("input[name=--tp]", "3")
    view.wait_for_selector("#bad:has-text('does not divide by tp 3')")
