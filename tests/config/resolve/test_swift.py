"""The swift family in the run file: its own shape and rates, and what has no meaning in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from homing.config.estimate.params_and_flops import parameter_table
from homing.config.load import load_run
from homing.errors import RunFileError
from homing.lm.model.model_shape import count_params

RUN = """\
data: {text: [text.txt]}
tokenizer: {vocab_size: 512}
model: {depth: 4, family: swift}
phases: [{kind: pretrain, steps: 100}]
"""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("Some text to learn from.\n" * 100)
    (tmp_path / "quick.yaml").write_text(RUN.replace("text.txt", str(tmp_path / "text.txt")))
    return str(tmp_path / "quick.yaml")


def test_swift_has_a_shape_and_rates_of_its_own(run_file: str) -> None:
    run = load_run(run_file).run
    assert (run.model.family, run.model.arch, run.model.rope_base) == ("swift", "swift", 100_000.0)
    assert run.model.ffn_width == 4 * run.model.width
    optimizer = run.phases[0].optimizer
    assert (optimizer.momentum, optimizer.momentum_start, optimizer.variance_beta) == (0.95, 0.85, 0.9)
    assert optimizer.is_cautious
    assert optimizer.lr_scalar > optimizer.lr_head > 0


def test_what_a_person_sets_wins_over_what_swift_takes(run_file: str) -> None:
    optimizer = load_run(run_file, ["phases.0.momentum=0.9", "phases.0.cautious=false"]).run.phases[0].optimizer
    assert (optimizer.momentum, optimizer.is_cautious) == (0.9, False)


def test_the_plan_counts_swift_as_the_trainer_does(run_file: str) -> None:
    model = load_run(run_file).run.model
    assert sum(part.num_params for part in parameter_table(model)) == sum(count_params(model).values())


@pytest.mark.parametrize(("key", "words"), [("model.arch=llama", "family: swift"), ("model.tied=true", "never ties")])
def test_what_has_no_meaning_in_swift_is_refused(run_file: str, key: str, words: str) -> None:
    with pytest.raises(RunFileError, match=words):
        load_run(run_file, [key])
