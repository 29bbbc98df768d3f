"""convert.py: models and tokenizers of Hugging Face, in and out, against transformers itself.

transformers computes norms, rotary positions and routers in fp32 whatever the model's dtype is. Inside Wide()
it computes them in fp64, so that logits and gradients can be compared to 1e-10.
"""
import dataclasses
import json
import random
import weakref
from pathlib import Path

import pytest
import test_import
import torch
import torch.nn.functional as F
from runs import go, model_of, refused
from safetensors.torch import load_file, save_file
from test_import import VOCAB, WINDOWS
from torch.overrides import TorchFunctionMode

import convert
import prepare
from corpus import chat, tokenizer
from hub import families, weights
from hub import tokenizer as tokenizer_json
from interface.command_line import parse

T = 16


class Wide(TorchFunctionMode):
    """Whatever asks for fp32 gets fp64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widen(x):
            return torch.float64 if x is torch.float32 else x
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(widen, args), **{k: widen(v) for k, v in (kwargs or {}).items()})


def tokens():
    """Return inputs and targets, (2, T) each."""
    ids = torch.randint(VOCAB, (2, T + 1), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:]


def close(a, b, what):
    scale = max(a.abs().max().item(), b.abs().max().item(), 1e-30)
    assert a.shape == b.shape and (a - b).abs().max().item() <= 1e-10 * scale, what


def theirs(hf, folder, out):
    """A directory of Hugging Face, run by transformers -> logits (2T, V), gradients by their names."""
    x, y = tokens()
    with Wide():
        model = hf.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
        logits = model.eval()(x).logits.flatten(0, 1)
        F.cross_entropy(logits, y.flatten(), reduction="sum").backward()
        for p in model.parameters():
            p.data = torch.zeros_like(p) if p.grad is None else p.grad
        model.save_pretrained(out)
    return logits.detach(), load_file(out / "model.safetensors")


def ours(folder):
    """A run, or a directory of Hugging Face, by our model -> logits (2T, V), gradients by their names."""
    model = model_of(folder, dtype="fp64")
    x, y = tokens()
    logits = model(x)[0][:, :model.vocab_size]
    model(x, y)[0].backward()
    grads = {name: p.grad for name, p in model.named_parameters()}

    class Gradients:
        index = {"tensors": grads}

        def fill(self, name, out, full, offset):
            out.copy_(grads[name][tuple(slice(o, o + s) for o, s in zip(offset, out.shape, strict=True))])
    layout = weights.tensors(model.cfg, families.family_of(model.cfg), model.vocab_size)
    return logits.detach(), {
        name: dataclasses.replace(tensor, weights=Gradients(), dtype=torch.float64).detach()
        for name, tensor in layout.items() if tensor.parts[0].name in grads}


def assert_same_function(hf, theirs_at, ours_at, out, zeros=()):
    """Logits and gradients of both are equal, none is missing. zeros: names that only theirs has."""
    (a, grads), (b, own) = theirs(hf, theirs_at, out), ours(ours_at)
    close(a, b, "logits")
    left = {name for name in grads.keys() - own.keys() if not any(z in name for z in zeros)}
    assert left <= {"lm_head.weight"} and not own.keys() - grads.keys(), left
    for name, g in own.items():
        close(grads[name], g, name)


# -----------------------------------------------------------------------------
# Out: checkpoints of any layout

GPT2 = ["--norm=layer", "--mlp=gelu", "--pos=learned", "--n-kv-head=2", "--tied", "--dropout=0.25"]
MOE = ["--n-experts=4", "--top-k=2"]
GEMMA3 = ["--norm=rms1p", "--mlp=geglu", "--norm-place=both", "--qk-norm=head", "--embed-scale", "--tied",
          "--window=4", "--full-every=2", "--window-rope-base=20"]
OUT = {  # name: (ranks, flags, what theirs has and ours has not)
    "llama, tp 2 pp 2": (4, ["--tp=2", "--pp=2", "--norm-eps=1e-3", "--rope-base=500"], ()),
    "llama tied with biases, zero 3": (2, ["--zero=3", "--tied", "--bias"], ()),
    "gpt2, tp 2": (2, [*GPT2, "--bias", "--tp=2", "--norm-eps=1e-4"], ()),
    "gpt2 without biases": (1, GPT2, ("bias",)),
    "mixtral, ep 2": (2, [*MOE, "--router=softmax-topk", "--ep=2"], ()),
    "glm, ep 2": (2, [*MOE, "--router=sigmoid", "--router-bias-rate=0.2", "--n-shared-experts=2", "--ep=2"],
                  ("correction_bias",)),
    "glm, top 1": (1, ["--n-experts=3", "--top-k=1", "--router=sigmoid"], ("correction_bias", "shared")),
    "qwen": (1, [*MOE, "--capacity-factor=1"], ("shared",)),
    "llama 3, tp 2 pp 2": (4, ["--tp=2", "--pp=2", "--head-dim=6", "--rope-scaling", "4", "0.5", "2", "16"],
                           ()),
    "qwen2, zero 3": (2, ["--qkv-bias", "--zero=3"], ()),
    "qwen3, tp 2 pp 2": (4, ["--qk-norm=head", "--head-dim=12", "--tp=2", "--pp=2", "--tied"], ()),
    "olmo2, tp 2 zero 3": (4, ["--qk-norm=all", "--norm-place=after", "--tp=2", "--zero=3"], ()),
    "mistral, tp 2": (2, ["--window=3", "--tp=2"], ()),
    "qwen2, windows, cp 2": (2, ["--qkv-bias", "--window=5", "--full-every=2", "--cp=2"], ()),
    "gemma3, tp 2 pp 2": (4, [*GEMMA3, "--tp=2", "--pp=2"], ()),
    "smollm3, pp 2": (2, ["--no-rope-every=2", "--pp=2"], ()),
    "qwen3 moe, tp 2 ep 2": (2, [*MOE, "--qk-norm=head", "--router=softmax-topk", "--tp=2", "--ep=2"], ()),
}


@pytest.mark.parametrize("name", OUT)
def test_an_exported_run_is_the_same_function(name, hf, tmp_path):
    ranks, flags, zeros = OUT[name]
    go(ranks, tmp_path / "run", "--steps=2", "--save-every=2", "--lr=0.3", *flags)
    convert.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf"), "--dtype=fp64"])
    assert_same_function(hf, tmp_path / "hf", tmp_path / "run", tmp_path / "grads", zeros)
    config = vars(hf.AutoConfig.from_pretrained(tmp_path / "hf"))
    assert {config[field] for field in config if field.endswith("_pdrop")} <= {0.25}  # GPT-2's


# -----------------------------------------------------------------------------
# In: models that transformers made

LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=0.5, high_freq_factor=2.0,
              original_max_position_embeddings=16)
IN = {  # name: (model_type, values beside those of test_import.SMALL)
    "llama tied": ("llama", dict(tie_word_embeddings=True, rms_norm_eps=1e-3,
                                 rope_parameters={"rope_type": "default", "rope_theta": 300.0})),
    "llama biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "llama 3": ("llama", dict(head_dim=6, rope_parameters=dict(LLAMA3, rope_theta=300.0))),
    "mistral": ("mistral", {}), "mistral, a window": ("mistral", dict(sliding_window=5)),
    "gpt2": ("gpt2", dict(layer_norm_epsilon=1e-4)),
    "gpt2 untied": ("gpt2", dict(n_inner=None, tie_word_embeddings=False)),
    "mixtral": ("mixtral", {}), "mixtral, a window": ("mixtral", dict(sliding_window=3)),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=0)),
    "qwen3": ("qwen3", dict(tie_word_embeddings=True)), "qwen3, windows and full": ("qwen3", WINDOWS),
    "qwen3 moe": ("qwen3_moe", dict(norm_topk_prob=True)),
    "qwen3 moe, gates as they are": ("qwen3_moe", dict(head_dim=4, num_experts_per_tok=1)),
    "olmo2": ("olmo2", {}), "smollm3": ("smollm3", dict(no_rope_layer_interval=2)), "glm": ("glm4_moe", {}),
    "gemma3": ("gemma3_text", dict(sliding_window=4, rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 300.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0}})),
}


def make(hf, name, folder, **change):
    kind, values = IN[name]
    return test_import.make(hf, folder, kind, **values, **change)


def test_every_tensor_keeps_its_type(hf, tmp_path):
    there = make(hf, "glm", tmp_path / "there", dtype=torch.bfloat16)
    convert.main(["import", str(there), "--out", str(tmp_path / "run")])
    convert.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "back"), "--dtype=bf16"])
    assert len(same_bytes(there, tmp_path / "back")) == 2


def same_bytes(a, b):
    x, y = ({k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
            for folder in (a, b))
    assert x.keys() == y.keys() and len(x) > 5
    for name in x:
        assert x[name].dtype == y[name].dtype and torch.equal(x[name], y[name]), name
    return {t.dtype for t in x.values()}


@pytest.mark.parametrize("name", IN)
def test_an_imported_model_is_the_same_function_and_exports_the_same_bytes(name, hf, tmp_path):
    there = make(hf, name, tmp_path / "there")
    convert.main(["import", str(there), "--out", str(tmp_path / "run")])
    assert_same_function(hf, there, tmp_path / "run", tmp_path / "grads", ("correction_bias",))
    convert.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "back"), "--shard-gb=1e-5"])
    assert (tmp_path / "back" / "model.safetensors.index.json").exists()
    same_bytes(there, tmp_path / "back")


def test_rows_of_queries_in_another_order_are_found(hf, tmp_path):
    """Planted: pairs (2i, 2i+1) of Meta's own files in the place of (i, i + D/2)."""
    go(1, tmp_path / "run", "--steps=1", "--save-every=1")
    convert.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf")])
    held = load_file(tmp_path / "hf/model.safetensors")
    for name, w in held.items():
        if "q_proj" in name or "k_proj" in name:
            held[name] = w.view(-1, 4, 2, 16).transpose(1, 2).reshape(w.shape).contiguous()  # D = 8
    save_file(held, tmp_path / "hf/model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError, match="logits"):
        assert_same_function(hf, tmp_path / "hf", tmp_path / "run", tmp_path / "more")


def test_no_more_than_two_tensors_are_in_memory(tmp_path, monkeypatch):
    alive, most, read = weakref.WeakSet(), [], weights.Lazy.detach

    def watched(lazy):
        made = read(lazy)
        alive.add(made.untyped_storage())
        most.append(len(alive))
        return made
    monkeypatch.setattr(weights.Lazy, "detach", watched)
    go(1, tmp_path / "run", "--steps=1", "--save-every=1")
    convert.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf")])
    convert.main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "back")])
    assert len(most) > 40 and max(most) <= 2


def test_names_and_buffers_of_old_files_on_the_hub(hf, tmp_path):
    """GPT-2 has no prefix `transformer.` there, and brings its masks along."""
    there = make(hf, "gpt2", tmp_path / "there")
    a = weights.HuggingFace(there)
    held = load_file(there / "model.safetensors").items()
    held = {name.removeprefix("transformer."): t for name, t in held}
    save_file({**held, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, there / "model.safetensors")
    b = weights.HuggingFace(there)
    for name in a.index["tensors"]:
        assert torch.equal(a.whole(name), b.whole(name)), name


def change(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# -----------------------------------------------------------------------------
# Tokenizers

WORDS = ["def f(x):\n    return  x + 1\n\n\n", "don't I'LL we'Ve 'ſ 'S", "12345678 1234 ١٢٣٤٥ ½²", "   ",
         "a  b   c    d ", "héllo wörld 字字 €€ 😀👍🏽", "a\u0085b\u2028c\x0b\x0cd\u00a0\u2003\u200b", "\n",
         "\r\n\r\n \r\n", "\x00\x01\ufeff", "", " ", "a \n", "  \n  b", "\n  ", "\t\tx",
         "e\u0301 'ﬆ ǅx", "!!!???\n\n...", "<|endoftext|>", "'ll'll"]


def texts():
    """Return texts that a pattern could take apart in two ways: real ones, then drawn from odd characters."""
    rng, odd = random.Random(0), " \n\r\t'a0Z9é字😀.,!_ſK\u00a0\u2028\u0085٣Ⅷ½²ǅ\u0345\u200d/"
    drawn = ("".join(rng.choice(odd) for _ in range(rng.randint(1, 30))) for _ in range(1500))
    return [Path(__file__).read_text(), *WORDS, *drawn]


@pytest.fixture(scope="module")
def trained():
    return tokenizer.train_bpe([Path(__file__).read_text(), *WORDS], 700)


def library(hf, vocabulary, folder):
    """A tokenizer of ours, exported and opened by transformers so that special tokens in a text are text."""
    for name, content in tokenizer_json.export_tokenizer(vocabulary, 64).items():
        (folder / name).write_text(json.dumps(content))
    return hf.AutoTokenizer.from_pretrained(folder, split_special_tokens=True)


@pytest.mark.parametrize("name", ["ours", "r50k_base", "cl100k_base", "o200k_base"])
def test_exported_byte_pairs_give_the_same_ids(name, hf, trained, tmp_path, monkeypatch):
    """With the pattern of prepare.py, and with those of tiktoken's encodings and our vocabulary."""
    from tiktoken_ext import openai_public
    if name != "ours":
        ranks = trained.encoding._mergeable_ranks
        for function in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            monkeypatch.setattr(openai_public, function, lambda *_, **__: ranks)
        pattern = getattr(openai_public, name)()["pat_str"]
        trained = tokenizer.BpeTokenizer.make(name, pattern, ranks, {tokenizer.EOD: 777})
    opened = library(hf, trained, tmp_path)
    assert opened.eos_token_id == trained.eod and opened.decode([trained.eod]) == tokenizer.EOD
    for text in texts():
        ids = trained.encode(text)
        assert opened(text)["input_ids"] == ids, text
        assert opened.decode(ids) == text
    assert any(len(trained.decode([i]).strip()) > 3 for i in ids + trained.encode(texts()[0]))


def test_a_token_that_no_merge_makes_is_a_whole_word(hf, tmp_path):
    """As of vocabularies that were put together from two, Llama 3's for example."""
    ranks = {**{bytes([b]): b for b in range(256)}, b"xy": 256, b"wx": 257, b"wxyz": 258}
    vocabulary = tokenizer.BpeTokenizer.make("own", tokenizer.PATTERN, ranks, {tokenizer.EOD: 259})
    opened = library(hf, vocabulary, tmp_path)
    for text, ids in ("wxyz", [258]), ("awxyz", [97, 119, 256, 122]), ("wx", [257]):
        assert opened(text)["input_ids"] == vocabulary.encode(text) == ids


def test_every_character_of_unicode_is_encoded_alike(hf, trained, tmp_path):
    """The two libraries know letters and digits from tables of their own. Here without most ideographs."""
    opened = library(hf, trained, tmp_path)
    points = [*range(0x3400), *range(0xA490, 0xAC00), *range(0xF900, 0x11000), *range(0x1E000, 0x1E100)]
    for first in range(0, len(points), 1000):
        text = "".join(f"a{chr(c)}1{chr(c)}\n" for c in points[first:first + 1000])
        assert opened(text)["input_ids"] == trained.encode(text), hex(points[first])


def test_exported_characters_give_the_same_ids(hf, tmp_path):
    vocabulary = tokenizer.train_char(["ab \n\té字😀'"])
    opened = library(hf, vocabulary, tmp_path)
    for text in ("ab", "", " a  b\n\n", "é字😀'\t"):
        assert opened(text)["input_ids"] == vocabulary.encode(text)
        assert opened.decode(vocabulary.encode(text)) == text


def test_a_tokenizer_of_theirs_is_ours(hf, trained, tmp_path):
    """Saved in our tokenizer.json, opened again, written back; special tokens of ours join it."""
    library(hf, trained, tmp_path)
    read, n = tokenizer.load(tmp_path), trained.n_vocab
    assert (read.n_vocab, read.eod, read.kind) == (n, trained.eod, "hf")
    (tmp_path / "saved").mkdir()
    read.save(tmp_path / "saved/tokenizer.json")
    again = tokenizer.load(tmp_path / "saved")
    library(hf, again, tmp_path)
    back = tokenizer.load(tmp_path)
    for text in texts()[:100]:
        assert again.encode(text) == read.encode(text) == trained.encode(text)
        assert read.encode_prompt(text) == (trained.encode(text) or [trained.eod])
        assert again.decode(trained.encode(text)) == text and back.encode(text) == again.encode(text)
    assert again.sha256 == read.sha256 and (back.n_vocab, back.eod) == (n, trained.eod)

    more = tokenizer.HfTokenizer({**read.spec, "special": {"<|b|>": n, "<|a|>": n + 1}})
    assert more.n_vocab == n + 2 and more.decode([n, n + 1]) == "<|b|><|a|>"
    assert more.encode("<|a|> x") == trained.encode("<|a|> x")
    assert library(hf, more, tmp_path).convert_tokens_to_ids(["<|a|>", "<|b|>"]) == [n + 1, n]


def test_a_first_special_token_is_put_before_a_prompt_alone(hf, trained, tmp_path):
    """As Llama 2's <s>; transformers does so for every text."""
    library(hf, trained, tmp_path)
    piece = {"SpecialToken": {"id": tokenizer.EOD, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    known = {tokenizer.EOD: {"id": tokenizer.EOD, "ids": [trained.eod], "tokens": [tokenizer.EOD]}}
    change(tmp_path / "tokenizer.json", post_processor={
        "type": "TemplateProcessing", "single": piece, "pair": piece, "special_tokens": known})
    read, ids = tokenizer.load(tmp_path), trained.encode("def f")
    assert read.encode("def f") == ids and read.encode_prompt("def f") == [trained.eod, *ids]
    assert hf.AutoTokenizer.from_pretrained(tmp_path)("def f")["input_ids"] == [trained.eod, *ids]


@pytest.mark.parametrize("name,model_type", [
    ("GPT2Tokenizer", ""), ("Qwen2TokenizerFast", ""), ("CohereTokenizerFast", ""), (None, "qwen3"),
    ("PreTrainedTokenizerFast", ""), (None, "llama")])
def test_a_space_before_a_text_is_put_where_transformers_puts_it(name, model_type, hf, trained, tmp_path):
    """Some classes heed tokenizer_config.json, also where it says nothing, and others tokenizer.json."""
    library(hf, trained, tmp_path)
    *steps, last = json.loads((tmp_path / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("tokenizer_class")
    config |= {"tokenizer_class": name} if name else {}
    seen = set()
    for own in (False, True):
        for said in (False, True, None):
            bytes_last = {**last, "add_prefix_space": own}
            change(tmp_path / "tokenizer.json",
                   pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps, bytes_last]})
            more = {} if said is None else {"add_prefix_space": said}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **more}))
            ids = tokenizer.load(tmp_path).encode("def")
            seen.add(tuple(ids))
            theirs = hf.AutoTokenizer.from_pretrained(tmp_path)
            assert theirs("def", add_special_tokens=False)["input_ids"] == ids
    assert len(seen) == 2


def test_data_by_a_tokenizer_of_theirs(hf, trained, tmp_path):
    """prepare.py --tokenizer hf:DIR gives the tokens of the same vocabulary of ours. It is refused without an
    end-of-document."""
    library(hf, trained, tmp_path)
    (tmp_path / "text.txt").write_text("\n\n".join(texts()[0:1] * 3))
    (tmp_path / "own").mkdir()
    trained.save(tmp_path / "own" / "tokenizer.json")
    argv = [str(tmp_path / "text.txt"), f"--out={tmp_path}", "--workers=1", "--val-fraction=0.3"]
    change(tmp_path / "tokenizer_config.json", eos_token={"content": tokenizer.EOD})  # as older files have it
    for name, where in ("a", f"hf:{tmp_path}"), ("b", f"{tmp_path}/own"):
        assert prepare.main([*argv, f"--name={name}", f"--tokenizer={where}"]) == 0
    a, b = ((tmp_path / name / "train_00000.bin").read_bytes() for name in "ab")
    assert a == b and len(a) > 1000
    change(tmp_path / "tokenizer_config.json", eos_token=None)
    for eos, eod in (trained.eod, trained.eod), (trained.n_vocab, None), ([1, 2], None):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert tokenizer.load(tmp_path).eod == eod
    refused(prepare.main, [*argv, "--name=c", f"--tokenizer=hf:{tmp_path}"], "eos_token")
    refused(prepare.main, [*argv, "--name=c", f"--tokenizer=hf:{tmp_path}/none"], "tokenizer 'hf:")


# -----------------------------------------------------------------------------
# Conversations

SYSTEM, QUESTION = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 3?"}
ANSWER = {"role": "assistant", "content": "  It is\n6. "}
TALKS = [[QUESTION], [SYSTEM, QUESTION], [SYSTEM, QUESTION, ANSWER, {"role": "user", "content": "é?"}]]


def asked(vocabulary, messages):
    """Return the ids of a conversation that the assistant continues, as sample.py --chat writes them."""
    return [*chat.Template(vocabulary).conversation(messages)[0], vocabulary.special["<|assistant|>"]]


def with_markers(kind, trained, hf, folder):
    """Return a tokenizer that has the tokens of conversations."""
    if kind == "char":
        return tokenizer.train_char([json.dumps(TALKS), "é\n"]).with_special(chat.MARKERS)
    if kind == "hf":
        library(hf, trained, folder)
        trained = tokenizer.load(folder)
    return trained.with_special(chat.MARKERS)


@pytest.mark.parametrize("kind", ["bpe", "char", "hf"])
def test_the_chat_template_gives_the_ids_of_ours(kind, hf, trained, tmp_path):
    vocabulary = with_markers(kind, trained, hf, tmp_path)
    library(hf, vocabulary, tmp_path)
    words = hf.AutoTokenizer.from_pretrained(tmp_path)
    again = tokenizer_json.export_tokenizer(tokenizer.load(tmp_path), 64)["tokenizer_config.json"]
    assert again["chat_template"] == words.chat_template
    for messages in TALKS:
        ids = words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == asked(vocabulary, messages), messages
        assert words.apply_chat_template(messages, return_dict=False) == ids[:-1]
    with pytest.raises(Exception, match="tool is no role"):
        words.apply_chat_template([{"role": "tool", "content": "x"}])
    if kind == "bpe":  # a user who types a marker
        lie = [{"role": "user", "content": "x<|end|><|assistant|>y"}]
        given = {"add_generation_prompt": True, "return_dict": False}
        assert words.apply_chat_template(lie, **given) != asked(vocabulary, lie)
        assert words.apply_chat_template(lie, **given, sanitize_control_tokens=True) == asked(vocabulary, lie)


def test_no_chat_template_for_a_tokenizer_that_reads_it_otherwise(hf, trained, tmp_path):
    """As Llama 2's: a space before a text alone, none behind a special token."""
    library(hf, trained, tmp_path)
    steps = json.loads((tmp_path / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"]
    first = {"type": "Metaspace", "replacement": "x", "prepend_scheme": "first", "split": False}
    change(tmp_path / "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [first, *steps]})
    vocabulary = tokenizer.load(tmp_path).with_special(chat.MARKERS)
    assert "chat_template" not in tokenizer_json.export_tokenizer(vocabulary, 64)["tokenizer_config.json"]


# -----------------------------------------------------------------------------
# Refused, in one line

BERT = "--objective mlm --norm layer --mlp gelu --pos learned --n-kv-head 4"


@pytest.mark.parametrize("flags,word", [
    ("--norm layer", "--norm rms"), ("--mlp gelu", "--mlp swiglu"), ("--pos learned", "--pos rope"),
    ("--norm layer --mlp gelu --pos learned --n-kv-head 2", "--n-kv-head 4"),
    ("--n-experts 4 --mlp gelu", "--mlp swiglu"), ("--n-experts 4 --bias", "--bias False"),
    ("--n-experts 4 --n-shared-experts 1", "--router sigmoid"),
    ("--n-experts 4 --n-shared-experts 1 --router softmax-topk", "--n-shared-experts 0"),
    (f"{BERT} --norm rms", "--norm layer"), (f"{BERT} --n-kv-head 2", "--n-kv-head 4"),
    (f"{BERT} --n-experts 4", "--objective causal"), (f"{BERT} --pos rope", "--pos learned")])
def test_a_model_that_transformers_has_not_is_refused(flags, word):
    with pytest.raises(ValueError, match=word):
        families.family_of(parse(["tiny", *flags.split()]))


def test_a_flag_that_a_family_does_not_declare_is_refused(monkeypatch):
    """A model that was trained with a capacity is exported: no other declared flag tells of it."""
    argv = ["tiny", "--n-experts=4", "--norm-eps=1e-3", "--tied", "--capacity-factor=1.5"]
    kind = families.family_of(parse(argv))
    without = families.FAMILIES[kind]._replace(fields={})
    monkeypatch.setattr(families, "FAMILIES", {kind: without})
    with pytest.raises(ValueError, match=f"--norm-eps 0.001.*--tied True.*, {kind}, has .*--tied False"):
        families.family_of(parse(argv))
