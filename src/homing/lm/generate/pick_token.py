"""Picks the next token of each text from its logits: the one sampler of generate, chat, serve and training samples.

    logits -> + logit bias -> penalties -> allowed tokens only -> / temperature -> top-k -> top-p -> min-p -> one token

The order of the filters is that of transformers. Many texts are picked at once, each with settings and a random stream
of its own, so the tokens of a text do not depend on the texts next to it.

Log-probabilities are those of the model itself, before all of these steps.

Random draws are integers, and probabilities are converted to integers before they are added up. Integer sums do not
depend on the order of addition, so a seed picks the same tokens on every device, as long as the logits agree.

Shapes: B texts, V vocabulary, C candidates, N seen tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from homing.errors import UsageError
from homing.sampling_settings import COLDEST, SamplingSettings, check_settings

__all__ = [
    "BITS",
    "Constraint",
    "Picked",
    "TokenPicker",
    "draw_candidates",
    "logprobs_of",
    "on_device",
    "pick_tokens",
    "refuse_bad_settings",
]

# How often a text uses a token is counted in a tensor on the device. Sending all counts with each token would make the
# host wait for the GPU several times per text and step.

BITS = 31  # size of a draw; the product of two 31-bit integers fits in 64 bits


def refuse_bad_settings(settings: SamplingSettings, vocab_size: int, problems: Sequence[str] = ()) -> None:
    """Raise UsageError if a setting is invalid, or if there are other `problems`."""
    if found := [*problems, *check_settings(settings, vocab_size)]:
        raise UsageError(
            what="Invalid sampling settings.",
            why="\n".join(found),
            fix="See the valid values: homing generate --help",
        )


@dataclass(frozen=True)
class Picked:
    """A picked token. Log-probabilities are given if they were requested."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their log-probabilities, likeliest first


class Constraint(Protocol):
    """Decides which tokens may come next, such as those that continue valid JSON."""

    def mask(self) -> Tensor:
        """Return which tokens (V,) may come next; at least one."""

    def saw(self, token_id: int) -> None: ...


class TokenPicker:
    """The sampler's state for one text: its settings, its random stream and the tokens seen so far."""

    def __init__(
        self, settings: SamplingSettings, prompt_ids: Sequence[int] = (), *, num_logprobs: int | None = None,
        constraint: Constraint | None = None,
    ) -> None:  # fmt: skip
        """`num_logprobs`: number of alternatives to report with each token; None: no log-probabilities at all."""
        self.settings, self.num_logprobs, self._constraint = settings, num_logprobs, constraint
        self._random = np.random.Philox(key=settings.seed % 2**64)
        self._uncounted: list[int] = []  # tokens that are not in `_counts_V` yet
        self._counts_V: Tensor | None = None
        has_penalty = settings.presence_penalty != 0 or settings.frequency_penalty != 0
        self._repeated = set(prompt_ids) if settings.repetition_penalty != 1 else set()
        self._is_counting = has_penalty or settings.repetition_penalty != 1
        self._mask_V: Tensor | None = None  # which tokens may come next; computed once per token
        self._coming: Future[Tensor] | None = None  # the mask, while a thread computes it
        self._bias: tuple[Tensor, Tensor] | None = None
        self._repeated_V: Tensor | None = None
        self.alters_logits = self._is_counting or bool(settings.logit_bias) or constraint is not None

    def _counts_on(self, logits_V: Tensor) -> Tensor:
        """Return how often each token (V,) is in the text, on the device of the logits."""
        if self._counts_V is None:
            self._counts_V = torch.zeros_like(logits_V)
        for i in self._uncounted:
            self._counts_V[i] += 1  # an index that is known to the host starts a kernel and waits for nothing
        self._uncounted.clear()
        return self._counts_V

    def draw(self) -> int:
        return int(self._random.random_raw() >> (64 - BITS))

    def saw(self, token_id: int) -> None:
        if self._is_counting:
            self._uncounted.append(token_id)
        if self._constraint is not None:
            self._constraint.saw(token_id)
            self._mask_V = self._coming = None

    def begin_mask(self, pool: Callable[[], Executor]) -> None:
        """Let a thread compute which tokens may come next, if there is a constraint."""
        if self._constraint is not None and self._mask_V is None and self._coming is None:
            self._coming = pool().submit(self._constraint.mask)

    @property
    def coming(self) -> Future[Tensor] | None:
        return self._coming

    def is_prepared(self, timeout_s: float = 0.0) -> bool:
        """Whether the next token can be picked, at the latest after the timeout. Raises what the constraint raises."""
        if self._constraint is None or self._mask_V is not None:
            return True
        if self._coming is None:
            self.prepare()
        elif wait([self._coming], timeout=timeout_s).done:
            self._mask_V, self._coming = self._coming.result(), None
        return self._mask_V is not None

    def prepare(self) -> None:
        """Compute which tokens may come next, if there is a constraint. Raises what the constraint raises."""
        if self._constraint is not None and self._mask_V is None:
            self._mask_V = self._constraint.mask() if self._coming is None else self._coming.result()

    def altered(self, logits_V: Tensor) -> Tensor:
        """Return the logits with bias and penalties, and without the tokens that are not allowed."""
        settings, device = self.settings, logits_V.device
        logits_V = logits_V.clone()
        if settings.logit_bias:
            if self._bias is None:
                biases = on_device(list(settings.logit_bias.values()), torch.float32, device)
                self._bias = on_device(list(settings.logit_bias), torch.int64, device), biases
            logits_V[self._bias[0]] += self._bias[1]
        counts_V = self._counts_on(logits_V) if self._is_counting else None
        if settings.repetition_penalty != 1 and counts_V is not None:
            if self._repeated_V is None:
                self._repeated_V = torch.zeros(len(logits_V), dtype=torch.bool, device=device)
                self._repeated_V[on_device(sorted(self._repeated), torch.int64, device)] = True
            penalty = settings.repetition_penalty
            penalized_V = torch.where(logits_V < 0, logits_V * penalty, logits_V / penalty)
            logits_V = torch.where(self._repeated_V | (counts_V > 0), penalized_V, logits_V)
        if counts_V is not None and (settings.presence_penalty or settings.frequency_penalty):
            logits_V -= settings.presence_penalty * (counts_V > 0) + settings.frequency_penalty * counts_V
        self.prepare()
        if self._mask_V is not None:
            logits_V.masked_fill_(~to_device(self._mask_V, device), -math.inf)
        return logits_V


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values as a tensor on the device, without waiting for the device."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device. From pinned memory, a GPU copies it after its current work, and nobody waits.

    torch keeps the pinned memory until the copy is done, also if the tensor is deleted before.
    """
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


@torch.no_grad()
def pick_tokens(logits_BV: Tensor, pickers: Sequence[TokenPicker]) -> list[Picked]:
    """Pick one token per row, each with its own picker."""
    plain_BV = logits_BV = logits_BV.float()
    if any(picker.alters_logits for picker in pickers):
        pairs = zip(logits_BV.unbind(), pickers, strict=True)
        logits_BV = torch.stack([picker.altered(row) if picker.alters_logits else row for row, picker in pairs])
    ids_B = logits_BV.argmax(dim=-1)
    for rows, is_sorted in _groups(pickers, logits_BV.shape[1]):
        index = on_device(rows, torch.int64, logits_BV.device)
        chosen = [pickers[row] for row in rows]
        every = len(rows) == len(pickers)
        ids_B[index] = _sample(logits_BV if every else logits_BV[index], chosen, is_sorted=is_sorted)
    ids = ids_B.tolist()
    for i, picker in zip(ids, pickers, strict=True):
        picker.saw(i)
    return _with_logprobs(ids, plain_BV, pickers)


def _groups(pickers: Sequence[TokenPicker], vocab_size: int) -> list[tuple[list[int], bool]]:
    """Return the rows that are sampled, and whether their candidates must be sorted, which takes longer.

    Rows at temperature 0 are in none of the groups.
    """
    kept: dict[tuple[bool, bool], list[int]] = {}
    for row, picker in enumerate(pickers):
        settings = picker.settings
        if settings.temperature < COLDEST:
            continue
        is_limited = 0 < settings.top_k < vocab_size
        is_sorted = is_limited or settings.top_p < 1 or settings.min_p > 0
        kept.setdefault((is_sorted, is_limited), []).append(row)
    return [(rows, is_sorted) for (is_sorted, _), rows in kept.items()]


def _sample(logits_BV: Tensor, pickers: Sequence[TokenPicker], *, is_sorted: bool) -> Tensor:
    device, vocab_size = logits_BV.device, logits_BV.shape[1]

    def per_row(values: list[float]) -> Tensor:
        return on_device(values, torch.float32, device).unsqueeze(1)

    settings = [picker.settings for picker in pickers]
    draws_B1 = on_device([picker.draw() for picker in pickers], torch.int64, device).unsqueeze(1)
    temperature_B1 = per_row([each.temperature for each in settings])
    if not is_sorted:
        return draw_candidates(torch.softmax(logits_BV / temperature_B1, dim=-1), draws_B1).squeeze(1)
    limits = [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in settings]
    # Select by rank, not by comparing values, because with equal logits a threshold could keep more than top_k tokens.
    values_BC, ids_BC = logits_BV.topk(max(limits), dim=-1)
    ranks_C = torch.arange(values_BC.shape[1], device=device)
    scaled_BC = values_BC / temperature_B1
    scaled_BC = scaled_BC.masked_fill(ranks_C >= on_device(limits, torch.int64, device).unsqueeze(1), -math.inf)
    probs_BC = torch.softmax(scaled_BC, dim=-1)
    if any(each.top_p < 1 for each in settings):
        shares_BC = (probs_BC * 2.0**BITS).to(torch.int64)
        sums_BC = shares_BC.cumsum(dim=-1)
        before_BC = sums_BC - shares_BC  # probability of all likelier tokens; 0 for the likeliest one
        # A top-p of 1 keeps everything. Others keep the tokens whose likelier ones have less than top-p together.
        most = [math.ceil(each.top_p * 2**BITS) if each.top_p < 1 else 2**BITS + 1 for each in settings]
        most_B1 = (on_device(most, torch.int64, device).unsqueeze(1) * sums_BC[:, -1:]) >> BITS
        is_out_BC = before_BC >= most_B1.clamp(min=1)
        probs_BC = probs_BC.masked_fill(is_out_BC, 0.0)
    if any(each.min_p > 0 for each in settings):
        least_B1 = per_row([each.min_p for each in settings]) * probs_BC[:, :1]
        probs_BC = probs_BC.masked_fill(probs_BC < least_B1, 0.0)
    return ids_BC.gather(1, draw_candidates(probs_BC, draws_B1)).squeeze(1)


def draw_candidates(probs_BC: Tensor, draws_B1: Tensor) -> Tensor:
    """Return the position of the drawn candidate in each row; the probabilities need not add up to 1."""
    sums_BC = (probs_BC * 2.0**BITS).to(torch.int64).cumsum(dim=-1)
    at_B1 = (draws_B1 * sums_BC[:, -1:]) >> BITS  # less than the total
    # The clamp is for NaN logits, which would otherwise give an index past the end.
    return torch.searchsorted(sums_BC, at_B1, right=True).clamp(max=sums_BC.shape[1] - 1)


def _with_logprobs(ids: list[int], logits_BV: Tensor, pickers: Sequence[TokenPicker]) -> list[Picked]:
    picked = [Picked(i) for i in ids]
    rows = [row for row, picker in enumerate(pickers) if picker.num_logprobs is not None]
    if rows:
        counts = [pickers[row].num_logprobs or 0 for row in rows]
        scored = logprobs_of(
            logits_BV[on_device(rows, torch.int64, logits_BV.device)], [ids[row] for row in rows], counts
        )
        for row, found in zip(rows, scored, strict=True):
            picked[row] = found
    return picked


def logprobs_of(logits_NV: Tensor, ids: Sequence[int], counts: Sequence[int]) -> list[Picked]:
    """Return the log-probability of each id, and of as many of the likeliest tokens as its count says."""
    logs_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    own = logs_NV.gather(1, on_device(ids, torch.int64, logs_NV.device).unsqueeze(1)).squeeze(1).tolist()
    best = logs_NV.topk(min(max(counts), logs_NV.shape[1]), dim=-1) if max(counts) else None
    found = []
    for row, (i, count) in enumerate(zip(ids, counts, strict=True)):
        top: tuple[tuple[int, float], ...] = ()
        if best is not None and count:
            top = tuple(zip(best.indices[row, :count].tolist(), best.values[row, :count].tolist(), strict=True))
        found.append(Picked(i, own[row], top))
    return found
