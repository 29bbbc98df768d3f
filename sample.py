"""Text from a checkpoint: python sample.py RUN_DIR --prompt "...", in one process, from any layout."""
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

import checkpoint
import config
from corpus import tokenizer

RunDir = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN_DIR")]]


@dataclass(frozen=True)
class Flags:
    """The command line of sample.py."""
    run_dir: RunDir  # directory of a run of train.py, or one of its step_N
    prompt: str = "\n"  # text to continue
    max_new_tokens: int = 200  # tokens to add
    temperature: float = 0.8  # below 1 favours likely tokens; 0 always takes the likeliest
    top_k: int = 50  # keep the k likeliest tokens; 0 keeps all
    seed: int = 1337  # of the random draws


def read_run(run_dir):
    """A run or one of its checkpoints -> (Config, vocabulary size, checkpoint.Reader, directory of the run).

    ValueError, OSError: no run, or no sound checkpoint.
    """
    run = Path(run_dir)
    step = run if run.name.startswith("step_") else None
    run = run.parent if step else run
    if not (run / "config.json").exists():
        raise FileNotFoundError(f"{run} holds no config.json; give the --out directory of a run of train.py")
    index = checkpoint.check(step) if step else None
    step = step or checkpoint.newest(run)
    if step is None:
        raise FileNotFoundError(f"{run} holds no sound checkpoint; train with --save-every N")
    known = {f.name for f in dataclasses.fields(config.Config)}
    try:
        saved = json.loads((run / "config.json").read_text())
        cfg = config.Config(**{k: v for k, v in saved.items() if k in known})
        return cfg, saved["vocab_size_used"], checkpoint.Reader(step, index), run
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as e:
        raise ValueError(f"{run}/config.json is no run's ({e!r}); give train.py's --out") from None


def load_model(cfg, vocab_size, weights):
    """-> the whole model on this process's device, with the weights of a checkpoint.Reader."""
    import torch  # not at the top: wrong input is found without the seconds that torch takes

    from model import GPT
    from parallel import make_mesh
    from runtime.launch import World
    device = (torch.accelerator.current_accelerator() if torch.accelerator.is_available()
              else torch.device("cpu"))
    with torch.device(device):
        model = GPT(cfg, make_mesh(World()), vocab_size)
    for name, p in model.named_parameters():
        weights.fill(name, p.data, p.full_shape, p.offset)
    return model


def main(argv=None):
    """Print the prompt with its continuation. SystemExit(2) after one line on stderr: wrong input."""
    with config.wrong_input():
        flags = config.command_line(Flags, sys.argv[1:] if argv is None else argv, "sample.py", __doc__)
        cfg, vocab_size, weights, run = read_run(flags.run_dir)
        vocabulary = tokenizer.load(run)
        prompt = vocabulary.encode(flags.prompt)
    model = load_model(cfg, vocab_size, weights)
    from pipeline import generate
    ids = generate(model, prompt, flags.max_new_tokens, flags.temperature, flags.top_k, flags.seed)
    print(vocabulary.decode(ids))


if __name__ == "__main__":
    main()
