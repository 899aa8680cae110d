"""Verbs on a real terminal without an answer: those that rent, delete or take a key wait; the others end."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.pseudo_terminal import on_terminal

# In this order, in one folder: a run file is made, and nothing is ever rented.
QUIET = [
    ("new first --from tiny", 0),
    ("explain model.family", 0),
    ("doctor", 0),
    ("verify first", 0),
    ("plan first", 0),
    ("offers", 0),
    ("status first", 2),  # never launched
    ("runs", 0),
    ("ledger", 0),
    ("reconcile", 0),
    ("guard --once", 0),
    ("fetch first", 2),
    ("stop first", 2),
    ("destroy --all", 0),
]


@pytest.mark.slow
def test_verbs_that_rent_and_delete_nothing_end_without_an_answer(tmp_path: Path) -> None:
    for words, wanted in QUIET:
        code, said = on_terminal(*words.split(), cwd=tmp_path)
        assert code is not None, f"homing {words} waits for something: {said}"
        assert "[y/N]" not in said, said
        assert "Traceback" not in said, said
        assert code == wanted, f"homing {words}: {said}"


@pytest.mark.parametrize(("words", "question"), [("quickstart", "[y/N]"), ("setup runpod", "RUNPOD_API_KEY (hidden")])
def test_a_verb_that_needs_a_persons_word_asks_and_waits(tmp_path: Path, words: str, question: str) -> None:
    code, said = on_terminal(*words.split(), cwd=tmp_path, until=question)
    assert question in said
    assert code is None, f"it went on without an answer: {said}"
