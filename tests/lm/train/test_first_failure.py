"""Which rank is blamed when several fail."""

from __future__ import annotations

import collections
import subprocess
import threading
import time
from pathlib import Path

import pytest

from homing.lm.train import __main__ as program
from homing.lm.train.distributed import start_ranks


def rank(number: int, delay_s: float, code: int) -> start_ranks._Rank:
    process = subprocess.Popen(["sh", "-c", f"sleep {delay_s}; exit {code}"])
    return start_ranks._Rank(number, process, collections.deque(), threading.Thread())


def blamed(ranks: list[start_ranks._Rank]) -> int:
    try:
        found = start_ranks._watch(ranks)
    finally:
        for each in ranks:
            each.process.wait()
    assert found is not None
    return found.number


@pytest.mark.regression("first-failed-rank")
def test_the_rank_that_failed_first_is_blamed_and_not_the_first_by_number() -> None:
    assert blamed([rank(0, 1.5, 1), rank(1, 0.0, 1)]) == 1


def test_a_rank_that_was_left_alone_is_not_blamed_even_where_it_ended_first() -> None:
    assert blamed([rank(0, 0.0, start_ranks.EXIT_LEFT_ALONE), rank(1, 1.0, 1)]) == 1


def test_the_time_of_the_error_counts_and_not_that_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may need longer to end than one that failed because of it."""
    ranks = [rank(0, 0.0, 1), rank(1, 1.0, 1)]
    monkeypatch.setenv(start_ranks.NOTES, str(tmp_path))
    monkeypatch.setenv(start_ranks.RANK, "1")
    start_ranks.note_failure()
    ranks[1].note = tmp_path / "failed-1"
    (tmp_path / "failed-1").write_text(repr(time.time() - 5))
    assert blamed(ranks) == 1


@pytest.mark.parametrize(
    ("message", "is_alone"),
    [
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1", True),
        ("[enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr.", True),
        ("the folder /home/gloo/run has no such shape", False),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_being_left_alone_is_known_by_the_error_and_not_by_a_word(message: str, is_alone: bool) -> None:
    assert program._is_left_alone(RuntimeError(message)) is is_alone
