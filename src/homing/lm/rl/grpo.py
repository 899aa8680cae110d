"""GRPO: turns rewards into per-token loss weights, so that the policy gradient is a weighted cross-entropy.

    advantage   A = reward - mean of its group, divided by the group's standard deviation (`std`) or not (`mean`)
    ratio       r = p_now / p_when_sampled: 1 in the first update on a set of samples
    clipped     weight 0 where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low
    KL term     kl * (p_start / p_now - 1), the derivative of the k3 estimate p_start/p_now - 1 - log(p_start/p_now)

A step's loss is - sum over its tokens of (A r + KL term) log p, divided by the step's number of tokens, so that longer
answers have more weight. (A r + KL term) is a constant in the backward pass, so the loss function for text is used
unchanged.

Samples become training rows, padded on the right, with targets only where the model chose the token itself:

    prompt | sample        ->  ids      p0 p1 p2 s0 s1 s2          what the model read
                               targets   .  . s0 s1 s2 s3          prompt, padding and tool results are masked

If several updates use one set of samples, its rows are stored in checkpoints, because the samples could not be
generated again after the weights have changed.

Shapes: R rows, T positions, M samples of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from homing.errors import IntegrityError
from homing.lm.model import Decoder
from homing.lm.model.loss import IGNORED
from homing.lm.rl.rollout import Sample

__all__ = ["Experience", "Policy", "advantages", "log_probs", "rows_of", "token_weights"]

_EPS = 1e-6


def advantages(rewards: Sequence[float | None], group_size: int, *, is_divided: bool) -> list[float]:
    """Return the advantage of every sample within its group.

    The advantage of a sample without a reward is 0, and the group's mean and deviation exclude it.
    """
    made: list[float] = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        known = torch.tensor([reward for reward in group if reward is not None], dtype=torch.float64)
        mean = float(known.mean()) if len(known) else 0.0
        # Use the population deviation, because the sample deviation of a group of one would divide by zero.
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
    """Return the weight of each token in the loss, and metrics that describe these weights.

    `now`, `sampled` and `start` are log-probabilities of the targets under the model's current parameters, those at
    sampling time, and those at the start of the phase. Each may be None if the loss does not depend on it.
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


# -- samples as training rows ------------------------------------------------------------------------------------------

# Minimum length of a padded row, by device type. On these devices each row length is compiled separately, so rows are
# padded to one of a few lengths: the minimum times a power of two or, above twice the minimum, the midpoint between two
# such lengths. There, padding adds at most half. On other devices all rows are as long as the longest sample.
_SHORTEST = {"cuda": 128}
_TOKENS_AT_A_TIME = {"cuda": 65536, "mps": 16384}


@dataclass(frozen=True)
class Experience:
    number: int  # index of the rollout
    ids_RT: Tensor
    targets_RT: Tensor
    advantage_R: Tensor
    num_targets: int  # total over all ranks
    sampled_RT: Tensor | None = None  # log-probabilities at sampling time, if there are several updates
    start_RT: Tensor | None = None  # log-probabilities under the phase's initial weights, if there is a KL term

    @property
    def is_learned_RT(self) -> Tensor:
        return self.targets_RT != IGNORED

    def to_bytes(self) -> bytes:
        tensors = {"ids_RT": self.ids_RT, "targets_RT": self.targets_RT, "advantage_R": self.advantage_R}
        tensors |= {} if self.sampled_RT is None else {"sampled_RT": self.sampled_RT}
        tensors |= {} if self.start_RT is None else {"start_RT": self.start_RT}
        numbers = {"number": torch.tensor(self.number), "num_targets": torch.tensor(self.num_targets)}
        return save({name: tensor.cpu().contiguous() for name, tensor in {**tensors, **numbers}.items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Experience:
        try:
            tensors = load(data)
            number, num_targets = int(tensors.pop("number")), int(tensors.pop("num_targets"))
            return cls(number=number, num_targets=num_targets, **tensors)
        except (SafetensorError, KeyError, TypeError) as exc:
            raise IntegrityError(
                what="The samples in the checkpoint cannot be read.", why=str(exc), fix="Use a different checkpoint."
            ) from exc

    def to(self, device: torch.device) -> Experience:
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def rows_of(
    number: int, prompts: Sequence[Sequence[int]], samples: Sequence[Sample], advantages: Sequence[float],
    *, context: int, device: torch.device,
) -> Experience:  # fmt: skip
    """Build rows from samples; `prompts` has one entry per sample. `num_targets` counts the targets in these rows."""
    longest = max(len(prompt) + len(sample.ids) for prompt, sample in zip(prompts, samples, strict=True)) - 1
    length = min(context, _padded_length(longest, _SHORTEST.get(device.type, 0)))
    ids_RT = torch.zeros(len(samples), length, dtype=torch.int64)
    targets_RT = torch.full((len(samples), length), IGNORED, dtype=torch.int64)
    for row, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        whole = torch.tensor([*prompt, *sample.ids])
        ids_RT[row, : len(whole) - 1] = whole[:-1]
        is_own = torch.tensor(sample.is_own)
        start = len(prompt) - 1
        targets_RT[row, start : start + len(is_own)] = torch.where(is_own, whole[len(prompt) :], IGNORED)
    count = int((targets_RT != IGNORED).sum())
    made = Experience(number, ids_RT, targets_RT, torch.tensor(advantages, dtype=torch.float32), count)
    return made.to(device)


def _padded_length(longest: int, shortest: int) -> int:
    length = shortest or longest
    while length < longest:
        # The lengths are 128, 256, 384, 512, 768, 1024, ... Midpoints start above 256, to be multiples of 128.
        middle = length + length // 2
        if length > shortest and middle >= longest:
            return middle
        length *= 2
    return length


@torch.no_grad()
def log_probs(model: Decoder, experience: Experience) -> Tensor:
    """Return the log-probability of each target, or 0 where the target is masked."""
    length = experience.ids_RT.shape[1]
    at_a_time = max(1, _TOKENS_AT_A_TIME.get(model.device.type, 4096) // length)
    chunks = zip(experience.ids_RT.split(at_a_time), experience.targets_RT.split(at_a_time), strict=True)
    return torch.cat([-model.token_losses(ids_BT, targets_BT) for ids_BT, targets_BT in chunks])
