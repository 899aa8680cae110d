"""Every regression test names a known defect, and `benchmarks/regressions.py` judges failures strictly."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from regression_list import DEFECTS  # noqa: E402
from regressions import Outcome, _why_not, settled  # noqa: E402

_MARK = re.compile(r"pytest\.mark\.regression\(\s*\"([^\"]+)\"\s*\)")


def test_every_mark_names_a_known_defect() -> None:
    named = {name for path in (ROOT / "tests").rglob("*.py") for name in _MARK.findall(path.read_text("utf-8"))}
    assert named <= set(DEFECTS)


@pytest.mark.parametrize(
    "reason",
    [
        "ImportError: cannot import name 'x' from 'homing.units'",
        "ModuleNotFoundError: No module named 'homing.backup'",
        "AttributeError: module 'homing.units' has no attribute 'x'",
        "TypeError: launch() got an unexpected keyword argument 'confirm'",
    ],
)
def test_a_missing_name_does_not_count_as_the_defect(reason: str) -> None:
    assert "because a name is missing" in _why_not(Outcome("failed", reason), Outcome("passed"))


def test_a_test_must_fail_before_and_pass_now() -> None:
    failed, passed = Outcome("failed", "assert 6 == 2"), Outcome("passed")
    assert _why_not(failed, passed) == ""
    assert "passed on the base sources" in _why_not(passed, passed)
    assert "failed now" in _why_not(failed, failed)
    assert "skipped on the base sources" in _why_not(Outcome("skipped"), passed)
    assert "not collected on the base" in _why_not(Outcome("not collected"), passed)


def test_an_error_in_the_teardown_of_a_failed_test_hides_no_failure() -> None:
    failed, error, passed = (
        Outcome("failed", "assert 6 == 2"),
        Outcome("error", "a socket was left open"),
        Outcome("passed"),
    )
    assert settled(failed, error) == failed
    assert settled(passed, error) == error, "a test that passes and cannot clean up has not passed"
    assert settled(Outcome("not collected"), error) == error, "an error in the setup is no failure of the test"
