"""How much a phase computes: FLOPs of a trained token, and of a step.

    full           6 N + 12 L d T: forward 2 N, the gradient of what came in 2 N, that of the weights 2 N
    lora, qlora    weights that stand still have no gradient of their own: 4 N, and 6 for each number of the adapters
    recompute      the forward of so many blocks once more
    rl             rows of prompt and sample are learned from, and each sampled token was a forward before

with N the numbers in matrices, L layers of d query columns and T tokens of a row.
"""

from __future__ import annotations

from dataclasses import replace

from homing.config.memory import RECOMPUTED_OF, adapter_params
from homing.config.rollouts import num_rows, row_tokens
from homing.wire.run import Lora, Model, Phase, Run, Sizes

__all__ = ["flops_of_step", "flops_of_token", "training_flops", "with_rows_of"]


def training_flops(model: Model, sizes: Sizes, lora: Lora | None = None, recompute: str = "none") -> float:
    """Of one token in a row of `model.context`. `lora`: the weights beside it stand still."""
    flops = sizes.flops_per_token
    if lora is not None:
        flops += 6 * adapter_params(model, lora) - 2 * sizes.num_matmul_params
    blocks = sizes.num_matmul_params - model.vocab_size * model.width
    attention = model.num_layers * model.num_heads * model.head_size * model.context
    return float(flops + RECOMPUTED_OF[recompute] * (2 * blocks + 4 * attention))


def flops_of_token(run: Run, phase: Phase) -> float:
    """Of one that is learned from."""
    rows = run.model.context if phase.rl is None else row_tokens(run.model, phase.rl)
    return training_flops(*with_rows_of(rows, run.model, run.sizes), phase.lora, phase.recompute)


def flops_of_step(run: Run, phase: Phase) -> float:
    if phase.rl is None:
        return phase.batch_tokens * flops_of_token(run, phase)
    learned = num_rows(phase.rl) * row_tokens(run.model, phase.rl) * flops_of_token(run, phase)
    return learned + phase.batch_tokens * 2.0 * run.sizes.num_matmul_params / phase.rl.updates_per_rollout


def with_rows_of(num_tokens: int, model: Model, sizes: Sizes) -> tuple[Model, Sizes]:
    """The same model on shorter rows: attention looks back less far."""
    spared = 12 * model.num_layers * model.num_heads * model.head_size * (model.context - num_tokens)
    return replace(model, context=num_tokens), replace(sizes, flops_per_token=sizes.flops_per_token - spared)
