"""The journal: one line per step, no NaN, no torn line believed, a full disk survived."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest

from homing.lm.train import metrics
from homing.lm.train.metrics import Journal, finite, progress_line
from homing.wire import codec, file_names
from homing.wire.event_lines import Metric


def metric(step: int, phase: str = "pretrain", **values: Any) -> Metric:
    return Metric(t=1.0, phase=phase, step=step, num_steps=20000, num_tokens=step, **{"loss": 3.2142, **values})


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


@pytest.mark.acceptance("X14")
def test_the_line_has_its_fixed_order() -> None:
    line = progress_line(metric(1200, lr=3e-4, tokens_per_s=412_000.0, mfu=0.41, eta_s=7800.0))
    assert line == "step 1,200/20,000 | loss 3.214 | lr 3.0e-04 | 412k tok/s | mfu 41% | eta 2h10m"


def test_the_line_says_which_of_several_phases_it_is() -> None:
    assert progress_line(metric(3, "sft"), ["pretrain", "sft", "rl"]).startswith("sft 2/3 | step 3/20,000 | ")
    assert progress_line(metric(3, "sft"), ["sft"]).startswith("step 3/20,000 | ")


def test_the_line_says_when_the_loss_is_no_number() -> None:
    assert "loss not finite" in progress_line(metric(3, loss=None))


def test_what_rl_lacks_of_a_pass_is_not_called_a_loss_on_text() -> None:
    assert "| val 0.972 |" in progress_line(metric(3, "sft", val_loss=0.9722, eta_s=1.0))
    assert "| missing reward 0.972 |" in progress_line(metric(3, "rl", val_loss=0.9722, eta_s=1.0))


def test_nan_and_infinity_become_none() -> None:
    assert [finite(value) for value in (float("nan"), float("inf"), 1.5, None)] == [None, None, 1.5, None]
    with pytest.raises(codec.WireError):
        codec.dumps(metric(1, loss=float("nan")))


def test_lines_past_the_checkpoint_are_cut_and_torn_ones_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path, say=lambda line: None)
    for step in range(1, 6):
        journal.metric(metric(step))
    journal.close()
    with open(tmp_path / file_names.METRICS, "a") as file:
        file.write('{"schema": "homing.metric/1", "t": 1.0, "pha')
    journal = Journal(tmp_path, say=lambda line: None)
    assert journal.cut_metrics(lambda m: m.step <= 3) == 3
    journal.metric(metric(4))
    journal.close()
    assert [line["step"] for line in read_lines(tmp_path / file_names.METRICS)] == [1, 2, 3, 4]


def test_a_torn_event_is_closed_before_the_next_is_written(tmp_path: Path) -> None:
    (tmp_path / file_names.EVENTS).write_text('{"half": ')
    journal = Journal(tmp_path, say=lambda line: None)
    journal.event("resumed", "Resumed.")
    journal.close()
    assert json.loads((tmp_path / file_names.EVENTS).read_text().splitlines()[-1])["kind"] == "resumed"


@pytest.mark.acceptance("X15")
def test_the_csv_says_what_the_jsonl_says_also_after_a_cut(tmp_path: Path) -> None:
    journal = Journal(tmp_path, say=lambda line: None, writes_csv=True)
    journal.cut_metrics(lambda m: True)
    for step in range(1, 5):
        journal.metric(metric(step, val_loss=2.0 if step == 2 else None))
    journal.cut_metrics(lambda m: m.step <= 2)
    journal.metric(metric(3))
    journal.close()
    rows = list(csv.DictReader((tmp_path / file_names.METRICS_CSV).read_text().splitlines()))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["val_loss"] for row in rows] == ["", "2.0", ""]
    assert len(read_lines(tmp_path / file_names.METRICS)) == 3


def test_a_log_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    journal = Journal(tmp_path, say=said.append)
    (tmp_path / file_names.EVENTS).mkdir()
    journal.event("a", "A.")
    journal.event("b", "B.")
    assert len([line for line in said if "cannot be written" in line]) == 1
    (tmp_path / file_names.EVENTS).rmdir()
    journal.event("c", "C.")
    journal.close()
    assert read_lines(tmp_path / file_names.EVENTS)[-1]["kind"] == "c"


@pytest.mark.acceptance("X23")
def test_a_long_wait_is_reported_repeatedly_but_not_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_STILL_EVERY_S", 0.01)
    monkeypatch.setattr(metrics, "_STILL_FOR_S", 0.1)
    journal = Journal(tmp_path, say=lambda line: None)
    with journal.still("compiling", "compiling", phase="pretrain"):
        time.sleep(0.4)
        count = len(read_lines(tmp_path / file_names.EVENTS))
        time.sleep(0.1)
        assert len(read_lines(tmp_path / file_names.EVENTS)) == count
    journal.close()
    assert 1 <= count <= 11


def test_the_line_has_the_first_figures_of_a_phases_own_and_all_of_its_evaluation() -> None:
    own = {name: 0.5 for name in ("reward", "pass_at_8", "length", "entropy", "truncated")} | {"val_reward": 0.25}
    line = progress_line(Metric(t=0.0, phase="rl", step=1, num_steps=2, num_tokens=3, loss=1.0, more=own))
    assert "reward 0.5 | pass_at_8 0.5 | length 0.5 | entropy 0.5 | val_reward 0.25" in line
    assert "truncated" not in line
