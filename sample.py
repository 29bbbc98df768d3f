"""Text from a checkpoint: python sample.py RUN_DIR --prompt "...", in one process, from any layout.

Several samples: --n COUNT of each --prompt, of which there may be several; the model is loaded once.
A masked language model fills gaps: python sample.py RUN_DIR --fill "a [MASK] in a text".

No sample, but how well the model predicts a text: --score FILE prints {"tokens", "loss", "perplexity"}, a
line of JSON for each document, loss in nats per token. In a .jsonl file (also .gz, .zst, .parquet) each line
is a document, its "text"; any other file is one. Each token is predicted once, from the tokens before it in
its document: from all where they fit into seq_len, else from seq_len / 2 to seq_len of them, because windows
of seq_len move on by half of it. A document begins after end-of-document; where the vocabulary has none
(char), its first token is not predicted. With no token to predict, loss and perplexity are null.

--chat: talk to a model that was trained on conversations (prepare.py chat), in the terminal or from a pipe, a
question on each line. /reset forgets, Ctrl-C stops an answer, Ctrl-D ends. Several ranks share the model with
mpiexec -n 2 python sample.py RUN_DIR --chat --tp 2.
"""
import dataclasses
import json
import math
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from convert import read_run
from corpus import text, tokenizer
from corpus.chat import Template
from interface.command_line import command_line, discard_stdout, wrong_input
from interface.schema import Range, check_schema, load_json

Prompts = tyro.conf.UseAppendAction[tuple[str, ...]]
RunDir = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN_DIR")]]


@dataclass(frozen=True)
class Flags:
    """The command line of sample.py."""
    run_dir: RunDir  # directory of a run of train.py, one of its step_N, or a model of Hugging Face
    prompt: Prompts = ()  # text to continue; --prompt A --prompt B continues both; default: a line break
    fill: str = ""  # a text with [MASK] in it: print what fills it, by a model of --objective mlm
    n: int = 1  # samples of each prompt; the first is drawn with --seed, the next with --seed + 1, ...
    max_new_tokens: int = 200  # tokens to add
    temperature: float = 0.8  # below 1 favours likely tokens; 0 always takes the likeliest
    top_k: int = 50  # keep the k likeliest tokens; 0 keeps all
    seed: int = 1337  # of the random draws
    score: str | None = None  # print the loss and the perplexity of this file's text; no sample
    chat: bool = False  # answer questions from the terminal
    system: str = ""  # chat: what the system says before the first question
    tp: int = 1  # chat: ranks that split each layer
    ep: int = 1  # chat: ranks that split the experts

    RANGES = {"n": (1, 10**6), "max_new_tokens": (0, 10**9), "temperature": (0, 10**6), "top_k": (0, 2**24)}

    def check(self):
        """ValueError for a temperature by which logits cannot be divided, or a prompt that nothing reads."""
        if sum([self.chat, self.score is not None, bool(self.prompt or self.fill)]) > 1:
            raise ValueError("--chat, --score and --prompt or --fill exclude each other; leave one out")
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"--temperature {self.temperature} is too small; try 0, the likeliest token")
        if not self.chat and (self.system or self.tp * self.ep > 1):
            raise ValueError("--system, --tp and --ep are for --chat; samples come from one process")


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
    for name, t in model.named_buffers():  # the routers' biases, which choose the experts
        weights.fill(name, t, tuple(t.shape), (0,) * t.ndim)
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
    quiet = False
    if any(word.startswith("--chat") for word in argv):  # then there may be several ranks, and one speaks
        from runtime import launch
        quiet = launch.env_rank() > 0
    with wrong_input(quiet):
        flags = command_line(Flags, argv, "sample.py", __doc__)
        flags.check()
    if flags.chat:
        return chat_main(flags)
    with wrong_input():
        cfg, vocab_size, weights, run, said = read_run(flags.run_dir)
        vocabulary = load_vocabulary(run, vocab_size)
        check_objective(cfg, flags, run)
        gaps = read_gaps(cfg, vocabulary, run, flags.fill) if flags.fill else None
        prompts = [] if gaps else [vocabulary.encode_prompt(prompt) for prompt in flags.prompt or ("\n",)]
        if vocabulary.eod is None and not all(prompts):
            raise ValueError("--prompt is empty, and this vocabulary has no end-of-document to start from; "
                             "give at least one character")
        scored = [] if flags.score is None else read_documents(flags.score, vocabulary)
        model = load_model(cfg, vocab_size, weights)
        print(said, end="", file=sys.stderr, flush=True)
        if scored:
            return print_scores(model, scored)
        plain_stdout()
        if gaps:
            print_fillings(model, vocabulary, *gaps)
        else:
            print_samples(model, vocabulary, prompts, flags)


def plain_stdout():
    """A terminal may lack the text's characters: it then prints a question mark."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def print_samples(model, vocabulary, prompts, flags):
    """flags.n samples of each prompt (a list of ids), each below a line of its own if there are several."""
    from generate import generate
    samples = [(prompt, flags.seed + i) for prompt in prompts for i in range(flags.n)]
    for number, (prompt, seed) in enumerate(samples, 1):
        if len(samples) > 1:
            print(f"--- sample {number} of {len(samples)}, --seed {seed}")
        start = prompt or [vocabulary.eod]  # no prompt: a new document
        ids = generate(model, start, flags.max_new_tokens, flags.temperature, flags.top_k, seed)
        print(vocabulary.decode(ids[len(start) - len(prompt):]), flush=True)


# -----------------------------------------------------------------------------
# a masked language model

MASK = "[MASK]"  # in the text of --fill; text that is trained on never gives its id


def check_objective(cfg, flags, run):
    """ValueError: a masked language model is asked to continue a text, or a causal one to fill a gap."""
    if cfg.objective == "causal" and flags.fill:
        raise ValueError(f"{run} was trained with --objective causal, which sees no text behind a gap, so "
                         "--fill is not for it; try --prompt")
    if cfg.objective == "mlm" and (flags.prompt or not flags.fill):
        raise ValueError(f"{run} was trained with --objective mlm, which fills gaps and continues no text; "
                         f"give --fill 'a {MASK} in a text' alone")


def read_gaps(cfg, vocabulary, run, text):
    """-> (the ids of text, the id of [MASK]). ValueError: no [MASK] in it, more tokens than a sequence has, a
    character that the vocabulary lacks, or a config.json without the id."""
    saved = load_json(run / "config.json")
    one_past = Range(vocabulary.n_vocab, saved["vocab_size_used"] - 1)  # which read_run() has checked
    check_schema(saved, {"mask_token": one_past}, run / "config.json")
    *before, last = text.split(MASK)
    if not before:
        raise ValueError(f"--fill {text!r} has no {MASK}; for example --fill 'a {MASK} in a text'")
    ids = []
    for piece in before:
        # a byte pair begins with the space in front of its word, so the gap does, too
        ids += vocabulary.encode(piece if vocabulary.kind == "char" else piece.removesuffix(" "))
        ids.append(saved["mask_token"])
    ids += vocabulary.encode(last)
    if len(ids) > cfg.seq_len:
        raise ValueError(f"--fill has {len(ids)} tokens, a sequence has {cfg.seq_len}; give less text")
    return ids, saved["mask_token"]


def print_fillings(model, vocabulary, ids, mask):
    """Print the text with the likeliest token in each gap, then each gap's five likeliest with their
    probabilities. All gaps are predicted at once, none from what fills another."""
    import torch
    device = next(model.parameters()).device
    with torch.no_grad():
        logits, _ = model.eval()(torch.tensor([ids], device=device))  # (T, V)
    gaps = [i for i, token in enumerate(ids) if token == mask]
    probabilities = logits[gaps, :model.vocab_size].float().softmax(1)[:, :mask]  # never [MASK]
    best, tokens = (t.tolist() for t in probabilities.topk(min(5, mask)))
    for i, (token, *_) in zip(gaps, tokens, strict=True):
        ids[i] = token
    print(vocabulary.decode(ids))
    for number, row in enumerate(zip(best, tokens, strict=True), 1):
        likeliest = (f"{vocabulary.decode([token])!r} {100 * p:.1f} %" for p, token in zip(*row, strict=True))
        print(f"{MASK} {number}: {', '.join(likeliest)}", flush=True)


# -----------------------------------------------------------------------------
# --score

def read_documents(path, vocabulary):
    """-> [the ids of a document, (n,) int64] of --score FILE, after end-of-document if the vocabulary has it.
    ValueError, OSError: no such file, no text in it, a line without text, an unknown character."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"--score {path} is no file; give a text, or a .jsonl of lines with a 'text'")

    def refuse(kind, line):
        raise ValueError(f"--score: {line}; mend that document, or leave it out")
    whole = not path.lower().endswith(tuple(text.KINDS))
    spans = text.list_spans(path, sys.maxsize, "text", whole)  # a span is a whole file
    texts = [one for span in spans for one in text.READERS[span.kind](span, "text", refuse)]
    if not texts:
        raise ValueError(f"--score {path} holds no text; give a file that does")
    start = np.array([] if vocabulary.eod is None else [vocabulary.eod], np.int64)
    return [np.concatenate([start, vocabulary.encode_numpy(one)]) for one in texts]


def print_scores(model, scored):
    """A line of JSON for each of read_documents."""
    for ids in scored:
        tokens = max(0, len(ids) - 1)
        loss = total_loss(model, ids) / tokens if tokens else math.nan
        print(json.dumps({"tokens": tokens, "loss": loss if math.isfinite(loss) else None,
                          "perplexity": math.exp(loss) if loss < 700 else None}), flush=True)  # or too large


def total_loss(model, ids):
    """-> float, the sum of -log p(token) in nats over all but the first of ids, (n,) int64 on the host."""
    import torch

    from model import vocab_cross_entropy
    device, T = next(model.parameters()).device, model.cfg.seq_len
    ids = torch.from_numpy(ids).to(device)
    inputs, targets = ids[:-1], ids[1:]
    model.eval()
    done, total = 0, 0.0  # of the targets
    with torch.no_grad():
        while done < len(targets):
            # the window of the T inputs before `end` predicts what no window before it has predicted
            end = min(len(targets), max(T, done + max(1, T // 2)))
            logits, _ = model(inputs[max(0, end - T):end].unsqueeze(0))  # (t, V), t <= T
            total += vocab_cross_entropy(logits[done - end:], targets[done:end], model.vocab_size,
                                         model.mesh.tp).item()
            done = end
    return total


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
        from generate import Cache
        system = self.flags.system
        self.tokens = [*self.template.begin, *(self.template.message("system", system) if system else [])]
        self.cache = Cache()

    def answer(self, question):
        """Yield the answer in pieces of whole characters. ValueError: the vocabulary lacks a character."""
        self.tokens += self.template.question(question)
        return whole_characters(self.vocabulary, self.answer_ids())

    def answer_ids(self):
        """Yield the ids of the answer. Whatever ends it, <|end|> stands behind it in the conversation."""
        from generate import stream
        flags, special, stop = self.flags, self.vocabulary.special.values(), False
        for token in stream(self.model, self.tokens, flags.max_new_tokens, self.cache,
                            temperature=flags.temperature, top_k=flags.top_k, rng=self.rng):
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
    held, said = [], 0  # all are decoded again: some decoders drop the space before the first token
    for token in ids:
        held.append(token)
        text = vocabulary.decode(held)
        if not text.endswith("\ufffd"):
            yield text[said:]
            said = len(text)
    if held and (rest := vocabulary.decode(held)[said:]):
        yield rest


class Console:
    """Where rank 0 reads questions. Ctrl-C during an answer sets `stop`; at the prompt it gives a hint. What
    stdin or stdout failed with is `lost`, and ends the conversation on all ranks."""

    def __init__(self, world):
        self.world, self.stop, self.answering, self.lost = world, False, False, None
        self.terminal = world.rank == 0 and sys.stdin.isatty()
        if hasattr(sys.stdin, "reconfigure"):  # what is no UTF-8 must not end rank 0 while the others wait
            sys.stdin.reconfigure(errors="replace")
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
                self.print("> " * self.terminal)
                if self.lost is not None:
                    return None
                line = input() if self.terminal else sys.stdin.readline()
                return line.encode("utf-8", "replace").decode() if line or self.terminal else None
            except EOFError:
                return None
            except OSError as e:
                self.lost = e
            except KeyboardInterrupt:
                self.print("\n/reset forgets, Ctrl-D ends", "\n")

    def print(self, text, end=""):
        """Print on rank 0."""
        if self.world.rank == 0:
            try:
                print(text, end=end, flush=True)
            except OSError as e:
                self.stop, self.lost = True, e
                discard_stdout()


def chat_main(flags):
    """--chat, on every rank. SystemExit(2) after one line on stderr from one rank: wrong input."""
    from runtime import launch  # isort: skip (before torch: it sets how idle threads wait)
    from interface.layout import check_layout
    from parallel import make_mesh
    world = launch.launch(launch.NO_TIMEOUT, quiet=True)
    with launch.exit_together(world):
        cfg, vocab_size, weights, run, said = read_run(flags.run_dir)
        check_objective(cfg, flags, run)
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
    converse(chat, console)
    with launch.exit_together(world):
        if not isinstance(console.lost, BrokenPipeError | None):  # the reader of stdout may leave
            raise console.lost
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
