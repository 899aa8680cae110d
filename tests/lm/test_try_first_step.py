"""verify counts, steps and complains."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from homing.errors import DataError
from homing.lm import try_first_step as verify_module
from homing.lm.model import Decoder
from homing.lm.model.layers import Linear
from homing.lm.try_first_step import BATCH, TOKENS, take_step, verify
from homing.wire.run_json import Model, Run

SHAPE = Model("stock", "qwen3", 3, 32, 4, 2, 16, 48, 64, 1000, False)


def built(shape: Model = SHAPE) -> Decoder:
    model = Decoder(shape)
    model.init_weights(0)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(1000, (2, 33), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def with_changes(run: Run, **model: Any) -> Run:
    return dataclasses.replace(run, model=dataclasses.replace(run.model, **model))


@pytest.mark.acceptance(1)
def test_a_good_run_has_no_problems_and_counts_by_part(tiny_run: Run, tmp_path: Path) -> None:
    report = verify(tiny_run, tmp_path)
    assert report.is_ok, report.problems
    assert report.parts["embedding"] == 272 * 32
    assert report.parts["head"] == 0
    assert report.num_params == sum(report.parts.values()) == tiny_run.sizes.num_params
    assert report.expected_loss == pytest.approx(math.log(272))
    assert abs(report.loss - report.expected_loss) < 0.5
    assert report.grad_norm > 0
    assert (BATCH, TOKENS) == (2, 64)
    assert report.batch.startswith(f"2 x {min(TOKENS, tiny_run.model.context)} tokens of ")
    assert report.num_layers_run == report.num_layers == 2
    assert report.to_dict()["is_ok"] is True


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(("width", "num_layers"), [(64, 1), (768, 4)])
def test_fresh_models_of_every_kind_pass(arch: str, is_tied: bool, width: int, num_layers: int) -> None:
    shape = dataclasses.replace(
        SHAPE, arch=arch, is_tied=is_tied, width=width, num_layers=num_layers, head_size=width // 4, ffn_width=2 * width
    )
    assert take_step(built(shape), *batch()).problems == []


def test_without_shards_the_batch_is_random_and_said_so(tiny_run: Run, tmp_path: Path) -> None:
    unprepared = dataclasses.replace(tiny_run, data=dataclasses.replace(tiny_run.data, dir=str(tmp_path / "none")))
    report = verify(unprepared, tmp_path)
    assert report.is_ok, report.problems
    assert "random" in report.batch


def test_a_relative_data_dir_starts_at_the_run_directory(tiny_run: Run, tiny_run_dir: Path) -> None:
    relative = dataclasses.replace(tiny_run, data=dataclasses.replace(tiny_run.data, dir="../data"))
    assert "tokens of" in verify(relative, tiny_run_dir).batch


def test_a_count_that_run_json_has_wrong_is_a_problem(tiny_run: Run, tmp_path: Path) -> None:
    wrong = dataclasses.replace(tiny_run, sizes=dataclasses.replace(tiny_run.sizes, num_params=5))
    report = verify(wrong, tmp_path)
    assert not report.is_ok
    assert "run.json says 5 parameters" in report.problems[0]


def test_another_vocabulary_than_the_datas_is_refused_naming_both(tiny_run: Run, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="different vocabularies") as caught:
        verify(with_changes(tiny_run, vocab_size=300), tmp_path)
    assert "272" in caught.value.why
    assert "300" in caught.value.why
    assert "manifest.json" in caught.value.why


def test_a_first_loss_far_from_uniform_is_a_problem() -> None:
    model = built()
    with torch.no_grad():
        model.lm_head.weight.mul_(30.0)
    problems = take_step(model, *batch()).problems
    assert len(problems) == 1
    assert "ln(1,000) = 6.908" in problems[0]


def test_parameters_that_get_no_gradient_are_named() -> None:
    model = built()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
    problem = take_step(model, *batch()).problems[0]
    assert "would never train" in problem
    assert "model.layers.1.self_attn.q_proj.weight" in problem
    assert "model.layers.0" not in problem


def test_gradients_that_are_not_finite_are_named_and_so_is_the_loss() -> None:
    model = built()
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] = float("nan")
    problems = " ".join(take_step(model, *batch()).problems)
    assert "first loss is nan" in problems
    assert "not finite" in problems


@pytest.mark.acceptance(1)
def test_a_shape_error_names_the_layer_and_the_sizes() -> None:
    model = built()
    model.model.layers[1].mlp.down_proj = Linear(40, 32)
    with pytest.raises(DataError) as caught:
        take_step(model, *batch())
    assert "model.layers.1.mlp.down_proj got (2, 32, 48); its weight has shape (32, 40)" in caught.value.what
    assert model.model.layers[1].mlp.down_proj._forward_pre_hooks == {}


def test_where_memory_is_short_fewer_layers_are_run_and_said_so(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = with_changes(tiny_run, num_layers=40)
    monkeypatch.setattr(verify_module, "_free_bytes", lambda device: 1_000_000)
    report = verify(deep, tmp_path)
    assert report.num_layers == 40
    assert 1 <= report.num_layers_run < 10
    monkeypatch.setattr(verify_module, "_free_bytes", lambda device: 1000)
    with pytest.raises(DataError, match="Not even one layer"):
        verify(deep, tmp_path)
