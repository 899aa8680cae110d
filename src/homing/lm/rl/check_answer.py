"""Grades a completion against the known answer: right or wrong.

number   compare the number after the last ####, else the last number, by value: 1,000 and $1000.00 are equal
letters  compare the individual letters in order
text     compare as a number if the answer is a number, else compare words; if the answer contains no words (such as an
         emoji or +), the completion must match it exactly
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from homing.rl_question_files import ANSWER_MARK

__all__ = ["ANSWER_MARK", "final_number", "is_right_letters", "is_right_number", "is_right_text"]

_NUMBER = re.compile(r"[-\u2212]?\$?\d[\d,]*(?:\.\d+)?|[-\u2212]?\$?\.\d+")


def is_right_number(completion: str, answer: str) -> bool:
    said, wanted = final_number(completion), final_number(answer)
    return said is not None and said == wanted


def is_right_letters(completion: str, answer: str) -> bool:
    """Return whether the answer's letters are spelled out: `c-a-t`, `C A T` and `c, a, t` spell cat; `cat` does not."""
    return re.findall(r"(?<![^\W\d_])[^\W\d_](?![^\W\d_])", completion.lower()) == answer.lower().split()


def is_right_text(completion: str, answer: str) -> bool:
    if _is_number(answer):
        return is_right_number(completion, answer)
    words = _words(answer)
    if not words:  # otherwise every completion that has no words would be graded as right
        return bool(answer.strip()) and completion.split() == answer.split()
    return _words(completion) == words


def final_number(text: str) -> Decimal | None:
    _, mark, after = text.rpartition(ANSWER_MARK)
    found = _NUMBER.findall(after if mark else text)
    if not found:
        return None
    # The answer is the first number after the #### marker; ignore the rest of the text.
    written = found[0] if mark else found[-1]
    try:
        return Decimal(written.replace(",", "").replace("$", "").replace("\u2212", "-"))
    except InvalidOperation:
        return None


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text.strip()) is not None


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
