"""Runs of earlier versions, whose files hold flags that are no flags any more, and command lines with one."""
import json
import zlib

import pytest
from runs import TINY, assert_refused, chars, go, refused, session

import convert
import plan
import sample
from interface.command_line import parse
from runtime.launch import World

BASE = [flag for flag in TINY if "vocab" not in flag]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return chars(tmp_path_factory.mktemp("removed"))


@pytest.fixture(params=["auto", "plain"])
def earlier(request, data, tmp_path):
    """Return a run of two steps, with --kernels in the files that keep its flags."""
    out = tmp_path / "run"
    go(1, out, f"--data={data}", "--steps=2", base=BASE)
    path = out / "config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "kernels": request.param, "products": "torch and ops/"}))

    index = out / "step_000002/index.json"
    body = json.loads(index.read_text())
    del body["crc32"]
    body["meta"]["flags"]["kernels"] = request.param
    text = json.dumps(body, sort_keys=True)
    index.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), **body}, sort_keys=True))
    return out


def test_a_run_with_a_removed_flag_goes_on(earlier, data):
    said = go(1, earlier, f"--data={data}", "--steps=3", "--resume=auto", base=BASE)
    assert "resumed" in said["out"] and said["err"] == ""
    assert "kernels" not in said["out"] and len(said["steps"]) == 1
    assert "kernels" not in json.loads((earlier / "config.json").read_text())


def test_its_flags_and_its_weights_begin_another_run(earlier, data, tmp_path):
    said = session(World(), [f"--config={earlier}", f"--out={tmp_path}/again", "--steps=1"])
    assert said["code"] == 0 and said["err"] == "" and "kernels" not in said["out"]
    assert parse([f"--config={earlier}"]).n_embd == 16
    said = go(1, tmp_path / "tuned", f"--data={data}", "--steps=1", f"--init-from={earlier}", base=BASE)
    assert said["err"] == "" and "kernels" not in said["out"]


def test_it_is_sampled_and_exported(earlier, tmp_path, capsys):
    sample.main([str(earlier), "--prompt", "ab", "--max-new-tokens", "4"])
    convert.main(["export", str(earlier), f"--out={tmp_path}/hf"])
    said, errors = capsys.readouterr()
    assert said.startswith("ab") and "kernels" not in said + errors
    assert (tmp_path / "hf/config.json").exists()


@pytest.mark.parametrize("words", [["--kernels", "plain"], ["--kernels=auto"]], ids=str)
def test_a_command_line_with_a_removed_flag_gets_one_line(words, tmp_path):
    said = session(World(), [*TINY, *words, f"--out={tmp_path}/run"])
    assert_refused(said, "--kernels: leave it out", "pip uninstall flash-attn-4")
    assert not (tmp_path / "run").exists()
    refused(plan.main, ["dense-210m", *words], "--kernels: leave it out")
