"""The mark by which we know our own machines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.cloud.ledger.mark import MAX_MARK_CHARS, make_mark, new_run_id, owner_of
from homing.errors import UsageError
from homing.world import World


def test_the_owner_stays_the_same_for_one_home_and_differs_between_homes(tmp_path: Path) -> None:
    first = owner_of(tmp_path / "a", World())
    assert owner_of(tmp_path / "a", World()) == first
    assert owner_of(tmp_path / "b", World()) != first


def test_a_damaged_owner_file_is_refused_rather_than_replaced(tmp_path: Path) -> None:
    (tmp_path / "owner").write_text("x")
    with pytest.raises(UsageError, match="damaged"):
        owner_of(tmp_path, World())


@given(st.text(min_size=1, max_size=200), st.integers(1, 99999))
def test_every_mark_is_short_and_plain(run_id: str, attempt: int) -> None:
    mark = make_mark("abc123", run_id, attempt)
    assert re.fullmatch(r"homing-abc123-[a-z0-9-]+-\d+", mark)
    assert len(mark) <= MAX_MARK_CHARS
    assert "--" not in mark


def test_long_ids_that_begin_alike_get_different_marks() -> None:
    long = "a" * 80
    assert make_mark("abc123", long + "x", 1) != make_mark("abc123", long + "y", 1)
    assert make_mark("abc123", "Moss", 1) != make_mark("abc123", "moss", 1)


def test_attempts_get_different_marks() -> None:
    assert make_mark("abc123", "moss-20260101-000000-abcd", 1) != make_mark("abc123", "moss-20260101-000000-abcd", 2)


def test_a_run_id_has_name_time_and_four_more_characters() -> None:
    assert re.fullmatch(r"moss-\d{8}-\d{6}-[0-9a-f]{4}", new_run_id("moss", World()))
