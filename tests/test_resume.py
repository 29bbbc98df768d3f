"""Stop and resume: a resumed run equals the uninterrupted one bit for bit, whatever stopped it.

Also --train-range-to-skip, and a few of the kill drills.
"""
import contextlib
import io
import json
import shutil
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from pool import run_ranks
from runs import TINY, assert_refused, final, go, rows, same, session

import checkpoint
import prepare
from interface import files
from runtime import agree, resume
from runtime.agree import Stop
from runtime.launch import World

sys.path.insert(0, str(Path(__file__).parent / "drills"))
import kill

# -----------------------------------------------------------------------------
# Stop and resume

MOE = ["--n-experts=4", "--top-k=2", "--router=sigmoid", "--router-bias-rate=0.01", "--aux-coef=0.01"]


@pytest.mark.parametrize("n,zero,model", [
    (1, 0, []), (2, 1, [*MOE, "--ep=2"]), (2, 3, []),
    (2, 0, ["--n-layer=4", "--pp=2", "--pp-chunks=2", "--tied"]),
    pytest.param(1, 1, MOE, marks=pytest.mark.long), pytest.param(2, 1, [], marks=pytest.mark.long),
    pytest.param(2, 1, ["--cp=2"], marks=pytest.mark.long)],
    ids=["1", "2zero-moe-ep2", "2zero3", "2pp", "1moe", "2zero", "2zero-cp2"])
def test_resumed_equals_uninterrupted(n, zero, model, toy, tmp_path):
    flags = [*model, f"--data={toy}", "--vocab-size=0", "--dropout=0.2", f"--zero={zero}", "--save-every=2",
             "--eval-every=2", "--eval-iters=2", "--check-every=2", "--decay-steps=4", "--steps"]
    whole, half = tmp_path / "whole", tmp_path / "half"
    go(n, whole, *flags, 4)
    first = go(n, half, *flags, 2)
    assert not Path(half, "step_000004").exists()
    prompt = ["--prompt=a"] * (zero in (0, 3))  # sampling text must not advance training's random numbers
    second = go(n, half, *flags, 4, "--resume=auto", *prompt)
    assert f"resumed {half}/step_000002" in second["out"]
    assert [s["first"] for s in first["steps"] + second["steps"]] == [0, 4, 8, 12]
    same(whole, half, 4)
    if MOE[0] in model:
        assert any(n.endswith("router.bias") and t.any() for n, t in final(half, 4)[0].items())
    assert rows(whole) == rows(half) and [r["step"] for r in rows(half)] == [1, 2, 3, 4]
    assert ["val_loss" in r for r in rows(half)] == [False, True] * 2
    if n > 1 or model:
        return
    # A PATH outside --out gives only the later rows. A PATH inside --out replaces the later rows.
    go(n, tmp_path / "other", *flags, 4, f"--resume={whole}/step_000002")
    same(whole, tmp_path / "other", 4)
    assert rows(tmp_path / "other") == rows(whole)[2:]
    before = rows(whole)
    go(n, whole, *flags, 4, f"--resume={whole}/step_000002")
    assert rows(whole) == before
    same(whole, half, 4)


def test_a_resume_of_an_earlier_step_moves_what_is_later_aside(tmp_path):
    """Its rows are copied: with other flags they would never be written again."""
    go(1, tmp_path, "--steps=4", "--save-every=2")
    (tmp_path / "notes.jsonl").write_text('{"step": 4, "sample": "x"}\n')
    losses = []
    for lr, copy in (("0.5", "metrics.jsonl.aside"), ("0.1", "metrics.jsonl.aside.1")):
        losses.append([row["loss"] for row in rows(tmp_path)])
        said = go(1, tmp_path, "--steps=4", "--save-every=2", f"--resume={tmp_path}/step_000002",
                  f"--lr={lr}")["out"]
        assert f"all rows until now are also in {tmp_path / copy}" in said
        assert [row["loss"] for row in files.sound_rows(tmp_path / copy)] == losses[-1]
        assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
        assert (tmp_path / copy.replace("metrics", "notes")).exists()  # of later steps, too
    assert losses[0][:2] == losses[1][:2] and losses[0][3] != losses[1][3]
    assert len(list(tmp_path.glob("step_000004.aside*"))) == 2


def test_a_refused_command_moves_nothing(tmp_path):
    out = tmp_path / "run"
    go(1, out, "--steps=2", "--save-every=1")

    def everything():
        return {p: p.is_dir() or p.read_bytes() for p in tmp_path.rglob("*") if p.name != ".lock"}
    before = everything()
    for flags, word in (
            ([f"--init-from={out}/step_000002", "--n-experts=2", "--n-embd=32"], "n-embd 16"),
            (["--dump-grads=/proc/none/g.safetensors"], "/proc/none"),
            ([f"--resume={out}/step_000001", "--seed=5"], "--seed"),  # would rename step_000002
            ([f"--resume={out}/step_000007"], "no checkpoint")):
        assert_refused(session(World(), [*TINY, f"--out={out}", *flags]), word)
        assert everything() == before, word


def test_resume_of_a_finished_run_changes_nothing(tmp_path):
    go(1, tmp_path, "--steps=3")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"}
    again = go(2, tmp_path, "--steps=3", "--resume=auto", "--plot")
    assert again["steps"] == [] and len(again["out"].splitlines()) == 2
    assert f"{tmp_path} has all its 3 steps; give a larger --steps to go on, or --resume none" in again["out"]
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p in before}
    again = go(1, tmp_path, "--steps=4", "--resume=auto")
    assert len(again["steps"]) == 1 and "lr 0.001 -> 0.0055, as it decays until step 4" in again["out"]
    assert "--decay-steps 3 keeps its curve" in again["out"]


def heed(world, number):
    """A rank of the pool obeys this signal from now on. It inherits what nohup and a script's & ignore."""
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)


STOPPED = ["--steps=6", "--dropout=0.1", "--zero=1"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    go(2, out, *STOPPED)
    return out


@pytest.mark.parametrize("why", [
    "SIGTERM", "SIGINT", "--max-minutes",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("SIGUSR1", "SIGHUP"))])
def test_a_stopped_run_saves_and_exits_with_85(why, uninterrupted, tmp_path):
    out = tmp_path / "stopped"
    if why == "--max-minutes":
        stopped = go(2, out, *STOPPED, "--max-minutes=1e-6", code=85)
        at = 1
    else:
        run_ranks(2, heed, getattr(signal, why))
        stopped = go(2, out, *STOPPED, plan={3: getattr(signal, why).value}, code=85)
        at = 3  # the step in progress is completed
    assert f"stopped by {why.strip('-')} after step {at}" in stopped["out"] and len(stopped["steps"]) == at
    assert [p.name for p in checkpoint.steps(out)] == [f"step_{at:06d}"]
    resumed = go(2, out, *STOPPED, "--resume=auto")
    assert resumed["steps"][0]["first"] == 4 * at
    same(uninterrupted, out, 6)
    assert rows(uninterrupted) == rows(out)


def test_max_minutes_keeps_the_time_of_three_steps_and_two_saves(monkeypatch):
    now, handlers = [1000.0], {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stop, never = Stop(10.0), Stop(0.0)  # minutes
    for s, handler in handlers.items():
        signal.signal(s, handler)
    said = []
    for seconds, save in ((0, 0), (540, 0), (554, 15), (556, 15), (571, 15), (589, 15), (591, 15)):
        now[0] = 1000.0 + seconds  # at last 3 * 5 + 2 * 15 s in reserve
        said.append(stop.poll(World(), now[0], save))
        if seconds == 540:
            for took in (2.0, 5.0, 1.0):
                said.append(stop.poll(World(), now[0] - took, save))  # at last 3 * 5 s in reserve
    assert said == [None] * 6 + ["max-minutes"] * 4 and never.poll(World(), now[0], 15) is None


def session_whose_votes_are_read_late(world, argv, at):
    """A session as on a GPU: the host reads the votes of the step before. Which step does it stop after?"""
    class Copied:
        def synchronize(self):
            pass

    copied = mock.patch.object(agree, "start_copy", lambda sums: (sums.clone(), Copied()))
    with copied, mock.patch.object(agree, "PROMPT", ()):
        result = session(world, argv, {at: signal.SIGTERM})
    return result["code"], len(result["steps"])


def test_a_vote_to_stop_travels_with_the_statistics_and_is_read_a_step_later_on_a_gpu(tmp_path):
    argv = [*TINY, "--steps=9", "--save-every=0"]
    asked = [*argv, f"--out={tmp_path}/late"]
    assert run_ranks(2, session_whose_votes_are_read_late, asked, 3) == [(85, 4)] * 2
    prompt = run_ranks(2, session, [*argv, f"--out={tmp_path}/prompt"], {3: signal.SIGTERM})
    assert [(r["code"], len(r["steps"])) for r in prompt] == [(85, 3)] * 2


def test_the_file_stop_is_looked_at_and_removed_at_the_start(tmp_path, capsys):
    stop, other = Stop(0.0), Stop(0.0)
    now = time.monotonic()
    (tmp_path / "stop").touch()  # an earlier run obeyed it
    stop.watch_file(tmp_path)
    assert "removed" in capsys.readouterr().out and not (tmp_path / "stop").exists()
    assert stop.poll(World(), now, 0.0) is None
    (tmp_path / "stop").touch()
    assert stop.poll(World(), now, 0.0) == "the file stop" and other.poll(World(), now, 0.0) is None


def test_a_run_stopped_in_its_last_step_is_done(tmp_path):
    """No step is left, so the job must not be requeued: exit code 0, the final checkpoint."""
    got = go(2, tmp_path, "--steps=3", "--save-every=2", plan={3: signal.SIGTERM.value})
    assert "done after step 3" in got["out"] and "stopped by" not in got["out"]
    assert checkpoint.steps(tmp_path)[0].name == "step_000003"


def session_without_room(world, argv, plan):
    with mock.patch.object(checkpoint, "commit", side_effect=OSError("no room")):
        return session(world, argv, plan)


@pytest.mark.parametrize("plan", [{}, {2: signal.SIGTERM}], ids=["done", "stopped"])
def test_a_run_that_lost_its_last_save_has_failed(plan, tmp_path):
    """No script may requeue it: its last steps are lost."""
    (got,) = run_ranks(1, session_without_room, [*TINY, "--steps=3", f"--out={tmp_path}"], plan)
    assert got["code"] == 1 and f"lost its last save after step {3 - len(plan)}" in got["out"]


OTHER_SHAPES = [  # (name, value in the checkpoint, another one)
    ("n_layer", 2, 3), ("n_head", 2, 4), ("n_kv_head", 1, 2), ("ffn_hidden", 32, 64), ("tied", False, True),
    ("norm", "rms", "layer"), ("n_experts", 4, 8)]


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    def flags(**changed):
        shape = {name: there for name, there, _ in OTHER_SHAPES}
        return [f"--{k.replace('_', '-')}={v}" for k, v in (shape | changed).items()]
    go(1, tmp_path / "run", *flags(), "--steps=1")
    argv = [*TINY, "--steps=1", f"--out={tmp_path / 'new'}", f"--resume={tmp_path}/run/step_000001"]
    for name, there, here in OTHER_SHAPES:
        got = session(World(), [*argv, *flags(**{name: here})])
        assert_refused(got, f"--{name.replace('_', '-')} {there} (this run: {here})", "step_000001")
    got = session(World(), [*argv, *flags(n_layer=3, ffn_hidden=64)])  # all are named at once
    assert_refused(got, "--n-layer 2 (this run: 3), --ffn-hidden 32 (this run: 64); give the same")


def test_nan_steps_change_nothing_and_are_counted(tmp_path):
    flags = ["--steps=6", "--log-every=6", "--save-every=3", "--zero=1"]
    whole = go(2, tmp_path, *flags, plan={2: "nan", 5: "nan"})["steps"]
    assert [s["adam_t"] for s in whole] == [0, 1, 1, 2, 3, 3]
    state = [s["state"] for s in whole]
    assert state[1] == state[2] and state[4] == state[5] and len(set(state)) == 4
    assert rows(tmp_path)[-1]["nan_steps"] == 2 and final(tmp_path, 6)[1]["adam_t"] == 4
    assert final(tmp_path, 3)[1]["nan_steps"] == 1  # saved at step 3, not logged since step 1
    go(2, tmp_path, *flags, f"--resume={tmp_path}/step_000003", plan={5: "nan"})
    assert rows(tmp_path)[-1]["nan_steps"] == 2


# -----------------------------------------------------------------------------
# --train-range-to-skip

RANGES = ["--train-range-to-skip", 8, 9, 3, 5]  # steps 3 4 5 8 9, given out of order
SKIPPED = {3, 4, 5, 8, 9}
SKIP = ["--decay-steps=12", "--dropout=0.1", "--save-every=4", "--eval-every=4", "--eval-iters=1", "--keep=0"]


@pytest.fixture(scope="module", params=[
    pytest.param((1, []), marks=pytest.mark.long, id="1rank"),
    pytest.param((2, ["--zero=1", *MOE]), id="2ranks-zero-moe")])
def skips(request, tmp_path_factory):
    """Return (ranks, flags, folder, session without ranges, session with them)."""
    (n, model), folder = request.param, tmp_path_factory.mktemp("skips")
    flags = [*SKIP, *model]
    plain = go(n, folder / "plain", *flags, "--steps=12")
    skipped = go(n, folder / "skipped", *flags, "--steps=12", *RANGES)
    return n, flags, folder, plain, skipped


def test_skipped_steps_drop_their_data_and_nothing_else(skips):
    """Weights and moments stay; evaluation and saving take place also within a range."""
    n, flags, folder, plain, skipped = skips
    want, got = ([(s["first"], s["data"]) for s in run["steps"]] for run in (plain, skipped))
    assert want == got and len({d for _, d in want}) == 12  # each step reads the same data, also if skipped
    a, b = rows(folder / "plain"), rows(folder / "skipped")
    assert [r["step"] for r in b] == list(range(1, 13))
    for key in ("lr", "samples", "tokens"):  # of every step, skipped or not
        assert [r[key] for r in a] == [r[key] for r in b], key
    assert [r["skipped"] for r in b] == [0, 0, 1, 2, 3, 3, 3, 4, 5, 5, 5, 5]
    assert [r["step"] for r in b if r.get("skip_reason") == "range"] == sorted(SKIPPED)
    assert [r["step"] for r in b if "loss" not in r and "grad_norm" not in r] == sorted(SKIPPED)
    assert [r.get("loss") for r in a[:2]] == [r.get("loss") for r in b[:2]] and a[5]["loss"] != b[5]["loss"]
    assert final(folder / "skipped", 12)[1]["adam_t"] == 12 - 5  # five updates fewer
    assert "skipping steps 3-5, 8-9" in skipped["out"]
    for out in (folder / "plain", folder / "skipped"):
        assert [r["step"] for r in rows(out) if "val_loss" in r] == [4, 8, 12]
        assert {p.name for p in checkpoint.steps(out)} == {"step_000004", "step_000008", "step_000012"}
    plain_step_4, _ = final(folder / "plain", 4)
    inside, meta = final(folder / "skipped", 4)
    moment = "exp_avg/blocks.0.attn.wq.weight"
    assert meta["adam_t"] == 2 and not torch.equal(plain_step_4[moment], inside[moment])
    go(n, folder / "two", *flags, "--steps=2")
    for name, t in final(folder / "two", 2)[0].items():
        assert torch.equal(t, inside[name]), f"{name} changed within the range"


def test_resume_within_a_range(skips):
    """The checkpoint holds the ranges: a resume without the flag skips the rest of the range, too."""
    n, flags, folder, _, _ = skips
    go(n, folder / "inside", *flags, "--steps=4", *RANGES)
    shutil.copytree(folder / "inside", folder / "without")
    go(n, folder / "inside", *flags, "--steps=12", *RANGES, "--resume=auto")
    same(folder / "skipped", folder / "inside", 12)
    assert rows(folder / "skipped") == rows(folder / "inside")
    got = go(n, folder / "without", *flags, "--steps=12", "--resume=auto")
    assert "skipping steps 3-5, 8-9" in got["out"]
    same(folder / "skipped", folder / "without", 12)
    # The next checkpoint holds the union of the saved ranges and those of the flag
    go(n, folder / "without", *flags, "--steps=8", "--resume", folder / "inside" / "step_000004",
       "--train-range-to-skip", 10, 11)
    assert final(folder / "without", 8)[1]["skip"] == [3, 5, 8, 9, 10, 11]


def test_a_range_given_at_a_resume_equals_one_given_at_the_start(skips):
    n, flags, folder, _, _ = skips
    go(n, folder / "rewound", *flags, "--steps=2", "--save-every=2")
    got = go(n, folder / "rewound", *flags, "--steps=12", *RANGES, "--resume",
             folder / "rewound" / "step_000002")
    assert got["steps"][0]["first"] == 8
    same(folder / "skipped", folder / "rewound", 12)


# -----------------------------------------------------------------------------
# Other flags than those of the checkpoint

def history(out):
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def test_a_resume_with_another_meaning_is_refused(tmp_path):
    moe = ["--n-experts=4", "--resume=auto", "--steps=3"]
    go(1, tmp_path, "--steps=2", *moe[:1])

    def refusal(*flags):
        result = session(World(), [*TINY, f"--out={tmp_path}", *moe, *flags])
        assert_refused(result)
        return result["err"]

    for flag, here, there in (("seed", 7, 1337), ("rope-base", 500.0, 10000.0), ("top-k", 1, 2),
                              ("router", "sigmoid", "softmax"), ("capacity-factor", 1.5, 0.0),
                              ("seq-len", 32, 16), ("norm", "layer", "rms")):
        err = refusal(f"--{flag}={here}")
        assert f"--{flag} {there} (this run: {here})" in err, err
        assert f"--resume-changed {flag}" in err
    other = ["--vocab-size=99", "--resume-changed"]  # of synthetic data, too
    assert "--data synthetic (synthetic-100) (this run" in refusal(*other, "vocab-size")
    assert "--vocab-size 100" in refusal(*other, "data")
    assert "--mlp swiglu" in refusal("--mlp=gelu", "--resume-changed=seed")
    assert go(2, tmp_path, *moe, "--seed=7", code=2)["err"] == refusal("--seed=7")
    got = go(1, tmp_path, *moe, "--seed=7", "--top-k=1", "--resume-changed=seed,top_k", "--seq-len=16")
    assert "resume: seed 1337 -> 7\n" in got["out"] and "resume: top-k 2 -> 1\n" in got["out"]
    go(1, tmp_path, *moe, "--seed=7", "--top-k=1", "--steps=4")  # the new values are the checkpoint's now
    assert history(tmp_path)[1]["changed"] == {"top_k": [2, 1], "steps": [2, 3], "seed": [1337, 7]}


def test_data_that_were_prepared_again(tmp_path, monkeypatch):
    """Other tokens need --resume-changed data, which can be typed. With other symbols no run goes on."""
    monkeypatch.chdir(tmp_path)
    text = "".join(f"Line {i * i} of a text.\n\n" for i in range(300))

    def prepared(text):
        Path("x.txt").write_text(text)
        shutil.rmtree("data", ignore_errors=True)
        with contextlib.redirect_stdout(io.StringIO()):
            prepare.main(["x.txt", "--name=mine", "--tokenizer=char"])

    def run(*flags):
        always = ["--data=data/mine", "--out=out", "--save-every=1", "--eval-every=0", "--vocab-size=0"]
        return session(World(), [*TINY, *always, *flags])

    prepared(text)
    assert run("--steps=1")["code"] == 0
    prepared(text[:4000])
    flags = ["--steps=2", "--resume=auto", "--seed=7"]
    assert_refused(run(*flags), "--data data/mine (", ", or --resume-changed data,seed, which goes on")
    assert run(*flags, "--resume-changed=data,seed")["code"] == 0
    prepared(text.replace("t", "!"))  # as many symbols, but others
    refused = run(*flags, "--steps=3", "--resume-changed=data")
    assert_refused(refused, "the tokens of data/mine are others than those of the run out; prepare the data "
                   "with --tokenizer out")


def test_what_a_resume_may_change_is_printed_and_kept(tmp_path):
    go(1, tmp_path, "--pos=learned", "--steps=2")
    got = go(2, tmp_path, "--pos=learned", "--rope-base=500", "--steps=3", "--lr=0.02", "--zero=1",
             "--resume=auto", "--log-every=2", "--plot", "--warmup=0")
    lines = sorted(line[8:] for line in got["out"].splitlines() if line.startswith("resume: "))
    assert lines == ["lr 0.01 -> 0.02", "ranks 1 -> 2", "steps 2 -> 3", "warmup 2 -> 0", "zero 0 -> 1"]
    first, second = history(tmp_path)
    assert (first["step"], second["step"], first["changed"]) == (0, 2, {})
    assert second["changed"]["lr"] == [0.01, 0.02] and second["time"] > first["time"]


# -----------------------------------------------------------------------------
# The best checkpoint

def test_a_best_checkpoint_whose_save_failed_is_not_remembered():
    saver = mock.Mock(step=4, **{"wait.return_value": False})
    for step, best in ((4, {}), (2, {"step": 2})):
        state = resume.State(best={"step": step})
        with contextlib.suppress(TypeError):  # there is no Config: nothing is saved
            resume.save(None, None, None, None, saver, state)
        assert state.best == best


def test_the_checkpoint_with_the_lowest_validation_loss_is_kept(toy, tmp_path):
    flags = [f"--data={toy}", "--vocab-size=0", "--lr=0.1", "--warmup=0", "--eval-every=2", "--eval-iters=4",
             "--save-every=9", "--keep=1", "--decay-steps=99", "--clip=0", "--inject-spike=10", "--steps"]
    whole, half = tmp_path / "whole", tmp_path / "half"
    got = go(1, whole, *flags, 11)
    losses = {r["step"]: r["val_loss"] for r in rows(whole) if "val_loss" in r}
    best = min(losses, key=losses.get)
    assert 2 <= best < 9, losses  # the spike has done harm
    assert [p.name for p in checkpoint.steps(whole)] == ["step_000011", f"step_{best:06d}"]
    assert got["out"].endswith(f"lowest validation loss {losses[best]:.4f} in step_{best:06d}\n")
    go(1, half, *flags, 9)
    second = go(1, half, *flags, 11, "--resume=auto")
    assert f"resumed {half}/step_000009" in second["out"]
    same(whole, half, 11)
    same(whole, half, best)
    assert final(half, 11)[1]["best"] == final(whole, 11)[1]["best"] == {"step": best, "val_loss": min(
        losses.values())}
    assert [p.name for p in checkpoint.steps(half)] == ["step_000011", f"step_{best:06d}"]
    go(1, tmp_path / "other", *flags, 13, f"--resume={half}/step_000011")  # has a best one of its own
    assert final(tmp_path / "other", 13)[1]["best"]["step"] > 11
    # Without --keep-best only the newest are left.
    last = go(1, half, *flags, 13, "--resume=auto", "--no-keep-best")
    assert [p.name for p in checkpoint.steps(half)] == ["step_000013"] and "lowest" not in last["out"]


# -----------------------------------------------------------------------------
# Drills: runs that are killed and resumed. make drills does all of them

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drills")


@pytest.mark.parametrize("i,name", [
    (8, "zero1"), pytest.param(11, "pp2-tied", marks=pytest.mark.long),
    pytest.param(15, "ep2", marks=pytest.mark.long)])
def test_a_killed_and_resumed_run_ends_with_the_same_bits(i, name, folder):
    row = kill.drill(i, folder, name, typical=1.5)
    assert row["ok"], row["why"]
    assert row["kills"] > 0 or row["starts"] == 1


@pytest.mark.long
def test_a_killed_rank_under_mpiexec_ends_all_and_the_run_resumes(folder):
    row = kill.drill(43, folder, "tp2", kill.MpiRanks, typical=6.0)  # kills one rank in the fourth save
    assert row["ok"], row["why"]
    assert row["kills"] == 1 and row["starts"] == 2
