"""Other trainers beside ours on the same GPUs: one table of thousand tokens per second and GPU.

    python bench/peers.py G2 W1 --nanogpt ../nanoGPT --torchtitan ../torchtitan --gpus 1 2
    python bench/peers.py G2 --tiny --nanogpt ../nanoGPT                     (a rehearsal on a CPU)

Each cell of the table is one trainer on one workload, in processes of its own (peer_cell.py): what fails or
takes memory there touches no other cell. Cells of one GPU run on several GPUs at a time, but all trainers of
a workload run on the same GPU, one after the other. Name no GPU twice: nothing else may run on them.

On a CPU, gloo lacks what two peers need on several ranks: torchtitan's FSDP2 and nanochat's optimizer fail.
A peer takes part if it is installed, or given by its path:

    nanogpt         karpathy/nanoGPT, commit 3adf61e
    nanochat        karpathy/nanochat, commit 92d63d4: its own model of the same products per token, and Muon
    hf, hf-bf16     transformers: bf16 by autocast on fp32 weights; pure bf16 without fp32 copies
    torchtitan      pytorch/torchtitan 0.2.2 with FSDP2 (torchtitan-ddp: DDP); later releases have other names
    picotron        huggingface/picotron, commit 59714b1: pure bf16; without flash_attn it calls torch's SDPA
"""
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from common import ROOT, read_flags, start

import torch
from peer_cell import FLASH_INTERFACE, NAMES, PEERS, is_installed
from speed import join_value
from tyro.conf import Positional

from runtime import visible
from runtime.launcher import bare_environment, started_by

TRAINERS = ("ours", *PEERS)
# The package of a peer that may be installed, or the file that its path must have.
PLACES = {"nanogpt": "model.py", "nanochat": "nanochat/gpt.py", "hf": "transformers/__init__.py",
          "torchtitan": "torchtitan/__init__.py", "picotron": "picotron/model.py"}
LAST_SECONDS = 20  # in which a cell ends after its row; then its processes are ended
GRACE_SECONDS = 10  # in which a process that is asked to end does so
PEER_LOST = r"nanoshard: rank \d+ lost a peer|ConnectionResetError|BrokenPipeError|torch.distributed.Dist\w+"
REHEARSAL = "a rehearsal with tiny models in fp32: its figures say nothing"
GOALS = {  # (workload, GPUs): the ratio to the best peer that we aim at
    ("G2", 1): 1.25, ("G2", 2): 1.27, ("G2", 4): 1.27, ("G2-32", 1): 1.25, ("G2-32", 2): 1.27,
    ("WP", 1): 1.2, ("WP", 2): 1.2, ("SC", 1): 2.0, ("W1", 1): 1.65, ("W1", 2): 1.5, ("W2b", 1): 1.4,
    ("W2b", 2): 1.6, ("W2b", 4): 1.7, ("W3", 1): 1.2, ("W3", 2): 1.28, ("W3-8192", 1): 1.18,
    ("W3-8192", 2): 1.25, ("W3-8192", 4): 1.25, ("7B", 2): 1.28, ("7B", 4): 1.28,
    ("BERT", 1): 1.2, ("BERT", 2): 1.55, ("BERT", 4): 1.55}


@dataclass(frozen=True)
class Flags:
    workloads: Positional[tuple[Literal[NAMES], ...]]  # of bench/speed.py
    trainers: tuple[Literal[TRAINERS], ...] = TRAINERS  # who takes part, where there is a model for it
    gpus: tuple[int, ...] = ()  # numbers of GPUs, each a row; default: all of this machine
    nanogpt: str = ""  # path of karpathy/nanoGPT
    nanochat: str = ""  # path of karpathy/nanochat
    hf: str = ""  # path of transformers, where it is not installed
    torchtitan: str = ""  # path of pytorch/torchtitan, where it is not installed
    picotron: str = ""  # path of huggingface/picotron, where it is not installed
    steps: int = 60  # of each cell; the last half counts, at most 30
    data: str = "synthetic"  # a folder of prepare.py for all trainers, or synthetic
    flags: str = ""  # more flags of train.py, for the shape of all trainers
    tiny: bool = False  # a rehearsal, also on a CPU: tiny models in fp32, nothing compiled
    cell_seconds: int = 300  # a cell that takes longer is ended
    limit: int = 0  # seconds for the whole table, after which cells are ended and left out; 0 is none
    markdown: bool = False  # print the table for a page
    json: str = ""  # file to which each cell is appended, one line each
    logs: str = ""  # folder that keeps what each cell printed

    RANGES = {"steps": (4, 10**6), "cell_seconds": (1, 10**6), "limit": (0, 10**6)}

    def check(self):
        refuse_launchers("peers.py")
        if not self.workloads:
            raise ValueError(f"name at least one workload of {', '.join(NAMES)}")
        if min(self.gpus, default=1) < 1:
            raise ValueError(f"--gpus {min(self.gpus)} is no number of GPUs; try --gpus 1")
        for peer, file in PLACES.items():
            path = getattr(self, peer)
            if path and not Path(path, file).is_file():
                raise ValueError(f"--{peer} {path} has no {file}; give the folder of its repository")
        device, shown = gpus_here(self.tiny)
        if device != "cpu" and max(self.gpus, default=1) > len(shown):
            raise ValueError(f"--gpus {max(self.gpus)} is more than the {len(shown)} of this machine")
        if self.json:
            Path(self.json).touch()
        if self.logs:
            Path(self.logs).mkdir(parents=True, exist_ok=True)


class Cell(NamedTuple):
    """One trainer on one workload and a number of GPUs."""
    workload: str
    gpus: int
    trainer: str


def absent(trainer, flags):
    """Return what is missing for a trainer, or ""."""
    peer = trainer.split("-")[0]
    if trainer == "ours" or getattr(flags, peer):
        return ""
    package, _, file = PLACES[peer].partition("/")
    if file and importlib.util.find_spec(package) is not None:
        return ""
    return f"not here: give --{peer} PATH"


def cells_of(flags, counts):
    """Return the groups of cells that run one after the other on the same GPUs: those of a table's row."""
    groups = []
    for gpus in counts:
        for workload in flags.workloads:
            groups.append([Cell(workload, gpus, trainer) for trainer in TRAINERS if trainer in flags.trainers
                           and (trainer == "ours" or workload in PEERS[trainer][1])])
    return groups


# -----------------------------------------------------------------------------
# One cell, in processes of its own

class Runner:
    """Starts cells, and ends those that take too long.

    device: torch's name of the accelerators, or cpu. shown: what visible.VARIABLE calls each GPU, in order.
    """

    def __init__(self, flags, device, shown):
        self.flags = flags
        self.device = device
        self.shown = shown
        self.ends = time.monotonic() + flags.limit if flags.limit else float("inf")
        self.cut = threading.Event()  # set when this program is asked to end
        self.rows = {}

    def environment(self, cell, gpus):
        """Return the environment of a cell. gpus: the numbers of the GPUs that it may use."""
        env = bare_environment()
        if self.device != "cpu":
            env[visible.VARIABLE] = ",".join(self.shown[i] for i in gpus)
        env.setdefault("OMP_NUM_THREADS", "1" if self.device == "cpu" else "8")
        if cell.trainer == "picotron":  # its train.py sets these, except for the rank, which torchrun sets
            uses_flash = self.device != "cpu" and is_installed(FLASH_INTERFACE)
            env |= {"DEVICE": self.device, "FLASH_ATTEN": "1" if uses_flash else "0",
                    "DTYPE": "float32" if self.flags.tiny else "bfloat16"}
            if cell.gpus == 1:
                env["LOCAL_RANK"] = "0"
        return env

    def command(self, cell, file):
        flags = self.flags
        ranks = []
        if cell.gpus > 1:
            ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cell.gpus)]
        words = [sys.executable, *ranks, str(ROOT / "bench/peer_cell.py"), cell.workload, cell.trainer,
                 "--steps", str(flags.steps), "--data", flags.data, f"--flags={flags.flags}", "--json", file]
        if flags.tiny:
            words.append("--tiny")
        path = getattr(flags, cell.trainer.split("-")[0], "")
        return [*words, "--path", path] if path else words

    def run(self, cell, gpus):
        """Run a cell, say how it went, and keep its row."""
        if problem := absent(cell.trainer, self.flags):
            row = {"why": problem}
        elif self.cut.is_set():
            row = {"why": "left out: this program was asked to end"}
        elif self.ends <= time.monotonic():
            row = {"why": f"left out: --limit {self.flags.limit} is over"}
        else:
            row = self.measured(cell, gpus)
        row = {**cell._asdict(), **row}
        self.rows[cell] = row
        print(line_of(row), flush=True)
        if self.flags.json:
            with open(self.flags.json, "a") as f:
                f.write(json.dumps(row) + "\n")

    def measured(self, cell, gpus):
        """Return the row of a cell that ran, or why it has none."""
        with tempfile.TemporaryDirectory() as folder:
            file, log = Path(folder, "row.json"), Path(folder, "log")
            if self.flags.logs:
                log = Path(self.flags.logs, f"{cell.workload}-{cell.gpus}-{cell.trainer}.log")
            seconds = min(self.flags.cell_seconds, self.ends - time.monotonic())
            with log.open("w") as out:
                in_time = finish(self.command(cell, str(file)), self.environment(cell, gpus), out, seconds,
                                 row=file, cut=self.cut)
            return result_of(file, log, in_time, seconds, self.cut)


def result_of(file, log, in_time, seconds, cut):
    """Return the row that a cell wrote to `file`, or {"why"} it wrote none. in_time, cut: see finish()."""
    if file.exists() and file.stat().st_size:
        return json.loads(file.read_text())
    if cut.is_set():
        return {"why": "ended: this program was asked to end"}
    if not in_time:
        return {"why": f"ended after {seconds:.0f} s; see --cell-seconds and --limit"}
    return {"why": f"failed: {reason(log.read_text(errors='replace'))}"}


def finish(command, env, out, seconds, *, row, cut):
    """Run a command. Return False if it was ended: it took longer than `seconds`, or `cut` was set.

    row: the file that the command writes before it ends. A command that does not end soon after its row, such
    as one whose ranks wait for each other, keeps the GPUs from the next cell no longer than LAST_SECONDS.
    """
    job = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    ends = time.monotonic() + seconds
    is_written = False
    try:
        while job.poll() is None and time.monotonic() < ends and not cut.is_set():
            if not is_written and row.exists() and row.stat().st_size:
                is_written = True
                ends = min(ends, time.monotonic() + LAST_SECONDS)
            time.sleep(0.05)
        return job.poll() is not None
    finally:
        end_tree(job)


def end_tree(job):
    """End a process and all that it has started, whose memory on the GPUs the next cell needs.

    torchrun ends its ranks when it is asked to end. A rank that stays, because it is stuck in its driver or
    because torchrun itself was killed, is found by the numbers of the processes' parents.
    """
    started = descendants(job.pid)
    if job.poll() is None:
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(GRACE_SECONDS)
        job.kill()
        job.wait()
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid):
    """Return the numbers of the processes that a process has started, and those have started. Linux only."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


@contextlib.contextmanager
def set_by_signals(cut):
    """Within this context SIGTERM and Control-C set the Event `cut`: cells end, and the table is printed."""
    def on_signal(number, frame):
        cut.set()

    before = [(number, signal.signal(number, on_signal)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def reason(text):
    """Return the line of a failed cell's output that says why.

    The ranks that lose the failed rank print errors as well, which say nothing of the cause.
    """
    text = re.sub(r"(?m)^\[rank\d+\]: ?", "", text)
    errors = re.findall(r"(?m)^(?:nanoshard: .*|[\w.]*(?:Error|Exception)\b.*)", text)
    errors = [line for line in errors if "ChildFailedError" not in line]
    causes = [line for line in errors if not re.match(PEER_LOST, line)]
    lines = causes or errors or text.strip().splitlines() or ["no output"]
    return lines[-1].strip()[:200]


# -----------------------------------------------------------------------------
# The table

def line_of(row):
    """Return one cell in words."""
    head = f"{row['workload']}, {row['gpus']} GPU{'s' if row['gpus'] > 1 else ''}, {row['trainer']}: "
    if "why" in row:
        return head + row["why"]
    first, last = row["loss"]
    beside = "".join(f", {n:,} of them {words}" for words, n in row["beside_ours"].items())
    return (f"{head}{row['ms']:.2f} ms, {row['tok_s_gpu'] / 1e3:.1f} k tokens/s per GPU, "
            f"{row['reserved_gib']:.1f} GiB, loss {first:.3f} -> {last:.3f}, {row['parameters']:,} parameters"
            f"{beside}, first step after {row['first_step_s']:.0f} s")


def table(rows, flags, counts):
    """Return the lines of the table. rows: {Cell: row}."""
    groups = cells_of(flags, counts)
    used = {cell.trainer for group in groups for cell in group}
    names = [name for name in TRAINERS if name in used]
    lines = [["workload", "GPUs", *names, "ratio", "goal"]]
    for group in groups:
        row = {cell.trainer: rows[cell] for cell in group}
        rates = {name: found["tok_s_gpu"] for name, found in row.items() if "why" not in found}
        cells = []
        for name in names:
            cells.append(f"{rates[name] / 1e3:.1f} ({row[name]['ms']:.2f})" if name in rates else "-")
        ours = rates.pop("ours", None)
        ratio = f"{ours / max(rates.values()):.2f}" if ours and rates else "-"
        workload, gpus, _ = group[0]
        lines.append([workload, str(gpus), *cells, ratio, str(GOALS.get((workload, gpus), "-"))])
    return lines


def laid_out(lines, markdown):
    """Return the text of a table, as markdown or in columns."""
    if markdown:
        lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
                     for line in lines)


# -----------------------------------------------------------------------------

def refuse_launchers(prog):
    """ValueError: a launcher started this process, which starts the ranks of its cells itself."""
    launcher, _ = started_by()
    if launcher != "single":
        raise ValueError(f"{prog} starts its ranks itself: python bench/{prog} ..., without {launcher}")


def gpus_here(tiny):
    """Return (torch's name of the accelerators, what visible.VARIABLE calls each of them).

    ValueError: there is none, and no rehearsal is asked for.
    """
    if not torch.accelerator.is_available():
        if not tiny:
            raise ValueError("there is no GPU here; --tiny rehearses with tiny models on a CPU")
        return "cpu", []
    device = torch.accelerator.current_accelerator()
    shown = [entry for entry in bare_environment().get(visible.VARIABLE, "").split(",") if entry]
    return device.type, shown or [str(i) for i in range(torch.accelerator.device_count())]


def run_all(runner, groups):
    """Run the groups of one GPU side by side on all GPUs, and then those of several GPUs alone."""
    free = queue.SimpleQueue()
    lanes = max(1, len(runner.shown))
    for i in range(lanes):
        free.put(i)

    def on_one_gpu(group):
        gpu = free.get()
        try:
            for cell in group:
                runner.run(cell, [gpu])
        finally:
            free.put(gpu)

    with concurrent.futures.ThreadPoolExecutor(lanes) as pool:
        single = [group for group in groups if group and group[0].gpus == 1]
        for done in [pool.submit(on_one_gpu, group) for group in single]:
            done.result()
    for group in groups:
        for cell in group:
            if cell.gpus > 1:
                runner.run(cell, range(cell.gpus))


def main(argv=None):
    argv = join_value(sys.argv[1:] if argv is None else argv, "--flags")
    flags = read_flags(Flags, argv, "peers.py WORKLOAD...", "Time ours and other trainers on the same "
                       "GPUs, each in processes of its own: one table.")
    device, shown = gpus_here(flags.tiny)
    counts = flags.gpus or (max(1, len(shown)),)
    runner = Runner(flags, device, shown)
    with set_by_signals(runner.cut):
        run_all(runner, cells_of(flags, counts))
    print("\nthousand tokens/s per GPU (ms per step); ratio: ours / the best peer of this table")
    if flags.tiny:
        print(REHEARSAL)
    print(laid_out(table(runner.rows, flags, counts), flags.markdown))
    return 1 if runner.cut.is_set() else 0


if __name__ == "__main__":
    start(main)
