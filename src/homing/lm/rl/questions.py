"""Provides the questions of an rl phase, read from files (`homing.rl_question_files`) or generated, and grades answers.

Arithmetic and spelling questions are generated, as many as needed. The same seed gives the same questions. Difficulty:

    arithmetic   1 one-digit sums   2 two-digit + and -   3 three-digit + and -, one-digit products
                 4 two operations   5 parentheses, and divisions without a remainder
    spelling     1 words of 3 letters   2 of 4-5 letters   3 of 6-7 letters
                 4 and 5 longer words; half of the questions ask how often a letter occurs in the word

A tenth of all questions, chosen by hash, is never used in training (`is_held_out`). A completion is right or wrong:

    number   compare the number after the last ####, else the last number, by value: 1,000 and $1000.00 are equal
    letters  compare the individual letters in order
    text     compare as a number if the answer is a number, else compare words; if the answer contains no words (such
             as an emoji or +), the completion must match it exactly
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

import numpy as np

from homing.errors import DataError, UsageError
from homing.lm.rl.calculator import compute
from homing.lm.rl.named_random import source
from homing.lm.rl.prompter import Prompter
from homing.lm.tokenizer import Tokenizer
from homing.rl_question_files import ANSWER_MARK, NO_LINES, Entry, read_entries, shorten_problems

__all__ = [
    "ANSWER_MARK",
    "Order",
    "Question",
    "arithmetic",
    "final_number",
    "is_held_out",
    "is_right_letters",
    "is_right_number",
    "is_right_text",
    "read_questions",
    "spelling",
]

_HELD_OUT_OF = 10  # one out of this many questions is held out


@dataclass(frozen=True)
class Question:
    text: str  # the question as text, as passed to reward.py
    ids: tuple[int, ...]  # ids of the prompt, up to where the answer begins
    answer: str  # the known answer; "" if there is none


def is_held_out(text: str) -> bool:
    """Return whether to hold a question out of training. This depends only on its text, not on seed or order."""
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
            fix="In the task, set file: to the path of the question file.",
        ) from exc
    if sha256 and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise DataError(
            what=f"{path} has changed since this run was created.",
            why=f"Its sha256 is {found[:12]}..., but run.json says {sha256[:12]}...",
            fix="Restore the original file, or start a new run with the changed one.",
        )
    entries, problems = read_entries(data, kind, needs_answers=needs_answers, num_ids=tokenizer.vocab_size)
    if problems:
        raise DataError(
            what=f"The questions in {path} cannot be used for the task {kind}.",
            why="\n".join(shorten_problems(problems)),
            fix="Use a file that contains questions." if problems == [NO_LINES] else "Fix or remove these lines.",
        )
    return [_question(entry, tokenizer, prompter) for entry in entries]


def _question(entry: Entry, tokenizer: Tokenizer, prompter: Prompter) -> Question:
    if entry.ids:
        return Question(tokenizer.decode(list(entry.ids)), entry.ids, entry.answer)
    return Question(entry.messages[-1]["content"], prompter.ids(entry.messages), entry.answer)


# -- generated questions -----------------------------------------------------------------------------------------------

_LETTERS = {1: (3, 3), 2: (4, 5), 3: (6, 7), 4: (6, 9), 5: (9, 14)}
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"


def arithmetic(source: np.random.Generator, difficulty: int) -> tuple[str, str]:
    """Return a question and its answer."""
    expression = _expression(source, difficulty)
    answer = compute(expression)
    assert answer is not None, f"generated {expression!r}, which has no value"
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
    """Make up a word of alternating consonants and vowels.

    Made-up words need no word list, and there are more of them than training can use.
    """
    length = int(source.integers(shortest, longest + 1))
    is_vowel = bool(source.integers(2))
    letters = []
    for _ in range(length):
        choices = _VOWELS if is_vowel else _CONSONANTS
        letters.append(choices[int(source.integers(len(choices)))])
        is_vowel = not is_vowel
    return "".join(letters)


# -- order -------------------------------------------------------------------------------------------------------------

_BLOCK = 256


class Order:
    """Maps prompt number n to a task and to the index of a question within that task.

    Prompts come in blocks. Each block contains prompts from every task, in proportion to the task weights, shuffled by
    (seed, block). So the proportions stay correct throughout training, and any n can be mapped directly.
    """

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        self._seed = seed
        self._quotas = _quotas(weights)

    def at(self, number: int) -> tuple[int, int]:
        """Return (task index, number of earlier questions from that task)."""
        block, place = divmod(number, _BLOCK)
        tasks = [task for task, quota in enumerate(self._quotas) for _ in range(quota)]
        order = source("tasks", self._seed, block).permutation(_BLOCK)
        task = tasks[int(order[place])]
        before = sum(tasks[int(at)] == task for at in order[:place])
        return task, block * self._quotas[task] + before


def _quotas(weights: Sequence[float]) -> list[int]:
    """Return each task's number of prompts per block, rounded by the largest remainder method."""
    shares = [weight / sum(weights) * _BLOCK for weight in weights]
    quotas = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda task: (quotas[task] - shares[task], task))
    for task in by_remainder[: _BLOCK - sum(quotas)]:
        quotas[task] += 1
    if 0 in quotas:
        raise UsageError(
            what="A task of the rl phase would never be used.",
            why=f"Its weight is less than 1/{_BLOCK} of the total: {', '.join(f'{weight:g}' for weight in weights)}.",
            fix="Increase its weight, or remove the task.",
        )
    return quotas


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
