"""A phase's own data, if it does not use the run's text: other text, or conversations.

phases[i].data -> what `homing prep` should make (PhasePrep) -> what is already prepared (PhaseData of run.json)

Each such phase has its own folder below the run's data folder, with a manifest like the run's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.config.parse.source import KeyPath
from homing.config.prepared_data import Prepared, read_prepared, sha256_of
from homing.config.resolve.origins import Trace
from homing.errors import DataError
from homing.wire import file_names
from homing.wire.run_json import PhaseData

__all__ = ["ChatFile", "PhasePrep", "phase_data", "phase_prep", "uses_run_text"]

_CHAT_VAL_FRACTION = 0.02


@dataclass(frozen=True)
class ChatFile:
    path: str  # a file, glob or directory
    weight: float  # 0: every conversation in it
    repeat: int


@dataclass(frozen=True)
class PhasePrep:
    """What `homing prep` makes for one phase."""

    phase: str  # its kind, which is also its folder name
    kind: str  # text | chat
    text: list[str]
    chat: list[ChatFile]
    validation: list[str]
    val_fraction: float
    dir: Path  # absolute

    def named(self) -> dict[str, Any]:
        """Return the run file's settings for the conversations, stored in the manifest so that a change is detected."""
        chat = [[source.path, float(source.weight), source.repeat] for source in self.chat]
        return {"chat": chat, "validation": self.validation, "val_fraction": float(self.val_fraction)}


def uses_run_text(trace: Trace, number: int) -> bool:
    phase = trace.file.phases[number]
    return phase.kind in ("pretrain", "mid") and not phase.data.text and not phase.data.chat


def phase_prep(trace: Trace, number: int, data_dir: Path) -> PhasePrep | None:
    """Return what prep should make for this phase; None if the phase uses the run's text."""
    phase, at = trace.file.phases[number], ("phases", number)
    _refuse(trace, number)
    if not phase.data.text and not phase.data.chat:
        return None
    is_chat = bool(phase.data.chat)
    otherwise = _CHAT_VAL_FRACTION if is_chat else trace.file.data.val_fraction
    given = (*at, "data", "val_fraction")
    return PhasePrep(
        phase=phase.kind,
        kind="chat" if is_chat else "text",
        text=list(phase.data.text),
        chat=[ChatFile(each.path, each.weight, each.repeat) for each in phase.data.chat],
        validation=list(phase.data.validation),
        val_fraction=float(phase.data.val_fraction or 0.0) if trace.is_given(given) else otherwise,
        dir=data_dir / phase.kind,
    )


def phase_data(
    trace: Trace, number: int, prep: PhasePrep | None, context: int = 0, tokenizer_sha256: str = ""
) -> PhaseData | None:
    """Return what is already prepared for the phase; None if the phase uses the run's text.

    Counts are 0 if nothing is prepared, or if the prepared data no longer matches the run file. `tokenizer_sha256`:
    hash of the tokenizer of the open weights that the run starts from, if any.
    """
    if prep is None:
        return None
    wire = f"phases.{number}.data"
    for name in ("kind", "dir", "manifest_sha256", "num_train_tokens", "num_val_tokens", "question"):
        trace.note(f"{wire}.{name}", f"derived from {wire}" if name in ("kind", "dir") else "not prepared yet")
    empty = PhaseData(kind=prep.kind, dir=str(prep.dir))
    try:
        prepared = read_prepared(prep.dir)
    except DataError as exc:
        trace.wrong(("phases", number, "data"), f"{exc.what} {exc.why}", exc.fix)
        return empty
    if prepared is None:
        return empty
    if stale := _what_changed(prep, prepared, context, tokenizer_sha256):
        trace.warn(f"{wire}: {stale} changed since it was prepared. Run `homing prep` again.")
        return empty
    for name in ("manifest_sha256", "num_train_tokens", "num_val_tokens", "question"):
        trace.note(f"{wire}.{name}", str(prep.dir / file_names.MANIFEST))
    return PhaseData(
        kind=prep.kind,
        dir=str(prep.dir),
        manifest_sha256=hashlib.sha256((prep.dir / file_names.MANIFEST).read_bytes()).hexdigest(),
        num_train_tokens=_tokens_per_epoch(prepared),
        num_val_tokens=prepared.num_val_tokens,
        question=next(iter(_questions(prepared)), ""),
    )


def _what_changed(prep: PhasePrep, prepared: Prepared, context: int, tokenizer_sha256: str) -> str:
    """Return what changed since prep, or "".

    This is checked before an instance is rented. For text, only the tokenizer is compared.
    """
    tokenizer = prep.dir.parent / file_names.TOKENIZER
    wanted = tokenizer_sha256 or (sha256_of(tokenizer) if tokenizer.is_file() else "")
    if wanted and prepared.manifest.tokenizer_sha256 != wanted:
        return "the tokenizer"
    if prep.kind != "chat":
        return ""
    order = prepared.manifest.settings.get("order") or {}
    if order.get("named") != prep.named():
        return "what the run file names"
    if context and order.get("context") != context:
        return "model.context"
    return ""


def _questions(prepared: Prepared) -> list[str]:
    """Return the first question of each conversation source; text has none."""
    found = [source.get("question", "") for source in prepared.manifest.settings.get("sources", [])]
    return [question for question in found if question]


def _tokens_per_epoch(prepared: Prepared) -> int:
    """Return the tokens of one epoch. Conversations are packed into rows, so repeats and padding count too."""
    rows = int(prepared.manifest.settings.get("rows_per_epoch") or 0)
    return rows * int(prepared.manifest.settings["context"]) if rows else prepared.num_train_tokens


def _refuse(trace: Trace, number: int) -> None:
    phase, at = trace.file.phases[number], ("phases", number, "data")
    data = phase.data
    if data.text and data.chat:
        trace.wrong((*at, "chat"), "has both text and chat.", "A phase takes one of them: split it into two phases.")
    # If the kind is unknown, its data cannot be checked; the unknown kind is already reported.
    if phase.kind == "pretrain" and data.chat and trace.is_sound(("phases", number, "kind")):
        trace.wrong((*at, "chat"), "pretraining takes text.", "Use kind: mid or kind: sft for conversations.")
    if phase.kind == "sft" and data.text:
        trace.wrong((*at, "text"), "sft takes conversations.", "Use data.chat here, or kind: mid for text.")
    if phase.kind == "sft" and not data.chat and trace.is_sound((*at, "chat")):
        problem = "sft has no conversations to train on."
        trace.wrong(("phases", number, "kind"), problem, "For example data: {chat: [identity.jsonl]}")
    if phase.kind == "rl" and (data.text or data.chat):
        trace.wrong(at, "rl trains on its tasks.", "Set files there: rl: {tasks: [{kind: gsm8k, file: ...}]}")
    for place, source in enumerate(data.chat):
        path: KeyPath = (*at, "chat", place, "path")
        if not source.path and trace.is_sound(path):
            trace.wrong((*at, "chat", place), "has no file.", "For example {path: identity.jsonl, repeat: 3}")
    if data.validation and trace.is_given((*at, "val_fraction")):
        trace.wrong((*at, "val_fraction"), "has no effect with validation files.", "Delete one of the two.")
