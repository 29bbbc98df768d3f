"""What a rank writes when its run hangs, and the process beside it. The watchdog is in watch.py."""
import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from runtime.guardian import is_stopped


class HangFiles:
    """What this rank writes when the run hangs: to stderr, or to OUT/hang/ as soon as that is known.

    stacks is the file into which Python writes stacks. For OUT/hang/ it is a file without a name on the
    node's own disk: guardian.py appends what comes into it to a file of OUT/hang/ that all ranks of the node
    share.
    """

    def __init__(self, rank):
        self.rank = rank
        self.node = 0
        self.run_id = ""
        self.folder = None
        self.stacks = sys.__stderr__
        self.private = tempfile.TemporaryFile("a", prefix="nanoshard-stacks-")

    def open(self, folder, run_id, node):
        """From now on, write for `folder`, which is not made before there is something to write."""
        self.folder = folder
        self.run_id = run_id
        self.node = node
        self.stacks = self.private

    def path(self, suffix):
        """Return the path of a file of this node."""
        return self.folder / f"node_{self.node:05d}.{self.run_id}{suffix}"

    def close(self):
        self.private.close()

    def write(self, report, text):
        """Write the report in words (text), the stacks, the report, and torch's record of its collectives."""
        self.stacks.write(f"rank {self.rank}: {text}\n")
        self.stacks.flush()
        faulthandler.dump_traceback(self.stacks, all_threads=True)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            line = json.dumps({"rank": self.rank, **report}) + "\n"
            file = os.open(self.path(".jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.write(file, line.encode())  # in one piece: other ranks of this node write there as well
            os.close(file)
            self._write_flight_recorder()

    def _write_flight_recorder(self):
        """Write torch's own record of its collectives. NCCL's says which are complete on the device."""
        from torch._C import _distributed_c10d as c10d
        for kind in ("fr", "nccl"):
            dump = getattr(c10d, f"_dump_{kind}_trace_json", None)
            with contextlib.suppress(Exception):  # not public: a version of torch may lack or change it
                text = dump(includeCollectives=True, onlyActive=False)
                data = text.encode() if isinstance(text, str) else text
                name = f"rank_{self.rank:05d}.{self.run_id}.{kind}_trace"
                (self.folder / name).write_bytes(data)

    def read_node(self):
        """Return {rank: report} of the ranks of this node that have written one."""
        return {} if self.folder is None else read_reports([self.path(".jsonl")])

    def read_all(self):
        """Return {rank: report} of all ranks that have written one."""
        return {} if self.folder is None else read_reports(self.folder.glob(f"node_*.{self.run_id}.jsonl"))


def read_reports(paths):
    """Return {rank: report} from some files of reports; what cannot be read is left out."""
    reports = {}
    for path in paths:
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError, KeyError):
                    report = json.loads(line)
                    reports[report.pop("rank")] = report
    return reports


MOST_BYTES = 4000  # of a line: a pipe takes so many as one piece


class Guardian:
    """The process that kills this one when its own threads cannot, and collects its stacks: guardian.py.

    The process is started before MPI and has a session of its own, so that no Ctrl-C reaches it. Beside rank
    0 it has our stderr, for the line that says how a run that was killed goes on. It has no other stream of
    ours.
    """

    def __init__(self, tick, stacks, rank):
        script = Path(__file__).with_name("guardian.py")
        words = [os.getpid(), tick, stacks.fileno(), rank]
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-E", script, *map(str, words)], bufsize=0, pass_fds=[stacks.fileno()],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=None if rank == 0 else subprocess.DEVNULL, start_new_session=True)
        os.set_blocking(self.process.stdin.fileno(), False)  # the process may be stopped

    def allow(self, seconds):
        """Let this process stay silent for that long from now on."""
        self._tell(f"{seconds}")

    def collect_into(self, path):
        """Append what comes into the file of stacks to this one."""
        self._tell(f"> {json.dumps(str(path.absolute()))}")

    def if_killed(self, out, again, anew):
        """Tell which command goes on if this process ends without close(): `again` from a checkpoint in OUT,
        and `anew` where there is none."""
        said = json.dumps([str(Path(out).absolute()), str(out), again, anew])
        if len(said) < MOST_BYTES:
            self._tell(f"! {said}")

    def bye(self):
        """Tell that this process ends by itself, has said how, and that nothing more is to be said."""
        self._tell("bye")

    def left(self):
        """Tell that this process leaves at once and has said why. The command that goes on is still news."""
        self._tell("left")

    def _tell(self, line):
        with contextlib.suppress(OSError):  # somebody has killed the guardian
            self.process.stdin.write(f"{line}\n".encode())

    def close(self):
        """End the guardian: this process ends by itself, and has said how."""
        self.bye()
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # At the end of its input it ends, unless somebody has stopped it
            self.process.wait(0 if is_stopped(self.process.pid) else 10)
        self.process.kill()
        self.process.wait()
