"""How fast, how exact and how lean `homing prep` is, against the libraries called bare.

    python benchmarks/prep.py            100 MB for speed, 10 MB to 1 GB for memory
    python benchmarks/prep.py --quick    10 MB, 5 and 20 MB: under a minute

speed     text file to finished shards, against tiktoken's batch encoder on all cores, file to file
training  tokenizer.json from the text, against rustbpe alone
ids       shards against `tokenizers`, document by document
memory    peak of a process that prepares ever more text

Each figure comes from a process of its own, and the two sides of a ratio take turns on the same text; interpreter
start and imports are counted on neither side. The text is what Debian and PyPI put on any machine, each file once,
mixed by hash; where that runs out, sentences are made from its own word pairs with new words in between, never
repeated text, which would flatter a cache.
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
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from _result import write_result

MARKER = "<|endoftext|>"
VOCAB_SIZE = 32768
SPECIALS = 16
MB = 1_000_000
ENDINGS = (".py", ".pyi", ".md", ".txt", ".rst", ".pod", ".pm", ".h", ".html")
ROOTS = ["/usr/share/doc", "/usr/share/man", "/usr/share/perl", "/usr/share/perl5", "/usr/include"]


# --- the text ---------------------------------------------------------------------------------------------------------


def real_documents(wanted: int) -> list[bytes]:
    """Files of this machine, each once, in an order that has nothing to do with their names."""
    roots = [sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], *ROOTS]
    found: dict[bytes, bytes] = {}
    size = 0
    for root in roots:
        for parent, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                text = _text(Path(parent, name), is_any=root.startswith("/usr/share"))
                key = hashlib.blake2b(text, key=b"mix", digest_size=16).digest()
                if text and key not in found:
                    found[key] = text
                    size += len(text)
        # Every root is read whole, so that the mix does not depend on how much is wanted; enough is enough, though.
        if size > 3 * wanted:
            break
    return [found[key] for key in sorted(found)]


def _text(path: Path, *, is_any: bool) -> bytes:
    if path.is_symlink() or not (is_any or path.name.endswith(ENDINGS)):
        return b""
    try:
        data = path.read_bytes() if path.stat().st_size < 2 * MB else b""
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        data.decode()
    except (OSError, ValueError, EOFError, gzip.BadGzipFile):
        return b""
    return data if 200 < len(data) < 2 * MB and MARKER.encode() not in data else b""


def made_documents(documents: list[bytes]) -> Iterator[bytes]:
    """Endless: order-two chains over the words of real text, one word in fifty invented."""
    chance = random.Random(7)
    words: list[str] = []
    for document in documents:
        words += document.decode().split(" ")
        if len(words) > 1_500_000:
            break
    follow: dict[tuple[str, str], list[str]] = {}
    for first, second, third in zip(words, words[1:], words[2:], strict=False):
        follow.setdefault((first, second), []).append(third)
    starts = list(follow)
    syllables = [a + b for a in "bcdfghklmnprstvwz" for b in ("a", "e", "i", "o", "u", "ei", "an", "er")]
    while True:
        pair = chance.choice(starts)
        out = list(pair)
        for _ in range(chance.randint(200, 1500)):
            after = follow.get(pair)
            word = chance.choice(after) if after else chance.choice(chance.choice(starts))
            pair = (pair[1], word)
            is_new = chance.random() < 0.02
            out.append("".join(chance.choices(syllables, k=chance.randint(2, 4))) if is_new else word)
        yield " ".join(out).encode()


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
    import rustbpe  # noqa: F401
    import tokenizers  # noqa: F401

    from homing.lm.prep import PrepOrder, Progress, prepare

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


def measure_tiktoken(corpus: str, out: str, tokenizer: str) -> dict[str, Any]:
    import numpy as np
    import tiktoken

    from homing.lm.tokenizer.bytes_as_text import CHAR_TO_BYTE
    from homing.lm.tokenizer.splits import SPLITS

    vocab = json.loads(Path(tokenizer).read_text(encoding="utf-8"))["model"]["vocab"]
    ranks = {
        bytes(CHAR_TO_BYTE[c] for c in token): number - SPECIALS for token, number in vocab.items() if number >= 16
    }
    encoding = tiktoken.Encoding("bare", pat_str=SPLITS["gpt4"], mergeable_ranks=ranks, special_tokens={})
    encoding.encode_ordinary("warm")
    began = time.perf_counter()
    documents = [text for text in Path(corpus).read_bytes().decode().split(MARKER) if text]
    rows = encoding.encode_ordinary_batch(documents, num_threads=os.cpu_count() or 1)
    with open(out, "wb") as file:
        for row in rows:
            np.array([0, *row], dtype=np.uint16).tofile(file)
    return {"seconds": time.perf_counter() - began, "tokens": sum(map(len, rows)) + len(rows)}


def measure_rustbpe(corpus: str, out: str, tokenizer: str) -> dict[str, Any]:
    import rustbpe

    from homing.lm.tokenizer.splits import SPLITS

    began = time.perf_counter()
    documents = Path(corpus).read_bytes().decode().split(MARKER)
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(documents), VOCAB_SIZE - SPECIALS, pattern=SPLITS["gpt4"])
    return {"seconds": time.perf_counter() - began, "vocab": trainer.vocab_size}


def measure_identity(corpus: str, out: str, tokenizer: str, max_bytes: int = 0) -> dict[str, Any]:
    """Every document of the corpus (or an even part of it) in the shards, id by id."""
    import numpy as np

    from homing.lm.tokenizer import load_tokenizer

    reference = load_tokenizer(tokenizer)
    shards = {split: _shard_documents(Path(out), split, np) for split in ("train", "val")}
    waiting = {split: next(rows, None) for split, rows in shards.items()}
    documents = [text for text in Path(corpus).read_bytes().decode().split(MARKER) if text.strip()]
    every = max(1, round(sum(map(len, documents)) / max_bytes)) if max_bytes else 1
    wrong = checked = 0
    for number, text in enumerate(documents):
        # Both sides are in the order of the file; the next of one of them is this document.
        is_checked = number % every == 0
        wanted = reference.encode(text) if is_checked else None
        sides = [split for split, ids in waiting.items() if ids is not None and _may_be(ids, text, wanted, reference)]
        if not sides:
            wrong += 1
            continue
        checked += is_checked
        waiting[sides[0]] = next(shards[sides[0]], None)
    left = sum(ids is not None for ids in waiting.values())
    return {"checked": checked, "different": wrong + left, "documents": len(documents)}


def _may_be(ids: Any, text: str, wanted: list[int] | None, reference: Any) -> bool:
    return ids.tolist() == wanted if wanted is not None else bool(reference.decode(ids.tolist()) == text)


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
    typed: list[Any] = [int(a) if a.isdigit() else a for a in arguments]
    print(json.dumps({**MEASURES[measure](*typed), "peak_mb": round(peak_mb(), 1)}))


# --- the run ----------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="10 MB, under a minute")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child[0], asked.child[1:])
        return 0
    speed_mb, memory_mb, rounds = (10, (5, 20), 1) if asked.quick else (100, (10, 100, 1000), 3)
    with tempfile.TemporaryDirectory(prefix="homing-prep-") as folder:
        figures = run(Path(folder), speed_mb, memory_mb, rounds, is_quick=asked.quick)
    checks = judge(figures, is_quick=asked.quick)
    passed = all(checks.values())
    write_result("prep-quick" if asked.quick else "prep", {**figures, "checks": checks}, passed=passed)
    for name, is_good in checks.items():
        print(f"{'ok ' if is_good else 'BAD'} {name}")
    print(
        f"{'PASS' if passed else 'FAIL'}: {figures['speed_ratio']:.1f}x tiktoken,"
        f" training {figures['training_ratio']:.2f}x bare rustbpe, {figures['identity']['different']} documents differ"
        f" of {figures['identity']['checked']} checked, peak {max(figures['peak_mb'].values()):.0f} MB"
    )
    return 0 if passed else 1


def run(folder: Path, speed_mb: int, memory_mb: tuple[int, ...], rounds: int, *, is_quick: bool) -> dict[str, Any]:
    documents = real_documents(max(speed_mb, *memory_mb) * MB)
    corpus = folder / "speed.txt"
    real = write_corpus(corpus, documents, speed_mb * MB)
    print(f"text: {corpus.stat().st_size / MB:.1f} MB, {real:.0%} of it real, {len(documents):,} files on this machine")
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
    for _ in range(rounds):
        tiktoken.append(in_child("tiktoken", corpus, folder / "bare.bin", tokenizer))
        ours.append(in_child("ours", corpus, folder / "encoded", tokenizer))
    fast, slow = min(one["seconds"] for one in ours), min(one["seconds"] for one in tiktoken)
    num_bytes = corpus.stat().st_size
    figures |= {
        "ours_mb_per_s": num_bytes / MB / fast,
        "tiktoken_mb_per_s": num_bytes / MB / slow,
        "speed_ratio": slow / fast,
        "tokens": ours[0]["tokens"],
        "tokens_agree": ours[0]["tokens"] == tiktoken[0]["tokens"],
    }
    print(
        f"encoding: ours {num_bytes / MB / fast:.1f} MB/s, tiktoken {num_bytes / MB / slow:.1f} MB/s, best of {rounds}"
    )

    checked_bytes = 2 * MB if is_quick else 0
    figures["identity"] = in_child("identity", corpus, folder / "encoded", tokenizer, checked_bytes)
    print(f"ids: {figures['identity']}")

    figures["peak_mb"] = {}
    for size in memory_mb:
        grown = folder / "grown.txt"
        write_corpus(grown, documents, size * MB)
        figures["peak_mb"][str(size)] = in_child("ours", grown, folder / "grown", tokenizer)["peak_mb"]
    figures["training_peak_mb"] = in_child("ours", grown, folder / "grown", "")["peak_mb"]
    print(f"peak MB of encoding by MB of text: {figures['peak_mb']}; with training: {figures['training_peak_mb']}")
    return figures


def judge(figures: dict[str, Any], *, is_quick: bool) -> dict[str, bool]:
    peaks = list(figures["peak_mb"].values())
    identity = figures["identity"]
    # In ten MB the fixed costs of a start (loading tokenizers, proving the encoder) are most of the time, so the quick
    # form only tells whether something is badly broken; the claims are the other pair.
    least, most = (1.0, 2.0) if is_quick else (6.0, 1.1)
    return {
        f"at least {least} times as fast as tiktoken": figures["speed_ratio"] >= least,
        f"training takes at most {most} times bare rustbpe": figures["training_ratio"] <= most,
        "as many tokens as tiktoken": figures["tokens_agree"],
        "ids identical to tokenizers": identity["checked"] > 0 and identity["different"] == 0,
        "peak memory of encoding under 500 MB": max(peaks) < 500,
        "peak memory of training under 500 MB": figures["training_peak_mb"] < 500,
        "memory flat: the most text takes under twice the memory of the least": max(peaks) < 2 * peaks[0],
    }


if __name__ == "__main__":
    sys.exit(main())
