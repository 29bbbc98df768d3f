"""The documents of a window, for --doc-mask: a token attends to its own document alone.

A document is what stands between two <|endoftext|>: a text, or a conversation. prepare.py writes this token
after each text and before each conversation. Here it is the first token of what follows it, as it is in
sample.py. A vocabulary of characters has no such token, so its data have no documents.

    masks_documents   whether --doc-mask separates the documents of a data set
    document_places   windows of tokens -> the place of each token in its document
"""


def masks_documents(doc_mask, folder, meta):
    """Return whether --doc-mask separates the documents of a data set. meta: its meta.json.

    ValueError: it must, and cannot.
    """
    if doc_mask == "on" and meta["eod"] is None:
        raise ValueError(f"--doc-mask on: nothing marks where the documents of {folder} start, because its "
                         "vocabulary has no <|endoftext|>; leave out --doc-mask, or prepare it with another "
                         "--tokenizer")
    is_chat = "masks" in meta
    return meta["eod"] is not None and (doc_mask == "on" or (doc_mask == "auto" and is_chat))


def document_places(tokens, eod):
    """Return the place of each token in its document, counted from 1: (n, T) -> (n, T) int64.

    It is also the number of keys that the token's query sees. Of a document that began in an earlier window,
    only what is in this one counts.
    """
    import torch  # not at the top: see inputs_and_targets in corpus/synthetic.py

    positions = torch.arange(tokens.size(1))
    starts = torch.where(tokens == eod, positions, 0).cummax(1).values  # of each token's document
    return positions - starts + 1
