"""Chat with a trained model, without the terminal. Implements `homing chat` and `Model.chat`.

A model trained on conversations is prompted in turns, formatted by the chat template in its folder, and remembers them.
A base model only completes text, one line at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from homing.api import notices
from homing.api.models.generate_text import with_seed
from homing.api.models.open_model import OpenModel, open_model
from homing.errors import UsageError
from homing.sampling_settings import DEFAULT_SAMPLING, SamplingSettings

if TYPE_CHECKING:
    from pathlib import Path

    from homing.lm.data.chat.prompt_ids import TemplateTurns
    from homing.lm.generate import Card, ChatTurns

__all__ = ["ChatSession", "open_chat", "reported_refusals", "warn_of_format"]


class ChatSession:
    """A conversation with a loaded model; with a base model, independent completions.

    `seed` is the seed of the next answer. Every answer has its own, so repeating a question may give another answer,
    but the whole session is reproducible.
    """

    def __init__(
        self,
        model: OpenModel,
        *,
        tokens: int = 200,
        sampling: SamplingSettings = DEFAULT_SAMPLING,
        stop: Sequence[str] = (),
        seed: int | None = None,
        is_conversation: bool | None = None,
    ) -> None:
        """Start a session. `is_conversation`: whether to prompt in turns; None: the way the model was trained."""
        from homing.lm.data.chat.prompt_ids import learned_to_answer
        from homing.lm.generate import read_card

        self.model = model
        self.tokens, self.sampling, self.stop = tokens, sampling, tuple(stop)
        self.seed = with_seed(sampling, seed).seed
        if is_conversation is None:
            is_conversation = learned_to_answer(read_card(model.folder))
        self.is_conversation = is_conversation
        self._turns: ChatTurns | TemplateTurns | None = self._new_turns() if is_conversation else None

    @property
    def mode(self) -> str:
        return "chat" if self.is_conversation else "completion"

    def reply(self, line: str) -> Iterator[str]:
        """Yield the answer, or a base model's completion, piece by piece."""
        from homing.lm.generate import complete

        sampling, self.seed = with_seed(self.sampling, self.seed), self.seed + 1
        if self._turns is None:
            model, tokenizer = self.model.model, self.model.tokenizer
            return complete(model, tokenizer, line, num_tokens=self.tokens, sampling=sampling, stops=self.stop)
        return self._answer(self._turns, line, sampling)

    def _answer(self, turns: ChatTurns | TemplateTurns, line: str, sampling: SamplingSettings) -> Iterator[str]:
        from homing.lm.generate import decode_stream, generate

        said: list[int] = []

        def remember(ids: Iterator[int]) -> Iterator[int]:
            for i in ids:
                said.append(i)
                yield i

        with reported_refusals():
            prompt_ids = turns.ask(line)
        picked = generate(
            self.model.model, prompt_ids, num_tokens=self.tokens, sampling=sampling, stop_ids=turns.stop_ids
        )
        try:
            yield from decode_stream(self.model.tokenizer, remember(picked), self.stop)
        finally:
            # Even if the answer was cut short, keep what was generated, so that the next turn is well formed.
            turns.answered(said)

    def recall(self, question: str, answer: str) -> None:
        """Add an earlier question and its answer to the conversation."""
        assert self._turns is not None, "a completion remembers nothing"
        with reported_refusals():
            self._turns.ask(question)
            self._turns.answered(self.model.tokenizer.encode(answer))

    def forget(self) -> None:
        """Start a new conversation. For a base model every line is already an independent text."""
        self.seed += 1
        if self.is_conversation:
            self._turns = self._new_turns()

    def _new_turns(self) -> ChatTurns | TemplateTurns:
        from homing.lm.data.chat.chat_settings import open_renderer
        from homing.lm.data.chat.prompt_ids import TemplateTurns
        from homing.lm.data.chat.template import find_template
        from homing.lm.generate import ChatTurns

        tokenizer = self.model.tokenizer
        if find_template(self.model.folder) is None:  # `warn_of_format` warns of this
            return ChatTurns(tokenizer)
        with reported_refusals():
            renderer = open_renderer(self.model.folder)
            return TemplateTurns(renderer, tokenizer.decode, tokenizer.end_of_text_id)


def open_chat(
    run: str | Path | None = None,
    *,
    tokens: int = 200,
    sampling: SamplingSettings = DEFAULT_SAMPLING,
    stop: Sequence[str] = (),
    seed: int | None = None,
    checkpoint: str | None = None,
    phase: str | None = None,
    device: str = "auto",
    base: str = "",
) -> ChatSession:
    """Load a model and start a session with it."""
    model = open_model(run, verb="chat", checkpoint=checkpoint, phase=phase, device=device, base=base)

    from homing.lm.device import describe_device
    from homing.lm.generate import read_card

    sampling = with_seed(sampling, seed)
    notices.say(f"{model.folder} on {describe_device(model.model.device)}, {sampling.describe()}")
    session = ChatSession(model, tokens=tokens, sampling=sampling, stop=stop, seed=sampling.seed)
    if session.is_conversation:
        warn_of_format(read_card(model.folder))
    else:
        notices.say("This is a base model: it completes the text you type and was not trained to answer.")
    return session


def warn_of_format(card: Card) -> None:
    """Warn if the model has no chat template: prompts formatted differently than in training give worse answers."""
    from homing.lm.data.chat.template import find_template
    from homing.lm.generate.load_model import template_owner

    if find_template(card.folder) is None:
        notices.say(
            f"warning: {card.folder} has no chat template. Using ChatML (<|im_start|>user ...),"
            " which may differ from the format it was trained with."
            f" Copy the template file into the folder: {template_owner(card)}"
        )


@contextmanager
def reported_refusals() -> Iterator[None]:
    """Raise UsageError for a conversation that the chat template refuses."""
    from homing.lm.data.chat.messages import Fault

    try:
        yield
    except Fault as fault:
        raise UsageError(
            what="The chat template cannot render this conversation.",
            why=f"{fault.text[:1].upper()}{fault.text[1:]}.",
            fix="Start a new conversation with /new, or complete text without a template: homing generate",
        ) from fault
