"""Where a run's time goes: --profile and --trace, which write files into OUT."""
import errno

from fast.graph import DeferredGather
from interface.files import best_effort, new_part, write_whole
from interface.terminal import say


def start_profile(on):
    """For --profile: return a running pyinstrument profiler, or None."""
    if not on:
        return None
    with best_effort("--profile needs pyinstrument (pip install pyinstrument)", ImportError):
        from pyinstrument import Profiler
        profiler = Profiler()
        profiler.start()
        return profiler


def end_profile(profiler, out):
    """Write what start_profile() began: OUT/profile.html and profile.txt."""
    if profiler is None:
        return
    profiler.stop()
    with best_effort(out / "profile.html"):
        write_whole(out / "profile.html", profiler.output_html())
        write_whole(out / "profile.txt", profiler.output_text(unicode=False, color=False))


def traced(run):
    """For --trace: return the step of a train.Run inside torch's profiler, which writes OUT/trace.json.

    It records three steps, after one of rest and one of warm-up. With less than three there is nothing to
    trace, which a line says.

    A handle of gloo that outlives the profiler ends some processes in a fault when it is freed (seen
    with torch 2.13). So whatever a step still sends is waited for: ZeRO's new weights. A gather that
    the next step starts must not start here, where the other ranks do not take part.
    """
    step = run.step
    n_steps = run.cfg.steps - run.state.step
    profiler = tracer(run.out, n_steps)
    if profiler is None:
        return step

    def traced_step(*args):
        result = step(*args)
        wait_for_all_weights(run.model, run.data_parallel)
        profiler.step()
        return result

    profiler.start()
    return traced_step


def tracer(out, n_steps):
    """Return torch's profiler over steps 3 to 5 of n_steps, or None. Its step() is called after each step."""
    if n_steps < 3:
        say(f"--trace records the third step and two more, and this run takes {n_steps}: there is no trace")
        return None
    from torch.profiler import profile, schedule

    def write(profiler):
        with best_effort(out / "trace.json"):
            with new_part(out / "trace.json") as part:
                export_trace(profiler, part)
            say(f"trace: {out}/trace.json; open it in https://ui.perfetto.dev")

    # Without repeat=1, the profiler would trace three steps again and again.
    steps = schedule(wait=1, warmup=1, active=min(3, n_steps - 2), repeat=1)
    return profile(schedule=steps, on_trace_ready=write)


def wait_for_all_weights(model, data_parallel):
    """Wait for the gathers of weights that are under way."""
    for bucket in data_parallel.buckets_of[model]:
        if not isinstance(bucket.gather_handle, DeferredGather):
            bucket.wait_weights()


def export_trace(profiler, path):
    """Write the trace of torch's profiler. OSError: it is not whole; torch itself only prints that."""
    text = path.with_name(f"{path.name}.tmp")  # torch writes here, and renames it also where that fails
    try:
        profiler.export_chrome_trace(str(path))
        if text.exists() or not path.stat().st_size:
            raise OSError(errno.EIO, "torch's profiler could not write it")
    finally:
        text.unlink(missing_ok=True)
