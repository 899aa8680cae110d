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

Ids are picked on the CPU with a separate random generator, so a seed gives the same text on every device, as long as
the logits agree, and sampling never affects the random state of a training run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from homing.errors import UsageError
from homing.lm.decoding_step import REACH, Steps, room_for
from homing.lm.model import Decoder, KVCache
from homing.lm.model.attention import RowCache

__all__ = ["WORTH", "Reader", "fit_window", "generate", "pick", "warn"]

warn = logging.getLogger(__name__).warning  # default value of `notify`


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    notify: Callable[[str], None] = warn,
) -> Iterator[int]:
    """Yield at most `num_tokens` ids, ending before a stop id. Temperature 0 picks the most likely id.

    `notify` is called with a warning if generation is slower than it should be.
    """
    _check(prompt_ids, num_tokens, temperature, top_k, model.shape.vocab_size)
    return _generate(model, list(prompt_ids), num_tokens, temperature, top_k, seed, frozenset(stop_ids), notify)


def _generate(
    model: Decoder, ids: list[int], num_tokens: int, temperature: float, top_k: int, seed: int,
    stop_ids: frozenset[int], notify: Callable[[str], None],
) -> Iterator[int]:  # fmt: skip
    context = model.shape.context
    generator = torch.Generator("cpu").manual_seed(seed)
    unread = window = fit_window(ids, context)
    # Close the reader even if the caller does not consume all ids.
    with closing(Reader(model, capacity=min(context, len(window) + num_tokens), notify=notify)) as reader:
        for num_to_come in range(num_tokens, 0, -1):
            if reader.length + len(unread) > context:
                unread = window = fit_window(window, context)
                reader.clear()
            # Do not keep a reference to the logits, because closing may free their memory.
            picked = pick(
                reader.read(unread, num_to_come=num_to_come), temperature=temperature, top_k=top_k, generator=generator
            )
            if picked in stop_ids:
                return
            yield picked
            window.append(picked)
            unread = [picked]


def fit_window(ids: list[int], context: int) -> list[int]:
    """Return all ids if they fit in the context, else only as many of the last ids as fill half of it."""
    return ids if len(ids) <= context else ids[-max(1, context // 2) :]


def pick(logits_V: Tensor, *, temperature: float, top_k: int, generator: torch.Generator) -> int:
    logits_V = logits_V.float().cpu()
    if temperature == 0:
        return int(logits_V.argmax())
    if 0 < top_k < logits_V.numel():
        # Select by index, not by comparing values, because with equal logits a threshold could select more than top_k.
        best = logits_V.topk(top_k)
        weights = torch.softmax(best.values / temperature, dim=0)
        return int(best.indices[torch.multinomial(weights, 1, generator=generator)])
    return int(torch.multinomial(torch.softmax(logits_V / temperature, dim=0), 1, generator=generator))


def _check(prompt_ids: Sequence[int], num_tokens: int, temperature: float, top_k: int, vocab_size: int) -> None:
    problems = []
    if not prompt_ids:
        problems.append("the prompt has no tokens; use <|endoftext|> to begin a new document")
    if any(not 0 <= i < vocab_size for i in prompt_ids):
        problems.append(f"the prompt contains ids outside the vocabulary of {vocab_size} tokens")
    if num_tokens < 0:
        problems.append(f"the number of tokens is {num_tokens}; it must be 0 or more")
    if not 0 <= temperature < float("inf"):
        problems.append(f"the temperature is {temperature}; it must be 0 or more")
    if top_k < 0:
        problems.append(f"top-k is {top_k}; it must be 0 (no limit) or more")
    if problems:
        raise UsageError(
            what="Invalid sampling settings.",
            why="\n".join(problems),
            fix="See the valid values: homing generate --help",
        )


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
            places, dtype = room_for(capacity), model.compute_dtype
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
        is_worth = min(num_to_come, REACH - place % REACH) >= WORTH
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
