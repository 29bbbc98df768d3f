"""A new flag of the model says what its author forgot: what it is to a checkpoint, the planner, the export.

Every field of Config is declared by flag(). The last tests plant a flag, --qk-norm, into a copy of the tree,
each time with something forgotten, and want it named.
"""
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import typing

import pytest
import torch
from pool import ROOT

import config
from config import Config, flags_of_kind
from cost.parameters import count_parameters
from model import GPT
from parallel import make_mesh
from runtime.launch import World

ONE = make_mesh(World(), groups=False)

# -----------------------------------------------------------------------------
# declarations

def test_every_flag_says_what_it_is():
    kinds = {"shape", "meaning", "data", "free", "silent"}
    both = {"seq_len", "norm"}  # of which some values' tensors fit each other
    assert set(flags_of_kind("shape")) & set(flags_of_kind("meaning")) == both
    names = [name for kind in kinds for name in flags_of_kind(kind)]
    assert sorted(names) == sorted([*config.FLAGS, *both])
    for name, said in config.FLAGS.items():
        assert said["needs"].partition("=")[0] in {"", *config.FLAGS}, name


@pytest.mark.parametrize("field,words", [
    ("qk_norm: bool = False", "Config.qk_norm does not say what it means to a checkpoint"),
    ("qk_norm: bool = config.flag(False)", "Config.qk_norm does not say what it means to a checkpoint"),
    ("window: int = config.flag(0, 'meaning')", "Config.window is a number without a range")])
def test_a_flag_that_does_not_say_what_it_is_is_named(field, words):
    scope = {"config": config}
    exec(f"import dataclasses\n@dataclasses.dataclass\nclass Config:\n    {field}", scope)
    with pytest.raises(TypeError, match=words):
        config.declaration(dataclasses.fields(scope["Config"])[0])


# -----------------------------------------------------------------------------
# the planner

BASES = {
    "llama": dict(n_head=8, n_kv_head=4, vocab_size=100),
    "gpt2": dict(config.GPT2, n_head=8, n_kv_head=8, vocab_size=100),
    "bert": dict(config.GPT2, objective="mlm", n_head=8, n_kv_head=8, vocab_size=100),
    "experts": dict(n_head=8, n_kv_head=4, n_experts=4, vocab_size=100)}
# Another value of each number. Of a switch or a choice the test takes every other value by itself.
NUMBERS = {"n_layer": 3, "n_head": 16, "n_kv_head": 2, "n_embd": 64, "ffn_hidden": 96, "seq_len": 32,
           "norm_eps": 1e-6, "n_experts": 8, "n_shared_experts": 2, "vocab_size": 300, "rope_base": 500.0,
           "top_k": 1, "capacity_factor": 1.5, "router_bias_rate": 1e-3}


def other_values(name, value):
    """The values to which the test changes a flag that is `value`."""
    field = next(f for f in dataclasses.fields(Config) if f.name == name)
    if typing.get_origin(field.type) is typing.Literal:
        return [other for other in typing.get_args(field.type) if other != value]
    if field.type is bool:
        return [not value]
    assert name in NUMBERS, f"--{name.replace('_', '-')} changes the model: give NUMBERS another value of it"
    return [NUMBERS[name]]


@pytest.mark.parametrize("name", dict.fromkeys(flags_of_kind("shape") + flags_of_kind("meaning")))
def test_the_planner_counts_what_a_flag_of_the_model_changes(name):
    """count_parameters is a formula; the model that is built is the truth."""
    for base, flags in BASES.items():
        start = Config(**flags)
        for value in other_values(name, getattr(start, name)):
            cfg = dataclasses.replace(start, **{name: value})
            if cfg.n_shared_experts and not cfg.n_experts:
                continue  # check() refuses it
            with torch.device("meta"):
                model = GPT(cfg, ONE, cfg.vocab_size)
            built = sum(p.numel() for p in model.parameters())
            counted = count_parameters(cfg, cfg.vocab_size)["total"]
            assert counted == built, (
                f"with --{name.replace('_', '-')} {value} count_parameters (cost/parameters.py) is "
                f"{counted - built} parameters off a model like {base}")


# -----------------------------------------------------------------------------
# A flag is planted

FIELD = "\n    # RMSNorm of each query and key, before the rotation\n    qk_norm: bool = {}\n"
CONSTRUCTOR = """
        self.q_norm = self.k_norm = None
        if cfg.qk_norm:
            self.q_norm, self.k_norm = (HeadNorm(cfg, mesh) for _ in range(2))
"""
MODULE = '''

class HeadNorm(Norm):
    """RMSNorm over the width of a head."""

    def __init__(self, cfg, mesh):
        super().__init__(cfg, mesh)
        self.weight = parameter((cfg.n_embd // cfg.n_head,), mesh)


def norm_heads(attn, qk):  # (B, t, h + g, D) -> same
    if attn.q_norm is None:
        return qk
    q, k = qk.split([attn.h, attn.g], dim=2)
    return torch.cat([attn.q_norm(q), attn.k_norm(k)], dim=2)
'''
RUNS = """
import json, sys
sys.path.insert(0, "tests")
from runs import TINY, session
from runtime.launch import World
import convert

def run(out, *flags):
    result = session(World(), [*TINY, f"--out={out}", *flags])
    return result["code"], result["err"] + result["out"]

print(json.dumps({
    "trained": run("out/with", "--qk-norm", "--steps=1"),
    "same": run("out/with", "--qk-norm", "--steps=2", "--resume=auto"),
    "without": run("out/with", "--steps=3", "--resume=auto"),
    "plain": run("out/plain", "--steps=1"),
    "added": run("out/plain", "--qk-norm", "--steps=2", "--resume=auto"),
    "from": run("out/new", "--init-from=out/with", "--steps=1")}))
try:
    convert.main(["export", "out/with", "--out", "out/hf"])
except SystemExit:
    pass
"""


def plant(tmp_path, declaration):
    """A copy of the tree with --qk-norm in Config and model.py, and nowhere else -> its path."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "data", "out"))
    path = copy / "config.py"
    path.write_text(once(r"\n    tied: bool = .*\n", lambda found: found + FIELD.format(declaration),
                         path.read_text()))
    path = copy / "model.py"
    head, name, tail = path.read_text().partition("\nclass Attention")
    tail = tail.replace("super().__init__()\n", "super().__init__()" + CONSTRUCTOR, 1)
    tail = once(r"rotate\(qk, cos, sin\)", lambda _: "rotate(norm_heads(self, qk), cos, sin)", tail)
    path.write_text(head + name + tail + MODULE)
    return copy


def once(pattern, new, text):
    """text with the one place that matches the pattern replaced by new(what stands there)."""
    text, count = re.subn(pattern, lambda match: new(match[0]), text)
    assert count == 1, f"{pattern} stands {count} times in the tree: make this test fit it"
    return text


def call(folder, *argv):
    done = subprocess.run([sys.executable, *argv], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_without_a_kind_no_program_starts(tmp_path):
    copy = plant(tmp_path, "False")
    code, _, err = call(copy, "train.py", "--help")
    assert code == 1 and "Config.qk_norm does not say what it means to a checkpoint" in err.splitlines()[-1]


TENSOR = "blocks.0.attn.k_norm.weight"
NO_PLACE = [TENSOR, "for which this model has no place"]
SAID = {  # kind of --qk-norm: words of a resume without it, a resume with it, --init-from without it
    "shape": (["has qk-norm True", "flags say qk-norm False", "give --qk-norm True"],
              ["has qk-norm False", "flags say qk-norm True"],
              ["has qk-norm True", "flags say qk-norm False", "give --qk-norm True"]),
    "meaning": (["trained with qk-norm True", "this run has False", "--resume-changed qk-norm"],
                ["trained with qk-norm False", "this run has True"], NO_PLACE),
    "free": (NO_PLACE, ["holds no blocks.", "_norm.weight"], NO_PLACE)}


@pytest.mark.parametrize("kind", SAID)
def test_resume_and_export_name_what_was_forgotten(kind, tmp_path):
    """As a free flag, which it is not, the checkpoint's tensors name it."""
    code, out, err = call(plant(tmp_path, f'flag(False, "{kind}")'), "-c", RUNS)
    assert code == 0, err
    said = json.loads(out)
    for name in ("trained", "same", "plain"):
        assert said[name][0] == 0, said[name]
    for name, words in zip(("without", "added", "from"), SAID[kind], strict=True):
        code, text = said[name]
        assert code == 2 and all(word in text for word in words), said[name]
    assert err.startswith("nanoshard: blocks.0.attn.q_norm.weight has no name in this family"), err


def test_the_planner_names_the_flag(tmp_path):
    copy = plant(tmp_path, 'flag(False, "shape")')
    code, out, _ = call(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_new_flag.py", "-k",
                        "planner_counts")
    assert code == 1 and "1 failed" in out, out[-3000:]
    said = "with --qk-norm True count_parameters (cost/parameters.py) is -128 parameters off"
    assert said in out, out[-3000:]
