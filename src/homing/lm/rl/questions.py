"""Files of questions: JSON lines, every bad one named with its number.

gsm8k     {"question": ..., "answer": "... #### 18"}
prompts   {"prompt": ...} or {"messages": [...]} or {"ids": [...]}, and {"answer": ...} unless a reward.py judges
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.lm.rl.answers import ANSWER_MARK
from homing.lm.tokenizer import Tokenizer
from homing.lm.tokenizer.specials import IM_END, IM_START

__all__ = ["Question", "is_held_out", "read_questions", "render"]

_MOST_TOLD = 10
_HELD_OUT_OF = 10  # one question of so many


@dataclass(frozen=True)
class Question:
    text: str  # as a person reads it, and as a reward.py is given it
    ids: tuple[int, ...]  # up to where the answer begins
    answer: str  # "" where there is none


def is_held_out(text: str) -> bool:
    """By the text alone, so that no seed and no order brings a held-out question into training."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % _HELD_OUT_OF == 0


def render(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
    """The turns as ChatML, and the opening of the assistant's. Whose template is another gives `ids` instead."""
    missing = [name for name in (IM_START, IM_END) if name not in tokenizer.specials]
    if missing:
        raise DataError(
            what="This tokenizer cannot ask in turns.",
            why=f"It has no {' and no '.join(missing)}.",
            fix="Prepare with tokenizer.specials: standard, or give prompts as ids.",
        )
    start, end = tokenizer.specials[IM_START], tokenizer.specials[IM_END]
    ids = [tokenizer.end_of_text_id]
    for message in messages:
        ids += [start, *tokenizer.encode(f"{message['role']}\n{message['content']}"), end, *tokenizer.encode("\n")]
    return (*ids, start, *tokenizer.encode("assistant\n"))


def read_questions(path: Path, kind: str, tokenizer: Tokenizer, *, sha256: str, needs_answers: bool) -> list[Question]:
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise DataError(
            what=f"The questions in {path} cannot be read.",
            why=str(exc),
            fix="Set file: in the task to where they are.",
        ) from exc
    if sha256 and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise DataError(
            what=f"{path} is not the file that this run was made with.",
            why=f"Its sha256 is {found[:12]}..., run.json says {sha256[:12]}...",
            fix="Put the file back, or begin a run anew with this one.",
        )
    questions, problems = [], []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            questions.append(_question(json.loads(line), kind, tokenizer, needs_answers=needs_answers))
        except (ValueError, RecursionError) as exc:
            problems.append(f"line {number}: {exc}")
    if problems or not questions:
        more = [f"and {len(problems) - _MOST_TOLD} more."] if len(problems) > _MOST_TOLD else []
        raise DataError(
            what=f"{path} cannot be used as questions of the task {kind}.",
            why="\n".join(problems[:_MOST_TOLD] + more) or "It has no lines.",
            fix="Mend these lines or take them out." if problems else "Give a file with questions.",
        )
    return questions


def _question(entry: Any, kind: str, tokenizer: Tokenizer, *, needs_answers: bool) -> Question:
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    answer = entry.get("answer", "")
    answer = str(answer) if isinstance(answer, (int, float)) and not isinstance(answer, bool) else answer
    if not isinstance(answer, str):
        raise ValueError("its answer is no text")
    if not answer.strip() and needs_answers:
        raise ValueError("it has no answer, and no reward.py judges it")
    if kind == "gsm8k":
        if not (text := entry.get("question")) or not isinstance(text, str):
            raise ValueError("it has no question")
        if needs_answers and ANSWER_MARK not in answer:
            raise ValueError(f"its answer has no {ANSWER_MARK}")
        return Question(text, render(tokenizer, [{"role": "user", "content": text}]), answer)
    return Question(*_prompt(entry, tokenizer), answer)


def _prompt(entry: dict[str, Any], tokenizer: Tokenizer) -> tuple[str, tuple[int, ...]]:
    given = [key for key in ("prompt", "messages", "ids") if key in entry]
    if len(given) != 1:
        raise ValueError(f"it has {' and '.join(given) or 'no prompt'}; one of prompt, messages and ids is needed")
    value = entry[given[0]]
    if given[0] == "prompt":
        if not isinstance(value, str) or not value.strip():
            raise ValueError("its prompt is empty")
        return value, render(tokenizer, [{"role": "user", "content": value}])
    if not isinstance(value, list) or not value:
        raise ValueError(f"its {given[0]} are no list, or an empty one")
    if given[0] == "ids":
        if not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in value):
            raise ValueError(f"its ids are not all whole numbers below {tokenizer.vocab_size}")
        return tokenizer.decode(value), tuple(value)
    for message in value:
        is_fit = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_fit or message.get("role") not in ("system", "user", "assistant"):
            raise ValueError("a message needs a role (system, user or assistant) and a content")
    if value[-1]["role"] == "assistant":
        raise ValueError("its last message is the assistant's, which is what shall be sampled")
    return str(value[-1]["content"]), render(tokenizer, value)
