"""`homing VERB --help`: in words that a person would type, whole, and the same everywhere."""

from __future__ import annotations

import re

import pytest
from tests.cloud.rig import homing

from homing.cli.verb_list import VERBS

INNER = {"data": ("check", "show"), "image": ("build",), "store": ("ls", "get", "put", "rm")}
CALLS = [(verb, *inner) for verb in VERBS for inner in ([(each,) for each in INNER.get(verb, ())] or [()])]


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_the_help_of_a_verb_has_no_types_of_a_programming_language(
    call: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = homing(capsys, monkeypatch, *call, "--help")
    assert said.code == 0
    usage = said.out.splitlines()[0]
    assert usage.startswith(f"Usage: homing {' '.join(call)} [OPTIONS]")
    assert not re.search(r"[{}]|\[\[|\[[a-z]+\]", usage), usage
    assert not re.search(r"<(?![|=])|\blist\[|\brange\b|\[required\]", said.out), said.out


@pytest.mark.parametrize("group", INNER)
def test_a_group_tells_its_verbs_in_whole_sentences(
    group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = homing(capsys, monkeypatch, group).out.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == list(INNER[group])
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_an_argument_with_a_default_tells_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = homing(capsys, monkeypatch, "logs", "--help").out
    assert re.search(r"\n  PROGRAM .*\[default: trainer\]\n", said), said
