"""Train a GPT on one process or many: python train.py [PRESET] [flags], the same under mpiexec, torchrun and srun.

    1) who am I, and who are the others      launch.py
    2) flags, mesh, data, model              config.py parallel.py data.py model.py
    3) resume                                checkpoint.py
    4) the training loop                     pipeline.py (forward, backward), parallel.py (sums), optim.py (update)
    5) what is left behind                   log.py
"""
import contextlib
import dataclasses
import math
import os
import shutil
import signal
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
import data
import log
from config import check_layout, parse, stage_layers
from launch import agreed, env_rank, launch, shutdown
from model import GPT, flops_per_token, generate, initialise, padded
from optim import Optimizer
from parallel import DataParallel, broadcast_and_verify, make_mesh
from pipeline import forward_backward, forward_only
from skip import Ranges

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# -----------------------------------------------------------------------------
# the parts of a step; the layout tests call these, so that what is proven is what trains

def build(cfg, mesh, vocab_size, device):
    """-> (model, dp, optimizer) for this rank."""
    torch.set_default_dtype(DTYPES[cfg.dtype])
    with torch.device(device):
        model = GPT(cfg, mesh, vocab_size, stage_layers(cfg, mesh.pp.size)[mesh.pp.rank])
    torch.set_default_dtype(torch.float32)
    initialise(model, cfg.seed)
    if cfg.compile:
        for block in model.blocks.values():
            block.compile()
    dp = DataParallel(model, mesh, cfg.zero)
    return model, dp, Optimizer(dp, cfg, mesh)


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


def micro_batches(cfg, mesh, source, first, count):
    """This rank's micro-batches of the `count` samples from `first` on: dp rank d takes micro-batches d*n..(d+1)*n-1."""
    n = count // (cfg.micro_batch * mesh.dp.size)
    start = first + mesh.dp.rank * n * cfg.micro_batch
    return [source.batch(start + j * cfg.micro_batch, cfg.micro_batch) for j in range(n)]  # (mb, T) twice


def dropout_seed(cfg, mesh, step, micro):
    """Randomness is a function of (seed, step, micro-batch, stage, tp rank): nothing to save, the same on any dp."""
    text = f"{cfg.seed}/{step}/{micro}/{mesh.pp.rank}/{mesh.tp.rank}"
    torch.manual_seed(zlib.crc32(text.encode()))


def train_step(cfg, mesh, model, dp, opt, batches, step, full=True):
    """Forward, backward, gradient sums, clipped update.
    -> (4,) fp64 on the device: mean loss, gradient norm, zero gradients, parameter norm; and 1.0 if nothing was updated."""
    def before(i):
        if cfg.dropout:
            dropout_seed(cfg, mesh, step, mesh.dp.rank * len(batches) + i)
    dp.begin()
    tokens = len(batches) * mesh.dp.size * cfg.micro_batch * cfg.seq_len
    loss = forward_backward(model, dp, mesh, batches, tokens, before=before)
    dp.finish()
    totals = opt.totals(loss, full)
    return totals, opt.step(learning_rate(cfg, step), totals[1])


def evaluate(cfg, mesh, model, source, batch):
    """Mean cross-entropy in nats per token over eval_iters global batches of the validation split, same on every rank."""
    model.eval()
    total, n = 0.0, max(1, min(cfg.eval_iters, source.n_samples // batch))
    for i in range(n):
        batches = to_device(micro_batches(cfg, mesh, source, i * batch, batch), next(model.parameters()).device)
        total = total + forward_only(model, mesh, batches)
    total = total.double() / mesh.tp.size  # every tp rank has the same sum
    if mesh.world.size > 1:
        dist.all_reduce(total, group=mesh.world.group)  # SUM of one number, over the world
    model.train()
    return total.item() / (n * batch * cfg.seq_len)


def to_device(batches, device):
    if device.type == "cpu":
        return batches
    return [tuple(t.pin_memory().to(device, non_blocking=True) for t in pair) for pair in batches]


# -----------------------------------------------------------------------------
# checkpoints: what of this rank goes where

def pieces(dp, opt, vectors=None, owned=True):
    """[(name, view, full shape, offset)] of this rank's weights and Adam moments, or of the given {prefix: per-bucket
    slices}. owned: only what this rank answers for, so that all ranks together hold each element once."""
    if vectors is None:
        state = [opt.adam.state[m] for m in opt.masters]
        vectors = {"": opt.masters, "exp_avg/": [s["exp_avg"] for s in state], "exp_avg_sq/": [s["exp_avg_sq"] for s in state]}
    out = []
    for prefix, slices in vectors.items():
        for b, own in zip(dp.buckets, slices, strict=True):
            for name, p, start in zip(b.names, b.params, b.starts, strict=True):
                if owned and b.shards == 1 and zlib.crc32(name.encode()) % b.axis.size != b.axis.rank:
                    continue  # replicated: the name says which replica writes it
                low, high = max(start, b.mine.start), min(start + p.numel(), b.mine.stop)
                for offset, size in checkpoint.rectangles(p.shape, low - start, high - start):
                    n = math.prod(size)
                    where = tuple(o + q for o, q in zip(offset, p.offset, strict=True))
                    out.append((prefix + name, own[low - b.mine.start:][:n].view(size), p.full_shape, where))
                    low += n
    return out


def dump(path, cfg, mesh, dp, opt, vocab_size):
    """--dump-grads: NAME is the weight before the update, grad/NAME the reduced, unclipped gradient; whole, unpadded."""
    vectors = {"": opt.masters, "grad/": [m.grad for m in opt.masters]}
    aside = Path(path).with_suffix(".parts")
    done = checkpoint.save(aside, 1, mesh.world.rank, mesh.world.size, pieces(dp, opt, vectors), {})
    if mesh.world.rank == 0:
        from safetensors.torch import save_file
        whole = checkpoint.full_tensors(done)
        for name, t in whole.items():
            if name.split("/")[-1] in ("wte.weight", "head.weight") and t.size(0) == padded(vocab_size):
                whole[name] = t[:vocab_size].contiguous()
        save_file(whole, path)
        shutil.rmtree(aside)


SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_hidden", "seq_len", "norm", "mlp", "pos", "bias", "tied")


def save(cfg, mesh, dp, opt, out, state):
    """Every rank writes its part of step_N/; returns when it is committed."""
    meta = {**dataclasses.asdict(state), "seed": cfg.seed, "adam_t": int(opt.adam_t()), "world": mesh.world.size,
            "skip": Ranges(cfg.train_range_to_skip).ends(), "shape": {k: getattr(cfg, k) for k in SHAPE}}
    checkpoint.save(out, state.step, mesh.world.rank, mesh.world.size, pieces(dp, opt), meta, cfg.keep)
    if mesh.world.size > 1:
        dist.barrier()  # nobody trains on before the commit


def load(cfg, dp, opt, path, data_id):
    """Fill weights, moments and counters from a checkpoint -> State. ValueError when it is another model's or data's."""
    index = checkpoint.read_index(path)
    meta = index["meta"]
    for key, there in meta["shape"].items():
        if there != getattr(cfg, key):
            flag = key.replace("_", "-")
            raise ValueError(f"checkpoint {path} has {flag} {there}, the flags say {getattr(cfg, key)}; give --{flag} {there}")
    if meta["data"] != data_id:
        raise ValueError(f"checkpoint {path} was trained on other data ({meta['data']}) than --data holds ({data_id}); "
                         "give its --data, or start a new --out")
    checkpoint.load(path, pieces(dp, opt, owned=False), index)
    opt.set_adam_t(meta["adam_t"])
    opt.publish()
    return State(**{f.name: meta[f.name] for f in dataclasses.fields(State)})


@dataclasses.dataclass
class State:
    """Where the run is. Data order, learning rate and randomness are functions of these."""
    step: int = 0      # completed steps, skipped ones included
    samples: int = 0   # sequences consumed
    skipped: int = 0   # steps skipped on request
    nan_steps: int = 0  # steps not taken because a gradient was not finite
    data: str = ""     # which token files


# -----------------------------------------------------------------------------

class Stop:
    """Why to stop early: a signal on any rank, or the wall clock. The handler only sets a flag."""

    def __init__(self, max_minutes):
        self.signal, self.limit = 0, max_minutes * 60
        self.began, self.margin = time.monotonic(), 0.0
        for s in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(s, self._note)

    def _note(self, number, frame):
        self.signal = number

    def agreed(self, world):
        """-> a reason on all ranks, or None. margin: seconds to keep for a save and a step."""
        late = self.limit and time.monotonic() - self.began + self.margin > self.limit
        flags = torch.tensor([self.signal, int(bool(late))])
        if world.size > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX)  # two small integers on the host, over the world
        number, late = flags.tolist()
        return signal.Signals(number).name if number else "max-minutes" if late else None


def open_data(cfg, world):
    """-> (train, val, vocabulary size, identity). Headers are checked on every rank, checksums once per node."""
    if cfg.data == "synthetic":
        vocab = cfg.vocab_size or 256
        return (data.Synthetic(vocab, cfg.seq_len, cfg.seed), data.Synthetic(vocab, cfg.seq_len, cfg.seed + 1), vocab,
                f"synthetic-{vocab}")
    meta = data.load_meta(cfg.data)
    if world.local_rank == 0:
        data.verify(cfg.data)
    vocab = cfg.vocab_size or meta["vocab_size"]
    if vocab < meta["vocab_size"]:
        raise ValueError(f"--vocab-size {vocab} is less than the {meta['vocab_size']} symbols of {cfg.data}; leave the flag away")
    train, val = (data.Tokens(cfg.data, split, cfg.seq_len, cfg.seed) for split in ("train", "val"))
    return train, val, vocab, " ".join(s["sha256"][:16] for split in ("train", "val") for s in meta["shards"][split])


def find_resume(cfg, out, world):
    """-> the checkpoint's path or None, agreed by all ranks. A fresh start moves an older run's directory aside."""
    found = [None]
    if world.rank == 0:
        checkpoint.clean(out)
        if cfg.resume == "auto":
            found = [checkpoint.newest(out)]
        elif cfg.resume != "none":
            checkpoint.check(cfg.resume)
            found = [Path(cfg.resume)]
        elif (out / "metrics.jsonl").exists():
            aside = next(p for i in range(1, 10**6) if not (p := out.with_name(f"{out.name}.{i}")).exists())
            os.rename(out, aside)
            print(f"{out} held another run: it is now {aside} (--resume auto would have gone on with it)", flush=True)
    return found


def main(argv=None):
    # 1) flags, and who am I. Every rank sees the same wrong flag: one of them says so
    try:
        cfg = parse(sys.argv[1:] if argv is None else argv)
    except ValueError as e:
        if env_rank() == 0:
            print(f"nanoshard: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    world = launch(cfg.timeout)
    stop = Stop(cfg.max_minutes)
    chief = world.rank == 0
    out = Path(cfg.out or f"out/{cfg.preset}")

    # 2) mesh, data, model
    with agreed(world):
        mesh = make_mesh(world, cfg.tp, cfg.pp)
        batch = cfg.global_batch or cfg.micro_batch * mesh.dp.size  # sequences per optimizer step
        check_layout(cfg, mesh, batch)
        skip = Ranges(cfg.train_range_to_skip)
        train, val, vocab_size, data_id = open_data(cfg, world)
    model, dp, opt = build(cfg, mesh, vocab_size, world.device)

    # 3) resume, or start with equal replicas
    with agreed(world):
        found = find_resume(cfg, out, world)
    if world.size > 1:
        dist.broadcast_object_list(found)  # one path from rank 0, over the world
    with agreed(world):
        if found[0] is None:
            broadcast_and_verify(model, mesh.dp)
            opt.reload()
            state = State(data=data_id)
        else:
            state = load(cfg, dp, opt, found[0], data_id)
        logger = make_logger(cfg, mesh, world, out, state, vocab_size) if chief else None
    if chief:
        start = f"resumed {found[0]}" if found[0] else "started"
        print(f"{start}: {sum(p.numel() for p in model.parameters()):,} parameters on this rank, dp {mesh.dp.size} tp {cfg.tp} "
              f"pp {cfg.pp} zero {cfg.zero}, {batch} x {cfg.seq_len} tokens per step, {train.n_samples:,} training samples"
              + (f", skipping steps {skip}" if skip.pairs else ""), flush=True)

    # 4) the training loop
    flops, flops_causal = flops_per_token(cfg, vocab_size)
    peak = log.peak_flops(world.device)
    tokenizer = data_tokenizer(cfg) if cfg.prompt else None
    clock = log.Clock(world.device)
    bad = torch.zeros((), device=world.device)  # steps the device refused since the last log
    profiler = start_profile(cfg, chief)
    reason = None
    saved = state.step
    with tracer(cfg, out, chief) as trace:
        while state.step < cfg.steps and reason is None:
            step = state.step + 1
            logs = step == 1 or step % cfg.log_every == 0 or step == cfg.steps
            evals = cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps)
            began = time.monotonic()
            # ---------------- training section begin
            batches = to_device(micro_batches(cfg, mesh, train, state.samples, batch), world.device)
            if step in skip:
                state.skipped += 1  # the data is drawn and dropped, weights and moments stay
                totals, logs = None, logs or step in {a for a, _ in skip.pairs}
            else:
                if cfg.dump_grads and step == 1:
                    opt.before_step = lambda: dump(cfg.dump_grads, cfg, mesh, dp, opt, vocab_size)
                totals, refused = train_step(cfg, mesh, model, dp, opt, batches, step, logs)
                opt.before_step = None
                bad += refused
                clock.steps += 1
            # ---------------- training section end
            state.step, state.samples = step, state.samples + batch
            if trace is not None:
                trace.step()
            row = {}
            if logs:
                ms = clock.per_step() if clock.steps else None
                state.nan_steps += int(bad.item())
                bad.zero_()
                row = measures(cfg, world, state, batch, totals, ms, flops, flops_causal, peak, learning_rate(cfg, step))
            if evals:
                clock.pause()
                opt.wait()
                row.setdefault("step", step)
                row["val_loss"] = evaluate(cfg, mesh, model, val, batch)
            if logs or evals:
                row.setdefault("lr", learning_rate(cfg, step))
                if chief:
                    logger.row(**row, time=time.time())
            if evals and cfg.prompt:
                text = continuation(cfg, mesh, model, tokenizer)
                if chief:
                    print(f"--- {text}\n---", flush=True)
            stop.margin = max(stop.margin, 2 * (time.monotonic() - began) if step > 1 else 0.0)
            reason = stop.agreed(world)
            if cfg.save_every and (step % cfg.save_every == 0 or step == cfg.steps) or reason:
                began = time.monotonic()
                clock.pause()
                opt.wait()
                save(cfg, mesh, dp, opt, out, state)
                saved = state.step
                stop.margin = max(stop.margin, 2 * (time.monotonic() - began))
            if evals or saved == step:
                clock.resume()

    # 5) leave
    if chief:
        end_profile(profiler, out)
        logger.close(cfg.plot and reason is None)
        print(f"{'stopped by ' + reason if reason else 'done'} after step {state.step}: {out}/ holds metrics.jsonl, loss.txt, "
              f"config.json" + (f", step_{saved:06d}" if saved else ""), flush=True)
    shutdown(world)
    if reason:
        raise SystemExit(85)  # the job script requeues on this code


def make_logger(cfg, mesh, world, out, state, vocab_size):
    config = {**dataclasses.asdict(cfg), "vocab_size_used": vocab_size, "git": log.git_revision(), "argv": sys.argv,
              "world": world.size, "launcher": world.launcher, "dp": mesh.dp.size, "torch": torch.__version__}
    logger = log.Log(out, config, state.step, cfg.wandb)
    if cfg.data != "synthetic":  # so that sample.py needs the run's directory only
        for name in ("meta.json", "tokenizer.json"):
            if (Path(cfg.data) / name).exists():
                shutil.copy(Path(cfg.data) / name, out / name)
    return logger


def measures(cfg, world, state, batch, totals, ms, flops, flops_causal, peak, lr):
    """The row of metrics.jsonl. Every rank calls this: memory is the maximum over ranks."""
    row = {"step": state.step, "tokens": state.samples * cfg.seq_len, "samples": state.samples, "global_batch": batch, "lr": lr,
           "skipped": state.skipped, "nan_steps": state.nan_steps}
    if totals is None:
        return {**row, "skip_reason": "range"}
    loss, grad_norm, zeros, param_norm = totals.tolist()  # sync point
    row.update(loss=loss, grad_norm=grad_norm, param_norm=param_norm, num_zeros=int(zeros))
    if ms:
        rate = batch * cfg.seq_len / ms * 1e3
        gpu = rate / world.size
        row.update(ms=ms, ms_per_sample=ms / batch, tok_s=rate, tok_s_gpu=gpu, tflops=gpu * flops / 1e12,
                   tflops_causal=gpu * flops_causal / 1e12, mfu=gpu * flops / peak if peak else None)
    if world.device.type == "cuda":
        mem = torch.tensor(torch.cuda.max_memory_reserved() / 2**30)
        if world.size > 1:
            dist.all_reduce(mem, dist.ReduceOp.MAX)  # one number on the host, over the world
        row["mem_gb"] = mem.item()
    return row


def data_tokenizer(cfg):
    if cfg.data == "synthetic":
        raise SystemExit("nanoshard: --prompt needs text data; synthetic has no tokenizer")
    import tokenizer
    return tokenizer.load(cfg.data)


def continuation(cfg, mesh, model, tokenizer):
    """The prompt and 100 more tokens, temperature 0.8, top-k 50."""
    ids = tokenizer.encode(cfg.prompt)
    return tokenizer.decode(generate(model, ids, 100, temperature=0.8, top_k=50, seed=cfg.seed))


def start_profile(cfg, chief):
    if not (cfg.profile and chief):
        return None
    try:
        from pyinstrument import Profiler
    except ImportError:
        print("pyinstrument is not installed: no profile (pip install pyinstrument)", flush=True)
        return None
    profiler = Profiler()
    profiler.start()
    return profiler


def end_profile(profiler, out):
    if profiler is not None:
        profiler.stop()
        (out / "profile.html").write_text(profiler.output_html())
        (out / "profile.txt").write_text(profiler.output_text(unicode=False, color=False))


def tracer(cfg, out, chief):
    if not (cfg.trace and chief):
        return contextlib.nullcontext()
    from torch.profiler import profile, schedule
    return profile(schedule=schedule(wait=1, warmup=1, active=3),
                   on_trace_ready=lambda p: p.export_chrome_trace(str(out / "trace.json")))


if __name__ == "__main__":
    main()
