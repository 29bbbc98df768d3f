"""--wandb: the logged rows, sent to Weights & Biases by a thread, so that no rank waits for a network."""
import queue
import threading
import time

from interface.files import warn
from interface.terminal import say

PATIENCE = 10  # seconds from the start until the server must have answered
LEAST_PATIENCE = 5  # seconds that wandb may look for its server, however long its start took
LEAVING = 20.0  # seconds that the end of a run waits for the last rows to be sent


class Tracker:
    """A run of wandb. start(), add() and close() return at once, but that close() waits for LEAVING seconds.

    If the server is not reached, the run is recorded in OUT/wandb/, and close() prints the command that
    sends it later. If wandb fails otherwise, one line says why, and the run goes on without it.
    """

    def __init__(self, mode, out, config):
        self.mode = mode
        self.out = out
        self.config = config
        self.rows = queue.SimpleQueue()  # rows, then None
        self.folder = None  # of the recorded run that is still to be sent
        self.thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self.thread.start()

    def add(self, row):
        """Send a row of metrics.jsonl, some time."""
        self.rows.put(row)

    def close(self):
        """Send what is left. Say how to send what could not be sent."""
        self.rows.put(None)
        self.thread.join(LEAVING)
        if self.thread.is_alive():
            warn(f"wandb: the last rows were not sent within {LEAVING:.0f} s; they stand in metrics.jsonl")
        if self.folder is not None:
            say(f"wandb: this run was recorded offline; to send it: wandb sync {self.folder}")

    def _work(self):
        try:
            self._send_rows(self._start())
        except ImportError as e:
            if e.name != "wandb":
                self._give_up(e)
            else:
                warn("wandb is not installed: pip install wandb, or give --wandb off; going on without it")
        except Exception as e:  # an outage of wandb must not stop a run
            self._give_up(e)

    def _give_up(self, e):
        warn(f"wandb: {str(e).rstrip('.')}; going on without it")

    def _start(self):
        """Return the run of wandb, recorded offline if the server is not reached."""
        began = time.monotonic()
        import wandb
        # Without silent, init() asks a terminal for a missing key, and waits.
        wandb.setup(wandb.Settings(silent=True))
        is_ready_after = time.monotonic() - began  # 2 s, and 7 s beside other work
        patience = max(PATIENCE - is_ready_after, LEAST_PATIENCE)

        def init(mode):
            settings = wandb.Settings(init_timeout=patience)
            run = wandb.init(project="nanoshard", name=self.out.resolve().name, dir=self.out,
                             config=self.config, mode=mode, settings=settings)
            if mode == "offline":
                self.folder = run.settings.sync_dir
            return run

        try:
            return init(self.mode)
        except wandb.errors.CommError as e:
            why = str(e).splitlines()[0]
            warn(f"wandb: no answer within {patience:.0f} s, so this run is recorded offline ({why})")
            return init("offline")

    def _send_rows(self, run):
        for row in iter(self.rows.get, None):
            run.log(row, step=row["step"])
        run.finish()
