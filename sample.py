"""Text from a checkpoint: python sample.py RUN_DIR --prompt "...", in one process, from any layout.

--n COUNT draws several samples of each --prompt, and there may be several prompts; the model is loaded once.
A masked language model fills gaps: python sample.py RUN_DIR --fill "a [MASK] in a text".

--score FILE prints how well the model predicts a text: {"tokens", "loss", "perplexity"}, a line of JSON for
each document, with the loss in nats per token; null where there is no token to predict. The "text" of each
line of a .jsonl or .ndjson file, also with .gz or .zst, and of a .parquet file is a document; any other file
is one. Each token is predicted once, from all tokens before it in its document, or, where seq_len is too
short, from seq_len / 2 to seq_len of them. A document begins after end-of-document; where the vocabulary has
none (char), its first token is not predicted.

--step N prints the text of step N of the run's training, by data-parallel rank and micro-batch.

--chat talks with you, by a model that was trained on conversations (prepare.py chat), in the terminal or from
a pipe with a question on each line. /reset forgets, Ctrl-C stops an answer, Ctrl-D ends. Several ranks share
the model with mpiexec -n 2 python sample.py RUN_DIR --chat --tp 2.

--serve is the same as a page for the browser, which also continues texts, by a model of any text.
"""
import dataclasses
import itertools
import json
import math
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

if sys.flags.safe_path:  # python -I leaves out the program's own folder
    sys.path.insert(0, str(Path(__file__).resolve().parent))
if __name__ == "__main__":  # It says what to type where they are not installed.
    from interface.packages import check_packages
    check_packages()

import numpy as np
import tyro

from convert import read_run
from corpus import text, tokenizer
from corpus.chat import MARKERS, Template
from corpus.masked import MASK
from corpus.samples import batch_size, open_data
from interface.command_line import command_line, given_flags, read_run_config, wrong_input
from interface.files import load_json
from interface.serve import Server
from interface.terminal import show

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
    score: str = ""  # print the loss and the perplexity of this file's text; no sample
    step: int = 0  # print the text of this step of the run's training
    chat: bool = False  # answer questions from the terminal
    serve: bool = False  # talk in the browser, at http://127.0.0.1:8000
    host: str = "127.0.0.1"  # serve: where to listen; with other addresses, from other machines
    port: int = 8000  # serve: the port; 0 finds a free one
    system: str = ""  # chat, serve: what the system says before the first question
    tp: int = 1  # chat: ranks that split each layer
    ep: int = 1  # chat: ranks that split the experts

    MISSING = ("no RUN is given: the --out directory of a run of train.py, for example python sample.py "
               "out/tiny --prompt 'def main('")
    RANGES = {"n": (1, 10**6), "max_new_tokens": (0, 10**9), "temperature": (0, 10**6), "top_k": (0, 2**24),
              "port": (0, 65535), "step": (0, 10**9)}

    def mode(self):
        """Return what is asked for, a key of READS. ValueError: two things are, or a flag is for another."""
        asked = [name for name in READS if getattr(self, name)] or ["prompt"]
        if len(asked) > 1:
            raise ValueError(f"--{asked[0]} and --{asked[1]} exclude each other; give one")
        unread = given_flags(self, set().union(*READS.values()) - READS[asked[0]])
        if unread:
            raise ValueError(f"--{asked[0]} does not read {', '.join(unread)}; leave it out")
        return asked[0]


DRAW = {"max_new_tokens", "temperature", "top_k", "seed"}
READS = {  # {flag that says what is asked for: further flags that it reads}
    "prompt": {"n", *DRAW}, "fill": set(), "score": set(), "step": set(),
    "chat": {"system", "tp", "ep", *DRAW}, "serve": {"system", "host", "port", *DRAW}}


def load_model(cfg, vocab_size, weights, world=None):
    """Return the model with the weights of a checkpoint.Reader, whole, on this process's device.

    With world, it is this rank's share, cut by cfg.tp and cfg.ep. All weights are fp32, none in fp8.
    No row is dropped for --capacity-factor: an expert's limit follows from the tokens that are read at once,
    so a text would have other logits in one read than token by token. ValueError: the weights do not fit.
    """
    from runtime.launch import World  # isort: skip (before torch: it sets how idle threads wait)
    import torch  # not at the top: wrong input is found without waiting seconds for torch

    from model import GPT
    from parallel import make_mesh
    cfg = dataclasses.replace(cfg, fp8=False, capacity_factor=0.0)
    if world is None:
        mesh = make_mesh(World())
    else:
        mesh = make_mesh(world, cfg.tp, ep=cfg.ep)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    with device:
        model = GPT(cfg, mesh, vocab_size)
    for name, p in model.named_parameters():
        weights.fill(name, p.data, p.full_shape, p.offset)
        weights.check_finite(name, p.data)
    # The buffers are the routers' biases, which choose the experts.
    for name, t in model.named_buffers():
        weights.fill(name, t, tuple(t.shape), (0,) * t.ndim)
    return model


def load_vocabulary(run, vocab_size):
    """Return the run's tokenizer. ValueError: there is none, or it has more symbols than the model."""
    vocabulary = tokenizer.load_if_there(run, vocab_size)
    if vocabulary is None:
        raise ValueError(f"{run} has no tokenizer.json: it was trained on data without text (train with "
                         "--data data/stdlib), or is of Hugging Face and lacks it (save its tokenizer again "
                         "with transformers, as docs/hugging-face.md says)")
    return vocabulary


@wrong_input()
def main(argv=None):
    """Print the prompt with its continuation. SystemExit(2) after one line on stderr: wrong input."""
    argv = sys.argv[1:] if argv is None else argv
    flags = command_line(Flags, argv, "sample.py", __doc__)
    mode = flags.mode()
    if mode == "chat":
        chat_main(flags, argv)
        return
    if mode == "step":
        print_step(Path(flags.run_dir), flags.step)
        return
    cfg, vocab_size, weights, run, said = read_run(flags.run_dir)
    vocabulary = load_vocabulary(run, vocab_size)
    check_objective(cfg, mode, run)
    # All input is read before the model, because the model takes longer.
    if mode == "fill":
        ids, mask = read_gaps(cfg, vocabulary, run, flags.fill)
        answer = partial(print_fillings, vocabulary=vocabulary, ids=ids, mask=mask)
    elif mode == "serve":
        server = Server(flags.host, flags.port)
        answer = partial(serve, server=server, vocabulary=vocabulary, flags=flags, name=str(run))
    elif mode == "score":
        answer = partial(print_scores, documents=read_documents(flags.score, vocabulary))
    else:
        prompts = [encode_prompt(prompt, vocabulary) for prompt in flags.prompt or ("\n",)]
        answer = partial(print_samples, vocabulary=vocabulary, prompts=prompts, flags=flags)
    model = load_model(cfg, vocab_size, weights)
    print(said, end="", file=sys.stderr, flush=True)
    answer(model.eval())


def check_objective(cfg, mode, run):
    """Raise ValueError if a masked language model is to continue a text, or a causal one to fill gaps."""
    if (cfg.objective == "mlm") != (mode == "fill"):
        raise ValueError(f"{run} was trained with --objective {cfg.objective}: mlm fills gaps, with --fill "
                         f"'a {MASK} in a text', and causal continues a text, with --prompt")


def encode_prompt(prompt, vocabulary):
    """Return the ids that a text begins with. ValueError: the vocabulary cannot say it, or begin a text."""
    ids = vocabulary.encode_prompt(prompt)
    if not ids and vocabulary.eod is None:
        raise ValueError("--prompt is empty, and this vocabulary has no end-of-document to start from; "
                         "give at least one character")
    return ids


def print_samples(model, vocabulary, prompts, flags):
    """Print flags.n samples of each prompt (a list of ids), each below a heading if there are several.

    A token is printed as soon as it is drawn.
    """
    samples = [(prompt, flags.seed + i) for prompt in prompts for i in range(flags.n)]
    for number, (prompt, seed) in enumerate(samples, 1):
        if len(samples) > 1:
            print(f"--- sample {number} of {len(samples)}, --seed {seed}")
        ids = new_ids(model, vocabulary, prompt, dataclasses.replace(flags, seed=seed))
        show(vocabulary.decode(prompt))
        for piece in vocabulary.whole_characters(ids, prompt):
            show(piece)
        show("\n")


def new_ids(model, vocabulary, prompt, flags):
    """Return an iterator of the tokens that follow a prompt, a list of ids."""
    import torch

    from pipeline import Cache, stream
    start = list(prompt) or [vocabulary.eod]  # no prompt: a new document
    return stream(model, start, flags.max_new_tokens, Cache(), temperature=flags.temperature,
                  top_k=flags.top_k, rng=torch.Generator().manual_seed(flags.seed))


# -----------------------------------------------------------------------------
# --step

def print_step(run, number):
    """Print the samples of a step: a sample is a function of the seed and of its number.

    This holds for a run whose batch never changed but by --rampup-batch-size.
    """
    cfg, vocab_size = read_run_config(run / "config.json")
    vocabulary = load_vocabulary(run, vocab_size)
    source, *_ = open_data(cfg)
    n_ranks = load_json(run / "config.json")["dp"]
    full = cfg.global_batch or cfg.micro_batch * n_ranks
    first = 0
    for _ in range(number - 1):
        first += batch_size(first, full, cfg.rampup_batch_size)
    count = batch_size(first, full, cfg.rampup_batch_size)
    for i in range(count):
        rank, within = divmod(i, count // n_ranks)
        print(f"--- sample {first + i}: rank {rank} of dp, micro-batch {within // cfg.micro_batch}")
        tokens = source.batch(first + i, 1)[0]
        show(vocabulary.decode(tokens[0].tolist()) + "\n")


# -----------------------------------------------------------------------------
# --fill

CANDIDATES = 5  # tokens that are printed for each gap


def read_gaps(cfg, vocabulary, run, text):
    """Return the ids of text, and the id of [MASK].

    ValueError: text has no [MASK], more tokens than a sequence, or a character that the vocabulary lacks.
    """
    mask = load_json(run / "config.json")["mask_token"]
    *before, last = text.split(MASK)
    if not before:
        raise ValueError(f"--fill {text!r} has no {MASK}; for example --fill 'a {MASK} in a text'")
    ids = []
    for piece in before:
        # A byte pair begins with the space in front of its word, so that space belongs to the gap.
        if vocabulary.kind != "char":
            piece = piece.removesuffix(" ")
        ids += [*vocabulary.encode(piece), mask]
    ids += vocabulary.encode(last)
    if len(ids) > cfg.seq_len:
        raise ValueError(f"--fill has {len(ids)} tokens, a sequence has {cfg.seq_len}; give less text")
    return ids, mask


def print_fillings(model, vocabulary, ids, mask):
    """Print the text with the likeliest token in each gap, and then the five likeliest tokens of each gap.

    All gaps are predicted at once: what fills one gap does not influence another.
    """
    import torch
    device = next(model.parameters()).device
    with torch.no_grad():
        logits, _ = model(torch.tensor([ids], device=device))  # (t, V)
    gaps = [i for i, token in enumerate(ids) if token == mask]
    probabilities = logits[gaps, :model.vocab_size].float().softmax(1)
    probabilities = probabilities[:, :mask]  # all tokens but [MASK], which is the last
    values, tokens = probabilities.topk(min(CANDIDATES, mask))  # (gaps, 5) each

    filled = list(ids)
    for i, token in zip(gaps, tokens[:, 0].tolist(), strict=True):
        filled[i] = token
    show(f"{vocabulary.decode(filled)}\n")
    for i in range(len(gaps)):
        likeliest = []
        for value, token in zip(values[i].tolist(), tokens[i].tolist(), strict=True):
            likeliest.append(f"{vocabulary.decode([token])!r} {100 * value:.1f} %")
        print(f"{MASK} {i + 1}: {', '.join(likeliest)}", flush=True)


# -----------------------------------------------------------------------------
# --score

def read_documents(path, vocabulary):
    """Return the ids of each document of --score FILE, (n,) int64, after end-of-document if there is one.

    ValueError, OSError: no such file, no text in it, a line without text, or an unknown character.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"--score {path} is no file; give a text, or a .jsonl of lines with a 'text'")
    [file] = text.list_files(path, "text")
    texts = list(text.texts(file, "text"))  # an empty one has its line, too
    if not any(texts):
        raise ValueError(f"--score {path} holds no text; give a file that does")

    start = [] if vocabulary.eod is None else [vocabulary.eod]
    start = np.array(start, np.int64)
    return [np.concatenate([start, vocabulary.encode_numpy(document)]) for document in texts]


def print_scores(model, documents):
    """Print a line of JSON for each of read_documents(). A loss or perplexity that is too large is null."""
    for ids in documents:
        tokens = max(0, len(ids) - 1)
        loss = perplexity = None
        if tokens:
            mean = total_loss(model, ids) / tokens
            if math.isfinite(mean):
                loss = mean
            if mean < 700:
                perplexity = math.exp(mean)
        print(json.dumps({"tokens": tokens, "loss": loss, "perplexity": perplexity}), flush=True)


def total_loss(model, ids):
    """Return the sum of -log p(token) in nats, a float, over all tokens but the first.

    ids: (n,) int64 on the host.
    """
    import torch

    from layers import vocab_cross_entropy
    device = next(model.parameters()).device
    window = model.cfg.seq_len
    ids = torch.from_numpy(ids).to(device)
    inputs = ids[:-1]
    targets = ids[1:]
    total = 0.0
    done = 0  # targets that are predicted
    with torch.no_grad():
        while done < len(targets):
            # The window of inputs before `end` predicts those targets that no earlier window has predicted.
            end = min(len(targets), max(window, done + max(1, window // 2)))
            logits, _ = model(inputs[max(0, end - window):end].unsqueeze(0))  # (t, V), t <= window
            loss = vocab_cross_entropy(logits[done - end:], targets[done:end], model.vocab_size,
                                       model.mesh.tp)
            total += loss.item()
            done = end
    return total


# -----------------------------------------------------------------------------
# --chat

class Chat:
    """A conversation: its tokens so far, and the keys and values of the tokens that the model has seen.

    agree: a function of this rank's token that gives the first rank's token, and whether the first rank was
    told to stop. Both are the same on all ranks.
    """

    def __init__(self, model, vocabulary, flags, agree=None):
        import torch
        self.model = model.eval()
        self.vocabulary = vocabulary
        self.flags = flags
        self.agree = agree
        self.template = Template(vocabulary)
        self.rng = torch.Generator().manual_seed(flags.seed)
        self.reset()

    def reset(self):
        """Forget all that was said."""
        from pipeline import Cache
        self.tokens = list(self.template.begin)
        if self.flags.system:
            self.tokens += self.template.message("system", self.flags.system)
        self.cache = Cache()

    def answer(self, question):
        """Add the question, and return an iterator of the answer's pieces, of whole characters each.

        ValueError: the vocabulary lacks a character of the question.
        """
        self.tokens += self.template.question(question)
        return self.vocabulary.whole_characters(self.answer_ids())

    def answer_ids(self):
        """Yield the ids of the answer. However it ends, <|end|> follows it in the conversation."""
        from pipeline import stream
        flags = self.flags
        special = self.vocabulary.special.values()
        stop = False
        try:
            for token in stream(self.model, self.tokens, flags.max_new_tokens, self.cache,
                                temperature=flags.temperature, top_k=flags.top_k, rng=self.rng):
                if self.agree:
                    token, stop = self.agree(token)
                self.tokens[-1] = token
                if token in special:
                    self.tokens.pop()
                    break
                yield token
                if stop:
                    break
        finally:  # also where nobody asks for the rest
            self.tokens.append(self.template.end)


def chat_main(flags, argv):
    """Talk, on all ranks. argv: the words that gave the flags.

    SystemExit(2) after one line on stderr from one rank: wrong input.
    """
    from runtime import launch  # isort: skip (before torch: it sets how idle threads wait)
    from interface.layout import check_alone, check_layout
    from parallel import make_mesh
    world = launch.launch(launch.NO_TIMEOUT, quiet=True)
    with world.everyone.input():
        cfg, vocab_size, weights, run, said = read_run(flags.run_dir)
        check_objective(cfg, "chat", run)
        vocabulary = load_vocabulary(run, vocab_size)
        Template(vocabulary)  # refuses a vocabulary before the model is read
        # Instead of the training's layout. The smallest micro-batch is one token per tp rank.
        cfg = dataclasses.replace(
            cfg, tp=flags.tp, ep=flags.ep, pp=1, cp=1, pp_chunks=1, pp_layers="", zero=0, shard=0,
            micro_batch=flags.tp, rampup_batch_size=(), pdb=-1)
        if world.size == 1:
            check_alone(cfg, argv, "sample.py")
        mesh = make_mesh(world, cfg.tp, 1, cfg.ep, groups=False, n_experts=cfg.n_experts)
        check_layout(cfg, mesh, cfg.micro_batch * mesh.dp.size)
    console = Console(world)
    with world.everyone.input():
        chat = Chat(load_model(cfg, vocab_size, weights, world), vocabulary, flags, console.agree)
    if world.rank == 0:
        print(said, end="", file=sys.stderr, flush=True)
    console.converse(chat)
    del chat  # and with it the mesh
    launch.shutdown(world)


class Console:
    """The terminal, or pipe, where rank 0 reads questions and prints answers."""

    def __init__(self, world):
        self.world = world
        self.answering = False
        self.stop = False  # Ctrl-C ends this answer
        if hasattr(sys.stdin, "reconfigure"):  # no UTF-8 must not end rank 0 while the others wait
            sys.stdin.reconfigure(errors="replace")
        signal.signal(signal.SIGINT, self.interrupted if world.rank == 0 else signal.SIG_IGN)

    def interrupted(self, *_):
        self.stop = True
        if not self.answering:
            raise KeyboardInterrupt

    def share(self, value):
        """Return rank 0's value, a few bytes over the world, on every rank."""
        return self.world.everyone.broadcast(value)

    def agree(self, token):
        return self.share((token, self.stop))

    def converse(self, chat):
        """Answer questions until there are no more."""
        while (question := self.share(self.read_line())) is not None:
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
        while self.world.rank == 0:
            try:
                if sys.stdin.isatty():
                    self.print("> ")
                return input().strip()
            except KeyboardInterrupt:
                self.print("\n/reset forgets, Ctrl-D ends\n")
            except EOFError:
                return None

    def print(self, text):
        """Print on rank 0."""
        if self.world.rank == 0:
            show(text)


# -----------------------------------------------------------------------------
# --serve

def serve(model, server, vocabulary, flags, name):
    """Let a page in the browser ask, until Ctrl-C. name: of the run, which the page shows."""
    talks = not set(MARKERS) - vocabulary.special.keys()
    settings = {"name": name, "mode": "chat" if talks else "text", "system": flags.system,
                "temperature": flags.temperature}
    seeds = itertools.count(flags.seed)
    server.run(partial(reply, model=model, vocabulary=vocabulary, flags=flags, seeds=seeds), settings)


def reply(asked, *, model, vocabulary, flags, seeds):
    """Return the pieces of the answer to what a page asks, as interface.serve.ASKED says.

    seeds: an iterator, so that the same question has several answers. ValueError: it cannot be answered.
    """
    if not asked["messages"]:
        raise ValueError("there is no message")
    flags = dataclasses.replace(flags, temperature=round(asked["temperature"], 6), system=asked["system"],
                                seed=next(seeds))
    *before, question = asked["messages"]
    if asked["mode"] == "text":
        prompt = encode_prompt(question, vocabulary)
        return vocabulary.whole_characters(new_ids(model, vocabulary, prompt, flags), prompt[-1:])
    chat = Chat(model, vocabulary, flags)
    for role, message in zip(itertools.cycle(("user", "assistant")), before, strict=False):
        chat.tokens += chat.template.message(role, message)
    return chat.answer(question)


if __name__ == "__main__":
    raise SystemExit(main())
