"""convert.py gguf in llama.cpp itself: logits, tokens, greedy text. `make long` builds it, else all skips.

llama.cpp multiplies by matrices in fp16 with inputs rounded to fp16, and looks GELU up in a table of fp16.
"""
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import go, model_of
from test_gguf import MODELS, NO_VOCAB

import convert
import prepare
import sample
from corpus import chat, tokenizer
from hub.gguf import GPT2_PATTERN

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: make long")
pytestmark = pytest.mark.long
FP16 = 2.0 ** -11  # how far rounding to fp16 moves a number, relative to it
TEXTS = 400
PROMPT = "def test_"


NOUNS = ["tree", "river", "stone", "letter", "window", "garden", "engine", "paper", "bird", "lamp"]
VERBS = ["finds", "moves", "holds", "opens", "paints", "carries", "follows", "counts"]


def sentences(n):
    """Return n short documents, always the same: what a model learns must not follow from other files."""
    rng = random.Random(11)
    documents = []
    for i in range(n):
        nouns = rng.sample(NOUNS, 4)
        verbs = rng.sample(VERBS, 2)
        text = f"In room {i % 37} the {nouns[0]} {verbs[0]} a {nouns[1]}.\n"
        text += f"def test_{nouns[2]}(x):\n    return {verbs[1]}({nouns[3]}, {rng.randrange(1000)})\n"
        documents.append(text)
    return documents


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder with text/: byte pairs of many short documents.

    Which of them are for validation depends on their number alone. Of a few there may be none.
    """
    folder = tmp_path_factory.mktemp("llama")
    lines = [json.dumps({"text": text}) + "\n" for text in sentences(400)]
    (folder / "text.jsonl").write_text("".join(lines))
    prepare.main([f"{folder}/text.jsonl", "--name=text", f"--out={folder}", "--vocab-size=600", "--workers=1",
                  "--val-fraction=0.3"])
    return folder / "text"


@pytest.fixture(scope="module", params=MODELS)
def model(request, data, tmp_path_factory):
    """Return (its name, its run, {dtype: the file}) of a model that has learned a little."""
    folder = tmp_path_factory.mktemp("model")
    flags = ["--steps=40", "--save-every=40", "--lr=1e-2", "--seq-len=64", "--n-embd=64", "--ffn-hidden=96",
             "--n-head=4", "--n-kv-head=4", *MODELS[request.param][0]]
    if "gpt2" in request.param:
        flags.append("--n-head=2")
    go(1, folder / "run", f"--data={data}", *flags, base=NO_VOCAB)
    written = {}
    for dtype in "fp32", "fp16":
        written[dtype] = str(folder / f"{dtype}.gguf")
        convert.main(["gguf", str(folder / "run"), f"--out={written[dtype]}", f"--dtype={dtype}"])
    return request.param, folder / "run", written


def opened(path, **options):
    return llama_cpp.Llama(path, n_ctx=64, n_batch=64, n_threads=1, logits_all=True, verbose=False, type_k=0,
                           type_v=0, seed=1, **options)


def test_the_logits_are_ours(model):
    """Over 64 tokens. In fp32 GPT-2 and Gemma 3 differ more: their GELU is a table of fp16.

    In fp16 single logits can differ by several roundings, so their root mean square is compared.
    """
    name, run, written = model
    ours = model_of(run)
    ids = torch.randint(ours.vocab_size, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        want = ours(torch.tensor([ids]))[0][:, :ours.vocab_size].numpy()
    differences = {}
    for dtype, file in written.items():
        llama = opened(file)
        llama.eval(ids)
        have = np.array(llama.scores[:64])
        assert have.shape == want.shape and want.std() > 0.5
        differences[dtype] = have - want
    largest = np.abs(differences["fp32"]).max() / np.abs(want).max()
    rms = np.sqrt(np.square(differences["fp16"]).mean() / np.square(want).mean())
    print(f"\nlogits of {name}: in fp32 {largest:.1e} of the largest, in fp16 {rms:.1e} of their rms")
    bound = {"gpt2": FP16, "gemma3": 4 * FP16}.get(name.split(",")[0], 3e-6)
    assert largest < bound, name
    assert rms < 2 * FP16, name


def test_the_greedy_text_is_that_of_sample_py(model, capsys):
    _, run, written = model
    vocabulary = tokenizer.load(run)
    capsys.readouterr()
    sample.main([str(run), f"--prompt={PROMPT}", "--max-new-tokens=40", "--temperature=0"])
    want = capsys.readouterr().out.removesuffix("\n")
    llama = opened(written["fp32"])
    ids = llama.tokenize(PROMPT.encode(), add_bos=False, special=False)
    assert ids == vocabulary.encode(PROMPT)
    new = ids
    for _ in range(40):
        llama.eval(new)
        new = [int(np.argmax(llama.scores[len(ids) - 1]))]
        ids = ids + new
    assert vocabulary.decode(ids) == want
    assert len(set(ids)) > 3


# -----------------------------------------------------------------------------
# Tokens

def odd_texts(n):
    """Return n texts that two ways of cutting could cut otherwise."""
    rng = random.Random(7)
    odd = " \n\r\t'a0Z9é字😀.,!_K\u00a0\u2028\u0085٣Ⅷ½²ǅ\u0345\u200d/stdlrevmSTDLREVM"
    lines = Path(__file__).read_text().splitlines()
    found = []
    for i in range(n):
        pieces = [rng.choice(odd) for _ in range(rng.randint(1, 30))]
        if i % 3 == 0:
            pieces.insert(rng.randint(0, len(pieces)), rng.choice(lines))
        found.append("".join(pieces))
    return found


def is_cut_otherwise(text):
    """Whether a text ends with a line break and other blanks, of which llama.cpp makes two words."""
    blanks = text[len(text.rstrip()):]
    last = max(blanks.rfind("\n"), blanks.rfind("\r"))
    return 0 <= last < len(blanks) - 1


def assert_same_tokens(vocabulary, path, texts):
    """llama.cpp finds the ids of ours, and their text. Return how many texts it had to leave out."""
    llama = opened(path)
    left_out = 0
    for text in texts:
        if vocabulary.spec["pattern"] != GPT2_PATTERN and is_cut_otherwise(text):
            left_out += 1
            continue
        ids = llama.tokenize(text.encode(), add_bos=False, special=False)
        assert ids == vocabulary.encode(text), text
    return left_out


@pytest.fixture(scope="module")
def small_run(data, tmp_path_factory):
    """Return a run of one step, whose tokenizer can be replaced by another of 600 ids."""
    run = tmp_path_factory.mktemp("small") / "run"
    go(1, run, f"--data={data}", "--steps=1", "--save-every=1", base=NO_VOCAB)
    return run


def written(run, vocabulary, path):
    vocabulary.save(run / "tokenizer.json")
    convert.main(["gguf", str(run), f"--out={path}"])
    return str(path)


def test_the_tokens_are_ours(small_run, tmp_path):
    source = [Path(__file__).read_text(), *odd_texts(300)]
    ours = tokenizer.train_bpe(source, 560)
    texts = [Path(__file__).read_text().strip(), "", " ", "<|endoftext|>", "'ll'LL", *odd_texts(TEXTS)]
    left_out = assert_same_tokens(ours, written(small_run, ours, tmp_path / "a.gguf"), texts)
    assert left_out < TEXTS / 5
    spec = {**ours.spec, "pattern": GPT2_PATTERN}
    gpt2 = tokenizer.BpeTokenizer(spec)
    assert not assert_same_tokens(gpt2, written(small_run, gpt2, tmp_path / "b.gguf"), texts)


def test_a_conversation_is_written_as_ours(small_run, tmp_path):
    """By the template in the file; <|end|> ends an answer there."""
    talks = tokenizer.train_bpe([Path(__file__).read_text()], 560).with_special(chat.MARKERS)
    llama = opened(written(small_run, talks, tmp_path / "c.gguf"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 3 + 3?\n"}]
    ids = [*chat.Template(talks).conversation(messages)[0], talks.special["<|assistant|>"]]
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    engine = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = engine.from_string(llama.metadata["tokenizer.chat_template"])
    text = template.render(messages=messages, add_generation_prompt=True)
    assert llama.tokenize(text.encode(), add_bos=False, special=True) == ids
    assert llama.metadata["tokenizer.ggml.eot_token_id"] == str(talks.special[chat.END])
    vocabulary = llama_cpp.llama_model_get_vocab(llama.model)
    assert llama_cpp.llama_vocab_is_eog(vocabulary, talks.special[chat.END])
    assert llama_cpp.llama_vocab_is_eog(vocabulary, talks.eod)
