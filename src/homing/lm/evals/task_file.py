"""Reads task files (JSON lines in common formats, one item per line), and reports invalid lines.

    choices   {"question" | "query" | "context" | "ctx" | "prompt": ..., "choices" | "endings" | "options": [...],
               "gold" | "label" | "answer" | "answerKey": number from 0, or the letter, or the choice itself}
              {"context_options": [...], "continuation": ..., "gold": 0}                 two beginnings, one end
    cloze     {"context": ..., "continuation": ...}
    answers   {"question": ..., "answer": "... #### 18"}  or  {"prompt": ..., "answer": ...}

The first line determines the format, and a line in a different format is invalid, because mixing formats is usually a
mistake. A file with an invalid line is rejected, because a score for the other lines could be mistaken for the score of
the whole file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.find_source_files import find_sources
from homing.lm.data.chat.messages import Fault
from homing.lm.data.chat.read_rows import values_of
from homing.lm.data.shards.read_shards import file_sha256
from homing.lm.data.text.read_bytes import Reading
from homing.lm.rl.questions import ANSWER_MARK, final_number

__all__ = ["Choice", "Item", "Open", "TaskFile", "read_task"]

_ASKED = ("question", "query", "context", "ctx", "prompt")
_CHOICES = ("choices", "endings", "options")
_GOLD = ("gold", "label", "answer", "answerKey")
_MAX_LISTED = 20


@dataclass(frozen=True)
class Choice:
    """One item: pairs of a beginning and an end, exactly one of them correct. A cloze item has only the correct one."""

    line: int
    pairs: list[tuple[str, str]]
    gold: int


@dataclass(frozen=True)
class Open:
    line: int
    question: str
    answer: str
    is_number: bool


Item = Choice | Open


@dataclass(frozen=True)
class TaskFile:
    name: str
    form: str
    items: list[Item]
    sha256: str
    answer_tokens: int = 0  # maximum answer length in the rl phase that the task comes from; 0 if there is none

    @property
    def asks_for_answers(self) -> bool:
        """True if the model must generate answers: in every format except choices and cloze.

        Each kind of rl task has its own format, because the answers to each kind are graded differently.
        """
        return self.form not in ("choices", "cloze")


def read_task(path: str, *, form: str = "", at_most: int = 0) -> TaskFile:
    """Read a task file and return its first `at_most` items (0: all). Every line is checked, even beyond those.

    If `form` is "", the first line determines the format of the file.
    """
    source = find_sources([path], key="task").sources[0]
    items: list[Item] = []
    problems: list[str] = []
    with Reading(source) as reading:
        for line in values_of(reading):
            try:
                if isinstance(line.value, Fault):
                    raise line.value
                form = form or _form_of(line.value)
                items.append(_READERS[form](_fields(line.value, form), line.number))
            except Fault as fault:
                problems.append(f"{path}:{line.number}: {fault.text}")
    if problems or not items:
        more = [f"and {len(problems) - _MAX_LISTED} more."] if len(problems) > _MAX_LISTED else []
        faults = "1 line is" if len(problems) == 1 else f"{len(problems)} lines are"
        raise DataError(
            what=f"{path} cannot be used as a task: {faults} invalid." if problems else f"{path} has no lines.",
            why="\n".join(problems[:_MAX_LISTED] + more),
            fix="Correct the file; docs/guides/eval.md describes the formats.",
        )
    return TaskFile(Path(path).name, form, items[: at_most or None], file_sha256(Path(source.path)))


def _form_of(value: Any) -> str:
    if isinstance(value, dict):
        if any(name in value for name in (*_CHOICES, "context_options")):
            return "choices"
        if "continuation" in value:
            return "cloze"
        if "answer" in value:
            return "answers"
    raise Fault("no-form", f"has no choices, continuation or answer; {_seen(value)}")


def _fields(value: Any, form: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Fault("not-object", f"expected an object, found {_kind(value)}")
    if (found := _form_of(value)) != form:
        raise Fault("other-form", f"is in the {found} format, but the file is in the {form} format")
    return value


def _read_choice(value: dict[str, Any], line: int) -> Choice:
    if "context_options" in value:
        ends = _texts(value, ("context_options",), least=2)
        pairs = [(begin, _text(value, ("continuation",))) for begin in ends]
        return Choice(line, pairs, _gold(value, ends, []))
    labels: list[str] = []
    if isinstance(listed := value.get("choices"), dict):  # ARC's format: {"text": [...], "label": ["A", ...]}
        labels = _texts(listed, ("label",), least=2)
        value = {**value, "choices": listed.get("text")}
    ends = _texts(value, _CHOICES, least=2)
    if labels and len(labels) != len(ends):
        raise Fault("gold", f"has {len(labels)} labels for {len(ends)} choices")
    asked = _text(value, _ASKED, may_be_empty=True)
    return Choice(line, [(asked, end) for end in ends], _gold(value, ends, labels))


def _read_cloze(value: dict[str, Any], line: int) -> Choice:
    begin = _text(value, ("context", "prompt", "question", "query"), may_be_empty=True)
    return Choice(line, [(begin, _text(value, ("continuation",)))], 0)


def _read_answer(value: dict[str, Any], line: int) -> Open:
    question, given = _text(value, _ASKED), value["answer"]
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        given = str(given)
    if not isinstance(given, str) or not given.strip():
        raise Fault("wrong-type", "its answer is empty, or is neither text nor a number")
    if not any(letter.isalnum() for letter in given):
        raise Fault("empty", "its answer has no letters or digits, so it cannot be checked")
    is_marked = ANSWER_MARK in given
    if is_marked and final_number(given) is None:
        raise Fault("no-number", f"has no number after {ANSWER_MARK}")
    return Open(line, question, given, is_marked)


_READERS: dict[str, Callable[[dict[str, Any], int], Item]] = {
    "choices": _read_choice,
    "cloze": _read_cloze,
    "answers": _read_answer,
}


def _gold(value: dict[str, Any], choices: list[str], labels: list[str]) -> int:
    gold = _gold_number(value, choices, labels)
    if choices.count(choices[gold]) > 1:
        raise Fault("twice", f"the right choice {choices[gold]!r} appears twice")
    return gold


def _gold_number(value: dict[str, Any], choices: list[str], labels: list[str]) -> int:
    """Return the index of the right choice. The line can specify it by index, by letter or by the choice's text."""
    name = _one_of(value, _GOLD)
    given = value[name]
    if isinstance(given, str) and given.strip().isdecimal() and not labels and given not in choices:
        given = int(given)
    if isinstance(given, int) and not isinstance(given, bool):
        if not 0 <= given < len(choices):
            raise Fault("gold", f"{name!r} is {given}, but there are {len(choices)} choices, numbered from 0")
        return given
    letters = labels or [chr(ord("A") + number) for number in range(len(choices))]
    if isinstance(given, str) and given in letters:
        return letters.index(given)
    if isinstance(given, str) and choices.count(given) == 1:
        return choices.index(given)
    raise Fault("gold", f"{name!r} is {given!r}, which is not the number, letter or text of a choice")


def _texts(value: dict[str, Any], names: tuple[str, ...], *, least: int) -> list[str]:
    name = _one_of(value, names)
    listed = value[name]
    if not isinstance(listed, list) or len(listed) < least:
        raise Fault("wrong-type", f"{name!r} is not a list of at least {least} texts")
    for number, text in enumerate(listed, 1):
        if not isinstance(text, str):
            raise Fault("wrong-type", f"{name!r}: item {number} is {_kind(text)}, not text")
        if not text.strip():
            raise Fault("empty", f"{name!r}: item {number} is empty")
    return listed


def _text(value: dict[str, Any], names: tuple[str, ...], *, may_be_empty: bool = False) -> str:
    name = _one_of(value, names)
    text = value[name]
    if not isinstance(text, str):
        raise Fault("wrong-type", f"{name!r} is {_kind(text)}, not text")
    if not may_be_empty and not text.strip():
        raise Fault("empty", f"{name!r} is empty")
    return text


def _one_of(value: dict[str, Any], names: tuple[str, ...]) -> str:
    found = [name for name in names if name in value]
    if not found:
        raise Fault("missing", f"has no {' or '.join(names)}; {_seen(value)}")
    if len(found) > 1 and names == _GOLD:
        raise Fault("twice", f"has both {found[0]!r} and {found[1]!r}; keep one")
    return found[0]


def _seen(value: Any) -> str:
    if not isinstance(value, dict):
        return f"it is {_kind(value)}"
    return f"fields found: {', '.join(list(value)[:8]) or 'none'}"


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
