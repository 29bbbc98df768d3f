"""Text from a checkpoint: python sample.py RUN_DIR --prompt "...", in one process, from any layout.

Several samples: --n COUNT of each --prompt, of which there may be several; the model is loaded once.

--chat: talk to a model that was trained on conversations (prepare.py chat), in the terminal or from a pipe, a
question on each line. /reset forgets, Ctrl-C stops an answer, Ctrl-D ends. Several ranks share the model with
mpiexec -n 2 python sample.py RUN_DIR --chat --tp 2.
"""
import dataclasses
import signal
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

import checkpoint
import config
from corpus import tokenizer
from corpus.chat import Template
from tools.command_line import command_line, wrong_input
from tools.schema import Range, check_schema, load_json

Prompts = tyro.conf.UseAppendAction[tuple[str, ...]]
RunDir = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN_DIR")]]


@dataclass(frozen=True)
class Flags:
    """The command line of sample.py."""
    run_dir: RunDir  # directory of a run of train.py, or one of its step_N
    prompt: Prompts = ()  # text to continue; --prompt A --prompt B continues both; default: a line break
    n: int = 1  # samples of each prompt; the first is drawn with --seed, the next with --seed + 1, ...
    max_new_tokens: int = 200  # tokens to add
    temperature: float = 0.8  # below 1 favours likely tokens; 0 always takes the likeliest
    top_k: int = 50  # keep the k likeliest tokens; 0 keeps all
    seed: int = 1337  # of the random draws
    chat: bool = False  # answer questions from the terminal
    system: str = ""  # chat: what the system says before the first question
    tp: int = 1  # chat: ranks that split each layer
    ep: int = 1  # chat: ranks that split the experts

    RANGES = {"n": (1, 10**6), "max_new_tokens": (0, 10**9), "temperature": (0, 10**6), "top_k": (0, 2**24)}

    def check(self):
        """ValueError for a temperature by which logits cannot be divided."""
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"--temperature {self.temperature} is too small; try 0, the likeliest token")
        if not self.chat and (self.system or self.tp * self.ep > 1):
            raise ValueError("--system, --tp and --ep are for --chat; samples come from one process")


def read_run(run_dir):
    """A run or one of its checkpoints -> (Config, vocabulary size, checkpoint.Reader, directory of the run, a
    line that says which checkpoint was taken, or ""). ValueError, OSError: no run, or no sound checkpoint."""
    run = Path(run_dir)
    step = run if run.name.startswith("step_") else None
    run = run.parent if step else run
    if not (run / "config.json").exists():
        raise FileNotFoundError(f"{run} holds no config.json; give the --out directory of a run of train.py")
    index, said = checkpoint.check(step) if step else None, ""
    if step is None:
        step, said = choose_step(run)
    cfg, vocab_size = read_config(run / "config.json")
    return cfg, vocab_size, checkpoint.Reader(step, index), run, said


def choose_step(run):
    """-> (of a run's checkpoints the one with the lowest validation loss, where it is known and sound, else
    the newest sound one; a line that says which and why)."""
    newest = checkpoint.newest(run)
    if newest is None:
        raise FileNotFoundError(f"{run} holds no sound checkpoint; train with --save-every N")
    found = checkpoint.read_index(newest)["meta"].get("best", {})
    best, why = run / f"step_{found.get('step', 0):06d}", "the newest checkpoint"
    if "val_loss" in found and best.is_dir() and checkpoint.damage(best) is None:
        newest, why = best, f"lowest validation loss {found['val_loss']:.4f}"
    return newest, f"{newest}: {why} (sample.py RUN/step_N takes another)\n"


def read_config(path):
    """A run's config.json -> (Config, vocabulary size). ValueError: it is none that train.py writes."""
    # not what says nothing about the model, and may have been changed or moved since
    types = {f.name: f.type for f in dataclasses.fields(config.Config)
             if f.name not in ("min_lr", "init_from", "resume", "dump_grads")}
    tuples = {k for k, t in types.items() if typing.get_origin(t) is tuple}
    try:
        saved = load_json(path)
        schema = {f"{k}?": [int] if k in tuples else t for k, t in types.items()}
        check_schema(saved, {**schema, "vocab_size_used": Range(1, 2**24)}, "flags")
        cfg = config.Config(**{k: tuple(v) if k in tuples else v for k, v in saved.items() if k in types})
        config.check(cfg)
    except ValueError as e:
        raise ValueError(f"{path} is no run's ({e}); give train.py's --out") from None
    return cfg, saved["vocab_size_used"]


def load_model(cfg, vocab_size, weights, world=None):
    """-> the model with the weights of a checkpoint.Reader: whole, on this process's device; or this rank's
    share by cfg.tp and cfg.ep on the ranks of world. ValueError: they are another model's."""
    from runtime.launch import World  # isort: skip (before torch: it sets how idle threads wait)
    import torch  # not at the top: wrong input is found without the seconds that torch takes

    from model import GPT
    from parallel import make_mesh
    device = (torch.accelerator.current_accelerator() if torch.accelerator.is_available()
              else torch.device("cpu"))
    mesh = make_mesh(World()) if world is None else make_mesh(world, cfg.tp, ep=cfg.ep)
    with torch.device("meta"):  # without memory: do all names and shapes fit?
        for name, p in GPT(cfg, mesh, vocab_size).named_parameters():
            weights.fill(name, p[:0], p.full_shape, p.offset)
    with torch.device(device):
        model = GPT(cfg, mesh, vocab_size)
    for name, p in model.named_parameters():
        weights.fill(name, p.data, p.full_shape, p.offset)
    return model


def load_vocabulary(run, vocab_size):
    """-> the run's tokenizer. ValueError, OSError: there is none, or it has more symbols than the model."""
    vocabulary = tokenizer.load(run)
    if vocabulary.n_vocab > vocab_size:
        raise ValueError(f"{run}/config.json has vocab_size_used {vocab_size}, tokenizer.json "
                         f"{vocabulary.n_vocab} symbols: they are of two runs; give train.py's --out")
    return vocabulary


def main(argv=None):
    """Print the prompt with its continuation. SystemExit(2) after one line on stderr: wrong input."""
    argv = sys.argv[1:] if argv is None else argv
    if {"--chat", "--chat=true"} & set(argv):
        return chat_main(argv)
    with wrong_input():
        flags = command_line(Flags, argv, "sample.py", __doc__)
        flags.check()
        cfg, vocab_size, weights, run, said = read_run(flags.run_dir)
        vocabulary = load_vocabulary(run, vocab_size)
        prompts = [vocabulary.encode(prompt) for prompt in flags.prompt or ("\n",)]
        if vocabulary.eod is None and not all(prompts):
            raise ValueError("--prompt is empty, and this vocabulary has no end-of-document to start from; "
                             "give at least one character")
        model = load_model(cfg, vocab_size, weights)
        print(said, end="", file=sys.stderr, flush=True)
        plain_stdout()
        print_samples(model, vocabulary, prompts, flags)


def plain_stdout():
    """A terminal may lack the text's characters: it then prints a question mark."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def print_samples(model, vocabulary, prompts, flags):
    """flags.n samples of each prompt (a list of ids), each below a line of its own if there are several."""
    from pipeline import generate
    samples = [(prompt, flags.seed + i) for prompt in prompts for i in range(flags.n)]
    for number, (prompt, seed) in enumerate(samples, 1):
        if len(samples) > 1:
            print(f"--- sample {number} of {len(samples)}, --seed {seed}")
        start = prompt or [vocabulary.eod]  # no prompt: a new document
        ids = generate(model, start, flags.max_new_tokens, flags.temperature, flags.top_k, seed)
        print(vocabulary.decode(ids[len(start) - len(prompt):]), flush=True)


# -----------------------------------------------------------------------------
# --chat

class Chat:
    """A conversation: its tokens so far, and the keys and values of those that the model has seen.
    agree(token) -> (the first rank's token, whether it was told to stop), the same on all ranks."""

    def __init__(self, model, vocabulary, flags, agree=lambda token: (token, False)):
        import torch
        self.model, self.vocabulary, self.flags, self.agree = model.eval(), vocabulary, flags, agree
        self.template, self.rng = Template(vocabulary), torch.Generator().manual_seed(flags.seed)
        self.reset()

    def reset(self):
        """Forget all that was said."""
        from pipeline import Cache
        system = self.flags.system
        self.tokens = [*self.template.begin, *(self.template.message("system", system) if system else [])]
        self.cache = Cache()

    def answer(self, question):
        """Yield the answer in pieces of whole characters. ValueError: the vocabulary lacks a character."""
        self.tokens += self.template.question(question)
        return whole_characters(self.vocabulary, self.answer_ids())

    def answer_ids(self):
        """Yield the ids of the answer. Whatever ends it, <|end|> stands behind it in the conversation."""
        from pipeline import stream
        flags, special, stop = self.flags, self.vocabulary.special.values(), False
        for token in stream(self.model, self.tokens, flags.max_new_tokens, flags.temperature, flags.top_k,
                            self.rng, self.cache):
            self.tokens[-1], stop = self.agree(token)
            if self.tokens[-1] in special:
                self.tokens.pop()
                break
            yield self.tokens[-1]
            if stop:
                break
        self.tokens.append(self.template.end)


def whole_characters(vocabulary, ids):
    """ids, one after the other -> their text in pieces: a token may end inside a character."""
    held = []
    for token in ids:
        held.append(token)
        text = vocabulary.decode(held)
        if not text.endswith("\ufffd") or len(held) > 8:
            yield text
            held = []
    if held:
        yield vocabulary.decode(held)


class Console:
    """Where rank 0 reads questions. Ctrl-C during an answer sets `stop`; at the prompt it gives a hint."""

    def __init__(self, world):
        self.world, self.stop, self.answering = world, False, False
        self.terminal = world.rank == 0 and sys.stdin.isatty()
        signal.signal(signal.SIGINT, self.interrupted if world.rank == 0 else signal.SIG_IGN)

    def interrupted(self, *_):
        self.stop = True
        if not self.answering:
            raise KeyboardInterrupt

    def agree(self, token):
        """A token -> (rank 0's token, whether Ctrl-C was typed), a few bytes from rank 0 over the world."""
        return self.world.axis.broadcast_object((token, self.stop))

    def read(self):
        """-> the next question, the same on all ranks; None: there is none."""
        return self.world.axis.broadcast_object(self.read_line() if self.world.rank == 0 else None)

    def read_line(self):
        while True:
            try:
                print("> " * self.terminal, end="", flush=True)
                line = input() if self.terminal else sys.stdin.readline()
                return line.encode("utf-8", "replace").decode() if line or self.terminal else None
            except EOFError:
                return None
            except KeyboardInterrupt:
                print("\n/reset forgets, Ctrl-D ends", flush=True)

    def print(self, text, end=""):
        if self.world.rank == 0:
            print(text, end=end, flush=True)


def chat_main(argv):
    """--chat, on every rank. SystemExit(2) after one line on stderr from one rank: wrong input."""
    from runtime import launch  # isort: skip (before torch: it sets how idle threads wait)
    from cost.fits import check_layout
    from parallel import make_mesh
    with wrong_input(quiet=launch.env_rank() > 0):
        flags = command_line(Flags, argv, "sample.py", __doc__)
        flags.check()
    world = launch.launch(launch.NO_TIMEOUT, quiet=True)
    with launch.exit_together(world):
        cfg, vocab_size, weights, run, said = read_run(flags.run_dir)
        vocabulary = load_vocabulary(run, vocab_size)
        Template(vocabulary)  # before the model is read
        # a token of each tp rank is the smallest micro-batch
        cfg = dataclasses.replace(cfg, tp=flags.tp, ep=flags.ep, pp=1, cp=1, pp_chunks=1, pp_layers="",
                                  zero=0, micro_batch=flags.tp, rampup_batch_size=(), pdb=-1)
        mesh = make_mesh(world, cfg.tp, 1, cfg.ep, groups=False, n_experts=cfg.n_experts)
        check_layout(cfg, mesh, cfg.micro_batch * mesh.dp.size)
    console = Console(world)
    with launch.exit_together(world):
        chat = Chat(load_model(cfg, vocab_size, weights, world), vocabulary, flags, console.agree)
    if world.rank == 0:
        print(said, end="", file=sys.stderr, flush=True)
    plain_stdout()
    with wrong_input():  # the reader of stdout may leave
        converse(chat, console)
    del chat  # and with it the mesh
    launch.shutdown(world)


def converse(chat, console):
    """Questions and answers until there are no more questions."""
    while (question := console.read()) is not None:
        if question.strip() == "/reset":
            chat.reset()
        elif question.strip():
            console.stop, console.answering = False, True
            try:
                for piece in chat.answer(question.strip()):
                    console.print(piece)
            except ValueError as e:  # a character that the vocabulary lacks, on all ranks alike
                console.print(f"nanoshard: {e}")
            console.print("", "\n")
            console.answering = False


if __name__ == "__main__":
    main()
