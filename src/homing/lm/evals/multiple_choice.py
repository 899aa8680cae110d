"""Evaluates multiple-choice and cloze tasks by the probabilities that the model assigns to continuations.

    beginning + end -> ids -> nats of the end alone

acc        the right choice has the highest probability
acc_norm   the same per character, because long choices tend to have lower probabilities (as in lm-eval)
cloze      acc: each token of the end is the most likely one, so greedy decoding would produce it; also perplexity

Beginning and end are joined with a space, unless there is already whitespace between them. They are encoded together
and split where the beginning alone would end, as in lm-eval. <|endoftext|> is put first, as before every document.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from homing.errors import DataError
from homing.lm.evals.eval_result import Measured, Score, share
from homing.lm.evals.likelihood import Row, Scored, score_rows
from homing.lm.evals.task_file import Choice, TaskFile
from homing.lm.model import Decoder
from homing.lm.tokenizer import Tokenizer

__all__ = ["measure_choices", "pair_row"]


def measure_choices(
    model: Decoder, tokenizer: Tokenizer, task: TaskFile, *, notify: Callable[[str], None] = lambda done: None
) -> Measured:
    items = [item for item in task.items if isinstance(item, Choice)]
    made = [[pair_row(tokenizer, *pair, context=model.shape.context) for pair in item.pairs] for item in items]
    _check_ends(task, items, made, model.shape.context)
    rows = [pair.row for pairs in made for pair in pairs]
    scored = list(score_rows(model, rows, wants_likeliest=task.form == "cloze", notify=notify))
    scores = (_cloze_scores if task.form == "cloze" else _choice_scores)(items, scored)
    num_cut = sum(pair.num_cut > 0 for pairs in made for pair in pairs)
    notes = [f"{num_cut} prompts were longer than the context and were truncated at the start."] if num_cut else []
    counts = {"questions": len(items), "ends": len(rows), "cut": num_cut}
    return Measured(task.name, task.form, scores, counts, task.sha256, {}, notes)


@dataclass(frozen=True)
class Pair:
    row: Row
    num_cut: int  # number of ids cut from the beginning because they did not fit in the context


def pair_row(tokenizer: Tokenizer, begin: str, end: str, *, context: int) -> Pair:
    begin, end = _seamed(begin, end)
    whole = [tokenizer.end_of_text_id, *tokenizer.encode(begin + end)]
    num_before = 1 + len(tokenizer.encode(begin))
    num_cut = max(0, len(whole) - context - 1)
    is_target = np.arange(len(whole)) >= min(num_before, len(whole) - 1)
    return Pair(Row(whole[num_cut:], is_target[num_cut:]), num_cut)


def _seamed(begin: str, end: str) -> tuple[str, str]:
    """Return both texts, with any whitespace between them moved to the start of the second.

    If there is no whitespace between them, a space is added there. The reason for the move is that tokenizers attach a
    space to the word after it.
    """
    if begin and not begin[-1].isspace() and not end[0].isspace():
        end = f" {end}"
    spaces = len(begin) - len(begin.rstrip())
    return begin[: len(begin) - spaces], begin[len(begin) - spaces :] + end


def _check_ends(task: TaskFile, items: list[Choice], made: list[list[Pair]], context: int) -> None:
    """Raise DataError if any end is too long for the context; truncating it would make the comparison unfair."""
    for item, pairs in zip(items, made, strict=True):
        if any(pair.row.is_target[0] for pair in pairs):
            raise DataError(
                what=f"{task.name}:{item.line}: a choice is longer than the model's context.",
                why=f"The context is {context:,} tokens.",
                fix="Remove the line, or use --text, which accepts texts of any length.",
            )


def _choice_scores(items: list[Choice], scored: list[Scored]) -> list[Score]:
    coming = iter(scored)
    plain, normed = [], []
    for item in items:
        nats = np.array([next(coming).nats.sum() for _ in item.pairs])
        # If only the beginnings differ, all ends have the same length, so acc_norm equals acc.
        lengths = np.array([max(1, len(end)) for _, end in item.pairs])
        plain.append(int(nats.argmin()) == item.gold)
        normed.append(int((nats / lengths).argmin()) == item.gold)
    what = f"{len(items):,} questions"
    return [share("acc", plain, what), share("acc_norm", normed, what)]


def _cloze_scores(items: list[Choice], scored: list[Scored]) -> list[Score]:
    what = f"{len(items):,} questions"
    nats = np.array([one.nats.sum() for one in scored])
    tokens = np.array([len(one.nats) for one in scored], dtype=np.float64)
    num_bytes = np.array([len(_seamed(*item.pairs[0])[1].encode()) for item in items], dtype=np.float64)
    return [
        share("acc", (bool(one.is_likeliest.all()) for one in scored), what),
        Score("perplexity", nats, tokens, what, is_exp=True, by_tokenizer=True, is_compared=False),
        Score("bits_per_byte", nats / math.log(2), num_bytes, what),
    ]
