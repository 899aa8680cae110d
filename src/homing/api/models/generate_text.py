"""Complete a prompt with a trained model. Implements `homing generate` and `Model.generate`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from homing.api import notices
from homing.api.models.open_model import OpenModel, open_model
from homing.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Continuation", "continue_text", "generate"]


class Continuation:
    """The continuation of a prompt. Iterate to generate it piece by piece; `text` is the part generated so far."""

    def __init__(
        self, model: OpenModel, prompt: str, *, tokens: int, temperature: float, top_k: int, seed: int | None
    ) -> None:
        from homing.lm.device import describe_device

        self.model, self.prompt, self.max_tokens = model, prompt, tokens
        self.temperature, self.top_k = temperature, top_k
        self.seed = secrets.randbelow(2**31) if seed is None else seed
        self.device = describe_device(model.model.device)
        self.text, self.num_tokens, self.seconds = "", 0, 0.0

    @property
    def is_ended(self) -> bool:
        """Whether the model ended the text itself, before the maximum number of tokens."""
        return self.num_tokens < self.max_tokens

    def __iter__(self) -> Iterator[str]:
        from homing.lm.generate import decode_stream, generate

        tokenizer, started = self.model.tokenizer, time.perf_counter()
        ids = generate(
            self.model.model,
            [tokenizer.end_of_text_id, *tokenizer.encode(self.prompt)],
            stop_ids=tokenizer.stop_ids,
            num_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            seed=self.seed,
        )
        for piece in decode_stream(tokenizer, self._counted(ids)):
            self.text += piece
            yield piece
        self.seconds = time.perf_counter() - started

    def _counted(self, ids: Iterator[int]) -> Iterator[int]:
        for i in ids:
            self.num_tokens += 1
            yield i

    def to_dict(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.model.folder),
            "device": self.device,
            "prompt": self.prompt,
            "text": self.text,
            "num_tokens": self.num_tokens,
            "is_ended": self.is_ended,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "seed": self.seed,
        }


def generate(
    run: str | Path | None = None,
    *,
    prompt: str = "",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int | None = None,
    checkpoint: str | None = None,
    phase: str | None = None,
    device: str = "auto",
    base: str = "",
) -> Continuation:
    """Load a model and return the continuation of the prompt, which is generated while the caller iterates over it."""
    _check_prompt(prompt)
    model = open_model(run, verb="generate", checkpoint=checkpoint, phase=phase, device=device, base=base)

    from homing.lm.device import describe_device

    seed = secrets.randbelow(2**31) if seed is None else seed
    where = describe_device(model.model.device)
    notices.say(f"{model.folder} on {where}, temperature {temperature:g}, top-k {top_k}, seed {seed}")
    return continue_text(model, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)


def continue_text(
    model: OpenModel, prompt: str, *, tokens: int, temperature: float, top_k: int, seed: int | None
) -> Continuation:
    """Return a loaded model's continuation of the prompt."""
    _check_prompt(prompt)
    num_tokens, context = 1 + len(model.tokenizer.encode(prompt)), model.model.shape.context
    if num_tokens > context:
        read = context // 2
        notices.say(f"The prompt has {num_tokens:,} tokens; only the last {read:,} fit in the model's context.")
    return Continuation(model, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)


def _check_prompt(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError as exc:  # raw bytes from the shell
        raise UsageError(
            what="The prompt is not UTF-8.", why=str(exc), fix="iconv -t utf-8 FILE | homing generate -p -"
        ) from exc
