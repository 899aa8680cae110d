"""The table of measured figures that ships with the package, from benchmarks/results.

    PYTHONPATH=src python benchmarks/make_measured.py          after a benchmark on a card has left a new result

    engine.json  lora.json  rl.json  persona.json  gpu-first-run.json  speeds  ->  src/homing/cloud/plan/measured.json
    quality.json   how well each recipe learned by time, the mean of its seeds    ->

Those that are not there are left out. `homing plan` reads the table, and a test compares it with what this makes.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from homing.cloud.plan.measured_speeds import FILE, LearnedRow, SamplingRow, StepRow, Table
from homing.config.estimate.params_and_flops import sizes
from homing.config.load import load_run, preset_dir
from homing.gpus import find_gpu
from homing.wire import codec
from homing.wire.run_json import Lora, Model

RESULTS = Path(__file__).resolve().parent / "results"
TARGET = RESULTS.parents[1] / "src" / "homing" / "cloud" / "plan" / FILE

# What results do not say of themselves: the shapes of benchmarks/gpu/rl.py and lora.py, and the one card so far.
D20 = Model("stock", "qwen3", 20, 1280, 10, 10, 128, 3456, 2048, 32768, is_tied=False)
SEVEN_B = Model("stock", "qwen2", 28, 3584, 28, 4, 128, 18944, 2048, 152064, False, rope_base=1e6)
LORA = Lora(rank=16, alpha=32.0, targets=["all"])
RL_CARD = "NVIDIA H200"
RL_COMPARED = {"samples": 2, "num_new": 64}  # of each prompt, with graphs and without

Rows = Iterator[StepRow | SamplingRow | LearnedRow]
LEAST_WINDOWS = 3


def main() -> int:
    TARGET.write_text(make_table(RESULTS), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(RESULTS.parents[1])}")
    return 0


def make_table(results: Path) -> str:
    rows = [row for name, read in READERS.items() if (results / name).is_file() for row in read(_load(results / name))]
    table = Table(
        tuple(row for row in rows if isinstance(row, StepRow)),
        tuple(row for row in rows if isinstance(row, SamplingRow)),
        tuple(row for row in rows if isinstance(row, LearnedRow)),
    )
    document = {"schema": "homing.measured/1", **dataclasses.asdict(table)}
    return json.dumps(document, indent=1) + "\n"


def of_engine(result: dict[str, Any]) -> Rows:
    figures = result["figures"]
    for name, row in figures["speed"].items():
        yield StepRow(
            f"engine.json {name}", card_of(figures["card"]), row["tokens_per_s"], codec.load(Model, row["shape"]),
            precision=row["precision"],
        )  # fmt: skip


def of_lora(result: dict[str, Any]) -> Rows:
    """The best setting, plain and packed. One row at a time is for memory: too little to fill a card. One window alone
    may have compiled in it, and tells no speed."""
    figures = result["figures"]
    for method in ("lora", "qlora"):
        for name in ("best", "packed"):
            row = figures.get(method, {}).get(name, {})
            if len(row.get("windows_s", [])) >= LEAST_WINDOWS:
                yield StepRow(
                    f"lora.json {method} {name}", card_of(figures["card"]), row["tokens_per_s"], SEVEN_B, kind="sft",
                    lora=LORA, is_nf4=method == "qlora", recompute=row["recompute"], is_packed=name == "packed",
                )  # fmt: skip


def of_rl(result: dict[str, Any]) -> Rows:
    figures = result["figures"]
    card, row_tokens = card_of(figures.get("card", RL_CARD)), int(figures["row_tokens"])
    rows, num_new = figures["prompts"] * figures["samples"], figures["answer_tokens"]
    rate = rows * row_tokens / figures["backward_s"]
    yield StepRow("rl.json", card, round(rate), dataclasses.replace(D20, context=row_tokens), kind="rl")
    prompt = row_tokens - num_new
    yield SamplingRow("rl.json", card, figures["sampling_s"], D20, rows, prompt, num_new, figures["is_captured"])
    for name, is_captured in (("auto", figures["is_captured"]), ("off", False)):
        yield SamplingRow(
            f"rl.json graphs {name}", card, figures[f"sampling_64_graphs_{name}_s"], D20,
            RL_COMPARED["samples"] * figures["prompts"], prompt, RL_COMPARED["num_new"], is_captured,
        )  # fmt: skip


def of_persona(result: dict[str, Any]) -> Rows:
    figures = result["figures"]
    shape = codec.load(Model, {name: value for name, value in figures["model"].items() if name != "num_params"})
    # Its sft took 8,192 tokens a step, so few that the card waited for the host: no speed of packed rows.
    phase = figures["phases"]["pretrain"]
    yield StepRow("persona.json pretrain", card_of(figures["device"]), phase["tokens_per_s"], shape)


def of_first_run(result: dict[str, Any]) -> Rows:
    figures = result["figures"]
    shape = load_run(str(preset_dir() / "goethe-75m.yaml")).run.model
    counted = sizes(shape).num_params
    assert counted == figures["num_params"], f"the run had {figures['num_params']:,} parameters, goethe-75m {counted:,}"
    yield StepRow("gpu-first-run.json", card_of(result["machine"]["card"]), round(figures["tokens_per_s"]), shape)


def of_quality(result: dict[str, Any]) -> Rows:
    """A mean over the seeds that had the same seconds, card and text; runs by tokens are no figure per dollar. Only our
    own families: a peer's figure without its settings would say nothing."""
    seeds: dict[tuple[str, str, float, int], list[float]] = {}
    for row in result["figures"]["rows"]:
        if row["asked_s"] and row["run"].startswith(("stock", "swift")):
            where = (card_of(row["device"]), row["run"], row["asked_s"], row["corpus_tokens"])
            seeds.setdefault(where, []).append(row["val_bits_per_byte"])
    for where, bits in sorted(seeds.items()):
        yield LearnedRow("quality.json", *where, bits_per_byte=round(statistics.fmean(bits), 5), num_seeds=len(bits))


# Later ones are looked at first: the engine alone is measured most carefully.
READERS: dict[str, Callable[[dict[str, Any]], Rows]] = {
    "gpu-first-run.json": of_first_run,
    "persona.json": of_persona,
    "rl.json": of_rl,
    "lora.json": of_lora,
    "engine.json": of_engine,
    "quality.json": of_quality,
}


def card_of(name: str) -> str:
    gpu = find_gpu(name)
    assert gpu is not None, f"{name} is in no table of cards"
    return gpu.name


def _load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


if __name__ == "__main__":
    sys.exit(main())
