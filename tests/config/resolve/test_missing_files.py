"""Missing files named in a run file are reported before anything is paid for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.config.conftest import BASE, put_data

from homing.config.load import Loaded
from homing.find_source_files import num_text_bytes

CHAT = "  - {kind: sft, steps: 5, batch_tokens: 256, data: {chat: [chat.jsonl]}}\n"


def messages(loaded: Loaded, key: str) -> list[str]:
    return [warning for warning in loaded.warnings if warning.startswith(f"{key}:")]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("gone.txt", "no file or folder 'gone.txt'"),
        ("gone/*.txt", "no file matches 'gone/*.txt'"),
        ("empty.txt", "'empty.txt' is empty"),
        ("folder", "'folder' is empty"),
    ],
)
def test_text_that_is_missing_or_empty_is_warned_of_by_key_and_file(
    load: Callable[..., Loaded], named: str, words: str
) -> None:
    Path("empty.txt").touch()
    Path("folder").mkdir()
    loaded = load(BASE + f"data: {{text: ['{named}']}}\n")
    [warning] = messages(loaded, "data.text")
    assert words in warning


def test_a_whole_text_or_one_that_is_prepared_is_not_warned_of(load: Callable[..., Loaded], folder: Path) -> None:
    Path("a.txt").write_text("moss")
    assert not messages(load(BASE + "data: {text: [a.txt]}\n"), "data.text")
    put_data(folder)
    assert not messages(load(BASE + "data: {text: [gone.txt]}\n"), "data.text")


def test_held_out_text_and_a_phases_conversations_are_looked_for_too(load: Callable[..., Loaded]) -> None:
    Path("a.txt").write_text("moss")
    loaded = load(BASE + CHAT + "data: {text: [a.txt], validation: [held.txt]}\n")
    assert "'held.txt'" in messages(loaded, "data.validation")[0]
    assert "'chat.jsonl'" in messages(loaded, "phases.1.data.chat")[0]


def test_conversations_in_a_store_are_not_looked_for_here(load: Callable[..., Loaded]) -> None:
    loaded = load(BASE + CHAT.replace("chat.jsonl", "'s3://bucket/chat.jsonl'"))
    assert not messages(loaded, "phases.1.data.chat")


def test_packed_text_counts_for_about_what_it_unpacks_to(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt.gz", "c.parquet"):
        (tmp_path / name).write_bytes(b"x" * 100)
    assert [num_text_bytes([str(tmp_path / pattern)]) for pattern in ("*.txt", "*.gz", "*.parquet")] == [100, 300, 200]
    assert num_text_bytes([str(tmp_path)]) == 600
