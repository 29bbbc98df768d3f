"""Where a run's time goes, and a look into it: --profile and --trace, which write into OUT, and --pdb."""
import os
import pdb
import platform
import sys
import tempfile
from collections import Counter
from pathlib import Path

from interface.files import best_effort, write_whole
from interface.terminal import say

ROOT = Path(__file__).resolve().parent.parent


def start_profile(on):
    if not on:
        return None
    with best_effort("a profile needs pyinstrument (pip install pyinstrument)", ImportError):
        from pyinstrument import Profiler
        profiler = Profiler()
        profiler.start()
        return profiler


def end_profile(profiler, out):
    """Write what start_profile() began, OUT/profile.html and profile.txt, and print its ten hottest lines: of
    our code, each without our own functions that it calls."""
    if profiler is None:
        return
    profiler.stop()
    with best_effort(out / "profile.html"):
        write_whole(out / "profile.html", profiler.output_html())
        write_whole(out / "profile.txt", profiler.output_text(unicode=False, color=False))
    say("the hottest lines, each with what it calls in libraries:")
    took = Counter()
    # pyinstrument has a frame as NAME, FILE, LINE of "def", then its attributes, such as l54 for line 54
    for frames, seconds in profiler.last_session.frame_records:
        ours = [frame for frame in frames if f"\0{ROOT}/" in frame and "site-packages" not in frame]
        if ours:
            took[ours[-1]] += seconds
    for frame, seconds in took.most_common(10):
        what, *attributes = frame.split("\1")
        name, file, defined = what.split("\0")
        at = next((text[1:] for text in attributes if text.startswith("l")), defined)
        say(f"  {seconds:8.2f} s  {Path(file).relative_to(ROOT)}:{at} {name}")


def traced(run):
    """For --trace: return the step of a train.Run inside torch's profiler, which writes OUT/trace.json.

    It records three steps, after one of rest and one of warm-up. stop() ends a shorter record.
    """
    from torch.profiler import profile, schedule

    from fast.graph import DeferredGather
    step = run.step

    def write(profiler):
        with best_effort(run.out / "trace.json"):
            profiler.export_chrome_trace(str(run.out / "trace.json"))
            say(f"trace: {run.out}/trace.json; open it in https://ui.perfetto.dev")

    def traced_step(*args):
        result = step(*args)
        # The handle of a gather that outlives torch's profiler may end the process. A gather that the next
        # graph starts has none, and the other ranks would take no part in it here.
        for bucket in run.data_parallel.buckets_of[run.model]:
            if not isinstance(bucket.gather_handle, DeferredGather):
                bucket.wait_weights()
        profiler.step()
        return result

    profiler = profile(schedule=schedule(wait=1, warmup=1, active=3, repeat=1), on_trace_ready=write)
    profiler.start()
    traced_step.stop = profiler.stop  # the interpreter must not end before
    return traced_step


# --pdb. Launchers give the terminal to no rank or to the wrong one, so the rank waits at two pipes.

def attach_pdb(world, rank):
    """Let breakpoint() stop one rank in pdb, and do nothing on the others. One of several ranks waits here
    until a terminal opens two pipes, which only this user can reach."""
    if world.rank != rank:
        sys.breakpointhook = lambda *args, **how: None
        return
    say(f"nanoshard: rank {rank} of {world.size} stops in pdb, the others wait")
    if world.size == 1:
        return
    with tempfile.TemporaryDirectory(prefix="nanoshard-pdb-") as folder:  # of mode 0700
        os.mkfifo(f"{folder}/out")
        os.mkfifo(f"{folder}/in")
        say(f"nanoshard: in another terminal of {platform.node()} type: cat {folder}/out & cat > {folder}/in")
        printed = open(f"{folder}/out", "w")
        typed = open(f"{folder}/in")
    debugger = pdb.Pdb(stdin=typed, stdout=printed, nosigint=True)  # Ctrl-C stays the run's
    sys.breakpointhook = lambda *args, **how: debugger.set_trace(sys._getframe(1))
