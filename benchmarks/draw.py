"""The picture and the tables of docs/guides/families.md, and the card's figures in the README, from what was measured.

    python benchmarks/draw.py            after benchmarks/gpu/quality.py has left new rows
    python benchmarks/draw.py --check    exits 1 if they are not what it would write

    results/quality.json      by time    -> docs/guides/quality.svg, and a table for each number of seconds
    results/peer_sweep.json   by batch   -> whether a peer ran at its best batch, said below the table
    results/sweep.json        by tokens  -> the best of each family, where both learned from the same tokens
    results/engine.json       speed      -> the README's rows with transformers

Compares only rows with the same seconds, GPU and text. For several seeds it shows the mean and the range. A peer's
settings are next to its figure, the README shows the best of its rows, and a sentence says so if its best settings were
not searched for. Every figure comes from the result files.
"""

from __future__ import annotations

import bisect
import json
import math
import statistics
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE, PICTURE = ROOT / "docs/guides/families.md", ROOT / "docs/guides/quality.svg"
README = ROOT / "README.md"
BEGIN, BEGIN_README, END = "<!-- figures: quality -->", "<!-- figures: card -->", "<!-- end of figures -->"

Row = dict[str, Any]
Group = dict[str, list[Row]]  # recipe -> its seeds
Where = tuple[float, str, int]  # seconds or tokens that were asked for, card, tokens of the text

WIDTH, HEIGHT = 760, 360  # of one panel
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 44, 50  # around it
COLOURS = ("#0077bb", "#cc3311", "#666666", "#009988", "#ee7733", "#aa3377", "#33bbee", "#999933")
EARLY = 0.08  # of the seconds: how much the loss falls before says nothing, and would press all else flat
NATS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 10)  # that a line is drawn for
GRID = 100  # points of a mean
MOST_CHANGES = 2  # of a recipe that are named in the picture
PEERS = {"nanochat": 2**19}  # programs of others, with the batch that they take by default at this size
# What rows of transformers ran with that do not say it themselves (benchmarks/engine.py).
TRANSFORMERS = "torch.compile (default mode), SDPA, bf16 autocast, fused AdamW and as many rows at a time as homing"


def main() -> int:
    wanted = {
        PICTURE: draw(read("quality")),
        PAGE: with_figures(PAGE.read_text(encoding="utf-8"), BEGIN, figures()),
        README: with_figures(README.read_text(encoding="utf-8"), BEGIN_README, in_short()),
    }
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
        print(f"FAIL not up to date: {', '.join(stale)}" if stale else "PASS picture and tables are up to date")
        return 1 if stale else 0
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    return 0


def read(name: str) -> list[Row]:
    path = RESULTS / f"{name}.json"
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["figures"]["rows"] if path.exists() else []
    return rows


def grouped(rows: Iterable[Row], asked: str) -> dict[Where, Group]:
    """What may be compared, the longest first; in it by recipe, the best first."""
    found: dict[Where, Group] = {}
    for row in sorted(rows, key=lambda row: (-row[asked], row["device"], row["corpus_tokens"], row["seed"])):
        if row[asked]:
            where = (row[asked], row["device"], row["corpus_tokens"])
            found.setdefault(where, {}).setdefault(row["run"], []).append(row)
    return {where: dict(sorted(group.items(), key=lambda pair: bits(pair[1]))) for where, group in found.items()}


def bits(seeds: list[Row]) -> float:
    return statistics.fmean(row["val_bits_per_byte"] for row in seeds)


# -- the page ----------------------------------------------------------------------------------------------------------


def with_figures(page: str, begin: str, text: str) -> str:
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text}\n{END}{rest.split(END, 1)[1]}"


def in_short() -> str:
    """For who decides in two minutes: the longest time that was measured, as homing and its peers train themselves."""
    lines: list[str] = []
    for where, group in list(grouped(read("quality"), "asked_s").items())[:1]:
        lines += [
            f"| {where[0]:g} s of one {where[1]}, the same text | bits per byte | seeds | tokens a step | tok/s |",
            "|---|--:|--:|--:|--:|",
        ]
        for name, seeds in shown_in_short(group).items():
            rate = round(statistics.fmean(row["tokens_per_s"] for row in seeds))
            lines.append(f"| {recipe(name, seeds)} | {spread(seeds)} | {len(seeds)} | {batch_of(seeds)} | {rate:,} |")
        lines += ["", *(line for note in about_peers(where, group) for line in (note, ""))]
    compared = [row for row in read_speeds() if row.get("peer_tokens_per_s")]
    if compared:
        lines += ["| tok/s in one process | homing | transformers | |", "|---|--:|--:|--:|"]
    for row in sorted(compared, key=lambda row: row["tokens_per_s"]):
        shape, own, reference = row["shape"], row["tokens_per_s"], row["peer_tokens_per_s"]
        what = f"{shape['num_layers']} x {shape['width']}, vocabulary {shape['vocab_size']:,}, T {shape['context']}"
        lines.append(f"| {what} | {own:,} | {reference:,} | {own / reference:.2f}x |")
    if compared:
        lines += ["", about_transformers(compared), ""]
    return "\n".join(lines)


def shown_in_short(group: Group) -> Group:
    """Our families as they are, and of each peer the one row that did best: never a worse one because of its name."""
    best = {peer: next(name for name in group if name.split()[0] == peer) for peer in peers_in(group)}
    ours = {name for name in group if " " not in name and name not in PEERS}
    return {name: seeds for name, seeds in group.items() if name in ours or name in best.values()}


def peers_in(group: Group) -> list[str]:
    return sorted({name.split()[0] for name in group} & set(PEERS))


def recipe(name: str, seeds: list[Row]) -> str:
    peer = name.split()[0]
    if peer not in PEERS:
        return f"`{name}`"
    is_default = seeds[0]["batch_tokens"] == PEERS[peer]
    return f"`{peer}`, " + ("its default batch" if is_default else "another batch than its default")


def batch_of(seeds: list[Row]) -> str:
    return f"{seeds[0]['batch_tokens']:,}"


def about_peers(where: Where, group: Group) -> list[str]:
    """Whether a peer ran at its best: a figure at other settings says nothing about who is better."""
    said = []
    for peer in peers_in(group):
        shown = next(seeds for name, seeds in group.items() if name.split()[0] == peer)
        tried = [row for row in read("peer_sweep") if comparable(row, where) and row["run"].split()[0] == peer]
        by_batch = {row["batch_tokens"]: row["val_bits_per_byte"] for row in tried}
        best = min(by_batch, key=lambda batch: by_batch[batch], default=None)
        if best != shown[0]["batch_tokens"]:
            how = "its default for this size" if shown[0]["batch_tokens"] == PEERS[peer] else "a batch that was given"
            why = (
                f"We did not search for {peer}'s best batch size"
                if best is None
                else f"In a sweep, {best:,} was better"
            )
            said.append(
                f"{peer} ran with {batch_of(shown)} tokens a step, {how}. {why}, so this table does not say"
                f" whether homing or {peer} learns faster: a fair comparison is still to be measured."
            )
            continue
        seeds = sorted({row["seed"] for row in tried})
        assert not {row["seed"] for row in shown} & set(seeds), "the seed that chose a batch is reported"
        found = ", ".join(f"{batch:,}: {bits:.4f}" for batch, bits in sorted(by_batch.items()))
        is_at_end = best in (min(by_batch), max(by_batch))
        said.append(
            f"The batch of {peer} is the best of {len(by_batch)} ({found}), chosen by seed"
            f" {', '.join(map(str, seeds))}, which is not in the table"
            + ("; it is at the end of what was tried, so a better one may exist." if is_at_end else ".")
        )
    return said


def comparable(row: Row, where: Where) -> bool:
    return (row["asked_s"], row["device"], row["corpus_tokens"]) == where


def about_transformers(rows: list[Row]) -> str:
    """With which settings it ran, and whether others were tried."""
    settings = sorted({row.get("peer_settings", TRANSFORMERS) for row in rows})
    is_swept = all(len(row.get("peer_tried", ())) > 1 for row in rows)
    fastest = "Of the settings that we tried for transformers, these are the fastest."
    only = "We tried no other settings for transformers, so these may not be the fastest."
    return f"transformers ran with {'; '.join(settings)}. {fastest if is_swept else only}"


def read_speeds() -> list[Row]:
    path = RESULTS / "engine.json"
    return list(json.loads(path.read_text(encoding="utf-8"))["figures"]["speed"].values()) if path.exists() else []


def figures() -> str:
    by_time = [
        section for where, group in grouped(read("quality"), "asked_s").items() for section in timed(where, group)
    ]
    return "\n".join([*by_time, *by_tokens(read("sweep"))])


def timed(where: Where, group: Group) -> list[str]:
    seconds, card, text = where
    lines = [
        f"**{seconds:g} seconds of one {card}**, on a text of {text:,} tokens:",
        "",
        "| recipe | bits per byte | seeds | steps | tokens a step | tok/s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, seeds in group.items():
        steps, rate = (round(statistics.fmean(row[key] for row in seeds)) for key in ("steps", "tokens_per_s"))
        title = recipe(name, seeds)
        lines.append(f"| {title} | {spread(seeds)} | {len(seeds)} | {steps:,} | {batch_of(seeds)} | {rate:,} |")
    return [*lines, "", *(line for note in [*about_peers(where, group), side_by_side(group)] for line in (note, ""))]


def spread(seeds: list[Row]) -> str:
    found = [row["val_bits_per_byte"] for row in seeds]
    more = f" ({min(found):.4f} to {max(found):.4f})" if len(found) > 1 else ""
    return f"{bits(seeds):.4f}{more}"


def side_by_side(group: Group) -> str:
    """The one sentence that a choice of family hangs on, or that there is none."""
    missing = [f"`{name}`" for name in ("stock", "swift") if name not in group]
    if missing:
        whom, were = " and ".join(missing), "was" if len(missing) == 1 else "were"
        return f"{whom}, as homing itself would train with that family, {were} not measured for this number of seconds."
    stock, swift = bits(group["stock"]), bits(group["swift"])
    word = "fewer" if swift < stock else "more"
    percent = f"{abs(1 - swift / stock):.1%}"
    return f"`swift` needs {percent} {word} bits than `stock` for the same text after the same training time."


def by_tokens(rows: list[Row]) -> list[str]:
    lines = []
    for (num_tokens, _, text), group in grouped(rows, "asked_tokens").items():
        tries: dict[str, list[float]] = {}
        for name, seeds in group.items():
            tries.setdefault(name.split()[0], []).append(bits(seeds))
        for stock in sorted(name for name in tries if name.startswith("stock")):
            both = [stock, stock.replace("stock", "swift")]
            if both[1] in tries:
                messages = " | ".join(f"`{name}`: {min(tries[name]):.4f}, best of {len(tries[name])}" for name in both)
                lines.append(f"| {num_tokens:,} | {text:,} | {messages} |")
    if not lines:
        return []
    said = "**By tokens instead of time**: bits per byte of each family, with the best settings that we tried:"
    return [said, "", "| tokens | of a text of | `stock` | `swift` |", "|--:|--:|---|---|", *lines, ""]


# -- the picture -------------------------------------------------------------------------------------------------------


def draw(rows: list[Row]) -> str:
    groups = grouped(rows, "asked_s")
    named = sorted({name for group in groups.values() for name in group})
    colour = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(named)}
    height = HEIGHT * max(1, len(groups))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="sans-serif" font-size="13" fill="#222">',
        "<title>Loss in training over seconds, by recipe</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for number, (where, group) in enumerate(groups.items()):
        inner = panel(where, group, colour, clip=f"inside-{number}")
        parts += [f'<g transform="translate(0 {number * HEIGHT})">', *inner, "</g>"]
    return "\n".join([*parts, "</svg>", ""])


class Scale:
    """Seconds and nats to places in a panel; nats by their ratios, for the last tenths are what took the time."""

    def __init__(self, group: Group) -> None:
        curves = [row["curve"] for seeds in group.values() for row in seeds]
        self.seconds = max(curve[-1][1] for curve in curves)
        shown = [loss for curve in curves for _, at, loss in curve if at >= EARLY * self.seconds]
        self.low, self.high = math.floor(4 * min(shown)) / 4, math.ceil(2 * max(shown)) / 2

    def x(self, seconds: float) -> float:
        return round(LEFT + seconds / self.seconds * (WIDTH - LEFT - RIGHT), 1)

    def y(self, loss: float) -> float:
        share = math.log(loss / self.low) / math.log(self.high / self.low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def panel(where: Where, group: Group, colour: dict[str, str], *, clip: str) -> list[str]:
    scale, (seconds, card, _) = Scale(group), where
    inner = f'x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"'
    title = escape(f"{seconds:g} seconds of one {card}")
    parts = [f'<clipPath id="{clip}"><rect {inner}/></clipPath>', *axes(scale)]
    parts.append(f'<text x="{LEFT}" y="26" font-size="15" font-weight="bold">{title}</text>')
    parts.append(f'<g clip-path="url(#{clip})" fill="none" stroke-width="2">')
    for name, seeds in group.items():
        parts += curves(scale, seeds, colour[name])
    parts.append("</g>")
    for number, (name, seeds) in enumerate(group.items()):
        y = TOP + 20 + 20 * number
        parts.append(f'<path d="M{WIDTH - 400} {y - 4}h24" stroke="{colour[name]}" stroke-width="3"/>')
        parts.append(f'<text x="{WIDTH - 370}" y="{y}">{escape(label(name, seeds))}</text>')
    return parts


def label(name: str, seeds: list[Row]) -> str:
    first, *changes = name.split()
    messages = name if len(changes) <= MOST_CHANGES else f"{first}, {len(changes)} settings changed"
    if first in PEERS:
        messages = f"{first} at {batch_of(seeds)}"
    more = f", {len(seeds)} seeds" if len(seeds) > 1 else ""
    return f"{messages}: {bits(seeds):.4f} bits per byte{more}"


def axes(scale: Scale) -> list[str]:
    parts = []
    step = tick(scale.seconds / 6)
    for number in range(int(scale.seconds / step) + 1):
        x = scale.x(number * step)
        parts.append(f'<path d="M{x} {TOP}V{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{number * step:g}</text>')
    for loss in (nats for nats in NATS if scale.low <= nats <= scale.high):
        y = scale.y(loss)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:g}" text-anchor="end">{loss:g}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" stroke="#222" fill="none"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:g}" y="{HEIGHT - 12}" text-anchor="middle">seconds of training</text>')
    across = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="translate(18 {across:g}) rotate(-90)" text-anchor="middle"'
    return [*parts, f"<text {turned}>training loss, nats per token</text>"]


def tick(about: float) -> float:
    """A round number near it."""
    power = 10.0 ** math.floor(math.log10(about))
    return min((power * nice for nice in (1, 2, 5, 10)), key=lambda nice: abs(math.log(nice / about)))


def curves(scale: Scale, seeds: list[Row], colour: str) -> list[str]:
    """Their mean; of several also from where to where they go."""
    if len(seeds) == 1:
        points = [(at, loss) for _, at, loss in seeds[0]["curve"]]
        return [f'<path d="{line(scale, points)}" stroke="{colour}"/>']
    first, last = (pick(row["curve"][end][1] for row in seeds) for pick, end in ((max, 0), (min, -1)))
    grid = [first + (last - first) * number / GRID for number in range(GRID + 1)]
    at_each = [[at_time(row["curve"], seconds) for row in seeds] for seconds in grid]
    band = [*zip(grid, map(max, at_each), strict=True), *reversed([*zip(grid, map(min, at_each), strict=True)])]
    mean = [*zip(grid, map(statistics.fmean, at_each), strict=True)]
    return [
        f'<path d="{line(scale, band)}Z" fill="{colour}" fill-opacity="0.2" stroke="none"/>',
        f'<path d="{line(scale, mean)}" stroke="{colour}"/>',
    ]


def at_time(curve: list[list[float]], seconds: float) -> float:
    """The loss between the two points that are next to it."""
    after = min(max(1, bisect.bisect_left([at for _, at, _ in curve], seconds)), len(curve) - 1)
    (_, t0, y0), (_, t1, y1) = curve[after - 1 : after + 1]
    return y0 + (y1 - y0) * (seconds - t0) / (t1 - t0)


def line(scale: Scale, points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{scale.x(seconds)} {scale.y(loss)}" for seconds, loss in points)


if __name__ == "__main__":
    sys.exit(main())
