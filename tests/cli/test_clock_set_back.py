"""After the clock was set back, a name still means the run that may be billing."""

from __future__ import annotations

import pytest
from tests.cli.lost_rig import NEW, OLD, Rig, rig

__all__ = ["rig"]

HOUR_S = 3600.0


def two_runs(rig: Rig) -> str:
    """An ended run of the name, then the clock goes back by three hours, then a live one. Returns its instance's id."""
    rig.rent(OLD)
    assert rig.cli("destroy", OLD, "--yes").code == 0
    rig.world.skew_s = -3 * HOUR_S
    return rig.rent(NEW)


@pytest.mark.regression("clock-set-back")
def test_destroy_ends_the_run_that_is_billing_and_not_one_with_a_later_date(rig: Rig) -> None:
    instance = two_runs(rig)
    assert rig.billing == [instance]
    said = rig.cli("destroy", "moss", "--yes")
    assert rig.billing == [], said.err
    assert said.code == 0


@pytest.mark.parametrize("words", [("status", "moss"), ("status",), ("stop", "moss", "--no-wait")])
def test_the_other_verbs_mean_it_too(rig: Rig, words: tuple[str, ...]) -> None:
    two_runs(rig)
    assert rig.cli(*words, "--json").json["run"] == NEW
    assert rig.home.ledger.find("moss").id == NEW


def test_a_run_that_may_be_billing_comes_before_a_newer_one_that_has_ended(rig: Rig) -> None:
    rig.rent(OLD)
    rig.home.ledger.set_run(OLD, state="failed")
    instance = rig.billing
    rig.rent(NEW)
    assert rig.cli("destroy", NEW, "--yes").code == 0
    assert rig.home.ledger.find("moss").id == OLD
    assert rig.billing == instance
    rig.cli("destroy", "moss", "--yes")
    assert rig.billing == []
    assert rig.home.ledger.find("moss").id == NEW, "nothing of either bills: the newest"
