"""Text from a checkpoint: python sample.py RUN_DIR --prompt "...", in one process, from any layout.

Several samples: --n COUNT of each --prompt, of which there may be several; the model is loaded once.
"""
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from convert import read_run
from corpus import tokenizer
from tools.command_line import command_line, wrong_input

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

    RANGES = {"n": (1, 10**6), "max_new_tokens": (0, 10**9), "temperature": (0, 10**6), "top_k": (0, 2**24)}

    def check(self):
        """ValueError for a temperature by which logits cannot be divided."""
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"--temperature {self.temperature} is too small; try 0, the likeliest token")


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
    for name, t in model.named_buffers():  # the routers' biases, which choose the experts
        weights.fill(name, t, tuple(t.shape), (0,) * t.ndim)
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
        prompts = [vocabulary.encode_prompt(prompt) for prompt in flags.prompt or ("\n",)]
        if vocabulary.eod is None and not all(prompts):
            raise ValueError("--prompt is empty, and this vocabulary has no end-of-document to start from; "
                             "give at least one character")
        model = load_model(cfg, vocab_size, weights)
        print(said, end="", file=sys.stderr, flush=True)
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal may lack the text's characters
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


if __name__ == "__main__":
    main()
