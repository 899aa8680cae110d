"""Pages and figures that a program wrote are what it would write now."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from homing import errors
from homing.cli.verb_list import VERBS
from homing.config.schema.phase import Phase
from homing.wire import file_names

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.acceptance(143)
def test_the_page_of_the_run_file_is_what_the_schema_says() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs/make_run_file_page.py"), "--check"], check=False)
    assert done.returncode == 0, "python docs/make_run_file_page.py writes it anew"


@pytest.mark.slow
def test_the_page_of_the_command_line_is_what_the_verbs_say() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs/make_cli_page.py"), "--check"], check=False)
    assert done.returncode == 0, "python docs/make_cli_page.py writes it anew"


@pytest.mark.slow
def test_the_worked_totals_are_what_plan_says() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs/make_cost_page.py"), "--check"], check=False)
    assert done.returncode == 0, "python docs/make_cost_page.py writes them anew"


def test_the_citation_names_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_every_exit_code_has_its_line() -> None:
    page = (ROOT / "docs/reference/exit-codes.md").read_text(encoding="utf-8")
    codes = {each.exit_code for each in vars(errors).values() if isinstance(each, type) and hasattr(each, "exit_code")}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == codes | {0}


@pytest.mark.acceptance(143)
def test_the_table_of_phases_has_every_kind_and_no_other() -> None:
    table = (ROOT / "docs/guides/phases.md").read_text(encoding="utf-8").split("| kind |")[1].split("\n\n")[0]
    kinds = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert kinds == list(get_args(Phase.model_fields["kind"].annotation))
    head = [cell.strip() for cell in table.splitlines()[0].split("|")]
    assert {"for", "begins with", "learns from", "leaves"} <= set(head), "purpose, input and output of each"
    assert [kind for kind in kinds if f"| `{file_names.CHECKPOINTS}/{kind}` |" not in table] == []


@pytest.mark.acceptance(142)
def test_the_readme_lists_every_verb_and_no_other() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Commands")[1].split("##")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name.split()[0] for cell in cells for name in re.findall(r"`([a-z ]+)`", cell)}
    assert named - {"get", "put", "rm"} == set(VERBS)


def test_the_figures_in_the_readme_are_those_of_the_file_it_names() -> None:
    figures = json.loads((ROOT / "benchmarks/results/quickstart.json").read_text(encoding="utf-8"))["figures"]
    shown = (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- figures: quickstart -->")[1]
    shown = shown.split("<!-- end of figures -->")[0]
    for number in (
        f"{figures['val_loss']:.3f}",
        f"{figures['val_bits_per_byte']:.3f}",
        f"{figures['bigram_nats']:.3f}",
        f"{figures['seconds']:.0f} s",
        f"{figures['tokens']:,}",
    ):
        assert number in shown, f"{number} is in the file and not in the README"
    assert figures["sample"].strip().splitlines()[0] in shown


def test_the_figures_of_the_persona_and_its_answers_are_shown_as_they_came() -> None:
    figures = json.loads((ROOT / "benchmarks/results/persona.json").read_text(encoding="utf-8"))["figures"]
    shown = (ROOT / "docs/guides/phases.md").read_text(encoding="utf-8").split("<!-- figures: persona -->")[1]
    shown = shown.split("<!-- end of figures -->")[0]
    for kind, row in figures["phases"].items():
        held_out = [loss for _, loss in row["val_losses"]]
        numbers = f"{row['first_loss']:.3f}, {row['last_loss']:.3f} | {held_out[0]:.3f}, {held_out[-1]:.3f}"
        assert f"| {kind} | {row['steps']} | {row['tokens_per_s']:,} | {numbers} | {min(held_out):.3f} |" in shown
    answers = json.loads((ROOT / "benchmarks/results/chain.json").read_text(encoding="utf-8"))["figures"]["answers"]
    assert re.findall(r"^> .+\n(.+)$", shown, re.MULTILINE) == answers
