"""Text from a checkpoint: python sample.py RUN_DIR --prompt "...", in one process, from any layout.

A masked language model fills gaps: python sample.py RUN_DIR --fill "a [MASK] in a text".

--score FILE prints {"tokens", "loss", "perplexity"} for each document, in nats per token: the "text" of each
line of a .jsonl file, or a whole text file. Each token is predicted once, from all tokens before it or, where
seq_len is too short, from at least seq_len / 2 of them.

--chat talks with you, by a model that was trained on conversations (prepare.py chat). /reset forgets, Ctrl-D
ends. Several ranks: mpiexec -n 2 python sample.py RUN_DIR --chat --tp 2.
"""
import dataclasses
import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import interface.packages  # noqa: F401  isort: skip (it says in one line which package is missing)
import tyro

from convert import read_run
from corpus import text, tokenizer
from corpus.chat import MARKERS, Template
from corpus.masked import MASK
from corpus.samples import batch_size, open_data
from hub.weights import build
from interface.command_line import command_line, read_run_config, refuse_unread, wrong_input
from interface.files import load_json
from interface.layout import check_layout
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
    step: int = 0  # print the text of this step of the run's training, by rank and micro-batch
    chat: bool = False  # answer questions from the terminal
    serve: bool = False  # talk in the browser, or continue a text there, at http://127.0.0.1:8000
    host: str = "127.0.0.1"  # serve: where to listen; with other addresses, from other machines
    port: int = 8000  # serve: the port; 0 finds a free one
    system: str = ""  # chat, serve: what the system says before the first question
    tp: int = 1  # chat: ranks that split each layer
    ep: int = 1  # chat: ranks that split the experts

    RANGES = {"n": (1, 10**6), "max_new_tokens": (0, 10**9), "temperature": (0, 10**6), "top_k": (0, 2**24),
              "port": (0, 65535), "step": (0, 10**9)}


DRAW = {"max_new_tokens", "temperature", "top_k", "seed"}
READS = {  # {flag that says what is asked for: it, and the flags that it reads}
    "prompt": {"prompt", "n", *DRAW}, "fill": {"fill"}, "score": {"score"}, "step": {"step"},
    "chat": {"chat", "system", "tp", "ep", *DRAW}, "serve": {"serve", "system", "host", "port", *DRAW}}


@wrong_input()
def main(argv=None):
    """Print what the flags ask for. SystemExit(2) after one line on stderr: wrong input."""
    from runtime import launch  # isort: skip (before torch: it sets how idle threads wait)
    with wrong_input(quiet=launch.started_by().rank != 0):  # the others have the same words
        flags = command_line(Flags, sys.argv[1:] if argv is None else argv, "sample.py", __doc__)
        mode = next((name for name in READS if getattr(flags, name)), "prompt")
        refuse_unread(flags, mode, READS)
        if launch.started_by().size > 1 and mode != "chat":
            raise ValueError(f"--{mode} takes one process: leave out the launcher; --chat takes several")
    if mode == "step":
        print_step(Path(flags.run_dir), flags.step)
        return
    world = launch.launch(launch.NO_TIMEOUT, quiet=True) if mode == "chat" else launch.World()
    with world.everyone.input():
        cfg, vocab_size, weights, run, vocabulary = read_run(flags.run_dir)
        if vocabulary is None:
            raise ValueError(f"{run} has no tokenizer.json: train on text, such as --data data/stdlib")
        if (cfg.objective == "mlm") != (mode == "fill"):
            raise ValueError(f"{run} was trained with --objective {cfg.objective}: mlm fills gaps, with "
                             f"--fill 'a {MASK} in a text', and causal continues a text, with --prompt")
        if mode == "chat":
            Template(vocabulary)  # refuses a vocabulary
        # The layout of --chat instead of the training's
        cfg = dataclasses.replace(
            cfg, tp=flags.tp, ep=flags.ep, pp=1, cp=1, pp_chunks=1, pp_layers="", zero=0, shard=0,
            micro_batch=flags.tp, global_batch=0, rampup_batch_size=(), pdb=-1)
        check_layout(cfg, world.size)
        model = load_model(cfg, vocab_size, weights, world).eval()
    answers = {"prompt": print_samples, "fill": print_fillings, "score": print_scores, "chat": converse,
               "serve": serve}
    answers[mode](model, vocabulary, flags)
    del model  # and with it the mesh
    launch.shutdown(world)
    if world.rank == 0:
        print(f"from {weights.path}", file=sys.stderr)


def load_model(cfg, vocab_size, weights, world=None):
    """Return the model with the weights of a checkpoint.Reader, in fp32, cut over the world if there is one.

    No row is dropped for --capacity-factor: a text would have other logits in one read than token by token.
    """
    import torch  # not at the top: wrong input is found without waiting seconds for torch
    device = "cpu"
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    model = build(dataclasses.replace(cfg, fp8=False, capacity_factor=0.0), vocab_size, device, world)
    for name, p in model.named_parameters():
        weights.fill(name, p.data, p.full_shape, p.offset)
    # The buffers are the routers' biases, which choose the experts.
    for name, t in model.named_buffers():
        weights.fill(name, t, tuple(t.shape), (0,) * t.ndim)
    return model


def print_samples(model, vocabulary, flags):
    """Print flags.n samples of each prompt."""
    start = "\n" if "\n" in vocabulary.spec.get("chars", "\n") else vocabulary.decode([0])
    prompts = [vocabulary.encode_prompt(prompt) for prompt in flags.prompt or (start,)]
    samples = [(prompt, flags.seed + i) for prompt in prompts for i in range(flags.n)]
    for number, (prompt, seed) in enumerate(samples, 1):
        if len(samples) > 1:
            print(f"--- sample {number} of {len(samples)}, --seed {seed}")
        show(vocabulary.decode(prompt))
        ids = new_ids(model, prompt, dataclasses.replace(flags, seed=seed))
        for piece in vocabulary.whole_characters(ids, prompt):
            show(piece)
        show("\n")


def new_ids(model, prompt, flags):
    """Yield the tokens that follow a prompt, a list of ids. All ranks call this together."""
    import torch

    from pipeline import stream
    tokens = list(prompt)
    rng = torch.Generator().manual_seed(flags.seed)
    for token in stream(model, tokens, flags.max_new_tokens, temperature=flags.temperature,
                        top_k=flags.top_k, rng=rng):
        # A few bytes from rank 0 to all, over the world: sums of experts may differ in their last bits.
        tokens[-1] = model.mesh.world.everyone.broadcast(token)
        yield tokens[-1]


def print_step(run, number):
    """Print the samples of a step of a run whose batch never changed but by --rampup-batch-size."""
    cfg, _ = read_run_config(run / "config.json")
    vocabulary = tokenizer.load(run)
    source, *_ = open_data(cfg)
    n_ranks = load_json(run / "config.json")["dp"]
    full = cfg.global_batch or cfg.micro_batch * n_ranks
    end = 0
    for _ in range(number):
        count = batch_size(end, full, cfg.rampup_batch_size)
        end += count
    for i in range(count):
        rank, within = divmod(i, count // n_ranks)
        sample = end - count + i
        print(f"--- sample {sample}: rank {rank} of dp, micro-batch {within // cfg.micro_batch}")
        show(vocabulary.decode(source.batch(sample, 1)[0][0].tolist()) + "\n")


def print_fillings(model, vocabulary, flags):
    """Print the text with the likeliest token in each gap, and then the likeliest tokens of each gap."""
    import torch
    mask = vocabulary.n_vocab  # the id of [MASK]
    *before, last = flags.fill.split(MASK)
    if not before:
        raise ValueError(f"--fill {last!r} has no {MASK}; for example --fill 'a {MASK} in a text'")
    ids = []
    for piece in before:
        # A byte pair begins with the space in front of its word, so that space belongs to the gap.
        if vocabulary.kind != "char":
            piece = piece.removesuffix(" ")
        ids += [*vocabulary.encode(piece), mask]
    ids += vocabulary.encode(last)
    if len(ids) > model.cfg.seq_len:
        raise ValueError(f"--fill has {len(ids)} tokens, a sequence has {model.cfg.seq_len}; give less text")

    ids = torch.tensor(ids, device=next(model.parameters()).device)
    with torch.no_grad():
        logits, _ = model(ids.unsqueeze(0))  # (t, V), of all gaps at once
    p = logits[:, :model.vocab_size].float().softmax(1)[:, :mask]  # of all tokens but [MASK], the last
    values, tokens = p.topk(min(5, mask))  # (t, 5)
    show(vocabulary.decode(torch.where(ids == mask, tokens[:, 0], ids).tolist()) + "\n")
    gaps = (ids == mask).nonzero().flatten().tolist()
    for number, i in enumerate(gaps, 1):
        pairs = zip(values[i].tolist(), tokens[i].tolist(), strict=True)
        likeliest = ", ".join(f"{vocabulary.decode([token])!r} {100 * value:.1f} %" for value, token in pairs)
        print(f"{MASK} {number}: {likeliest}", flush=True)


def print_scores(model, vocabulary, flags):
    """Print a line of JSON for each document of a file."""
    start = [] if vocabulary.eod is None else [vocabulary.eod]
    [file] = text.list_files(flags.score, "text")
    for document in text.texts(file, "text"):
        ids = [*start, *vocabulary.encode(document)]
        row = {"tokens": max(0, len(ids) - 1), "loss": None, "perplexity": None}
        if row["tokens"]:
            row["loss"] = total_loss(model, ids) / row["tokens"]
            row["perplexity"] = math.exp(row["loss"])
        print(json.dumps(row), flush=True)


def total_loss(model, ids):
    """Return the sum of -log p(token) in nats, a float, over all tokens but the first."""
    import torch
    import torch.nn.functional as F
    window = model.cfg.seq_len
    ids = torch.tensor(ids, device=next(model.parameters()).device)
    inputs = ids[:-1]
    targets = ids[1:]
    total = 0.0
    done = 0  # targets that are predicted
    with torch.no_grad():
        while done < len(targets):
            # The window of inputs before `end` predicts those targets that no earlier window has predicted.
            end = min(len(targets), max(window, done + max(1, window // 2)))
            logits, _ = model(inputs[max(0, end - window):end].unsqueeze(0))  # (t, V), t <= window
            logits = logits[done - end:, :model.vocab_size].float()
            total += F.cross_entropy(logits, targets[done:end], reduction="sum").item()
            done = end
    return total


def answer(model, vocabulary, flags, said):
    """Return the pieces of the answer to a conversation: what the user and the assistant said, in turn."""
    template = Template(vocabulary)
    messages = [{"role": role, "content": content}
                for role, content in zip(itertools.cycle(("user", "assistant")), said, strict=False)]
    if flags.system:
        messages = [{"role": "system", "content": flags.system}, *messages]
    prompt, _ = template.conversation(messages)
    ids = new_ids(model, [*prompt, template.role_ids["assistant"]], flags)
    ends = vocabulary.special.values()
    return vocabulary.whole_characters(itertools.takewhile(lambda token: token not in ends, ids))


def converse(model, vocabulary, flags):
    """Answer questions that rank 0 reads until there are no more; rank 0 prints."""
    everyone = model.mesh.world.everyone
    say = show if everyone.rank == 0 else len
    said = []
    # A line from rank 0 to all, over the world
    while (question := everyone.broadcast(read_line() if everyone.rank == 0 else None)) is not None:
        pieces = []
        try:
            if question == "/reset":
                said = []
            elif question:
                drawn = dataclasses.replace(flags, seed=flags.seed + len(said))
                for piece in answer(model, vocabulary, drawn, [*said, question]):
                    say(piece)
                    pieces.append(piece)
                say("\n")
                said += [question, "".join(pieces)]
        except ValueError as e:  # a character that the vocabulary lacks, on all ranks alike
            say(f"nanoshard: {e}\n")


def read_line():
    """Return the next typed line; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def serve(model, vocabulary, flags):
    """Let a page in the browser ask, until Ctrl-C."""
    talks = set(MARKERS) <= vocabulary.special.keys()
    settings = {"name": flags.run_dir, "mode": "chat" if talks else "text", "temperature": flags.temperature}
    seeds = itertools.count(flags.seed)
    Server(flags.host, flags.port).run(
        lambda asked: reply(asked, model, vocabulary, flags, next(seeds)), settings)


def reply(asked, model, vocabulary, flags, seed):
    """Return the pieces of the answer to what the page interface/serve.html asks."""
    flags = dataclasses.replace(flags, temperature=max(0.0, asked["temperature"] or 0.0), seed=seed)
    if asked["mode"] == "chat":
        return answer(model, vocabulary, flags, asked["messages"])
    *_, text = asked["messages"]
    prompt = vocabulary.encode_prompt(text)
    return vocabulary.whole_characters(new_ids(model, prompt, flags), prompt)


if __name__ == "__main__":
    raise SystemExit(main())
