"""The table of measured speeds that ships, what is modelled from it, and how near that is to what was measured."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.cloud.rig import make_run

from homing.cloud.home import Home
from homing.cloud.plan import measured_speeds
from homing.cloud.plan.measured_speeds import LearnedRow, Table, load_table, rl_eval_s, rl_step_s, tokens_per_s
from homing.cloud.plan.speed import estimate, remember
from homing.cloud.plan.timing import timing_of
from homing.cloud.providers.base import Offer
from homing.config.estimate.params_and_flops import flops_of_step, flops_of_token, sizes
from homing.config.home_and_run_files import preset_dir
from homing.config.load import load_run
from homing.gpus import GPUS, Gpu
from homing.wire.run_json import Lora, Model, Phase, Rl, RlTask, Run

ROOT = Path(__file__).resolve().parents[3]
H200 = GPUS["H200"]
D12 = Model("stock", "qwen3", 12, 768, 6, 6, 128, 2048, 2048, 32768, False)
D20 = Model("stock", "qwen3", 20, 1280, 10, 10, 128, 3456, 2048, 32768, False)
PERSONA = dataclasses.replace(D12, context=1024)
QWEN_7B = Model("stock", "qwen2", 28, 3584, 28, 4, 128, 18944, 2048, 152064, False, rope_base=1e6)
ALL = Lora(targets=["all"])
GSM8K = Rl([RlTask("gsm8k", file="train.jsonl")], max_new_tokens=256)


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_measured", ROOT / "benchmarks" / "make_measured.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def offer(device: str = "H200", num_gpus: int = 1) -> Offer:
    memory = GPUS[device].memory_gib * 2**30
    return Offer("runpod", device.lower(), device, num_gpus, 16, memory, Decimal("3.00"))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Run]:
    def made(model: Model, *, precision: str = "auto", **changes: Any) -> Run:
        run = make_run(tmp_path)
        phase = dataclasses.replace(run.phases[0], batch_tokens=2**17, **changes)
        train = dataclasses.replace(run.train, precision=precision)
        return dataclasses.replace(run, model=model, sizes=sizes(model), phases=[phase], train=train)

    return made


def rl_run(make: Callable[..., Run], rl: Rl = GSM8K) -> tuple[Run, Phase]:
    batch = rl.prompts_per_step * rl.samples_per_prompt * rl.max_new_tokens
    run = make(D20, kind="rl", rl=rl)
    phase = dataclasses.replace(run.phases[0], batch_tokens=batch)
    return dataclasses.replace(run, phases=[phase]), phase


# --- the table ---


@pytest.mark.acceptance(63)
def test_the_table_that_ships_is_what_the_committed_results_make() -> None:
    shipped = (ROOT / "src" / "homing" / "cloud" / "plan" / measured_speeds.FILE).read_text(encoding="utf-8")
    made = script().make_table(ROOT / "benchmarks" / "results")
    assert made == shipped, "run PYTHONPATH=src python benchmarks/make_measured.py"


def test_every_result_with_a_speed_of_a_card_is_read_where_it_is_there(tmp_path: Path) -> None:
    shape = dataclasses.asdict(D12)
    row = {"tokens_per_s": 571_062, "mfu": 0.5122, "precision": "bf16", "optimizer": "muon", "rows": 32, "shape": shape}
    engine = {"figures": {"card": "NVIDIA H200", "speed": {"d12": row, "d12-fp8": {**row, "precision": "fp8"}}}}
    best = {"tokens_per_s": 17_954, "rows": 8, "recompute": "none", "windows_s": [0.9, 0.9, 0.9]}
    once = {**best, "windows_s": [1.4]}  # with compiling in it
    qlora = {"best": best, "packed": once}
    lora = {"figures": {"card": "NVIDIA H200", "lora": {"best": best, "packed": {"error": "no"}}, "qlora": qlora}}
    (tmp_path / "engine.json").write_text(json.dumps(engine))
    (tmp_path / "lora.json").write_text(json.dumps(lora))
    steps = json.loads(script().make_table(tmp_path))["steps"]
    assert [(row["source"], row["card"], row["tokens_per_s"]) for row in steps] == [
        ("lora.json lora best", "H200", 17_954),
        ("lora.json qlora best", "H200", 17_954),
        ("engine.json d12", "H200", 571_062),
        ("engine.json d12-fp8", "H200", 571_062),
    ]
    assert [row["is_nf4"] for row in steps] == [False, True, False, False]


def test_how_well_recipes_learned_is_the_mean_of_the_seeds_that_had_the_same_time_and_text(tmp_path: Path) -> None:
    def row(run: str, seed: int, bits: float, **changes: Any) -> dict[str, Any]:
        messages = {"asked_s": 300.0, "asked_tokens": 0, "corpus_tokens": 1000, "device": "NVIDIA H200"}
        return {"run": run, "seed": seed, "val_bits_per_byte": bits, **messages, **changes}

    rows = [
        row("swift", 0, 0.50), row("swift", 1, 0.52), row("stock", 0, 0.60), row("swift lr=0.02", 0, 0.4),
        row("swift", 0, 0.45, corpus_tokens=2000), row("stock", 0, 0.7, asked_s=80.0),
        row("swift", 0, 0.8, asked_s=80.0), row("stock", 0, 0.9, asked_s=0.0, asked_tokens=5000),
    ]  # fmt: skip
    (tmp_path / "quality.json").write_text(json.dumps({"figures": {"rows": rows}}))
    made = json.loads(script().make_table(tmp_path))["learned"]
    table = Table((), (), tuple(LearnedRow(**row) for row in made))
    assert len(table.learned) == 6, "those by tokens are no figure of time"
    pair = table.learned_by("stock", "swift")
    assert pair is not None
    assert [(row.recipe, row.seconds, row.bits_per_byte, row.num_seeds) for row in pair] == [
        ("stock", 300.0, 0.60, 1), ("swift", 300.0, 0.51, 2)
    ]  # fmt: skip
    assert table.without("quality.json").learned_by("stock", "swift") is None


def test_the_same_shape_on_the_same_card_is_measured_and_everything_else_is_modelled(
    home: Home, make: Callable[..., Run]
) -> None:
    run = make(dataclasses.replace(PERSONA, rope_base=1e6))
    speed = estimate(run, offer(), home)
    assert (speed.source, speed.tokens_per_s) == ("measured", 610_180)
    assert "persona.json" in speed.text
    others = {
        "another card": estimate(run, offer("H100"), home),
        "several cards": estimate(run, offer(num_gpus=8), home),
        "another shape": estimate(make(dataclasses.replace(PERSONA, num_layers=13)), offer(), home),
        "another method": estimate(make(PERSONA, method="lora", lora=ALL), offer(), home),
        "another precision": estimate(make(PERSONA, precision="fp32"), offer(), home),
        "computed again": estimate(make(PERSONA, recompute="all"), offer(), home),
    }
    for name, other in others.items():
        assert other.source == "modelled", name
        assert other.text.startswith("modelled: "), name
    assert others["several cards"].tokens_per_s == 8 * 610_180


# --- what is modelled ---


def slower_than_worse(rates: dict[str, float]) -> list[str]:
    """Pairs that the data sheets contradict: a card is at least as good in every figure, and yet rated slower."""

    def is_at_least(one: Gpu, other: Gpu) -> bool:
        figures = ("memory_gib", "bf16_tflops", "fp32_tflops", "bandwidth_gb_s", "compute_capability")
        return all(getattr(one, name) >= getattr(other, name) for name in figures)

    return [
        f"{one} {rates[one]:,.0f} < {other} {rates[other]:,.0f}"
        for one in rates
        for other in rates
        if is_at_least(GPUS[one], GPUS[other]) and rates[one] < rates[other] * (1 - 1e-9)
    ]


@pytest.mark.regression("better-gpu-rated-slower")
def test_a_card_that_is_no_worse_in_any_figure_is_never_rated_slower(home: Home, make: Callable[..., Run]) -> None:
    ways: tuple[dict[str, Any], ...] = ({}, {"recompute": "all"}, {"kind": "sft"}, {"method": "lora", "lora": ALL})
    runs = {f"{row.source} {way}": make(row.shape, **way) for row in load_table().steps for way in ways}
    runs["goethe-75m"] = load_run(str(preset_dir() / "goethe-75m.yaml"), []).run
    runs["rl"] = rl_run(make)[0]
    for name, run in runs.items():
        rates = {card: estimate(run, offer(card), home).tokens_per_s for card in GPUS}
        assert slower_than_worse(rates) == [], name


@pytest.mark.parametrize("share", [0.2, 0.9, 1.1])
@pytest.mark.parametrize("num_gpus", [1, 8])
def test_a_run_of_ones_own_moves_other_cards_with_it_and_never_past_the_data_sheets(
    share: float, num_gpus: int, home: Home, make: Callable[..., Run]
) -> None:
    run = dataclasses.replace(make(D12), id="own-1")  # an H200 of this shape is in the table
    before = estimate(run, offer("H100", num_gpus), home).tokens_per_s
    remember(run, "H100", num_gpus, share * before, home)
    speeds = {card: estimate(run, offer(card, num_gpus), home) for card in GPUS}
    rates = {card: speed.tokens_per_s for card, speed in speeds.items()}
    assert rates["H100"] == pytest.approx(share * before, rel=1e-3)
    assert slower_than_worse(rates) == []
    assert speeds["A100"].source == "modelled"
    assert ", based on this shape measured on H100 by own-1, H200" in speeds["A100"].text
    assert all(rates[card] <= num_gpus * GPUS[card].peak_flops() / flops_of_token(run, run.phases[0]) for card in GPUS)
    others = {card: estimate(run, offer(card, 2), home) for card in ("A100", "H200")}
    assert all("own-1" not in speed.text for speed in others.values()), "other counts of GPUs are other machines"


@pytest.mark.regression("linear-scaling-unsaid")
def test_several_gpus_are_said_to_be_scaled_linearly(home: Home, make: Callable[..., Run]) -> None:
    for run in (make(D12), make(dataclasses.replace(D12, num_layers=13)), rl_run(make)[0]):
        for card in ("H200", "A100"):
            assert "linearly" not in estimate(run, offer(card), home).text
            assert "linearly" in estimate(run, offer(card, 8), home).text


@pytest.mark.acceptance(63)
def test_eight_thousand_steps_of_goethe_in_45_minutes_are_above_the_peak_of_a_4090_and_not_said(home: Home) -> None:
    run = load_run(str(preset_dir() / "goethe-75m.yaml"), ["phases.0.steps=8000"]).run
    (phase,) = run.phases
    tokens, card = phase.num_steps * phase.batch_tokens, GPUS["RTX4090"]
    assert tokens / 2700 * flops_of_token(run, phase) > card.peak_flops("bf16")
    assert 2700 < tokens / estimate(run, offer("RTX4090"), home).tokens_per_s < 4 * 2700


@pytest.mark.acceptance(63)
@pytest.mark.parametrize("precision", ["auto", "fp32", "fp8"])
def test_no_card_is_said_to_be_above_its_peak(precision: str, home: Home, make: Callable[..., Run]) -> None:
    small, wide = (dataclasses.replace(D12, context=64), dataclasses.replace(QWEN_7B, width=2**15, ffn_width=2**17))
    ways: tuple[dict[str, Any], ...] = ({}, {"method": "lora", "lora": ALL}, {"recompute": "all"})
    runs = [make(model, precision=precision, **changes) for model in (small, D12, QWEN_7B, wide) for changes in ways]
    asked, phase = rl_run(make)
    for card, gpu in GPUS.items():
        for run in runs:
            rate = estimate(run, offer(card), home).tokens_per_s
            assert 0 < rate * flops_of_token(run, run.phases[0]) <= gpu.peak_flops(precision), card
        assert flops_of_step(asked, phase) / rl_step_s(load_table(), gpu, asked, phase) < gpu.peak_flops(), card


def test_a_figure_in_the_table_that_no_card_can_do_is_not_given_out(
    home: Home, make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(PERSONA)
    (row,) = (row for row in load_table().steps if row.source == "persona.json pretrain")
    forged = dataclasses.replace(row, tokens_per_s=2 * H200.peak_flops() / flops_of_token(run, run.phases[0]))
    table = Table((*load_table().steps, forged), load_table().sampling)
    monkeypatch.setattr(measured_speeds, "load_table", lambda: table)
    speed = estimate(run, offer(), home)
    assert speed.source == "modelled"
    assert speed.tokens_per_s * flops_of_token(run, run.phases[0]) <= H200.peak_flops()


@pytest.mark.parametrize("row", [row for row in load_table().steps if row.kind != "rl"], ids=lambda row: row.source)
def test_the_model_is_near_to_every_figure_that_it_was_made_from(
    row: measured_speeds.StepRow, make: Callable[..., Run]
) -> None:
    method = "full" if row.lora is None else "qlora" if row.is_nf4 else "lora"
    kind = "sft" if row.is_packed else "pretrain"
    run = make(row.shape, precision=row.precision, kind=kind, method=method, lora=row.lora, recompute=row.recompute)
    found = tokens_per_s(load_table(), GPUS[row.card], run, run.phases[0])
    assert found == pytest.approx(row.tokens_per_s, rel=0.25)


def lora_result(method: str) -> float:
    result = json.loads((ROOT / "benchmarks" / "results" / "lora.json").read_text(encoding="utf-8"))
    return float(result["figures"][method]["best"]["tokens_per_s"])


# The d12 shape: benchmarks/engine.py on one H200, torch 2.11. The model that is asked has not seen any of them.
@pytest.mark.parametrize(
    ("model", "method", "tokens_a_second"),
    [
        (D12, "full", 571_062),
        (QWEN_7B, "lora", lora_result("lora")),
        (QWEN_7B, "qlora", lora_result("qlora")),
        (QWEN_7B, "lora", 17_954),  # an earlier engine
    ],
)
def test_shapes_and_methods_that_the_model_has_not_seen_are_within_fifteen_percent(
    model: Model, method: str, tokens_a_second: float, make: Callable[..., Run]
) -> None:
    run = make(model, method=method, lora=None if method == "full" else ALL)
    unseen = load_table().without("engine.json").without("lora.json")
    assert tokens_per_s(unseen, H200, run, run.phases[0]) == pytest.approx(tokens_a_second, rel=0.15)


def test_frozen_weights_are_quicker_and_computing_again_is_slower(make: Callable[..., Run]) -> None:
    def rate(**changes: Any) -> float:
        run = make(QWEN_7B, **changes)
        return tokens_per_s(load_table(), H200, run, run.phases[0])

    assert rate(method="lora", lora=ALL) > 1.3 * rate()
    assert 0.7 * rate() < rate(recompute="all") < rate(recompute="half") < rate()


def test_a_card_with_half_the_peak_and_half_the_bandwidth_takes_twice_as_long(make: Callable[..., Run]) -> None:
    half = dataclasses.replace(H200, bf16_tflops=H200.bf16_tflops / 2, bandwidth_gb_s=H200.bandwidth_gb_s // 2)
    slow = dataclasses.replace(H200, bandwidth_gb_s=H200.bandwidth_gb_s // 2)
    run = make(D12)
    whole = tokens_per_s(load_table(), H200, run, run.phases[0])
    assert tokens_per_s(load_table(), half, run, run.phases[0]) == pytest.approx(whole / 2)
    assert whole / 2 < tokens_per_s(load_table(), slow, run, run.phases[0]) < whole


def test_a_card_without_bf16_trains_in_plain_fp32(make: Callable[..., Run]) -> None:
    run = make(PERSONA)
    rate = tokens_per_s(load_table(), GPUS["T4"], run, run.phases[0])
    assert rate * flops_of_token(run, run.phases[0]) < 8.1e12


# --- rl ---


@pytest.mark.acceptance(91)
def test_a_step_of_rl_is_near_to_the_one_that_was_measured(home: Home, make: Callable[..., Run]) -> None:
    """16 prompts x 16 samples x 256 tokens at the d20 shape on one H200: 3.06 s (benchmarks/results/rl.json)."""
    run, phase = rl_run(make)
    assert rl_step_s(load_table(), H200, run, phase) == pytest.approx(3.06, rel=0.3)
    speed = estimate(run, offer(), home)
    assert speed.source == "modelled"
    assert "per RL step" in speed.text
    timing = timing_of(run, offer(), speed, home)
    assert timing.step_s(phase) == pytest.approx(3.06, rel=0.3)


def test_what_makes_a_step_of_rl_longer_or_shorter_is_counted(make: Callable[..., Run]) -> None:
    def step_s(num_gpus: int = 1, **changes: Any) -> float:
        run, phase = rl_run(make, dataclasses.replace(GSM8K, **changes))
        return rl_step_s(load_table(), H200, run, phase, num_gpus)

    whole = step_s()
    assert step_s(graphs="off") > 3 * whole, "each kernel is launched by itself"
    assert 1.5 * whole < step_s(max_new_tokens=512) < 3 * whole
    assert step_s(updates_per_rollout=4) < whole < step_s(kl=0.1)
    assert step_s(rollout_rows=64) > whole, "weights are read four times as often"
    assert whole / 2 < step_s(num_gpus=2) < whole, "every card reads all weights for each token"
    small = {"method": "lora", "lora": Lora(rank=16, alpha=32.0)}
    run, phase = rl_run(make)
    neighbor, in_four_bits = (
        rl_step_s(load_table(), H200, run, dataclasses.replace(phase, **{**small, "method": method}))
        for method in ("lora", "qlora")
    )
    assert neighbor < whole, "frozen weights have no gradient of their own"
    assert neighbor < in_four_bits < 3 * neighbor, "each product makes its weights dense first"
    assert rl_eval_s(load_table(), H200, run, phase) < whole
