"""Text to token ids and back: characters, a byte-pair vocabulary trained here, or any tiktoken encoding.

train_char(), train_bpe() and from_tiktoken() make a tokenizer; save() writes it beside the tokens, load()
reads it. tokenizer.json is complete: sampling needs neither the network nor a cache.
"""

import base64
import hashlib
import json
import threading
from pathlib import Path

import numpy as np

from corpus.shards import first_folder

EOD = "<|endoftext|>"  # written after each document; in text these characters are encoded as any others
# how gpt-4 splits text into words (tiktoken, cl100k_base): a merge never crosses these boundaries
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
FETCH_SECONDS = 30.0  # tiktoken itself waits for ever where a firewall drops packets


class Tokenizer:
    """What both kinds have in common. spec: the whole tokenizer as plain json; sha256: of the saved file.

    A subclass has n_vocab (number of ids), eod (id of end-of-document or None), encode_numpy and decode."""

    def __init__(self, spec):
        self.spec, self.kind = spec, spec["kind"]
        self.text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
        self.sha256 = hashlib.sha256(self.text.encode()).hexdigest()

    def encode(self, text):
        """-> the token ids of `text`, a list of int; no end-of-document is added."""
        return self.encode_numpy(text).tolist()

    def save(self, path):
        """Write tokenizer.json (plain json, no code in it)."""
        Path(path).write_bytes(self.text.encode())


class CharTokenizer(Tokenizer):
    """One id per character in code point order, as in nanoGPT's shakespeare_char; no end-of-document."""

    def __init__(self, spec):
        super().__init__(spec)
        self.chars, self.n_vocab, self.eod = spec["chars"], len(spec["chars"]), None
        self.id_of = np.full(0x110000, -1, np.int32)  # code point -> id, so that encoding is one gather
        self.id_of[[ord(c) for c in self.chars]] = np.arange(self.n_vocab)

    def encode_numpy(self, text):
        """-> the ids of `text`, (len(text),) int32. ValueError: the vocabulary lacks a character."""
        ids = self.id_of[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]
        if len(ids) and ids.min() < 0:
            c = text[int(np.argmax(ids < 0))]
            raise ValueError(f"the character {c!r} (U+{ord(c):04X}) is not among the {self.n_vocab} of this"
                             " vocabulary; leave it out, or prepare the data with --tokenizer bpe")
        return ids

    def decode(self, ids):
        """-> the text of `ids` (any iterable of numbers); an id of n_vocab or more (padding) gives U+FFFD."""
        return "".join(self.chars[i] if 0 <= i < self.n_vocab else "\ufffd" for i in map(int, ids))


class BpeTokenizer(Tokenizer):
    """Byte pairs, encoded by tiktoken. spec["ranks"] maps the base64 of a token's bytes to its id."""

    def __init__(self, spec):
        import tiktoken

        super().__init__(spec)
        ranks, special = {base64.b64decode(t): i for t, i in spec["ranks"].items()}, spec["special"]
        self.encoding = tiktoken.Encoding(spec["kind"], pat_str=spec["pattern"], mergeable_ranks=ranks,
                                          special_tokens=special)
        self.ids = {*ranks.values(), *special.values()}  # cl100k_base does not use every number
        self.n_vocab, self.eod = max(self.ids) + 1, special[EOD]

    @classmethod
    def make(cls, kind, pattern, ranks, special):
        """From ranks {bytes: id}, special tokens {str: id} and the regular expression that splits words."""
        ranks = {base64.b64encode(t).decode(): i for t, i in ranks.items()}
        return cls({"kind": kind, "pattern": pattern, "ranks": ranks, "special": special})

    def encode_numpy(self, text):
        """-> the ids of `text`, (n,) uint32. Text never gives a special token."""
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids):
        """-> the text of `ids`; invalid utf-8 and ids without a token (such as padding) give U+FFFD."""
        bytes_of, unknown = self.encoding.decode_single_token_bytes, "\ufffd".encode()
        tokens = (bytes_of(i) if i in self.ids else unknown for i in map(int, ids))
        return b"".join(tokens).decode("utf-8", "replace")


def train_char(texts):
    """-> a CharTokenizer of the characters that occur in `texts`, an iterable of str."""
    chars = set()
    for text in texts:
        chars.update(text)
    return CharTokenizer({"kind": "char", "chars": "".join(sorted(chars))})


def train_bpe(texts, vocab_size):
    """-> a BpeTokenizer trained on `texts` by rustbpe: 256 bytes, the merges, end-of-document as the last id.

    A small input runs out of pairs and gives fewer than vocab_size ids. ValueError: vocab_size below 257.
    """
    if vocab_size < 257:
        raise ValueError(f"--vocab-size {vocab_size} is below 257, the 256 bytes and the end-of-document")
    import rustbpe  # not at the top, as tiktoken above: train.py imports this file and should start quickly

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), vocab_size - 1, pattern=PATTERN)
    ranks = {bytes(token): i for token, i in trainer.get_mergeable_ranks()}
    return BpeTokenizer.make("bpe", PATTERN, ranks, {EOD: len(ranks)})


def from_tiktoken(name):
    """-> a published encoding (gpt2, ...). ValueError: unknown, or not in the cache and not fetched."""
    import tiktoken

    known = tiktoken.list_encoding_names()
    if name not in known:
        raise ValueError(f"no tokenizer is called {name!r}; choose char, bpe, {', '.join(known)}")
    # in a thread: tiktoken sets no timeout, and a look-up of a host name has none that we could set
    found = {"why": f"no answer within {FETCH_SECONDS:g} s"}

    def fetch():
        try:
            found["encoding"] = tiktoken.get_encoding(name)
        except Exception as e:  # of requests, ssl, the hash or the file: the message below says what to do
            found["why"] = f"{type(e).__name__}: {' '.join(str(e).split())[:120]}"

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(FETCH_SECONDS)
    if "encoding" not in found:
        raise ValueError(f"the vocabulary of {name} is not in tiktoken's cache nor fetched ({found['why']});"
                         " set TIKTOKEN_CACHE_DIR to a folder that has it, or train one: --tokenizer bpe")
    e = found["encoding"]
    return BpeTokenizer.make(name, e._pat_str, e._mergeable_ranks, e._special_tokens)


def load(path):
    """-> the tokenizer saved at `path`, a tokenizer.json or its folder. ValueError, OSError: none."""
    path = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; make it with: python prepare.py")
    try:
        spec = json.loads(path.read_bytes())
        return CharTokenizer(spec) if spec["kind"] == "char" else BpeTokenizer(spec)
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path} is not a tokenizer file ({e!r}); make it again: python prepare.py") from e


def prompt_tokenizer(cfg):
    """-> the tokenizer of the run's data (cfg.data) where cfg.prompt is to be continued, else None.

    ValueError: synthetic data, or a character that the vocabulary lacks."""
    if not cfg.prompt:
        return None
    if cfg.data == "synthetic":
        raise ValueError("--prompt needs text, synthetic data has no tokenizer; try --data DIR")
    tokenizer = load(first_folder(cfg.data))
    tokenizer.encode(cfg.prompt)  # so that a wrong character ends the run now, not at its first evaluation
    return tokenizer
