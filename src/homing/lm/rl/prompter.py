"""Builds the prompt for a question, formatted with the model's own chat template, or as ChatML if it has none.

    messages -> the text that the template writes around them (turns.json) -> ids, up to where the answer begins

This module does not run templates. `homing prep` writes turns.json (`lm.data.chat.text_around_turns`).
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from homing.errors import DataError
from homing.lm.tokenizer import Tokenizer
from homing.lm.tokenizer.tokenizer import CHAT_TEMPLATE, IM_END, IM_START, lacks_turns
from homing.wire import codec, file_names
from homing.wire.chat_template import Turns, Unreadable, read_chat_template

__all__ = ["Prompter", "chatml", "in_turns", "stop_ids_of", "template_sha256"]

_TURN_ENDS = (IM_END, "<|eot_id|>")  # end-of-turn tokens: the first for homing and Qwen, the second for Llama 3


class Prompter:
    """Builds prompts. `folder` contains the tokenizer, and the chat template if there is one."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._template = _template_in(folder)
        self._turns = _turns_in(folder)
        ends = [self._turns.end_id] if self._turns and self._turns.end_id is not None else []
        self.stop_ids = sorted({*stop_ids_of(tokenizer), *ends})

    def ids(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Return the ids of the prompt, up to where the answer begins."""
        if self._template in ("", CHAT_TEMPLATE):
            return chatml(self._tokenizer, messages)
        if self._turns is None or self._turns.template_sha256 != template_sha256(self._template):
            raise DataError(
                what="These weights have their own chat template, which has not been split into turns yet.",
                why=f"{file_names.TURNS} is missing from {self._folder}, or was created from a different template.",
                fix="Create the file: homing prep RUN (If that command reports that the template cannot be split,"
                " provide the prompts as token ids.)",
            )
        return in_turns(self._turns, self._tokenizer, messages)


def in_turns(turns: Turns, tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
    """Return the ids of the messages, formatted as the template's turns.

    Text from a message never becomes a special token, even if it looks like one. It is encoded together with the text
    that the template writes around it, up to the next marker, as inference engines do.
    """
    roles = [message["role"] for message in messages]
    begin = turns.begin_system if roles[0] == "system" else turns.begin
    joins = [getattr(turns, f"{left}_{right}", None) for left, right in itertools.pairwise(roles)]
    between = [piece for piece in (begin, *joins, turns.end) if piece is not None]
    if len(between) <= len(roles) or roles[-1] != "user":
        raise DataError(
            what=f"The question {messages[-1]['content'][:60]!r} cannot be formatted as a prompt.",
            why=f"The model's chat template does not support this order of turns: {', '.join(roles)}.",
            fix="Remove the question, use only turns that the template supports, or provide the question as token ids.",
        )
    ids: list[int] = []
    text = ""
    # A marker may be a prefix of another one, so try the longest first.
    names_of = sorted(turns.markers, key=len, reverse=True)
    marker = re.compile(f"({'|'.join(map(re.escape, names_of))})" if names_of else r"((?!))")
    for message, before in zip([*messages, None], between, strict=True):
        for piece in marker.split(before):
            if piece in turns.markers:
                ids += [*(tokenizer.encode(text) if text else []), turns.markers[piece]]
                text = ""
            else:
                text += piece
        if message is not None:
            text += message["content"].strip() if turns.is_trimmed else message["content"]
    return (*ids, *(tokenizer.encode(text) if text else []))


def template_sha256(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def stop_ids_of(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end a sample: every end-of-turn and end-of-text token in the vocabulary."""
    turns = [tokenizer.specials[end] for end in _TURN_ENDS if end in tokenizer.specials]
    return sorted({tokenizer.end_of_text_id, *tokenizer.stop_ids, *turns})


def chatml(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
    missing = lacks_turns(tokenizer.specials)
    if missing:
        raise DataError(
            what="This tokenizer does not support chat.",
            why=f"It has no {' and no '.join(missing)}, and its folder contains no chat template.",
            fix="Prepare the data with tokenizer.specials: standard, or provide the prompts as token ids.",
        )
    start, end = tokenizer.specials[IM_START], tokenizer.specials[IM_END]
    ids = [tokenizer.end_of_text_id]
    for message in messages:
        ids += [start, *tokenizer.encode(f"{message['role']}\n{message['content']}"), end, *tokenizer.encode("\n")]
    return (*ids, start, *tokenizer.encode("assistant\n"))


def _template_in(folder: Path) -> str:
    try:
        return read_chat_template(folder).source
    except Unreadable as exc:
        raise DataError(f"{exc.path} cannot be read.", why=str(exc), fix="Create it again: homing prep RUN") from exc


def _turns_in(folder: Path) -> Turns | None:
    path = folder / file_names.TURNS
    if not path.is_file():
        return None
    try:
        return codec.loads(Turns, path.read_bytes())
    except ValueError as exc:
        raise DataError(f"{path} cannot be read.", why=str(exc), fix="Create it again: homing prep RUN") from exc
