"""Checkpoints: from any layout to any other, every kind of damage, background saves, full disks, diff."""
import contextlib
import io
import math
import os
import resource
import shutil
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from pool import run_ranks
from safetensors.torch import load_file
from test_layouts import GPT2, LLAMA, MOE, SIGMOID, assemble, equality

import checkpoint
import train
from config import Config
from corpus.samples import Synthetic
from interface.layout import check_layout
from parallel import make_mesh
from runtime import pieces, resume
from runtime.everyone import Everyone
from runtime.launch import World
from runtime.saver import Saver

# -----------------------------------------------------------------------------
# Layout A writes, layout B reads: every number of the state, and of the step after it

def prepare(world, flags):
    """Return cfg, mesh, data_parallel, opt, step(i) that trains step i, owned(prefix), this rank's pieces."""
    cfg = Config(**flags, micro_batch=2)
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, cp=cfg.cp, shard=cfg.shard)
    batch = cfg.global_batch
    check_layout(cfg, world.size)
    model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
    source = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed)

    train_step = train.Step(cfg, model, data_parallel, opt)

    def step(i):
        batches = train.micro_batches(cfg, mesh, source, (i - 1) * batch, batch, world.device)
        return torch.stack(train_step(batches, i)[0]).tolist()

    def owned(prefix, owned_only=True):
        pieces = resume.own_pieces(data_parallel, opt, owned_only=owned_only)
        return [(prefix + n, t.numpy().copy(), *at) for n, t, *at in pieces]
    return cfg, mesh, data_parallel, opt, step, owned


def write(world, flags, folder):
    cfg, mesh, data_parallel, opt, step, owned = prepare(world, flags)
    step(1)
    saver = Saver(folder, world.everyone)
    results = {"pieces": owned("saved ")}
    resume.save(cfg, mesh, data_parallel, opt, saver, resume.State(step=1, samples=cfg.global_batch))
    results["stats"] = step(2)
    assert saver.wait() and saver.saved == 1
    results["pieces"] += owned("next ")
    return results


def read(world, flags, folder):
    cfg, mesh, data_parallel, opt, step, owned = prepare(world, flags)
    for _, t, _, _ in resume.own_pieces(data_parallel, opt, owned_only=False):
        t.fill_(math.nan)  # an element that load() leaves out stays NaN
    state = resume.load(cfg, data_parallel, opt, Path(folder) / "step_000001", "")
    assert state.samples == cfg.global_batch
    results = {"pieces": owned("saved ")}
    assert not any(np.isnan(t).any() for _, t, _, _ in owned("", owned_only=False))
    results["stats"] = step(2)
    results["pieces"] += owned("next ")
    return results


ONE, DP3Z, TP2, PP2, EP2 = (1, {}), (3, dict(zero=1)), (2, dict(tp=2)), (2, dict(pp=2)), (2, dict(ep=2))
TP2Z, PP2Z, TP4 = (4, dict(tp=2, zero=1)), (4, dict(pp=2, zero=1)), (4, dict(tp=4))
TP2PP2, EP4Z, TP2EP2 = (4, dict(tp=2, pp=2)), (4, dict(ep=4, zero=1)), (2, dict(tp=2, ep=2, zero=1))
PP2EP2Z, DP2Z = (4, dict(pp=2, pp_chunks=2, ep=2, zero=1)), (2, dict(zero=1))
CP2Z, ZERO3, TP2ZERO2 = (4, dict(cp=2, tp=2, zero=1)), (2, dict(zero=3)), (4, dict(tp=2, zero=2))
SMALL = dict(LLAMA, vocab_size=60, n_layer=2)  # padded to 128: with tp 2 the second rank holds only padding
PAIRS = {  # model: {writer: readers}
    "llama": (dict(SMALL, global_batch=12), [
        (ONE, [TP2Z, ZERO3]), (TP2Z, [ONE, PP2Z]), (DP3Z, [TP2PP2]), (PP2Z, [DP3Z, TP4]),
        (ZERO3, [TP2ZERO2]), (TP2ZERO2, [ONE])]),
    "gpt2 tied": (dict(GPT2, global_batch=8, n_layer=2), [
        (PP2, [ONE, TP2]), (TP2PP2, [DP2Z]), (CP2Z, [PP2])]),
    "moe": (dict(MOE, global_batch=8), [
        (EP4Z, [ONE, TP2EP2, PP2EP2Z]), (PP2EP2Z, [EP2])]),
    "moe, router bias": (dict(SIGMOID, global_batch=8), [(EP2, [ONE, PP2]), (PP2, [EP2])]),
}


@pytest.mark.parametrize("model", PAIRS)
def test_any_layout_reads_the_checkpoint_of_any_other(model, tmp_path):
    base, pairs = PAIRS[model]
    for i, ((n, layout), readers) in enumerate(pairs):
        folder = tmp_path / str(i)
        written = run_ranks(n, write, dict(base, **layout), folder)
        want = assemble(written)
        stored = checkpoint.full_tensors(folder / "step_000001")
        assert {f"saved {k}" for k in stored} == {k for k in want if k.startswith("saved ")}
        for m, layout_b in readers:
            results = run_ranks(m, read, dict(base, **layout_b), folder)
            where = f"{model}: {n} ranks {layout} -> {m} ranks {layout_b}"
            got = assemble(results)
            assert got.keys() == want.keys(), where
            for name, t in want.items():
                if name.startswith("saved "):
                    np.testing.assert_array_equal(got[name], t, err_msg=f"{where}: {name}")
                else:
                    worst = 1e-10 * equality.scale(name, t, base)
                    np.testing.assert_allclose(got[name], t, rtol=0, atol=worst, err_msg=f"{where}: {name}")
            loss, norm = np.array([seen["stats"] for seen in results])[:, :2].T
            np.testing.assert_allclose(loss, written[0]["stats"][0], rtol=1e-10, err_msg=where)
            np.testing.assert_allclose(norm, written[0]["stats"][1], rtol=1e-10, err_msg=where)


def two_writers(root, step, seed=0, run_id="0"):
    """Write a checkpoint of two ranks: w (6, 4), half on each, and v (3,) on rank 1 -> {name: tensor}."""
    g = torch.Generator().manual_seed(seed + step)
    w, v = torch.randn(6, 4, generator=g), torch.randn(3, generator=g, dtype=torch.float64)
    owned = [[("w", w[:3], (6, 4), (0, 0))], [("v", v, (3,), (0,)), ("w", w[3:], (6, 4), (3, 0))]]
    for rank in (1, 0):
        checkpoint.save(root, step, owned[rank], {"step": step}, rank, 2, run_id)
    return {"w": w, "v": v}


def test_the_safetensors_library_reads_our_files(tmp_path):
    want = two_writers(tmp_path, 7)
    a, b = (load_file(tmp_path / f"step_000007/rank_0000{r}.safetensors") for r in (0, 1))
    assert torch.equal(torch.cat([a["w#0"], b["w#1"]]), want["w"]) and torch.equal(b["v"], want["v"])
    odd = {"h": torch.arange(5).bfloat16(), "s": torch.tensor(2.5), "d": torch.ones(3, dtype=torch.float64)}
    checkpoint.write_safetensors(tmp_path / "odd", odd)
    back = load_file(tmp_path / "odd")
    assert all(torch.equal(back[k], t) and back[k].dtype == t.dtype for k, t in odd.items())


# -----------------------------------------------------------------------------
# Damage

def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def change_an_offset(path):
    text = path.read_text()
    path.write_text(text.replace('"offset": [3, 0]', '"offset": [2, 0]'))


RANK_0, RANK_1 = "rank_00000.safetensors", "rank_00001.safetensors"
DAMAGE = {  # name: (what is done to step 2's directory, a part of the message)
    "a bit of the data": (lambda d: flip(d / RANK_1, -5), f"{RANK_1} differs from its crc32"),
    "a bit of the header": (lambda d: flip(d / RANK_0, 20), f"{RANK_0} differs from its crc32"),
    "truncated": (lambda d: os.truncate(d / RANK_0, 100), "differs from its crc32"),
    "longer": (lambda d: os.truncate(d / RANK_0, 4096), "differs from its crc32"),
    "missing": (lambda d: (d / RANK_1).unlink(), "No such file"),
    "of another step": (lambda d: shutil.copy(d.parent / "step_000001" / RANK_0, d), "differs from its"),
    "index cut": (lambda d: os.truncate(d / "index.json", 200), "index.json holds no sound JSON"),
    "index gone": (lambda d: (d / "index.json").unlink(), "is no checkpoint"),
    "index, one digit": (lambda d: change_an_offset(d / "index.json"), "index.json differs from its crc32"),
}


def find(world, root):
    """--resume auto -> (the checkpoint to resume or the exit code, the run's id, this rank's stderr)."""
    cfg, stderr = Config(resume="auto"), io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            with world.everyone.input():
                found = resume.prepare_out_dir(cfg, world, Path(root))
                if found:
                    resume.settle(cfg, world, Path(root), resume.State(step=int(found.name[5:])), found)
        except SystemExit as e:
            return e.code, None, stderr.getvalue()
    return found, resume.run_id(world.everyone), stderr.getvalue()


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_the_previous_checkpoint_used(name, tmp_path):
    damage, text = DAMAGE[name]
    for step in (1, 2):
        two_writers(tmp_path, step)
    damage(tmp_path / "step_000002")
    assert text in checkpoint.damage(tmp_path / "step_000002")
    assert checkpoint.damage(tmp_path / "step_000001") is None
    (one, run_id, line), (two, run_id_too, quiet) = run_ranks(2, find, tmp_path)  # each checks some files
    assert one == two == tmp_path / "step_000001" and run_id == run_id_too
    assert text in line and line.count("\n") == 1 and "trying the one before" in line and quiet == ""
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step_000001"]  # step 2 is no candidate any more,
    assert (tmp_path / "step_000002.aside").is_dir()  # and it is not deleted


def test_the_checksum_covers_every_block_of_a_file(tmp_path, monkeypatch):
    """Files of many blocks: damage in any of them is found, and blocks change no byte of a file."""
    w = torch.arange(1000.0)
    checkpoint.save(tmp_path / "whole", 1, [whole("w", w)], {})
    monkeypatch.setattr(checkpoint, "BLOCK", 256)
    checkpoint.save(tmp_path, 1, [whole("w", w)], {})
    path = tmp_path / "step_000001"
    assert (path / RANK_0).read_bytes() == (tmp_path / "whole/step_000001" / RANK_0).read_bytes()
    size = (path / RANK_0).stat().st_size
    for at in (0, 255, 256, size // 2, size - 257, size - 1):
        assert checkpoint.damage(path) is None
        flip(path / RANK_0, at)
        assert "differs from its crc32" in checkpoint.damage(path), at
        flip(path / RANK_0, at)


def test_the_ranks_that_check_share_out_every_file(tmp_path):
    for rank in reversed(range(5)):
        checkpoint.save(tmp_path, 1, [whole(str(rank), torch.ones(3))], {}, rank, 5)
    path = tmp_path / "step_000001"
    for bad in range(5):
        file = path / f"rank_{bad:05d}.safetensors"
        flip(file, -1)
        for size in (1, 2, 3, 8):
            for rank in range(size):
                found = contextlib.nullcontext()
                if bad % size == rank:
                    found = pytest.raises(ValueError, match=f"rank_{bad:05d}.safetensors differs from its")
                with found:
                    checkpoint.check(path, rank, size)
        flip(file, -1)


def test_checkpoints_are_ordered_by_their_numbers(tmp_path):
    for step in (5, 999999, 1000000, 30):
        checkpoint.save(tmp_path, step, [whole("w", torch.ones(1))], {})
    numbers = [int(p.name[5:]) for p in checkpoint.steps(tmp_path)]
    assert numbers == [1000000, 999999, 30, 5]
    checkpoint.prune(tmp_path, 2)
    assert [int(p.name[5:]) for p in checkpoint.steps(tmp_path)] == [1000000, 999999]


def test_resume_auto_with_only_damaged_checkpoints_is_refused(tmp_path):
    two_writers(tmp_path, 1)
    flip(tmp_path / "step_000001/rank_00001.safetensors", -1)
    for code, _, line in run_ranks(2, find, tmp_path):
        assert code == 2 and (line == "" or "--resume none" in line)
    assert checkpoint.steps(tmp_path)


def test_unknown_names_other_shapes_and_missing_elements_are_refused(tmp_path):
    want = two_writers(tmp_path, 1)
    path, out = tmp_path / "step_000001", torch.empty(2, 2)
    checkpoint.Reader(path).fill("w", out, (6, 4), (2, 1))
    assert torch.equal(out, want["w"][2:4, 1:3])
    for name, full, text in (("u", (6, 4), "u is None there"), ("w", (6, 5), "[6, 4] there")):
        with pytest.raises(ValueError, match="checkpoint") as e:
            checkpoint.Reader(path).fill(name, out, full, (0, 0))
        assert text in str(e.value)
    checkpoint.save(tmp_path, 2, [("w", want["w"][:3], (6, 4), (0, 0))], {})
    with pytest.raises(ValueError, match="w covers 2 of 4 elements"):
        checkpoint.Reader(tmp_path / "step_000002").fill("w", out, (6, 4), (2, 1))


# -----------------------------------------------------------------------------
# The directory: a save killed between two renames, --keep, a resume from an earlier step

def test_a_step_that_is_there_stays(tmp_path):
    old = two_writers(tmp_path, 1)
    with pytest.raises(OSError, match="not empty"):
        two_writers(tmp_path, 1, seed=1, run_id="1")
    checkpoint.recover(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert torch.equal(checkpoint.full_tensors(tmp_path / "step_000001")["w"], old["w"])


def test_only_what_a_save_wrote_is_deleted(tmp_path):
    """Of leftovers of a kill and of pruned checkpoints. Files of others stay."""
    ours = ("index.json", "rank_00000.json", "rank_00000.safetensors", ".index.json.0123abcd.part")
    steps = [f"step_00000{i}" for i in (1, 2, 3)]
    for name in (*steps, "step_000006.aside", "step_000009.0a.tmp", "step_000008.del"):
        (tmp_path / name).mkdir()
        for file in ours:
            (tmp_path / name / file).write_text(name)
    (tmp_path / "step_000008.del/notes.txt").touch()
    (tmp_path / "step_000001/notes.txt").touch()
    (tmp_path / "step_000007.tmp").touch()  # no directory at all
    checkpoint.recover(tmp_path)
    checkpoint.prune(tmp_path, keep=1)
    left = {p.name: sorted(os.listdir(p)) for p in tmp_path.iterdir() if p.is_dir()}
    kept = dict.fromkeys(["step_000003", "step_000006.aside"], sorted(ours))
    assert left == {**kept, **dict.fromkeys(["step_000008.del", "step_000001.del"], ["notes.txt"])}


def test_parts_of_a_killed_run_are_not_used(tmp_path):
    g = torch.randn(2)
    checkpoint.save(tmp_path, 1, [("b", g, (2,), (0,))], {}, 1, 2, "dead")  # that run was killed
    checkpoint.write_part(tmp_path / "step_000001.new.tmp", 0, [("a", g, (2,), (0,))])
    with pytest.raises(TimeoutError, match="no rank_00001.json"):
        checkpoint.commit(tmp_path / "step_000001.new.tmp", 1, {}, 2, timeout=0.1)
    assert checkpoint.steps(tmp_path) == []


# -----------------------------------------------------------------------------
# In the background

def whole(name, t):
    return name, t, tuple(t.shape), (0,) * t.ndim


def test_a_save_in_the_background_writes_the_same_bytes(tmp_path):
    tensors = [torch.randn(50, 7), torch.randn(9).double(), torch.tensor(3.0)]
    pieces = [whole(str(i), t) for i, t in enumerate(tensors)]
    checkpoint.save(tmp_path / "sync", 5, pieces, {"a": 1.5})
    saver = Saver(tmp_path / "async", Everyone())
    saver.start(5, pieces, {"a": 1.5})
    for t in tensors:
        t.fill_(1e9)  # training continues
    assert saver.wait() and saver.saved == 5
    a, b = (sorted((tmp_path / kind / "step_000005").iterdir()) for kind in ("sync", "async"))
    assert [p.name for p in a] == [p.name for p in b]
    assert all(x.read_bytes() == y.read_bytes() for x, y in zip(a, b, strict=True))


def full_disk(world, root, failing, times):
    """Save 1 succeeds; rank `failing` cannot write the next `times` saves; one succeeds, and one more fails.
    Return [True, False or exit code of each save], this rank's stderr."""
    piece = whole(str(world.rank), torch.full((1 << 16,), float(world.rank)))
    saver = Saver(root, world.everyone)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    stderr, saved = io.StringIO(), []
    with contextlib.redirect_stderr(stderr):
        for step in range(1, times + 4):
            if world.rank == failing and step not in (1, times + 2):
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # "File too large", a full quota
            try:
                saver.start(step, [piece], {})
                saved.append(saver.wait())
            except SystemExit as e:
                saved.append(e.code)
                break
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return saved, stderr.getvalue()


@pytest.mark.parametrize("failing,times", [(0, 2), (1, 3)])
def test_a_full_disk_costs_a_save_and_three_the_run(failing, times, tmp_path):
    results = run_ranks(2, full_disk, tmp_path, failing, times)
    rest = [True, False] if times == 2 else [1]
    assert [saved for saved, _ in results] == [[True, False, False, *rest]] * 2
    lines = results[0][1].splitlines()
    assert len(lines) == 3 and results[1][1] == "", results
    for word in ("step 2 was not saved", "File too large", f"(rank {failing})", "training goes on"):
        assert word in lines[0], lines
    left = ["step_000001", "step_000004"] if times == 2 else ["step_000001"]
    assert sorted(os.listdir(tmp_path)) == left


def not_committed(world, root):
    """Both ranks write their part, and rank 0 cannot commit them."""
    def commit(*args):
        time.sleep(0.5)  # all know by then that every part is written
        raise OSError("no room")

    saver = Saver(root, world.everyone)
    with mock.patch.object(checkpoint, "commit", commit):
        saver.start(1, [whole(str(world.rank), torch.ones(2))], {})
        return saver.wait(), saver.saved, saver.failures


def test_every_rank_learns_that_a_save_was_not_committed(tmp_path):
    """Otherwise rank 0 alone would end after three of them, and the others wait for it."""
    assert run_ranks(2, not_committed, tmp_path) == [(False, 0, 1)] * 2


def test_a_tensor_for_which_the_model_has_no_place_is_refused(tmp_path):
    """Such as one that a changed model no longer has: the rest alone would be another function."""
    checkpoint.save(tmp_path, 1, [whole("w", torch.ones(2)), whole("v", torch.ones(2))], {}, 0, 1)
    path, out = tmp_path / "step_000001", torch.zeros(2)
    index = checkpoint.read_index(path)
    with pytest.raises(ValueError, match="holds v, for which this model has no place"):
        pieces.load_pieces(World(), path, index, [whole("w", out)])
    pieces.load_pieces(World(), path, index, [whole("w", out)], unused=["v"])
    assert out.sum() == 2


def diverging(world, root, value):
    """Save 1 is sound; in save 2 the last rank holds a value that is not finite; save 3 is sound.
    Return [whether each was saved], this rank's stderr."""
    saver, stderr, saved = Saver(root, world.everyone, keep=1), io.StringIO(), []
    last = world.rank == world.size - 1
    with contextlib.redirect_stderr(stderr):
        for step in (1, 2, 3):
            t = torch.full((70, 70), 3e38)  # a sum that overflows is no fault
            t[69, 69] = value if last and step == 2 else 1.0
            saver.start(step, [whole(f"exp_avg/w{world.rank}", t)], {})
            saved.append(saver.wait())
            if step == 2:
                assert [p.name for p in checkpoint.steps(root)] == ["step_000001"]
    return saved, stderr.getvalue()


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_value_that_is_not_finite_costs_a_save_and_prunes_nothing(value, tmp_path):
    results = run_ranks(2, diverging, tmp_path, value)
    assert [saved for saved, _ in results] == [[True, False, True]] * 2
    (line,) = "".join(err for _, err in results).splitlines()
    assert "step 2 was not saved: exp_avg/w1 holds" in line and "(rank 1)" in line
    assert os.listdir(tmp_path) == ["step_000003"]


def test_show_and_diff(tmp_path, capsys):
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    want = two_writers(a, 3)
    pieces = [whole(name, t) for name, t in want.items()]
    layout = {"world": 1, "flags": {"tp": 2}}  # the same tensors from another layout
    checkpoint.save(b, 3, pieces, {"step": 3, **layout})
    assert checkpoint.main(["diff", str(a / "step_000003"), str(b)]) == 0
    assert "equal: all 2 tensors" in capsys.readouterr().out
    changed = want["w"].clone()
    changed[4, 1] += 0.5
    changed[5, 3] = math.nan
    other = [whole("w", changed), whole("x", torch.zeros(())), whole("v", want["v"].float())]
    checkpoint.save(c, 4, other, {"step": 4, "extra": 1})
    assert checkpoint.main(["diff", str(a), str(c)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "2 of 24 elements, max abs nan" in out
    assert "x only in one of them" in out and "float64 (3,) -> float32 (3,)" in out
    assert "step differs" in out and "4 differences" in out
    assert checkpoint.main(["show", str(c)]) == 0
    assert "step 4, 3 tensors in 1 files" in " ".join(capsys.readouterr().out.split())
    changed = want["w"].clone()
    changed[0, 2] = -changed[0, 2]
    checkpoint.save(b, 5, [whole("w", changed), *pieces[1:]], {"step": 3})
    assert checkpoint.main(["diff", str(a), str(b)]) == 1
    assert f"max abs {2 * abs(want['w'][0, 2].item()):.3g}" in " ".join(capsys.readouterr().out.split())
