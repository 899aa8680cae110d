"""What is said of a config.json that homing cannot build."""

from __future__ import annotations

from typing import Any

import pytest

from homing.errors import DataError
from homing.hf_config import model_of

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 500,
    "intermediate_size": 128, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip


def refusal(**changes: Any) -> DataError:
    with pytest.raises(DataError) as raised:
        model_of({**LLAMA, **changes})
    return raised.value


@pytest.mark.regression("architecture-refusals")
def test_another_architecture_is_named_and_nothing_that_does_not_matter() -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "activation_function": "gelu_new", "partial_rotary_factor": 0.5}
    with pytest.raises(DataError) as raised:
        model_of(gpt2)
    text = str(raised.value)
    assert "'gpt2'" in raised.value.what
    for noise in ("is missing", "partial_rotary", "rms_norm_eps", "hidden_act"):
        assert noise not in text


@pytest.mark.regression("partial-rotary")
@pytest.mark.parametrize(
    "where",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}},
    ],
)
def test_partial_rotary_factor_is_refused_inside_the_rope_parameters(where: dict[str, Any]) -> None:
    assert "partial_rotary_factor" in refusal(**where).why


def test_partial_rotary_factor_must_be_one_or_null_at_the_top_level() -> None:
    assert "partial_rotary_factor 0.5" in refusal(partial_rotary_factor=0.5).why
    for factor in (1, 1.0, None):
        rope = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": factor}
        assert model_of({**LLAMA, "partial_rotary_factor": factor, "rope_parameters": rope}).rope_base == 5e5


@pytest.mark.regression("rope-theta-zero")
@pytest.mark.parametrize("theta", [0, 0.0, -1.0, float("nan"), float("inf"), "10000", True])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_rope_theta_that_is_no_number_above_zero_is_refused(theta: Any, is_nested: bool) -> None:
    change = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}} if is_nested else {"rope_theta": theta}
    assert "rope_theta" in refusal(**change).why


def test_a_rope_theta_that_is_absent_or_null_is_the_usual_one() -> None:
    assert model_of(LLAMA).rope_base == model_of({**LLAMA, "rope_theta": None}).rope_base == 10000.0
