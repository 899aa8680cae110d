"""Defines the settings for `homing prep`, checks them before anything is written, and defines its progress reports."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.find_source_files import Source, find_sources, may_exceed
from homing.lm.tokenizer.tokenizer import specials_named
from homing.lm.tokenizer.train_bpe import MAX_SAMPLE_BYTES, MIN_VOCAB
from homing.lm.tokenizer.write_files import METADATA_FILES, Facts, pattern_named, read_facts
from homing.wire.chat_template import Unreadable, refuse_link_outside
from homing.wire.file_names import TOKENIZER

__all__ = [
    "Inputs",
    "PrepOrder",
    "Progress",
    "check_order",
    "existing_tokenizer",
    "file_sha256",
    "find_inputs",
    "settings_of",
]

MIN_VAL_FRACTION = 0.0001


@dataclass(frozen=True)
class PrepOrder:
    text: list[str]  # paths, globs, folders
    dir: Path
    validation: list[str] = field(default_factory=list)
    val_fraction: float = 0.01  # fraction of documents to hold out, by hash; ignored if `validation` is set
    text_field: str = "text"
    vocab_size: int = 32768
    is_vocab_firm: bool = True  # whether the user set `vocab_size`; if not, a smaller vocabulary is accepted too
    split: str = "gpt4"
    specials: str = "standard"
    tokenizer: str = ""  # path of an existing tokenizer.json to use
    sample_bytes: int = 100_000_000
    shard_tokens: int = 100_000_000
    take_bytes: int = 0  # number of bytes to use, taken from all files in proportion to their sizes; 0: all
    is_forced: bool = False  # redo finished work
    # The store URLs from which `text` and `validation` were fetched, so that a change in the run file is detected.
    named: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    stage: str  # scan | train | merge | scanned | encode | publish | reused | resumed
    done_bytes: int = 0
    total_bytes: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0  # time spent in this stage by this process
    eta_s: float | None = None  # estimated remaining seconds of this stage
    is_tokenizer_given: bool = False  # True if an existing tokenizer is used; its size cannot change
    warning: str = ""
    note: str = ""  # a message for the user that requires no action


@dataclass(frozen=True)
class Inputs:
    text: list[Source]
    validation: list[Source]
    warnings: list[str]
    take_bytes: int = 0

    @property
    def sources(self) -> list[Source]:
        return [*self.text, *self.validation]

    @property
    def num_file_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources)

    @property
    def num_text_bytes(self) -> int:
        """Estimate the size of all text. It is larger than that of the files if they are compressed."""
        return sum(source.num_text_bytes for source in self.sources)

    @property
    def is_part(self) -> bool:
        """True if the files may contain more text than prep will use."""
        return may_exceed(self.take_bytes, self.sources)

    @property
    def num_bytes(self) -> int:
        """How many bytes prep is expected to read: of text if it uses only a part, else of the files on disk."""
        return min(self.take_bytes, self.num_text_bytes) if self.is_part else self.num_file_bytes

    @property
    def stamps(self) -> list[list[object]]:
        return [source.stamp for source in self.sources]


def check_order(order: PrepOrder) -> Facts:
    """Return the properties of the resulting tokenizer; raises DataError if the request cannot be fulfilled."""
    pattern_named(order.split)
    if not 0 <= order.val_fraction <= 0.5 or 0 < order.val_fraction < MIN_VAL_FRACTION:
        raise DataError(
            what=f"Invalid validation fraction: {order.val_fraction}",
            why=f"It must be 0, or between {MIN_VAL_FRACTION} and 0.5.",
            fix="Use 0.01, or less for a large dataset.",
        )
    if not 1 <= order.sample_bytes <= MAX_SAMPLE_BYTES:
        raise DataError(
            what=f"Invalid tokenizer sample size: {order.sample_bytes:,} bytes",
            why=f"Word counts are 32-bit, so the maximum is {MAX_SAMPLE_BYTES:,} bytes.",
            fix="Use 100MB; it is enough for a vocabulary of 32,768.",
        )
    if order.shard_tokens < 1:
        raise DataError(
            "A shard must hold at least one token.",
            why=f"shard_tokens is {order.shard_tokens}.",
            fix="Set data.shard_tokens: 100M",
        )
    return _check_existing(order) if order.tokenizer else _check_new(order)


def _check_new(order: PrepOrder) -> Facts:
    specials = specials_named(order.specials)
    smallest = MIN_VOCAB + len(specials)
    if order.vocab_size < smallest:
        raise DataError(
            what=f"A vocabulary of {order.vocab_size:,} is too small.",
            why=f"The 256 bytes and {len(specials)} special token{'s' * (len(specials) > 1)} need {smallest} entries.",
            fix="Use --vocab-size 8192 for a few MB of text, or 32768 for 1 GB.",
        )
    if order.vocab_size > 1 << 20:
        raise DataError(
            f"A vocabulary of {order.vocab_size:,} is too large.",
            why="The maximum is 1,048,576.",
            fix="Use --vocab-size 32768",
        )
    return Facts(order.vocab_size, specials, order.split, order.vocab_size - smallest)


def existing_tokenizer(order: PrepOrder) -> Path:
    """Return the path of the existing tokenizer.json to use. `order.tokenizer` is that file or its folder."""
    path = Path(order.tokenizer)
    return path / TOKENIZER if path.is_dir() else path


def _check_existing(order: PrepOrder) -> Facts:
    path = existing_tokenizer(order)
    if not path.exists():
        raise DataError(
            what=f"No tokenizer at {path}.",
            why="With --use-existing-tokenizer, homing does not train a new one.",
            fix="Set --tokenizer PATH, or remove --use-existing-tokenizer to train a new one.",
        )
    facts = read_facts(path)
    is_smaller = facts.vocab_size < order.vocab_size and not order.is_vocab_firm
    if facts.vocab_size != order.vocab_size and not is_smaller:
        raise DataError(
            what=f"{path} has a vocabulary of {facts.vocab_size:,}, but {order.vocab_size:,} was requested.",
            why="The model and the tokenizer must have the same vocabulary size,"
            " and --use-existing-tokenizer keeps this tokenizer.",
            fix=f"Use --vocab-size {facts.vocab_size}, or remove --use-existing-tokenizer to train a new one.",
        )
    return facts


def find_inputs(order: PrepOrder) -> Inputs:
    if not order.text:
        raise DataError(
            "No text files were given.",
            why="homing prep needs at least one text file.",
            fix="For example: --text 'books/*.txt'",
        )
    text = find_sources(order.text, key="text")
    validation = find_sources(order.validation, key="validation")
    held_out = {os.path.realpath(source.path) for source in validation.sources}
    kept = [source for source in text.sources if os.path.realpath(source.path) not in held_out]
    warnings = text.warnings + validation.warnings
    if len(kept) < len(text.sources):
        count = len(text.sources) - len(kept)
        warnings.append(
            f"{count} text {'file is' if count == 1 else 'files are'} also listed for validation"
            " and will not be used for training."
        )
    if not kept:
        raise DataError(
            what="Every text file is also a validation file.",
            why="Nothing is left to train on.",
            fix="Remove --validation; homing then holds out documents by hash.",
        )
    return Inputs(kept, validation.sources, warnings, order.take_bytes)


def settings_of(order: PrepOrder, facts: Facts, inputs: Inputs) -> dict[str, Any]:
    """Return all settings that affect the result, for the manifest. The text itself is not included."""
    settings = {
        "text": list(order.text),
        "num_text_files": len(inputs.text),  # in the list of sources, these files precede the validation files
        "validation": list(order.validation),
        "val_fraction": 0.0 if order.validation else float(order.val_fraction),
        "text_field": order.text_field,
        "vocab_size": facts.vocab_size,
        "split": facts.split,
        "specials": facts.specials,
        "num_merges": facts.num_merges,
        # There is no hash if the tokenizer is trained on this text.
        "tokenizer_sha256": file_sha256(existing_tokenizer(order)) if order.tokenizer else "",
        "sample_bytes": 0 if order.tokenizer else order.sample_bytes,
        "shard_tokens": order.shard_tokens,
    }
    if order.named:
        settings["named"] = order.named
    if inputs.is_part:
        settings["take_bytes"] = order.take_bytes
    if facts.why_slow:  # a third-party tokenizer, which has its own accompanying files
        _refuse_links(existing_tokenizer(order).parent)
        metadata_paths = [existing_tokenizer(order).parent / name for name in METADATA_FILES]
        settings["metadata"] = {path.name: file_sha256(path) for path in metadata_paths if path.is_file()}
    return settings


def _refuse_links(folder: Path) -> None:
    try:
        for name in METADATA_FILES:
            refuse_link_outside(folder / name)
    except Unreadable as exc:
        raise DataError(f"Cannot use {exc.path}.", str(exc), "Replace the link with the file itself.") from exc


def file_sha256(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
