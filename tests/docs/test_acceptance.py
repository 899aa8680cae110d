"""The acceptance page is true: it has every item once, each has a test, and each command, flag and key exists."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from homing.cli.run_verb import LazyVerbs
from homing.cli.verb_list import VERBS
from homing.cli.verbs import explain
from homing.config.home_and_run_files import preset_dir
from homing.config.schema.keys import key_at

pytestmark = pytest.mark.usefixtures("_no_garbage_collection")

ROOT = Path(__file__).parents[2]
NUMBERS = [*map(str, range(1, 152)), *(f"X{n}" for n in range(1, 27)), *(f"P{n}" for n in range(1, 8))]
EVERYWHERE = {"-q", "--quiet", "-v", "--verbose", "--help"}
SKIPPING = re.compile(r"pytest\.mark\.(skip|xfail)\b")


def load_page_maker() -> Any:
    """The module docs/make_acceptance_page.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("make_acceptance_page", ROOT / "docs/make_acceptance_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


MAKER = load_page_maker()
SECTIONS = MAKER.load_sections()
ITEMS = {str(item["number"]): item for section in SECTIONS for item in section["items"]}


@functools.cache
def marked_tests() -> list[Any]:
    found: list[Any] = MAKER.find_marked_tests()
    return found


def verbs_named() -> Iterator[tuple[str, str, list[str]]]:
    """The number of an item, a verb of its commands, and what follows the verb. `a && b` is two commands."""
    for number, item in ITEMS.items():
        for command in item.get("commands", []):
            for part in command.split("&&"):
                program, verb, *rest = shlex.split(part)
                assert program == "homing", f"{number}: {command}"
                if verb != "--help":
                    yield number, verb, rest


def calls_in(node: ast.AST) -> set[str]:
    """The last part of each name that is called: `raises` of `pytest.raises(...)`."""
    called = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return {ast.unparse(func).rpartition(".")[2] for func in called}


def is_asserting(node: ast.AST) -> bool:
    by_call = {"raises", "fail", "assert_close", "assert_allclose"}
    return any(isinstance(inner, ast.Assert) for inner in ast.walk(node)) or bool(calls_in(node) & by_call)


@functools.cache
def helpers_that_assert() -> set[str]:
    """Functions below tests/ that assert something for the tests that call them."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "tests").rglob("*.py"))]
    bodies = [(node, "") for tree in trees for node in tree.body]
    bodies += [(inner, f"{node.name}::") for node, _ in bodies if isinstance(node, ast.ClassDef) for inner in node.body]
    functions = [(prefix + node.name, node) for node, prefix in bodies if isinstance(node, ast.FunctionDef)]
    return {name for name, node in functions if not name.startswith("test_") and is_asserting(node)}


def skips_of(test: Any) -> list[str]:
    """Markers that skip the test whatever the machine, or expect it to fail; also those of its class and module."""
    module = test.holders[0]
    marks = [node.value for node in module.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    marks += [each for node in (test.node, *test.holders[1:]) for each in node.decorator_list]
    return [found for found in map(ast.unparse, marks) if SKIPPING.search(found)]


@functools.cache
def flags_of(verb: str, first_word: str = "") -> set[str]:
    """The flags of a verb; for `store` and `image`, those of their subcommand."""
    group = LazyVerbs(name="homing").get_command(None, verb)
    command = getattr(group, "commands", {}).get(first_word, group)
    return {flag for option in command.params for flag in option.opts} | EVERYWHERE


# -- the items ---------------------------------------------------------------------------------------------------------


def test_every_item_is_there_exactly_once_and_in_order() -> None:
    assert [str(item["number"]) for section in SECTIONS for item in section["items"]] == NUMBERS


def test_an_item_has_only_the_known_fields_and_names_no_test() -> None:
    for section in SECTIONS:
        assert set(section) == {"title", "items"}
    for number, item in ITEMS.items():
        assert {"number", "does"} <= set(item) <= {"number", "does", "missing", "commands"}, number
        words = [item["does"], item.get("missing", "missing"), *item.get("commands", ["homing"])]
        assert all(isinstance(each, str) and each.strip() for each in words), number
        assert not any("`" in command for command in item.get("commands", [])), number
    text, functions = MAKER.DATA.read_text(encoding="utf-8"), {test.node.name for test in marked_tests()}
    assert [each for each in ("tests/", "::", *functions) if each in text] == [], "only markers link tests to items"


def test_an_item_has_a_command_and_a_test_or_neither() -> None:
    """An item without commands is not yet done: it says what is missing, and no test claims to show it."""
    shown = {number for test in marked_tests() for number in test.numbers}
    for number, item in ITEMS.items():
        if item.get("commands"):
            assert number in shown, f"{number}: no test has {MAKER.MARKER}({number})"
        else:
            assert "missing" in item, number
            assert number not in shown, number


def test_what_is_missing_is_said_in_its_own_field() -> None:
    """What is "not yet" there or "untested" is a part that is missing, and does not hide in what homing does."""
    doubtful = re.compile(r"\byet\b|\buntried\b|\buntested\b|\bpartly\b", re.IGNORECASE)
    assert [number for number, item in ITEMS.items() if doubtful.search(item["does"])] == []


@pytest.mark.acceptance("P2")
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


# -- the tests that show them ------------------------------------------------------------------------------------------


def test_every_marker_names_items_that_exist_each_once_and_in_order() -> None:
    for test in marked_tests():
        assert set(test.numbers) <= set(NUMBERS), f"{test.file}::{test.name}"
        assert list(test.numbers) == sorted(set(test.numbers), key=NUMBERS.index), f"{test.file}::{test.name}"


def test_every_marked_function_is_a_test_that_pytest_collects() -> None:
    for file, name in ((test.file, test.name) for test in marked_tests()):
        *holder, function = name.split("::")
        assert re.fullmatch(r"tests/(\w+/)*test_\w+\.py", file), file
        assert function.startswith("test_"), f"{file}::{name}"
        assert all(each.startswith("Test") for each in holder), f"{file}::{name}"


def test_every_marked_test_asserts_something_and_is_never_skipped_without_a_condition() -> None:
    for test in marked_tests():
        asserts = is_asserting(test.node) or calls_in(test.node) & helpers_that_assert()
        assert asserts, f"{test.file}::{test.name} asserts nothing"
        assert skips_of(test) == [], f"{test.file}::{test.name}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("@pytest.mark.acceptance(1)\n@pytest.mark.acceptance(2)\ndef test_a(): assert 1", "several markers"),
        ("@pytest.mark.acceptance\ndef test_a(): assert 1", "write the numbers"),
        ("@pytest.mark.acceptance()\ndef test_a(): assert 1", "write the numbers"),
        ("@pytest.mark.acceptance(*MANY)\ndef test_a(): assert 1", "write the numbers"),
        ("@pytest.mark.acceptance(1)\nclass TestA:\n    def test_a(self): assert 1", "may only decorate"),
        ("pytestmark = pytest.mark.acceptance(1)\ndef test_a(): assert 1", "may only decorate"),
    ],
)
def test_a_marker_that_cannot_be_counted_is_an_error(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(source, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        MAKER.find_marked_tests(tmp_path / "tests")


def test_markers_of_functions_and_methods_are_found_in_the_order_of_lines(tmp_path: Path) -> None:
    source = (
        "class TestA:\n    @pytest.mark.acceptance(7)\n    def test_b(self): assert 1\n\n\n"
        '@pytest.mark.slow\n@pytest.mark.acceptance(1, "X3")\ndef test_a(): assert 1\n'
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(source, encoding="utf-8")
    found = MAKER.find_marked_tests(tmp_path / "tests")
    assert [(test.file, test.name, test.numbers) for test in found] == [
        ("tests/test_a.py", "TestA::test_b", ("7",)),
        ("tests/test_a.py", "test_a", ("1", "X3")),
    ]


@pytest.mark.parametrize(
    "source",
    [
        "@pytest.mark.skip\n@pytest.mark.acceptance(1)\ndef test_a(): assert 1",
        "@pytest.mark.xfail(strict=True)\n@pytest.mark.acceptance(1)\ndef test_a(): assert 1",
        "@pytest.mark.skip\nclass TestA:\n    @pytest.mark.acceptance(1)\n    def test_a(self): assert 1",
        "pytestmark = [pytest.mark.slow, pytest.mark.skip]\n@pytest.mark.acceptance(1)\ndef test_a(): assert 1",
    ],
)
def test_a_skip_is_seen_on_the_test_its_class_and_its_module(tmp_path: Path, source: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(source, encoding="utf-8")
    (test,) = MAKER.find_marked_tests(tmp_path / "tests")
    assert len(skips_of(test)) == 1


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_data_and_the_markers_say() -> None:
    written = MAKER.write_page(SECTIONS, marked_tests())
    assert MAKER.PAGE.read_text(encoding="utf-8") == written, "run python docs/make_acceptance_page.py"
    rows = re.findall(r"^\| ([XP]?\d+) \|", written, re.MULTILINE)
    assert rows == NUMBERS


def test_a_row_counts_the_tests_of_its_item_and_names_their_files() -> None:
    node = ast.parse("def test_a(): assert 1").body[0]
    tests = [MAKER.MarkedTest(f"tests/test_{file}.py", "test_a", ("7",), node, ()) for file in ("a", "a", "b")]
    item = {"number": 7, "does": "Sorts a|b.", "missing": "c.", "commands": ["homing plan play", "homing runs"]}
    page = MAKER.write_page([{"title": "A", "items": [item, {"number": 8, "does": "d", "missing": "all"}]}], tests)
    files = "3 tests in `tests/test_a.py`, `tests/test_b.py`"
    assert f"| 7 | Sorts a\\|b. **Missing:** c. | `homing plan play` `homing runs` | {files} |" in page
    assert "| 8 | d **Missing:** all | not yet | not yet |" in page


def test_files_named_on_the_page_exist() -> None:
    named = re.findall(r"`((?:benchmarks|docs|tests)/[\w/.-]+)`", MAKER.PAGE.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []
