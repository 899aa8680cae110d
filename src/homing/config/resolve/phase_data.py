"""The training data of a phase (the run's text, or the phase's own text or conversations), and how much there is.

    phases[i].data -> what `homing prep` should prepare (PhasePrep) -> what is already prepared (PhaseData of run.json)
                   -> the amount, counted by prep or estimated from the size of the files (Corpus)

A phase with its own data has a folder below the run's data folder, with a manifest like the run's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.config.estimate.params_and_flops import BYTES_PER_TOKEN_RANGE, bytes_per_token
from homing.config.home_and_run_files import shown
from homing.config.parse.check import Trace
from homing.config.parse.source import KeyPath, dotted
from homing.config.prepared_data import Prepared, read_prepared, sha256_of
from homing.errors import DataError
from homing.find_source_files import fault_of, is_in_store, num_text_bytes
from homing.units import format_bytes, format_count
from homing.wire import file_names
from homing.wire.run_json import PhaseData

__all__ = [
    "ChatFile",
    "Corpus",
    "PhasePrep",
    "phase_corpus",
    "phase_data",
    "phase_prep",
    "text_corpus",
    "uses_run_text",
    "warn_of_missing",
]

_CHAT_VAL_FRACTION = 0.02


@dataclass(frozen=True)
class ChatFile:
    path: str  # a file, glob or directory
    weight: float  # 0: use each of its conversations `repeat` times
    repeat: int


@dataclass(frozen=True)
class PhasePrep:
    """What `homing prep` should prepare for one phase."""

    phase: str  # the phase's kind, which is also its folder name
    kind: str  # text | chat
    text: list[str]
    chat: list[ChatFile]
    validation: list[str]
    val_fraction: float
    dir: Path  # absolute

    def named(self) -> dict[str, Any]:
        """Return the run file's settings for the conversations, stored in the manifest to detect later changes."""
        chat = [[source.path, float(source.weight), source.repeat] for source in self.chat]
        return {"chat": chat, "validation": self.validation, "val_fraction": float(self.val_fraction)}


@dataclass(frozen=True)
class Corpus:
    """Amount of training data: counted by prep, estimated from the size of the text, or unknown (0)."""

    num_train_tokens: int
    num_val_tokens: int
    source: str  # such as data/goethe/manifest.json
    # Conversations only: number of tokens without repeats and padding. The two counts above include both.
    num_chat_tokens: int = 0

    @property
    def amount(self) -> str:
        """Describe the amount of data, with the same numbers that `homing prep` shows."""
        rows = f"{format_count(self.num_train_tokens)} tokens"
        if not self.num_chat_tokens:
            return rows
        return f"{format_count(self.num_chat_tokens)} tokens of conversations ({rows} with repeats and padding)"


def uses_run_text(trace: Trace, number: int) -> bool:
    phase = trace.file.phases[number]
    return phase.kind in ("pretrain", "mid") and not phase.data.text and not phase.data.chat


def phase_prep(trace: Trace, number: int, data_dir: Path) -> PhasePrep | None:
    """Return what prep should prepare for this phase; None if the phase uses the run's text."""
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
        trace.warn(f"{wire}: {stale} has changed since the data was prepared. Run `homing prep` again.")
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
    """Return what has changed since the data was prepared, or "" if nothing has.

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
        return "this section of the run file"
    if context and order.get("context") != context:
        return "model.context"
    return ""


def _questions(prepared: Prepared) -> list[str]:
    """Return the first question of each conversation source. Sources of text have none."""
    found = [source.get("question", "") for source in prepared.manifest.settings.get("sources", [])]
    return [question for question in found if question]


def _tokens_per_epoch(prepared: Prepared) -> int:
    """Return the number of tokens per epoch. For conversations, which are packed, include repeats and padding."""
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


# --- amounts --------------------------------------------------------------------------------------------------------


def text_corpus(trace: Trace, prepared: Prepared | None, vocab_size: int, context: int) -> Corpus:
    """Return the amount of the run's text, counted by prep or estimated."""
    if prepared is not None:
        found = Corpus(prepared.num_train_tokens, prepared.num_val_tokens, shown(prepared.dir / file_names.MANIFEST))
        if not found.num_val_tokens:
            trace.warn(
                "There is no held-out text, so nothing can be evaluated. Set data.validation"
                f"{'' if trace.file.data.val_fraction else ', or raise data.val_fraction'}, and prepare again."
            )
        elif found.num_val_tokens < context and trace.is_sound(("model", "context")):
            more = "" if trace.file.data.validation else ", raise data.val_fraction"
            trace.warn(
                f"The held-out text has {found.num_val_tokens:,} tokens, less than one row of {context:,} tokens"
                f" (model.context), so the held-out loss says little. Use more text{more}, or set data.validation to"
                " a longer file, and prepare again."
            )
        return found
    num_bytes = _taken(trace, num_text_bytes(trace.file.data.text))
    if not num_bytes:
        return Corpus(0, 0, "not prepared yet")
    guess, amount = _guess(num_bytes, vocab_size, None)
    source = f"estimated from {format_bytes(num_bytes)} of text"
    trace.warn(f"Not prepared yet: {amount}, {source}. Run `homing prep` to count the tokens.")
    return Corpus(guess, 0, source)


def phase_corpus(
    trace: Trace, number: int, prep: PhasePrep | None, data: PhaseData | None, whole: Corpus, vocab_size: int,
    prepared: Prepared | None,
) -> Corpus:  # fmt: skip
    """Return the amount of data in one phase. `prepared`: the run's prepared text."""
    if prep is None:
        return whole
    if data is not None and data.manifest_sha256:
        own = read_prepared(prep.dir) if prep.kind == "chat" else None
        source = shown(prep.dir / file_names.MANIFEST)
        return Corpus(data.num_train_tokens, data.num_val_tokens, source, own.num_train_tokens if own else 0)
    patterns = [*prep.text, *(source.path for source in prep.chat)]
    num_bytes = num_text_bytes(patterns)
    num_bytes = _taken(trace, num_bytes) if prep.kind != "chat" else num_bytes
    if not num_bytes:
        return Corpus(0, 0, "not prepared yet")
    guess, amount = _guess(num_bytes, vocab_size, prepared)
    source = f"estimated from {format_bytes(num_bytes)} of {prep.kind}"
    trace.warn(f"phases.{number} is not prepared yet: {amount}, {source}.")
    return Corpus(guess, 0, source)


def _taken(trace: Trace, num_bytes: int) -> int:
    return min(num_bytes, trace.file.data.take or num_bytes)


def _guess(num_bytes: int, vocab_size: int, prepared: Prepared | None) -> tuple[int, str]:
    """Return the estimated number of tokens in `num_bytes` bytes of text, and a description of the estimate.

    `prepared`: text already tokenized with the same tokenizer, which gives the bytes per token for this user's
    language. Without it, the estimate is a range, because languages differ too much.
    """
    train = prepared.manifest.splits.get("train") if prepared is not None else None
    if train is not None and train.num_tokens and train.num_text_bytes:
        guess = int(num_bytes * train.num_tokens / train.num_text_bytes)
        return guess, f"about {format_count(guess)} tokens, estimated from the prepared text"
    low, guess, high = (int(num_bytes / (bytes_per_token(vocab_size) * much)) for much in BYTES_PER_TOKEN_RANGE)
    return guess, f"about {format_count(guess)} tokens ({format_count(low)} to {format_count(high)} by language)"


# --- missing files --------------------------------------------------------------------------------------------------


def warn_of_missing(
    trace: Trace, preps: dict[int, PhasePrep | None], datas: dict[int, PhaseData | None], *, needs_text: bool
) -> None:
    """Warn about missing files that prep has not read yet. Text that is already in shards is no longer needed."""
    if needs_text:
        _warn_of(trace, ("data", "text"), trace.file.data.text)
        _warn_of(trace, ("data", "validation"), trace.file.data.validation)
    for number, data in datas.items():
        prep = preps[number]
        if prep is not None and data is not None and not data.manifest_sha256:
            at = ("phases", number, "data")
            _warn_of(trace, (*at, "text"), prep.text)
            _warn_of(trace, (*at, "chat"), [source.path for source in prep.chat])
            _warn_of(trace, (*at, "validation"), prep.validation)


def _warn_of(trace: Trace, path: KeyPath, named: Sequence[str]) -> None:
    """Warn about missing files now, because they would make the launch fail after the user has chosen an instance."""
    for each in named:
        fault = "" if is_in_store(each) else fault_of(each)
        if fault:
            setting = trace.source.setting(path)
            where = setting if setting is not None else f"{trace.source.file}, line {trace.source.line(path)}"
            trace.warn(f"{dotted(path)}: {fault} ({where}).")
