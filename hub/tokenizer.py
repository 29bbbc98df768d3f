"""A tokenizer of ours as transformers reads it: tokenizer.json, tokenizer_config.json, the chat template."""
import json
import re

from corpus import chat
from corpus.masked import MASK
from corpus.tokenizer import EOD, CharTokenizer
from hub.families import require_transformers


def export_tokenizer(tokenizer, seq_len):
    """Return a tokenizer of ours as transformers reads it, {file: content}: the same text, the same ids."""
    if tokenizer.kind == "hf":
        whole = json.loads(tokenizer.library.to_str())
        settings = dict(tokenizer.spec["config"])
    else:
        steps = character_steps if isinstance(tokenizer, CharTokenizer) else byte_pair_steps
        added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                  "normalized": False, "special": True} for token, i in tokenizer.special.items()]
        whole = {"version": "1.0", "added_tokens": added, **steps(tokenizer)}
        # A model that continues texts reads their ends side by side, so a batch is padded on the left.
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq_len,
                    "padding_side": "right" if MASK in tokenizer.special else "left",
                    "clean_up_tokenization_spaces": False}
        if tokenizer.eod is not None:
            settings |= {"eos_token": EOD, "bos_token": EOD, "pad_token": EOD}
    if MASK in tokenizer.special:
        settings["mask_token"] = MASK
    if template := chat_template(tokenizer):
        settings["chat_template"] = template
    return {"tokenizer.json": whole, "tokenizer_config.json": settings}


def character_steps(tokenizer):
    vocab = {character: i for i, character in enumerate(tokenizer.chars)}
    return {"pre_tokenizer": split("[\\s\\S]"), "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": {**vocab, **tokenizer.special}, "unk_token": ""}}


def byte_pair_steps(tokenizer):
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    # In the library tokenizers `$` is also the end of a line, and the + of {1,3}+ would repeat.
    pattern = re.sub(r"(?<!\\)\$", r"\\z", tokenizer.spec["pattern"])
    words = split(re.sub(r"(\{\d+(,\d*)?\})\+", r"\1", pattern))
    vocab, merges = byte_pairs(tokenizer)
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, to_bytes]}, "decoder": to_bytes,
            # Special tokens too: the library itself numbers those that it does not find here. ignore_merges:
            # a whole word that is a token is taken at once, as tiktoken does.
            "model": {"type": "BPE", "ignore_merges": True, "vocab": {**vocab, **tokenizer.special},
                      "merges": merges}}


def byte_pairs(tokenizer):
    """Return ({token: id}, [(left, right)]): the tokens of a BpeTokenizer, printable, and its merges."""
    require_transformers()
    from transformers.convert_slow_tokenizer import TikTokenConverter
    converter = TikTokenConverter()
    converter.load_tiktoken_bpe = lambda _: tokenizer.encoding._mergeable_ranks
    return converter.extract_vocab_merges_from_model("")


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def chat_template(tokenizer):
    """Return Jinja that writes a conversation as chat.Template does, or "": this tokenizer cannot."""
    if not set(chat.MARKERS) <= tokenizer.special.keys():
        return ""
    template = chat.Template(tokenizer)
    begin = tokenizer.decode(template.begin)
    if tokenizer.kind == "hf":
        text_ids = set(range(tokenizer.n_vocab)) - set(tokenizer.special.values())
        word = tokenizer.decode(sorted(text_ids)[-3:]).strip()  # a text that the tokenizer knows
        # A copy of the library finds special tokens in a text.
        library = type(tokenizer.library).from_str(tokenizer.library.to_str())
        ids = library.encode(f"{begin}<|user|>{word}{chat.END}", add_special_tokens=False).ids
        if ids != [*template.begin, *template.message("user", word)]:
            return ""
    message = "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    refuse = "{{ raise_exception(m['role'] + ' is no role of this model') }}"
    return (f"{{{{ {json.dumps(begin)} }}}}{{% for m in messages %}}"
            f"{{% if m['role'] in {chat.ROLES} %}}{message}{{% else %}}{refuse}{{% endif %}}"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
