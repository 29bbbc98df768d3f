"""Train a GPT on one process or many: python train.py [PRESET] [flags], also under mpiexec, torchrun, srun.

    1) what was asked, and who am I          config.py launch.py
    2) mesh, data, model                     mesh.py data.py model.py
    3) resume, or start with equal replicas  checkpoint.py state.py
    4) the training loop                     pipeline.py (forward, backward) parallel.py (sums) optim.py
       what guards it                        skip.py watch.py replicas.py stragglers.py
    5) what is left behind                   log.py measure.py
"""
import contextlib
import functools
import io
import math
import sys
import time
import zlib
from pathlib import Path

import torch

import checkpoint
import moe
from config import batch_size, check_layout, parse, stage_layers
from corpus import blend, data
from fast.graph import Graph, Rooms, bounded, static_shapes
from fast.near import Lane, NearBucket
from fast.window import together
from model import GPT, generate, initialise
from optim import Optimizer
from parallel import DataParallel, broadcast_and_verify, disable_compile_for_collectives, make_mesh, untimed
from pipeline import forward_backward, forward_only, next_logits
from runtime import log
from runtime.debug import FOR_EVER, attend, stop_here
from runtime.launch import Stop, agreed, deterministic, env_rank, launch, shutdown
from runtime.measure import make_logger, measure, report_traffic, timing
from runtime.replicas import DIFFER, differences, report
from runtime.state import State, dump, find_resume, load, save, upcycle
from runtime.stragglers import Stragglers
from runtime.watch import GROUP, SLOW, Watch, unwatched
from skip import GIVEN_UP, Guard, Ranges, rewind, spoil

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# -----------------------------------------------------------------------------
# the parts of a step; the layout tests call these, so that what is proven is what trains

def build(cfg, mesh, vocab_size, device, timers=untimed):
    """-> (model, dp, optimizer) of this rank."""
    dtype = DTYPES[cfg.dtype]
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))  # drawn in it, rounded by the buckets
    with torch.device(device):
        model = GPT(cfg, mesh, vocab_size, stage_layers(cfg, mesh.pp.size)[mesh.pp.rank])
    torch.set_default_dtype(torch.float32)
    if device.type == "cuda":  # the router's products of bf16 in fp32: TF32 holds every bf16 number exactly
        torch.set_float32_matmul_precision("high" if cfg.dtype in ("bf16", "fp16") else "highest")
    initialise(model, cfg.seed)
    if cfg.compile:
        speed_up(model)
    # one micro-batch, and a kernel that steps masters by gradients of another dtype (optim.py)
    once = dtype == torch.bfloat16 and device.type == "cuda" and cfg.global_batch in (
        0, cfg.micro_batch * mesh.dp.size)
    near = (once and cfg.zero == 1 and mesh.pp.size == 1 and mesh.stage.size > 1
            and together(mesh, mesh.stage, device))
    dp = DataParallel(model, mesh, cfg.zero, timers, dtype=dtype, once=once,
                      near=functools.partial(NearBucket, Lane()) if near else None)
    return model, dp, Optimizer(dp, cfg, mesh)


def speed_up(model):
    """--compile: each block as one graph; of a block with experts, whose rows vary, all but the experts."""
    whole = model.mesh.tp.size == 1  # collectives over tp stand between graphs
    disable_compile_for_collectives()
    for block in model.blocks.values():
        if block.moe is None:
            block.compile(fullgraph=whole)
        else:
            block.attend = torch.compile(block.attend, fullgraph=whole)
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
        # randomness is a function of (seed, step, micro-batch, stage, tp rank): nothing to save
        if cfg.dropout:
            micro = mesh.dp.rank * len(batches) + i
            torch.manual_seed(zlib.crc32(f"{cfg.seed}/{step}/{micro}/{mesh.pp.rank}/{mesh.tp.rank}".encode()))
    dp.begin()
    moe.begin(model)
    tokens = len(batches) * mesh.dp.size * cfg.micro_batch * cfg.seq_len  # of the whole global batch
    loss = forward_backward(model, dp, mesh, batches, tokens, opt.scale, before, dp.timers)
    dp.finish()
    return loss


def recorded(cfg, mesh, model, dp, opt):
    """-> gradients() as a graph.Graph, or None where shapes change. New weights travel at its start, but for
    dp.early."""
    device = opt.masters[0].device
    if not static_shapes(cfg, mesh, device):
        return None
    rooms, near = None, cfg.n_experts > 0 and mesh.ep.size > 1 and together(mesh, mesh.ep, device)
    if bounded(cfg, mesh):
        if not near:
            return None  # no windows over the network
        rooms = Rooms(model, cfg.ep_slack)
    elif near:
        moe.capacity_windows(model)

    def f(batches):
        dp.send_weights()
        loss = gradients(cfg, mesh, model, dp, opt, batches, step=0)  # without dropout the step is not used
        return loss if rooms is None else rooms.judge(loss)
    dp.lazy = True
    return Graph(f, rooms)


def train_step(cfg, mesh, model, dp, opt, batches, step, full=True, graph=None, guard=None):
    """Gradients, then the clipped update. graph: a graph.Graph of the first part. guard: a skip.Guard, may
    forbid the second: then nothing moves, and the second result is None.
    -> (4,) fp64 on the device: mean loss, gradient norm, zero gradients, weight norm; () 1.0 if refused."""
    if graph is None:
        loss = gradients(cfg, mesh, model, dp, opt, batches, step)
    else:
        dp.arrive(model.wte)  # its weights left before (dp.early): what is recorded cannot wait for that
        loss = graph(batches)
        dp.owed = False
    with dp.timers("norm"):
        totals = opt.totals(loss, full)
    lr, refused, rooms = learning_rate(cfg, step), None, graph and graph.rooms
    if rooms and not (guard and guard.sigma):
        # the GPU goes on while the host asks: a void step's loss is NaN, and then nothing moves
        refused = opt.step(lr, totals[1] + 0 * totals[0])
    if rooms and not graph.fits(totals[0]):  # again, in blocks of rows as long as they are
        totals, refused = opt.totals(gradients(cfg, mesh, model, dp, opt, batches, step), full), None
    if refused is None:
        if guard is not None and guard.veto(totals):
            return totals, None
        refused = opt.step(lr, totals[1])
    moe.steer(model, cfg.router_bias_rate, refused)
    return totals, refused


def evaluate(cfg, mesh, model, source, batch, device):
    """Mean cross-entropy in nats per token over eval_iters global batches of the validation split."""
    model.eval()
    n = max(1, min(cfg.eval_iters, source.n_samples // batch))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for i in range(n):
        batches = micro_batches(cfg, mesh, source, i * batch, batch, device)
        total += forward_only(model, mesh, batches) / mesh.tp.size  # every tp rank has the same sum
    mesh.world.all_reduce(total)  # SUM of one number, over the world
    model.train()
    return total.item() / (n * batch * cfg.seq_len)


# -----------------------------------------------------------------------------

def open_data(cfg, world):
    """-> (train, val, vocabulary size, identity). Headers checked on every rank, checksums once per node."""
    if cfg.data == "synthetic":
        vocab = cfg.vocab_size or 256
        train, val = (data.Synthetic(vocab, cfg.seq_len, cfg.seed + i) for i in (0, 1))
        return train, val, vocab, f"synthetic-{vocab}"
    meta = blend.load_meta(cfg.data)
    if world.local_rank == 0:
        blend.verify(cfg.data)
    vocab = cfg.vocab_size or meta["vocab_size"]
    if vocab < meta["vocab_size"]:
        raise ValueError(f"--vocab-size {vocab} is less than the {meta['vocab_size']} symbols of {cfg.data}; "
                         f"try --vocab-size {meta['vocab_size']}")
    train, val = (blend.open_tokens(cfg.data, split, cfg.seq_len, cfg.seed) for split in ("train", "val"))
    return train, val, vocab, meta["identity"]


def prompt_tokenizer(cfg):
    if not cfg.prompt:
        return None
    if cfg.data == "synthetic":
        raise ValueError("--prompt needs text, synthetic data has no tokenizer; try --data DIR")
    from corpus import tokenizer
    words = tokenizer.load(blend.first(cfg.data))
    words.encode(cfg.prompt)  # an unknown character is an error now, not at the first evaluation
    return words


def main(argv=None):
    # every rank sees the same wrong flag, or --help: one of them speaks
    try:
        with contextlib.nullcontext() if env_rank() == 0 else contextlib.redirect_stdout(io.StringIO()):
            cfg = parse(sys.argv[1:] if argv is None else argv)
    except ValueError as e:
        if env_rank() == 0:
            print(f"nanoshard: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    timeout = cfg.timeout if cfg.pdb < 0 else FOR_EVER
    if cfg.deterministic:
        deterministic()
    watch = Watch(env_rank(), timeout)
    try:
        world = watch.world = launch(GROUP * timeout)
        try:
            code = run(cfg, world, watch)
        except SystemExit as e:  # wrong input, already explained
            code = e.code
        shutdown(world)
    finally:
        watch.close()
    if code:
        raise SystemExit(code)


def run(cfg, world, watch=unwatched):
    """-> the exit code: 0 done, 85 stopped early after a complete save, 42 gave up, 44 replicas differ."""
    # 1) when to stop, and where to
    stop = Stop(cfg.max_minutes)
    chief, device = world.rank == 0, world.device
    out = Path(cfg.out or f"out/{cfg.preset}")

    # 2) mesh, data, model
    with agreed(world):
        if cfg.pdb >= world.size:
            raise ValueError(f"--pdb {cfg.pdb}: the ranks are 0 to {world.size - 1}")
        mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, n_experts=cfg.n_experts)
        watch.knows(mesh)
        full_batch = cfg.global_batch or cfg.micro_batch * mesh.dp.size  # sequences per optimizer step
        check_layout(cfg, mesh, full_batch)
        skip = Ranges(cfg.train_range_to_skip)
        train, val, vocab_size, data_id = open_data(cfg, world)
        words = prompt_tokenizer(cfg)
    timers = log.Timers(device, cfg.timers)
    with agreed(world):
        model, dp, opt = build(cfg, mesh, vocab_size, device, timers)
    if cfg.pdb >= 0:
        attend(world, cfg.pdb)

    # 3) resume, or start with equal replicas
    found, saver = find_resume(cfg, world, out)
    watch.into(out, saver.token)
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
            late = skip.too_late(state.step, Ranges(state.skip))
            if chief and late:
                print(late, file=sys.stderr, flush=True)
            skip = Ranges([*skip.ends(), *state.skip])  # a resume inside a range goes on skipping it
        state.skip = skip.ends()
        logger = make_logger(cfg, mesh, world, out, state, vocab_size) if chief else None
    if chief:
        n = sum(p.numel() for p in model.parameters())
        how = f"resumed {found}" if found else "started"
        print(f"{how}: {n:,} parameters on this rank, dp {mesh.dp.size} "
              f"tp {cfg.tp} pp {cfg.pp} ep {cfg.ep} zero {cfg.zero}, {full_batch} x {cfg.seq_len} tokens per "
              f"step, {train.n_samples:,} training samples" + f", skipping steps {skip}" * bool(skip.pairs),
              flush=True)

    # 4) the training loop
    with agreed(world):
        graph = recorded(cfg, mesh, model, dp, opt)
    if chief and dp.once and cfg.zero and not dp.near and mesh.pp.size == 1 < world.size == world.local_size:
        print("messages go through NCCL: these GPUs do not reach each other; does each process see them all?")
    for axis in vars(mesh).values():
        axis.sent.clear()  # counted from the first step on
    clock = log.Clock(device)
    guard, stragglers = Guard(cfg, world, state), Stragglers(mesh, device)
    profiler = log.start_profile(cfg.profile and chief)
    code, reason, first = 0, None, state.step + 1
    with log.tracer(cfg.trace and chief, out) as trace:
        while state.step < cfg.steps and reason is None:
            began = time.monotonic()
            step = state.step + 1
            watch.beat(step, "first" * (step == first), SLOW if step == first else 1)
            batch = batch_size(state.samples, full_batch, cfg.rampup_batch_size)
            evals = cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps)
            logs = step in (first, cfg.steps) or step % cfg.log_every == 0 or evals
            totals = guard.reason = None
            if cfg.pdb >= 0 and step == first:
                stop_here(world, cfg.pdb)
            # ---------------- training section begin
            stragglers.begin()
            with timers("data"):
                batches = micro_batches(cfg, mesh, train, state.samples, batch, device)
            if step == cfg.inject_spike:
                batches = spoil(batches)
            if step in skip:
                state.skipped += 1  # the data is drawn and dropped; weights and moments stay
            else:
                if cfg.dump_grads and step == 1:
                    opt.before_step = lambda: dump(cfg.dump_grads, mesh, dp, opt, vocab_size)
                totals, refused = train_step(cfg, mesh, model, dp, opt, batches, step, logs, graph, guard)
                opt.before_step = None
                guard.taken.append(refused)
                clock.steps, clock.samples = clock.steps + 1, clock.samples + batch
            # ---------------- training section end
            state.step, state.samples = step, state.samples + batch
            if trace is not None:
                trace.step()
            if (logs or guard.sigma) and guard.settle():
                code = GIVEN_UP
            if logs or guard.reason or code:
                lr = learning_rate(cfg, step)
                row, steps = measure(cfg, world, state, batch, lr, totals, guard.reason, clock, vocab_size)
                row.update(timing(timers, steps, mesh), loss_scale=opt.scale and opt.scale.item())
                own, slow = stragglers.read()
                row.update(own)
                if cfg.n_experts and totals is not None:
                    experts = moe.summary(model, batch // cfg.micro_batch)
                    row.update(log.expert_keys(experts))
                    if chief:
                        logger.experts(step, experts)
                if step == first:
                    report_traffic(cfg, mesh, vocab_size, batch, chief, windows=dp.near is not None)
                if evals:
                    watch.beat(step, "evaluation", SLOW)
                    opt.wait()
                    row["val_loss"] = evaluate(cfg, mesh, model, val, batch, device)
                if chief:
                    logger.row(**row, time=time.time())
                    print(*slow, sep="\n", end="\n" * bool(slow), flush=True)
                if evals and words:
                    text = words.decode(generate(model, words.encode(cfg.prompt), 100, 0.8, 50, cfg.seed,
                                                 next_logits))
                    if chief:
                        print(f"--- {text}\n---", flush=True)
                if evals:
                    clock.resume()
            if cfg.check_every and step % cfg.check_every == 0 and not code:
                clock.pause()
                opt.wait()
                differ = differences(model, mesh)
                code = DIFFER if differ else 0
                clock.resume()
            if code:
                break
            stop.step_took(time.monotonic() - began)
            reason = stop.agreed(world) if step < cfg.steps else None  # a run that is done is not requeued
            if cfg.save_every and (step % cfg.save_every == 0 or step == cfg.steps) or reason:
                clock.pause()
                watch.beat(step, "save", SLOW)
                began = time.monotonic()
                opt.wait()
                guard.settle()  # the checkpoint knows the steps since the last log too
                save(cfg, mesh, dp, opt, saver, state)  # goes on beside the next steps
                stop.save_took(time.monotonic() - began + saver.seconds)
                clock.resume()

    # 5) leave
    watch.beat(state.step, "end", SLOW)
    whole = saver.wait()
    if chief:
        log.end_profile(profiler, out)
        logger.close(cfg.plot and reason is None and not code)
        if code == GIVEN_UP:
            print(rewind(checkpoint.steps(out), state, guard.reason or row["skip_reason"]), file=sys.stderr)
        if code == DIFFER:
            print(report(differ, state.step, checkpoint.steps(out)), file=sys.stderr)
        how = f"stopped by {reason}" if reason else "gave up" if code else "done"
        print(f"{how} after step {state.step}: {out}/ holds metrics.jsonl, loss.txt, config.json"
              + (f", step_{saver.saved:06d}" if saver.saved else ""), flush=True)
    if code:
        return code
    if not whole:
        return 1  # the last steps are lost: neither done nor to be requeued as if nothing had happened
    return 85 if reason else 0  # the job script requeues on 85


if __name__ == "__main__":
    main()
