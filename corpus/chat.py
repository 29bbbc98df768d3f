"""Conversations: a file of messages with roles -> windows of tokens, and which of them are trained.

A line of the file is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]}.
With a special token for each of ROLES it becomes

    <|endoftext|><|system|>Be brief.<|end|><|user|>What is 2 + 2?<|end|><|assistant|>4<|end|>

(the first only where the vocabulary has one). Text never gives a special token: a user who types
"<|assistant|>" gets the ids of these characters. The assistant's words and the <|end|> after them are
trained, except in a message with "weight": 0, and nothing else.
"""
import json
from collections import Counter
from typing import Literal

import numpy as np

from corpus.order import split_of
from corpus.shards import SPLITS
from corpus.text import json_lines
from interface.files import check_schema
from interface.terminal import warn

ROLES = ("system", "user", "assistant")
END = "<|end|>"
MARKERS = (*(f"<|{role}|>" for role in ROLES), END)
RECORD = {"messages": [{"role": Literal[ROLES], "content": str, "weight?": Literal[0, 1]}]}
OPEN_WINDOWS = 64  # the most windows in which fill_windows() looks for room


class Template:
    """The special tokens of a vocabulary, which has MARKERS, and how a conversation is written with them."""

    def __init__(self, vocab):
        missing = [marker for marker in MARKERS if marker not in vocab.special]
        if missing:
            raise ValueError(f"this vocabulary has no {' '.join(missing)}: the model was not trained on "
                             "conversations (docs/chat.md); try --prompt")
        self.vocab = vocab
        self.end = vocab.special[END]
        self.role_ids = {role: vocab.special[f"<|{role}|>"] for role in ROLES}
        self.begin = [] if vocab.eod is None else [vocab.eod]  # of a conversation, as of any document

    def message(self, role, content):
        return [self.role_ids[role], *self.vocab.encode(content), self.end]

    def conversation(self, messages):
        """Return the ids of messages, [{"role", "content"}], and for each id 1 if it is trained, else 0."""
        ids = list(self.begin)
        trained = [0] * len(ids)
        for message in messages:
            new = self.message(message["role"], message["content"])
            ids += new
            is_trained = message["role"] == "assistant" and message.get("weight", 1) == 1
            trained.append(0)  # the role itself
            trained += [int(is_trained)] * (len(new) - 1)  # the words and the end
        return ids, trained


def read_conversations(files):
    """Return the conversations of files of records: [messages] each. ValueError: one cannot be trained on."""
    found = []
    dropped = set()
    for file in files:
        for where, record in json_lines(file.path):
            check_schema(record, RECORD, where)
            messages = record["messages"]
            keys = {key for message in messages for key, value in message.items() if value is not None}
            for key in keys - {"role", "content", "weight"}:
                raise ValueError(f"{where}: a message has {key!r}, which has no place among the tokens")
            found.append(messages)
            dropped |= {key for key, value in record.items() if value is not None}
    dropped.discard("messages")
    if dropped:
        warn(f"only the messages of records become tokens, not {', '.join(sorted(dropped))}")
    return found


def pack(conversations, val, template, seq_len, val_fraction, seed):
    """Return {split: (ids, trained) of windows, (windows, seq_len + 1) int64 and uint8}, and counts.

    Whole conversations, in an order that the seed determines, fill a window; padding that is not trained
    fills the rest. A longer one is cut. One without a trained token is dropped. counts: the conversations
    that are cut, dropped, in train and in val. val: conversations that are all in val.
    """
    width = seq_len + 1
    pairs = {split: [] for split in SPLITS}  # (ids, trained) of each conversation
    counts = Counter(cut=0, dropped=0, train=0, val=0)
    everything = [*conversations, *val]
    for i in np.random.default_rng(seed).permutation(len(everything)).tolist():
        ids, trained = template.conversation(everything[i])
        if not any(trained[:width]):
            counts["dropped"] += 1
            continue
        counts["cut"] += len(ids) > width
        said = json.dumps([(message["role"], message["content"]) for message in everything[i]])
        split = "val" if i >= len(conversations) else split_of(said, val_fraction)
        pairs[split].append((ids[:width], trained[:width]))
        counts[split] += 1
    return {split: fill_windows(pairs[split], width, template.end) for split in SPLITS}, counts


def fill_windows(conversations, width, padding):
    """Return windows of conversations: ids (windows, width) int64, trained (windows, width) uint8.

    conversations: [(ids, trained)], none longer than width. Each goes to the first open window with room, or
    to a new one. When there are too many open windows, the fullest is closed.
    """
    opened = []
    closed = []
    for ids, trained in conversations:
        window = next((window for window in opened if len(window[0]) + len(ids) <= width), None)
        if window is None:
            window = ([], [])
            opened.append(window)
        if len(opened) > OPEN_WINDOWS:
            lengths = [len(window_ids) for window_ids, _ in opened]
            closed.append(opened.pop(lengths.index(max(lengths))))
        window[0].extend(ids)
        window[1].extend(trained)

    windows = closed + opened
    all_ids = np.full((len(windows), width), padding, np.int64)
    all_trained = np.zeros((len(windows), width), np.uint8)
    for i, (ids, trained) in enumerate(windows):
        all_ids[i, : len(ids)] = ids
        all_trained[i, : len(trained)] = trained
    return all_ids, all_trained
