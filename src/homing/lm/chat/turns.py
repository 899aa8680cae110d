"""A conversation as ids through the model's own template: what `homing chat` and `homing serve` ask with.

learned_to_answer   whether a model is talked to in turns at all
TemplateTurns       a conversation that grows
Prompter            one that is handed over whole, as servers get it

The whole is rendered anew for each turn: templates may rewrite what came before, and a conversation is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from homing.lm.chat.messages import Fault, Message
from homing.lm.chat.order import open_renderer
from homing.lm.chat.render import Renderer
from homing.lm.chat.template import find_template

if TYPE_CHECKING:
    from homing.lm.generate import Card
    from homing.lm.tokenizer import Tokenizer

__all__ = ["Prompter", "TemplateTurns", "learned_to_answer"]

_CHAT_PHASES = ("sft", "rl")


def learned_to_answer(card: Card) -> bool:
    """By the phases of the run that made it; of weights that no run of ours made, by the template beside them."""
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


class Prompter:
    """Whole conversations to prompts, each from its beginning; in ChatML where the folder has no template."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        from homing.lm.generate import ChatTurns

        self._tokenizer = tokenizer
        self._renderer = open_renderer(folder) if find_template(folder) is not None else None
        if self._renderer is None:
            self.stop_ids = ChatTurns(tokenizer).stop_ids
        else:
            self.stop_ids = TemplateTurns(self._renderer, tokenizer.decode, tokenizer.end_of_text_id).stop_ids

    def prompt(self, messages: list[Message]) -> list[int]:
        """All turns, and the model's opened. What the template refuses is a Fault."""
        from homing.lm.generate import ChatTurns

        if self._renderer is not None:
            return self._renderer.prompt(messages)
        turns = ChatTurns(self._tokenizer)
        for message in messages:
            turns.add(message["role"], message["content"])
        return turns.open()
