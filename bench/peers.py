"""Other trainers beside ours on the same GPUs: one table of thousand tokens per second and GPU.

    python bench/peers.py G2 W1 --nanogpt ../nanoGPT --torchtitan ../torchtitan --gpus 1 2

Each cell of the table is one trainer on one workload, in processes of its own (peer_cell.py): what fails or
takes memory there touches no other cell. One cell runs after the other. A peer takes part if it is installed,
or given by its path:

    nanogpt         karpathy/nanoGPT, commit 3adf61e
    hf, hf-bf16     transformers: bf16 by autocast on fp32 weights; pure bf16 without fp32 copies
    torchtitan      pytorch/torchtitan 0.2.2 with FSDP2 (torchtitan-ddp: DDP); later releases have other names
"""
import contextlib
import importlib.util
import json
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from common import ROOT, bare_environment, read_flags, start
from runtime.launch import started_by

import torch
from peer_cell import NAMES, PEERS
from speed import join_value
from tyro.conf import Positional

TRAINERS = ("ours", *PEERS)
# The package of a peer that may be installed, or the file that its path must have.
PLACES = {"nanogpt": "model.py", "hf": "transformers/__init__.py", "torchtitan": "torchtitan/__init__.py"}
GRACE_SECONDS = 10  # in which a cell that is asked to end does so


@dataclass(frozen=True)
class Flags:
    workloads: Positional[tuple[Literal[NAMES], ...]]  # of bench/speed.py
    trainers: tuple[Literal[TRAINERS], ...] = TRAINERS  # who takes part, where there is a model for it
    gpus: tuple[int, ...] = ()  # numbers of GPUs, each a row; default: all of this machine
    nanogpt: str = ""  # path of karpathy/nanoGPT
    hf: str = ""  # path of transformers, where it is not installed
    torchtitan: str = ""  # path of pytorch/torchtitan, where it is not installed
    steps: int = 60  # of each cell; the last half counts, at most 30
    data: str = "synthetic"  # a folder of prepare.py for all trainers, or synthetic
    flags: str = ""  # more flags of train.py, for the shape of all trainers
    cell_seconds: int = 300  # a cell that takes longer is ended
    json: str = ""  # file to which each cell is appended, one line each
    logs: str = ""  # folder that keeps what each cell printed

    RANGES = {"steps": (4, 10**6), "cell_seconds": (1, 10**6)}

    def check(self):
        launcher = started_by().launcher
        if launcher != "single":
            raise ValueError("peers.py starts its ranks itself: python bench/peers.py ..., without "
                             f"{launcher}")
        if not self.workloads:
            raise ValueError(f"name at least one workload of {', '.join(NAMES)}")
        if min(self.gpus, default=1) < 1:
            raise ValueError(f"--gpus {min(self.gpus)} is no number of GPUs; try --gpus 1")
        for peer, file in PLACES.items():
            path = getattr(self, peer)
            if path and not Path(path, file).is_file():
                raise ValueError(f"--{peer} {path} has no {file}; give the folder of its repository")
        here = gpus_here()
        if max(self.gpus, default=1) > here:
            raise ValueError(f"--gpus {max(self.gpus, default=1)} is more than the {here} of this machine")
        if self.json:
            Path(self.json).touch()
        if self.logs:
            Path(self.logs).mkdir(parents=True, exist_ok=True)


class Cell(NamedTuple):
    """One trainer on one workload and a number of GPUs."""
    workload: str
    gpus: int
    trainer: str


def gpus_here():
    return torch.accelerator.device_count()


def absent(trainer, flags):
    """Return what is missing for a trainer, or ""."""
    peer = trainer.split("-")[0]
    package, _, file = PLACES.get(peer, "").partition("/")
    is_installed = file and importlib.util.find_spec(package) is not None
    if trainer == "ours" or getattr(flags, peer) or is_installed:
        return ""
    return f"not here: give --{peer} PATH"


def rows_of(flags, counts):
    """Return the cells of each row of the table."""
    rows = []
    for gpus in counts:
        for workload in flags.workloads:
            rows.append([Cell(workload, gpus, trainer) for trainer in TRAINERS if trainer in flags.trainers
                         and (trainer == "ours" or workload in PEERS[trainer][1])])
    return rows


# -----------------------------------------------------------------------------
# One cell, in processes of its own

def command(cell, flags, file):
    ranks = []
    if cell.gpus > 1:
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cell.gpus)]
    words = [sys.executable, *ranks, str(ROOT / "bench/peer_cell.py"), cell.workload, cell.trainer,
             "--steps", str(flags.steps), "--data", flags.data, f"--flags={flags.flags}", "--json", str(file)]
    path = getattr(flags, cell.trainer.split("-")[0], "")
    return [*words, "--path", path] if path else words


def measured(cell, flags):
    """Run a cell. Return its row, or {"why"} it has none."""
    if problem := absent(cell.trainer, flags):
        return {"why": problem}
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "row.json"), Path(folder, "log")
        if flags.logs:
            log = Path(flags.logs, f"{cell.workload}-{cell.gpus}-{cell.trainer}.log")
        with log.open("w") as out:
            in_time = finish(command(cell, flags, file), out, flags.cell_seconds)
        if file.exists() and file.stat().st_size:
            return json.loads(file.read_text())
        if not in_time:
            return {"why": f"ended after {flags.cell_seconds} s; see --cell-seconds"}
        return {"why": f"failed: {reason(log.read_text(errors='replace'))}"}


def finish(command, out, seconds):
    """Run a command. Return False if it took longer than `seconds` and was ended: torchrun ends its ranks."""
    env = {"OMP_NUM_THREADS": "8", **bare_environment()}
    job = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        job.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(GRACE_SECONDS)
        job.kill()


def reason(text):
    """Return the line of a failed cell's output that says why: its first error, before those that follow."""
    errors = re.findall(r"(?m)^(?:\[rank\d+\]: ?)?(nanoshard: .*|[\w.]*(?:Error|Exception)\b.*)", text)
    lines = errors or text.strip().splitlines()[-1:] or ["no output"]
    return lines[0].strip()[:200]


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


def table(found):
    """Return the table as markdown. found: [the rows that belong to one workload and number of GPUs]."""
    used = {row["trainer"] for rows in found for row in rows}
    names = [name for name in TRAINERS if name in used]
    lines = [["workload", "GPUs", *names, "ratio"], ["---"] * (len(names) + 3)]
    for rows in found:
        ran = {row["trainer"]: row for row in rows if "why" not in row}
        cells = []
        for name in names:
            row = ran.get(name)
            cells.append(f"{row['tok_s_gpu'] / 1e3:.1f} ({row['ms']:.2f})" if row else "-")
        rates = {name: row["tok_s_gpu"] for name, row in ran.items()}
        ours = rates.pop("ours", None)
        ratio = f"{ours / max(rates.values()):.2f}" if ours and rates else "-"
        lines.append([rows[0]["workload"], str(rows[0]["gpus"]), *cells, ratio])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# -----------------------------------------------------------------------------

def main(argv=None):
    argv = join_value(sys.argv[1:] if argv is None else argv, "--flags")
    flags = read_flags(Flags, argv, "peers.py WORKLOAD...", "Time ours and other trainers on the same "
                       "GPUs, each in processes of its own: one table.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cell is ended, as by Control-C
    found = []
    for cells in rows_of(flags, flags.gpus or (gpus_here(),)):
        rows = []
        for cell in cells:
            row = {**cell._asdict(), **measured(cell, flags)}
            print(line_of(row), flush=True)
            rows.append(row)
            if flags.json:
                with open(flags.json, "a") as f:
                    f.write(json.dumps(row) + "\n")
        found.append(rows)
    print("\nthousand tokens/s per GPU (ms per step); ratio: ours / the best peer of this table\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    start(main)
