"""Reads an rl phase's questions from JSON Lines files, and reports every invalid line with its line number.

    gsm8k     {"question": ..., "answer": "... #### 18"}
    prompts   {"prompt": ...} or {"messages": [...]} or {"ids": [...]}, and {"answer": ...} unless there is a reward.py

The user's computer runs this module before anything is rented, and the trainer runs it before its first step, so that
the same rules apply in both places. It uses no tokenizer: the trainer turns questions into tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

__all__ = ["ANSWER_MARK", "NO_LINES", "TURN_MARKS", "Entry", "read_entries", "shorten_problems"]

ANSWER_MARK = "####"
TURN_MARKS = ("<|im_start|>", "<|im_end|>")  # questions given as text are rendered as ChatML turns
NO_LINES = "the file has no lines"
_MAX_SHOWN = 10


@dataclass(frozen=True)
class Entry:
    """One question as written in the file, given either as messages or as token ids."""

    messages: tuple[dict[str, str], ...]
    ids: tuple[int, ...]
    answer: str  # "" if there is none


def read_entries(data: bytes, kind: str, *, needs_answers: bool, num_ids: int | None) -> tuple[list[Entry], list[str]]:
    """Return the questions, and a message for every invalid line with its number and the problem.

    `num_ids` is the vocabulary size of the tokenizer, or None if it is not known yet. An empty file is
    reported as a problem too.
    """
    entries, problems = [], []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            entries.append(_entry(json.loads(line.decode("utf-8")), kind, needs_answers, num_ids))
        except UnicodeDecodeError:
            problems.append(f"line {number}: not UTF-8")
        except (ValueError, RecursionError) as exc:
            problems.append(f"line {number}: {exc}")
    if not entries and not problems:
        problems.append(NO_LINES)
    return entries, problems


def shorten_problems(problems: list[str]) -> list[str]:
    """Return the first few problems, followed by a count of the omitted ones."""
    more = len(problems) - _MAX_SHOWN
    return problems[:_MAX_SHOWN] + ([f"and {more} more"] if more > 0 else [])


def _entry(found: Any, kind: str, needs_answers: bool, num_ids: int | None) -> Entry:
    if not isinstance(found, dict):
        raise ValueError("not an object")
    answer = found.get("answer", "")
    answer = str(answer) if isinstance(answer, (int, float)) and not isinstance(answer, bool) else answer
    if not isinstance(answer, str):
        raise ValueError("the answer is not text")
    if not answer.strip() and needs_answers:
        raise ValueError("no answer, and no reward.py to score it")
    if kind == "gsm8k":
        if not (text := found.get("question")) or not isinstance(text, str):
            raise ValueError("no question")
        if needs_answers and ANSWER_MARK not in answer:
            raise ValueError(f"the answer has no {ANSWER_MARK}")
        return Entry(({"role": "user", "content": text},), (), answer)
    messages, ids = _prompt(found, num_ids)
    return Entry(messages, ids, answer)


def _prompt(found: dict[str, Any], num_ids: int | None) -> tuple[tuple[dict[str, str], ...], tuple[int, ...]]:
    given = [key for key in ("prompt", "messages", "ids") if key in found]
    if len(given) != 1:
        raise ValueError(f"has {' and '.join(given) or 'no prompt'}; needs exactly one of prompt, messages and ids")
    value = found[given[0]]
    if given[0] == "prompt":
        if not isinstance(value, str) or not value.strip():
            raise ValueError("the prompt is empty")
        return ({"role": "user", "content": value},), ()
    if not isinstance(value, list) or not value:
        raise ValueError(f"{given[0]} must be a list that is not empty")
    if given[0] == "ids":
        if not all(type(i) is int and i >= 0 and (num_ids is None or i < num_ids) for i in value):
            below = "" if num_ids is None else f" below {num_ids}"
            raise ValueError(f"the ids are not all whole numbers{below}")
        return (), tuple(value)
    for message in value:
        is_fit = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_fit or message.get("role") not in ("system", "user", "assistant"):
            raise ValueError("a message needs a role (system, user or assistant) and content")
    if value[-1]["role"] == "assistant":
        raise ValueError("the last message is from the assistant, but the model must generate the assistant's reply")
    return tuple(value), ()
