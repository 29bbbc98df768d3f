"""Text from a checkpoint: python sample.py RUN_DIR --prompt "...", in one process, from any layout."""
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import checkpoint
import config
from corpus import tokenizer


@dataclass(frozen=True)
class Flags:
    run: str  # directory of a run, or one of its step_N
    prompt: str = "\n"  # text to continue
    max_new_tokens: int = 200  # tokens to add
    temperature: float = 0.8  # 0 takes the likeliest token
    top_k: int = 50  # keep the k likeliest tokens; 0 keeps all
    seed: int = 1337  # of the draws


def read(run):
    """-> (Config, vocabulary size, checkpoint, run directory). ValueError, OSError: nothing sound to read."""
    run = Path(run)
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


def main(argv=None):
    import tyro
    flags = tyro.cli(Flags, args=argv, prog="sample.py", description=__doc__,
                     config=(tyro.conf.PositionalRequiredArgs,))
    try:
        cfg, vocab_size, weights, run = read(flags.run)
        words = tokenizer.load(run)
        prompt = words.encode(flags.prompt)
    except (ValueError, OSError) as e:
        print(f"nanoshard: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    import torch  # after the cheap checks

    from model import GPT, generate
    from parallel import make_mesh
    from runtime.launch import World
    device = (torch.accelerator.current_accelerator() if torch.accelerator.is_available()
              else torch.device("cpu"))
    with torch.device(device):
        model = GPT(cfg, make_mesh(World()), vocab_size)
    for name, p in model.named_parameters():
        weights.fill(name, p.data, p.full_shape, p.offset)
    print(words.decode(generate(model, prompt, flags.max_new_tokens, flags.temperature, flags.top_k,
                                flags.seed)))


if __name__ == "__main__":
    main()
