"""Writes the table of docs/aws.md: which EC2 type holds which preset.

`python docs/make_aws_guide.py`, after a change of presets, memory figures or rates; a test compares.
"""

from __future__ import annotations

import re
from pathlib import Path

import homing
from homing.cloud.providers.aws_guide import TYPES, guide
from homing.config import load_run

PAGE = Path(__file__).parent / "aws.md"
PRESETS = ("gpt-124m", "1b", "2b", "4b")
_TABLE = re.compile(r"\| type \| card .*?(?=\n\n)", re.DOTALL)


def table() -> str:
    folder = Path(homing.__file__).parent / "presets"
    columns = {name: guide(load_run(str(folder / f"{name}.yaml")).run) for name in PRESETS}
    lines = [
        f"| type | card | vCPUs | memory | rate | {' | '.join(PRESETS)} |",
        "|---|---|---|---|---|" + "---|" * len(PRESETS),
    ]
    for number, name in enumerate(TYPES):
        rows = [column[number] for column in columns.values()]
        card = f"{rows[0].num_gpus}x {rows[0].card}"
        rate = f"${rows[0].price.usd_per_hour}/h" if rows[0].price else "ask"
        fits = " | ".join(str(row.fit.most_rows) if row.is_fitting else "no" for row in rows)
        lines.append(f"| {name} | {card} | {rows[0].num_cores} | {rows[0].memory_gib} GiB | {rate} | {fits} |")
    return "\n".join(lines)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLE.sub(table(), text), encoding="utf-8")


if __name__ == "__main__":
    main()
