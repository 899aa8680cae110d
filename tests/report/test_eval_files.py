"""Results of `homing eval --out` in the report of the run that they belong to."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from homing.errors import UsageError
from homing.report import Report, render_markdown
from homing.report.collect import add_evals
from homing.report.report_data import Kept, Phase, Validation

SCORE = {"name": "bits_per_byte", "value": 1.25, "low": 1.2, "high": 1.3, "num_units": 38}
DOCUMENT: dict[str, Any] = {
    "schema": "homing.eval/1",
    "models": [{"phase": "pretrain", "step": 1200, "files": {"model.safetensors": "a" * 64}}],
    "results": [
        [
            {
                "name": "held-out text",
                "scores": [SCORE, {**SCORE, "value": None, "low": None, "high": None}],
                "counts": {"documents": 7, "tokens": 18_526},
            }
        ]
    ],
}


def report(sha256: str = "a" * 64) -> Report:
    kept = Kept("models/moss", "pretrain", 1200, 1, {"model.safetensors": sha256})
    return Report("moss-1", "moss", "done", "", True, True, 0.0, "0.1.0", kept=[kept])


def written(tmp_path: Path, document: object) -> Path:
    path = tmp_path / "evals.json"
    path.write_text(json.dumps(document))
    return path


def test_figures_of_the_runs_own_weights_are_shown_with_their_intervals(tmp_path: Path) -> None:
    page = render_markdown(add_evals(report(), written(tmp_path, DOCUMENT)))
    assert "| pretrain 1,200 | held-out text | 18,526 | bits_per_byte | 1.2500 | 1.2000 to 1.3000 | 38 |" in page
    assert "| not finite |  | 38 |" in page


def test_two_held_out_figures_of_one_checkpoint_are_distinguished(tmp_path: Path) -> None:
    last = Validation(1200, 0.9, 1.27)
    phase = Phase("pretrain", num_steps=1200, step=1200, eval_tokens=16_000, validations=[last], best=last, last=last)
    page = render_markdown(dataclasses.replace(add_evals(report(), written(tmp_path, DOCUMENT)), phases=[phase]))
    went, evals = page.index("## Training"), page.index("## Evaluation")
    assert went < page.index("about 16,000 held-out tokens") < evals < page.index("on the tokens in the table")
    alone = render_markdown(add_evals(report(), written(tmp_path, DOCUMENT)))
    assert "on the tokens in the table" not in alone, "there is no other figure to distinguish it from"


def test_of_a_comparison_only_this_runs_model_is_shown(tmp_path: Path) -> None:
    both = copy.deepcopy(DOCUMENT)
    both["models"].append({"phase": "sft", "step": 5, "files": {"model.safetensors": "c" * 64}})
    both["results"].append(both["results"][0])
    assert {each.phase for each in add_evals(report(), written(tmp_path, both)).evals} == {"pretrain"}


def test_figures_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no results for moss-1"):
        add_evals(report("d" * 64), written(tmp_path, DOCUMENT))


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"schema": "homing.status/1"},
        {"schema": "homing.eval/1"},
        {**DOCUMENT, "results": []},
        {**DOCUMENT, "models": [{"files": None}]},
        {**DOCUMENT, "results": [[{"name": "x", "scores": [{**SCORE, "value": "much"}]}]]},
    ],
)
def test_what_is_no_evaluation_is_said_to_be_none(tmp_path: Path, document: object) -> None:
    with pytest.raises(UsageError, match="is not a result file from homing eval"):
        add_evals(report(), written(tmp_path, document))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"evals\.json cannot be read"):
        add_evals(report(), tmp_path / "evals.json")
