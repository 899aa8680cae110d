"""When a guard must not relaunch: no person can approve it, or it would not help. See test_guard for the rest."""

from __future__ import annotations

import dataclasses
import hashlib
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.rig import make_draft, make_run
from tests.cloud.shop import offer

from homing.cloud.contact import action_log
from homing.cloud.destroy import destroy_run
from homing.cloud.guard import relaunch
from homing.cloud.guard.change_limit_or_stop import change_limit, propose
from homing.cloud.guard.guard_pass import guard_pass
from homing.cloud.guard.limits_and_destroys import limits_of
from homing.cloud.guard.relaunch import _refuse_dear
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.ledger.ledger import SILENT, LedgerLine
from homing.cloud.plan.plan import Plan
from homing.cloud.providers.base import Instance, Request
from homing.cloud.providers.local.provider import Local
from homing.cloud.watch.follow import watch
from homing.errors import EndedElsewhere, UsageError
from homing.wire.run_json import Limits, Run
from homing.world import World


def line(rate: str) -> LedgerLine:
    return LedgerLine("m", "r", "moss", 1, "shop", "h100", rate, "100.00", intent_at=0.0)


def test_a_guard_does_not_rent_at_a_much_higher_rate_unless_the_run_file_allows_it(tmp_path: Path) -> None:
    run, dear = make_run(tmp_path), offer(num_gpus=8, rate="33.60")
    with pytest.raises(UsageError, match=r"costs \$33.60/h") as caught:
        _refuse_dear(dear, run, [line("2.49")])
    assert "limits.rate" in caught.value.fix
    _refuse_dear(dear, dataclasses.replace(run, limits=Limits(rate_usd_per_hour="40.00")), [line("2.49")])
    _refuse_dear(dear, run, [line("35.00")])  # a person approved the earlier attempt at a similar rate
    _refuse_dear(offer(rate="3.29"), run, [line("2.49")])


@pytest.mark.parametrize(("usd", "time_s"), [("0.50", None), (None, 7200.0)])
def test_limits_changed_while_a_guard_looks_for_offers_apply_to_the_relaunch(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usd: str | None, time_s: float | None
) -> None:
    run = launch(make_draft(home, tmp_path, steps=100_000), home).run
    destroy_run(home, run)
    home.ledger.set_run(run.id, state="failed", reason=SILENT)
    real = relaunch.make_plan

    def slow(messages: Run, at_home: Home) -> Plan:
        monkeypatch.setattr(relaunch, "make_plan", real)
        other = Home(home.path, World())
        change_limit(other, propose(other, other.ledger.find("moss"), Decimal(usd) if usd else None, time_s))
        return real(messages, at_home)

    monkeypatch.setattr(relaunch, "make_plan", slow)
    with pytest.raises(EndedElsewhere, match="its limits have changed in the meantime"):
        relaunch.relaunch(home, home.ledger.find("moss"), lambda text: None)
    assert action_log.count(home, run.id, relaunch.RELAUNCHED) == 0, "the aborted relaunch is not counted"
    relaunch.relaunch(home, home.ledger.find("moss"), lambda text: None)  # the guard's next round
    now = home.ledger.find("moss")
    assert now.spend_limit_usd == (usd or run.spend_limit_usd)
    assert time_s is None or limits_of(home, now).time_s == time_s


@pytest.mark.acceptance(127)
@pytest.mark.slow
def test_a_run_with_a_missing_input_is_not_relaunched_and_a_resume_uploads_it_again(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, removed = Local.create, list[Path]()

    def create_after_a_cleaning(self: Local, request: Request) -> Instance:
        if not removed:
            digest = hashlib.sha256((tmp_path / "data/train-00000.bin").read_bytes()).hexdigest()
            removed.append(tmp_path / "store/objects" / digest)
            removed[0].unlink()
        return create(self, request)

    monkeypatch.setattr(Local, "create", create_after_a_cleaning)
    done = launch(make_draft(home, tmp_path), home)
    last = list(watch(home, done.run, every_s=1))[-1]
    assert last.text.startswith("failed: Cannot fetch data/train-00000.bin: objects/")
    guard_pass(home)
    (line,) = home.ledger.lines(done.run.id)
    assert (line.state, line.billing) == ("gone", "no"), "the guard did not rent again"
    again = launch(make_draft(home, tmp_path, resume=True), home)
    assert again.run.id == done.run.id
    assert list(watch(home, again.run, every_s=1))[-1].text.startswith("done")
    assert removed[0].exists()
