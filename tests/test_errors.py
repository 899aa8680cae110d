from __future__ import annotations

import re

import pytest

from homing import errors
from homing.errors import HomingError, Mistake, RunFileError


def all_errors() -> list[type[HomingError]]:
    found = [HomingError]
    for cls in found:
        found += cls.__subclasses__()
    return found


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    drawn = dict(re.findall(r"(\w+)\s+(\d+)\b", errors.__doc__ or ""))
    coded = {cls.__name__: str(cls.exit_code) for cls in all_errors() if cls.__module__ == errors.__name__}
    assert coded == {name: code for name, code in drawn.items() if name in coded}
    assert set(errors.__all__) == {*coded, "Mistake"}


@pytest.mark.acceptance(150)
def test_an_error_has_what_why_and_fix_on_three_lines() -> None:
    error = HomingError("It failed.", "Because.", "Do this.")
    assert str(error).splitlines() == ["It failed.", "Because.", "Do this."]
    assert error.to_dict()["exit_code"] == 1


def test_a_run_file_error_lists_every_mistake_with_its_line() -> None:
    error = RunFileError(
        [
            Mistake("a.yaml", 3, "model.widht", "unknown key.", "Did you mean width?"),
            Mistake("a.yaml", None, "x", "no."),
        ]
    )
    assert error.exit_code == 2
    assert "2 mistakes" in error.what
    assert "a.yaml:3: model.widht: unknown key. Did you mean width?" in error.why
    assert "a.yaml: x: no." in error.why


def test_whoever_knows_the_run_puts_its_name_where_another_wrote_run() -> None:
    def said(typed: str) -> str:
        error = HomingError(
            "It failed.", "`homing verify RUN --hash` finds it.", "homing prep RUN   or: homing fetch RUN"
        )
        error.name_run(typed)
        return f"{error.why} {error.fix}"

    assert said("moss") == "`homing verify moss --hash` finds it. homing prep moss   or: homing fetch moss"
    changed = "moss --smoke --set seed=3"
    assert said(changed) == f"`homing verify {changed} --hash` finds it. homing prep {changed}   or: homing fetch moss"
    assert said("") == "`homing verify --hash` finds it. homing prep   or: homing fetch RUN", (
        "the newest file was meant"
    )
