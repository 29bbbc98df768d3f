"""How fast is prepare.py compared with the tokenizer library alone?  python bench/corpus_rate.py

Both encode the same records, text of the standard library, on one core. The library is tiktoken's own batch
call on texts that are in memory. prepare.py does one unit of its work, from a .jsonl file to a finished part
on disk: reading, json, two hashes, encoding, end-of-document, shuffle, fsync. Rates are per CPU-second, so
that other load on the machine counts less. The last line is the ratio of the medians.
"""
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import prepare
from corpus import build, tokenizer
from corpus.text import list_spans
from interface.command_line import command_line, wrong_input


@dataclass(frozen=True)
class Flags:
    mb: float = 32  # megabytes of text
    rounds: int = 5  # each round measures both, one after the other
    vocab_size: int = 32768  # of the tokenizer, which is trained on 8 MB of the text

    RANGES = {"mb": (0.01, 10**5), "rounds": (1, 10**4), "vocab_size": (257, 2**20)}


def records(megabytes):
    """Return documents of about 4,000 characters, [str], from the standard library with its tests."""
    texts, left = [], megabytes * 1e6
    for span in prepare.list_sources(prepare.parse(["stdlib", "--with-tests"])):
        for text in prepare.all_documents([[span]], "text"):
            texts += [text[at : at + 4000] for at in range(0, len(text), 4000)]
            left -= len(text)
        if left < 0:
            break
    return texts


def per_cpu_second(megabytes, work):
    """Return the MB per second of CPU time that work() takes."""
    start = time.process_time()
    work()
    return megabytes / (time.process_time() - start)


def main(argv=None):
    with wrong_input():
        flags = command_line(Flags, sys.argv[1:] if argv is None else argv, "corpus_rate.py", __doc__)
    texts = records(flags.mb)
    mb = sum(len(text.encode()) for text in texts) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        path = folder / "a.jsonl"
        path.write_text("".join(json.dumps({"id": k, "text": t}) + "\n" for k, t in enumerate(texts)))
        vocab = tokenizer.train_bpe(texts[:2000], flags.vocab_size)
        vocab.save(folder / "tokenizer.json")
        settings = build.Settings(str(folder / "tokenizer.json"), vocab.sha256, "<u2", "text", 0.1, 1)
        unit = list_spans(str(path), 1 << 40, "text")
        build.load_tokenizer(settings.tokenizer)  # prepare.py loads it once per process, not per unit
        library, ours = [], []
        for k in range(flags.rounds):
            library.append(per_cpu_second(
                mb, lambda: vocab.encoding.encode_ordinary_batch(texts, num_threads=1)))
            job = k, str(k), unit
            ours.append(per_cpu_second(mb, lambda job=job: build.encode_unit(job, folder, settings)))
            print(f"round {k + 1}: library {library[-1]:.2f}, prepare.py {ours[-1]:.2f} MB/s per CPU-second",
                  flush=True)
    library, ours = statistics.median(library), statistics.median(ours)
    print(f"{mb:.0f} MB, {vocab.n_vocab:,} symbols: library {library:.2f}, prepare.py {ours:.2f} MB/s per"
          f" CPU-second, ratio {ours / library:.3f}")


if __name__ == "__main__":
    main()
