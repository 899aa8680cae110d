"""The picture and tables of docs/guides/families.md: what was measured, no more, and drawn anew when rows come."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "draw.py"


@pytest.fixture
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(run: str, seed: int, bits: float, **changes: Any) -> dict[str, Any]:
    curve = [[10 * n, 3.0 * n + 0.1 * seed, 2.0 + 4.0 / n + 0.1 * seed] for n in range(1, 101)]
    row = {
        "run": run, "seed": seed, "asked_s": 300.0, "asked_tokens": 0, "steps": 1000, "batch_tokens": 131072,
        "tokens_per_s": 500_000, "val_bits_per_byte": bits, "curve": curve, "device": "NVIDIA H200",
        "corpus_tokens": 2_000_000,
    }  # fmt: skip
    return row | changes


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_picture_and_tables_are_what_the_committed_results_make() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"python benchmarks/draw.py writes them anew: {done.stdout}{done.stderr}"


def test_a_new_row_is_noticed(draw: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, rows = tmp_path / "families.md", [row("stock", 0, 0.6)]
    page.write_text(f"# Page\n{draw.BEGIN}\nold\n{draw.END}\nafter\n")
    monkeypatch.setattr(draw, "PAGE", page)
    monkeypatch.setattr(draw, "PICTURE", tmp_path / "quality.svg")
    monkeypatch.setattr(draw, "README", readme := tmp_path / "README.md")
    readme.write_text(f"# Short\n{draw.BEGIN_README}\nold\n{draw.END}\nafter\n")
    monkeypatch.setattr(draw, "read", lambda name: rows if name == "quality" else [])
    monkeypatch.setattr(sys, "argv", ["draw.py", "--check"])
    assert draw.main() == 1, "nothing was drawn yet"
    monkeypatch.setattr(sys, "argv", ["draw.py"])
    assert draw.main() == 0
    assert page.read_text().startswith("# Page\n")
    assert page.read_text().endswith("\nafter\n")
    assert "old" not in page.read_text()
    monkeypatch.setattr(sys, "argv", ["draw.py", "--check"])
    assert draw.main() == 0
    assert "| `stock` | 0.6000 | 1 |" in readme.read_text()
    assert "| homing | transformers |" in readme.read_text()
    assert "old" not in readme.read_text()
    rows.append(row("stock", 1, 0.7))
    assert draw.main() == 1


def test_of_several_seeds_there_are_the_mean_and_how_far_they_go(draw: ModuleType) -> None:
    rows = [row("stock", 0, 0.60), row("stock", 1, 0.62), row("stock", 2, 0.64), row("swift", 0, 0.5)]
    ((where, group),) = draw.grouped(rows, "asked_s").items()
    table = "\n".join(draw.timed(where, group))
    assert "| `swift` | 0.5000 | 1 |" in table
    assert "| `stock` | 0.6200 (0.6000 to 0.6400) | 3 |" in table
    assert table.index("`swift` | 0.5") < table.index("`stock` | 0.6"), "the best comes first"
    assert "`swift` needs 19.4% fewer bits" in table
    svg = draw.draw(rows)
    assert svg.count("fill-opacity") == 1, "one band, of the recipe with several seeds"
    assert {"stock: 0.6200 bits per byte, 3 seeds", "swift: 0.5000 bits per byte"} <= set(texts(svg))
    assert {"seconds of training", "training loss, nats per token"} <= set(texts(svg))
    assert svg == draw.draw(list(reversed(rows))), "whatever order they came in"


def test_the_mean_is_between_the_best_and_the_worst_seed(draw: ModuleType) -> None:
    low, high = row("stock", 0, 0.6)["curve"], row("stock", 1, 0.6)["curve"]
    for seconds in (3.1, 10.0, 150.0, 300.0):
        assert draw.at_time(low, seconds) < draw.at_time(high, seconds) < draw.at_time(low, seconds) + 0.5
    assert draw.at_time(low, 6.0) == pytest.approx(4.0)
    assert draw.at_time(low, 4.5) == pytest.approx(5.0)


def test_only_what_had_the_same_time_card_and_text_is_compared(draw: ModuleType) -> None:
    rows = [
        row("stock", 0, 0.6),
        row("swift", 0, 0.5, asked_s=80.0),
        row("swift", 0, 0.5, device="NVIDIA L4"),
        row("swift", 0, 0.5, corpus_tokens=3_000_000),
    ]
    groups = draw.grouped(rows, "asked_s")
    assert len(groups) == 4
    for group in groups.values():
        assert "not measured" in draw.side_by_side(group)
    changed = [row("stock", 0, 0.6), row("swift lr=0.02", 0, 0.5)]
    ((_, group),) = draw.grouped(changed, "asked_s").items()
    assert draw.side_by_side(group).startswith("`swift`, as homing itself"), "one with other settings is another"


def test_by_tokens_shows_the_best_of_each_family_and_the_number_of_trials(draw: ModuleType) -> None:
    by_tokens = {"asked_s": 0.0, "asked_tokens": 1000}
    rows = [row(name, 0, bits, **by_tokens) for name, bits in (
        ("stock-6 lr=1", 0.9), ("stock-6 lr=2", 0.8), ("swift-6", 0.7), ("stock", 0.4)
    )]  # fmt: skip
    lines = draw.by_tokens(rows)
    assert lines[-2] == "| 1,000 | 2,000,000 | `stock-6`: 0.8000, best of 2 | `swift-6`: 0.7000, best of 1 |"
    assert len([line for line in lines if line.startswith("| 1,000")]) == 1
    assert draw.by_tokens([row("stock-6", 0, 0.9, **by_tokens)]) == []


def test_a_recipe_with_many_changes_has_a_short_name_and_escaped_characters(draw: ModuleType) -> None:
    svg = draw.draw([row("swift a=1 b=2 c=3", 0, 0.5), row("nanochat <&>", 0, 0.6)])
    assert "swift, 3 settings changed: 0.5000 bits per byte" in texts(svg)
    assert "nanochat at 131,072: 0.6000 bits per byte" in texts(svg), "a peer is never shown without its settings"
    assert "other <&>: 0.6000 bits per byte" in texts(draw.draw([row("other <&>", 0, 0.6)]))


# -- peers -------------------------------------------------------------------------------------------------------------


def drawn(
    draw: ModuleType, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], tried: list[dict[str, Any]]
) -> str:
    monkeypatch.setattr(draw, "read", lambda name: {"quality": rows, "peer_sweep": tried}.get(name, []))
    both = f"{draw.in_short()}\n{draw.figures()}"
    assert both.count("nanochat") >= 2
    return both


OURS = [row("swift", seed, 0.5) for seed in range(3)]


def peer(batch: int, seed: int, bits: float, *, name: str = "") -> dict[str, Any]:
    return row(name or f"nanochat batch={batch}", seed, bits, batch_tokens=batch)


def test_a_peer_without_a_sweep_shows_its_batch_and_the_missing_sweep(
    draw: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = drawn(draw, monkeypatch, [*OURS, peer(2**19, 0, 0.6, name="nanochat")], [])
    assert "| `nanochat`, its default batch | 0.6000 | 1 | 524,288 |" in page
    assert "We did not search for nanochat's best batch size, so this table does not say whether" in page
    assert page.count("a fair comparison is still to be measured") == 2, "in the README and on the page"


def test_of_a_peer_the_best_row_is_shown_in_short_whatever_it_is_called(
    draw: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*OURS, peer(2**19, 0, 0.6, name="nanochat"), peer(2**17, 0, 0.52)]
    monkeypatch.setattr(draw, "read", lambda name: rows if name == "quality" else [])
    short = draw.in_short()
    assert "| `nanochat`, another batch than its default | 0.5200 | 1 | 131,072 |" in short
    assert "0.6000" not in short


def test_a_peer_at_its_best_is_shown_with_the_sweep_that_chose_it(
    draw: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*OURS, *(peer(2**17, seed, 0.52) for seed in range(3))]
    tried = [peer(2**16, 100, 0.53), peer(2**17, 100, 0.52), peer(2**18, 100, 0.55)]
    page = drawn(draw, monkeypatch, rows, tried)
    assert "the best of 3 (65,536: 0.5300, 131,072: 0.5200, 262,144: 0.5500), chosen by seed 100, which is not" in page
    assert "fair comparison" not in page
    page = drawn(draw, monkeypatch, rows, tried[1:])
    assert "it is at the end of what was tried, so a better one may exist" in page
    page = drawn(draw, monkeypatch, rows, [*tried, peer(2**15, 100, 0.4)])
    assert "In a sweep, 32,768 was better, so this table does not say whether homing or nanochat" in page, (
        "not the one that is in the table"
    )
    elsewhere = [each | {"device": "NVIDIA L4"} for each in tried]
    assert "We did not search for nanochat's best batch size" in drawn(draw, monkeypatch, rows, elsewhere), (
        "another card is another matter"
    )
    with pytest.raises(AssertionError, match="the seed that chose a batch is reported"):
        drawn(draw, monkeypatch, rows, [each | {"seed": 0} for each in tried])


def test_the_transformers_row_names_its_settings_and_whether_others_were_tried(
    draw: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"num_layers": 12, "width": 768, "vocab_size": 50304, "context": 1024}
    plain = {"shape": shape, "tokens_per_s": 600, "peer_tokens_per_s": 400}
    monkeypatch.setattr(draw, "read", lambda name: [])
    monkeypatch.setattr(draw, "read_speeds", lambda: [plain])
    assert "We tried no other settings for transformers, so these may not be the fastest." in draw.in_short()
    tried = [{"rows": 32}, {"rows": 64}]
    monkeypatch.setattr(draw, "read_speeds", lambda: [plain | {"peer_settings": "mode x", "peer_tried": tried}])
    assert (
        "transformers ran with mode x. Of the settings that we tried for transformers, these are the fastest."
        in draw.in_short()
    )
