"""Samples new ids from a prompt, one at a time.

    read the prompt into the cache -> [ logits of the last position -> pick an id -> yield it -> read it ] ...

The cache has room for `context` positions. When it is full, the last half of the text is read again into an empty cache
and the rest is dropped. The model was trained on RoPE positions from 0 to `context`, so the window must start at 0
again. Keeping half of it limits the cost of rereading to about one position per new id. A prompt longer than the
context is cut in the same way.

`Reader` fills the cache and returns the logits of the next token:

    CPU, MPS     a cache that is read only as far as it is filled, which takes the least computation
    CUDA         a cache of fixed shape, and a CUDA graph of one step that is launched for each id (`lm.decoding_step`),
                 because launching a step's kernels one by one would take the host longer than the GPU takes to run them

On CUDA, steps without a graph give the same logits, so a seed always gives the same text, whatever its length and
whether or not capturing graphs works.

Ids are picked by `pick_token`, with a separate random generator, so a seed gives the same text on every device, as
long as the logits agree, and sampling never affects the random state of a training run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from homing.lm.decoding_step import Steps, reach_for, room_for
from homing.lm.generate.pick_token import TokenPicker, pick_tokens, refuse_bad_settings
from homing.lm.model import Decoder, KVCache
from homing.lm.model.attention import RowCache
from homing.sampling_settings import DEFAULT_SAMPLING, SamplingSettings

__all__ = ["WORTH", "Reader", "fit_window", "generate", "warn"]

warn = logging.getLogger(__name__).warning  # default value of `notify`


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    num_tokens: int,
    sampling: SamplingSettings = DEFAULT_SAMPLING,
    stop_ids: Collection[int] = (),
    notify: Callable[[str], None] = warn,
) -> Iterator[int]:
    """Yield at most `num_tokens` ids, ending before a stop id.

    `notify` is called with a warning if generation is slower than it should be.
    """
    refuse_bad_settings(sampling, model.shape.vocab_size, _problems(prompt_ids, num_tokens, model.shape.vocab_size))
    return _generate(model, list(prompt_ids), num_tokens, sampling, frozenset(stop_ids), notify)


def _generate(
    model: Decoder, ids: list[int], num_tokens: int, sampling: SamplingSettings, stop_ids: frozenset[int],
    notify: Callable[[str], None],
) -> Iterator[int]:  # fmt: skip
    context = model.shape.context
    picker = TokenPicker(sampling, ids)
    unread = window = fit_window(ids, context)
    # Close the reader even if the caller does not consume all ids.
    with closing(Reader(model, capacity=min(context, len(window) + num_tokens), notify=notify)) as reader:
        for num_to_come in range(num_tokens, 0, -1):
            if reader.length + len(unread) > context:
                unread = window = fit_window(window, context)
                reader.clear()
            # Do not keep a reference to the logits, because closing may free their memory.
            picked = pick_tokens(reader.read(unread, num_to_come=num_to_come).unsqueeze(0), [picker])[0].id
            if picked in stop_ids:
                return
            yield picked
            window.append(picked)
            unread = [picked]


def fit_window(ids: list[int], context: int) -> list[int]:
    """Return all ids if they fit in the context, else only as many of the last ids as fill half of it."""
    return ids if len(ids) <= context else ids[-max(1, context // 2) :]


def _problems(prompt_ids: Sequence[int], num_tokens: int, vocab_size: int) -> list[str]:
    problems = []
    if not prompt_ids:
        problems.append("the prompt has no tokens; use <|endoftext|> to begin a new document")
    if any(not 0 <= i < vocab_size for i in prompt_ids):
        problems.append(f"the prompt contains ids outside the vocabulary of {vocab_size} tokens")
    if num_tokens < 0:
        problems.append(f"the number of new tokens must be 0 or more, not {num_tokens}")
    return problems


# Capture a graph only if at least this many ids remain. Capturing runs a step a few times, waits for the GPU and frees
# unused memory, so for only a few ids it takes longer than it saves. Measured with
# benchmarks/gpu/decode.py (column `pays`).
WORTH = 5


class Reader:
    """Reads one text into a cache. Must be closed, because its CUDA graphs occupy memory that nothing else can use."""

    def __init__(self, model: Decoder, *, capacity: int, notify: Callable[[str], None]) -> None:
        self._model, self.length = model, 0
        self._steps: Steps[Tensor] | None = None
        self._cache: KVCache
        if is_stepped(model.device):
            # `reach` must depend only on the position and the context, so that a longer text begins as a shorter one.
            places, dtype = min(reach_for(capacity), room_for(model.shape.context)), model.compute_dtype
            self._cache = rows = RowCache(model.shape, capacity=places, device=model.device, dtype=dtype)
            self._steps = Steps(model, rows, _as_they_are, is_captured=True, notify=partial(_not_captured, notify))
        else:
            self._cache = model.new_cache(capacity=capacity)

    @torch.no_grad()
    def read(self, ids: list[int], *, num_to_come: int) -> Tensor:
        """Read ids; return the logits (V,) of the next token, in a buffer that the next call may overwrite.

        `num_to_come` is the maximum number of ids that this call and all later calls will read.
        """
        place, self.length = self.length, self.length + len(ids)
        if self._steps is None or len(ids) > 1:
            return self._model.next_logits(torch.tensor([ids], device=self._model.device), self._cache)[0]
        is_worth = min(num_to_come, reach_for(place + 1) - place) >= WORTH
        return self._steps.step(torch.tensor(ids), torch.tensor([place]), furthest=place, is_worth=is_worth)[0]

    def clear(self) -> None:
        """Empty the cache to start again, but keep captured graphs."""
        self.length = 0
        self._cache.clear()

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()


def is_stepped(device: torch.device) -> bool:
    return device.type == "cuda"


def _as_they_are(logits_BV: Tensor) -> Tensor:
    return logits_BV


def _not_captured(notify: Callable[[str], None], problem: str) -> None:
    notify(f"warning: CUDA graphs failed; generation continues without them and is slower. {problem}")
