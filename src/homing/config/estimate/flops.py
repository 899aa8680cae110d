"""FLOPs of a phase: per trained token and per step.

  full           6 N + 12 L d T: forward 2 N, gradient of the activations 2 N, gradient of the weights 2 N
  lora, qlora    frozen weights have no weight gradient: 4 N, plus 6 for each adapter parameter
  recompute      one more forward of the recomputed blocks
  rl             trains on rows of prompt and answer; sampling each token costs one more forward pass

N: matrix parameters, L: layers, d: total width of the query heads, T: tokens per row.
"""

from __future__ import annotations

from dataclasses import replace

from homing.config.estimate.memory import RECOMPUTED_OF, adapter_params
from homing.config.estimate.params import num_rows, row_tokens
from homing.wire.run_json import Lora, Model, Phase, Run, Sizes

__all__ = ["flops_of_step", "flops_of_token", "training_flops", "with_rows_of"]


def training_flops(model: Model, sizes: Sizes, lora: Lora | None = None, recompute: str = "none") -> float:
    """Return the FLOPs of one token in a row of `model.context` tokens. With `lora`, the base weights are frozen."""
    flops = sizes.flops_per_token
    if lora is not None:
        flops += 6 * adapter_params(model, lora) - 2 * sizes.num_matmul_params
    blocks = sizes.num_matmul_params - model.vocab_size * model.width
    attention = model.num_layers * model.num_heads * model.head_size * model.context
    return float(flops + RECOMPUTED_OF[recompute] * (2 * blocks + 4 * attention))


def flops_of_token(run: Run, phase: Phase) -> float:
    """Return the FLOPs of training on one token in this phase."""
    rows = run.model.context if phase.rl is None else row_tokens(run.model, phase.rl)
    return training_flops(*with_rows_of(rows, run.model, run.sizes), phase.lora, phase.recompute)


def flops_of_step(run: Run, phase: Phase) -> float:
    if phase.rl is None:
        return phase.batch_tokens * flops_of_token(run, phase)
    learned = num_rows(phase.rl) * row_tokens(run.model, phase.rl) * flops_of_token(run, phase)
    return learned + phase.batch_tokens * 2.0 * run.sizes.num_matmul_params / phase.rl.updates_per_rollout


def with_rows_of(num_tokens: int, model: Model, sizes: Sizes) -> tuple[Model, Sizes]:
    """Return the model and sizes adjusted to rows of `num_tokens`, in which attention covers fewer tokens."""
    spared = 12 * model.num_layers * model.num_heads * model.head_size * (model.context - num_tokens)
    return replace(model, context=num_tokens), replace(sizes, flops_per_token=sizes.flops_per_token - spared)
