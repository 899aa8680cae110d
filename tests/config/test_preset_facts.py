"""What each preset's name and comments claim is what it resolves to."""

from __future__ import annotations

from pathlib import Path

import pytest

from homing.config.estimate.memory import fits
from homing.config.home_and_run_files import preset_dir
from homing.config.load import load_run
from homing.gpus import GPUS
from homing.wire.run_json import Run


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def resolved(preset: str, *sets: str) -> Run:
    return load_run(str(preset_dir() / f"{preset}.yaml"), sets).run


@pytest.mark.parametrize(
    ("preset", "shape"),
    [
        ("goethe-75m", (640, 12, 10, 5, 512, 32768)),
        ("cs336", (512, 6, 8, 8, 1024, 10000)),
        ("medium-22m", (384, 6, 6, 6, 512, 32000)),
        ("1b", (2048, 20, 32, 32, 2048, 32768)),
        ("2b", (2560, 24, 40, 40, 2048, 32768)),
        ("4b", (3072, 32, 48, 48, 2048, 32768)),
    ],
)
def test_width_layers_and_heads_are_those_people_know(preset: str, shape: tuple[int, ...]) -> None:
    m = resolved(preset).model
    assert (m.width, m.num_layers, m.num_heads, m.num_kv_heads, m.context, m.vocab_size) == shape


@pytest.mark.parametrize(
    ("preset", "claimed"),
    [("goethe-75m", 75e6), ("gpt-124m", 124e6), ("medium-22m", 22e6), ("1b", 1e9), ("2b", 1.97e9), ("4b", 4e9)],
)
def test_the_size_is_within_two_percent_of_the_name(preset: str, claimed: float) -> None:
    assert abs(resolved(preset).sizes.num_params / claimed - 1) < 0.02


@pytest.mark.acceptance(86)
@pytest.mark.parametrize(("preset", "rows", "times"), [("2b", 2, 64), ("4b", 1, 256), ("cs336", 0, 0)])
def test_accumulation_reaches_the_token_batch(preset: str, rows: int, times: int) -> None:
    run = resolved(preset)
    phase = run.phases[0]
    assert phase.micro_batch == rows
    if rows:
        assert phase.batch_tokens == rows * times * run.model.context
        assert run.train.precision == "bf16"
    else:
        assert phase.batch_tokens == 32 * run.model.context


@pytest.mark.regression("preset-4b-memory")
def test_the_largest_preset_fits_one_gpu_of_80_gb_as_shipped() -> None:
    run = resolved("4b")
    gpus = {name: gpu for name, gpu in GPUS.items() if gpu.memory_gib == 80}
    assert set(gpus) == {"A100", "H100", "H100-PCIe"}
    assert {fit.gpu.name: fit.is_fitting for fit in fits(run, gpus=gpus)} == dict.fromkeys(gpus, True)


def test_the_long_cosine_is_long_and_can_be_shortened() -> None:
    long = resolved("2b").phases[0]
    assert (long.schedule.kind, long.num_steps) == ("cosine", 400_000)
    short = resolved("2b", "phases.0.steps=2000", "phases.0.warmup_steps=100").phases[0]
    assert (short.num_steps, short.schedule.decay_steps) == (2000, 1900)
    assert resolved("cs336").phases[0].num_steps == 100_000
