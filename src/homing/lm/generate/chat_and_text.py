"""Text generation on top of the sampler: completion of a prompt, and turns of a conversation.

A base model was trained on documents, each preceded by <|endoftext|>; a prompt is the beginning of one. A model after
SFT was trained on ChatML turns and ends its own with <|im_end|>:

    <|endoftext|><|im_start|>user\\nHello.<|im_end|>\\n<|im_start|>assistant\\n  ->  Good day.<|im_end|>
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from homing.errors import DataError
from homing.lm.generate.sampling import generate, warn
from homing.lm.model import Decoder
from homing.lm.tokenizer import Tokenizer
from homing.lm.tokenizer.specials import IM_END, IM_START, lacks_turns

__all__ = ["ChatTurns", "complete", "decode_stream"]

_HALF = "\ufffd"  # what an incomplete character, or any invalid bytes, decode to
_MOST_BEFORE = 3  # tokens that may hold an incomplete character: it has at most four bytes, one of them still to come


def complete(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    notify: Callable[[str], None] = warn,
) -> Iterator[str]:
    """Yield the continuation of `prompt` as the beginning of a document, until the model ends the document."""
    ids = [tokenizer.end_of_text_id, *tokenizer.encode(prompt)]
    picked = generate(
        model,
        ids,
        num_tokens=num_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stop_ids=tokenizer.stop_ids,
        notify=notify,
    )
    return decode_stream(tokenizer, picked)


def decode_stream(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Yield text as soon as it is complete: a character may span several tokens, and half of one is not shown.

    A token may end one character and begin the next, so complete text is shown and only the tokens of the rest are
    kept.
    """
    held: list[int] = []
    num_shown = 0  # characters already shown of `held`
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
    """A ChatML conversation as token ids, grown turn by turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        missing = lacks_turns(tokenizer.specials)
        if missing:
            raise DataError(
                what="This model cannot chat.",
                why=f"Its tokenizer has no {' and no '.join(missing)}.",
                fix="Complete text with it instead: homing generate",
            )
        self.tokenizer = tokenizer
        self.start_id, self.end_id = tokenizer.specials[IM_START], tokenizer.specials[IM_END]
        self.ids = [tokenizer.end_of_text_id]

    @property
    def stop_ids(self) -> list[int]:
        return [self.end_id, self.tokenizer.end_of_text_id]

    def ask(self, text: str) -> list[int]:
        """Add the user's turn and open the model's; return all ids so far as the prompt for `generate`."""
        self.add("user", text)
        return self.open()

    def answered(self, ids: Iterable[int]) -> None:
        """Close the model's turn with its answer."""
        self.ids += [*ids, self.end_id, *self.tokenizer.encode("\n")]

    def add(self, role: str, text: str) -> None:
        """Add a complete turn of any role."""
        encode = self.tokenizer.encode
        self.ids += [self.start_id, *encode(f"{role}\n{text}"), self.end_id, *encode("\n")]

    def open(self) -> list[int]:
        """Open the model's turn; return all ids so far."""
        self.ids += [self.start_id, *self.tokenizer.encode("assistant\n")]
        return self.ids
