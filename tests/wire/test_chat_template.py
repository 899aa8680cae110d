"""The chat template next to a tokenizer: which file is read, and which files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from homing.config.weights.open_weights import chat_template_in
from homing.errors import DataError
from homing.lm.data.chat.template import find_template
from homing.lm.rl.prompter import Prompter
from homing.wire.chat_template import read_chat_template
from homing.wire.file_names import CHAT_TEMPLATE, TOKENIZER_CONFIG

NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]


@pytest.mark.parametrize(
    ("config", "own", "source"),
    [
        (None, None, ""),
        ({}, None, ""),
        ({"chat_template": "plain"}, None, "plain"),
        ({"chat_template": NAMED}, None, "plain"),
        ({"chat_template": NAMED[:1]}, None, ""),
        ({"chat_template": "plain"}, "newer\n", "newer\n"),
        (None, "newer", "newer"),
    ],
)
def test_a_file_of_its_own_wins_and_of_several_the_default_is_meant(
    tmp_path: Path, config: dict[str, Any] | None, own: str | None, source: str
) -> None:
    if config is not None:
        (tmp_path / TOKENIZER_CONFIG).write_text(json.dumps(config))
    if own is not None:
        (tmp_path / CHAT_TEMPLATE).write_text(own)
    found = read_chat_template(tmp_path)
    assert found.source == source
    assert found.path == tmp_path / (CHAT_TEMPLATE if own else TOKENIZER_CONFIG)
    assert found.config == (config or {})


@pytest.mark.parametrize("ask", [chat_template_in, find_template, lambda folder: Prompter(folder, None)])
@pytest.mark.parametrize(
    ("name", "content"),
    [(CHAT_TEMPLATE, b"h\xe9llo"), (TOKENIZER_CONFIG, b"{"), (TOKENIZER_CONFIG, b"[1]"), (TOKENIZER_CONFIG, b"\xe9")],
)
def test_what_cannot_be_read_is_named_by_everyone_who_asks_and_never_taken_for_none(
    tmp_path: Path, ask: Callable[[Path], object], name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} cannot be read") as caught:
        ask(tmp_path)
    assert caught.value.why
