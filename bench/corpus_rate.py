"""How fast is prepare.py beside the tokenizer library alone?  python bench/corpus_rate.py

The same records, text of the standard library, on one core: a) tiktoken's own batch call on texts that are
in memory already, b) one unit of prepare.py's work, from a .jsonl file to a finished part on disk: reading,
json, two hashes, encoding, end-of-document, shuffle, fsync. Rates are per CPU-second, so that other people's
load counts less; the last line is the ratio of the medians. The target is 0.90.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import prepare
from corpus import parts
from corpus import text as corpus
from corpus import tokenizer as tok


def records(megabytes):
    """Documents of about 4,000 characters, from the standard library with its tests."""
    left = megabytes * 1e6
    for span in prepare.list_sources(prepare.parse(["stdlib", "--with-tests"])):
        for text in corpus.documents(span, "text", lambda *_: None):
            for at in range(0, len(text), 4000):
                yield text[at : at + 4000]
            left -= len(text)
        if left < 0:
            return


def per_cpu_second(megabytes, work):
    began = time.process_time()
    work()
    return megabytes / (time.process_time() - began)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mb", type=float, default=32, help="of text (default 32)")
    p.add_argument("--rounds", type=int, default=5, help="each once per round, in turn (default 5)")
    p.add_argument("--vocab-size", type=int, default=32768, help="trained on 8 MB of it (default 32768)")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder, texts = Path(folder), list(records(args.mb))
        path = folder / "a.jsonl"
        path.write_text("".join(json.dumps({"id": k, "text": t}) + "\n" for k, t in enumerate(texts)))
        t = tok.train_bpe(texts[:2000], args.vocab_size)
        t.save(folder / "tokenizer.json")
        mb = sum(len(text.encode()) for text in texts) / 1e6
        settings = parts.Settings(str(folder / "tokenizer.json"), t.sha256, "<u2", "text", 0.1, 1)
        unit = corpus.spans_of(str(path), 1 << 40, "text")
        parts.load_tokenizer(settings.tokenizer)  # once per process, not per unit
        rates = {"library": [], "prepare": []}
        for k in range(args.rounds):
            rates["library"].append(per_cpu_second(
                mb, lambda: t.encoding.encode_ordinary_batch(texts, num_threads=1)))
            rates["prepare"].append(per_cpu_second(
                mb, lambda k=k: parts.encode_unit((k, str(k), unit), folder, settings)))
            print(f"round {k + 1}: library {rates['library'][-1]:.2f}, prepare.py {rates['prepare'][-1]:.2f}"
                  " MB/s per CPU-second", flush=True)
    library, ours = (statistics.median(r) for r in rates.values())
    print(f"{mb:.0f} MB, {t.n_vocab:,} symbols: library {library:.2f}, prepare.py {ours:.2f} MB/s per"
          f" CPU-second, ratio {ours / library:.3f}")


if __name__ == "__main__":
    main()
