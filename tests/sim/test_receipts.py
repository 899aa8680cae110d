"""No receipt is below the bill: scripted days that once closed too low, and the check that finds them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from tests.doubles.faults import Faults, Strike
from tests.sim.kernel import Broken
from tests.sim.schedule import destroy_all, play
from tests.sim.stage import Stage, pace
from tests.sim.stories import LONG, SHORT, Rig
from tests.sim.world import STORE

from homing.cloud.destroy import destroy_run
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.ledger.ledger import Ledger, LedgerLine
from homing.cloud.reconcile import receipt
from homing.cloud.reconcile.adopt import adopt, propose
from homing.cloud.reconcile.reconcile import CREATE_GRACE_S
from homing.store import open_store

CLOUDS = ("fake", "modal", "runpod", "shadeform", pytest.param("aws", marks=pytest.mark.slow))


@pytest.mark.parametrize("provider", CLOUDS)
def test_a_machine_that_was_made_and_taken_away_before_anybody_saw_it_has_a_receipt(provider: str) -> None:
    with pace():
        rig = Rig(provider=provider)
        lost = (Strike("lost_after", 1, "create"), Strike("preempt", 1, "create"))
        rig.cloud.cloud.change_faults(Faults(strikes=lost, take_after_s=(5.0, 5.0)))
        story_of_a_machine_that_no_home_saw(rig)
        (line,) = lines(rig.stage)
        assert line.is_at_most
        rig.stage.truth.check_receipts()
        rig.stage.close()


def story_of_a_machine_that_no_home_saw(rig: Rig) -> None:
    """The launch dies in its create call and the answer is lost; the machine ends before it sends a heartbeat."""
    stage, cloud = rig.stage, rig.cloud

    def verb(home: Home) -> Any:
        return launch(stage.draft(home, provider=stage.provider, limit=str(rig.limit)), home)

    client = stage.client("launch", verb)
    assert stage.wait(lambda: bool(cloud.cloud.live()), 60.0, every_s=0.05)
    client.proc.kill()
    stage.advance(60.0)
    assert cloud.cloud.live() == {}
    stage.advance(CREATE_GRACE_S)
    assert rig.do("tidy", destroy_all).answer == []
    (bill,) = (each for each in cloud.cloud.bill() if each.kind == "instance")
    assert bill.usd > 0


@pytest.mark.parametrize("provider", ["modal", "runpod"])  # neither tells an end
@pytest.mark.parametrize("behind_s", [30.0, 600.0])
def test_adopting_a_run_with_a_slower_clock_at_home_does_not_lower_its_spend(provider: str, behind_s: float) -> None:
    # Seed 1085 on modal: the create call was timed by another clock.
    with pace():
        rig = Rig(provider=provider)
        stage = rig.stage
        assert rig.launch(trainer=LONG).error is None
        stage.advance(60.0)
        other = stage.add_home("home2")
        other.skew_s = -behind_s

        def take_over(home: Home) -> Any:
            store = open_store(f"file:{STORE}/mine", home.world, create=False)
            return adopt(propose(store, "moss", home), store, home)

        assert stage.finish(stage.client("adopt", take_over, other)).error is None
        stage.advance(40.0)
        rig.do("destroy", lambda home: destroy_run(home, home.ledger.find("moss")))
        assert stage.finish(stage.client("tidy", destroy_all, other)).answer == []
        stage.truth.check_receipts()
        stage.close()


@pytest.mark.regression("clock-jumps")
def test_destroy_after_the_clock_at_home_was_set_back_counts_no_less() -> None:
    # Seed 6: destroy was the first command after the clock was set back, the store did not answer, and Modal does not
    # say when a sandbox ended.
    with pace():
        rig = Rig(provider="modal")
        assert rig.launch(trainer=SHORT).error is None
        rig.stage.advance(90.0)
        assert rig.cloud.cloud.live() == {}, "it has ended by itself"
        rig.stage.home.skew_s -= 3 * 3600.0
        rig.stage.home.cut.add("store")
        rig.destroy()
        (line,) = lines(rig.stage)
        assert line.destroyed_at is not None
        rig.stage.truth.check_receipts()
        rig.stage.close()


def test_the_simulator_finds_a_zero_receipt_for_an_instance_that_no_home_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    def close_for_nothing(home: Home, line: LedgerLine, instance: object, note: str) -> None:
        home.ledger.close(line.mark, at=home.world.now(), spend_usd=Decimal(line.spend_usd), note=note)

    monkeypatch.setattr(receipt, "_close", close_for_nothing)
    with pace():
        rig = Rig()
        lost = (Strike("lost_after", 1, "create"), Strike("preempt", 1, "create"))
        rig.cloud.cloud.change_faults(Faults(strikes=lost, take_after_s=(5.0, 5.0)))
        story_of_a_machine_that_no_home_saw(rig)
        with pytest.raises(Broken, match="the ledger of home says"):
            rig.stage.truth.check_receipts()
        rig.stage.close()


def test_a_receipt_that_is_a_little_too_small_is_found_on_some_day(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.close

    def close(self: Ledger, mark: str, *, at: float, spend_usd: Decimal, note: str) -> None:
        real(self, mark, at=at, spend_usd=spend_usd * Decimal("0.9"), note=note)

    monkeypatch.setattr(Ledger, "close", close)
    with pace():
        assert any(play(seed).broken.startswith("receipt: ") for seed in range(10))


def lines(stage: Stage) -> list[LedgerLine]:
    client = stage.finish(stage.client("runs", lambda home: home.ledger.lines()))
    return client.answer  # type: ignore[no-any-return]
