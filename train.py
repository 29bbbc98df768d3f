"""Train a GPT on one process or many: python train.py [PRESET] [flags], the same under mpiexec, torchrun and srun.

    1) what was asked, and who am I          config.py launch.py
    2) mesh, data, model                     parallel.py data.py model.py
    3) resume, or start with equal replicas  checkpoint.py state.py
    4) the training loop                     pipeline.py (forward, backward) parallel.py (sums) optim.py (update)
    5) what is left behind                   log.py
"""
import dataclasses
import math
import os
import shutil
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
import data
import log
import moe
from config import check_layout, parse, stage_layers
from graph import Graph, static_shapes
from launch import Stop, agreed, env_rank, launch, shutdown
from model import GPT, flops_per_token, generate, initialise
from optim import Optimizer
from parallel import DataParallel, broadcast_and_verify, make_mesh, untimed
from pipeline import forward_backward, forward_only, next_logits
from skip import Ranges
from state import State, dump, find_resume, load, save, upcycle

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# -----------------------------------------------------------------------------
# the parts of a step; the layout tests call these, so that what is proven is what trains

def build(cfg, mesh, vocab_size, device, timers=untimed):
    """-> (model, dp, optimizer) of this rank."""
    torch.set_default_dtype(DTYPES[cfg.dtype])
    with torch.device(device):
        model = GPT(cfg, mesh, vocab_size, stage_layers(cfg, mesh.pp.size)[mesh.pp.rank])
    torch.set_default_dtype(torch.float32)
    initialise(model, cfg.seed)
    if cfg.compile:
        speed_up(model)
    dp = DataParallel(model, mesh, cfg.zero, timers)
    return model, dp, Optimizer(dp, cfg, mesh)


def speed_up(model):
    """--compile: each block as one graph; of a block with experts, whose row counts change, all but the experts."""
    whole = model.mesh.tp.size == 1  # collectives over tp stand between graphs
    for block in model.blocks.values():
        if block.moe is None:
            block.compile(fullgraph=whole)
        else:
            block.attend = torch.compile(block.attend, fullgraph=whole)
            block.norm2.compile(fullgraph=True)
            block.moe.route = torch.compile(block.moe.route, fullgraph=whole)
    if model.norm is not None:
        model.norm.compile(fullgraph=True)


def learning_rate(cfg, step):
    """Linear warmup, then a cosine down to min_lr. step is 1-based: the update about to happen."""
    low = cfg.lr / 10 if cfg.min_lr is None else cfg.min_lr
    last = cfg.decay_steps or cfg.steps
    if step <= cfg.warmup:
        return cfg.lr * step / cfg.warmup
    if step >= last:
        return low
    along = (step - cfg.warmup) / (last - cfg.warmup)
    return low + 0.5 * (1 + math.cos(math.pi * along)) * (cfg.lr - low)


def micro_batches(cfg, mesh, source, first, count, device):
    """This rank's micro-batches of the `count` samples from `first` on -> [(x, y)], (B, T) int64 each.
    Micro-batch j holds samples j*mb..(j+1)*mb-1; dp rank d takes micro-batches d*n..(d+1)*n-1."""
    n = count // (cfg.micro_batch * mesh.dp.size)
    start = first + mesh.dp.rank * n * cfg.micro_batch
    pairs = [source.batch(start + j * cfg.micro_batch, cfg.micro_batch) for j in range(n)]
    if device.type == "cpu":
        return pairs
    return [tuple(t.pin_memory().to(device, non_blocking=True) for t in pair) for pair in pairs]


def gradients(cfg, mesh, model, dp, opt, batches, step):
    """Forward, backward, gradient sums -> this rank's part of the mean loss, () fp32."""
    def before(i):
        # randomness is a function of (seed, step, micro-batch, stage, tp rank): nothing to save, the same on any dp
        if cfg.dropout:
            micro = mesh.dp.rank * len(batches) + i
            torch.manual_seed(zlib.crc32(f"{cfg.seed}/{step}/{micro}/{mesh.pp.rank}/{mesh.tp.rank}".encode()))
    dp.begin()
    moe.begin(model)
    tokens = len(batches) * mesh.dp.size * cfg.micro_batch * cfg.seq_len  # of the whole global batch
    loss = forward_backward(model, dp, mesh, batches, tokens, opt.scale, before, dp.timers)
    dp.finish()
    return loss


def train_step(cfg, mesh, model, dp, opt, batches, step, full=True, graph=None):
    """Gradients, then the clipped update. graph: a graph.Graph of the first part.
    -> (4,) fp64 on the device: mean loss, gradient norm, zero gradients, parameter norm; () 1.0 if not updated."""
    if graph is None:
        loss = gradients(cfg, mesh, model, dp, opt, batches, step)
    else:
        opt.wait()
        loss = graph(batches)
    with dp.timers("norm"):
        totals = opt.totals(loss, full)
    refused = opt.step(learning_rate(cfg, step), totals[1])
    moe.steer(model, cfg.router_bias_rate, refused)
    return totals, refused


def evaluate(cfg, mesh, model, source, batch, device):
    """Mean cross-entropy in nats per token over eval_iters global batches of the validation split, on all ranks."""
    model.eval()
    n = max(1, min(cfg.eval_iters, source.n_samples // batch))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for i in range(n):
        batches = micro_batches(cfg, mesh, source, i * batch, batch, device)
        total += forward_only(model, mesh, batches) / mesh.tp.size  # every tp rank has the same sum
    if mesh.world.size > 1:
        dist.all_reduce(total, group=mesh.world.group)  # SUM of one number, over the world
    model.train()
    return total.item() / (n * batch * cfg.seq_len)


# -----------------------------------------------------------------------------

def open_data(cfg, world):
    """-> (train, val, vocabulary size, identity). Headers are checked on every rank, checksums once per node."""
    if cfg.data == "synthetic":
        vocab = cfg.vocab_size or 256
        train, val = (data.Synthetic(vocab, cfg.seq_len, cfg.seed + i) for i in (0, 1))
        return train, val, vocab, f"synthetic-{vocab}"
    meta = data.load_meta(cfg.data)
    if world.local_rank == 0:
        data.verify(cfg.data)
    vocab = cfg.vocab_size or meta["vocab_size"]
    if vocab < meta["vocab_size"]:
        raise ValueError(f"--vocab-size {vocab} is less than the {meta['vocab_size']} symbols of {cfg.data}; "
                         f"try --vocab-size {meta['vocab_size']}")
    train, val = (data.Tokens(cfg.data, split, cfg.seq_len, cfg.seed) for split in ("train", "val"))
    return train, val, vocab, " ".join(s["sha256"][:16] for split in meta["shards"].values() for s in split)


def main(argv=None):
    # every rank sees the same wrong flag: one of them says so
    try:
        cfg = parse(sys.argv[1:] if argv is None else argv)
    except ValueError as e:
        if env_rank() == 0:
            print(f"nanoshard: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    world = launch(cfg.timeout)
    try:
        code = run(cfg, world)
    except SystemExit as e:  # wrong input, already explained
        code = e.code
    shutdown(world)
    if code:
        raise SystemExit(code)


def run(cfg, world):
    """-> the exit code: 0 done, 85 stopped early after a complete save."""
    # 1) when to stop, and where to
    stop = Stop(cfg.max_minutes)
    chief, device = world.rank == 0, world.device
    out = Path(cfg.out or f"out/{cfg.preset}")

    # 2) mesh, data, model
    with agreed(world):
        mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep)
        batch = cfg.global_batch or cfg.micro_batch * mesh.dp.size  # sequences per optimizer step
        check_layout(cfg, mesh, batch)
        skip = Ranges(cfg.train_range_to_skip)
        train, val, vocab_size, data_id = open_data(cfg, world)
        words = prompt_tokenizer(cfg)
    timers = log.Timers(device, cfg.timers)
    model, dp, opt = build(cfg, mesh, vocab_size, device, timers)

    # 3) resume, or start with equal replicas
    found, saver = find_resume(cfg, world, out)
    with agreed(world):
        if found is None:
            broadcast_and_verify(model, mesh)
            opt.reload()
            if cfg.init_from:
                note = upcycle(model, opt, cfg.init_from)
                print(note if chief else "", end="\n" * chief, flush=True)
            state = State(data=data_id)
        else:
            state = load(cfg, dp, opt, found, data_id)
            skip = Ranges([*skip.ends(), *state.skip])  # a resume inside a range goes on skipping it
        state.skip = skip.ends()
        logger = make_logger(cfg, mesh, world, out, state, vocab_size) if chief else None
    if chief:
        n = sum(p.numel() for p in model.parameters())
        print(f"{f'resumed {found}' if found else 'started'}: {n:,} parameters on this rank, dp {mesh.dp.size} "
              f"tp {cfg.tp} pp {cfg.pp} ep {cfg.ep} zero {cfg.zero}, {batch} x {cfg.seq_len} tokens per step, "
              f"{train.n_samples:,} training samples" + (f", skipping steps {skip}" if skip.pairs else ""), flush=True)

    # 4) the training loop
    graph = None
    if static_shapes(cfg, mesh, device):
        graph = Graph(lambda batches: gradients(cfg, mesh, model, dp, opt, batches, step=0))
    clock = log.Clock(device)
    refused = torch.zeros((), device=device)  # steps not taken since the last log: a gradient was not finite
    profiler = log.start_profile(cfg.profile and chief)
    reason, saved, first = None, 0, state.step + 1
    with log.tracer(cfg.trace and chief, out) as trace:
        while state.step < cfg.steps and reason is None:
            began = time.monotonic()
            step = state.step + 1
            evals = cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps)
            logs = step in (first, cfg.steps) or step % cfg.log_every == 0 or evals
            totals = None
            # ---------------- training section begin
            with timers("data"):
                batches = micro_batches(cfg, mesh, train, state.samples, batch, device)
            if step in skip:
                state.skipped += 1  # the data is drawn and dropped; weights and moments stay
            else:
                if cfg.dump_grads and step == 1:
                    opt.before_step = lambda: dump(cfg.dump_grads, mesh, dp, opt, vocab_size)
                totals, bad = train_step(cfg, mesh, model, dp, opt, batches, step, logs, graph)
                opt.before_step = None
                refused += bad
                clock.steps += 1
            # ---------------- training section end
            state.step, state.samples = step, state.samples + batch
            if trace is not None:
                trace.step()
            if logs:
                steps, ms = clock.steps, clock.per_step()
                state.nan_steps += int(refused.item())
                refused.zero_()
                row = measure(cfg, world, state, batch, totals, steps and ms, vocab_size)
                row.update(timing(timers, steps, mesh), loss_scale=opt.scale and opt.scale.item())
                if cfg.n_experts and totals is not None:
                    experts = moe.summary(model, batch // cfg.micro_batch)
                    row.update(log.expert_keys(experts))
                    if chief:
                        logger.experts(step, experts)
                if step == first:
                    report_traffic(cfg, mesh, vocab_size, batch, chief)
                if evals:
                    opt.wait()
                    row["val_loss"] = evaluate(cfg, mesh, model, val, batch, device)
                if chief:
                    logger.row(**row, time=time.time())
                if evals and words:
                    text = words.decode(generate(model, words.encode(cfg.prompt), 100, 0.8, 50, cfg.seed, next_logits))
                    if chief:
                        print(f"--- {text}\n---", flush=True)
            stop.step_took(time.monotonic() - began)
            reason = stop.agreed(world)
            if cfg.save_every and (step % cfg.save_every == 0 or step == cfg.steps) or reason:
                clock.pause()
                began = time.monotonic()
                opt.wait()
                state.nan_steps += int(refused.item())  # the checkpoint knows those since the last log too
                refused.zero_()
                save(cfg, mesh, dp, opt, saver, state)  # goes on beside the next steps
                stop.save_took(time.monotonic() - began + saver.seconds)
                saved = step
            if evals or saved == step:
                clock.resume()

    # 5) leave
    whole = saver.wait()
    if chief:
        log.end_profile(profiler, out)
        logger.close(cfg.plot and reason is None)
        print(f"{f'stopped by {reason}' if reason else 'done'} after step {state.step}: {out}/ holds metrics.jsonl, "
              f"loss.txt, config.json" + (f", step_{saver.saved:06d}" if saver.saved else ""), flush=True)
    if not whole:
        return 1  # the last steps are lost: neither done nor to be requeued as if nothing had happened
    return 85 if reason else 0  # the job script requeues on 85


# -----------------------------------------------------------------------------
# numbers for the log

def make_logger(cfg, mesh, world, out, state, vocab_size):
    config = {**dataclasses.asdict(cfg), "vocab_size_used": vocab_size, "git": log.git_revision(), "argv": sys.argv,
              "world": world.size, "launcher": world.launcher, "dp": mesh.dp.size, "torch": torch.__version__}
    logger = log.Log(out, config, state.step, cfg.wandb)
    if cfg.data != "synthetic":  # so that sample.py needs the run's directory only
        for name in ("meta.json", "tokenizer.json"):
            if (Path(cfg.data) / name).exists():
                shutil.copy(Path(cfg.data) / name, out / name)
    return logger


def prompt_tokenizer(cfg):
    if not cfg.prompt:
        return None
    if cfg.data == "synthetic":
        raise ValueError("--prompt needs text, synthetic data has no tokenizer; give --data DIR or leave --prompt away")
    import tokenizer
    words = tokenizer.load(cfg.data)
    words.encode(cfg.prompt)  # an unknown character is an error now, not at the first evaluation
    return words


def measure(cfg, world, state, batch, totals, ms, vocab_size):
    """The row of metrics.jsonl. Every rank calls this: memory is the maximum over ranks."""
    row = {"step": state.step, "tokens": state.samples * cfg.seq_len, "samples": state.samples,
           "global_batch": batch, "lr": learning_rate(cfg, state.step), "skipped": state.skipped,
           "nan_steps": state.nan_steps, "skip_reason": "range" if totals is None else None}
    if totals is not None:
        loss, grad_norm, zeros, param_norm = totals.tolist()  # sync point
        row.update(loss=loss, grad_norm=grad_norm, param_norm=param_norm, num_zeros=int(zeros))
    if ms:
        per_gpu = batch * cfg.seq_len / ms * 1e3 / world.size  # tokens per second
        flops, causal = (per_gpu * f for f in flops_per_token(cfg, vocab_size))
        peak = log.peak_flops(world.device)
        row.update(ms=ms, ms_per_sample=ms / batch, tok_s=per_gpu * world.size, tok_s_gpu=per_gpu,
                   tflops=flops / 1e12, tflops_causal=causal / 1e12, mfu=flops / peak if peak else None)
    if world.device.type == "cuda":
        memory = torch.tensor(torch.cuda.max_memory_reserved() / 2**30)
        if world.size > 1:
            dist.all_reduce(memory, dist.ReduceOp.MAX)  # one number on the host, over the world
        row["mem_gb"] = memory.item()
    return row


def timing(timers, steps, mesh):
    """{t_phase: ms per step, the slowest rank's}; empty without --timers."""
    if not timers.on:
        return {}
    ms = torch.tensor(timers.read(steps))
    if mesh.world.size > 1:
        dist.all_reduce(ms, dist.ReduceOp.MAX)  # one number per phase on the host, over the world
    return {f"t_{phase}": t for phase, t in zip(timers.PHASES, ms.tolist(), strict=True)}


def report_traffic(cfg, mesh, vocab_size, batch, chief):
    """Bytes sent in the first step: predicted by plan.py, measured by the counters of every collective."""
    from plan import traffic
    predicted = traffic(cfg, mesh, vocab_size, batch)
    if chief and predicted:
        axes = {axis: sum(getattr(mesh, axis).sent.values()) for axis in predicted}
        print("comm per step, MB sent by rank 0, predicted / measured: " + ", ".join(
            f"{axis} {predicted[axis] / 1e6:.4g} / {axes[axis] / 1e6:.4g}" for axis in axes), flush=True)


if __name__ == "__main__":
    main()
