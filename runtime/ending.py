"""How a run ends, in words: rank 0 writes the report, and prints what happened and what can be typed next."""

import checkpoint
from config import Outcome
from interface import report
from interface.files import best_effort
from interface.terminal import complain, say
from runtime.session import signals
from skip import give_up_message


def report_ending(run):
    """Write the report, and print how a train.Run ended and what can be typed next, on rank 0."""
    out = run.out
    state = run.state
    outcome = run.outcome
    how = {Outcome.DONE: "done", Outcome.STOPPED: f"stopped by {run.stop_reason}",
           Outcome.FAILED: "lost its last save"}.get(outcome, "gave up")
    how = f"{how} after step {state.step}"
    saved = checkpoint.steps(out)
    if outcome is Outcome.GAVE_UP:
        why = run.guard.reason or run.log_file.last_row.get("skip_reason")
        complain(give_up_message(saved, *run.guard.refused_range, why, run.cfg.steps))
    if outcome is Outcome.REPLICAS_DIFFER:
        newest = f"the newest checkpoint is {saved[0]}" if saved else "no checkpoint was saved"
        complain(f"nanoshard: replicas differ after step {state.step}; {newest}")
        for line in run.differences:
            complain(line)
    if run.cfg.report:
        with best_effort(out / "report.html", Exception):
            report.write_report(out / "report.html", [report.Run(out, how)])

    say(f"{how}: {out}/ holds {saved[0].name if saved else 'no checkpoint'}")
    if "val_loss" in state.best and (out / state.best_name()).is_dir():
        say(f"lowest validation loss {state.best['val_loss']:.4f} in {state.best_name()}")
    config = run.log_file.begun["config"]
    if outcome is Outcome.STOPPED and signals.parsed:  # a notebook has no command line
        say(f"to go on, type: {report.command_of(config, goes_on=True)}")
    if outcome is Outcome.DONE and signals.parsed:
        text = report.sample_command(out, config)
        if text and run.saver.saved:
            say(f"try it:       {text}")
        say(f"draw curves:  python plot.py {out}")
        if (out / "report.html").exists():
            say(f"see it all:   {out}/report.html, in a browser")
