from __future__ import annotations

import pytest

from homing.lm.rl.calculator import compute
from homing.lm.rl.questions import is_right_letters, is_right_number, is_right_text


@pytest.mark.parametrize(
    ("completion", "answer", "is_right"),
    [
        ("She has 3 + 4 = 7.\n#### 7", "3+4=<<3+4=7>>7\n#### 7", True),
        ("#### 1,000", "#### 1000", True),
        ("It costs $1000.00", "#### 1,000", True),
        ("#### -5", "#### 5", False),
        ("#### \u22125", "#### -5", True),
        ("first 7, then 8", "7", False),
        ("#### 7 because 3 and 4", "#### 7", True),
        ("#### none, but before: 7", "#### 7", True),
        ("no number at all", "7", False),
        ("", "7", False),
        ("0.5", ".5", True),
        ("12.", "12", True),
    ],
)
def test_the_last_number_or_the_one_after_the_mark_is_the_answer(completion: str, answer: str, is_right: bool) -> None:
    assert is_right_number(completion, answer) is is_right


@pytest.mark.parametrize(
    ("completion", "is_right"),
    [("c a t", True), ("C-A-T", True), ("c, a, t.", True), ("cat", False), ("c a", False), ("c a t s", False)],
)
def test_spelling_is_letter_by_letter(completion: str, is_right: bool) -> None:
    assert is_right_letters(completion, "c a t") is is_right


def test_words_are_compared_without_their_punctuation_and_numbers_by_value() -> None:
    assert is_right_text("  The cat! ", "the cat")
    assert not is_right_text("the cats", "the cat")
    assert is_right_text("I think it is 1,000", "1000")


def test_an_answer_without_words_is_compared_to_the_letter() -> None:
    assert is_right_text(" :-)\n", ":-)")
    assert is_right_text("+  -", "+ -")
    for completion in ("", "...", ":-(", "- +", "well :-)"):
        assert not is_right_text(completion, ":-)" if completion != "- +" else "+ -")
    assert not is_right_text("", "")
    assert not is_right_text("!", " ")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", "24"),
        ("0.1 + 0.2", "0.3"),
        ("1,000 * 2", "2000"),
        ("$5 + $6", "11"),
        ("2^10", "1024"),
        ("-(3 - 5)", "2"),
        ("7 // 2 % 2", "1"),
        ("1/3", "0.333333"),
        (" 6 \u00d7 7 ", "42"),
    ],
)
def test_the_calculator_computes_arithmetic(expression: str, value: str) -> None:
    assert compute(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "1/0", "9**9**9", "(-8)**0.5", "__import__('os')", "open('x')", "[1]*9", "x+1", "1 if 1 else 2", "'a'*9",
        "1e400", "True+1", "", "3+", "(" * 99, "1+" * 60 + "1", "1j*1j", "10**16", "lambda: 1", "1;2",
    ],
)  # fmt: skip
def test_the_calculator_computes_nothing_else(expression: str) -> None:
    assert compute(expression) is None
