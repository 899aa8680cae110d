"""The page of acceptance is true: every item is there once, and every command, flag, key and test it names exists."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from homing.cli import explain
from homing.cli.call import LazyVerbs
from homing.cli.main import VERBS
from homing.config import preset_dir
from homing.config.keys import key_at

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "acceptance.md"
NUMBERS = [*map(str, range(1, 152)), *(f"X{n}" for n in range(1, 27)), *(f"P{n}" for n in range(1, 8))]
ROW = re.compile(r"^\| ([XP]?\d+) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
NOT_YET = "not yet"
EVERYWHERE = {"-q", "--quiet", "-v", "--verbose", "--help"}


class Row(NamedTuple):
    number: str
    words: str
    command: str
    test: str

    @property
    def commands(self) -> list[list[str]]:
        """What stands between ticks, as arguments; `a && b` is two commands."""
        quoted = re.findall(r"`([^`]+)`", self.command)
        return [shlex.split(part) for line in quoted for part in line.split("&&")]

    @property
    def tests(self) -> list[str]:
        return re.findall(r"`(tests/[^`]+)`", self.test)


ROWS = [Row(*found) for found in ROW.findall(PAGE.read_text(encoding="utf-8"))]


def verbs_named() -> Iterator[tuple[str, str, list[str]]]:
    """Row number, verb and what follows it."""
    for row in ROWS:
        for program, verb, *rest in row.commands:
            assert program == "homing", f"{row.number}: {row.command}"
            if verb != "--help":
                yield row.number, verb, rest


@functools.cache
def functions_in(file: str) -> dict[str, ast.FunctionDef]:
    """`function` and `Class::method` of a test file, read without running it."""
    found = {}
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}": inner for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def calls_in(node: ast.AST) -> set[str]:
    """The last part of each name that is called: `raises` of `pytest.raises(...)`."""
    called = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return {ast.unparse(func).rpartition(".")[2] for func in called}


def is_asserting(node: ast.AST) -> bool:
    by_call = {"raises", "fail", "assert_close", "assert_allclose"}
    return any(isinstance(inner, ast.Assert) for inner in ast.walk(node)) or bool(calls_in(node) & by_call)


@functools.cache
def helpers_that_assert() -> set[str]:
    """Functions of the tests to which a test may leave it to look."""
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("*.py"))]
    every = [(name, node) for file in files for name, node in functions_in(file).items()]
    return {name for name, node in every if not name.startswith("test_") and is_asserting(node)}


@functools.cache
def flags_of(verb: str, first_word: str = "") -> set[str]:
    """Of `store` and `image`, whose first word is a command of its own, that one's."""
    group = LazyVerbs(name="homing").get_command(None, verb)
    command = getattr(group, "commands", {}).get(first_word, group)
    return {flag for option in command.params for flag in option.opts} | EVERYWHERE


def has_test(test: str) -> bool:
    file, _, name = test.partition("::")
    *holder, function = name.split("::")
    is_collected = function.startswith("test_") and all(each.startswith("Test") for each in holder)
    return (ROOT / file).is_file() and is_collected and name in functions_in(file)


def test_every_item_is_there_exactly_once_and_in_order() -> None:
    assert [row.number for row in ROWS] == NUMBERS
    # A row that the pattern cannot read would be lost in silence.
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len([line for line in lines if not line.startswith("| no. ")]) == len(ROWS)


def test_a_row_has_a_command_and_a_test_or_neither() -> None:
    for row in ROWS:
        if row.command.startswith(NOT_YET) or row.test.startswith(NOT_YET):
            assert row.command == NOT_YET, row
            assert row.test.startswith(NOT_YET), row
            assert not row.tests, row
        else:
            assert row.commands, row
            assert row.tests, row


def test_every_test_exists() -> None:
    assert [(row.number, test) for row in ROWS for test in row.tests if not has_test(test)] == []
    others = [re.sub(r"`tests/[^`]+`", "", row.test).strip() for row in ROWS if row.tests]
    assert set(others) <= {""}, "something that is no test stands among the tests"


def test_every_test_looks_at_something_and_is_never_skipped_without_a_condition() -> None:
    for number, test in ((row.number, test) for row in ROWS for test in row.tests):
        node = functions_in(test.partition("::")[0])[test.partition("::")[2]]
        assert is_asserting(node) or calls_in(node) & helpers_that_assert(), f"{number}: {test} asserts nothing"
        marks = {ast.unparse(each).partition("(")[0] for each in node.decorator_list}
        assert not marks & {"pytest.mark.skip", "pytest.mark.xfail"}, f"{number}: {test}"


def test_what_is_missing_is_said_to_be() -> None:
    """A row that says "yet" or "untried" of anything has to begin with, or come to, the word partly."""
    for row in ROWS:
        if row.tests and re.search(r"\byet\b|\buntried\b", row.words):
            assert re.search(r"\bpartly: ", row.words), row.number


def test_every_command_exists_with_its_flags() -> None:
    assert [(number, verb) for number, verb, _ in verbs_named() if verb not in VERBS] == []
    for number, verb, rest in verbs_named():
        flags = {word.partition("=")[0] for word in rest if word.startswith("-")}
        assert flags <= flags_of(verb, rest[0] if rest else ""), f"{number}: homing {verb}"
    assert "--spend-limit" not in flags_of("fetch"), "the flags of a verb are its own"


def test_every_key_and_preset_exists() -> None:
    presets = {path.stem for path in preset_dir().glob("*.yaml")}
    for number, verb, rest in verbs_named():
        for flag, value in pairwise(rest):
            path = tuple(int(part) if part.isdigit() else part for part in value.partition("=")[0].split("."))
            assert flag != "--set" or key_at(path), f"{number}: {value}"
            assert flag != "--from" or value in presets, f"{number}: {value}"
        if verb == "explain" and rest:
            explain.command(rest[0])  # raises on what it does not know


def test_files_named_in_the_words_exist() -> None:
    named = re.findall(r"`((?:benchmarks|docs|tests)/[\w/.]+)`", PAGE.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []
