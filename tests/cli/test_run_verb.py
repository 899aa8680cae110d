"""One call of the command line: how it may be started, and what it adds to an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with

from homing.cli.run_verb import call
from homing.cli.verb_list import VERBS

cli = cli_with(steps=6)


def test_what_to_do_names_the_run_that_was_typed_with_its_changes(cli: Homing) -> None:
    Path("data/moss/manifest.json").write_text("")
    assert "prepare the data again: homing prep moss --set seed=3\n" in cli("plan", "moss", "--set", "seed=3").err
    assert "prepare the data again: homing prep runs/moss.yaml\n" in cli("plan", "runs/moss.yaml").err
    assert "prepare the data again: homing prep\n" in cli("plan").err, "the newest file was meant, and is again"
    assert "prepare the data again: homing prep --set seed=3\n" in cli("plan", "--set", "seed=3").err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "verb", "code", "said"),
    [
        (">&-", "explain seed", 0, ""),
        ("<&-", "launch moss --spend-limit 1", 2, "Confirmation required, but there is no terminal"),
    ],
)
def test_a_stream_that_is_closed_is_no_mistake_of_ours(
    cli: Homing, closed: str, verb: str, code: int, said: str
) -> None:
    line = f"{sys.executable} -m homing.cli {verb} {closed}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.regression("help-json")
@pytest.mark.parametrize("typed", [["--help", "--json"], ["--json", "--help"], ["--json"], ["-h", "--json"]])
def test_the_table_of_verbs_is_there_as_data(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(typed) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "homing.verbs/1"
    assert {verb: text for verbs in document["verbs"].values() for verb, text in verbs.items()} == VERBS
