"""Text to token ids and back: characters, byte pairs, encodings of tiktoken, tokenizers of Hugging Face.

train_char(), train_bpe() and from_tiktoken() make a tokenizer. save() writes it beside the tokens, load()
reads it, or one of Hugging Face. tokenizer.json is complete: sampling needs neither the network nor a cache.
"""
import base64
import hashlib
import json
from itertools import chain
from pathlib import Path

import numpy as np

from corpus.samples import first_folder
from corpus.text import require
from interface.files import load_json
from interface.terminal import one_line

EOD = "<|endoftext|>"  # written after each document; in text these characters are encoded as any others
# How gpt-4 splits text into words (tiktoken, cl100k_base): a merge never crosses these boundaries.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
# The tokenizer classes of transformers, and where none is named the model_types, for which the
# add_prefix_space of tokenizer_config.json counts and not that of tokenizer.json
SET_PREFIX_SPACE = {"GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer",
                    "CodeGenTokenizer", "gpt2", "qwen2", "qwen3", "qwen3_moe"}
UNKNOWN = "\ufffd"  # what decoding gives for an id without a token, such as padding


class Tokenizer:
    """What all kinds have in common.

    special: the tokens that text never gives, {token: id}. A subclass has n_vocab (number of ids), eod (id of
    end-of-document or None), encode_numpy (str -> (n,) ids) and decode (ids -> str).
    """

    def __init__(self, spec):
        self.spec = spec
        self.kind = spec["kind"]
        self.special = spec.get("special", {})
        self.text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
        self.sha256 = hashlib.sha256(self.text.encode()).hexdigest()

    def save(self, path):
        Path(path).write_bytes(self.text.encode())

    def encode(self, text):
        return self.encode_numpy(text).tolist()

    def encode_prompt(self, text):
        """Return the ids of a text to be continued, or of the end-of-document if it is empty."""
        ids = self.encode(text) or [self.eod]
        if None in ids:
            raise ValueError("the prompt is empty, and this vocabulary has no end-of-document to start from")
        return ids

    def with_special(self, names):
        """Return a tokenizer that has these special tokens, too; new ones come after all others."""
        new = [name for name in names if name not in self.special]
        if not new:
            return self
        special = self.special | {name: self.n_vocab + i for i, name in enumerate(new)}
        return type(self)({**self.spec, "special": special})

    def whole_characters(self, ids, before=()):
        """Yield the text of ids, which follow the ids `before`, in pieces of whole characters."""
        held = list(before)
        text = self.decode(held)
        said = len(text)
        for token in ids:
            # All tokens are decoded again, because some decoders drop the space before the first token.
            held.append(token)
            text = self.decode(held)
            if not text.endswith(UNKNOWN):
                yield text[said:]
                said = len(text)
        if text[said:]:
            yield text[said:]


class CharTokenizer(Tokenizer):
    """One id per character in code point order, then special tokens; there is no end-of-document."""

    def __init__(self, spec):
        super().__init__(spec)
        self.chars = spec["chars"]
        self.eod = None
        self.symbols = [*self.chars, *sorted(self.special, key=self.special.get)]
        self.n_vocab = len(self.symbols)
        self.id_of = np.full(0x110000, -1, np.int32)  # code point -> id, so that encoding is one gather
        self.id_of[[ord(c) for c in self.chars]] = np.arange(len(self.chars))

    def encode_numpy(self, text):
        code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = self.id_of[code_points]
        if (ids < 0).any():
            c = text[int(np.argmax(ids < 0))]
            raise ValueError(f"the character {c!r} (U+{ord(c):04X}) is not among the {len(self.chars)} of"
                             " this vocabulary; leave it out, or prepare the data with --tokenizer bpe")
        return ids

    def decode(self, ids):
        known = range(self.n_vocab)
        return "".join(self.symbols[i] if i in known else UNKNOWN for i in map(int, ids))


class BpeTokenizer(Tokenizer):
    """Byte pairs, encoded by tiktoken. spec["ranks"] maps the base64 of a token's bytes to its id."""

    def __init__(self, spec):
        import tiktoken
        super().__init__(spec)
        ranks = {base64.b64decode(token): i for token, i in spec["ranks"].items()}
        self.encoding = tiktoken.Encoding(spec["kind"], pat_str=spec["pattern"], mergeable_ranks=ranks,
                                          special_tokens=self.special)
        self.ids = {*ranks.values(), *self.special.values()}  # cl100k_base does not use every number
        self.n_vocab = max(self.ids) + 1
        self.eod = self.special[EOD]

    @classmethod
    def make(cls, kind, pattern, ranks, special):
        ranks = {base64.b64encode(token).decode(): i for token, i in ranks.items()}
        return cls({"kind": kind, "pattern": pattern, "ranks": ranks, "special": special})

    def encode_numpy(self, text):
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids):
        tokens = [self.encoding.decode_single_token_bytes(i) if i in self.ids else UNKNOWN.encode()
                  for i in map(int, ids)]
        return b"".join(tokens).decode("utf-8", "replace")


class HfTokenizer(Tokenizer):
    """A tokenizer of Hugging Face, run by their library `tokenizers`.

    spec: json, their tokenizer.json; config, their tokenizer_config.json; special, tokens that we added.
    """

    def __init__(self, spec):
        tokenizers = require("tokenizers", "a tokenizer of Hugging Face")
        super().__init__(spec)
        self.library = tokenizers.Tokenizer.from_str(json.dumps(spec["json"]))
        self.library.add_special_tokens(sorted(self.special, key=self.special.get))
        for token, i in self.special.items():
            if self.library.token_to_id(token) != i:
                raise ValueError(f"{token} cannot get the id {i}: it is a token of this vocabulary, but not "
                                 "a special one, or the ids have gaps")
        added = self.library.get_added_tokens_decoder().items()
        self.special = {token.content: i for i, token in added if token.special}
        self.library.encode_special_tokens = True  # in a text their characters are encoded as any others
        self.library.no_truncation()
        self.library.no_padding()
        self.n_vocab = max(self.library.get_vocab(with_added_tokens=True).values()) + 1

        # The tokenizer's end-of-document, or the model's
        eos = spec["config"].get("eos_token")
        if isinstance(eos, dict):
            eos = eos["content"]
        self.eod = self.library.token_to_id(eos) if eos else spec.get("eos_id")
        if not isinstance(self.eod, int) or self.eod >= self.n_vocab:
            self.eod = None

    def encode_numpy(self, text):
        return np.array(self.library.encode(text, add_special_tokens=False).ids, np.int64)

    def encode_prompt(self, text):
        return self.library.encode(text).ids or super().encode_prompt(text)  # some put a special token first

    def decode(self, ids):
        return self.library.decode([int(i) for i in ids], skip_special_tokens=False)


def train_char(texts):
    """Return a CharTokenizer of the characters that occur in texts, an iterable of str."""
    chars = sorted(set(chain.from_iterable(texts)))
    return CharTokenizer({"kind": "char", "chars": "".join(chars)})


def train_bpe(texts, vocab_size):
    """Return a BpeTokenizer trained on texts: 256 bytes, the merges, end-of-document; vocab_size or fewer."""
    import rustbpe  # not at the top, as tiktoken above: train.py imports this file and should start quickly

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), vocab_size - 1, pattern=PATTERN)
    ranks = {bytes(token): i for token, i in trainer.get_mergeable_ranks()}
    return BpeTokenizer.make("bpe", PATTERN, ranks, {EOD: len(ranks)})


def from_tiktoken(name):
    """Return a published encoding (gpt2, ...). ValueError: unknown, or not in the cache and not fetched."""
    import tiktoken
    try:
        found = tiktoken.get_encoding(name)
    except Exception as e:  # of the name, requests, ssl, the hash or the file
        raise ValueError(f"tokenizer {name!r} is not known or not fetched ({one_line(e)[:120]}); choose "
                         "char, bpe, a folder, hf:FOLDER, or gpt2, with TIKTOKEN_CACHE_DIR offline") from e
    return BpeTokenizer.make(name, found._pat_str, found._mergeable_ranks, found._special_tokens)


def load(folder):
    """Return the tokenizer saved in a folder, ours or one of Hugging Face. ValueError, OSError: none."""
    folder = Path(folder)
    spec = load_json(folder / "tokenizer.json")
    if "model" in spec and "kind" not in spec:  # theirs
        path = folder / "tokenizer_config.json"
        config = load_json(path) if path.exists() else {}
        path = folder / "config.json"
        of_model = load_json(path) if path.exists() else {}
        name = config.get("tokenizer_class") or of_model.get("model_type") or ""
        if name.removesuffix("Fast") in SET_PREFIX_SPACE:
            first = spec.get("pre_tokenizer") or {}
            for step in first.get("pretokenizers", [first]):
                if step.get("type") == "ByteLevel":
                    step["add_prefix_space"] = bool(config.get("add_prefix_space"))
        spec = {"kind": "hf", "json": spec, "config": config, "eos_id": of_model.get("eos_token_id")}
    kind = {"char": CharTokenizer, "hf": HfTokenizer}.get(spec["kind"], BpeTokenizer)
    return kind(spec)


def load_if_there(folder, vocab_size):
    """Return the tokenizer of a directory, or None. ValueError: it has more ids than the model has rows."""
    if not (folder / "tokenizer.json").exists():
        return None
    vocabulary = load(folder)
    if vocabulary.n_vocab > vocab_size:
        raise ValueError(f"{folder}: tokenizer.json has {vocabulary.n_vocab} ids and the model {vocab_size} "
                         "rows; give it more (resize_token_embeddings of transformers)")
    return vocabulary


def refuse_other_tokens(run, folder, more=True):
    """Raise ValueError unless a data set has the tokens of a run (or of its step_N), if that read text.

    more: the data set may have tokens besides.
    """
    if not (run / "tokenizer.json").is_file():
        run = run.parent
    if not (run / "tokenizer.json").is_file():
        return
    theirs = load(run)
    ours = load(folder)
    # A tokenizer of Hugging Face may stand for one of ours.
    is_equal = all(theirs.decode([i]) == ours.decode([i]) for i in range(theirs.n_vocab))
    if not is_equal or (ours.n_vocab > theirs.n_vocab and not more):
        raise ValueError(f"the tokens of {folder} are others than those of the run {run}; prepare the data "
                         f"with --tokenizer {run}")


def prompt_tokenizer(cfg):
    """Return the tokenizer of the run's data (cfg.data) where cfg.prompt is to be continued, else None.

    ValueError: it cannot encode the prompt, or --init-from takes the weights of a run with other tokens.
    """
    if cfg.init_from and cfg.data != "synthetic":
        # More special tokens would move [MASK], which follows the last of them.
        refuse_other_tokens(Path(cfg.init_from), first_folder(cfg.data), more=cfg.objective == "causal")
    if not cfg.prompt:
        return None
    if cfg.data == "synthetic":
        raise ValueError("--prompt needs text, synthetic data has no tokenizer; try --data DIR")
    tokenizer = load(first_folder(cfg.data))
    tokenizer.encode(cfg.prompt)  # so that a wrong character ends the run now, not at its first evaluation
    return tokenizer
