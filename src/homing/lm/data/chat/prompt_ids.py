"""Builds prompts from conversations with the model's own template, for `homing chat` and `homing serve`.

learned_to_answer   whether the model was trained on chat
TemplateTurns       a conversation that grows turn by turn
Prompter            a complete conversation, as a server receives it

The whole conversation is rendered again for each turn, because templates may rewrite earlier turns. Conversations are
short, so this takes little time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homing.lm.data.chat.chat_settings import open_renderer
from homing.lm.data.chat.messages import Fault, Message
from homing.lm.data.chat.render import Renderer
from homing.lm.data.chat.template import find_template

if TYPE_CHECKING:
    from homing.lm.generate import Card
    from homing.lm.tokenizer import Tokenizer

__all__ = ["Prompter", "TemplateTurns", "learned_to_answer"]

_CHAT_PHASES = ("sft", "rl")


def learned_to_answer(card: Card) -> bool:
    """Return whether the model was trained on chat.

    This is decided by the run's phases or, for third-party weights, by the presence of a chat template.
    """
    if not card.phase:
        return find_template(card.folder) is not None
    of_chat = [phase.kind for phase in card.run.phases if phase.data and phase.data.kind == "chat"] if card.run else []
    return card.phase in _CHAT_PHASES or card.phase in of_chat


class TemplateTurns:
    def __init__(self, renderer: Renderer, decode: Callable[[Iterable[int]], str], end_of_text_id: int | None) -> None:
        self._renderer, self._decode = renderer, decode
        self.messages: list[Message] = []
        self.stop_ids = [i for i in (renderer.end_id(), end_of_text_id) if i is not None]

    def ask(self, text: str) -> list[int]:
        """Add a user turn; return the ids of the whole prompt, up to where the model answers, to pass to `generate`."""
        self.messages.append({"role": "user", "content": text})
        try:
            return self._renderer.prompt(self.messages)
        except Fault:
            self.messages.pop()  # undo, because the template rejected the message
            raise

    def answered(self, ids: Iterable[int]) -> None:
        """Add the model's answer and close the model's turn."""
        self.messages.append({"role": "assistant", "content": self._decode(ids)})


class Prompter:
    """Converts complete conversations to prompts, using ChatML if the folder has no template."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        from homing.lm.generate import ChatTurns

        self._tokenizer = tokenizer
        self._renderer = open_renderer(folder) if find_template(folder) is not None else None
        if self._renderer is None:
            self.stop_ids = ChatTurns(tokenizer).stop_ids
        else:
            self.stop_ids = TemplateTurns(self._renderer, tokenizer.decode, tokenizer.end_of_text_id).stop_ids

    @property
    def knows_tools(self) -> bool:
        """Whether the template can show tools to the model."""
        return self._renderer is not None and "tools" in self._renderer.template.source

    def prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Return the ids of the prompt, up to where the model answers; raises Fault if the template rejects it."""
        from homing.lm.generate import ChatTurns

        if self._renderer is not None:
            return self._renderer.prompt(messages, tools)
        turns = ChatTurns(self._tokenizer)
        for message in messages:
            turns.add(message["role"], message["content"])
        return turns.open()
