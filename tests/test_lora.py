"""LoRA: its numbers in every layout, what a checkpoint of adapters holds, what merges and what peft reads.

The layouts are compared with the LoRA of plain_muon.py in fp64 to 1e-10: losses, norms, every gradient of
every step, every adapter and moment at the end.
"""
import dataclasses
import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from faults import with_faults
from pool import run_ranks
from runs import TINY, assert_refused, final, go, model_of, refused, rows, same, session
from safetensors.torch import load_file, save_file
from shared import one_process_model
from test_convert import Wide
from test_layouts import BERT, GPT2, LLAMA, STEPS, check, compare, equality, reference, run

import convert
import train
from config import Config
from corpus.samples import Synthetic
from cost.memory import state_bytes
from cost.parameters import Rank, count_parameters
from hub.peft import adapter_config, factors
from model import GPT
from parallel import make_mesh
from runtime import resume
from runtime.launch import World

FLAGS = dict(lora=3, lora_alpha=6.0, micro_batch=2, n_layer=2, clip=0.01)
BASES = {"qwen": dict(LLAMA, qk_norm="head", **FLAGS), "gpt2": dict(GPT2, **FLAGS),
         "bert": dict(BERT, **FLAGS), "one head": dict(LLAMA, **{**FLAGS, "n_kv_head": 1})}


# -----------------------------------------------------------------------------
# The numbers

@pytest.mark.parametrize("name,batch,layout", [
    ("qwen", 4, dict(tp=2, pp=2)), ("qwen", 8, dict(zero=3, shard=2)), ("qwen", 4, dict(tp=4)),
    ("bert", 8, dict(tp=2, zero=3))], ids=str)
def test_layout_equals_the_plain_lora(name, batch, layout):
    compare(BASES[name], 4, batch, **layout)


def frozen_memory(world):
    cfg = Config(**{**BASES["qwen"], "dtype": "fp32", "tp": world.size})
    model, *_ = train.build(cfg, make_mesh(world, cfg.tp), cfg.vocab_size, world.device)
    return [(name, p.is_contiguous(), p.untyped_storage().nbytes(), p.nbytes)
            for name, p in model.named_parameters() if not p.requires_grad]


def test_the_base_takes_no_more_memory_than_a_rank_needs():
    """A share of a matrix is drawn as a window of the whole, and in fp32 nothing else would copy it."""
    for found in run_ranks(2, frozen_memory):
        assert len(found) > 10
        for name, contiguous, storage, nbytes in found:
            assert contiguous and storage == nbytes, name


LAYOUTS = [  # model, ranks, sequences per step, layout
    ("qwen", 1, 4, {}), ("qwen", 2, 4, dict(tp=2)), ("qwen", 2, 4, dict(pp=2)), ("qwen", 2, 4, dict(cp=2)),
    ("qwen", 2, 4, dict(zero=1)), ("qwen", 2, 8, dict(zero=2)), ("qwen", 2, 8, dict(zero=3)),
    ("qwen", 4, 8, dict(tp=2, zero=3)), ("qwen", 4, 8, dict(tp=2, zero=3, recompute="full")),
    ("qwen", 4, 8, dict(zero=1, shard=2)),
    ("qwen", 4, 8, dict(cp=2, zero=3)), ("qwen", 4, 8, dict(pp=2, zero=2)), ("qwen", 4, 8, dict(cp=2, tp=2)),
    ("qwen", 2, 4, dict(tp=2, recompute="full")), ("qwen", 2, 4, dict(tp=2, recompute="selective")),
    ("qwen", 8, 8, dict(cp=2, tp=2, pp=2, zero=1)), ("one head", 2, 4, dict(tp=2, zero=1)),
    ("one head", 4, 4, dict(tp=4)), ("gpt2", 4, 8, dict(tp=2, zero=2)), ("gpt2", 2, 4, dict(pp=2)),
    ("gpt2", 4, 8, dict(pp=2, tp=2)), ("bert", 2, 4, dict(cp=2))]


@pytest.mark.long
@pytest.mark.parametrize("name,n,batch,layout", LAYOUTS, ids=lambda x: str(x).replace(" ", ""))
def test_every_layout_equals_the_plain_lora(name, n, batch, layout):
    compare(BASES[name], n, batch, **layout)


def no_sum_over_tp(original, self, *args):
    """What is not cut counts as if each tp rank had its whole gradient."""
    original(self, *args)
    for p in (self.A, self.B):
        p.reduction_axis = "dp"


def test_a_factor_that_is_not_summed_over_tp_is_caught():
    base, faults = BASES["qwen"], [("layers.Adapter.__init__", no_sum_over_tp)]
    results = run_ranks(2, with_faults, faults, run, dict(base, tp=2), 4)
    with pytest.raises(AssertionError):
        check(base, results, reference(base, 4, 1))


def kept_state(world, flags):
    cfg = Config(**flags, global_batch=4)
    mesh = make_mesh(world, cfg.tp, cfg.pp)
    model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
    before = {name: p.detach().clone() for name, p in model.named_parameters()
              if p.untyped_storage().nbytes()}
    source = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed)
    batches = train.micro_batches(cfg, mesh, source, 0, 4, world.device)
    train.Step(cfg, model, data_parallel, opt)(batches, 1)
    named = dict(model.named_parameters())
    for name in before:
        if ".lora." not in name:
            assert torch.equal(before[name], named[name]) and named[name].grad is None, name
    frozen = [p for p in model.parameters() if not p.requires_grad]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in frozen}
    return {"dtypes": {p.dtype for p in model.parameters()},
            "trained": {name for bucket in data_parallel.buckets for name in bucket.names},
            "moments": sum(m.numel() for moment in opt.moments().values() for m in moment),
            "whole": sum(storages.values()),
            "slices": sum(bucket.own.numel() for bucket in data_parallel.frozen_buckets),
            "frozen": sum(p.numel() for p in frozen)}


def test_only_adapters_are_trained_and_zero_3_shares_out_the_rest():
    flags = dict(BASES["qwen"], dtype="bf16")
    (alone,) = run_ranks(1, kept_state, flags)
    assert alone["dtypes"] == {torch.bfloat16}
    assert alone["trained"] and all(".lora." in name for name in alone["trained"])
    cfg = Config(**flags)
    assert alone["moments"] == 2 * count_parameters(cfg, cfg.vocab_size)["adapters"]
    assert alone["whole"] == 2 * alone["frozen"], "bf16, every rank has the base"
    for rank in run_ranks(2, kept_state, dict(flags, zero=3)):
        matrices = alone["frozen"] - 16 * 5 - 2 * 2 * 4  # without norms
        padding = 4 * 128
        assert matrices / 2 <= rank["slices"] <= matrices / 2 + padding


# -----------------------------------------------------------------------------
# The planner

def test_the_planner_counts_the_adapters_alone():
    cfg = Config(**dict(BASES["qwen"], dtype="bf16", global_batch=4))
    mesh = make_mesh(World(), groups=False)
    total = count_parameters(cfg, cfg.vocab_size)["total"]
    trained = count_parameters(cfg, cfg.vocab_size)["adapters"]
    parts = state_bytes(Rank(cfg, mesh, cfg.vocab_size))
    assert parts["weights"] == 2 * total
    assert parts["optimizer"] == trained * 10, "half a master and two moments in fp32"
    assert parts["gradients"] <= trained * 4


# -----------------------------------------------------------------------------
# Runs

LORA = ["--lora=2", "--lora-alpha=3", "--dtype=fp64", "--save-every=2"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("lora") / "base"
    go(1, out, "--steps=2", "--dtype=fp64")
    return out


@pytest.fixture(scope="module")
def tuned(base):
    out = base.parent / "tuned"
    said = go(2, out, f"--init-from={base}", *LORA, "--steps=4", "--tp=2")["out"]
    assert f"adapters start on top of {base}/step_000002, which stays as it is" in said
    return out


def test_a_checkpoint_holds_adapters_alone_and_a_resume_is_exact(base, tuned, tmp_path):
    tensors, meta = final(tuned, 4)
    assert all(".lora." in name for name in tensors) and meta["base"]["path"] == str(base / "step_000002")
    flags = [*LORA, "--tp=2", "--decay-steps=4"]
    go(2, tmp_path / "cut", f"--init-from={base}", *flags, "--steps=2")
    go(2, tmp_path / "cut", "--resume=auto", *flags, "--steps=4")
    same(tuned, tmp_path / "cut", 4)
    assert rows(tuned) == rows(tmp_path / "cut")


def test_the_merged_model_is_the_one_that_was_trained(tuned):
    """W + alpha/R B A, written out; and the logits of the model with its adapters beside the matrices."""
    cfg, vocab_size, weights, _, _ = convert.read_run(tuned)
    assert cfg.lora == 0
    tensors, meta = final(tuned, 4)
    whole, _ = final(Path(meta["base"]["path"]).parent, 2)
    for name, entry in weights.index["tensors"].items():
        out = torch.empty(entry["shape"], dtype=torch.float64)
        weights.fill(name, out, entry["shape"], [0] * out.ndim)
        layer, want = name.removesuffix(".weight"), whole[name]
        if f"{layer}.lora.A" in tensors:
            assert tensors[f"{layer}.lora.B"].any()
            want = want + 3 / 2 * tensors[f"{layer}.lora.B"] @ tensors[f"{layer}.lora.A"]
            half = torch.empty((out.size(0) // 2, out.size(1) // 2), dtype=torch.float64)
            weights.fill(name, half, entry["shape"], list(half.shape))
            torch.testing.assert_close(half, out[half.size(0):, half.size(1):], rtol=0, atol=1e-15)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-14)
    ids = torch.arange(16).view(2, 8)
    logits = []
    for source in (weights, Both(weights.own, weights.base)):
        model = GPT(cfg if source is weights else weights.cfg, make_mesh(World()), vocab_size).double()
        for name, p in model.named_parameters():
            source.fill(name, p.data, p.full_shape, p.offset)
        logits.append(model(ids)[0].detach())
    torch.testing.assert_close(*logits, rtol=0, atol=1e-10 * logits[0].abs().max().item())


class Both:
    """The adapters and the base, each tensor as it was trained."""

    def __init__(self, own, base):
        self.own, self.base = own, base

    def fill(self, name, *args):
        (self.own if ".lora." in name else self.base).fill(name, *args)


def test_errors_of_one_line(base, tuned, tmp_path):
    def tell(*flags):
        argv = [*TINY, f"--out={tmp_path / 'new'}", *LORA, "--steps=3", *flags]
        return run_ranks(1, session, argv)[0]
    assert_refused(tell(), "--lora 2 fine-tunes a model that is there", "--init-from RUN")
    assert_refused(tell("--resume", str(tuned / "step_000002"), "--lora=3"), "--lora 2 (this run: 3)")
    assert_refused(tell(f"--init-from={base}", "--n-experts=4"), "no adapters for the matrices of experts")
    assert_refused(tell(f"--init-from={base}", "--vocab-size=101"), "give --vocab-size 100")
    assert_refused(tell(f"--init-from={tuned}", "--lora=0"), "--lora 2 (this run: 0)")


def test_a_run_goes_on_when_the_run_of_its_base_has_gone_on(base, tuned, tmp_path):
    """The base is where it was, or among the checkpoints of --init-from."""
    first = tmp_path / "first"
    shutil.copytree(base, first)
    flags = [f"--init-from={first}", *LORA, "--resume=auto", "--save-every=2"]
    go(1, tmp_path / "run", *flags, "--steps=2")
    go(1, tmp_path / "other", "--steps=3", "--save-every=3", "--dtype=fp64", "--seed=5")
    shutil.copytree(tmp_path / "other/step_000003", first / "step_000003")  # newer, with other weights
    go(1, tmp_path / "run", *flags, "--steps=4")
    assert final(tmp_path / "run", 4)[1]["base"]["path"] == str(first / "step_000002")
    elsewhere = [f"--init-from={tmp_path / 'other'}", *flags[1:]]
    go(1, tmp_path / "run", *elsewhere, "--steps=5")
    assert final(tmp_path / "run", 5)[1]["base"]["path"] == str(first / "step_000002")
    (first / "step_000002").rename(first / "step_000001")
    go(1, tmp_path / "run", *flags, "--steps=6")
    assert final(tmp_path / "run", 6)[1]["base"]["path"] == str(first / "step_000001")


# -----------------------------------------------------------------------------
# transformers and peft

@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A run of a small Qwen3, exported, imported, fine-tuned by adapters; fp64."""
    folder = tmp_path_factory.mktemp("qwen")
    flags = ["--qk-norm=head", "--dtype=fp64", "--norm-eps=1e-6"]
    go(1, folder / "first", *flags, "--steps=1")
    convert.main(["export", str(folder / "first"), "--out", str(folder / "theirs"), "--dtype=fp64"])
    convert.main(["import", str(folder / "theirs"), "--out", str(folder / "base")])
    go(2, folder / "tuned", f"--init-from={folder / 'base'}", *flags, "--vocab-size=100", *LORA, "--steps=2",
       "--pp=2")
    return folder


def test_adapters_go_to_peft_and_come_back(qwen, tmp_path):
    """The same tensors under peft's names; a matrix that peft left out gets an adapter of zeros."""
    convert.main(["peft", str(qwen / "tuned"), "--out", str(tmp_path / "peft"), "--dtype=fp64", "--base=x/y"])
    told = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"], told["base_model_name_or_path"]) == (2, 3, "x/y")
    theirs = load_file(tmp_path / "peft/adapter_model.safetensors")
    ours, _ = final(qwen / "tuned", 2)
    name = "base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"
    assert torch.equal(theirs[name], ours["blocks.1.attn.wo.lora.B"])
    come_in(qwen, tmp_path / "peft", tmp_path / "back")
    back, _ = final(tmp_path / "back", 0)
    assert len(back) == len(theirs) and all(torch.equal(back[name], ours[name]) for name in back)

    del theirs[name], theirs[name.replace("lora_B", "lora_A")]
    save_file(theirs, tmp_path / "peft/adapter_model.safetensors")
    come_in(qwen, tmp_path / "peft", tmp_path / "fewer")
    fewer, _ = final(tmp_path / "fewer", 0)
    assert not fewer["blocks.1.attn.wo.lora.A"].any() and not fewer["blocks.1.attn.wo.lora.B"].any()
    said = go(1, tmp_path / "on", f"--init-from={tmp_path / 'fewer'}", "--qk-norm=head", "--norm-eps=1e-6",
              "--vocab-size=100", *LORA, "--steps=2")["out"]
    assert f"starts from the weights of {tmp_path}/fewer/step_000000, with a fresh optimizer" in said
    trained, _ = final(tmp_path / "on", 2)
    assert not trained["blocks.1.attn.wo.lora.B"].any() and trained["blocks.0.attn.wo.lora.B"].any()


def come_in(qwen, folder, out):
    convert.main(["import", str(folder), "--base", str(qwen / "base"), "--out", str(out)])


def test_what_peft_computes_in_another_way_is_refused(qwen, tmp_path):
    folder = tmp_path / "peft"
    convert.main(["peft", str(qwen / "tuned"), "--out", str(folder)])
    path = folder / "adapter_config.json"
    plain = json.loads(path.read_text())
    path.write_text(json.dumps({**plain, "init_lora_weights": "gaussian", "alora_invocation_tokens": None}))
    come_in(qwen, folder, tmp_path / "same")
    refused(convert.main, ["import", folder, "--base", qwen / "tuned", "--out", tmp_path / "out"],
            "holds adapters itself", f"give {qwen / 'base' / 'step_000000'}")
    refused(convert.main, ["peft", qwen / "base", "--out", tmp_path / "out"], "has no adapters")


def peft_model(qwen, peft, hf, adapters=None):
    """transformers' model of the base in fp64, with adapters by peft: those of a folder, or new ones."""
    with Wide():
        model = hf.AutoModelForCausalLM.from_pretrained(
            qwen / "theirs", dtype=torch.float64, attn_implementation="eager")
    if adapters:
        return peft.PeftModel.from_pretrained(model, adapters, autocast_adapter_dtype=False)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=6, lora_dropout=0.0, target_modules=names, bias="none")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


@pytest.mark.long
def test_peft_reads_our_adapters(qwen, hf, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    convert.main(["peft", str(qwen / "tuned"), "--out", str(tmp_path / "peft"), "--dtype=fp64"])
    convert.main(["export", str(qwen / "tuned"), "--out", str(tmp_path / "merged"), "--dtype=fp64"])
    model = model_of(qwen / "tuned", dtype="fp64")
    ids = torch.arange(16).view(2, 8)
    ours = model(ids)[0][:, :model.vocab_size].detach()
    adapted = peft_model(qwen, peft, hf, tmp_path / "peft")
    with Wide():
        merged = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64,
                                                         attn_implementation="eager")
        found = [each(ids).logits.flatten(0, 1).detach() for each in (adapted, merged)]
    without = model.blocks["0"].attn.wo.weight
    assert without.dtype == torch.float64
    for logits in found:
        torch.testing.assert_close(logits, ours, rtol=0, atol=1e-10 * ours.abs().max().item())


def with_base(original, *args, path):
    """train.build, whose model then reads a base."""
    model, data_parallel, opt = original(*args)
    resume.init_from(model, opt, path)
    return model, data_parallel, opt


@pytest.mark.long
def test_training_is_that_of_peft(qwen, hf):
    """fp64: losses, every gradient, adapters after three steps, to 1e-10; one process and six layouts."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    cfg, vocab_size, _, _, _ = convert.read_run(qwen / "base")
    flags = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    flags.update(lora=3, lora_alpha=6.0, dtype="fp64", lr=1e-2, warmup=0, weight_decay=0.1, clip=0.0,
                 steps=10, vocab_size=vocab_size, micro_batch=2)
    del flags["global_batch"]
    start = dict(one_process_model(Config(**flags)).named_parameters())
    model = peft_model(qwen, peft, hf)
    parameters = dict(model.named_parameters())
    theirs = {}
    for name, (ours, _) in factors(cfg, 3, vocab_size).items():
        theirs[ours] = parameters[name.replace(".weight", ".default.weight")]
        theirs[ours].data.copy_(start[ours])
    assert {p for p in model.parameters() if p.requires_grad} == set(theirs.values())
    optimizer = torch.optim.AdamW(theirs.values(), lr=1e-2, betas=(cfg.beta1, cfg.beta2), weight_decay=0.1)
    source = Synthetic(vocab_size, cfg.seq_len, cfg.seed)
    losses, want = [], {}
    for t in range(1, STEPS + 1):
        x, y = source.batch(4 * (t - 1), 4)
        optimizer.param_groups[0]["lr"] = train.learning_rate(Config(**flags), t)
        optimizer.zero_grad()
        with Wide():
            loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
        loss.backward()
        losses.append(loss.item())
        want.update({f"step {t} grad {name}": p.grad.numpy().copy() for name, p in theirs.items()})
        optimizer.step()
    for name, p in theirs.items():
        want["end " + name] = p.detach().numpy()
        for key in ("exp_avg", "exp_avg_sq"):
            want[f"end {key}/{name}"] = optimizer.state[p][key].numpy()

    worst = 0.0
    for n, layout in [(1, {}), (2, dict(tp=2)), (2, dict(pp=2)), (2, dict(cp=2)), (2, dict(zero=1)),
                      (2, dict(zero=3)), (4, dict(tp=2, pp=2))]:
        of_the_base = "train.build", functools.partial(with_base, path=str(qwen / "base"))
        results = run_ranks(n, with_faults, [of_the_base], run, {**flags, **layout}, 4)
        got = equality.assemble(results)
        for seen in results:
            worst = max([worst, *(abs(row[0] / b - 1) for row, b in zip(seen["stats"], losses, strict=True))])
        worst = max([worst, *equality.errors(got, want, flags).values()])
        assert worst <= 1e-10, (layout, worst)
    print(f"\nthe largest difference from peft: {worst:.1e}")


def test_adapters_start_as_those_of_peft():
    """A is spread as a uniform draw up to 1/sqrt(n_in), B is zero."""
    cfg = Config(**{**BASES["gpt2"], "n_embd": 256, "ffn_hidden": 1024, "lora": 16})
    model = one_process_model(cfg)
    for name, p in model.named_parameters():
        if name.endswith("lora.A"):
            assert p.std().item() == pytest.approx((3 * p.size(1)) ** -0.5, rel=0.05), name
        elif name.endswith("lora.B"):
            assert not p.any(), name


def test_peft_finds_the_modules_that_have_adapters():
    """In a masked model the last part of a name would also be that of a module of the head."""
    modules = ["encoder.0.attention.query", "encoder.0.dense"]
    names = [f"base_model.model.{module}.lora_A.weight" for module in modules]
    assert adapter_config(Config(objective="mlm", lora=2), names, "base")["target_modules"] == modules
