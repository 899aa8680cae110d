"""Reads question files with the rules of `homing.questions` and tokenizes the questions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from homing.errors import DataError
from homing.lm.rl.prompter import Prompter
from homing.lm.tokenizer import Tokenizer
from homing.questions import NO_LINES, Entry, read_entries, shorten_problems

__all__ = ["Question", "is_held_out", "read_questions"]

_HELD_OUT_OF = 10  # one in this many questions


@dataclass(frozen=True)
class Question:
    text: str  # as a person reads it; passed to a reward.py
    ids: tuple[int, ...]  # up to where the answer begins
    answer: str  # "" if there is none


def is_held_out(text: str) -> bool:
    """Decide by the text alone, so that no seed or order brings a held-out question into training."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % _HELD_OUT_OF == 0


def read_questions(
    path: Path, kind: str, tokenizer: Tokenizer, prompter: Prompter, *, sha256: str, needs_answers: bool
) -> list[Question]:
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise DataError(
            what=f"The questions in {path} cannot be read.",
            why=str(exc),
            fix="Set file: in the task to their path.",
        ) from exc
    if sha256 and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise DataError(
            what=f"{path} has changed since this run was created.",
            why=f"Its sha256 is {found[:12]}..., run.json says {sha256[:12]}...",
            fix="Restore the file, or start a new run with this one.",
        )
    entries, problems = read_entries(data, kind, needs_answers=needs_answers, num_ids=tokenizer.vocab_size)
    if problems:
        raise DataError(
            what=f"{path} cannot be used as questions of the task {kind}.",
            why="\n".join(shorten_problems(problems)),
            fix="Give a file with questions." if problems == [NO_LINES] else "Fix or remove these lines.",
        )
    return [_question(entry, tokenizer, prompter) for entry in entries]


def _question(entry: Entry, tokenizer: Tokenizer, prompter: Prompter) -> Question:
    if entry.ids:
        return Question(tokenizer.decode(list(entry.ids)), entry.ids, entry.answer)
    return Question(entry.messages[-1]["content"], prompter.ids(entry.messages), entry.answer)
