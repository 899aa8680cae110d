"""The sampler for blind readings: half of a sample is user-facing, and a seed gives the same sample again."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("_no_garbage_collection")


@pytest.fixture(scope="module")
def sampler() -> Any:
    path = Path(__file__).parents[2] / "tools" / "sample_texts.py"
    spec = importlib.util.spec_from_file_location("sample_texts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_half_of_a_sample_is_user_facing_and_a_seed_repeats_it(sampler: Any) -> None:
    first, again, other = (sampler.sample(seed, 40) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert sum(text.kind in sampler.USER_FACING for text in first) == 20
    assert {text.kind for text in first} == {*sampler.USER_FACING, *sampler.INTERNAL}


def test_a_comment_after_code_is_a_text_of_its_own_and_lines_of_comment_are_one(sampler: Any) -> None:
    source = "# One comment\n# on two lines.\nx = 1  # after code\ny = 2  # after more code\n"
    texts = [text for _, text, _ in sampler.comments(source)]
    assert texts == ["One comment on two lines.", "after code", "after more code"]


def test_sentences_come_without_code_tables_and_link_targets(sampler: Any) -> None:
    prose = "Read [the guide](guide.md) before the first run. Then\nstart a run with one command."
    page = f"# Title\n\n{prose}\n\n```\ncode is not a sentence at all\n```\n| a | b |\n"
    assert [text for text, _ in sampler.sentences(page)] == [
        "Read [the guide] before the first run.",
        "Then start a run with one command.",
    ]


def test_an_error_is_shown_as_the_three_lines_of_the_terminal(sampler: Any) -> None:
    tree = ast.parse(
        'UsageError(what=f"Invalid port: {port}.", why="A port is 1 to 65535.", fix="homing forward RUN 1")'
    )
    [(kind, text, _)] = sampler.code_texts(tree)
    assert kind == "error"
    assert text == "error: Invalid port: {...}.\nwhy A port is 1 to 65535.\nfix homing forward RUN 1"


def test_the_settings_of_a_page_and_of_a_link_are_not_sentences(sampler: Any) -> None:
    page = "---\ntitle: one two three four five\n---\n\n[Read how to install it now](a.md){ .md-button }\n"
    assert list(sampler.sentences(page)) == [("[Read how to install it now]", 5)]
