"""What is wanted of prep, checked before anything is touched, and what prep tells while it works."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.lm.tokenizer.files import PAPERS, Facts, read_facts
from homing.lm.tokenizer.specials import specials_named
from homing.lm.tokenizer.splits import pattern_named
from homing.lm.tokenizer.train import MAX_SAMPLE_BYTES, MIN_VOCAB
from homing.text_sources import Source, find_sources
from homing.wire.names import TOKENIZER
from homing.wire.template import Unreadable, refuse_link_outside

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
    val_fraction: float = 0.01  # by hash of the document; not used when `validation` names files
    text_field: str = "text"
    vocab_size: int = 32768
    is_vocab_firm: bool = True  # a person's own number; else a smaller one will do where the text gives no more
    split: str = "gpt4"
    specials: str = "standard"
    tokenizer: str = ""  # a tokenizer.json to use as it is
    sample_bytes: int = 100_000_000
    shard_tokens: int = 100_000_000
    take_bytes: int = 0  # of the text, from every file its share; 0: all of it
    is_forced: bool = False  # do finished work again
    # Addresses in a store that `text` and `validation` were fetched from, so that a change in the run file is seen.
    named: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    stage: str  # scan or train, merge, scanned, encode, publish; or reused, resumed
    done_bytes: int = 0
    total_bytes: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0  # in this stage, in this process
    eta_s: float | None = None  # of this stage
    is_tokenizer_given: bool = False  # so its size and sample are not to be chosen
    warning: str = ""
    note: str = ""  # worth knowing, and nothing to mend


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
    def is_part(self) -> bool:
        """Whether the files hold more than is to be taken of them."""
        return 0 < self.take_bytes < self.num_file_bytes

    @property
    def num_bytes(self) -> int:
        """That are to be read, as far as is known beforehand."""
        return self.take_bytes if self.is_part else self.num_file_bytes

    @property
    def stamps(self) -> list[list[object]]:
        return [source.stamp for source in self.sources]


def check_order(order: PrepOrder) -> Facts:
    """The vocabulary that will come out; raises on anything that could not."""
    pattern_named(order.split)
    if not 0 <= order.val_fraction <= 0.5 or 0 < order.val_fraction < MIN_VAL_FRACTION:
        raise DataError(
            what=f"A validation fraction of {order.val_fraction} cannot be used.",
            why=f"It must be 0, or from {MIN_VAL_FRACTION} to 0.5.",
            fix="0.01 is usual; less for much text.",
        )
    if not 1 <= order.sample_bytes <= MAX_SAMPLE_BYTES:
        raise DataError(
            what=f"The tokenizer cannot learn from a sample of {order.sample_bytes:,} bytes.",
            why=f"Words are counted in 32 bits, so the sample ends at {MAX_SAMPLE_BYTES:,} bytes.",
            fix="100MB is plenty for a vocabulary of 32,768.",
        )
    if order.shard_tokens < 1:
        raise DataError("A shard needs at least one token.", why=f"shard_tokens is {order.shard_tokens}.", fix="100M")
    return _check_existing(order) if order.tokenizer else _check_new(order)


def _check_new(order: PrepOrder) -> Facts:
    specials = specials_named(order.specials)
    smallest = MIN_VOCAB + len(specials)
    if order.vocab_size < smallest:
        raise DataError(
            what=f"A vocabulary of {order.vocab_size:,} is too small.",
            why=f"256 bytes and {len(specials)} special token{'s' * (len(specials) > 1)} need {smallest} alone.",
            fix="--vocab-size 8192 suits a few MB of text, 32768 a GB.",
        )
    if order.vocab_size > 1 << 20:
        raise DataError(
            f"A vocabulary of {order.vocab_size:,} is too large.",
            why="The largest is 1,048,576.",
            fix="32768 is usual.",
        )
    return Facts(order.vocab_size, specials, order.split, order.vocab_size - smallest)


def existing_tokenizer(order: PrepOrder) -> Path:
    """The tokenizer.json that the order names, by itself or by its folder."""
    path = Path(order.tokenizer)
    return path / TOKENIZER if path.is_dir() else path


def _check_existing(order: PrepOrder) -> Facts:
    path = existing_tokenizer(order)
    if not path.exists():
        raise DataError(
            what=f"There is no tokenizer at {path}.",
            why="An existing tokenizer was asked for, and none is trained in its place.",
            fix="Name it by --tokenizer PATH, or leave --use-existing-tokenizer out to train one.",
        )
    facts = read_facts(path)
    is_smaller = facts.vocab_size < order.vocab_size and not order.is_vocab_firm
    if facts.vocab_size != order.vocab_size and not is_smaller:
        raise DataError(
            what=f"{path} has a vocabulary of {facts.vocab_size:,}, and {order.vocab_size:,} was asked for.",
            why="Model and tokenizer must agree, and none is trained in its place.",
            fix=f"--vocab-size {facts.vocab_size}, or leave --use-existing-tokenizer out to train one.",
        )
    return facts


def find_inputs(order: PrepOrder) -> Inputs:
    if not order.text:
        raise DataError("No text was named.", why="prep needs at least one file.", fix="--text 'books/*.txt'")
    text = find_sources(order.text, key="text")
    validation = find_sources(order.validation, key="validation")
    held_out = {os.path.realpath(source.path) for source in validation.sources}
    kept = [source for source in text.sources if os.path.realpath(source.path) not in held_out]
    warnings = text.warnings + validation.warnings
    if len(kept) < len(text.sources):
        count = len(text.sources) - len(kept)
        warnings.append(
            f"{count} of the text files {'is' if count == 1 else 'are'} also validation, and not trained on."
        )
    if not kept:
        raise DataError(
            what="Every text file is also a validation file.",
            why="Nothing is left to train on.",
            fix="Leave --validation out; documents are then held out by their hash.",
        )
    return Inputs(kept, validation.sources, warnings, order.take_bytes)


def settings_of(order: PrepOrder, facts: Facts, inputs: Inputs) -> dict[str, Any]:
    """All that decides what comes out, beside the text; lies in the manifest."""
    settings = {
        "text": list(order.text),
        "num_text_files": len(inputs.text),  # the first ones of the source list; the others are validation
        "validation": list(order.validation),
        "val_fraction": 0.0 if order.validation else float(order.val_fraction),
        "text_field": order.text_field,
        "vocab_size": facts.vocab_size,
        "split": facts.split,
        "specials": facts.specials,
        "num_merges": facts.num_merges,
        # "": trained on this text
        "tokenizer_sha256": file_sha256(existing_tokenizer(order)) if order.tokenizer else "",
        "sample_bytes": 0 if order.tokenizer else order.sample_bytes,
        "shard_tokens": order.shard_tokens,
    }
    if order.named:
        settings["named"] = order.named
    if inputs.is_part:
        settings["take_bytes"] = order.take_bytes
    if facts.why_slow:  # somebody else's tokenizer, with the papers that lie beside it
        _refuse_links(existing_tokenizer(order).parent)
        beside = [existing_tokenizer(order).parent / name for name in PAPERS]
        settings["papers"] = {path.name: file_sha256(path) for path in beside if path.is_file()}
    return settings


def _refuse_links(folder: Path) -> None:
    try:
        for name in PAPERS:
            refuse_link_outside(folder / name)
    except Unreadable as exc:
        raise DataError(f"{exc.path} cannot be used.", str(exc), "Put the file itself there.") from exc


def file_sha256(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
