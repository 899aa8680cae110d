"""Metrics for each rl step, pass@k, and collapse detection.

collapse           for `collapse_steps` steps in a row, the rewards in each group are equal, or nearly every sample is
                   empty, or nearly every sample is truncated, or the entropy is close to zero; each collapse is
                   reported once
learned nothing    reported at the end if, in every step, the rewards within each group were equal
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Collapse", "Graded", "pass_at_k", "summary"]

_NEARLY_ALL = 0.95
_NO_ENTROPY = 0.01  # nats per token
_EQUAL = "all rewards of a prompt are equal, so nothing is learned"


@dataclass(frozen=True)
class Graded:
    """The data about one sample from which metrics are computed."""

    task: str
    length: int
    is_ended: bool
    is_empty: bool
    entropy: float
    reward: float | None  # None if the reward failed


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples is correct."""
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def summary(graded: Sequence[Graded], group_size: int, *, pass_reward: float) -> dict[str, float]:
    """Return metrics for a step's samples, with the most informative metrics first."""
    rewards = [one.reward for one in graded if one.reward is not None]
    groups = [graded[start : start + group_size] for start in range(0, len(graded), group_size)]
    known = [[one.reward for one in group if one.reward is not None] for group in groups]
    right = [sum(reward >= pass_reward for reward in group) for group in known]
    figures = {
        "reward": _mean(rewards),
        f"pass_at_{group_size}": _mean([float(number > 0) for number in right]),
        "length": _mean([float(one.length) for one in graded]),
        "entropy": _mean([one.entropy for one in graded]),
        "pass_at_1": _mean([number / len(group) for group, number in zip(known, right, strict=True) if group]),
        "reward_std": _mean([_deviation(group) for group in known if group]),
        "equal_groups": _mean([float(len(set(group)) < 2) for group in known]),
        "truncated": _mean([float(not one.is_ended) for one in graded]),
        "empty": _mean([float(one.is_empty) for one in graded]),
    }
    failed = len(graded) - len(rewards)
    figures |= {"rewards_failed": failed / len(graded)} if failed else {}
    tasks = sorted({one.task for one in graded})
    if len(tasks) > 1:
        for task in tasks:
            known_here = [one.reward for one in graded if one.task == task and one.reward is not None]
            figures |= {f"reward_{task}": _mean(known_here)} if known_here else {}
    return figures


class Collapse:
    """Counts for how many consecutive steps each symptom of a collapse has been present.

    The counts are not stored in checkpoints, so after a resume a symptom must again last `steps` steps to be reported.
    """

    def __init__(self, steps: int, notify: Callable[[str, str], None]) -> None:
        self._steps, self._notify = steps, notify
        self._in_a_row: dict[str, int] = {}
        self._num_steps = self._num_equal = 0
        self._rewards: list[float] = []

    def look(self, figures: dict[str, float]) -> None:
        self._num_steps += 1
        self._num_equal += figures["equal_groups"] >= 1.0
        self._rewards.append(figures["reward"])
        reports = {
            _EQUAL: figures["equal_groups"] >= 1.0,
            "nearly every sample is empty": figures["empty"] >= _NEARLY_ALL,
            "nearly every sample is cut off at answer_tokens": figures["truncated"] >= _NEARLY_ALL,
            "the entropy is almost zero: samples hardly differ": figures["entropy"] < _NO_ENTROPY,
        }
        for sign, is_seen in reports.items():
            count = self._in_a_row[sign] = self._in_a_row.get(sign, 0) + 1 if is_seen else 0
            if count == self._steps:
                self._notify("collapsed", f"warning: rl has collapsed: for {count} steps, {sign}. {_ADVICE[sign]}")

    def look_back(self) -> None:
        """Warn, after the last step, if no step had anything to learn from."""
        if self._num_equal < self._num_steps:
            return
        every = "the only step" if self._num_steps == 1 else f"all {self._num_steps:,} steps"
        self._notify(
            "learned_nothing",
            f"warning: rl has learned nothing: in {every} all answers to a question had the same reward"
            f" ({_mean(self._rewards):.3f} on average). {_ADVICE[_EQUAL]}",
        )


_ADVICE = {
    _EQUAL: ("Use easier or harder tasks, more samples_per_prompt, or initial weights that get some answers right."),
    "nearly every sample is empty": "Lower the learning rate, add kl, or check whether a reward favors empty answers.",
    "nearly every sample is cut off at answer_tokens": (
        "Raise answer_tokens, or start from a model that ends its turns (sft)."
    ),
    "the entropy is almost zero: samples hardly differ": ("Lower the learning rate, add kl, or raise the temperature."),
}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) ** 2 for value in values]))
