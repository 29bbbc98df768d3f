"""The terminal, or pipe, of sample.py --chat; interface/serve.py is the same for the browser."""
import itertools
import signal
import sys

from interface.terminal import complain, show


class Console:
    """Where rank 0 reads questions and prints answers."""

    def __init__(self, world):
        self.world = world
        self.answering = False
        self.stop = False  # Ctrl-C ends this answer
        self.is_lost = False  # nobody reads the answers: the conversation ends on all ranks
        if hasattr(sys.stdin, "reconfigure"):  # no UTF-8 must not end rank 0 while the others wait
            sys.stdin.reconfigure(errors="replace")
        signal.signal(signal.SIGINT, self.interrupted if world.rank == 0 else signal.SIG_IGN)

    def interrupted(self, *_):
        self.stop = True
        if not self.answering:
            raise KeyboardInterrupt

    def agree(self, token):
        """Return rank 0's token, and whether Ctrl-C was typed."""
        # a few bytes from rank 0, over the world
        return self.world.everyone.broadcast((token, self.stop))

    def converse(self, chat):
        """Answer questions until there are no more."""
        while True:
            question = self.read_line() if self.world.rank == 0 else None
            question = self.world.everyone.broadcast(question)  # a line from rank 0, over the world
            if question is None:
                return
            self.answering, self.stop = True, False
            try:
                if question == "/reset":
                    chat.reset()
                elif question:
                    for piece in itertools.chain(chat.answer(question), ["\n"]):
                        self.print(piece)
            except ValueError as e:  # a character that the vocabulary lacks, on all ranks alike
                self.print(f"nanoshard: {e}\n")
            self.answering = False

    def read_line(self):
        """Return the next typed line, on rank 0; None at the end of the input."""
        while not self.is_lost:
            try:
                if sys.stdin.isatty():
                    self.print("> ")
                return input().strip()
            except (EOFError, OSError):
                break
            except KeyboardInterrupt:
                self.print("\n/reset forgets, Ctrl-D ends\n")
        return None

    def print(self, text):
        """Print on rank 0."""
        try:
            if self.world.rank == 0:
                show(text)
        except OSError as e:
            complain(f"nanoshard: stdout: {e}")
            self.stop = self.is_lost = True
