"""Generated questions: arithmetic and spelling, in any number, the same for the same seed.

A tenth of all questions, by hash, is never used in training; see `tasks.is_held_out`. Difficulty:

    arithmetic   1 one-digit sums   2 two-digit + and -   3 three-digit + and -, products of one digit
                 4 two operations   5 brackets, and divisions without remainder
    spelling     words of 3, 4-5, 6-7 letters; from 4 on also how often a letter occurs in a longer word
"""

from __future__ import annotations

import numpy as np

from homing.lm.rl.calculator import compute

__all__ = ["arithmetic", "spelling"]

_LETTERS = {1: (3, 3), 2: (4, 5), 3: (6, 7), 4: (6, 9), 5: (9, 14)}
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"


def arithmetic(source: np.random.Generator, difficulty: int) -> tuple[str, str]:
    """Return a question and its answer."""
    expression = _expression(source, difficulty)
    answer = compute(expression)
    assert answer is not None, f"made up {expression!r}, which has no value"
    return f"{expression} =", answer


def spelling(source: np.random.Generator, difficulty: int) -> tuple[str, str]:
    word = _word(source, *_LETTERS[difficulty])
    if difficulty >= 4 and source.random() < 0.5:
        letter = word[int(source.integers(len(word)))]
        return f"How many times does the letter {letter} occur in {word}?", str(word.count(letter))
    return f"Spell the word {word}, letter by letter.", " ".join(word)


def _expression(source: np.random.Generator, difficulty: int) -> str:
    def number(digits: int) -> int:
        return int(source.integers(0 if digits == 1 else 10 ** (digits - 1), 10**digits))

    def sign(choices: str) -> str:
        return choices[int(source.integers(len(choices)))]

    if difficulty == 1:
        return f"{number(1)} + {number(1)}"
    if difficulty == 2:
        return f"{number(2)} {sign('+-')} {number(2)}"
    if difficulty == 3:
        return f"{number(3)} {op} {number(3)}" if (op := sign("+-*")) != "*" else f"{number(1)} * {number(1)}"
    if difficulty == 4:
        return f"{number(2)} {sign('+-')} {number(1)} * {number(2)}"
    divisor, quotient = number(1) + 1, number(2)
    if sign("/(") == "/":
        return f"{divisor * quotient} / {divisor} {sign('+-')} {number(2)}"
    return f"({number(2)} {sign('+-')} {number(2)}) * {number(1)}"


def _word(source: np.random.Generator, shortest: int, longest: int) -> str:
    """Build a word from syllables: this needs no word list, and there is no limit to their number."""
    length = int(source.integers(shortest, longest + 1))
    is_vowel = bool(source.integers(2))
    letters = []
    for _ in range(length):
        choices = _VOWELS if is_vowel else _CONSONANTS
        letters.append(choices[int(source.integers(len(choices)))])
        is_vowel = not is_vowel
    return "".join(letters)
