"""The remaining time and dollars: the trainer's count for its phase, the plan for the phases after it."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.rig import make_draft

from homing.cloud.contact.heartbeats import RunReports
from homing.cloud.home import Home
from homing.cloud.launch.run_documents import write_home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.reconcile.run_status import Status
from homing.cloud.watch.progress import Ahead, Planned, ahead, planned, progress_line
from homing.wire.control_files import Heartbeat

RUN = RunRow("moss-1", "moss", "running", 0.0, "file:/s", "", spend_limit_usd="12.00")
BEAT = Heartbeat(0.0, "m", 1, "training", 0.0, "36", "1", phase="mid", step=40, num_steps=100, loss=3.2141, eta_s=60.0)
LINE = LedgerLine("m", RUN.id, RUN.name, 1, "local", "o", "36", None, 0.0)  # a cent a second
PLAN = Planned(Decimal(30), [("boot and start", 7.0), ("pretrain", 50.0), ("mid", 90.0), ("rl", 30.0), ("home", 10.0)])
STATUS = Status(RUN, [LINE], RunReports(BEAT, None), Decimal("1.83"), 0.0, phases=("pretrain", "mid", "rl"))


@pytest.mark.acceptance(62)
def test_the_rest_is_the_trainers_eta_plus_the_planned_later_phases() -> None:
    assert ahead(STATUS, BEAT, PLAN) == Ahead(90.0, end_usd=Decimal("2.83"))  # 60 + 30 s, and 10 s home
    last = dataclasses.replace(BEAT, phase="rl")
    assert ahead(STATUS, last, PLAN) == Ahead(60.0, end_usd=Decimal("2.53"))


def test_without_a_plan_the_eta_covers_and_names_this_phase_only() -> None:
    assert ahead(STATUS, BEAT, None) == Ahead(60.0, is_whole=False)
    assert ahead(STATUS, dataclasses.replace(BEAT, phase="rl"), None) == Ahead(60.0)
    assert progress_line(STATUS, BEAT).endswith(" | $1.83 of $12.00 | eta 1m00s for this phase")


@pytest.mark.acceptance(62)
def test_the_line_shows_dollars_so_far_and_at_the_end() -> None:
    said = progress_line(STATUS, BEAT, None, PLAN)
    assert said == "mid 2/3 | step 40/100 | loss 3.214 | $1.83 of $12.00, about $2.83 at the end | eta 1m30s"
    tight = dataclasses.replace(STATUS, run=dataclasses.replace(RUN, spend_limit_usd="2.00"))
    assert "| $1.83 of $2.00, about $2.83 to finish, over the limit |" in progress_line(tight, BEAT, None, PLAN)


@pytest.mark.parametrize("state", ["fetching", "pushing", "ending"])
def test_the_line_shows_the_state_and_no_eta_while_the_run_does_not_train(state: str) -> None:
    beat = dataclasses.replace(BEAT, state=state)
    assert ahead(STATUS, beat, PLAN) is None
    assert progress_line(STATUS, beat, None, PLAN).endswith(f" | $1.83 of $12.00 | {state}")
    over = dataclasses.replace(STATUS, run=dataclasses.replace(RUN, state="done"))
    assert progress_line(over, beat, None, PLAN).endswith(" | $1.83 of $12.00")


def test_a_finished_or_unmeasured_run_has_no_estimate() -> None:
    over = dataclasses.replace(STATUS, run=dataclasses.replace(RUN, state="stopped"))
    assert ahead(over, BEAT, PLAN) is None
    assert ahead(STATUS, dataclasses.replace(BEAT, eta_s=None), PLAN) is None
    assert ahead(STATUS, None, PLAN) is None


def test_the_plan_is_of_the_rented_offer_and_absent_without_launch_documents(home: Home, tmp_path: Path) -> None:
    ready = make_draft(home, tmp_path)
    row = dataclasses.replace(RUN, id=ready.run.id)
    assert planned(home, row) is None
    write_home(ready, home)
    found = planned(home, row)
    assert found is not None
    assert found.rate_usd_per_hour == ready.order.offer.rate_usd_per_hour
    kinds = [phase.kind for phase in ready.run.phases]
    assert [name for name, _ in found.parts] == ["boot and start", *kinds, "home"]
