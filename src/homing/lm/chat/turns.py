"""A conversation that grows, as ids through the model's own template: what `homing chat` asks with.

The whole is rendered anew for each turn: templates may rewrite what came before, and a conversation is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from homing.lm.chat.messages import Fault, Message
from homing.lm.chat.render import Renderer

__all__ = ["TemplateTurns"]


class TemplateTurns:
    def __init__(self, renderer: Renderer, decode: Callable[[Iterable[int]], str], end_of_text_id: int | None) -> None:
        self._renderer, self._decode = renderer, decode
        self.messages: list[Message] = []
        self.stop_ids = [i for i in (renderer.end_id(), end_of_text_id) if i is not None]

    def ask(self, text: str) -> list[int]:
        """Adds the person's turn and opens the model's; returns all ids so far: the prompt for `generate`."""
        self.messages.append({"role": "user", "content": text})
        try:
            return self._renderer.prompt(self.messages)
        except Fault:
            self.messages.pop()  # what the template refuses was never said
            raise

    def answered(self, ids: Iterable[int]) -> None:
        """Closes the model's turn with what it said."""
        self.messages.append({"role": "assistant", "content": self._decode(ids)})
