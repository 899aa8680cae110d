"""The sampler against transformers' own processors and against counts, and its independence of batch and order."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from homing.lm.generate.pick_token import TokenPicker, logprobs_of, pick_tokens
from homing.sampling_settings import SamplingSettings

V = 40


def logits_of(seed: int, num_rows: int = 1, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed))


def drawn(logits_V: Tensor, settings: SamplingSettings, count: int, **more: Any) -> Counter[int]:
    """Pick the first token of `count` texts with different seeds."""
    pickers = [TokenPicker(SamplingSettings(**{**settings.__dict__, "seed": seed}), **more) for seed in range(count)]
    return Counter(picked.id for picked in pick_tokens(logits_V.expand(count, V), pickers))


def chances(logits_V: Tensor, settings: SamplingSettings, seen: list[int], said: list[int]) -> Tensor:
    """Return the distribution as transformers' processors make it; OpenAI's penalties by their formula."""
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    scores = logits_V.clone()
    for i, bias in settings.logit_bias.items():
        scores[i] += bias
    ids = torch.tensor([[*seen, *said]])
    if settings.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)(ids, scores[None])[0]
    for i, count in Counter(said).items():
        scores[i] -= settings.presence_penalty + settings.frequency_penalty * count
    steps = LogitsProcessorList([TemperatureLogitsWarper(settings.temperature)])
    steps += [TopKLogitsWarper(settings.top_k)] if settings.top_k else []
    steps += [TopPLogitsWarper(settings.top_p)] if settings.top_p < 1 else []
    steps += [MinPLogitsWarper(settings.min_p)] if settings.min_p else []
    return torch.softmax(steps(ids, scores[None])[0], dim=-1)


CASES = [
    SamplingSettings(temperature=1.0, top_k=0),
    SamplingSettings(temperature=0.5, top_k=7),
    SamplingSettings(temperature=1.3, top_k=0, top_p=0.7),
    SamplingSettings(temperature=0.9, top_k=12, top_p=0.8),
    SamplingSettings(temperature=1.0, top_k=0, min_p=0.1),
    SamplingSettings(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
    SamplingSettings(temperature=1.0, top_k=0, repetition_penalty=1.4),
    SamplingSettings(temperature=1.0, top_k=0, presence_penalty=1.5, frequency_penalty=0.6),
    SamplingSettings(temperature=1.0, top_k=10, logit_bias={3: 4.0, 5: -100.0}),
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_tokens_follow_the_distribution_of_transformers(settings: SamplingSettings) -> None:
    logits_V, seen, said, count = logits_of(1)[0], [1, 2, 2, 9], [4, 4, 7], 6000
    pickers = [TokenPicker(SamplingSettings(**{**settings.__dict__, "seed": seed}), seen) for seed in range(count)]
    for picker in pickers:
        for i in said:
            picker.saw(i)
    counts = Counter(picked.id for picked in pick_tokens(logits_V.expand(count, V), pickers))
    expected = chances(logits_V, settings, seen, said)
    for i in range(V):
        chance = float(expected[i])
        if chance == 0:
            assert counts[i] == 0, f"token {i} is filtered out"
        margin = 5 * (chance * (1 - chance) / count) ** 0.5 + 1e-3
        assert abs(counts[i] / count - chance) < margin


def test_a_row_gets_the_same_tokens_in_any_company() -> None:
    source = random.Random(3)
    settings = [*CASES, SamplingSettings(temperature=0.0)]
    logits_BV = logits_of(5, 12)
    mixed = [SamplingSettings(**{**source.choice(settings).__dict__, "seed": row}) for row in range(12)]
    together = [TokenPicker(each, [1, 2]) for each in mixed]
    alone = [TokenPicker(each, [1, 2]) for each in mixed]
    for _ in range(20):
        order = source.sample(range(12), source.randint(1, 12))
        found = pick_tokens(logits_BV[torch.tensor(order)], [together[row] for row in order])
        expected = [pick_tokens(logits_BV[row : row + 1], [alone[row]])[0] for row in order]
        assert found == expected


def test_equal_logits_never_keep_more_than_top_k() -> None:
    logits_V = torch.zeros(V)
    assert len(drawn(logits_V, SamplingSettings(temperature=1.0, top_k=3), 500)) == 3


def test_temperature_zero_takes_the_likeliest_and_penalties_still_count() -> None:
    logits_V = torch.zeros(V)
    logits_V[4], logits_V[6] = 3.0, 2.9
    picker = TokenPicker(SamplingSettings(temperature=0.0, frequency_penalty=0.2))
    assert [pick_tokens(logits_V[None], [picker])[0].id for _ in range(4)] == [4, 6, 4, 6]


def test_a_tiny_temperature_is_greedy_and_a_tiny_top_p_keeps_the_likeliest() -> None:
    logits_V = logits_of(2)[0]
    for settings in (SamplingSettings(temperature=1e-9), SamplingSettings(temperature=1.0, top_k=0, top_p=1e-9)):
        assert set(drawn(logits_V, settings, 50)) == {int(logits_V.argmax())}


def test_only_allowed_tokens_are_picked() -> None:
    class Odd:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def mask(self) -> Tensor:
            return torch.arange(V) % 2 == 1

        def saw(self, token_id: int) -> None:
            self.seen.append(token_id)

    odd = Odd()
    for settings in (SamplingSettings(temperature=0.0), SamplingSettings(temperature=3.0, top_k=0)):
        picker = TokenPicker(settings, constraint=odd)
        for seed in range(30):
            assert pick_tokens(logits_of(seed), [picker])[0].id % 2 == 1
    assert len(odd.seen) == 60


def test_logprobs_are_those_of_the_model_before_any_filter() -> None:
    logits_BV = logits_of(8, 3)
    pickers = [
        TokenPicker(SamplingSettings(temperature=5.0, logit_bias={0: 50.0}), num_logprobs=2),
        TokenPicker(SamplingSettings(temperature=0.0)),
        TokenPicker(SamplingSettings(temperature=0.0), num_logprobs=0),
    ]
    first, second, third = pick_tokens(logits_BV, pickers)
    logs = torch.log_softmax(logits_BV, dim=-1)
    assert first.id == 0
    assert first.logprob == pytest.approx(float(logs[0, 0]))
    assert [i for i, _ in first.top] == logs[0].topk(2).indices.tolist()
    assert (second.logprob, second.top) == (None, ())
    assert (third.logprob, third.top) == (pytest.approx(float(logs[2].max())), ())


def test_scores_of_given_ids() -> None:
    logits = logits_of(9, 2)
    found = logprobs_of(logits, [3, 4], [0, 1])
    logs = torch.log_softmax(logits, dim=-1)
    assert [each.logprob for each in found] == pytest.approx([float(logs[0, 3]), float(logs[1, 4])])
    assert [len(each.top) for each in found] == [0, 1]
