"""White space in conversations: kept as in plain text, and learned where the assistant wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.lm.data.chat.kit import make_tokenizer

from homing.lm.data.chat.chat_settings import open_renderer
from homing.lm.data.chat.messages import Conversation, to_messages, which_form
from homing.lm.data.chat.rules import check
from homing.lm.tokenizer import load_tokenizer


def make_with_newline_token(folder: Path) -> Path:
    """A tokenizer that has one token for two line breaks, as all large ones do."""
    make_tokenizer(folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    newline = "\u010a"
    for count in (2, 4):
        half = newline * (count // 2)
        data["model"]["vocab"][half * 2] = 1 + max(data["model"]["vocab"].values())
        data["model"]["merges"].append([half, half])
    path.write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize(
    "lead",
    [" \n", *(pytest.param("\n" * count, marks=pytest.mark.regression("leading-newlines")) for count in (1, 2, 3))],
)
def test_line_breaks_at_the_beginning_of_an_answer_are_learned(tmp_path: Path, lead: str) -> None:
    folder = make_with_newline_token(tmp_path)
    renderer = open_renderer(folder)
    question = {"role": "user", "content": "Hi"}
    said = [question, {"role": "assistant", "content": f"{lead}Hello."}]
    (example,) = renderer.render(Conversation(said))
    tokenizer = load_tokenizer(folder)
    learned = [int(i) for i, is_learned in zip(example.ids, example.mask, strict=True) if is_learned]
    assert tokenizer.decode(learned) == f"{lead}Hello.<|im_end|>"
    # What is read before the answer is what the model is asked with.
    asked = renderer.prompt([question])
    assert [int(i) for i in example.ids[: len(asked)]] == asked
    whole = tokenizer.decode([int(i) for i in example.ids])
    assert whole == renderer.template.render(said), "the text stays that of the template"


@pytest.mark.regression("form-feed")
def test_a_form_feed_is_text_as_in_plain_files() -> None:
    said = [{"role": "user", "content": "One\x0cpage"}, {"role": "assistant", "content": "Two\x0cpages"}]
    value = {"messages": said}
    assert [message["content"] for message in check(to_messages(value, which_form(value))).messages] == [
        "One\x0cpage",
        "Two\x0cpages",
    ]
