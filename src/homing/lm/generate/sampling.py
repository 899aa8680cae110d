"""Sampling: prompt ids in, new ids out, one at a time.

    read the prompt into the cache -> [ logits of the last position -> pick an id -> yield it -> read it ] ...

The cache holds `context` positions. When it is full, the last half of the text is read again into an empty cache and
the rest is dropped: RoPE positions are trained from 0 to context, so the window must start at 0 again, and keeping half
of it limits the cost of rereading to about one position per new id. A prompt longer than the context is cut in the same
way.

Ids are picked on the CPU with a separate generator, so a seed gives the same text on every device, as far as the logits
agree, and sampling never disturbs the random state of a training run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing

import torch
from torch import Tensor

from homing.errors import UsageError
from homing.lm.generate.kv_reader import Reader
from homing.lm.model import Decoder

__all__ = ["fit_window", "generate", "pick", "warn"]

warn = logging.getLogger(__name__).warning  # default receiver of warnings


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
    """Yield at most `num_tokens` ids; a stop id ends it and is not yielded. Temperature 0 takes the likeliest id.

    `tell` is called with a warning if generation is slower than it should be.
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
    # Close it even if the caller does not consume all ids.
    with closing(Reader(model, capacity=min(context, len(window) + num_tokens), notify=notify)) as reader:
        for num_to_come in range(num_tokens, 0, -1):
            if reader.length + len(unread) > context:
                unread = window = fit_window(window, context)
                reader.clear()
            # Do not keep a reference to the logits: they may be in memory that closing frees.
            picked = pick(
                reader.read(unread, num_to_come=num_to_come), temperature=temperature, top_k=top_k, generator=generator
            )
            if picked in stop_ids:
                return
            yield picked
            window.append(picked)
            unread = [picked]


def fit_window(ids: list[int], context: int) -> list[int]:
    """Return all ids if they fit, else the last half context of them."""
    return ids if len(ids) <= context else ids[-max(1, context // 2) :]


def pick(logits_V: Tensor, *, temperature: float, top_k: int, generator: torch.Generator) -> int:
    logits_V = logits_V.float().cpu()
    if temperature == 0:
        return int(logits_V.argmax())
    if 0 < top_k < logits_V.numel():
        # By index, not by value: equal logits at the threshold would admit more than top_k.
        best = logits_V.topk(top_k)
        weights = torch.softmax(best.values / temperature, dim=0)
        return int(best.indices[torch.multinomial(weights, 1, generator=generator)])
    return int(torch.multinomial(torch.softmax(logits_V / temperature, dim=0), 1, generator=generator))


def _check(prompt_ids: Sequence[int], num_tokens: int, temperature: float, top_k: int, vocab_size: int) -> None:
    problems = []
    if not prompt_ids:
        problems.append("the prompt has no tokens; begin with <|endoftext|> to start a document")
    if any(not 0 <= i < vocab_size for i in prompt_ids):
        problems.append(f"the prompt has ids outside the vocabulary of {vocab_size}")
    if num_tokens < 0:
        problems.append(f"the number of tokens is {num_tokens}; it must be 0 or more")
    if not 0 <= temperature < float("inf"):
        problems.append(f"the temperature is {temperature}; it must be 0 or more")
    if top_k < 0:
        problems.append(f"top-k is {top_k}; it must be 0 (off) or more")
    if problems:
        raise UsageError(
            what="Invalid sampling settings.",
            why="\n".join(problems),
            fix="See the valid values: homing generate --help",
        )
