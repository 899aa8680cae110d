"""Text around the sampler: completion of a prompt, and turns of a conversation.

A base model has read documents, each with <|endoftext|> before it; a prompt is the beginning of one. A model that went
through SFT has read ChatML turns and ends its own with <|im_end|>:

    <|endoftext|><|im_start|>user\\nHello.<|im_end|>\\n<|im_start|>assistant\\n  ->  Good day.<|im_end|>
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from homing.errors import DataError
from homing.lm.generate.sample import generate, warn
from homing.lm.model import Decoder
from homing.lm.tokenizer import Tokenizer
from homing.lm.tokenizer.specials import IM_END, IM_START, lacks_turns

__all__ = ["ChatTurns", "complete", "text_pieces"]

_HALF = "\ufffd"  # what the beginning of a character, and whatever else is none, is decoded to
_MOST_BEFORE = 3  # tokens that hold the beginning of a character: it has four bytes at most, and one is to come


def complete(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    tell: Callable[[str], None] = warn,
) -> Iterator[str]:
    """The continuation of `prompt` as the start of a document, in pieces, ending where the model ends the document."""
    ids = [tokenizer.end_of_text_id, *tokenizer.encode(prompt)]
    picked = generate(
        model,
        ids,
        num_tokens=num_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stop_ids=tokenizer.stop_ids,
        tell=tell,
    )
    return text_pieces(tokenizer, picked)


def text_pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Text as soon as it is whole: a character may be spread over several tokens, and half of one is not shown. A token
    may end one and begin the next, so what is whole is shown, and only the tokens are kept that the rest lies in."""
    held: list[int] = []
    num_shown = 0  # characters of theirs
    for i in ids:
        held.append(i)
        text = tokenizer.decode(held)
        is_whole = not text.endswith(_HALF)
        end = len(text) if is_whole else len(text) - 1
        if end > num_shown:
            yield text[num_shown:end]
        held = [] if is_whole else held[-_MOST_BEFORE:]
        num_shown = 0 if is_whole else len(tokenizer.decode(held)) - 1
    if held:
        yield tokenizer.decode(held)[num_shown:]


class ChatTurns:
    """A conversation as token ids, grown turn by turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        missing = lacks_turns(tokenizer.specials)
        if missing:
            raise DataError(
                what="This model cannot be talked to in turns.",
                why=f"Its tokenizer has no {' and no '.join(missing)}.",
                fix="homing generate completes text with it.",
            )
        self.tokenizer = tokenizer
        self.start_id, self.end_id = tokenizer.specials[IM_START], tokenizer.specials[IM_END]
        self.ids = [tokenizer.end_of_text_id]

    @property
    def stop_ids(self) -> list[int]:
        return [self.end_id, self.tokenizer.end_of_text_id]

    def ask(self, text: str) -> list[int]:
        """Adds the person's turn and opens the model's; returns all ids so far: the prompt for `generate`."""
        self.add("user", text)
        return self.open()

    def answered(self, ids: Iterable[int]) -> None:
        """Closes the model's turn with what it said."""
        self.ids += [*ids, self.end_id, *self.tokenizer.encode("\n")]

    def add(self, role: str, text: str) -> None:
        """A whole turn of anybody."""
        encode = self.tokenizer.encode
        self.ids += [self.start_id, *encode(f"{role}\n{text}"), self.end_id, *encode("\n")]

    def open(self) -> list[int]:
        """Opens the model's turn; returns all ids so far."""
        self.ids += [self.start_id, *self.tokenizer.encode("assistant\n")]
        return self.ids
