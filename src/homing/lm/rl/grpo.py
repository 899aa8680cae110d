"""GRPO: turns rewards into per-token loss weights, so that the policy gradient is a weighted cross-entropy.

    advantage   A = reward - mean of its group, divided by the group's standard deviation (`std`) or not (`mean`)
    ratio       r = p_now / p_when_sampled: 1 in the first update on a set of samples
    clipped     weight 0 where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low
    KL term     kl * (p_start / p_now - 1), the derivative of the k3 estimate p_start/p_now - 1 - log(p_start/p_now)

The loss of a step is - sum over its tokens of (A r + KL term) log p, divided by the number of tokens of the step: a
long answer counts by its tokens. Every factor is a constant in the backward pass, so the loss function for text is used
unchanged.

Shapes: R rows, T positions, M samples of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Policy", "advantages", "token_weights"]

_EPS = 1e-6


def advantages(rewards: Sequence[float | None], group_size: int, *, is_divided: bool) -> list[float]:
    """Return the advantages of consecutive groups. A sample without a reward is left out of its group and gets 0."""
    made: list[float] = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        known = torch.tensor([reward for reward in group if reward is not None], dtype=torch.float64)
        mean = float(known.mean()) if len(known) else 0.0
        # The population deviation, not the sample deviation: a group of one would divide by zero.
        deviation = float(known.std(correction=0)) if len(known) else 0.0
        scale = 1.0 / (deviation + _EPS) if is_divided else 1.0
        made += [0.0 if reward is None else (reward - mean) * scale for reward in group]
    return made


@dataclass(frozen=True)
class Policy:
    clip_low: float
    clip_high: float
    kl: float


def token_weights(
    advantage_RT: Tensor, is_learned_RT: Tensor, policy: Policy, *, now_RT: Tensor | None = None,
    sampled_RT: Tensor | None = None, start_RT: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """Return the weight of each token, and metrics about them.

    `now`, `sampled` and `start` are log-probabilities of the targets under the current weights, those at sampling time
    and the phase's initial ones; omitted if they would have no effect.
    """
    count = float(is_learned_RT.sum().clamp(min=1))
    figures: dict[str, float] = {}
    weights_RT = advantage_RT.clone()
    if sampled_RT is not None:
        assert now_RT is not None
        ratio_RT = torch.exp(now_RT - sampled_RT)
        is_clipped_RT = ((advantage_RT > 0) & (ratio_RT > 1 + policy.clip_high)) | (
            (advantage_RT < 0) & (ratio_RT < 1 - policy.clip_low)
        )
        weights_RT = torch.where(is_clipped_RT, 0.0, advantage_RT * ratio_RT)
        figures["clipped"] = float((is_clipped_RT & is_learned_RT).sum()) / count
    if start_RT is not None:
        assert now_RT is not None
        log_ratio_RT = (start_RT - now_RT).clamp(max=20.0)  # limit the ratio to e^20
        pull_RT = torch.expm1(log_ratio_RT)
        weights_RT = weights_RT + policy.kl * pull_RT
        figures["kl"] = float(((pull_RT - log_ratio_RT) * is_learned_RT).sum()) / count
    return torch.where(is_learned_RT, weights_RT, 0.0), figures
