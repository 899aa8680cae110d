"""Prepares the conversations of one phase: order -> checks -> train or val -> shards -> manifest (written last).

Preparation can be killed at any point and started again: shards without a manifest are ignored, and an existing result
for the same files, settings, tokenizer and template is reused. The findings about the files are stored next to the
result, in report.json.

A shard consists of three files: ids, index and mask. They are hashed while they are written, and always end with a
complete conversation.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from homing import __version__
from homing.errors import DataError
from homing.lm.data.chat.chat_settings import ChatInputs, ChatOrder, copies_of, find_inputs, open_renderer, settings_of
from homing.lm.data.chat.check_chats import Doctor, Kept
from homing.lm.data.chat.render import Example, Renderer
from homing.lm.data.prep.prep_settings import file_sha256
from homing.lm.data.prep.work_folder import Work, open_work, sync_folder, write_whole
from homing.lm.data.shards.pack_chats import PackedConversations, mixture_of, open_conversations
from homing.lm.data.shards.write_shards import dtype_for
from homing.wire.codec import WireError, dumps, loads
from homing.wire.file_names import MANIFEST, index_name, mask_name, shard_name
from homing.wire.shard_manifest import DataManifest, Shard, SourceFile, Split

__all__ = ["MOST", "REPORT", "ConversationWriter", "Prepared", "prepare_chat"]

REPORT = "report.json"
MOST = 0.9  # the report states the context length at which this fraction of conversations fits without being cut
_MOST_FAULTS = 0.5  # prep fails if more than this fraction of a file's lines is invalid
_MAX_FINDINGS = 200  # maximum number of findings listed in the report; all are counted


@dataclass(frozen=True)
class Prepared:
    manifest: DataManifest
    report: dict[str, Any]  # counts, files, findings
    is_reused: bool


def prepare_chat(order: ChatOrder, notify: Callable[[int, int], None] = lambda done, total: None) -> Prepared:
    """Write shards and manifest to `order.dir`. `notify(bytes read, total)` reports progress."""
    renderer = open_renderer(order.tokenizer)
    inputs = find_inputs(order)
    settings = settings_of(order, renderer)
    with open_work(order.dir) as work:
        done = None if order.is_forced else _find_finished(order.dir, settings, inputs)
        if done is not None:
            return done
        work.begin({}, is_forced=True)
        try:
            return _make(order, inputs, settings, renderer, work, notify)
        finally:
            work.discard()


def _make(
    order: ChatOrder,
    inputs: ChatInputs,
    settings: dict[str, Any],
    renderer: Renderer,
    work: Work,
    notify: Callable[[int, int], None],
) -> Prepared:
    doctor = Doctor(renderer, order.context)
    held_out = set() if order.validation else _held_out(inputs, order.val_fraction)
    dtype = dtype_for(renderer.tokens.vocab_size)
    writers = {
        split: ConversationWriter(work.folder, split, dtype=dtype, shard_tokens=order.shard_tokens)
        for split in ("train", "val")
    }
    try:
        sources = _write_all(order, inputs, doctor, held_out, writers, notify)
        splits = {name: writer.finish() for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()
    _check(doctor, inputs, splits["train"])
    manifest = _manifest(inputs, doctor, renderer, dtype, splits, {"order": settings, "sources": sources})
    manifest.settings["targets"] = {name: writer.num_targets for name, writer in writers.items()}
    manifest.settings.update(_rows(work.folder, manifest, order.context))
    report = _report(doctor, manifest)
    _publish(work, manifest, inputs, report)
    return Prepared(manifest, report, is_reused=False)


def _held_out(inputs: ChatInputs, fraction: float) -> set[bytes]:
    """Return the digests of the conversations to hold out: the lowest hashes, exactly the requested fraction of all.

    The hash ignores case and white space, so that near-identical conversations end up in the same split.
    """
    digests: set[bytes] = set()
    if fraction:
        doctor = Doctor()
        for files in inputs.chat:
            for file in files:
                digests.update(kept.conversation.loose_digest() for kept in doctor.examine(file, "train"))
    count = max(1, round(fraction * len(digests))) if fraction and len(digests) > 1 else 0
    return set(sorted(digests)[:count])


def _write_all(
    order: ChatOrder,
    inputs: ChatInputs,
    doctor: Doctor,
    held_out: set[bytes],
    writers: dict[str, ConversationWriter],
    notify: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """Write all conversations; return the statistics of each source, in shard order. Validation files come first."""
    done = 0

    def examine(file: Any, side: str) -> Iterator[Kept]:
        nonlocal done
        doctor.notify = lambda num_bytes: notify(done + num_bytes, inputs.num_bytes)
        yield from doctor.examine(file, side)
        done += file.num_bytes

    for file in inputs.validation:
        for kept in examine(file, "val"):
            _append(writers["val"], kept)
    sources: list[dict[str, Any]] = []
    # number of conversations from validation files, which is added to the count of the first source below
    num_given = writers["val"].num_conversations
    for source, files in zip(order.chat, inputs.chat, strict=True):
        before = {name: writer.num_conversations for name, writer in writers.items()}
        question = ""
        for file in files:
            for kept in examine(file, "train"):
                is_val = bool(held_out) and kept.conversation.loose_digest() in held_out
                _append(writers["val" if is_val else "train"], kept)
                question = question or _question(kept)
        num = {name: writer.num_conversations - before[name] for name, writer in writers.items()}
        num["val"] += num_given
        num_given = 0
        made = {"path": source.path, "weight": source.weight, "repeat": source.repeat, "num": num, "question": question}
        sources.append(made)
    copies = copies_of(order.chat, [source["num"]["train"] for source in sources])
    return [{**source, "copies": copy} for source, copy in zip(sources, copies, strict=True)]


def _question(kept: Kept) -> str:
    """Return the first user message, used as a prompt for samples during training."""
    turns = (str(turn["content"]) for turn in kept.conversation.messages if turn["role"] == "user")
    return next((turn for turn in turns if turn.strip()), "")


def _append(writer: ConversationWriter, kept: Kept) -> None:
    num_text_bytes = sum(len(str(message["content"]).encode()) for message in kept.conversation.messages)
    for example in kept.examples:
        writer.append(example, num_text_bytes)
        num_text_bytes = 0


def _check(doctor: Doctor, inputs: ChatInputs, train: Split) -> None:
    # Check validation files too, because invalid lines in them matter just as much.
    for file in doctor.files:
        if file.num_lines and file.num_faults > _MOST_FAULTS * file.num_lines:
            first = next(f for f in doctor.findings if f.path == file.path and f.is_fault)
            raise DataError(
                what=f"{file.path}: {file.num_faults:,} of {file.num_lines:,} lines are invalid.",
                why=f"First problem: {first}",
                fix=f"Fix the invalid lines. To list them all, run: homing data check {shlex.quote(file.path)}",
            )
    if not train.num_documents:
        why = ", ".join(f"{count:,} {kind}" for kind, count in doctor.counts.most_common(5))
        raise DataError(
            what="No conversations left to train on.",
            why=f"Problems found: {why or 'none'}.",
            fix=f"Check the file line by line: homing data check {shlex.quote(inputs.sources[-1].path)}",
        )
    for source in inputs.sources:
        stat = os.stat(source.path)
        if (stat.st_size, stat.st_mtime_ns) != (source.num_bytes, source.mtime_ns):
            raise DataError(
                what=f"{source.path} changed while homing was reading it.",
                why="Its size or modification time has changed since homing started.",
                fix="Wait until the file is no longer being modified, then run the same command again.",
            )


def _manifest(
    inputs: ChatInputs,
    doctor: Doctor,
    renderer: Renderer,
    dtype: str,
    splits: dict[str, Split],
    settings: dict[str, Any],
) -> DataManifest:
    hashes = {(file.path, file.side): file.sha256 for file in doctor.files}
    sides = ["val"] * len(inputs.validation) + ["train"] * sum(map(len, inputs.chat))
    source = [
        SourceFile(file.path, file.num_bytes, hashes[file.path, side])
        for file, side in zip(inputs.sources, sides, strict=True)
    ]
    lines = "".join(f"{side} {file.num_bytes} {file.sha256}\n" for side, file in zip(sides, source, strict=True))
    by_id = sorted(renderer.tokens.markers, key=renderer.tokens.markers.__getitem__)
    return DataManifest(
        dtype=dtype,
        vocab_size=renderer.tokens.vocab_size,
        tokenizer_sha256=settings["order"]["tokenizer_sha256"],
        specials=by_id,
        splits=splits,
        source=source,
        source_sha256=hashlib.sha256(lines.encode()).hexdigest(),
        settings=settings,
        code_version=__version__,
        template_sha256=renderer.template.sha256,
    )


def _rows(folder: Path, manifest: DataManifest, context: int) -> dict[str, Any]:
    """Return the number of rows in an epoch and the fraction of padding, by packing the epoch once."""
    split = open_conversations(folder, manifest, "train")
    packed = PackedConversations(split, mixture_of(manifest, "train"), context=context, seed=0)
    num_rows = packed.num_rows()
    num_used = sum(int(split.lengths[i]) - 1 for row in range(num_rows) for i in packed.conversations_in(row))
    return {"rows_per_epoch": num_rows, "context": context, "padding": round(1 - num_used / (num_rows * context), 6)}


def _report(doctor: Doctor, manifest: DataManifest) -> dict[str, Any]:
    return {
        "files": [asdict(file) for file in doctor.files],
        "counts": dict(doctor.counts),
        "findings": [asdict(finding) for finding in doctor.sorted_findings()[:_MAX_FINDINGS]],
        "num_faults": doctor.num_faults,
        "fit": _fit(doctor, manifest.settings["context"]),
        "rows_per_epoch": manifest.settings["rows_per_epoch"],
        "padding": manifest.settings["padding"],
    }


def _fit(doctor: Doctor, context: int) -> dict[str, Any]:
    """Return how many conversations are too long, and the context length in which the fraction MOST would fit."""
    needed = sorted(length for lengths in doctor.lengths.values() for length in lengths)
    return {
        "num_conversations": len(needed),
        "num_too_long": sum(length > context for length in needed),
        "context": context,
        "context_for_most": needed[math.ceil(MOST * len(needed)) - 1] if needed else 0,
    }


def _publish(work: Work, manifest: DataManifest, inputs: ChatInputs, report: dict[str, Any]) -> None:
    """Move the shards to the target folder, and write the report and the manifest.

    The old manifest is removed first and the new one is written last, so the folder counts as empty in between.
    """
    target = work.target
    (target / MANIFEST).unlink(missing_ok=True)
    sync_folder(target)
    names = [name for split in manifest.splits.values() for shard in split.shards for name, _, _ in shard.files()]
    for path in target.glob("*-*"):
        if path.suffix in (".bin", ".idx", ".mask") and path.name not in names:
            path.unlink()
    for name in names:
        os.replace(work.folder / name, target / name)
    sync_folder(target)
    write_whole(target / REPORT, json.dumps({**report, "stamps": inputs.stamps}, indent=1).encode())
    write_whole(target / MANIFEST, dumps(manifest, indent=2).encode() + b"\n")


def _find_finished(target: Path, settings: dict[str, Any], inputs: ChatInputs) -> Prepared | None:
    try:
        manifest = loads(DataManifest, (target / MANIFEST).read_bytes())
        report = json.loads((target / REPORT).read_bytes())
        stamps = report.pop("stamps")
        report["fit"]["context_for_most"]  # KeyError if the report is too old; homing then prepares the data again
    except (OSError, WireError, ValueError, KeyError, TypeError):
        return None
    if manifest.settings.get("order") != json.loads(json.dumps(settings)):
        return None
    for split in manifest.splits.values():
        for name, num_bytes, _ in (file for shard in split.shards for file in shard.files()):
            if not (target / name).is_file() or (target / name).stat().st_size != num_bytes:
                return None
    if stamps != json.loads(json.dumps(inputs.stamps)):
        # The files' modification times differ, so compare their content.
        if [(s.path, s.num_bytes) for s in inputs.sources] != [(s.path, s.num_bytes) for s in manifest.source]:
            return None
        if any(file_sha256(source.path) != source.sha256 for source in manifest.source):
            return None
    return Prepared(manifest, report, is_reused=True)


class _File:
    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115, closed by close
        self._hash = hashlib.sha256()

    def write(self, values: NDArray[Any]) -> None:
        data = values.tobytes()
        self._hash.update(data)
        self._file.write(data)

    def close(self) -> str:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()


class ConversationWriter:
    def __init__(self, folder: Path, split: str, *, dtype: str, shard_tokens: int) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._files: tuple[_File, _File, _File] | None = None
        self._shards: list[Shard] = []
        self._starts: list[int] = [0]
        self._num_text_bytes = 0
        self.num_conversations = self.num_targets = 0

    def append(self, example: Example, num_text_bytes: int) -> None:
        tokens, index, mask = self._files = self._files or self._open()
        tokens.write(example.ids.astype(self._dtype))
        index.write(np.array(self._starts[-1:], dtype="<u8"))
        mask.write(example.mask.astype(np.uint8))
        self._starts.append(self._starts[-1] + len(example.ids))
        self._num_text_bytes += num_text_bytes
        self.num_conversations += 1
        self.num_targets += int(example.mask.sum())
        if self._starts[-1] >= self._shard_tokens:
            self._close()

    def finish(self) -> Split:
        if self._files is not None:
            self._close()
        return Split(
            num_tokens=sum(shard.num_tokens for shard in self._shards),
            num_documents=self.num_conversations,
            num_text_bytes=self._num_text_bytes,
            shards=self._shards,
        )

    def abandon(self) -> None:
        for file in self._files or ():
            file.close()
        self._files = None

    def _names(self) -> tuple[str, str, str]:
        number = len(self._shards)
        return shard_name(self._split, number), index_name(self._split, number), mask_name(self._split, number)

    def _open(self) -> tuple[_File, _File, _File]:
        first, second, third = (_File(self._folder / name) for name in self._names())
        return first, second, third

    def _close(self) -> None:
        assert self._files is not None
        tokens, index, mask = self._files
        num_tokens = self._starts[-1]
        index.write(np.array([num_tokens], dtype="<u8"))
        name, index_file, mask_file = self._names()
        self._shards.append(
            Shard(
                name=name,
                index_name=index_file,
                num_tokens=num_tokens,
                num_documents=len(self._starts) - 1,
                num_bytes=num_tokens * self._dtype.itemsize,
                sha256=tokens.close(),
                index_sha256=index.close(),
                mask_name=mask_file,
                mask_sha256=mask.close(),
            )
        )
        self._files, self._starts = None, [0]
