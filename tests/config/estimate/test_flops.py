"""FLOPs of phases: frozen weights, recomputed blocks and sampled tokens."""

from __future__ import annotations

import dataclasses

import pytest

from homing.config.estimate.params_and_flops import (
    adapter_params,
    flops_of_step,
    flops_of_token,
    row_tokens,
    sizes,
    training_flops,
)
from homing.config.load import load_run, preset_dir
from homing.wire.run_json import Lora, Model, Rl, RlTask

QWEN_7B = Model("stock", "qwen2", 28, 3584, 28, 4, 128, 18944, 2048, 152064, False)
ALL = Lora(targets=["all"])


def test_frozen_weights_cost_four_a_number_and_adapters_six() -> None:
    counted = sizes(QWEN_7B)
    attention = 12 * 28 * 3584 * 2048
    assert training_flops(QWEN_7B, counted) == 6 * counted.num_matmul_params + attention
    adapters = 6 * adapter_params(QWEN_7B, ALL)
    assert training_flops(QWEN_7B, counted, ALL) == 4 * counted.num_matmul_params + attention + adapters


def test_blocks_that_are_computed_again_cost_their_forward_once_more_and_the_head_does_not() -> None:
    counted = sizes(QWEN_7B)
    forward = 2 * (counted.num_matmul_params - 152064 * 3584) + 4 * 28 * 3584 * 2048
    plain = training_flops(QWEN_7B, counted)
    assert training_flops(QWEN_7B, counted, recompute="all") == plain + forward
    assert training_flops(QWEN_7B, counted, recompute="half") == plain + forward / 2


def test_a_step_of_rl_learns_from_whole_rows_and_samples_first() -> None:
    run = load_run(str(preset_dir() / "goethe-75m.yaml")).run
    rl = Rl([RlTask("arithmetic")], max_new_tokens=64)
    asked = dataclasses.replace(run.phases[0], kind="rl", rl=rl, batch_tokens=256 * 64)
    assert flops_of_step(run, run.phases[0]) == run.phases[0].batch_tokens * run.sizes.flops_per_token
    short = dataclasses.replace(run.model, context=row_tokens(run.model, rl))
    assert short.context == 128
    assert flops_of_token(run, asked) == pytest.approx(sizes(short).flops_per_token)
    sampled = 256 * 64 * 2 * run.sizes.num_matmul_params
    assert flops_of_step(run, asked) == pytest.approx(256 * 128 * sizes(short).flops_per_token + sampled)
