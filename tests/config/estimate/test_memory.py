"""The memory plan against peaks that were measured.

Measured on one H200 with torch 2.11 by benchmarks/engine.py: whole optimizer steps, `max_memory_allocated`, without the
CUDA context (which took 0.80 GB more).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from homing.config.estimate.memory import fits, fits_every_phase, memory_of, training_memory
from homing.config.load import load_run, preset_dir
from homing.gpus import GPUS
from homing.wire import codec
from homing.wire.run_json import Model

ENGINE = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "engine.json"


def stock(layers: int, width: int, heads: int, ffn: int, context: int, vocab: int, arch: str = "llama") -> Model:
    return Model("stock", arch, layers, width, heads, heads, width // heads, ffn, context, vocab, False)


D20 = stock(20, 1280, 10, 3456, 2048, 32768, "qwen3")
MEASURED = [
    (stock(12, 768, 6, 2048, 2048, 32768, "qwen3"), 32, "muon", "bf16", 25.4e9),
    (stock(12, 768, 12, 2048, 1024, 50304), 64, "adamw", "bf16", 26.2e9),
    (stock(6, 512, 8, 1344, 1024, 10000), 128, "adamw", "bf16", 16.5e9),
    (D20, 32, "muon", "bf16", 69.6e9),
    (D20, 32, "muon", "fp8", 63.0e9),
    (Model("swift", "swift", 12, 768, 6, 6, 128, 3072, 2048, 32768, False), 32, "muon", "bf16", 29.3e9),
]


@pytest.mark.acceptance(7)
@pytest.mark.parametrize(("model", "rows", "optimizer", "precision", "measured"), MEASURED)
def test_the_plan_is_never_below_and_at_most_a_tenth_above_what_was_measured(
    model: Model, rows: int, optimizer: str, precision: str, measured: float
) -> None:
    memory = memory_of(model, optimizer, precision=precision)
    planned = memory.peak(rows) - memory.cuda
    assert 1.0 <= planned / measured <= 1.1


def engine_rows() -> list[tuple[str, dict[str, Any]]]:
    figures = json.loads(ENGINE.read_text(encoding="utf-8"))["figures"]
    return sorted({**figures["speed"], **figures["peaks"]}.items())


@pytest.mark.parametrize(("name", "row"), engine_rows())
def test_the_plan_is_near_every_peak_of_the_benchmark(name: str, row: dict[str, Any]) -> None:
    memory = memory_of(codec.load(Model, row["shape"]), row["optimizer"], precision=row["precision"])
    planned = memory.peak(row["rows"]) - memory.cuda
    assert 0.95 <= planned / row["peak_bytes"] <= 1.1, f"{name}: {planned / row['peak_bytes']:.3f} of what was measured"


def test_the_benchmark_measured_shapes_enough() -> None:
    assert len(engine_rows()) >= 12


def test_memory_grows_with_rows_and_muon_needs_less_state_than_adamw() -> None:
    model = Model("stock", "qwen3", 8, 512, 8, 2, 64, 1408, 1024, 32768, True)
    muon, adamw = memory_of(model, "muon", precision="bf16"), memory_of(model, "adamw", precision="bf16")
    assert muon.optimizer < adamw.optimizer
    assert adamw.optimizer == 2 * adamw.weights
    assert muon.peak(8) > muon.peak(1)
    assert memory_of(model, "muon", precision="fp32").activations_per_row > 1.9 * muon.activations_per_row
    assert memory_of(model, "muon", precision="fp8").activations_per_row < muon.activations_per_row


def test_captured_graphs_keep_their_memory_during_the_optimizer_step() -> None:
    by = {
        graphs: training_memory(load_run(str(preset_dir() / "goethe-75m.yaml"), [f"train.graphs={graphs}"]).run)
        for graphs in ("off", "auto", "on")
    }
    assert by["auto"].peak(4) == by["off"].peak(4)
    assert by["on"].peak(4) == by["on"].always + by["on"].forward(4) + by["on"].scratch
    assert by["on"].scratch > 0


@pytest.mark.acceptance(7, 8)
def test_a_card_that_is_too_small_names_the_setting_to_lower() -> None:
    run = load_run(str(preset_dir() / "4b.yaml")).run
    big = {fit.gpu.name: fit for fit in fits(run)}
    assert set(big) == set(GPUS)
    assert big["B200"].is_fitting
    assert not big["RTX4090"].is_fitting
    assert "model.layers" in big["RTX4090"].lower
    assert "train.precision" in big["V100"].lower
    some = {fit.gpu.name: fit for fit in fits(load_run(str(preset_dir() / "1b.yaml"), ["phases.0.micro_batch=32"]).run)}
    assert some["RTX4090"].lower.startswith("phases.0.micro_batch to ")
    assert some["RTX4090"].micro_batch == 32
    assert some["RTX4090"].most_rows < 32


@pytest.mark.acceptance(64)
def test_a_card_holds_a_run_only_if_it_holds_every_phase() -> None:
    run = load_run(str(preset_dir() / "1b.yaml"), ["phases.0.micro_batch=0"]).run
    small = dataclasses.replace(run.phases[0], offload="optimizer", recompute="all", micro_batch=1)
    both = dataclasses.replace(run, phases=[small, dataclasses.replace(run.phases[0], micro_batch=4)])
    first = {fit.gpu.name: fit.is_fitting for fit in fits(both)}
    every = {fit.gpu.name: fit for fit in fits_every_phase(both)}
    assert first["RTX4090"]
    assert not every["RTX4090"].is_fitting
    assert every["RTX4090"].lower.startswith("phases.1.")
    assert every["H100"].is_fitting
    assert every["H100"].peak_bytes == fits(both, both.phases[1], {"H100": GPUS["H100"]})[0].peak_bytes


def test_the_setting_named_is_enough() -> None:
    long = ["model.context=65536", "phases.0.batch_tokens=131072", "phases.0.micro_batch=0", "train.precision=auto"]
    run = load_run(str(preset_dir() / "1b.yaml"), long).run
    named = set()
    for fit in fits(run):
        if " to " in fit.lower:
            levers = [lever.split(" to ") for lever in fit.lower.split(" and ")]
            named.add(tuple(key for key, _ in levers))
            lower = [*long, *(f"{key}={value}" for key, value in levers)]
            again = fits(load_run(str(preset_dir() / "1b.yaml"), lower).run, gpus={fit.gpu.name: fit.gpu})
            assert again[0].is_fitting
    assert named == {("phases.0.recompute",), ("phases.0.recompute", "phases.0.offload"), ("model.context",)}


def test_the_rows_that_fit_divide_the_batch() -> None:
    run = load_run(str(preset_dir() / "goethe-75m.yaml")).run
    rows = run.phases[0].batch_tokens // run.model.context
    for fit in fits(run):
        assert fit.most_rows == 0 or rows % fit.most_rows == 0
        if fit.is_fitting:
            assert training_memory(run, has_bf16=fit.gpu.has_bf16).peak(fit.micro_batch) <= fit.usable_bytes


def test_ranks_that_divide_the_model_hold_its_shares_and_what_they_compute_with() -> None:
    whole = memory_of(D20, "adamw", precision="bf16", recompute="all")
    for num in (2, 4, 8):
        for kind in ("zero2", "zero3"):
            one = whole.divided(kind, num)
            held, all_of_it = (m.weights + m.gradients + m.optimizer for m in (one, whole))
            assert held == pytest.approx(all_of_it / num)
        assert whole.divided("zero3", num).peak(1) < whole.divided("zero2", num).peak(1) < whole.peak(1)
    assert whole.divided("hsdp", 8) == whole.divided("zero3", 4)  # each half of the GPUs holds a whole model
    assert whole.divided("ddp", 8) == whole.divided("zero3", 1) == whole


def test_a_model_too_large_for_one_gpu_fits_on_eight_that_divide_it() -> None:
    preset = str(preset_dir() / "4b.yaml")
    shape = ["model.width=4096", "model.heads=32", "model.layers=32", "cloud.gpu=H100"]
    (alone,) = fits_every_phase(load_run(preset, shape).run, {"H100": GPUS["H100"]})
    assert not alone.is_fitting
    (fit,) = fits_every_phase(load_run(preset, [*shape, "cloud.num_gpus=8"]).run, {"H100": GPUS["H100"]})
    assert (fit.is_fitting, fit.parallel) == (True, "zero2")
    for asked, is_fitting in (("ddp", False), ("zero3", True)):
        run = load_run(preset, [*shape, "cloud.num_gpus=8", f"train.parallel={asked}"]).run
        (fit,) = fits_every_phase(run, {"H100": GPUS["H100"]})
        assert (fit.is_fitting, fit.parallel) == (is_fitting, asked)


def test_a_model_that_fits_on_one_gpu_is_not_divided_on_several() -> None:
    preset = str(preset_dir() / "goethe-75m.yaml")
    for fit in fits_every_phase(load_run(preset, ["cloud.num_gpus=2"]).run, {"H100": GPUS["H100"]}):
        assert (fit.is_fitting, fit.parallel) == (True, "ddp")
