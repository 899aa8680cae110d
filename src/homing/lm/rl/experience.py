"""Samples as training rows: padded on the right, with targets only where the model chose the token itself.

    prompt | sample        ->  ids      p0 p1 p2 s0 s1 s2          what the model read
                               targets   .  . s0 s1 s2 s3          prompt, padding and tool results are masked

Stored in a checkpoint if several updates share one set of samples: the weights that generated them are gone by then.

Shapes: R rows, T positions.
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

__all__ = ["Experience", "log_probs", "rows_of"]

# On these devices rows are padded to one of few lengths, because each is compiled once: this times powers of two, and
# the midpoint between two of them, so that a row is padded by at most half. Elsewhere rows end with the longest sample.
_SHORTEST = {"cuda": 128}
_TOKENS_AT_A_TIME = {"cuda": 65536, "mps": 16384}


@dataclass(frozen=True)
class Experience:
    number: int  # index of the rollout
    ids_RT: Tensor
    targets_RT: Tensor
    advantage_R: Tensor
    num_targets: int  # on all ranks
    sampled_RT: Tensor | None = None  # log-probabilities at sampling time, if there are several updates
    start_RT: Tensor | None = None  # under the phase's initial weights, if there is a KL term

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
                what="The samples in the checkpoint cannot be read.", why=str(exc), fix="Use another checkpoint."
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
    """Build rows from samples; `prompts` has one entry per sample. `num_targets` counts these rows only."""
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
        # 128, 256, 384, 512, 768, 1024, ...: from 256 on with midpoints, which are multiples of 128 too.
        middle = length + length // 2
        if length > shortest and middle >= longest:
            return middle
        length *= 2
    return length


@torch.no_grad()
def log_probs(model: Decoder, experience: Experience) -> Tensor:
    """Return the log-probability of each target; 0 where masked."""
    length = experience.ids_RT.shape[1]
    at_a_time = max(1, _TOKENS_AT_A_TIME.get(model.device.type, 4096) // length)
    chunks = zip(experience.ids_RT.split(at_a_time), experience.targets_RT.split(at_a_time), strict=True)
    return torch.cat([-model.token_losses(ids_BT, targets_BT) for ids_BT, targets_BT in chunks])
