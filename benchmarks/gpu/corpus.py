"""Text that a machine with Python has anyway, as a data folder: for training on real text where nothing can be fetched.

    prepare(folder, roots, vocab_size=..., most_bytes=...)    source and documentation -> tokenizer, shards, manifest

The same as `homing prep` makes, by the `tokenizers` package alone, which such machines have. One document a file,
duplicates left out, in an order that a seed gives; one in a hundred is held out.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from homing.lm.data.shards.read_shards import file_sha256, read_manifest
from homing.lm.data.shards.write_shards import ShardWriter
from homing.lm.tokenizer.tokenizer import END_OF_TEXT, SPECIALS
from homing.wire import codec, file_names
from homing.wire.shard_manifest import DataManifest, Split

__all__ = ["ROOTS", "prepare"]

ROOTS = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"], "/usr", "/opt")
SOURCE = (".py", ".pyi", ".h", ".hpp", ".cpp", ".cc", ".c", ".cu", ".cuh", ".inc", ".js", ".pl", ".pm", ".f90")
KINDS = (*SOURCE, ".rst", ".md", ".txt", ".html")
LEAST, MOST = 200, 400_000  # characters of a document
TRAINED_ON = 60_000_000  # characters for the tokenizer
HELD_OUT = 100  # one of this many documents
AT_A_TIME, FILES_AT_A_TIME = 512, 256


def prepare(folder: Path, roots: tuple[str, ...] = ROOTS, *, vocab_size: int, most_bytes: int) -> DataManifest:
    """Does nothing where it has been done."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if (folder / file_names.MANIFEST).exists():
        return read_manifest(folder)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    texts = list(documents(roots, most_bytes))
    say(began, f"{len(texts):,} documents read")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS["standard"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(first_of(texts, TRAINED_ON), trainer)
    assert tokenizer.get_vocab_size() == vocab_size, f"too little text for {vocab_size} tokens"
    tokenizer.save(str(folder / file_names.TOKENIZER))
    say(began, "tokenizer trained")
    num_held_out = max(1, len(texts) // HELD_OUT)
    parts = {"val": texts[:num_held_out], "train": texts[num_held_out:]}
    # A special spelled in the text must stay text.
    tokenizer.encode_special_tokens = True
    splits = {name: write_split(folder, name, tokenizer, part) for name, part in parts.items()}
    manifest = DataManifest(
        dtype="uint16", vocab_size=vocab_size, tokenizer_sha256=file_sha256(folder / file_names.TOKENIZER),
        specials=SPECIALS["standard"], splits=splits, source=[], source_sha256="",
    )  # fmt: skip
    (folder / file_names.MANIFEST).write_text(codec.dumps(manifest, indent=1), encoding="utf-8")
    say(began, f"{splits['train'].num_tokens:,} tokens written")
    return manifest


def say(began: float, text: str) -> None:
    print(f"{time.perf_counter() - began:.0f} s: {text}", flush=True)


def documents(roots: tuple[str, ...], most_bytes: int) -> Iterator[str]:
    walked = (os.path.join(at, name) for root in roots for at, _, files in os.walk(root) for name in files)
    paths = sorted({os.path.realpath(path) for path in walked if path.endswith(KINDS)})
    random.Random(0).shuffle(paths)
    seen, num_bytes = set(), 0
    with ProcessPoolExecutor() as pool:
        for text, digest in pool.map(read_text, paths, chunksize=FILES_AT_A_TIME):
            if not LEAST <= len(text) <= MOST or digest in seen:
                continue
            seen.add(digest)
            num_bytes += len(text.encode())
            if num_bytes > most_bytes:
                return
            yield text


def read_text(path: str) -> tuple[str, bytes]:
    """Empty where it is no text."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    return text, hashlib.sha256(text.encode()).digest()


def first_of(texts: list[str], num_characters: int) -> Iterator[str]:
    for text in texts:
        if num_characters <= 0:
            return
        num_characters -= len(text)
        yield text


def write_split(folder: Path, name: str, tokenizer: object, texts: list[str]) -> Split:
    end_of_text = SPECIALS["standard"].index(END_OF_TEXT)
    writer = ShardWriter(folder, name, dtype="uint16", end_of_text_id=end_of_text, shard_tokens=2**27)
    for at in range(0, len(texts), AT_A_TIME):
        some = texts[at : at + AT_A_TIME]
        encoded = [np.array(found.ids, dtype=np.uint32) for found in tokenizer.encode_batch_fast(some)]  # type: ignore[attr-defined]
        starts = np.cumsum([0, *(len(ids) for ids in encoded)]).astype(np.int64)
        writer.append(np.concatenate(encoded), starts, sum(len(text.encode()) for text in some))
    return writer.finish()


if __name__ == "__main__":
    made = prepare(Path("/tmp/homing-corpus"), vocab_size=32768, most_bytes=400_000_000)
    print(json.dumps({name: split.num_tokens for name, split in made.splits.items()}))
