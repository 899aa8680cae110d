"""How fast, how exact and how lean `homing prep` is, against the libraries called bare.

    python benchmarks/prep.py            100 MB for speed, 10 MB to 1 GB for memory
    python benchmarks/prep.py --quick    10 MB for speed, 5 to 60 MB for memory: under a minute, and keeps no result

speed     text file to finished shards, against tiktoken's batch encoder at its best number of threads, file to file
training  tokenizer.json from the text, against rustbpe alone
ids       shards against `tokenizers`, document by document, in order
memory    peak of a process that prepares ever more text: all that is resident, pages of files too

Each figure comes from a process of its own, and the two sides of a ratio take turns on the same text; interpreter
start and imports are counted on neither side. The text is the prose that Debian and PyPI put on any machine (manuals,
read-me files, pages of documentation), each file once, mixed by hash; where that runs out, sentences are made from its
own word pairs with new words in between, never repeated text, which would flatter a cache.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from _result import write_result

MARKER = "<|endoftext|>"
VOCAB_SIZE = 32768
SPECIALS = 16
MB = 1_000_000
# Under the size from which prep cuts a document in two: both sides of a comparison see the same documents.
MAX_DOCUMENT_BYTES = 1_000_000
PROSE = (".md", ".txt", ".rst", ".pod", ".html")
# Under these nearly all is prose, whatever its name ends in; examples in a programming language are the exception.
MANUALS = ("/usr/share/doc/", "/usr/share/man/")
CODE = (".c", ".h", ".cc", ".cpp", ".hpp", ".py", ".pl", ".pm", ".js", ".css", ".svg", ".json", ".xml", ".sh", ".map")


# --- the text ---------------------------------------------------------------------------------------------------------


def real_documents() -> list[bytes]:
    """Prose of this machine, each file once, in an order that has nothing to do with the names."""
    roots = [sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], "/usr/share", "/usr/lib"]
    found: dict[bytes, bytes] = {}
    for root in roots:
        for parent, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                text = _text(os.path.join(parent, name))
                if text:
                    found.setdefault(hashlib.blake2b(text, key=b"mix", digest_size=16).digest(), text)
    return [found[key] for key in sorted(found)]


def _text(path: str) -> bytes:
    name = path.removesuffix(".gz").lower()
    is_prose = name.endswith(PROSE) or (path.startswith(MANUALS) and not name.endswith(CODE))
    if not is_prose or os.path.islink(path) or os.path.getsize(path) > MAX_DOCUMENT_BYTES:
        return b""
    try:
        data = Path(path).read_bytes()
        data = gzip.decompress(data) if path.endswith(".gz") else data
        data.decode()
    except (OSError, ValueError, EOFError, zlib.error):
        return b""
    is_usable = 200 < len(data) < MAX_DOCUMENT_BYTES and MARKER.encode() not in data and not data.isspace()
    # A byte-order mark would be text to one side and none to the other, were it the first of the file.
    return data if is_usable and not data.startswith(b"\xef\xbb\xbf") else b""


def made_documents(documents: list[bytes]) -> Iterator[bytes]:
    """Endless: order-two chains over the words of real text, one word in fifty invented."""
    import numpy as np

    words: list[bytes] = []
    for document in documents:
        words += document.split(b" ")
        if len(words) > 1_500_000:
            break
    names, ids = np.unique(np.array(words, dtype=object), return_inverse=True)
    # A chain is at one position of the text and continues from any position with the same last two words.
    pairs = np.concatenate([[0], ids[:-1]]) * len(names) + ids
    order = np.argsort(pairs[:-1], kind="stable")
    begins = np.searchsorted(pairs[order], pairs, side="left")
    counts = (np.searchsorted(pairs[order], pairs, side="right") - begins).astype(np.float32)
    order, begins, ids = order.astype(np.int32), begins.astype(np.int32), ids.astype(np.int32)
    syllables = [a + b for a in "bcdfghklmnprstvwz" for b in ("a", "e", "i", "o", "u", "ei", "an", "er")]
    chance, chance_np = random.Random(7), np.random.default_rng(7)
    while True:
        at = chance_np.integers(1, len(order), size=1024, dtype=np.int32)
        rows = np.empty((chance.randint(200, 1500), len(at)), dtype=np.int32)
        for row in rows:
            row[:] = ids[at]
            # The last pair of the text may occur nowhere else; a chain that comes there stays there.
            step = (chance_np.random(len(at), dtype=np.float32) * counts[at]).astype(np.int32)
            at = np.where(counts[at] > 0, order[np.minimum(begins[at] + step, len(order) - 1)] + 1, at)
        for chain in rows.T:
            text = names[chain].tolist()
            for spot in chance.sample(range(len(text)), len(text) // 50):
                text[spot] = "".join(chance.choices(syllables, k=chance.randint(2, 4))).encode()
            yield b" ".join(text)


def write_corpus(path: Path, documents: list[bytes], num_bytes: int) -> float:
    """Writes about `num_bytes`; returns the share that is real text."""
    real = made = 0
    with path.open("wb") as file:
        for document in documents:
            if real >= num_bytes:
                break
            real += file.write(document + MARKER.encode())
        invented = made_documents(documents) if real < num_bytes else iter(())
        while real + made < num_bytes:
            made += file.write(next(invented) + MARKER.encode())
    return real / (real + made)


# --- what is measured, each in a process of its own -------------------------------------------------------------------


def measure_ours(corpus: str, out: str, tokenizer: str) -> dict[str, Any]:
    import awkward  # noqa: F401
    import gigatoken  # noqa: F401
    import numpy.ma  # noqa: F401
    import rustbpe  # noqa: F401
    import tokenizers  # noqa: F401

    from homing.lm.data.prep import PrepOrder, Progress, prepare

    began = time.perf_counter()
    at: dict[str, float] = {}

    def report(progress: Progress) -> None:
        at.setdefault(progress.stage, time.perf_counter() - began)

    order = PrepOrder([corpus], Path(out), vocab_size=VOCAB_SIZE, tokenizer=tokenizer, is_forced=True)
    manifest = prepare(order, report)
    tokens = sum(split.num_tokens for split in manifest.splits.values())
    documents = sum(split.num_documents for split in manifest.splits.values())
    total_s = time.perf_counter() - began
    return {"seconds": total_s, "tokenizer_seconds": at["scanned"], "tokens": tokens, "documents": documents}


def measure_tiktoken(corpus: str, out: str, tokenizer: str, num_threads: str) -> dict[str, Any]:
    import numpy as np
    import tiktoken

    from homing.lm.tokenizer.tokenizer import CHAR_TO_BYTE
    from homing.lm.tokenizer.write_files import SPLITS

    vocab = json.loads(Path(tokenizer).read_text(encoding="utf-8"))["model"]["vocab"]
    ranks = {
        bytes(CHAR_TO_BYTE[c] for c in token): number - SPECIALS for token, number in vocab.items() if number >= 16
    }
    encoding = tiktoken.Encoding("bare", pat_str=SPLITS["gpt4"], mergeable_ranks=ranks, special_tokens={})
    encoding.encode_ordinary("warm")
    began = time.perf_counter()
    documents = [text for text in Path(corpus).read_bytes().decode().split(MARKER) if text]
    rows = encoding.encode_ordinary_batch(documents, num_threads=int(num_threads))
    with open(out, "wb") as file:
        for row in rows:
            np.array([0, *row], dtype=np.uint16).tofile(file)
    return {"seconds": time.perf_counter() - began, "tokens": sum(map(len, rows)) + len(rows)}


def measure_rustbpe(corpus: str, out: str, tokenizer: str) -> dict[str, Any]:
    import rustbpe

    from homing.lm.tokenizer.write_files import SPLITS

    began = time.perf_counter()
    documents = Path(corpus).read_bytes().decode().split(MARKER)
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(documents), VOCAB_SIZE - SPECIALS, pattern=SPLITS["gpt4"])
    return {"seconds": time.perf_counter() - began, "vocab": trainer.vocab_size}


def measure_identity(corpus: str, out: str, tokenizer: str) -> dict[str, Any]:
    """Every document of the corpus, as `tokenizers` encodes it, must be the next one of train or the next one of val.

    So a document in the wrong place counts, and so do all after it on that side."""
    import numpy as np
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    reference = Tokenizer.from_file(tokenizer)
    reference.encode_special_tokens = True  # text that spells a special stays text
    sides = [_shard_documents(Path(out), split, np) for split in ("train", "val")]
    heads = [next(side, None) for side in sides]
    documents = [text for text in Path(corpus).read_bytes().decode().split(MARKER) if text]
    different = 0
    for first in range(0, len(documents), 256):
        for row in reference.encode_batch_fast(documents[first : first + 256], add_special_tokens=False):
            ids = np.array(row.ids, dtype="<u2")
            at = next((n for n, head in enumerate(heads) if head is not None and np.array_equal(head, ids)), None)
            if at is None:
                different += 1
            else:
                heads[at] = next(sides[at], None)
    left_over = sum(head is not None for head in heads) + sum(1 for side in sides for _ in side)
    return {"checked": len(documents), "different": different, "left_over": left_over}


def _shard_documents(folder: Path, split: str, np: Any) -> Iterator[Any]:
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    for shard in manifest["splits"][split]["shards"]:
        tokens = np.fromfile(folder / shard["name"], dtype=manifest["dtype"])
        index = np.fromfile(folder / shard["index_name"], dtype="<u8").astype(int)
        for start, end in pairwise(index):
            assert tokens[start] == 0, "a document without <|endoftext|> before it"
            yield tokens[start + 1 : end]


MEASURES = {
    "ours": measure_ours,
    "tiktoken": measure_tiktoken,
    "rustbpe": measure_rustbpe,
    "identity": measure_identity,
}


def peak_mb() -> float:
    """Of this process alone: getrusage would count what the parent held before it became us."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    scale = 1024 * 1024 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def in_child(measure: str, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", measure, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3600, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def child(measure: str, arguments: list[str]) -> None:
    print(json.dumps({**MEASURES[measure](*arguments), "peak_mb": round(peak_mb(), 1)}))


# --- the run ----------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="10 MB, under a minute")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child[0], asked.child[1:])
        return 0
    speed_mb, memory_mb, rounds = (10, (5, 20, 60), 1) if asked.quick else (100, (10, 100, 300, 1000), 5)
    with tempfile.TemporaryDirectory(prefix="homing-prep-") as folder:
        figures = run(Path(folder), speed_mb, memory_mb, rounds)
    checks = judge(figures, is_quick=asked.quick)
    passed = all(checks.values())
    if not asked.quick:
        write_result("prep", {**figures, "checks": checks}, passed=passed)
    for name, is_good in checks.items():
        print(f"{'ok ' if is_good else 'BAD'} {name}")
    print(
        f"{'PASS' if passed else 'FAIL'}: {figures['speed_ratio']:.1f}x tiktoken,"
        f" training {figures['training_ratio']:.2f}x bare rustbpe, {figures['identity']['different']} documents differ"
        f" of {figures['identity']['checked']} checked, peak {max(figures['peak_mb'].values()):.0f} MB,"
        f" {figures['peak_ratio']:.2f} times the smallest"
    )
    return 0 if passed else 1


def run(folder: Path, speed_mb: int, memory_mb: tuple[int, ...], rounds: int) -> dict[str, Any]:
    documents = real_documents()
    corpus = folder / "speed.txt"
    real = write_corpus(corpus, documents, speed_mb * MB)
    print(f"text: {corpus.stat().st_size / MB:.1f} MB, {real:.0%} of it real, {len(documents):,} files of prose here")
    figures: dict[str, Any] = {"megabytes": speed_mb, "real_share": round(real, 3)}

    ours_s, bare_s, bare = [], [], {}
    trained = folder / "trained"
    for _ in range(rounds):
        bare = in_child("rustbpe", corpus, "-", "-")
        bare_s.append(bare["seconds"])
        ours_s.append(in_child("ours", corpus, trained, "")["tokenizer_seconds"])
    figures |= {"rustbpe_s": min(bare_s), "training_s": min(ours_s), "training_ratio": min(ours_s) / min(bare_s)}
    print(f"training: ours {min(ours_s):.2f} s, bare rustbpe {min(bare_s):.2f} s, best of {rounds}")

    tokenizer = trained / "tokenizer.json"
    ours, tiktoken = [], []
    # The first look chooses its threads, and does not count.
    looked = {n: in_child("tiktoken", corpus, folder / "bare.bin", tokenizer, n)["seconds"] for n in thread_counts()}
    num_threads = min(looked, key=lambda count: looked[count])
    for _ in range(rounds):
        tiktoken.append(in_child("tiktoken", corpus, folder / "bare.bin", tokenizer, num_threads))
        ours.append(in_child("ours", corpus, folder / "encoded", tokenizer))
    fast, slow = min(one["seconds"] for one in ours), min(one["seconds"] for one in tiktoken)
    num_bytes = corpus.stat().st_size
    figures |= {
        "ours_mb_per_s": num_bytes / MB / fast,
        "tiktoken_mb_per_s": num_bytes / MB / slow,
        "tiktoken_threads": num_threads,
        "tiktoken_tried_s": {str(count): round(seconds, 2) for count, seconds in looked.items()},
        "speed_ratio": slow / fast,
        "tokens": ours[0]["tokens"],
        "tokens_agree": ours[0]["tokens"] == tiktoken[0]["tokens"],
    }
    print(
        f"encoding: ours {num_bytes / MB / fast:.1f} MB/s, tiktoken {num_bytes / MB / slow:.1f} MB/s on {num_threads}"
        f" threads, best of {rounds}"
    )

    figures["identity"] = in_child("identity", corpus, folder / "encoded", tokenizer)
    print(f"ids: {figures['identity']}")

    figures["peak_mb"] = {}
    for size in memory_mb:
        grown = folder / "grown.txt"
        write_corpus(grown, documents, size * MB)
        figures["peak_mb"][str(size)] = in_child("ours", grown, folder / "grown", tokenizer)["peak_mb"]
    figures["peak_ratio"] = max(figures["peak_mb"].values()) / min(figures["peak_mb"].values())
    figures["training_peak_mb"] = in_child("ours", grown, folder / "grown", "")["peak_mb"]
    print(f"peak MB of encoding by MB of text: {figures['peak_mb']}; with training: {figures['training_peak_mb']}")
    return figures


def thread_counts() -> list[int]:
    """For tiktoken: half of the cores, as many, twice and four times as many; it takes the fastest."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return sorted({max(1, cores // 2), cores, 2 * cores, 4 * cores})


def judge(figures: dict[str, Any], *, is_quick: bool) -> dict[str, bool]:
    peaks = list(figures["peak_mb"].values())
    identity = figures["identity"]
    # In ten MB the fixed costs of a start (loading tokenizers, proving the encoder) are most of the time, so the quick
    # form only tells whether something is badly broken; the claims are the other figures. As to memory, in five MB not
    # every thread gets to hold a piece of text yet.
    least, most, flat = (1.0, 2.0, 1.3) if is_quick else (6.0, 1.1, 1.25)
    return {
        f"at least {least} times as fast as tiktoken": figures["speed_ratio"] >= least,
        f"training takes at most {most} times bare rustbpe": figures["training_ratio"] <= most,
        "as many tokens as tiktoken": figures["tokens_agree"],
        "ids identical to tokenizers, in order": identity["checked"] > 0 and identity["different"] == 0,
        "nothing else in the shards": identity["left_over"] == 0,
        "peak memory of encoding under 500 MB": max(peaks) < 500,
        "peak memory of training under 500 MB": figures["training_peak_mb"] < 500,
        f"memory flat: the largest peak is at most {flat} times the smallest": figures["peak_ratio"] <= flat,
    }


if __name__ == "__main__":
    sys.exit(main())
