"""How many tokens a second the loader gives: shards on disk -> packed rows, shuffled -> batches, as the trainer asks.

    PYTHONPATH=src python benchmarks/loader.py [--quick]

Documents of random lengths in uint16 shards, read by the trainer's own stream and feed, with the check of every id.
Passing means 4M tokens a second: above what one H200 learns of the smallest model that anyone rents it for.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402

from _result import write_result  # noqa: E402
from homing.lm.data.shards.pack_text import PackedStream  # noqa: E402
from homing.lm.data.shards.read_shards import open_split  # noqa: E402
from homing.lm.phases.pretrain import TextRows  # noqa: E402
from homing.lm.train.compute.batch import Feed  # noqa: E402
from homing.wire import codec, file_names  # noqa: E402
from homing.wire.shard_manifest import DataManifest, Shard, Split  # noqa: E402

MUST = 4_000_000
VOCAB, CONTEXT, ROWS = 32768, 1024, 128
WINDOWS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the tokens, seconds")
    arguments = parser.parse_args()
    num_tokens, num_steps = (4_000_000, 10) if arguments.quick else (64_000_000, 60)
    with tempfile.TemporaryDirectory(prefix="homing-loader-") as folder:
        manifest = make_shards(Path(folder), num_tokens, num_shards=4)
        rates = measure(Path(folder), manifest, num_steps)
    # The machine may be busy with something else: the best window is what the loader can do.
    best, passed = max(rates), max(rates) >= MUST
    figures: dict[str, Any] = {
        "tokens_per_s": round(best),
        "median_tokens_per_s": round(statistics.median(rates)),
        "windows": [round(rate) for rate in rates],
        "must": MUST,
        "cores": len(os.sched_getaffinity(0)),
        "num_tokens": num_tokens,
    }
    if not arguments.quick:
        write_result("loader", figures, passed=passed)
    print(f"{'PASS' if passed else 'FAIL'} {best:,.0f} tok/s at best, {statistics.median(rates):,.0f} in the middle")
    return 0 if passed else 1


def make_shards(folder: Path, num_tokens: int, *, num_shards: int) -> DataManifest:
    generator = np.random.default_rng(0)
    shards = []
    for number in range(num_shards):
        tokens = generator.integers(1, VOCAB, num_tokens // num_shards, dtype=np.uint16)
        lengths = generator.integers(20, 2000, num_tokens)
        ends = np.cumsum(lengths)
        offsets = np.concatenate(([0], ends[ends < len(tokens)], [len(tokens)])).astype("<u8")
        tokens[offsets[:-1].astype(np.int64)] = 0
        data, index = tokens.astype("<u2").tobytes(), offsets.tobytes()
        name, index_name = file_names.shard_name("train", number), file_names.index_name("train", number)
        (folder / name).write_bytes(data)
        (folder / index_name).write_bytes(index)
        shards.append(
            Shard(
                name=name,
                index_name=index_name,
                num_tokens=len(tokens),
                num_documents=len(offsets) - 1,
                num_bytes=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
                index_sha256=hashlib.sha256(index).hexdigest(),
            )
        )
    total = sum(shard.num_tokens for shard in shards)
    split = Split(total, sum(shard.num_documents for shard in shards), 4 * total, shards)
    manifest = DataManifest("uint16", VOCAB, "", [], {"train": split}, [], "")
    (folder / file_names.MANIFEST).write_text(codec.dumps(manifest))
    return manifest


def measure(folder: Path, manifest: DataManifest, num_steps: int) -> list[float]:
    stream = PackedStream(open_split(folder, manifest, "train"), seed=1)
    rows = TextRows(stream, rows_per_step=ROWS, context=CONTEXT, vocab_size=VOCAB, rank=0, num_ranks=1)
    rates = []
    with Feed(rows, first_row=0, rows_per_step=ROWS, device=torch.device("cpu")) as feed:
        feed.next()
        for _ in range(WINDOWS):
            begun = time.perf_counter()
            for _ in range(num_steps):
                feed.next()
            rates.append(num_steps * ROWS * CONTEXT / (time.perf_counter() - begun))
            print(f"{rates[-1]:>12,.0f} tok/s", flush=True)
    return rates


if __name__ == "__main__":
    raise SystemExit(main())
