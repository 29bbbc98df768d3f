"""Train a GPT on one process or many: python train.py [PRESET] [flags], also under mpiexec, torchrun, srun.

    build        model, gradient sums, optimizer of this rank      model.py parallel.py zero.py optim.py
    Step         one optimizer step, plainly                       pipeline.py; its fast twin: fast/graph.py
    Run          a whole run; its loop is Run.train
      prepare    who takes part: mesh, data, model                 config.py corpus/shards.py
      resume     from a checkpoint, or start with equal replicas   checkpoint.py runtime/resume.py
      make_step  the step, and what watches over it                skip.py runtime/watch.py
      log, check_replicas, poll_stop, save, leave                  runtime/log.py runtime/agree.py
"""
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # before torch, whose import takes seconds: a signal is handled from here on
    from runtime import session
    session.start_program()

from runtime import launch  # isort: skip (before torch: it sets how idle threads wait)
import torch

import checkpoint
import moe
import plot
from config import Outcome
from corpus.shards import micro_batches, open_data, trained_tokens
from corpus.tokenizer import prompt_tokenizer
from cost.fits import check_layout, check_memory
from cost.traffic import traffic
from fast.choose import choose
from fast.graph import make_step
from model import DTYPES, GPT, init_weights
from optim import Optimizer, batch_size, learning_rate
from parallel import make_mesh, untimed
from pipeline import dropout_seeds, forward_backward, forward_only, rank_layers
from runtime import agree, debugger, log, resume, session, timing, watch
from skip import Guard, Ranges, corrupt_targets, give_up_message
from zero import LEVELS

# -----------------------------------------------------------------------------
# the parts of a step; the layout tests call these, so that what is proven is what trains

def build(cfg, mesh, vocab_size, device, timers=untimed, choice=None):
    """-> (model, dp, optimizer) of this rank. choice: which parts of fast/ to use, a fast.choose.Choice."""
    choice, dtype = choice or choose(cfg, mesh, device), DTYPES[cfg.dtype]
    # weights are drawn in at least fp32; the buckets round them and keep the fp32 masters
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    with torch.device(device):
        model = GPT(cfg, mesh, vocab_size, rank_layers(cfg, mesh.pp), choice.dispatcher(cfg))
    torch.set_default_dtype(torch.float32)
    if device.type != "cpu":
        # TF32 for fp32 matmuls: it represents the router's bf16 or fp16 values, cast to fp32, exactly
        torch.set_float32_matmul_precision("high" if cfg.dtype in ("bf16", "fp16") else "highest")
    init_weights(model, cfg.seed)
    dp = LEVELS[cfg.zero](model, mesh, cfg.zero, timers, dtype, choice.comm(cfg))
    return model, dp, Optimizer(cfg, dp)


class Step:
    """One optimizer step: gradients, statistics, veto, update."""

    def __init__(self, cfg, model, dp, opt):
        self.cfg, self.model, self.dp, self.opt = cfg, model, dp, opt

    def __call__(self, batches, number, full=True, guard=None, tokens=None):
        """batches: [(x, y)] of micro_batches(); number: of the step, from 1 on; full: also num_zeros and
        param_norm; guard: a skip.Guard that may veto the update; tokens: of trained_tokens(), None: all.
        -> (optim.StepStats, found_inf): () 0.0, or 1.0 if refused on the device; None if guard vetoed it"""
        loss = self.gradients(batches, number, tokens=tokens)
        with self.dp.timers("norm"):
            stats = self.opt.stats(loss, full)
        return self.finish(stats, number, guard)

    def finish(self, stats, number, guard):
        if guard is not None and guard.veto(stats):
            return stats, None  # weights and moments stay
        return stats, self.update(stats, number)

    def gradients(self, batches, number, seed=torch.manual_seed, tokens=None):
        """Forward, backward, gradient sums -> this rank's part of the mean loss, () in at least fp32. seed is
        called with a seed before each micro-batch's forward, if there is dropout."""
        cfg, mesh = self.cfg, self.model.mesh
        seeds = [dropout_seeds(cfg, mesh, number, len(batches), chunk) for chunk in range(cfg.pp_chunks)]

        def seed_dropout(i, chunk):
            if cfg.dropout:
                seed(seeds[chunk][i])
        self.dp.reset()
        moe.reset_stats(self.model)
        if tokens is None:  # all of the whole global batch
            tokens = len(batches) * mesh.dp.size * cfg.micro_batch * cfg.seq_len
        loss = forward_backward(self.model, self.dp, batches, tokens, self.opt.loss_scale, seed_dropout)
        self.dp.finish_grad_sync()
        return loss

    def update(self, stats, number):
        """Clip and update -> found_inf, () 1.0 on the device if the gradient norm is not finite: a no-op."""
        found_inf = self.opt.step(learning_rate(self.cfg, number), stats.grad_norm)
        moe.update_router_bias(self.model, self.cfg.router_bias_rate, found_inf)
        return found_inf


def evaluate(cfg, model, source, batch, device):
    """-> float: mean cross-entropy in nats per trained token, at most eval_iters batches. Collective."""
    mesh, n = model.mesh, max(1, min(cfg.eval_iters, source.n_samples // batch))
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for i in range(n):
        batches = micro_batches(cfg, mesh, source, i * batch, batch, device)
        total += forward_only(model, batches) / mesh.tp.size  # every tp rank has the same sum, other stages 0
    mesh.world.all_reduce(total)  # SUM of one number, over the world
    model.train()
    return total.item() / source.n_targets(0, n * batch)


# -----------------------------------------------------------------------------

class Run:
    """A run from its flags to its files. Every method runs on every rank; is_main: rank 0, which logs."""

    def __init__(self, cfg, world, watchdog=watch.unwatched):
        self.cfg, self.world, self.watchdog, self.device = cfg, world, watchdog, world.device
        self.is_main, self.out = world.rank == 0, Path(cfg.out or f"out/{cfg.preset}")
        self.outcome, self.stop_reason = Outcome.DONE, None
        self.stop = agree.Stop(cfg.max_minutes)
        self.timers = timing.Timers(self.device, cfg.timers)
        self.prepare()
        self.resume()
        self.make_step()

    def prepare(self):
        """Mesh, data, model. Wrong input on any rank: one line, and all ranks exit with code 2."""
        cfg, world = self.cfg, self.world
        with launch.exit_together(world):
            self.mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, n_experts=cfg.n_experts, cp=cfg.cp)
            self.watchdog.set_mesh(self.mesh)
            self.full_batch = cfg.global_batch or cfg.micro_batch * self.mesh.dp.size  # after the ramp
            check_layout(cfg, self.mesh, self.full_batch)
            self.skip = Ranges(cfg.train_range_to_skip)  # wrong ranges are refused before --out is touched
            self.train_data, self.val_data, self.vocab_size, self.data_id = open_data(cfg, world.local_rank)
            check_memory(cfg, self.mesh, self.vocab_size, world)
            self.tokenizer = prompt_tokenizer(cfg)
        with launch.exit_together(world):  # again: what is collective must not wait for a rank that has left
            agree.compare(world, {"--data with the tokens": self.data_id}, "give all ranks the same data")
            self.choice = choose(cfg, self.mesh, self.device)
            self.model, self.dp, self.opt = build(cfg, self.mesh, self.vocab_size, self.device, self.timers,
                                                  self.choice)
        debugger.attach_stdin(world, cfg.pdb)

    def resume(self):
        """Resume from a checkpoint, or start with equal replicas."""
        cfg, world = self.cfg, self.world
        found = resume.prepare_out_dir(cfg, world, self.out)
        with launch.exit_together(world):
            self.state, self.skip = resume.start_from(found, self.skip, self.model, self.opt, self.data_id)
        resume.settle(cfg, world, self.out, self.state, found)
        self.first = self.state.step + 1
        self.saver = resume.Saver(self.out, world.axis, cfg.keep, cfg.timeout, resume.run_id(world.axis))
        self.watchdog.set_folder(self.out, self.saver.run_id)
        session.Stream.report(self.out)
        with launch.exit_together(world):
            if self.is_main:
                self.log_file = log.make_log(cfg, self.mesh, world, self.out, self.state, self.train_data)
        if self.is_main:
            log.started(cfg, self.model, found, self.full_batch, self.train_data.n_samples, self.skip)

    def make_step(self):
        """The step, plain or as a CUDA graph; clock, guard, straggler detection."""
        with launch.exit_together(self.world):
            self.step = make_step(Step(self.cfg, self.model, self.dp, self.opt), self.choice)
        self.clock, self.guard = timing.Clock(self.device), Guard(self.cfg, self.world, self.state)
        self.stragglers = watch.Stragglers(self.mesh, self.device)
        for axis in vars(self.mesh).values():
            axis.sent.clear()  # counted from the first step on

    def train(self):
        """All steps -> the run's Outcome."""
        cfg, state = self.cfg, self.state
        profiler = log.start_profile(cfg.profile and self.is_main)
        session.signals.can_save = True  # from here on a signal waits for the end of its step
        with log.tracer(cfg.trace and self.is_main, self.out) as self.trace:
            while state.step < cfg.steps and self.outcome is Outcome.DONE:
                number, batch = self.begin_step()
                if cfg.pdb >= 0 and number == self.first:
                    debugger.break_on_rank(self.world, cfg.pdb)
                # ---------------- training section begin
                batches = self.next_batches(number, batch)
                stats = self.take_step(batches, number)
                # ---------------- training section end
                self.end_step(number, batch)
                self.log(number, batch, stats)
                self.check_replicas(number)
                self.poll_stop(number)
                self.save(number)
        return self.leave(profiler)

    def begin_step(self):
        """-> (number of the step, its global batch in sequences)"""
        number, is_first = self.state.step + 1, self.state.step + 1 == self.first
        self.t0 = time.monotonic()
        self.watchdog.heartbeat(number, "first" if is_first else "")
        self.guard.reason = None
        return number, batch_size(self.state.samples, self.full_batch, self.cfg.rampup_batch_size)

    def next_batches(self, number, batch):
        """-> this rank's micro-batches; also for a skipped step: its data is consumed."""
        self.stragglers.begin()
        with self.timers("data"):
            batches = micro_batches(self.cfg, self.mesh, self.train_data, self.state.samples, batch,
                                    self.device)
        return corrupt_targets(batches) if number == self.cfg.inject_spike else batches

    def take_step(self, batches, number):
        """-> optim.StepStats; None where --train-range-to-skip leaves weights and moments as they are."""
        cfg = self.cfg
        if number in self.skip:
            self.state.skipped += 1
            return None
        if cfg.dump_grads and number == 1:  # between the sums and the update
            self.opt.on_grads_ready = lambda: resume.dump_grads(cfg.dump_grads, self.mesh, self.dp, self.opt,
                                                                self.vocab_size)
        count = len(batches) * cfg.micro_batch * self.mesh.dp.size
        tokens = trained_tokens(self.train_data, self.state.samples, count, self.device)
        stats, found_inf = self.step(batches, number, self.logs(number), self.guard, tokens)
        self.opt.on_grads_ready = None
        self.guard.refused_flags.append((number, found_inf))
        self.clock.count(count)
        if number == self.first:
            self.sent = {name: sum(axis.sent.values()) for name, axis in vars(self.mesh).items()}
        return stats

    def due(self, number, every):
        """Whether this step does what is done every so many steps (0: never) and at the end."""
        return every > 0 and (number % every == 0 or number == self.cfg.steps)

    def end_step(self, number, batch):
        """The step is over, also if it was skipped or refused."""
        self.state.step, self.state.samples = number, self.state.samples + batch
        if self.trace is not None:
            self.trace.step()
        if self.logs(number) or self.due(number, self.cfg.save_every) or self.guard.sigma:
            self.guard.count_refused()  # synchronises; a row and a checkpoint need the counts up to here
        if self.guard.given_up:
            self.outcome = Outcome.GAVE_UP

    def logs(self, number):
        return (number == self.first or self.due(number, self.cfg.log_every)
                or self.due(number, self.cfg.eval_every))

    def log(self, number, batch, stats):
        """A row of metrics.jsonl and its printed line; the validation loss and a sample with it."""
        cfg, model = self.cfg, self.model
        if not (self.logs(number) or self.guard.reason or self.outcome is not Outcome.DONE):
            return
        # means since the last row; every rank takes part, because memory and times are maxima over ranks
        result = log.StepResult(batch, learning_rate(cfg, number), stats, self.guard.reason)
        row, steps = log.metrics_row(cfg, self.world, self.state, result, self.clock, self.vocab_size)
        own_times, slow_ranks = self.stragglers.report()
        row.update(log.phase_times(self.timers, steps, self.mesh), **own_times)
        if self.opt.loss_scale is not None:
            row["loss_scale"] = self.opt.loss_scale.item()
        if cfg.n_experts and stats is not None:
            experts = moe.expert_stats(model, batch // cfg.micro_batch)  # of every layer, on every rank
            row.update(log.expert_metrics(experts))
            if self.is_main:
                self.log_file.experts(number, experts)
        if number == self.first and stats is not None and self.is_main:
            log.report_traffic(traffic(cfg, self.mesh, self.vocab_size, batch, self.choice), self.sent)
        if self.due(number, cfg.eval_every):
            self.watchdog.heartbeat(number, "evaluation")
            row["val_loss"] = self.state.evaluated(evaluate(cfg, model, self.val_data, batch, self.device))
        if self.is_main:
            self.log_file.row(**row, time=time.time())
            print(*slow_ranks, sep="\n", end="\n" if slow_ranks else "", flush=True)
        if self.due(number, cfg.eval_every):
            if self.tokenizer:
                log.print_sample(model, self.tokenizer, cfg.prompt, cfg.seed)
            self.clock.resume()  # metrics_row() paused it
        self.skip_reason = row["skip_reason"]  # what leave() prints if the run gave up

    def check_replicas(self, number):
        """--check-every: ranks that hold the same weights compare them."""
        if self.outcome is Outcome.DONE and self.cfg.check_every and number % self.cfg.check_every == 0:
            self.clock.pause()
            self.differences = watch.replica_differences(self.model, self.mesh)
            self.outcome = Outcome.REPLICAS_DIFFER if self.differences else Outcome.DONE
            self.clock.resume()

    def poll_stop(self, number):
        """A signal on any rank, or --max-minutes: stop after this step, unless it was the last."""
        self.stop.step_took(time.monotonic() - self.t0)
        if self.outcome is Outcome.DONE and number < self.cfg.steps:
            self.stop_reason = self.stop.poll(self.world)
            if self.stop_reason:
                # a run that diverged must not be saved and requeued
                self.outcome = Outcome.GAVE_UP if self.guard.count_refused() else Outcome.STOPPED

    def save(self, number):
        """A checkpoint, written in the background; none of a run that failed; always when it is stopped."""
        due = self.due(number, self.cfg.save_every) or self.state.save_best(self.cfg)
        if (due and self.outcome is Outcome.DONE) or self.outcome is Outcome.STOPPED:
            self.clock.pause()
            self.watchdog.heartbeat(number, "save")
            t0 = time.monotonic()
            resume.save(self.cfg, self.mesh, self.dp, self.opt, self.saver, self.state)
            self.stop.save_took(time.monotonic() - t0 + self.saver.seconds)
            self.clock.resume()

    def leave(self, profiler):
        """Wait for the last save, write the plots, say how it ended -> Outcome."""
        self.watchdog.heartbeat(self.state.step, "end")
        if not self.saver.wait() and self.outcome in (Outcome.DONE, Outcome.STOPPED):
            self.outcome = Outcome.FAILED  # the last steps are lost: exit 1, so that no script requeues
        if self.is_main:
            log.end_profile(profiler, self.out)
            # a run that is requeued draws its plot when it is done
            finished = self.stop_reason is None and self.outcome in (Outcome.DONE, Outcome.FAILED)
            self.log_file.close()
            plot.at_end(self.out, self.log_file.last_experts, self.cfg.plot and finished)
            step, checkpoints = self.state.step, checkpoint.steps(self.out)
            if self.outcome is Outcome.GAVE_UP:
                why = self.guard.reason or self.skip_reason
                print(give_up_message(checkpoints, *self.guard.refused_range, why), file=sys.stderr)
            if self.outcome is Outcome.REPLICAS_DIFFER:
                print(watch.differences_message(self.differences, step, checkpoints), file=sys.stderr)
            log.farewell(self.outcome, self.stop_reason, self.state, self.out, self.saver.saved)
        return self.outcome


def main(argv=None):
    with session.surround():
        cfg, wrong, timeout = agree.parse_flags(plot.parse_or_list, argv)
        launch.deterministic(cfg is not None and cfg.deterministic)
        with watch.Watch(session.signals.rank, timeout) as watchdog:
            # the watchdog alone ends what hangs: a timeout in gloo or NCCL would run on in a suspended run
            world = watchdog.world = launch.launch(launch.NO_TIMEOUT, wrong is not None, watchdog.joining)
            try:
                agree.same_start(world, cfg, wrong)
                # in no variable: shutdown() wants all that holds a process group to be gone
                outcome = Run(cfg, world, watchdog).train()
            except SystemExit as e:  # exit_together() has printed why
                outcome = e.code
            launch.shutdown(world)
    if outcome:
        raise SystemExit(int(outcome))


if __name__ == "__main__":
    main()
