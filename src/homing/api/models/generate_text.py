"""Complete a prompt with a trained model. Implements `homing generate` and `Model.generate`."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from homing.api import notices
from homing.api.models.open_model import OpenModel, open_model
from homing.errors import UsageError
from homing.sampling_settings import DEFAULT_SAMPLING, SamplingSettings

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Continuation", "continue_text", "generate", "with_seed"]


class Continuation:
    """The continuation of a prompt. Iterate to generate it piece by piece; `text` is the part generated so far."""

    def __init__(
        self, model: OpenModel, prompt: str, *, tokens: int, sampling: SamplingSettings, stop: Sequence[str] = ()
    ) -> None:
        from homing.lm.device import describe_device

        self.model, self.prompt, self.max_tokens = model, prompt, tokens
        self.sampling, self.stop = sampling, tuple(stop)
        self.device = describe_device(model.model.device)
        self.text, self.num_tokens, self.seconds = "", 0, 0.0
        self.ending = ""  # "model", "stop" (at a string of `stop`) or "tokens" once the text is complete

    @property
    def is_ended(self) -> bool:
        """Whether the text ended by itself: by the model or at a stop string, not by the maximum number of tokens."""
        return self.ending in ("model", "stop")

    def __iter__(self) -> Iterator[str]:
        from homing.lm.generate import generate
        from homing.lm.generate.text_stream import TextStream

        tokenizer, started = self.model.tokenizer, time.perf_counter()
        stream = TextStream(tokenizer, self.stop)
        ids = generate(
            self.model.model,
            [tokenizer.end_of_text_id, *tokenizer.encode(self.prompt)],
            stop_ids=tokenizer.stop_ids,
            num_tokens=self.max_tokens,
            sampling=self.sampling,
        )
        for i in ids:
            self.num_tokens += 1
            yield from self._shown(stream.add(i))
            if stream.is_stopped:
                break
        yield from self._shown(stream.end())
        # A stop string may be complete only at the last token, so the number of tokens alone does not tell.
        self.ending = "stop" if stream.is_stopped else "model" if self.num_tokens < self.max_tokens else "tokens"
        self.seconds = time.perf_counter() - started

    def _shown(self, piece: str) -> Iterator[str]:
        self.text += piece
        if piece:
            yield piece

    def to_dict(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.model.folder),
            "device": self.device,
            "prompt": self.prompt,
            "text": self.text,
            "num_tokens": self.num_tokens,
            "is_ended": self.is_ended,
            "stop": list(self.stop),
            **sampling_document(self.sampling),
        }


def generate(
    run: str | Path | None = None,
    *,
    prompt: str = "",
    tokens: int = 200,
    sampling: SamplingSettings = DEFAULT_SAMPLING,
    stop: Sequence[str] = (),
    seed: int | None = None,
    checkpoint: str | None = None,
    phase: str | None = None,
    device: str = "auto",
    base: str = "",
) -> Continuation:
    """Load a model and return the continuation of the prompt, which is generated while the caller iterates over it.

    The text ends just before the first occurrence of any of the strings in `stop`. `seed` replaces the seed of
    `sampling`; None picks one.
    """
    _check_prompt(prompt)
    model = open_model(run, verb="generate", checkpoint=checkpoint, phase=phase, device=device, base=base)

    from homing.lm.device import describe_device

    sampling = with_seed(sampling, seed)
    notices.say(f"{model.folder} on {describe_device(model.model.device)}, {sampling.describe()}")
    return continue_text(model, prompt, tokens=tokens, sampling=sampling, stop=stop)


def continue_text(
    model: OpenModel, prompt: str, *, tokens: int, sampling: SamplingSettings, stop: Sequence[str] = ()
) -> Continuation:
    """Return a loaded model's continuation of the prompt."""
    _check_prompt(prompt)
    num_tokens, context = 1 + len(model.tokenizer.encode(prompt)), model.model.shape.context
    if num_tokens > context:
        read = context // 2
        notices.say(f"The prompt has {num_tokens:,} tokens; only the last {read:,} fit in the model's context.")
    return Continuation(model, prompt, tokens=tokens, sampling=sampling, stop=stop)


def with_seed(sampling: SamplingSettings, seed: int | None) -> SamplingSettings:
    """Return the settings with this seed, or with a random one."""
    return dataclasses.replace(sampling, seed=secrets.randbelow(2**31) if seed is None else seed)


def sampling_document(sampling: SamplingSettings) -> dict[str, Any]:
    """Return the settings for a JSON document."""
    return {**dataclasses.asdict(sampling), "logit_bias": {str(i): bias for i, bias in sampling.logit_bias.items()}}


def _check_prompt(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError as exc:  # raw bytes from the shell
        raise UsageError(
            what="The prompt is not UTF-8.", why=str(exc), fix="iconv -t utf-8 FILE | homing generate -p -"
        ) from exc
