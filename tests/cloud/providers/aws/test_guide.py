"""The instance guide: computed from what training takes on a card, and the page that shows it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import homing
from homing.cloud.providers.aws.offers import TYPES, guide
from homing.config.load import load_run
from homing.gpus import GPUS

ROOT = Path(__file__).parents[4]
PRESETS = Path(homing.__file__).parent / "presets"


def test_every_family_of_the_guide_is_there_with_a_card_that_we_know() -> None:
    assert {name.partition(".")[0] for name in TYPES} >= {"g4dn", "g5", "g6", "p3", "p4d", "p5"}
    assert all(card in GPUS for card, *_ in TYPES.values())


@pytest.mark.acceptance(144)
def test_a_larger_model_fits_fewer_types_and_rates_carry_their_date() -> None:
    small, large = (guide(load_run(str(PRESETS / f"{name}.yaml")).run) for name in ("gpt-124m", "2b"))
    assert all(row.is_fitting for row in small)
    fitting = [row.type for row in large if row.is_fitting]
    assert "g4dn.xlarge" not in fitting
    assert "p5.4xlarge" in fitting
    assert {row.price.date for row in small if row.price is not None} == {"2026-08-22"}


@pytest.mark.acceptance(58, 64, 144)
def test_seven_billion_fit_the_smallest_type_by_four_bits_and_not_without() -> None:
    table = runpy.run_path(str(ROOT / "docs/make_aws_guide.py"))["table"]()
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    rows = {line[0]: dict(zip(head, line, strict=True)) for line in lines}
    for name in ("g4dn.xlarge", "g4dn.2xlarge", "p3.2xlarge", "p3.8xlarge"):
        assert (rows[name]["7B lora"], rows[name]["7B qlora"]) == ("no", "2")
    assert rows["g5.xlarge"]["7B lora"] == "4"


@pytest.mark.acceptance(64, 144)
def test_the_table_on_the_page_is_the_computed_one() -> None:
    table = runpy.run_path(str(ROOT / "docs/make_aws_guide.py"))["table"]()
    assert table in (ROOT / "docs/clouds/aws.md").read_text(encoding="utf-8"), "python docs/make_aws_guide.py"
