"""A regular expression that the tokenizers package cannot finish."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lm.data.chat.kit import make_tokenizer

from homing.errors import DataError
from homing.lm.data.chat.render import ChatTokens
from homing.lm.tokenizer import load_tokenizer


@pytest.mark.regression("tokenizer-regex")
@pytest.mark.parametrize(
    "encode",
    [
        lambda path, text: load_tokenizer(path).encode(text),
        lambda path, text: load_tokenizer(path).encode_many([text]),
        lambda path, text: ChatTokens(path).encode([text]),
    ],
    ids=["one", "many", "chat"],
)
def test_a_regex_that_takes_too_long_is_an_error_that_names_the_tokenizer(
    tmp_path: Path, encode: Callable[[Path, str], object]
) -> None:
    make_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text())
    hostile = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [hostile, data["pre_tokenizer"]]}
    path.write_text(json.dumps(data))
    try:
        with pytest.raises(DataError, match="cannot encode this text") as raised:
            encode(path, "x" * 60)
    except BaseException as exc:
        pytest.fail(f"{type(exc).__name__} instead of an error that can be shown")
    assert str(path) in str(raised.value)
