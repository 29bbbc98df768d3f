"""Text from a checkpoint: python sample.py RUN_DIR --prompt "...", in one process, from any layout.

Several samples: --n COUNT of each --prompt, of which there may be several; the model is loaded once.
A masked language model fills gaps: python sample.py RUN_DIR --fill "a [MASK] in a text".
"""
import dataclasses
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

import checkpoint
import config
from corpus import tokenizer
from tools.command_line import command_line, wrong_input
from tools.schema import Range, check_schema, load_json

Prompts = tyro.conf.UseAppendAction[tuple[str, ...]]
RunDir = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN_DIR")]]


@dataclass(frozen=True)
class Flags:
    """The command line of sample.py."""
    run_dir: RunDir  # directory of a run of train.py, or one of its step_N
    prompt: Prompts = ()  # text to continue; --prompt A --prompt B continues both; default: a line break
    fill: str = ""  # a text with [MASK] in it: print what fills it, by a model of --objective mlm
    n: int = 1  # samples of each prompt; the first is drawn with --seed, the next with --seed + 1, ...
    max_new_tokens: int = 200  # tokens to add
    temperature: float = 0.8  # below 1 favours likely tokens; 0 always takes the likeliest
    top_k: int = 50  # keep the k likeliest tokens; 0 keeps all
    seed: int = 1337  # of the random draws

    RANGES = {"n": (1, 10**6), "max_new_tokens": (0, 10**9), "temperature": (0, 10**6), "top_k": (0, 2**24)}

    def check(self):
        """ValueError for a temperature by which logits cannot be divided."""
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"--temperature {self.temperature} is too small; try 0, the likeliest token")


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


def load_model(cfg, vocab_size, weights):
    """-> the whole model on this process's device, with the weights of a checkpoint.Reader. ValueError: they
    are another model's."""
    from runtime.launch import World  # isort: skip (before torch: it sets how idle threads wait)
    import torch  # not at the top: wrong input is found without the seconds that torch takes

    from model import GPT
    from parallel import make_mesh
    device = (torch.accelerator.current_accelerator() if torch.accelerator.is_available()
              else torch.device("cpu"))
    mesh = make_mesh(World())
    with torch.device("meta"):  # without memory: do all names and shapes fit?
        for name, p in GPT(cfg, mesh, vocab_size).named_parameters():
            weights.fill(name, p[:0], p.full_shape, p.offset)
    with torch.device(device):
        model = GPT(cfg, mesh, vocab_size)
    for name, p in model.named_parameters():
        weights.fill(name, p.data, p.full_shape, p.offset)
    return model


def main(argv=None):
    """Print the prompt with its continuation. SystemExit(2) after one line on stderr: wrong input."""
    with wrong_input():
        flags = command_line(Flags, sys.argv[1:] if argv is None else argv, "sample.py", __doc__)
        flags.check()
        cfg, vocab_size, weights, run, said = read_run(flags.run_dir)
        vocabulary = tokenizer.load(run)
        if vocabulary.n_vocab > vocab_size:
            raise ValueError(f"{run}/config.json has vocab_size_used {vocab_size}, tokenizer.json "
                             f"{vocabulary.n_vocab} symbols: they are of two runs; give train.py's --out")
        check_objective(cfg, flags, run)
        gaps = read_gaps(cfg, vocabulary, run, flags.fill) if flags.fill else None
        prompts = [] if gaps else [vocabulary.encode(prompt) for prompt in flags.prompt or ("\n",)]
        if vocabulary.eod is None and not all(prompts):
            raise ValueError("--prompt is empty, and this vocabulary has no end-of-document to start from; "
                             "give at least one character")
        model = load_model(cfg, vocab_size, weights)
        print(said, end="", file=sys.stderr, flush=True)
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal may lack the text's characters
        if gaps:
            print_fillings(model, vocabulary, *gaps)
        else:
            print_samples(model, vocabulary, prompts, flags)


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
# a masked language model

MASK = "[MASK]"  # in the text of --fill; text that is trained on never gives its id


def check_objective(cfg, flags, run):
    """ValueError: a masked language model is asked to continue a text, or a causal one to fill a gap."""
    if cfg.objective == "causal" and flags.fill:
        raise ValueError(f"{run} was trained with --objective causal, which sees no text behind a gap, so "
                         "--fill is not for it; try --prompt")
    if cfg.objective == "mlm" and (flags.prompt or not flags.fill):
        raise ValueError(f"{run} was trained with --objective mlm, which fills gaps and continues no text; "
                         f"give --fill 'a {MASK} in a text', no --prompt")


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


if __name__ == "__main__":
    main()
