"""A tokenizer of ours as transformers reads it: tokenizer.json, tokenizer_config.json, the chat template."""
import json
import re

from corpus import chat
from corpus.masked import MASK
from corpus.tokenizer import EOD, CharTokenizer


def export_tokenizer(tokenizer, seq_len):
    """Return a tokenizer of ours as transformers reads it, {file: content}.

    The same text gives the same ids, except that the characters of a special token give that token.
    """
    if tokenizer.kind == "hf":
        return export_theirs(tokenizer)
    steps = character_steps(tokenizer) if isinstance(tokenizer, CharTokenizer) else byte_pair_steps(tokenizer)
    added = []
    for token, i in tokenizer.special.items():
        added.append({"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                      "normalized": False, "special": True})
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
             "normalizer": None, "post_processor": None, **steps}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left",
                **chat_template(tokenizer), "model_max_length": seq_len,
                "clean_up_tokenization_spaces": False}
    # A model that continues texts reads their ends side by side, so a batch is padded on the left, with
    # end-of-document. Characters have no end-of-document, and so no padding.
    if MASK in tokenizer.special:
        settings |= {"mask_token": MASK, "padding_side": "right"}
    if tokenizer.eod is not None:
        settings |= {"eos_token": EOD, "bos_token": EOD, "pad_token": EOD}
    return {"tokenizer.json": whole, "tokenizer_config.json": settings}


def export_theirs(tokenizer):
    """Return the files of an HfTokenizer, as they were read, with our special tokens and a padding."""
    whole = tokenizer.spec["json"]
    if tokenizer.spec.get("special"):
        whole = json.loads(tokenizer.library.to_str())
    settings = {**tokenizer.spec["config"], **chat_template(tokenizer)}
    if settings.get("pad_token") is None and tokenizer.eod is not None:
        settings["pad_token"] = tokenizer.library.id_to_token(tokenizer.eod)
    if MASK in tokenizer.special:
        settings["mask_token"] = MASK
    return {"tokenizer.json": whole, "tokenizer_config.json": settings}


def character_steps(tokenizer):
    """Return how tokenizer.json cuts, encodes and decodes for a CharTokenizer."""
    vocab = {character: i for i, character in enumerate(tokenizer.chars)}
    return {
        "pre_tokenizer": split("[\\s\\S]"),
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {**vocab, **tokenizer.special}, "unk_token": ""},
    }


def byte_pair_steps(tokenizer):
    """Return how tokenizer.json cuts, encodes and decodes for a BpeTokenizer."""
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    words = split(for_oniguruma(tokenizer.spec["pattern"]))
    vocab, merges = byte_pairs(tokenizer)
    return {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, to_bytes]},
        "decoder": to_bytes,
        # Special tokens too: the library itself numbers those that it does not find here. ignore_merges: a
        # whole word that is a token is taken at once, as tiktoken does.
        "model": {"type": "BPE", "ignore_merges": True, "vocab": {**vocab, **tokenizer.special},
                  "merges": merges},
    }


def byte_pairs(tokenizer):
    """Return ({token: id}, [[left, right]]): the tokens of a BpeTokenizer, printable, and its merges.

    FileNotFoundError: transformers is not there.
    """
    try:
        from transformers.convert_slow_tokenizer import TikTokenConverter
    except ImportError:
        raise FileNotFoundError("byte pairs are written by: pip install transformers") from None
    converter = TikTokenConverter()
    converter.load_tiktoken_bpe = lambda _: tokenizer.encoding._mergeable_ranks
    vocab, merges = converter.extract_vocab_merges_from_model("")
    return vocab, [list(pair) for pair in merges]


def split(pattern):
    """Return the pre-tokenizer that cuts a text into the matches of a regular expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def for_oniguruma(pattern):
    """Return a regular expression of tiktoken as the library tokenizers needs it.

    There, `$` is also the end of a line, and the + of {1,3}+ is not possessive: it would repeat.
    """
    return re.sub(r"(\{\d+(,\d*)?\})\+", r"\1", re.sub(r"(?<!\\)\$", r"\\z", pattern))


# -----------------------------------------------------------------------------
# Conversations

def chat_template(tokenizer):
    """Return {"chat_template": Jinja by which transformers writes a conversation as chat.Template does}.

    It is {} where the tokenizer has no such tokens, or where it reads the text behind one of them otherwise
    than a text alone.
    """
    if not set(chat.MARKERS) <= tokenizer.special.keys():
        return {}
    template = chat.Template(tokenizer)
    begin = tokenizer.decode(template.begin)
    if tokenizer.kind == "hf" and not reads_messages(tokenizer, template, begin):
        return {}
    return {"chat_template": jinja(begin, "{% generation %}", "{% endgeneration %}")}


def jinja(begin, opens="", closes=""):
    """Return a conversation as Jinja writes it, after the text `begin`.

    opens, closes: what stands around an answer and its <|end|>, the tokens that are trained. From the words
    `generation` and `endgeneration` transformers knows the mask of these tokens. Other readers have no such
    words.
    """
    message = "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    answer = f"<|assistant|>{opens}{{{{ m['content'] + '<|end|>' }}}}{closes}"
    others = tuple(role for role in chat.ROLES if role != "assistant")
    refuse = "{{ raise_exception(m['role'] + ' is no role of this model') }}"
    return (f"{{{{ {json.dumps(begin)} }}}}{{% for m in messages %}}"
            f"{{% if m['role'] == 'assistant' %}}{answer}"
            f"{{% elif m['role'] in {others} %}}{message}{{% else %}}{refuse}{{% endif %}}"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")


def reads_messages(tokenizer, template, begin):
    """Whether the library encodes a message that is written as one text as Template does."""
    text_ids = set(range(tokenizer.n_vocab)) - set(tokenizer.special.values())
    text = tokenizer.decode(sorted(text_ids)[-3:]).strip()  # a text that the tokenizer knows
    # A copy of the library finds special tokens in a text.
    library = type(tokenizer.library).from_str(tokenizer.library.to_str())
    ids = library.encode(f"{begin}<|user|>{text}{chat.END}", add_special_tokens=False).ids
    return ids == [*template.begin, *template.message("user", text)]
