"""Writes the table of docs/clouds/aws.md: which EC2 type holds which preset, and which adapters on 7B weights.

`python docs/make_aws_guide.py`, after a change of presets, memory figures or rates; a test compares.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import homing
from homing.cloud.providers.aws.offers import TYPES, guide
from homing.config.load import load_run
from homing.wire.run_json import Lora, Model, Run

PAGE = Path(__file__).parent / "clouds/aws.md"
PRESETS = ("gpt-124m", "1b", "2b", "4b")
# By the config.json of Qwen2.5-7B; rows of 2,048 tokens.
QWEN_7B = Model("stock", "qwen2", 28, 3584, 28, 4, 128, 18944, 2048, 152064, False, rope_base=1e6)
_TABLE = re.compile(r"\| type \| card .*?(?=\n\n)", re.DOTALL)


def table() -> str:
    folder = Path(homing.__file__).parent / "presets"
    runs = {name: load_run(str(folder / f"{name}.yaml")).run for name in PRESETS}
    runs |= {f"7B {method}": on_seven_billion(runs[PRESETS[0]], method) for method in ("lora", "qlora")}
    columns = {name: guide(run) for name, run in runs.items()}
    lines = [
        f"| type | card | vCPUs | memory | rate | {' | '.join(columns)} |",
        "|---|---|---|---|---|" + "---|" * len(columns),
    ]
    for number, name in enumerate(TYPES):
        rows = [column[number] for column in columns.values()]
        card = f"{rows[0].num_gpus}x {rows[0].card}"
        rate = f"${rows[0].price.usd_per_hour}/h" if rows[0].price else "ask"
        fits = " | ".join(str(row.fit.most_rows) if row.is_fitting else "no" for row in rows)
        lines.append(f"| {name} | {card} | {rows[0].num_cores} | {rows[0].memory_gib} GiB | {rate} | {fits} |")
    return "\n".join(lines)


def on_seven_billion(run: Run, method: str) -> Run:
    """Adapters on every matrix, each block computed again in backward."""
    phase = run.phases[0]
    changed = dataclasses.replace(
        phase, method=method, lora=Lora(targets=["all"]), recompute="all", micro_batch=0,
        batch_tokens=16 * QWEN_7B.context, optimizer=dataclasses.replace(phase.optimizer, kind="adamw"),
    )  # fmt: skip
    return dataclasses.replace(run, model=QWEN_7B, phases=[changed])


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLE.sub(table(), text), encoding="utf-8")


if __name__ == "__main__":
    main()
