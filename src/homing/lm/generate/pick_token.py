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
from collections import Counter
from collections.abc import Sequence
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
    "pick_tokens",
    "refuse_bad_settings",
]

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
        self._counts: Counter[int] = Counter()
        has_penalty = settings.presence_penalty != 0 or settings.frequency_penalty != 0
        self._repeated = set(prompt_ids) if settings.repetition_penalty != 1 else set()
        self._is_counting = has_penalty or settings.repetition_penalty != 1
        self._mask_V: Tensor | None = None  # which tokens may come next; computed once per token
        self._bias: tuple[Tensor, Tensor] | None = None
        self._repeated_V: Tensor | None = None
        self.alters_logits = self._is_counting or bool(settings.logit_bias) or constraint is not None

    def draw(self) -> int:
        return int(self._random.random_raw() >> (64 - BITS))

    def saw(self, token_id: int) -> None:
        if self._is_counting:
            self._counts[token_id] += 1
        if self._constraint is not None:
            self._constraint.saw(token_id)
            self._mask_V = None

    def prepare(self) -> None:
        """Compute which tokens may come next, if there is a constraint. Raises what the constraint raises."""
        if self._constraint is not None and self._mask_V is None:
            self._mask_V = self._constraint.mask()

    def altered(self, logits_V: Tensor) -> Tensor:
        """Return the logits with bias and penalties, and without the tokens that are not allowed."""
        settings, device = self.settings, logits_V.device
        logits_V = logits_V.clone()
        if settings.logit_bias:
            if self._bias is None:
                ids_N = torch.tensor(list(settings.logit_bias), device=device)
                self._bias = ids_N, torch.tensor(list(settings.logit_bias.values()), device=device)
            logits_V[self._bias[0]] += self._bias[1]
        if settings.repetition_penalty != 1 and (self._repeated or self._counts):
            if self._repeated_V is None:
                self._repeated_V = torch.zeros(len(logits_V), dtype=torch.bool, device=device)
                self._repeated_V[torch.tensor(sorted(self._repeated), device=device, dtype=torch.int64)] = True
            if self._counts:
                self._repeated_V[torch.tensor(list(self._counts), device=device)] = True
            penalty = settings.repetition_penalty
            penalized_V = torch.where(logits_V < 0, logits_V * penalty, logits_V / penalty)
            logits_V = torch.where(self._repeated_V, penalized_V, logits_V)
        if self._counts and (settings.presence_penalty or settings.frequency_penalty):
            ids_N = torch.tensor(list(self._counts), device=device)
            counts_N = torch.tensor(list(self._counts.values()), device=device, dtype=logits_V.dtype)
            logits_V[ids_N] -= settings.presence_penalty + settings.frequency_penalty * counts_N
        self.prepare()
        if self._mask_V is not None:
            logits_V.masked_fill_(~self._mask_V.to(device), -math.inf)
        return logits_V


@torch.no_grad()
def pick_tokens(logits_BV: Tensor, pickers: Sequence[TokenPicker]) -> list[Picked]:
    """Pick one token per row, each with its own picker."""
    plain_BV = logits_BV = logits_BV.float()
    if any(picker.alters_logits for picker in pickers):
        pairs = zip(logits_BV.unbind(), pickers, strict=True)
        logits_BV = torch.stack([picker.altered(row) if picker.alters_logits else row for row, picker in pairs])
    ids_B = logits_BV.argmax(dim=-1)
    for rows, is_sorted in _groups(pickers, logits_BV.shape[1]):
        index = torch.tensor(rows, device=logits_BV.device)
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
        return torch.tensor(values, device=device, dtype=torch.float32).unsqueeze(1)

    settings = [picker.settings for picker in pickers]
    draws_B1 = torch.tensor([picker.draw() for picker in pickers], device=device).unsqueeze(1)
    temperature_B1 = per_row([each.temperature for each in settings])
    if not is_sorted:
        return draw_candidates(torch.softmax(logits_BV / temperature_B1, dim=-1), draws_B1).squeeze(1)
    limits = [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in settings]
    # Select by rank, not by comparing values, because with equal logits a threshold could keep more than top_k tokens.
    values_BC, ids_BC = logits_BV.topk(max(limits), dim=-1)
    ranks_C = torch.arange(values_BC.shape[1], device=device)
    scaled_BC = values_BC / temperature_B1
    scaled_BC = scaled_BC.masked_fill(ranks_C >= torch.tensor(limits, device=device).unsqueeze(1), -math.inf)
    probs_BC = torch.softmax(scaled_BC, dim=-1)
    if any(each.top_p < 1 for each in settings):
        before_BC = probs_BC.cumsum(dim=-1) - probs_BC  # probability of all likelier tokens; 0 for the likeliest one
        before_BC[:, 0] = 0.0
        # A top-p of 1 keeps everything, also where rounding makes the sum exceed 1.
        most_B1 = per_row([each.top_p if each.top_p < 1 else math.inf for each in settings])
        probs_BC = probs_BC.masked_fill(before_BC >= most_B1, 0.0)
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
        scored = logprobs_of(logits_BV[torch.tensor(rows, device=logits_BV.device)], [ids[row] for row in rows], counts)
        for row, found in zip(rows, scored, strict=True):
            picked[row] = found
    return picked


def logprobs_of(logits_NV: Tensor, ids: Sequence[int], counts: Sequence[int]) -> list[Picked]:
    """Return the log-probability of each id, and of as many of the likeliest tokens as its count says."""
    logs_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    own = logs_NV.gather(1, torch.tensor(ids, device=logs_NV.device).unsqueeze(1)).squeeze(1).tolist()
    best = logs_NV.topk(min(max(counts), logs_NV.shape[1]), dim=-1) if max(counts) else None
    found = []
    for row, (i, count) in enumerate(zip(ids, counts, strict=True)):
        top: tuple[tuple[int, float], ...] = ()
        if best is not None and count:
            top = tuple(zip(best.indices[row, :count].tolist(), best.values[row, :count].tolist(), strict=True))
        found.append(Picked(i, own[row], top))
    return found
