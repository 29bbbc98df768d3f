"""Train a GPT in one process or many: python train.py [PRESET] [flags], also under a launcher.

    build        model, gradient sums, optimizer of this rank    model.py ddp.py zero.py optim.py
    Step         one optimizer step, plainly                     pipeline.py; faster: fast/graph.py
    evaluate     the validation loss
    Run          a whole run; its loop is Run.train              runtime/parts.py
      prepare      who takes part: mesh, data, model             config.py corpus/batches.py
      start        from a checkpoint, or with equal replicas     checkpoint.py runtime/resume.py
      log, check_replicas, poll_stop, save                       runtime/log.py runtime/agree.py
      leave        how the run ended, in words                   runtime/ending.py
"""
import sys
import time
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # The import of torch takes seconds. Signals are handled from here on.
    if sys.flags.safe_path:  # python -I leaves out the program's own folder.
        sys.path.insert(0, str(Path(__file__).resolve().parent))
    from interface.packages import check_packages
    check_packages()
    import plot
    from runtime import session
    session.start_program()
    PARSED = session.parse_first(plot.parse_or_list)  # --help and wrong flags need no torch.

from runtime import launch  # isort: skip (before torch: it sets how idle threads wait)
import torch

import moe
import plot
from config import Outcome
from corpus.batches import micro_batches, open_data, trained_tokens
from corpus.rampup import batch_size
from corpus.tokenizer import prompt_tokenizer
from cost.fits import check_memory
from cost.traffic import traffic
from ddp import untimed
from fast.choose import choose
from fast.graph import make_step
from interface.layout import check_layout
from interface.nearest import with_fix
from interface.schema import ChangedFile
from interface.terminal import say
from model import DTYPES, GPT, initial_weights
from ops import fp8
from optim import Optimizer, learning_rate
from parallel import make_mesh, parameters_without_memory
from pipeline import dropout_seeder, forward_backward, forward_only, rank_layers
from runtime import agree, debugger, log, profiles, resume, session, timing, watch
from runtime.ending import is_finished, report_ending
from runtime.layer_norms import LayerNorms
from runtime.parts import Data, Ending, Oversight, Parts
from runtime.progress import Progress
from runtime.saver import Saver
from skip import Guard, Ranges, corrupt_targets
from zero import LEVELS

# -----------------------------------------------------------------------------
# The parts of a step. The layout tests call these parts, so the code that they verify is the code
# that trains.

def build(cfg, mesh, vocab_size, device, timers=untimed, choice=None):
    """Return this rank's (model, data_parallel, optimizer). choice: a fast.choose.Choice."""
    choice = choice or choose(cfg, mesh, device)
    dtype = DTYPES[cfg.dtype]
    # Weights are drawn in at least fp32. The buckets round them and keep the fp32 masters. A
    # parameter gets memory just before its bucket is made, so with --zero 3 no rank ever holds all
    # of the model.
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    # Where no fast way is taken, as on a CPU, install() changes nothing, and the Comms that
    # comm_maker() provides are ddp.Comm or, for ZeRO-2 and 3, zero.SlotComm.
    try:
        with torch.device(device), parameters_without_memory():
            model = GPT(cfg, mesh, vocab_size, rank_layers(cfg, mesh.pp))
            choice.install(model)
    finally:
        torch.set_default_dtype(torch.float32)
    if device.type != "cpu":
        # In a 16-bit model the only fp32 matmul is the router's. In forward its operands were bf16
        # or fp16, which TF32 holds exactly. In backward TF32 rounds the gradient.
        is_16_bit = cfg.dtype in ("bf16", "fp16")
        torch.set_float32_matmul_precision("high" if is_16_bit else "highest")
    DataParallelClass = LEVELS[cfg.zero]
    data_parallel = DataParallelClass(model, mesh, cfg.zero, timers, dtype=dtype,
                                      make_comm=choice.comm_maker(cfg), optimizer=cfg.optimizer,
                                      split_masters=cfg.split_masters,
                                      draw=partial(initial_weights, model=model, seed=cfg.seed))
    return model, data_parallel, Optimizer(cfg, data_parallel)


class Step:
    """One optimizer step: gradients, statistics, veto, update.

    Each part is a method, because on a GPU make_step() usually wraps the step in a
    fast.graph.GraphedStep, which calls these methods in the first steps and then replays
    `gradients` as a CUDA graph. With --no-cuda-graph, as on a CPU, this class trains alone.
    """

    def __init__(self, cfg, model, data_parallel, opt):
        self.cfg = cfg
        self.model = model
        self.data_parallel = data_parallel
        self.opt = opt

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
        return self.update_unless_vetoed(stats, number, guard)

    def gradients(self, batches, number, set_seed=torch.manual_seed, n_trained=None):
        """Do forward, backward and gradient sums. Return this rank's part of the mean loss, ().

        The loss is in at least fp32. With dropout, set_seed is called before each forward.
        fast/graph.py passes another one while it captures a step.
        """
        cfg = self.cfg
        mesh = self.model.mesh
        if n_trained is None:
            n_trained = len(batches) * mesh.dp.size * cfg.micro_batch * cfg.seq_len
        seed_dropout = dropout_seeder(cfg, mesh, number, len(batches), set_seed)
        # There is no zero_grad: after reset(), the first gradient of each parameter overwrites.
        self.data_parallel.reset()
        if self.cfg.n_experts:
            moe.reset_stats(self.model)
        scale = self.opt.loss_scale  # It is None except in fp16.
        loss = forward_backward(self.model, self.data_parallel, batches, n_trained, scale,
                                seed_dropout)
        self.data_parallel.finish_grad_sync()  # waits for the sums of gradients
        return loss

    def path_shares(self):
        """Return {key of metrics.jsonl: a share of the steps since the last call}.

        The shares say how many steps went which of several ways. This class has one way; a
        GraphedStep has more.
        """
        return {}

    def update_unless_vetoed(self, stats, number, guard):
        """Return (stats, refused). A veto by the guard leaves weights and moments unchanged."""
        if guard is not None and guard.veto(stats):
            return stats, None
        return stats, self.update(stats, number)

    def update(self, stats, number):
        """Clip and update. Return not_finite, a () tensor.

        It is 1.0 where the gradient's norm was not finite. Then the device left weights and moments
        as they were. Otherwise it is 0.0.
        """
        not_finite = self.opt.step(learning_rate(self.cfg, number), stats.grad_norm)
        if self.cfg.n_experts:
            moe.update_router_bias(self.model, self.cfg.router_bias_rate, not_finite)
        return not_finite


def evaluation_batches(cfg, source, batch):
    """Return how many batches of `batch` sequences an evaluation has: eval_iters at most, and one
    at least. Of a source that is smaller than one batch, the first sequences count again."""
    return max(1, min(cfg.eval_iters, source.n_samples // batch))


def evaluate(cfg, model, source, batch, device):
    """Return the mean cross-entropy, in nats per trained token, of evaluation_batches() batches.

    batch: the number of sequences per batch. Collective.
    """
    mesh = model.mesh
    n_batches = evaluation_batches(cfg, source, batch)
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for i in range(n_batches):
        batches = micro_batches(cfg, mesh, source, i * batch, batch, device)
        # Every tp rank has the same sum; the stages before the last have 0.
        total += forward_only(model, batches) / mesh.tp.size
    mesh.world.all_reduce(total)  # SUM of one number, over the world
    model.train()
    return total.item() / source.n_targets(0, n_batches * batch)


# -----------------------------------------------------------------------------
# A run

class Run:
    """A run from its flags to its files. Every method runs on every rank; rank 0 logs.

    A new value becomes a field of one of the classes of runtime/parts.py: of Parts if it computes,
    of Oversight if it watches the run (such as a metric that waits for its row), of Ending if it
    says how the run ends.
    """

    def __init__(self, cfg, world, watchdog=watch.unwatched):
        """Set up the run. world: a runtime.launch.World, this process's place among all processes.

        Two Axes have all ranks: mesh.world is for the collectives of a step, whose bytes are
        counted, and world.axis for what a run sends besides.
        """
        self.cfg = cfg
        self.world = world
        self.out = Path(cfg.out or f"out/{cfg.preset}")
        self.ending = Ending()
        self.prepare(watchdog)
        self.start()

    @property
    def is_main(self):
        return self.world.rank == 0

    @property
    def full_batch(self):
        """The number of sequences in a step, after the ramp-up of the batch size."""
        return self.cfg.global_batch or self.cfg.micro_batch * self.parts.mesh.dp.size

    def prepare(self, watchdog):
        """Set up mesh, data and model. Wrong input on any rank prints one line and ends every rank
        with exit code 2."""
        cfg = self.cfg
        world = self.world
        stop = agree.Stop(cfg.max_minutes)  # Its clock also runs while data is verified.
        with launch.exit_together(world):
            with with_fix(cfg, world.size, again=partial(launch.same_command, world)):
                mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, n_experts=cfg.n_experts, cp=cfg.cp,
                                 shard=cfg.shard)
                self.parts = Parts(mesh)  # full_batch needs the mesh already.
                check_layout(cfg, mesh, self.full_batch)
            watchdog.set_mesh(mesh)
            # Wrong ranges, like all wrong flags, are refused before --out is touched.
            skip = Ranges(cfg.train_range_to_skip)
            agree.verify_data_first(world.tree, cfg.data)
            opened = open_data(cfg, world.local_rank)
            self.data = Data(*opened, tokenizer=prompt_tokenizer(cfg))
            check_memory(cfg, mesh, self.data.vocab_size, world)
            fp8.check_device(cfg, world.device)
        self.oversight = Oversight(watchdog, stop,
                                 timing.Timers(world.device, cfg.timers), skip)
        # At the end of its block, exit_together() ends all ranks if one of them has failed. So the
        # collectives of this second block never wait for a rank that failed in the first.
        with launch.exit_together(world):
            fingerprint = {"--data with the tokens": self.data.identity}
            agree.compare(world, fingerprint, "give all ranks the same data")
            choice = choose(cfg, mesh, world.device)
            model, data_parallel, opt = build(cfg, mesh, self.data.vocab_size, world.device,
                                              self.oversight.timers, choice)
            self.parts = Parts(mesh, choice, model, data_parallel, opt)
        debugger.attach_stdin(world, cfg.pdb)

    def start(self):
        """Resume from a checkpoint, or start with equal replicas; then make the step."""
        cfg = self.cfg
        world = self.world
        parts = self.parts
        oversight = self.oversight
        found = resume.prepare_out_dir(cfg, world, self.out)
        with launch.exit_together(world):
            self.state, oversight.skip = resume.start_from(
                found, oversight.skip, parts.model, parts.opt, self.data.identity)
        resume.settle(cfg, world, self.out, self.state, found)
        if world.size > 1:
            parts.opt.stop = oversight.stop
        self.first_step = self.state.step + 1
        run_id = resume.run_id(world.tree)
        self.saver = Saver(self.out, world.axis, cfg.keep, cfg.timeout, run_id)
        oversight.watchdog.set_folder(self.out, run_id)
        with launch.exit_together(world):
            if self.is_main:
                oversight.stop.watch_file(self.out)
                log.say_other_attention(found, parts.choice.attention_by())
                self.log_file = log.make_log(cfg, parts, world, self.out, self.state,
                                             self.data.train)
        if self.is_main:
            self.log_file.prepare_for_kill(oversight.watchdog)
            log.started(cfg, parts.model, found, self.full_batch, self.data.train, oversight.skip)
            log.say_what_has_no_effect(cfg, parts.mesh)
        with launch.exit_together(world):
            step = Step(cfg, parts.model, parts.data_parallel, parts.opt)
            parts.step = make_step(step, parts.choice, self.out)
        oversight.progress = Progress(cfg, self.is_main, self.first_step)
        oversight.clock = timing.Clock(world.device)
        oversight.guard = Guard(cfg, world, self.state)
        oversight.stragglers = watch.Stragglers(parts.mesh, world.device)
        if cfg.log_layers:
            oversight.layer_norms = LayerNorms(cfg, parts.data_parallel, parts.opt)
        for axis in parts.mesh.axes().values():
            axis.sent.clear()  # Bytes are counted from the first step on.

    def train(self):
        """Do all steps. Return the run's Outcome."""
        cfg = self.cfg
        state = self.state
        profiler = profiles.start_profile(cfg.profile and self.is_main)
        session.signals.can_save = True  # From here on a signal waits for the end of its step.
        n_steps = cfg.steps - state.step
        with profiles.tracer(cfg.trace and self.is_main, self.out, n_steps) as trace:
            while state.step < cfg.steps and self.ending.outcome is Outcome.DONE:
                begun = time.monotonic()
                number = state.step + 1
                self.begin_step(number)
                if cfg.pdb >= 0 and number == self.first_step:
                    debugger.break_on_rank(self.world, cfg.pdb)
                batch = batch_size(state.samples, self.full_batch, cfg.rampup_batch_size)
                # ---------------- training section begin
                batches = self.next_batches(number, batch)
                stats = self.take_step(batches, number)
                # ---------------- training section end
                self.end_step(number, batch)
                profiles.end_traced_step(trace, self.parts)
                self.log(number, batch, stats)
                self.check_replicas(number)
                self.poll_stop(number, seconds=time.monotonic() - begun)
                self.save(number)
        return self.leave(profiler)

    def begin_step(self, number):
        """Tell the watchdog and the guard that a step begins."""
        is_first = number == self.first_step
        self.oversight.watchdog.heartbeat(number, "first" if is_first else "")
        if is_first:
            self.oversight.progress.first_step_begins()
        self.oversight.guard.reason = None

    def next_batches(self, number, batch):
        """Return this rank's micro-batches. A skipped step consumes its micro-batches, too."""
        cfg = self.cfg
        self.oversight.stragglers.begin()
        with self.oversight.timers("data"):
            batches = micro_batches(cfg, self.parts.mesh, self.data.train, self.state.samples,
                                    batch, self.world.device)
        if number == cfg.inject_spike:
            return corrupt_targets(batches)
        return batches

    def take_step(self, batches, number):
        """Return optim.StepStats; None if --train-range-to-skip leaves this step out."""
        cfg = self.cfg
        parts = self.parts
        oversight = self.oversight
        if number in oversight.skip:
            self.state.skipped += 1
            return None
        if cfg.dump_grads and number == 1:
            parts.opt.before_update.append(self.dump_grads)
        count = len(batches) * cfg.micro_batch * parts.mesh.dp.size
        n_trained = trained_tokens(self.data.train, self.state.samples, count, self.world.device)
        full = self.is_logged(number)
        if cfg.log_layers and full:
            parts.opt.before_update.append(oversight.layer_norms.measure)
        stats, refused = parts.step(batches, number, full, oversight.guard, n_trained)
        parts.opt.before_update.clear()
        oversight.guard.refused_flags.append((number, refused))
        oversight.clock.count(count)
        if number == self.first_step:
            axes = parts.mesh.axes()
            oversight.sent = {name: sum(axis.sent.values()) for name, axis in axes.items()}
        return stats

    def dump_grads(self):
        """Write --dump-grads, between the gradient sums and the update."""
        parts = self.parts
        resume.dump_grads(self.cfg.dump_grads, self.world, parts.data_parallel, parts.opt,
                          self.data.vocab_size)

    def end_step(self, number, batch):
        """Count the step, whether it was done, skipped or refused."""
        guard = self.oversight.guard
        self.state.step = number
        self.state.samples += batch
        if number == self.first_step:
            self.oversight.progress.first_step_ends()
        # A row and a checkpoint need the number of refused steps. Reading that number synchronises.
        if self.is_logged(number) or self.due(number, self.cfg.save_every) or guard.sigma:
            guard.count_refused()
        if guard.given_up:
            self.ending.outcome = Outcome.GAVE_UP

    def due(self, number, every):
        """Whether a task of every `every` steps (0: never), and of the last step, is due."""
        return every > 0 and (number % every == 0 or number == self.cfg.steps)

    def is_logged(self, number):
        """Whether this step is logged."""
        if number == self.first_step:
            return True
        return self.due(number, self.cfg.log_every) or self.due(number, self.cfg.eval_every)

    def log(self, number, batch, stats):
        """Write a row of metrics.jsonl and print its line; evaluate and print a sample if due."""
        cfg = self.cfg
        oversight = self.oversight
        goes_on = self.ending.outcome is Outcome.DONE
        if goes_on and not self.is_logged(number) and not oversight.guard.reason:
            return
        row, slow_ranks = self.metrics(number, batch, stats)
        if self.is_main and number == self.first_step and stats is not None:
            parts = self.parts
            predicted = traffic(cfg, parts.mesh, self.data.vocab_size, batch, parts.choice)
            sent = log.report_traffic(predicted, self.oversight.sent, parts.mesh, self.world.nodes)
            if sent:
                self.log_file.note(number, traffic=sent)
            if cfg.compile:
                row["compile_s"] = log.report_compilation(row["ms"] / 1e3)
            row.update(session.start_seconds())
        evaluates = self.due(number, cfg.eval_every)
        if evaluates:
            oversight.watchdog.heartbeat(number, "evaluation")
            # While the batch grows, all evaluations read the same samples.
            n_batches = evaluation_batches(cfg, self.data.val, self.full_batch)
            oversight.progress.evaluation_begins(number, n_batches, row.get("ms"))
            val_loss = evaluate(cfg, self.parts.model, self.data.val, self.full_batch,
                                self.world.device)
            oversight.progress.evaluation_ends()
            row["val_loss"] = self.state.evaluated(val_loss)
        if self.is_main:
            self.log_file.row(**row, time=time.time(), left=oversight.progress.left(number))
            for line in slow_ranks:
                say(line)
        if evaluates:
            if self.data.tokenizer:
                text = log.print_sample(self.parts.model, self.data.tokenizer, cfg.prompt, cfg.seed)
                if self.is_main:
                    self.log_file.note(number, sample=text)
            # metrics() has counted the time of the steps up to its call. The time since then was
            # evaluation, so the clock starts again here without counting it.
            oversight.clock.resume()
        self.ending.skip_reason = row["skip_reason"]

    def metrics(self, number, batch, stats):
        """Return (a row of metrics.jsonl, lines about slow ranks). Collective: some values are
        maxima over the ranks.

        The times are means since the last row.
        """
        cfg = self.cfg
        parts = self.parts
        oversight = self.oversight
        lr = learning_rate(cfg, number)
        result = log.StepResult(batch, lr, stats, oversight.guard.reason)
        row, steps = log.metrics_row(cfg, self.world, self.state, result, oversight.clock,
                                     self.data.vocab_size)
        own_times, slow_ranks = oversight.stragglers.report()
        row.update(log.phase_times(oversight.timers, steps, parts.mesh), **own_times)
        row.update(parts.step.path_shares())
        if parts.opt.loss_scale is not None:
            row["loss_scale"] = parts.opt.loss_scale.item()
        if cfg.log_layers:
            row.update(oversight.layer_norms.report())
        if cfg.n_experts and stats is not None:
            # The statistics of every layer, on every rank.
            experts = moe.expert_stats(parts.model, batch // cfg.micro_batch)
            row.update(log.expert_metrics(experts))
            if self.is_main:
                self.log_file.experts(number, experts)
        return row, slow_ranks

    def check_replicas(self, number):
        """Compare the ranks that hold the same weights, every --check-every steps."""
        every = self.cfg.check_every
        if self.ending.outcome is not Outcome.DONE or every == 0 or number % every:
            return
        self.oversight.clock.pause()
        self.ending.differences = watch.replica_differences(self.parts.model, self.parts.mesh)
        if self.ending.differences:
            self.ending.outcome = Outcome.REPLICAS_DIFFER
        self.oversight.clock.resume()

    def poll_stop(self, number, seconds):
        """Stop after this step if any rank received a signal, the file OUT/stop has appeared, or
        --max-minutes have passed.

        seconds: the time that this step took. The last step needs no stop.
        """
        stop = self.oversight.stop
        stop.step_took(seconds)
        self.oversight.progress.step_took(number, seconds)
        if self.ending.outcome is not Outcome.DONE or number == self.cfg.steps:
            return
        self.ending.stop_reason = stop.poll(self.world)
        if self.ending.stop_reason:
            # A run that diverged must not be saved and requeued.
            diverged = self.oversight.guard.count_refused()
            self.ending.outcome = Outcome.GAVE_UP if diverged else Outcome.STOPPED

    def save(self, number):
        """Start to write a checkpoint if one is due or the run is being stopped. A failed run
        writes none."""
        outcome = self.ending.outcome
        due = self.due(number, self.cfg.save_every) or self.state.save_best(self.cfg)
        if outcome is not Outcome.STOPPED and not (due and outcome is Outcome.DONE):
            return
        parts = self.parts
        oversight = self.oversight
        oversight.clock.pause()
        oversight.watchdog.heartbeat(number, "save")
        begun = time.monotonic()
        resume.save(self.cfg, parts.mesh, parts.data_parallel, parts.opt, self.saver, self.state)
        oversight.stop.save_took(time.monotonic() - begun + self.saver.seconds)
        oversight.clock.resume()

    def leave(self, profiler):
        """Wait for the last save, write the plots and say how the run ended. Return its Outcome."""
        ending = self.ending
        self.oversight.watchdog.heartbeat(self.state.step, "end")
        if not self.saver.wait() and ending.outcome in (Outcome.DONE, Outcome.STOPPED):
            ending.outcome = Outcome.FAILED  # The last steps are lost, so no script may requeue it.
        if self.is_main:
            profiles.end_profile(profiler, self.out)
            self.log_file.close()
            draws_plot = self.cfg.plot and is_finished(ending)
            plot.at_end(self.out, self.log_file.last_experts, draws_plot)
            report_ending(self.cfg, ending, self.oversight.guard, self.state, self.log_file,
                          self.saver.saved)
        return ending.outcome


def main(argv=None, parsed=None):
    """Do a whole run. parsed: session.parse_flags() of argv, where it was done already."""
    with session.surround():
        cfg, wrong, timeout = parsed or session.parse_flags(plot.parse_or_list, argv)
        launch.deterministic(cfg is not None and cfg.deterministic)
        with watch.Watch(session.signals.rank, timeout) as watchdog:
            # Only the watchdog ends a run that hangs. A timeout of gloo or NCCL would keep counting
            # while the run is suspended.
            world = launch.launch(launch.NO_TIMEOUT, quiet=wrong is not None,
                                  joining=watchdog.joining, waits=True)
            watchdog.world = world
            try:
                agree.same_start(world, cfg, wrong)
                # No variable holds the run, because shutdown() needs all process groups to be free.
                outcome = Run(cfg, world, watchdog).train()
            except SystemExit as leaving:  # exit_together() has printed why.
                outcome = leaving.code
            except ChangedFile as error:
                outcome = launch.refuse_alone(world, error)
            launch.shutdown(world)
    if outcome:
        raise SystemExit(int(outcome))


if __name__ == "__main__":
    main(parsed=PARSED)
