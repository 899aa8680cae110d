"""Writes the worked totals of docs/guides/cost.md: what `homing plan` says of some presets, without an account.

python docs/make_cost_page.py          writes them
python docs/make_cost_page.py --check  exits 1 if they are not what it would write
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "guides/cost.md"
BEGIN, END = "<!-- figures: plan -->", "<!-- end of figures -->"
# Preset, what is changed, and in words how long it trains.
RUNS = (
    ("shakespeare", [], "1,000 steps of 8,192 tokens"),
    ("goethe-75m", ["phases.0.steps=7751"], "four passes over 254M tokens"),
    ("gpt-124m", [], "2.5B tokens"),
    ("1b", ["phases.0.steps=2000"], "2,000 steps of 262,144 tokens, a first try"),
)
CARDS = ("L4", "RTX4090", "A100", "H100", "H200", "B200")


def main() -> int:
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    page = head + BEGIN + "\n" + tables() + END + rest.split(END)[1]
    if "--check" in sys.argv:
        return 0 if PAGE.read_text(encoding="utf-8") == page else 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


def tables() -> str:
    lines = []
    for preset, changes, length in RUNS:
        cards = {card["card"]: card for card in planned(preset, changes)["cards"]}
        dates = {card["rate_text"] for card in cards.values()}
        assert len(dates) == 1, dates
        lines += [
            f"**`{preset}`, {length}**",
            "",
            f"| 1x | $ an hour ({dates.pop()}) | tokens a second | time | dollars | speed |",
            "|---|--:|--:|--:|--:|---|",
            *(row(cards[name]) if name in cards else f"| {name} | | | does not fit | | |" for name in CARDS),
            "",
        ]
    return "\n".join(lines)


def row(card: dict[str, Any]) -> str:
    hours = card["seconds"] / 3600
    time = f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min"
    speed = f"{float(format(card['tokens_per_s'], '.3g')):,.0f}"
    rate, dollars = float(card["rate_usd_per_hour"]), float(card["cost_usd"])
    return f"| {card['card']} | {rate:.2f} | {speed} | {time} | {dollars:,.2f} | {card['speed_source']} |"


def planned(preset: str, changes: list[str]) -> dict[str, Any]:
    """In an empty home without keys, where plan goes by list prices."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        environment |= {"HOME": folder, "HOMING_HOME": f"{folder}/.homing"}
        said = ""
        for words in (
            ["new", "run", "--from", preset],
            [
                "plan",
                "run",
                *(word for each in ["cloud.providers=runpod", *changes] for word in ("--set", each)),
                "--json",
            ],
        ):
            command = [sys.executable, "-m", "homing.cli", *words]
            said = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, check=True
            ).stdout
        found: dict[str, Any] = json.loads(said)
        return found


if __name__ == "__main__":
    sys.exit(main())
