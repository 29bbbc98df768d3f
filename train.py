"""Train a GPT in one process or many: python train.py [PRESET] [flags], also under a launcher.

    train      the loop over the steps of a run
    Step       one optimizer step, plainly               pipeline.py; faster: fast/graph.py
    evaluate   the validation loss
    build      model, gradient sums, optimizer           model.py ddp.py zero.py optim.py
    Run        what the loop needs, from flags to files  runtime/
"""
import contextlib
import time
from pathlib import Path

if __name__ == "__main__":  # before torch, whose import takes seconds: signals, --help, wrong flags
    from runtime import session
    session.start_program()

from runtime import agree, log, resume, session  # isort: skip (before torch: see launch.py)
import torch

import moe
from config import Outcome, draws_random_numbers
from corpus.samples import batch_size, micro_batches, trained_tokens
from fast.choose import choose
from fast.graph import make_step
from model import DTYPES, GPT
from optim import Optimizer, learning_rate
from parallel import parameters_without_memory
from pipeline import dropout_seeds, forward_backward, forward_only, rank_layers
from skip import Guard, corrupt_targets, skipped_ranges
from zero import LEVELS


def train(run):
    """Do all steps of a Run. Return its Outcome."""
    cfg = run.cfg
    state = run.state
    if cfg.pdb >= 0:
        breakpoint()  # which only the rank of --pdb obeys

    def due(every):  # whether the loop's step `number` is one of these (0: none), or the last
        return every > 0 and (number % every == 0 or number == cfg.steps)

    while state.step < cfg.steps and run.outcome is Outcome.DONE:  # else something has ended it
        begun = time.monotonic()
        number = state.step + 1
        run.is_logged = number == run.first_step or due(cfg.log_every) or due(cfg.eval_every)
        batches, n_trained, batch = run.next_batch(number)  # batch: how many sequences

        stats = None
        if any(a <= number <= b for a, b in run.skip):  # --train-range-to-skip
            state.skipped += 1
        else:  # forward, backward, sums of gradients, update: Step, below
            stats, refused = run.step(batches, number, run.is_logged, run.guard, n_trained)
            run.guard.refused_flags.append((number, refused))  # on the device: read below
            run.metrics.clock.steps += 1  # a row's times are means over these
            run.metrics.clock.samples += batch
        state.step = number
        state.samples += batch

        # A row and a checkpoint need the number of refused steps, too many of which end the run. To
        # read it, the host waits, which with --skip-spikes it does in every step.
        if run.is_logged or due(cfg.save_every) or cfg.skip_spikes:
            run.guard.count_refused()
        if run.is_logged or stats is None or run.guard.reason or run.guard.given_up:
            run.log(batch, stats, evaluates=due(cfg.eval_every))
        run.outcome = run.judge(begun)  # a signal, a time limit, different replicas end the run
        is_best = cfg.keep_best and cfg.save_every > 0 and state.best.get("step") == number
        goes_on = run.outcome is Outcome.DONE
        if run.outcome is Outcome.STOPPED or (goes_on and (due(cfg.save_every) or is_best)):
            run.save()
        run.watchdog.heartbeat(number + 1)
    return run.leave()


class Step:
    """One optimizer step: gradients, statistics, veto, update.

    On a GPU make_step() wraps it in a fast.graph.GraphedStep, which replays `gradients`.
    """

    def __init__(self, cfg, model, data_parallel, opt):
        self.cfg = cfg
        self.model = model
        self.data_parallel = data_parallel
        self.opt = opt
        self.draws_random_numbers = draws_random_numbers(cfg)
        self.before_update = None  # if a flag asks, Run.before_update: after the sums

    def __call__(self, batches, number, full=True, guard=None, n_trained=None):
        """Do step `number`, counted from 1. Return (optim.StepStats, refused).

        batches: from micro_batches(). n_trained: what the loss is divided by; a run passes
        trained_tokens(), and None means all tokens of the global batch.
        full: whether to compute num_zeros and param_norm, too. guard: a skip.Guard, which may veto
        the update. refused: a () tensor on the device, 0.0 after an update and 1.0 where the norm
        was not finite, so that no weight changed; None after a veto.
        """
        loss = self.gradients(batches, number, n_trained=n_trained)
        with self.data_parallel.timers("norm"):
            stats = self.opt.stats(loss, full)
        return stats, self.update(stats, number, guard)

    def gradients(self, batches, number, set_seed=torch.manual_seed, n_trained=None):
        """Do forward, backward and gradient sums. Return this rank's part of the mean loss, ().

        With dropout, set_seed is called before each forward; fast/graph.py passes its own.
        """
        cfg = self.cfg
        mesh = self.model.mesh
        if n_trained is None:
            n_trained = len(batches) * mesh.dp.size * cfg.micro_batch * cfg.seq_len
        seeds = []
        if self.draws_random_numbers:
            seeds = dropout_seeds(cfg, mesh, number, len(batches))
        if cfg.n_experts:
            moe.reset_stats(self.model)
        # ddp.py's hooks take the gradients. There is no zero_grad: the first of a step overwrites.
        self.data_parallel.reset()
        loss = forward_backward(self.model, self.data_parallel, batches, n_trained,
                                self.opt.loss_scale, seeds, set_seed)
        self.data_parallel.finish_grad_sync()  # waits for the sums of gradients
        return loss

    def update(self, stats, number, guard=None):
        """Clip and update, unless the guard vetoes it. Return `refused`, see __call__()."""
        if guard is not None and guard.sigma and guard.veto(stats):  # --skip-spikes
            return None
        if self.before_update is not None:
            self.before_update(number)
        not_finite = self.opt.step(learning_rate(self.cfg, number), stats.grad_norm)
        if self.cfg.n_experts:
            moe.update_router_bias(self.model, self.cfg.router_bias_rate, not_finite)
        return not_finite


def evaluate(cfg, model, source, batch, device):
    """Return the mean cross-entropy, in nats per trained token, of --eval-iters batches.

    batch: the sequences of each. If the source has fewer than one batch, its first sequences count
    again. Collective.
    """
    mesh = model.mesh
    n_batches = max(1, min(cfg.eval_iters, source.n_samples // batch))
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for i in range(n_batches):
        batches = micro_batches(cfg, mesh, source, i * batch, batch, device)
        # Every tp rank has the same sum; the stages before the last have 0.
        total += forward_only(model, batches) / mesh.tp.size
    mesh.world.all_reduce(total)  # SUM of one number, over the world
    model.train()
    return total.item() / source.n_targets(0, n_batches * batch)


def build(cfg, mesh, vocab_size, device, timers=contextlib.nullcontext, choice=None):
    """Return this rank's (GPT, ddp.DataParallel, Optimizer). choice: a fast.choose.Choice."""
    choice = choice or choose(cfg, mesh, device)
    dtype = DTYPES[cfg.dtype]
    # Weights are drawn in at least fp32. The buckets round them and keep the fp32 masters. A
    # parameter gets memory just before its bucket is made, so with --zero 3 no rank ever holds all
    # of the model.
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    try:
        with torch.device(device), parameters_without_memory():
            model = GPT(cfg, mesh, vocab_size, rank_layers(cfg, mesh.pp))
            choice.install(model)  # on a CPU it changes nothing
    finally:
        torch.set_default_dtype(torch.float32)
    if device.type != "cpu":
        # In a 16-bit model the only fp32 matmul is the router's. In forward its operands were bf16
        # or fp16, which TF32 holds exactly. In backward TF32 rounds the gradient.
        is_16_bit = cfg.dtype in ("bf16", "fp16")
        torch.set_float32_matmul_precision("high" if is_16_bit else "highest")
    data_parallel = LEVELS[cfg.zero](model, mesh, cfg.zero, timers, dtype=dtype,
                                     optimizer=cfg.optimizer, faster=choice.bucket_class)
    return model, data_parallel, Optimizer(cfg, data_parallel)


class Run:
    """A run from its flags to its files. Every method runs on every rank; rank 0 logs."""

    def __init__(self, cfg, world, watchdog):
        """world: a runtime.launch.World, this process's place among all processes."""
        self.cfg = cfg
        self.world = world
        self.watchdog = watchdog  # a runtime.watch.Watch: it ends a run that hangs
        self.out = Path(cfg.out or f"out/{cfg.preset}")
        self.stop = agree.Stop(cfg.max_minutes)  # its clock also runs while data is opened
        self.outcome = Outcome.DONE
        self.stop_reason = None  # a signal, OUT/stop or --max-minutes
        self.differences = []  # between replicas
        with world.everyone.input():  # wrong input of any rank: one line, all end with code 2
            self.start()
        session.signals.can_save = True  # from here on, a signal waits for the end of its step
        watchdog.heartbeat(self.first_step, "first")
        self.metrics.clock.resume()

    def start(self):
        """Open the data, build the model, fill it from a checkpoint or with equal replicas."""
        cfg = self.cfg
        world = self.world
        mesh = agree.make_mesh(cfg, world)
        self.mesh = mesh
        # how many sequences all ranks train in a step, after the ramp-up
        self.batch = cfg.global_batch or cfg.micro_batch * mesh.dp.size
        data = agree.open_data(cfg, world, mesh)
        self.train_data, self.val_data, vocab_size, data_id, self.tokenizer = data
        self.metrics = log.Metrics(cfg, mesh, world.device)
        self.choice = choose(cfg, mesh, world.device)  # the fast ways: on a CPU none
        self.model, self.data_parallel, self.opt = build(cfg, mesh, vocab_size, world.device,
                                                         self.metrics.timers, self.choice)

        found = resume.prepare_out_dir(cfg, world, self.out)
        self.state = resume.start_from(found, self.model, self.opt, data_id)
        self.skip = skipped_ranges(self.state.skip)
        self.saver = resume.settle(cfg, world, self.out, self.state, found)
        self.first_step = self.state.step + 1
        self.guard = Guard(cfg, world, self.state)
        if world.size > 1:
            self.opt.stop = self.stop
        self.watchdog.set_run(mesh, self.out, self.saver.run_id)

        plain = Step(cfg, self.model, self.data_parallel, self.opt)
        if cfg.dump_grads or cfg.log_layers:
            plain.before_update = self.before_update
        self.step = make_step(plain, self.choice)  # plain itself, or a CUDA graph of it
        self.log_file = None
        if world.rank == 0:
            self.log_file = log.begin(self, found)

    def next_batch(self, number):
        """Return this rank's micro-batches, and how many tokens and sequences all ranks train."""
        cfg = self.cfg
        first = self.state.samples
        device = self.world.device
        self.metrics.stragglers.begin()  # this rank's own time, to find slow ranks
        batch = batch_size(first, self.batch, cfg.rampup_batch_size)
        with self.metrics.timers("data"):  # nothing without --timers
            batches = micro_batches(cfg, self.mesh, self.train_data, first, batch, device)
        if number == cfg.inject_spike:
            batches = corrupt_targets(batches)
        return batches, trained_tokens(self.train_data, first, batch, device), batch

    def before_update(self, number):
        """--dump-grads and --log-layers: they read gradients that are summed, not yet clipped."""
        if self.cfg.dump_grads and number == 1:
            resume.dump_grads(self.cfg.dump_grads, self.world, self.data_parallel, self.opt,
                              self.model.vocab_size)
        if self.cfg.log_layers and self.is_logged:
            self.metrics.layer_norms.measure(self.data_parallel, self.opt)

    def log(self, batch, stats, evaluates):
        """Write a row of metrics.jsonl and print its line; evaluate, and print a sample."""
        cfg = self.cfg
        step = self.state.step
        row = self.metrics.row(self, batch, stats)
        if evaluates:
            self.watchdog.heartbeat(step, "evaluation")
            # While the batch grows, all evaluations read the same samples.
            loss = evaluate(cfg, self.model, self.val_data, self.batch, self.world.device)
            row["val_loss"] = self.state.evaluated(loss)
        if self.log_file is not None:
            self.log_file.row(**row, time=time.time())
            if step == self.first_step and stats is not None:
                log.report_traffic(self, batch)
        if evaluates and self.tokenizer:
            text = log.print_sample(self.model, self.tokenizer, cfg.prompt, cfg.seed)
            if self.log_file is not None:
                self.log_file.notes.add({"step": step, "sample": text})
        if evaluates:
            self.metrics.clock.resume()  # the time since metrics.row() is of no step

    def judge(self, begun):
        """Return the Outcome that the step just done gives the run: DONE where it goes on."""
        step = self.state.step
        if self.guard.given_up:
            return Outcome.GAVE_UP
        if self.cfg.check_every and step % self.cfg.check_every == 0:
            self.metrics.clock.pause()
            self.differences = agree.replica_differences(self.model, self.mesh)
            self.metrics.clock.resume()
            if self.differences:
                return Outcome.REPLICAS_DIFFER
        if step == self.cfg.steps:
            return Outcome.DONE
        # Optimizer.stats has summed the votes of all ranks, so all get the same answer.
        self.stop_reason = self.stop.poll(self.world, begun, self.saver.seconds)
        if self.stop_reason is None:
            return Outcome.DONE
        diverged = self.guard.count_refused()  # such a run must not be saved and requeued
        return Outcome.GAVE_UP if diverged else Outcome.STOPPED

    def save(self):
        """Start to write a checkpoint."""
        self.metrics.clock.pause()
        self.watchdog.heartbeat(self.state.step, "save")
        resume.save(self.cfg, self.mesh, self.data_parallel, self.opt, self.saver, self.state)
        self.metrics.clock.resume()

    def leave(self):
        """Wait for the last save, and say how the run ended. Return its Outcome."""
        self.watchdog.heartbeat(self.state.step, "end")
        if not self.saver.wait() and self.outcome in (Outcome.DONE, Outcome.STOPPED):
            self.outcome = Outcome.FAILED  # The last steps are lost, so no script may requeue it.
        if self.log_file is not None:
            log.end(self)
        return self.outcome


def main(argv=None):
    outcome = Outcome.DONE
    with agree.started(argv) as start:  # flags, world and watchdog; all ranks have equal flags
        # No variable holds the Run: the process groups must be free when the ranks part.
        outcome = train(Run(*start))
    if outcome:
        raise SystemExit(int(outcome))


if __name__ == "__main__":
    main()
