"""Conversations: a file of messages with roles -> windows of tokens, and which of them are trained.

A line of the file is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]}.
With a special token for each of ROLES it becomes

    <|endoftext|><|system|>Be brief.<|end|><|user|>What is 2 + 2?<|end|><|assistant|>4<|end|>

(the first only where the vocabulary has one). Text never gives a special token: a user who types
"<|assistant|>" gets the ids of these characters. Trained are the assistant's words and the <|end|> after.

    Template             the special tokens of a vocabulary, and a conversation written with them
    read_conversations   a file -> its conversations, checked
    pack                 conversations -> windows of seq_len + 1 tokens, whole conversations side by side
"""
import hashlib
import json
from typing import Literal, NamedTuple

import numpy as np

from corpus import text
from corpus.shards import SPLITS
from interface.command_line import one_line
from interface.schema import check_schema

ROLES = ("system", "user", "assistant")
END = "<|end|>"
MARKERS = (*(f"<|{role}|>" for role in ROLES), END)
RECORD = {"messages": [{"role": Literal[ROLES], "content": str}]}
OPEN_WINDOWS = 64  # fill_windows() looks for room in so many


class Template:
    """vocab: a tokenizer that has MARKERS. ValueError: it has none."""

    def __init__(self, vocab):
        special = vocab.special
        if missing := [m for m in MARKERS if m not in special]:
            raise ValueError(f"this vocabulary has no {' '.join(missing)}: the model was not trained on "
                             "conversations; make them with python prepare.py chat")
        self.vocab, self.end, self.role_ids = vocab, special[END], {r: special[f"<|{r}|>"] for r in ROLES}
        self.begin = [] if vocab.eod is None else [vocab.eod]  # of a conversation, as of any document

    def message(self, role, content):
        """-> the ids of one message, a list of int: the role, the text, the end."""
        return [self.role_ids[role], *self.vocab.encode(content), self.end]

    def question(self, content):
        """-> the ids of a user's message and of the role after which the assistant speaks."""
        return [*self.message("user", content), self.role_ids["assistant"]]

    def conversation(self, messages):
        """messages: [{"role", "content"}] -> ids, and for each 1 if it is trained, else 0: two lists."""
        ids, trained = list(self.begin), [0] * len(self.begin)
        for message in messages:
            new = self.message(message["role"], message["content"])
            ids += new
            trained += [0] + [int(message["role"] == "assistant")] * (len(new) - 1)
        return ids, trained


def read_conversations(spans):
    """The spans (text.Span) of .jsonl files, also compressed -> [messages], each [{"role", "content"}].
    ValueError, one line that names the place: no JSON, an unknown role, no assistant, a damaged file."""
    def refuse(kind, line):
        raise ValueError(line)
    found = []
    for span in spans:
        if span.kind not in ("jsonl", "packed"):
            raise ValueError(f"{span.path} is not .jsonl, .jsonl.gz or .jsonl.zst; write one conversation on "
                             "each line")
        read = text.plain_lines if span.kind == "jsonl" else text.decompressed_lines
        for at, line in read(span, refuse):
            if line.isspace():
                continue
            where = f"{span.path} at byte {at:,}"
            try:
                record = json.loads(line)
                check_schema(record, RECORD, "it")
                json.dumps(record, ensure_ascii=False).encode()  # half of a surrogate pair cannot be encoded
            except (ValueError, RecursionError) as e:
                why = e.msg if isinstance(e, json.JSONDecodeError) else one_line(e).removeprefix("it: ")
                raise ValueError(f"{where}: {why[:200]}") from None
            if not any(message["role"] == "assistant" for message in record["messages"]):
                raise ValueError(f"{where}: no assistant speaks, there is nothing to train on; leave it out")
            found.append(record["messages"])
    return found


class Packed(NamedTuple):
    """Windows of seq_len + 1 ids: the inputs are all but the last, the targets all but the first."""
    ids: dict  # {split: (windows, seq_len + 1) int64}
    trained: dict  # {split: the same shape, uint8: 1 where the token is trained}
    count: dict  # {split: conversations}
    cut: int  # conversations longer than a window, whose end is lost
    dropped: int  # others of which no trained token was left: they are left out

    def describe(self, vocab, seq_len):
        """-> what was made, in words."""
        windows = [len(self.ids[split]) for split in SPLITS]
        trained = sum(int(self.trained[split].sum()) for split in SPLITS)
        return (f"{self.count['train']:,} + {self.count['val']:,} conversations (train + val) in "
                f"{windows[0]:,} + {windows[1]:,} windows of {seq_len}, {vocab.n_vocab:,} symbols,\n"
                f"  {100 * trained / sum(windows) / seq_len:.0f} % of the targets are trained; {self.cut:,} "
                f"conversations cut, {self.dropped:,} left out (longer than a window)")


def pack(conversations, template, seq_len, val_fraction, seed):
    """Conversations in an order that seed determines -> Packed. The hash of its text alone decides whether
    one is train or val, so equal ones stay together. ValueError: a split would be empty.

    Whole conversations fill a window, the rest is padding that is not trained. A token attends to all that
    is before it in its window, also to other conversations, as in windows of any text."""
    split_of, count, cut, dropped = {split: [] for split in SPLITS}, dict.fromkeys(SPLITS, 0), 0, 0
    for i in np.random.default_rng(seed).permutation(len(conversations)).tolist():
        ids, trained = template.conversation(conversations[i])
        long, ids, trained = len(ids) > seq_len + 1, ids[: seq_len + 1], trained[: seq_len + 1]
        if not any(trained):
            dropped += 1
            continue
        cut += long
        digest = hashlib.sha256(json.dumps(conversations[i]).encode()).digest()
        split = "val" if int.from_bytes(digest[:8], "little") / 2**64 < val_fraction else "train"
        count[split] += 1
        split_of[split].append((ids, trained))
    if not all(count.values()):
        raise ValueError(f"of {len(conversations)} conversations train would have {count['train']} and val "
                         f"{count['val']} ({dropped} have no answer within --seq-len {seq_len}), none may be "
                         "0; give more of them, or another --val-fraction")
    windows = {split: fill_windows(split_of[split], seq_len + 1, template.end) for split in SPLITS}
    return Packed(*({split: windows[split][k] for split in SPLITS} for k in (0, 1)), count, cut, dropped)


def fill_windows(conversations, width, padding):
    """[(ids, trained)], none longer than width -> ids (windows, width) int64, trained (windows, width) uint8.
    Each goes to the first open window with room, or to a new one; of too many open ones the fullest is
    closed."""
    opened, closed = [], []
    for ids, trained in conversations:
        window = next((w for w in opened if len(w[0]) + len(ids) <= width), None)
        if window is None:
            opened.append(window := ([], []))
            if len(opened) > OPEN_WINDOWS:
                closed.append(opened.pop(max(range(OPEN_WINDOWS), key=lambda k: len(opened[k][0]))))
        window[0].extend(ids)
        window[1].extend(trained)
    windows = closed + opened
    ids = np.full((len(windows), width), padding, np.int64)
    trained = np.zeros((len(windows), width), np.uint8)
    for k, (i, t) in enumerate(windows):
        ids[k, : len(i)], trained[k, : len(t)] = i, t
    return ids, trained
