"""What a checkpoint costs: bench/save_cost.py [PRESET] [train.py's flags] --save-every 10, under any launcher

Trains on synthetic tokens, first without saving, then with --keep saves (3): the stall at the start of a
save, the steps beside the writing against the step alone; the rates of saving and loading; the loaded state
against the one that was saved.
"""
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import checkpoint
import train
from config import check_layout, parse
from corpus.data import Synthetic
from parallel import make_mesh
from runtime import state
from runtime.launch import launch, shutdown
from runtime.saver import Saver


def main(argv=None):
    cfg = parse([*sys.argv[1:], "--data=synthetic"] if argv is None else argv)
    world = launch()
    run(cfg, world)
    shutdown(world)


def run(cfg, world):
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep)
    batch = cfg.global_batch or cfg.micro_batch * mesh.dp.size
    check_layout(cfg, mesh, batch)
    vocab = cfg.vocab_size or 256
    model, dp, opt = train.build(cfg, mesh, vocab, world.device)
    source, every, n = Synthetic(vocab, cfg.seq_len, cfg.seed), cfg.save_every, cfg.keep * cfg.save_every
    out = Path(state.from_first(world.size, cfg.out or tempfile.mkdtemp(dir=".")))
    saver = Saver(out, world.rank, world.size, keep=2, token=state.from_first(world.size, state.new_token()),
                  agree=lambda bad: state.on_any(world.size, bad))
    done = 0

    def sync():
        if world.device.type == "cuda":
            torch.cuda.synchronize()

    def steps(count, saving):
        """-> (seconds of each step with its save's start, seconds of each start)."""
        nonlocal done
        took, stalls = [], []
        for _ in range(count):
            sync()
            began = time.perf_counter()
            done += 1
            batches = train.micro_batches(cfg, mesh, source, done * batch, batch, world.device)
            train.train_step(cfg, mesh, model, dp, opt, batches, done)
            sync()
            if saving and done % every == 0:
                middle = time.perf_counter()
                opt.wait()
                state.save(cfg, mesh, dp, opt, saver, state.State(step=done))
                stalls.append(time.perf_counter() - middle)
            took.append(time.perf_counter() - began)
        return took, stalls

    steps(every, True)  # warm: buffers, allocator, the first write
    saver.wait()
    alone, _ = steps(n, False)
    saver.seconds = 0.0
    mixed, stalls = steps(n, True)
    began = time.perf_counter()
    assert saver.wait(), "the save failed"
    last = time.perf_counter() - began
    path = out / f"step_{saver.saved:06d}"
    gb = sum(f["bytes"] for f in checkpoint.read_index(path, 30)["files"].values()) / 1e9
    world.barrier()
    began = time.perf_counter()
    index = checkpoint.check(path, world.rank, world.size)
    world.barrier()
    crc = time.perf_counter() - began
    kept = [t.clone() for _, t, _, _ in state.pieces(dp, opt, owned=False)]
    began = time.perf_counter()
    checkpoint.load(path, state.pieces(dp, opt, owned=False), index)
    sync()
    world.barrier()
    load = time.perf_counter() - began
    now = state.pieces(dp, opt, owned=False)
    same = all(torch.equal(a, b) for a, (_, b, _, _) in zip(kept, now, strict=True))
    if world.rank == 0:
        mean, saving, stall = (1e3 * statistics.mean(t) for t in (alone, mixed, stalls))
        print(f"step alone {mean:.1f} ms; with {gb:.3f} GB saved over {world.size} ranks every {every} steps"
              f" {saving:.1f} ms: {100 * (saving / mean - 1):+.1f} %\n"
              f"stall at the start of a save {stall:.1f} ms, {100 * stall / mean:.1f} % of a step\n"
              f"copy to commit {saver.seconds:.2f} s, {gb / saver.seconds:.2f} GB/s (waited {last:.2f} s "
              f"at the end); checksums {gb / crc:.2f} GB/s, load {gb / load:.2f} GB/s; same bits: {same}")
        if not cfg.out:
            shutil.rmtree(out)
    assert same


if __name__ == "__main__":
    main()
