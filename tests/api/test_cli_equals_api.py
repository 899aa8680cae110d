"""Every verb of the command line and its function in `homing.api` do the same, on every provider that plays a role.

The tests are made from two tables: `FUNCTIONS`, which names the function of each verb, and `SCENARIOS`. A verb that
is missing in one of them fails by its name, unless `WITHOUT` says why nothing of it can be compared.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.api.cli_and_api import Bench, Scenario, Trial, function_of
from tests.api.left_behind import Left, difference
from tests.api.scenarios import SCENARIOS, WITHOUT

import homing
from homing.api import FUNCTIONS
from homing.cli.verb_list import VERBS


def verbs() -> list[str]:
    """Return every verb; one with subcommands as each of them, such as `store ls`."""
    found = []
    for verb in VERBS:
        app = getattr(importlib.import_module(f"homing.cli.verbs.{verb}"), "app", None)
        commands = [each.name or each.callback.__name__ for each in app.registered_commands] if app else []
        found += [f"{verb} {command}" for command in commands] or [verb]
    return found


@pytest.fixture(autouse=True)
def printed_notices() -> None:
    """The library alone: nothing listens to its notices."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("equal"))
    yield made
    made.end()


# --- each verb has a function ---


def test_the_tables_name_every_verb_and_nothing_else() -> None:
    assert list(FUNCTIONS) == verbs()
    assert sorted([*SCENARIOS, *WITHOUT]) == sorted(verbs())
    assert all([*SCENARIOS.values(), *WITHOUT.values()])


@pytest.mark.parametrize("verb", verbs())
def test_the_function_of_a_verb_is_typed_and_documented(verb: str) -> None:
    function = function_of(verb)
    assert inspect.getdoc(function), f"{FUNCTIONS[verb]} has no docstring"
    signature = inspect.signature(function)
    assert [each.name for each in signature.parameters.values() if each.annotation is each.empty] == []
    assert signature.return_annotation is not signature.empty


@pytest.mark.parametrize("verb", verbs())
@pytest.mark.usefixtures("_no_garbage_collection")
def test_a_verb_calls_its_function_which_knows_nothing_of_the_command_line(verb: str) -> None:
    module, _, function = FUNCTIONS[verb].partition(":")
    library = parse(module)
    assert [name for name in imported(library) if name.split(".")[0] == "typer" or name.startswith("homing.cli")] == []
    typed = parse(f"homing.cli.verbs.{verb.split()[0]}")
    # The verb may call a function of the same module that calls this one, such as an iterator over its results.
    callers = {function} | {
        each.name for each in library.body if isinstance(each, ast.FunctionDef) and function in called(each)
    }
    assert {name for name in callers if f"{module}.{name}" in imported(typed)} & called(typed), (
        f"cli/verbs/{verb.split()[0]}.py does not call {FUNCTIONS[verb]}"
    )


def parse(module: str) -> ast.Module:
    return ast.parse(Path(importlib.import_module(module).__file__ or "").read_text())


def imported(tree: ast.AST) -> set[str]:
    """Return every imported module, and every imported name with its module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def called(tree: ast.AST) -> set[str]:
    """Return the names of the functions that are called; of `module.function(...)` the last part."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in calls}


# --- both do the same ---


def cases() -> list[object]:
    found = []
    for verb, scenarios in SCENARIOS.items():
        for number, scenario in enumerate(scenarios):
            for provider in scenario.providers:
                words = [*verb.split(), *([str(number + 1)] if number else []), *([provider] if provider else [])]
                marks = (*scenario.marks, *([pytest.mark.slow] if provider == "fake" else []))
                found.append(pytest.param(verb, scenario, provider, id="-".join(words), marks=marks))
    return found


@pytest.mark.parametrize(("verb", "scenario", "provider"), cases())
def test_a_verb_and_its_function_leave_the_same_behind(
    verb: str,
    scenario: Scenario,
    provider: str,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    trial = Trial(bench, scenario.place, provider, monkeypatch, capfd)
    if scenario.arrange is not None:
        scenario.arrange(trial)
    function = function_of(verb)
    try:
        before, typed = trial.by_command_line(f"{verb} {scenario.argv}", scenario.stdin)
        called = trial.by_library(lambda: scenario.call(function), with_answer="--json" in scenario.argv)
    finally:
        trial.end()
    check_same(typed, called)
    if scenario.is_reading:
        del before["answer"], called["answer"]
        check_same(before, called, "set-up", verb)


def check_same(one: Left, other: Left, *names: str) -> None:
    found = difference(one, other, names=names or ("command line", "library"))
    if found:
        pytest.fail(found, pytrace=False)


# --- a difference is found ---


@pytest.mark.parametrize(
    ("place", "words", "call", "shown"),
    [
        ("finished", "fetch moss", lambda run: run.fetch(checkpoint="5"), '+ "step": 5'),
        ("finished", "fetch moss", lambda run: run.fetch(to="elsewhere"), "models/moss/manifest.json: only by the com"),
        ("finished", "status moss", lambda run: run.fetch(), "project/models/moss/model.safetensors: only by the libr"),
        ("project", "plan moss", lambda run: run.launch(spend_limit=1, confirm=True), "home/ledger.sqlite: runs: only"),
        ("text", "new moss --from tiny", lambda run: run.new("moss", "tiny", text=["moss.txt"]), "runs/moss.yaml"),
    ],
    ids=["another step", "another folder", "a verb that only reads", "a launch", "another text"],
)
def test_a_function_that_does_something_else_is_reported_with_what_differs(
    place: str,
    words: str,
    call: Callable[[homing.Run], object],
    shown: str,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    trial = Trial(bench, place, "" if place == "text" else "local", monkeypatch, capfd)
    try:
        _, typed = trial.by_command_line(words)
        called = trial.by_library(lambda: call(homing.Run("moss")))
    finally:
        trial.end()
    with pytest.raises(pytest.fail.Exception) as failed:
        check_same(typed, called)
    assert shown in str(failed.value)


def test_a_function_that_prints_is_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError, match="the library prints nothing"):
        Trial(bench, "text", "", monkeypatch, capfd).by_library(lambda: os.system("echo done"))
