"""Other trainers beside ours: what a cell trains, how cells run, the table, and published figures."""
import dataclasses
import importlib
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pool import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import peer_cell
import peers
import published

import plan
from cost.parameters import count_parameters
from cost.plan_flags import PlanFlags
from interface.command_line import parse
from runtime.launch import World

# A package with nanoGPT's interface: its GPT has as many parameters as ours, and predicts from one token.
STAND_IN = '''
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, layers = config.n_embd, config.n_layer
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.places = nn.Embedding(config.block_size, width)
        self.blocks = nn.Parameter(torch.zeros(layers * (12 * width**2 + 2 * width) + width + EXTRA))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)

    def forward(self, x, y):
        logits = F.linear(self.tokens(x) + self.places.weight[:x.size(1)], self.tokens.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0 * self.blocks.sum()
'''


@pytest.fixture
def stand_in(tmp_path):
    def write(extra=0):
        folder = tmp_path / f"nanoGPT{extra}"
        folder.mkdir()
        (folder / "model.py").write_text(STAND_IN.replace("EXTRA", str(extra)))
        return str(folder)
    return write


def cell(workload, trainer, path=""):
    flags = peer_cell.Flags(workload, trainer, path=path, steps=4, tiny=True)
    return peer_cell.run(flags, World())


@pytest.mark.long
def test_a_table_of_ours_and_others(stand_in, tmp_path, capsys, monkeypatch):
    """One peer runs, one has no path; each cell is a line of JSON, and the ratio is that of their rates."""
    rows, finish = tmp_path / "rows.jsonl", peers.finish

    def ours_here(command, env, out, seconds, **files):  # the peer runs in a process of its own
        if "ours" not in command:
            return finish(command, env, out, seconds, **files)
        peer_cell.main(command[2:])
        return True

    monkeypatch.setattr(peers, "finish", ours_here)
    peers.main(["G2", "--tiny", "--steps", "4", "--trainers", "ours", "nanogpt", "nanochat", "--markdown",
                "--nanogpt", stand_in(), "--json", str(rows), "--logs", str(tmp_path / "logs")])
    ours, theirs, absent = map(json.loads, rows.read_text().splitlines())
    assert [row["trainer"] for row in (ours, theirs, absent)] == ["ours", "nanogpt", "nanochat"]
    assert absent["why"] == "not here: give --nanochat PATH"
    assert ours["parameters"] == theirs["parameters"] == 33952 and ours["gpus"] == 1
    assert theirs["windows"][0]["steps"] == [2, 4], "the last half counts"
    assert (tmp_path / "logs/G2-1-nanogpt.log").exists()
    header, _, line = capsys.readouterr().out.splitlines()[-3:]
    assert header == "| workload | GPUs | ours | nanogpt | nanochat | ratio | goal |"
    found = line.strip("| ").split(" | ")
    assert found[:2] == ["G2", "1"] and found[4:] == ["-", f"{ours['tok_s_gpu'] / theirs['tok_s_gpu']:.2f}",
                                                      "1.25"]
    assert found[3] == f"{theirs['tok_s_gpu'] / 1e3:.1f} ({theirs['ms']:.2f})"


def test_a_model_of_another_size_is_refused(stand_in, capsys):
    with pytest.raises(SystemExit) as end:
        cell("G2", "nanogpt", stand_in(extra=1))
    assert end.value.code == 2
    assert "NanoGPT has 33,953 parameters where ours has 33,952" in capsys.readouterr().err


@pytest.mark.parametrize("workload, trainer", [("W1", "hf"), ("G2", "hf-bf16"), ("W2b", "hf"),
                                               ("BERT", "hf")])
def test_a_cell_of_transformers(workload, trainer, hf):
    """Each kind of model begins at the loss of a guess, and learns: with ours' batches and parameters."""
    row = cell(workload, trainer)
    flags = peer_cell.train_flags(peer_cell.Flags(workload, "ours", tiny=True), 1)
    ours = count_parameters(parse(flags.split(), data="synthetic"), 256)["total"]
    assert row["parameters"] - sum(row["beside_ours"].values()) == ours
    assert list(row["beside_ours"]) == {"G2": ["biases"], "BERT": ["token types"]}.get(workload, [])
    assert row["loss"][0] == pytest.approx(math.log(256), abs=0.1) and row["loss"][0] != row["loss"][1]


def test_transformers_draws_weights_on_the_device(hf, monkeypatch):
    devices = []

    def llama(shape):
        devices.append(torch.get_default_device())
        return torch.nn.Embedding(shape.vocab_size, shape.hidden_size)

    assert hf.LlamaForCausalLM  # when it is first read, transformers can put another module into sys.modules
    monkeypatch.setattr(sys.modules["transformers"], "LlamaForCausalLM", llama)
    monkeypatch.setattr(peer_cell.Transformers, "check_count", lambda self: None)
    monkeypatch.setattr(peer_cell.Transformers, "prepare", lambda self: None)
    cfg = parse(f"dense-210m {peer_cell.TINY}".split(), data="synthetic")
    peer = peer_cell.TransformersBf16(cfg, World(device=torch.device("meta")), 256, "")
    assert devices == [torch.device("meta")] and peer.model.weight.is_meta


def test_a_step_trains_on_the_next_tokens(hf):
    """transformers' loss is that of the targets as they are, not shifted again; a step accumulates."""
    cfg = parse(f"dense-210m {peer_cell.TINY}".split(), data="synthetic")
    peer = peer_cell.Transformers(cfg, World(), 256, "")
    x, y = torch.randint(256, (2, 4, 32))
    want = F.cross_entropy(peer.model(input_ids=x).logits.flatten(0, 1), y.flatten())
    torch.testing.assert_close(peer.loss(x, y), want)
    before = {name: p.detach().clone() for name, p in peer.model.named_parameters()}
    peer.set_rate(1e-2)
    loss = peer.step([(x[:2], y[:2]), (x[2:], y[2:])])
    torch.testing.assert_close(loss, want.detach())
    assert all((p != before[name]).any() for name, p in peer.model.named_parameters())
    assert all(p.grad is None for p in peer.model.parameters())


@pytest.mark.parametrize("package, modules", [
    ("flash_attn", peer_cell.FLASH_ATTN), ("datasets", peer_cell.DATASETS),
    ("torchdata", peer_cell.TORCHDATA)])
def test_a_peer_needs_no_package_that_its_cell_does_not_use(package, modules, monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    before = set(sys.modules)
    peer_cell.stand_in_for(package, modules)
    try:
        for path, names in modules.items():
            assert all(isinstance(getattr(importlib.import_module(path), name), type) for name in names)
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]


def test_a_package_that_is_installed_has_no_stand_in():
    before = dict(sys.modules)
    peer_cell.stand_in_for("torch", {"torch.no_such_module": ("Name",)})
    assert sys.modules == before


def test_a_peer_without_recomputation_refuses_it():
    """All trainers get the same flags: one that ignored --recompute would compare another step."""
    cfg = parse(f"dense-210m {peer_cell.TINY} --recompute full".split(), data="synthetic")
    with pytest.raises(ValueError, match="--recompute full: Transformers keeps all activations here"):
        peer_cell.Transformers(cfg, World(), 256, "")


def test_the_8b_model_is_llamas_and_fits_one_gpu_by_prediction():
    """Of 139.8 GiB it needs 125 with full recomputation, and 134 with selective. Two GPUs use ZeRO-3."""
    def flags_of(trainer, gpus):
        return peer_cell.train_flags(peer_cell.Flags("8B", trainer), gpus)

    assert "--zero 3" in flags_of("ours", 2) and "--zero" not in flags_of("ours", 1)
    assert "--zero" not in flags_of("torchtitan", 2)
    cfg = parse(flags_of("ours", 1).split(), data="synthetic", global_batch=1)
    assert count_parameters(cfg, cfg.vocab_size)["total"] == 8030261248
    assert (cfg.seq_len, cfg.rope_base, cfg.rope_scaling) == (8192, 500000.0, (8.0, 1.0, 4.0, 8192.0))
    assert (cfg.n_head, cfg.n_kv_head, cfg.ffn_hidden, cfg.tied) == (32, 8, 14336, False)
    needed = {}
    for recompute in ("full", "selective", "none"):
        layout = dataclasses.replace(cfg, recompute=recompute)
        found = plan.estimate(layout, 1, "h200", cfg.vocab_size)
        needed[recompute] = found["memory"]
        assert found["fits"] == (recompute != "none")
    assert needed["full"] == pytest.approx(125.0, abs=1)
    assert needed["selective"] == pytest.approx(134.0, abs=1)
    two = parse(f"{flags_of('ours', 2)} --recompute selective".split(), data="synthetic", global_batch=2)
    assert plan.estimate(two, 2, "h200", cfg.vocab_size)["fits"]


def test_llama_7b_trains_over_two_gpus_with_zero_3():
    """By prediction it needs 79 GiB per GPU there."""
    flags = peer_cell.train_flags(peer_cell.Flags("7B", "ours"), 2)
    cfg = parse(flags.split(), data="synthetic", global_batch=4)
    assert (cfg.zero, cfg.micro_batch) == (3, 2)
    assert plan.estimate(cfg, 2, "h200", 32000)["memory"] == pytest.approx(79.3, abs=1)


@pytest.mark.parametrize("workload", ["7B", "8B"])
def test_torchtitan_alone_has_what_large_models_need(workload):
    """The other peers here neither recompute nor cut weights between the ranks."""
    assert [peer for peer, (_, names) in peer_cell.PEERS.items() if workload in names] == ["torchtitan"]


# -----------------------------------------------------------------------------
# How cells run

class Recorder:
    """A Runner that keeps who ran where and when."""

    def __init__(self, shown):
        self.shown, self.ran, self.most, self.lock = shown, [], 0, threading.Lock()
        self.busy = set()

    def run(self, cell, gpus):
        with self.lock:
            assert not self.busy & set(gpus), "a GPU that is in use"
            self.busy |= set(gpus)
            self.most = max(self.most, len(self.busy))
        time.sleep(0.02)
        with self.lock:
            self.busy -= set(gpus)
            self.ran.append((cell, list(gpus)))


def test_the_trainers_of_a_workload_share_a_gpu():
    flags = peers.Flags(("G2", "W1", "W3"), ("ours", "hf", "nanogpt"))
    groups = peers.cells_of(flags, [1, 2])
    assert [len(group) for group in groups] == [3, 2, 2] * 2, "nanoGPT has no Llama"
    runner = Recorder(["0", "1"])
    peers.run_all(runner, groups)
    alone = [(cell, gpus) for cell, gpus in runner.ran if cell.gpus == 1]
    for workload in flags.workloads:
        assert len({tuple(gpus) for cell, gpus in alone if cell.workload == workload}) == 1
    assert runner.most == 2 and len(alone) == 7
    assert [gpus for cell, gpus in runner.ran if cell.gpus == 2] == [[0, 1]] * 7


def finished(code, tmp_path, seconds, cut=None):
    """Return (what finish() returned for a program, the seconds that it took). The program knows its row."""
    with (tmp_path / "log").open("w") as out:
        began = time.monotonic()
        code = f"row = {str(tmp_path / 'row')!r}\n{code}"
        in_time = peers.finish([sys.executable, "-S", "-c", code], None, out, seconds, row=tmp_path / "row",
                               cut=cut or threading.Event())
        return in_time, time.monotonic() - began


def is_alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_cell_that_fails_or_takes_too_long(tmp_path):
    in_time, _ = finished("raise ValueError('no such width')", tmp_path, 30)
    assert in_time and peers.reason((tmp_path / "log").read_text()) == "ValueError: no such width"
    in_time, took = finished("import time; time.sleep(60)", tmp_path, 0.2)
    assert not in_time and took < 20
    torchrun = ("[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n[rank1]:   in step\n"
                "nanoshard: rank 0 lost a peer (Connection closed by peer): see its error\n"
                "torch.distributed.DistBackendError: NCCL error, remote process exited\n"
                "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\n")
    assert peers.reason(torchrun) == "torch.OutOfMemoryError: CUDA out of memory."
    lost = "nanoshard: rank 0 lost a peer (Connection closed by peer): see its error"
    assert peers.reason(lost) == lost, "the only line that there is"
    assert peers.reason("") == "no output"


def test_a_cell_that_hangs_after_its_row_is_ended_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "LAST_SECONDS", 0.2)
    in_time, took = finished("import time; open(row, 'w').write('{\"ms\": 1}'); time.sleep(60)", tmp_path, 50)
    assert not in_time and took < 20
    found = peers.result_of(tmp_path / "row", tmp_path / "log", in_time, 50, threading.Event())
    assert found == {"ms": 1}, "its figures count"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_nothing_that_a_cell_started_is_left(tmp_path, monkeypatch):
    """A rank in a session of its own, as torchrun starts it, under a launcher that does not end."""
    monkeypatch.setattr(peers, "GRACE_SECONDS", 0.5)
    code = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], start_new_session=True)
print(rank.pid, flush=True)
time.sleep(60)
"""
    in_time, took = finished(code, tmp_path, 2)
    assert not in_time and took < 20
    pid = int((tmp_path / "log").read_text())
    for _ in range(50):  # the kernel needs a moment
        if not is_alive(pid):
            return
        time.sleep(0.1)
    raise AssertionError("the rank is still there")


def test_a_table_that_is_asked_to_end(stand_in, tmp_path, capsys):
    """After SIGTERM the cell that runs is ended, the others are left out, and the table is printed."""
    folder = stand_in()
    Path(folder, "model.py").write_text("import time\ntime.sleep(120)\n")
    rows = tmp_path / "rows.jsonl"
    threading.Timer(1.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
    began, before = time.monotonic(), signal.getsignal(signal.SIGTERM)
    code = peers.main(["G2", "WP", "--tiny", "--steps", "4", "--trainers", "nanogpt", "--nanogpt", folder,
                       "--json", str(rows)])
    assert code == 1 and time.monotonic() - began < 40
    assert [json.loads(line)["why"] for line in rows.read_text().splitlines()] == [
        "ended: this program was asked to end", "left out: this program was asked to end"]
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["WP", "1", "-"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_limit_ends_the_cell_that_runs(stand_in, tmp_path):
    folder, rows = stand_in(), tmp_path / "rows.jsonl"
    Path(folder, "model.py").write_text("import time\ntime.sleep(120)\n")
    assert peers.main(["G2", "WP", "--tiny", "--steps", "4", "--trainers", "nanogpt", "--nanogpt", folder,
                       "--limit", "2", "--json", str(rows)]) == 0
    first, second = (json.loads(line)["why"] for line in rows.read_text().splitlines())
    assert first == "ended after 2 s; see --cell-seconds and --limit"
    assert second == "left out: --limit 2 is over"


def test_what_a_cell_is_started_with():
    flags = peers.Flags(("W1",), picotron="P", steps=8)
    runner = peers.Runner(flags, "xpu", ["4", "7"])
    alone, both = (peers.Cell("W1", n, "picotron") for n in (1, 2))
    env = runner.environment(alone, [1])
    assert env[peers.visible.VARIABLE] == "7" and env["LOCAL_RANK"] == "0"
    assert (env["DEVICE"], env["FLASH_ATTEN"], env["DTYPE"]) == ("xpu", "0", "bfloat16")
    assert runner.environment(both, [0, 1])[peers.visible.VARIABLE] == "4,7"
    command = runner.command(both, "row.json")
    assert command[command.index("--nproc-per-node") + 1] == "2" and command[-2:] == ["--path", "P"]
    on_text = peer_cell.train_flags(peer_cell.Flags("W1", "hf", tiny=True, data="text"), 1)
    assert on_text.endswith("--data text --vocab-size 0"), "a tiny model takes the vocabulary of the data"
    runner.ends = 0
    runner.run(peers.Cell("W1", 1, "ours"), [0])
    assert "--limit" in next(iter(runner.rows.values()))["why"]


@pytest.mark.parametrize("argv, words", [
    ([], "at least one workload"), (["G2", "--nanogpt", "nowhere", "--tiny"], "nowhere has no model.py"),
    (["G2", "--gpus", "0", "--tiny"], "--gpus 0")])
def test_wrong_flags_are_one_line(argv, words, capsys):
    with pytest.raises(SystemExit) as end:
        peers.main(argv)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and words in said


# -----------------------------------------------------------------------------
# Published figures

def test_published_shapes_are_theirs():
    """Our model of each shape has their parameters, as far as they published the number."""
    sizes = {"gpt2-124m": 124.4e6, "gpt2-1558m": 1557.6e6, "mpt-760m": 760470528, "mpt-1b": 1315950592,
             "mpt-3b": 2651837440, "mpt-7b": 6658859008, "llama-8b": 8030261248, "smollm-1.7b": 1.812e9,
             "qwen3-30b-a3b": 30.53e9}
    for shape in published.SHAPES:
        cfg = parse(shape.flags.split(), PlanFlags, data="synthetic")
        count = count_parameters(cfg, cfg.vocab_size)["total"]
        if shape.name in sizes:
            assert count == pytest.approx(sizes[shape.name], rel=2e-3), shape.name
        assert shape.source.startswith("https://") and shape.hardware and shape.precision and shape.note


def test_a_published_shape_gets_a_layout_that_fits():
    shapes = {shape.name: shape for shape in published.SHAPES}
    flags, found = published.choose(shapes["mpt-1b"], 2, "h200")
    assert found["memory"] < published.MARGIN * found["capacity_gib"]
    cfg = parse(flags.split(), data="synthetic")
    assert cfg.global_batch == 28 and cfg.micro_batch == 14, "no power of two"
    said, found = published.choose(shapes["mpt-7b"], 1, "a100-40")
    assert found is None and said.startswith("does not fit: needs ") and "a100-40 has 39.4" in said
    assert published.choose(shapes["llama-8b-64k"], 1, "h200") == ("needs 2 GPUs or a multiple", None)


@pytest.mark.long
def test_what_fits_in_no_layout_is_planned_with_split_masters():
    """30.5 B weights on 4 GPUs: fp32 masters would need more than they have."""
    shape = next(shape for shape in published.SHAPES if shape.name == "qwen3-30b-a3b")
    flags, found = published.choose(shape, 4, "h200")
    cfg = parse(flags.split(), data="synthetic")
    most = published.MARGIN * found["capacity_gib"]
    assert cfg.split_masters and found["memory"] < most
    whole = dataclasses.replace(cfg, split_masters=False)
    assert plan.estimate(whole, 4, "h200", plan.vocabulary(whole))["memory"] > most
    row = {"train": flags, "layout": found["layout"]}
    assert published.words(row).endswith(" --split-masters")


@pytest.mark.long
def test_a_plan_of_published_shapes_is_in_their_precision(tmp_path, capsys):
    """And what fits in no layout is said with what it needs at least, which is with --split-masters."""
    file = tmp_path / "rows"
    argv = ["d26-fp8", "d26", "qwen3-30b-a3b", "--plan", "--gpus", "2", "--gpu", "h200", "--json", str(file)]
    assert published.main(argv) == 0
    in_8_bits, in_bf16, qwen = map(json.loads, file.read_text().splitlines())
    assert "--fp8" in in_8_bits["train"] and "--fp8" not in in_bf16["train"]
    shape = next(shape for shape in published.SHAPES if shape.name == "qwen3-30b-a3b")
    cfg = dataclasses.replace(published.config(published.on_gpu(shape, "h200"), 2), split_masters=True)
    least = min(found["memory"] for found in published.plans_of(cfg, 2, "h200"))
    assert f"needs {least / published.MARGIN:.0f} GiB" in qwen["why"] and "--split-masters" in qwen["why"]


def test_shapes_that_they_ran_in_8_bits_run_so_where_the_gpu_can():
    shapes = {shape.name: shape for shape in published.SHAPES}
    theirs = shapes["llama-8b-float8"]
    ours = published.on_gpu(theirs, "h100")
    assert parse(ours.flags.split(), PlanFlags, data="synthetic").fp8
    assert ours._replace(flags=theirs.flags) == theirs
    assert published.on_gpu(theirs, "a100-80") == theirs == published.on_gpu(theirs, "cpu")
    assert published.on_gpu(shapes["llama-8b"], "h100") == shapes["llama-8b"], "in bf16, as theirs"
    flags, found = published.choose(ours, 4, "h200")
    assert parse(flags.split(), data="synthetic").fp8
    assert published.words({"train": flags, "layout": found["layout"]}).endswith(" --fp8")


def test_published_figures_stand_beside_ours(tmp_path, capsys, monkeypatch):
    def here(command, env, out, seconds, row, cut):
        published.main(command[2:])
        return True

    file = tmp_path / "rows.jsonl"
    monkeypatch.setattr(published, "finish", here)  # the rehearsal needs no process of its own
    published.main(["d26-fp8", "d26", "--tiny", "--gpus", "1", "--steps", "4", "--json", str(file)])
    first, second = map(json.loads, file.read_text().splitlines())
    assert [first["name"], second["name"]] == ["d26-fp8", "d26"], "in the order in which they are named"
    assert first["ours"] == second["ours"] and first["ours"]["tok_s_gpu"] > 0, "the shape ran once"
    said = capsys.readouterr().out
    assert "ratio" not in said and "92,500" in said and "FP8" in said and "dev/LOG.md" in said


def test_published_shapes_after_the_limit_are_left_out(capsys, monkeypatch):
    def slow(command, env, out, seconds, row, cut):
        assert seconds <= 1, "what is left of --limit"
        time.sleep(1.1)
        return False

    monkeypatch.setattr(published, "finish", slow)
    assert published.main(["gpt2-124m", "d24", "--tiny", "--gpus", "1", "--limit", "1"]) == 0
    said = capsys.readouterr().out
    assert "gpt2-124m on 1 cpu: ended after 1 s" in said
    assert "d24 on 1 cpu: left out: --limit 1 is over" in said


def test_a_layout_with_a_graph_goes_before_one_as_fast():
    """On one GPU all ZeRO levels take equally long by prediction, and only 0 and 1 are graphs."""
    def plan(ms, zero, recompute="none"):
        return {"ms": ms, "layout": {"zero": zero, "pp": 1, "recompute": recompute}}

    plans = [plan(100, 3), plan(100, 1), plan(100, 0), plan(101.9, 0, "selective")]
    assert published.plainest(plans) is plans[2]
    plans = [plan(100, 2), plan(101.9, 1), plan(103, 0)]
    assert published.plainest(plans) is plans[1], "within 2 per cent"
    plans = [plan(100, 3, "selective"), plan(103, 1)]
    assert published.plainest(plans) is plans[0]
    shape = next(shape for shape in published.SHAPES if shape.name == "gpt2-124m")
    assert "--zero 0" in published.choose(shape, 1, "h200")[0]
