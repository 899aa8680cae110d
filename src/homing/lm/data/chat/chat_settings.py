"""Checks the request to prepare one phase's conversations, and determines how its sources are mixed.

weight 0         all conversations of the source, `repeat` times per epoch
weights above 0  conversations in proportion to the weights: each source is used at least `repeat` times per epoch, and
                 sources with too few conversations for their weight are repeated more often
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.find_source_files import Source, find_chat_files
from homing.lm.data.chat.render import ChatTokens, Renderer, need_template
from homing.lm.data.chat.template import find_template
from homing.lm.data.prep.prep_settings import file_sha256

__all__ = [
    "ChatInputs",
    "ChatOrder",
    "ChatSource",
    "copies_of",
    "find_chat_files",
    "find_inputs",
    "open_renderer",
    "settings_of",
]


@dataclass(frozen=True)
class ChatSource:
    path: str  # a file, glob or folder
    weight: float = 0.0
    repeat: int = 1


@dataclass(frozen=True)
class ChatOrder:
    dir: Path
    chat: list[ChatSource]
    tokenizer: Path  # a folder with tokenizer.json and the chat template
    context: int
    validation: list[str] = field(default_factory=list)
    val_fraction: float = 0.02  # fraction of conversations to hold out, by hash; ignored if `validation` lists files
    shard_tokens: int = 100_000_000
    is_forced: bool = False
    # The addresses of files that were fetched from a store, as listed in the run file. They are stored in the manifest,
    # so that homing can tell whether the run file still lists the same files.
    named: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatInputs:
    chat: list[list[Source]]  # a list of files for each source
    validation: list[Source]
    warnings: list[str]

    @property
    def sources(self) -> list[Source]:
        return [*self.validation, *(file for files in self.chat for file in files)]

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources)

    @property
    def stamps(self) -> list[list[object]]:
        return [source.stamp for source in self.sources]


def open_renderer(folder: Path) -> Renderer:
    return Renderer(need_template(find_template(folder), str(folder)), ChatTokens(folder))


def find_inputs(order: ChatOrder) -> ChatInputs:
    _check(order)
    named = "data.{} of the phase in the run file"
    validation, warnings = find_chat_files(order.validation, "validation", named.format("validation"))
    held_out = {os.path.realpath(source.path) for source in validation}
    seen: dict[str, str] = {}
    files = []
    for source in order.chat:
        found, said = find_chat_files([source.path], otherwise=named.format("chat"))
        for file in found:
            real = os.path.realpath(file.path)
            _refuse_twice(file.path, seen.setdefault(real, source.path), source.path, is_held_out=real in held_out)
        files.append(found)
        warnings += said
    return ChatInputs(files, validation, warnings)


def _refuse_twice(path: str, first: str, named_by: str, *, is_held_out: bool) -> None:
    if is_held_out:
        raise DataError(
            what=f"{path} is used for both training and validation.",
            why="Validating on training data would hide memorization.",
            fix="List it in one place only; without a validation file, homing holds out some conversations by hash.",
        )
    if first != named_by:
        raise DataError(
            what=f"{path} is listed in two sources: {first} and {named_by}.",
            why="A file can have only one weight.",
            fix="List it once; use `repeat` to train on it more often.",
        )


def _check(order: ChatOrder) -> None:
    if not order.chat:
        raise DataError(
            "No conversations were given.", why="data.chat is empty.", fix="List a file: data: {chat: [file.jsonl]}"
        )
    if not 0 <= order.val_fraction <= 0.5:
        raise DataError(
            what=f"Invalid validation fraction: {order.val_fraction}",
            why="It must be between 0 and 0.5.",
            fix="Use a value such as 0.02.",
        )
    for source in order.chat:
        if source.weight < 0 or source.repeat < 1:
            raise DataError(
                what=f"The weight ({source.weight:g}) or repeat ({source.repeat}) of {source.path} is invalid.",
                why="`weight` must be at least 0, and `repeat` must be at least 1.",
                fix="To leave a source out, remove it from the list.",
            )


def settings_of(order: ChatOrder, renderer: Renderer) -> dict[str, Any]:
    """Return all settings that affect the prepared data. They are stored in the manifest."""
    return {
        "chat": [{"path": s.path, "weight": float(s.weight), "repeat": s.repeat} for s in order.chat],
        "validation": list(order.validation),
        "val_fraction": 0.0 if order.validation else float(order.val_fraction),
        "context": order.context,
        "shard_tokens": order.shard_tokens,
        "tokenizer_sha256": file_sha256(renderer.tokens.path),
        "template_sha256": renderer.template.sha256,
        "named": order.named,
    }


def copies_of(sources: Sequence[ChatSource], counts: Sequence[int]) -> list[float]:
    """Return, for each source, how often each of its conversations occurs in one epoch."""
    weighted = [(s, n) for s, n in zip(sources, counts, strict=True) if s.weight and n]
    scale = max((n * s.repeat / s.weight for s, n in weighted), default=0.0)
    return [
        round(s.weight * scale / n, 6) if s.weight and n else float(s.repeat)
        for s, n in zip(sources, counts, strict=True)
    ]
