"""Text from a checkpoint: python sample.py RUN_DIR --prompt "...", in one process, from any layout.

--n COUNT draws several samples of each --prompt, and there may be several prompts; the model is loaded once.
A masked language model fills gaps: python sample.py RUN_DIR --fill "a [MASK] in a text".

--score FILE prints how well the model predicts a text: {"tokens", "loss", "perplexity"}, a line of JSON for
each document, with the loss in nats per token. In a .jsonl or .ndjson file, also with .gz or .zst, and in a
.parquet file the "text" of each line is a document; any other file is one document. Each token is predicted
once, from the tokens before it in its document: from all of them where they fit into seq_len, else from
seq_len / 2 to seq_len of them, because windows of seq_len move on by half of it. A document begins after
end-of-document; where the vocabulary has none (char), its first token is not predicted. With no token to
predict, loss and perplexity are null.

--chat talks with you, by a model that was trained on conversations (prepare.py chat), in the terminal or from
a pipe with a question on each line. /reset forgets, Ctrl-C stops an answer, Ctrl-D ends. Several ranks share
the model with mpiexec -n 2 python sample.py RUN_DIR --chat --tp 2.

--serve is the same as a page for the browser, which also continues texts, by a model of any text.
"""
import dataclasses
import itertools
import json
import math
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

from convert import is_theirs, read_run
from corpus import text, tokenizer
from corpus.chat import MARKERS, Template
from corpus.masked import MASK
from interface.command_line import command_line, given_flags, wrong_input
from interface.console import Console
from interface.files import Range, check_schema, load_json
from interface.serve import Server
from interface.terminal import drop_what_fails, show

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
    serve: bool = False  # talk in the browser, at http://127.0.0.1:8000
    host: str = "127.0.0.1"  # serve: where to listen; with other addresses, from other machines
    port: int = 8000  # serve: the port; 0 finds a free one
    system: str = ""  # chat, serve: what the system says before the first question
    tp: int = 1  # chat: ranks that split each layer
    ep: int = 1  # chat: ranks that split the experts

    MISSING = ("no RUN is given: the --out directory of a run of train.py, for example python sample.py "
               "out/tiny --prompt 'def main('")
    RANGES = {"n": (1, 10**6), "max_new_tokens": (0, 10**9), "temperature": (0, 10**6), "top_k": (0, 2**24),
              "port": (0, 65535)}

    def check(self):
        """Raise ValueError for a temperature that cannot divide logits, or for flags that exclude each
        other."""
        asked = [self.chat, self.serve, self.score is not None, bool(self.prompt or self.fill)]
        if sum(asked) > 1:
            raise ValueError("--chat, --serve, --score and --prompt or --fill exclude each other; give one")
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"--temperature {self.temperature} is too small; try 0, the likeliest token")
        if not self.chat and self.tp * self.ep > 1:
            raise ValueError("--tp and --ep are for --chat; samples and --serve come from one process")
        ignored = given_flags(self, ("n", "max_new_tokens", "temperature", "top_k", "seed"))
        if self.score is not None and ignored:
            raise ValueError(f"--score draws no text; leave out {', '.join(ignored)}")
        if self.fill and ignored:
            raise ValueError(f"--fill takes the likeliest tokens; leave out {', '.join(ignored)}")
        if (self.chat or self.serve) and self.n != Flags.n:
            raise ValueError("--n draws several samples of a --prompt, and a question has one answer; leave "
                             "out --n")
        if self.system and not (self.chat or self.serve):
            raise ValueError("--system is for --chat and --serve; put its words into --prompt")
        if not self.serve and (self.host, self.port) != (Flags.host, Flags.port):
            raise ValueError("--host and --port are for --serve; add it, or leave them out")


def load_model(cfg, vocab_size, weights, world=None):
    """Return the model with the weights of a checkpoint.Reader, whole, on this process's device.

    With world, the model is this rank's share, cut by cfg.tp and cfg.ep over the ranks of world. All weights
    are fp32 here, whatever --dtype was. A model that was trained with --fp8 multiplies in fp32, too: what is
    rounded anew for each token gains no time. A model that was trained with --capacity-factor drops no row
    here. The limit of an expert follows from the number of tokens that are read at once, so a text would have
    other logits in one read than token by token.
    ValueError: the weights belong to another model.
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

    # A model without memory shows whether all names and shapes fit.
    with torch.device("meta"):
        empty = GPT(cfg, mesh, vocab_size)
    for name, p in empty.named_parameters():
        weights.fill(name, p[:0], p.full_shape, p.offset)

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
    """Return the run's tokenizer.

    ValueError, OSError: there is none, or it has more symbols than the model.
    """
    there = Path(run, "tokenizer.json").exists()
    if not there and is_theirs(Path(run)):
        raise ValueError(f"{run} has no tokenizer.json; save its tokenizer again with transformers, as "
                         "docs/hugging-face.md says")
    if not there:
        raise ValueError(f"{run} has no tokenizer.json: it was trained on data without text, as --data "
                         "synthetic is, or imported without one; train with --data data/stdlib")
    vocabulary = tokenizer.load(run)
    if vocabulary.n_vocab > vocab_size:
        raise ValueError(f"{run}/config.json has vocab_size_used {vocab_size}, tokenizer.json "
                         f"{vocabulary.n_vocab} symbols: they are of two runs; give train.py's --out")
    return vocabulary


def main(argv=None):
    """Print the prompt with its continuation. SystemExit(2) after one line on stderr: wrong input."""
    argv = sys.argv[1:] if argv is None else argv
    with wrong_input(quiet=another_rank_speaks()):
        flags = command_line(Flags, argv, "sample.py", __doc__)
        flags.check()
    if flags.chat:
        chat_main(flags, argv)
        return
    with wrong_input(quiet=another_rank_speaks()):
        refuse_several_ranks()
        cfg, vocab_size, weights, run, said = read_run(flags.run_dir)
        vocabulary = load_vocabulary(run, vocab_size)
        check_objective(cfg, flags, run)
        # All input is read before the model, because the model takes longer.
        if flags.fill:
            ids, mask = read_gaps(cfg, vocabulary, run, flags.fill)
            answer = partial(print_fillings, vocabulary=vocabulary, ids=ids, mask=mask)
        elif flags.serve:
            server = Server(flags.host, flags.port)
            answer = partial(serve, server=server, vocabulary=vocabulary, flags=flags, name=str(run))
        elif flags.score is not None:
            answer = partial(print_scores, documents=read_documents(flags.score, vocabulary))
        else:
            prompts = read_prompts(flags, vocabulary)
            answer = partial(print_samples, vocabulary=vocabulary, prompts=prompts, flags=flags)
        model = load_model(cfg, vocab_size, weights)
        print(said, end="", file=sys.stderr, flush=True)
        answer(model)


def another_rank_speaks():
    """Whether the first of several ranks reports wrong input, and this is another rank."""
    from runtime import launcher
    try:
        return launcher.env_rank() > 0
    except ValueError:  # launch() will say what is wrong
        return False


def refuse_several_ranks():
    """ValueError: a launcher started several processes, each of which would print the same."""
    from runtime import launcher
    name, n_ranks = launcher.started_by()
    if n_ranks != 1:
        with_it = launcher.STARTED_WITH.get(name, name)
        raise ValueError(f"only --chat takes several ranks; leave out {with_it}")


def read_prompts(flags, vocabulary):
    """Return the ids of each --prompt; the default is a line break.

    ValueError: a prompt is empty, and the vocabulary has no end-of-document to start from.
    """
    prompts = [vocabulary.encode_prompt(prompt) for prompt in flags.prompt or ("\n",)]
    if vocabulary.eod is None and not all(prompts):
        raise ValueError("--prompt is empty, and this vocabulary has no end-of-document to start from; "
                         "give at least one character")
    return prompts


def print_samples(model, vocabulary, prompts, flags):
    """Print flags.n samples of each prompt (a list of ids), each below a heading if there are several.

    A token is printed as soon as it is drawn.
    """
    samples = [(prompt, flags.seed + i) for prompt in prompts for i in range(flags.n)]
    model.eval()
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
# A masked language model

CANDIDATES = 5  # tokens that are printed for each gap


def check_objective(cfg, flags, run):
    """Raise ValueError if a masked language model is to continue a text, or a causal one to fill gaps."""
    if cfg.objective == "causal" and flags.fill:
        raise ValueError(f"{run} was trained with --objective causal, which sees no text behind a gap, so "
                         "--fill is not for it; try --prompt")
    if cfg.objective == "mlm" and (flags.prompt or not flags.fill):
        raise ValueError(f"{run} was trained with --objective mlm, which fills gaps and continues no text; "
                         f"give --fill 'a {MASK} in a text' alone")


def read_gaps(cfg, vocabulary, run, text):
    """Return the ids of text, and the id of [MASK].

    ValueError: text has no [MASK], more tokens than a sequence, or a character that the vocabulary lacks; or
    config.json lacks the id.
    """
    saved = load_json(run / "config.json")
    one_past = Range(vocabulary.n_vocab, saved["vocab_size_used"] - 1)  # read_run() has checked this number
    check_schema(saved, {"mask_token": one_past}, run / "config.json")
    mask = saved["mask_token"]

    *before, last = text.split(MASK)
    if not before:
        raise ValueError(f"--fill {text!r} has no {MASK}; for example --fill 'a {MASK} in a text'")
    ids = []
    for piece in before:
        # A byte pair begins with the space in front of its word, so that space belongs to the gap.
        if vocabulary.kind != "char":
            piece = piece.removesuffix(" ")
        ids += vocabulary.encode(piece)
        ids.append(mask)
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
    model.eval()
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

    def refuse(kind, line):
        raise ValueError(f"--score: {line}; mend that document, or leave it out")

    whole = not path.lower().endswith(tuple(text.KINDS))
    spans = text.list_spans(path, sys.maxsize, "text", whole)  # a span is a whole file
    texts = []
    for span in spans:
        texts.extend(text.READERS[span.kind](span, "text", refuse))
    if not texts:
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
    model.eval()
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

def alone(token):
    """Stand in for `agree` on a single rank, which nothing stops."""
    return token, False


class Chat:
    """A conversation: its tokens so far, and the keys and values of the tokens that the model has seen.

    agree: a function of this rank's token that gives the first rank's token, and whether the first rank was
    told to stop. Both are the same on all ranks.
    """

    def __init__(self, model, vocabulary, flags, agree=alone):
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
        try:
            for token in stream(self.model, self.tokens, flags.max_new_tokens, self.cache,
                                temperature=flags.temperature, top_k=flags.top_k, rng=self.rng):
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
        check_objective(cfg, flags, run)
        vocabulary = load_vocabulary(run, vocab_size)
        Template(vocabulary)  # refuses a vocabulary before the model is read
        cfg = chat_config(cfg, flags)
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
    drop_what_fails(sys.stdout)


def chat_config(cfg, flags):
    """Return cfg with the layout that --chat asks for, instead of the layout of the training."""
    # The smallest micro-batch is one token per tp rank.
    return dataclasses.replace(
        cfg, tp=flags.tp, ep=flags.ep, pp=1, cp=1, pp_chunks=1, pp_layers="", zero=0, shard=0,
        micro_batch=flags.tp, rampup_batch_size=(), pdb=-1)


# -----------------------------------------------------------------------------
# --serve

def serve(model, server, vocabulary, flags, name):
    """Let a page in the browser ask, until Ctrl-C. name: of the run, which the page shows."""
    talks = not set(MARKERS) - vocabulary.special.keys()
    settings = {"name": name, "mode": "chat" if talks else "text", "system": flags.system,
                "temperature": flags.temperature}
    seeds = itertools.count(flags.seed)
    server.run(partial(reply, model=model.eval(), vocabulary=vocabulary, flags=flags, seeds=seeds), settings)


def reply(asked, *, model, vocabulary, flags, seeds):
    """Return the pieces of the answer to what a page asks, as interface.serve.ASKED says.

    seeds: an iterator, so that the same question has several answers. ValueError: it cannot be answered.
    """
    if not asked["messages"]:
        raise ValueError("there is no message")
    flags = dataclasses.replace(
        flags, temperature=round(asked["temperature"], 6), system=asked["system"],
        prompt=tuple(asked["messages"][-1:]), seed=next(seeds))
    if asked["mode"] == "text":
        return continuation(model, vocabulary, flags)
    *before, question = asked["messages"]
    chat = Chat(model, vocabulary, flags)
    for role, message in zip(itertools.cycle(("user", "assistant")), before, strict=False):
        chat.tokens += chat.template.message(role, message)
    return chat.answer(question)


def continuation(model, vocabulary, flags):
    """Return the pieces of the text that follows the --prompt. ValueError: it cannot be encoded."""
    prompt, = read_prompts(flags, vocabulary)
    return vocabulary.whole_characters(new_ids(model, vocabulary, prompt, flags), prompt[-1:])


if __name__ == "__main__":
    raise SystemExit(main())
