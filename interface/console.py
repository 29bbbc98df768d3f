"""The terminal, or pipe, of sample.py --chat: rank 0 reads questions there and prints answers.

interface/serve.py is the same for the browser. The model's side of both is Chat in sample.py.
"""
import signal
import sys

MOST_TYPED = 1 << 20  # characters of a question


class Console:
    """Where rank 0 reads questions and prints answers.

    Ctrl-C during an answer sets `stop`; at the prompt it gives a hint. `lost` is the error of stdin or
    stdout, which ends the conversation on all ranks.
    """

    def __init__(self, world):
        self.world = world
        self.stop = False
        self.answering = False
        self.lost = None
        self.terminal = world.rank == 0 and sys.stdin.isatty()
        if hasattr(sys.stdin, "reconfigure"):
            # Bytes that are not UTF-8 must not end rank 0 while the other ranks wait.
            sys.stdin.reconfigure(errors="replace")
        signal.signal(signal.SIGINT, self.interrupted if world.rank == 0 else signal.SIG_IGN)

    def interrupted(self, *_):
        self.stop = True
        if not self.answering:
            raise KeyboardInterrupt

    def agree(self, token):
        """Return rank 0's token, and whether Ctrl-C was typed."""
        # a few bytes from rank 0, over the world
        return self.world.tree.broadcast_object((token, self.stop))

    def read(self):
        """Return the next question, the same on all ranks; None if there is none."""
        line = self.read_line() if self.world.rank == 0 else None
        return self.world.tree.broadcast_object(line)  # a line from rank 0, over the world

    def read_line(self):
        """Return the next typed line, on rank 0; None at the end of the input."""
        while True:
            try:
                self.print("> " if self.terminal else "")
                if self.lost is not None:
                    return None
                line = input() if self.terminal else sys.stdin.readline(MOST_TYPED + 1)
                # At its end a file gives an empty line, and a terminal an EOFError.
                if not line and not self.terminal:
                    return None
                if len(line) > MOST_TYPED:
                    raise OSError(f"a line of stdin has more than {MOST_TYPED:,} characters, too many for a "
                                  "question; give one question on each line")
                return line.encode("utf-8", "replace").decode()
            except EOFError:
                return None
            except OSError as e:
                self.lost = e
                if e.errno is not None:  # otherwise the message says already what is wrong
                    self.lost = OSError(f"stdin cannot be read ({e.strerror}); give a terminal, a pipe or a "
                                        "file with a question on each line")
            except KeyboardInterrupt:
                self.print("\n/reset forgets, Ctrl-D ends", "\n")

    def print(self, text, end=""):
        """Print on rank 0."""
        if self.world.rank != 0:
            return
        try:
            print(text, end=end, flush=True)
        except OSError as e:
            self.stop = True
            self.lost = e


def converse(chat, console):
    """Answer questions until there are no more."""
    while (question := console.read()) is not None:
        question = question.strip()
        if question == "/reset":
            chat.reset()
        elif question:
            answer_aloud(chat, console, question)


def answer_aloud(chat, console, question):
    """Print the answer to one question, piece by piece."""
    console.stop = False
    console.answering = True
    try:
        for piece in chat.answer(question):
            console.print(piece)
    except ValueError as e:  # a character that the vocabulary lacks, on all ranks alike
        console.print(f"nanoshard: {e}")
    console.print("", "\n")
    console.answering = False
