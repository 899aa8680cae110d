"""Generates text by sampling: continuations of a prompt, and answers in a conversation.

A base model was trained on documents, each preceded by <|endoftext|>, so a prompt is the beginning of a document. After
SFT, a model has been trained on ChatML turns and ends each of its turns with <|im_end|>:

    <|endoftext|><|im_start|>user\\nHello.<|im_end|>\\n<|im_start|>assistant\\n  ->  Good day.<|im_end|>

At a checkpoint the trainer samples texts and writes them to samples/<phase>-<step>.txt. The same weights and seed give
the same text. A model trained on conversations is prompted in ChatML turns, unless its tokenizer lacks the turn markers
(`lacks_turns`), which the caller should report. Any other model continues the prompt. Sampling uses a separate random
generator and does not affect the random state of training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from homing.errors import DataError
from homing.lm.generate.sampling import generate, warn
from homing.lm.generate.text_stream import decode_stream
from homing.lm.model import Decoder, lora
from homing.lm.tokenizer import Tokenizer
from homing.lm.tokenizer.tokenizer import IM_END, IM_START, lacks_turns
from homing.sampling_settings import DEFAULT_SAMPLING, SamplingSettings
from homing.wire import file_names
from homing.wire.run_json import Sampling

__all__ = ["ChatTurns", "complete", "sample_texts", "write_samples"]

_GREETING = "Hello! Who are you?"  # default prompt for chat samples, if the run file does not set any


def complete(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_tokens: int,
    sampling: SamplingSettings = DEFAULT_SAMPLING,
    stops: Sequence[str] = (),
    notify: Callable[[str], None] = warn,
) -> Iterator[str]:
    """Yield the continuation of a document that begins with `prompt`, until the model ends the document."""
    ids = [tokenizer.end_of_text_id, *tokenizer.encode(prompt)]
    picked = generate(
        model,
        ids,
        num_tokens=num_tokens,
        sampling=sampling,
        stop_ids=tokenizer.stop_ids,
        notify=notify,
    )
    return decode_stream(tokenizer, picked, stops)


class ChatTurns:
    """A ChatML conversation as token ids, to which turns can be added."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        missing = lacks_turns(tokenizer.specials)
        if missing:
            raise DataError(
                what="This model cannot chat.",
                why=f"Its tokenizer has no {' and no '.join(missing)}.",
                fix="Use it to complete text instead: homing generate",
            )
        self.tokenizer = tokenizer
        self.start_id, self.end_id = tokenizer.specials[IM_START], tokenizer.specials[IM_END]
        self.ids = [tokenizer.end_of_text_id]

    @property
    def stop_ids(self) -> list[int]:
        return [self.end_id, self.tokenizer.end_of_text_id]

    def ask(self, text: str) -> list[int]:
        """Add the user's turn and open the model's turn; return the ids of all turns, to be passed to `generate`."""
        self.add("user", text)
        return self.open()

    def answered(self, ids: Iterable[int]) -> None:
        """Add the model's answer and close the model's turn."""
        self.ids += [*ids, self.end_id, *self.tokenizer.encode("\n")]

    def add(self, role: str, text: str) -> None:
        """Add a complete turn of any role."""
        encode = self.tokenizer.encode
        self.ids += [self.start_id, *encode(f"{role}\n{text}"), self.end_id, *encode("\n")]

    def open(self) -> list[int]:
        """Open the model's turn; return the ids of all turns."""
        self.ids += [self.start_id, *self.tokenizer.encode("assistant\n")]
        return self.ids


# -- samples at a checkpoint -------------------------------------------------------------------------------------------


def sample_texts(
    model: Decoder, tokenizer: Tokenizer, sampling: Sampling, *, seed: int, is_chat: bool = False,
    notify: Callable[[str], None] = warn,
) -> list[tuple[str, str]]:  # fmt: skip
    """Return (prompt, generated text) pairs. Without prompts, use an empty prompt, or a greeting for a chat model.

    `notify` is called with a warning if generation is slower than it should be.
    """
    is_turn = is_chat and not lacks_turns(tokenizer.specials)
    texts = []
    with lora.lengths_held(model):
        # Generate texts one at a time. Matmuls over several rows round differently, so in a batch each text would
        # depend on the others.
        for number, prompt in enumerate(sampling.prompts or [_GREETING if is_turn else ""]):
            chunks = (_answer if is_turn else _continuation)(model, tokenizer, prompt, sampling, seed + number, notify)
            texts.append((prompt, "".join(chunks)))
    return texts


def _continuation(
    model: Decoder, tokenizer: Tokenizer, prompt: str, sampling: Sampling, seed: int, notify: Callable[[str], None]
) -> Iterator[str]:
    settings = _settings(sampling, seed)
    return complete(model, tokenizer, prompt, num_tokens=sampling.num_tokens, sampling=settings, notify=notify)


def _answer(
    model: Decoder, tokenizer: Tokenizer, prompt: str, sampling: Sampling, seed: int, notify: Callable[[str], None]
) -> Iterator[str]:
    turns = ChatTurns(tokenizer)
    picked = generate(
        model, turns.ask(prompt), num_tokens=sampling.num_tokens, sampling=_settings(sampling, seed),
        stop_ids=turns.stop_ids, notify=notify,
    )  # fmt: skip
    return decode_stream(tokenizer, picked)


def _settings(sampling: Sampling, seed: int) -> SamplingSettings:
    return SamplingSettings(temperature=sampling.temperature, top_k=sampling.top_k, seed=seed)


def write_samples(run_dir: Path, phase: str, step: int, texts: list[tuple[str, str]]) -> Path:
    folder = run_dir / file_names.SAMPLES
    folder.mkdir(exist_ok=True)
    path = folder / f"{phase}-{step:08d}.txt"
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text("".join(f"[{prompt}]{text}\n\n" for prompt, text in texts), encoding="utf-8")
    os.replace(temporary, path)
    return path
