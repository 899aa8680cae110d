"""What `homing reconcile` does at a cloud for a home that has lost its ledger.

Everything with our mark is found, the instance and its other resources, and deleted by the provider's own call.
"""

from __future__ import annotations

from pathlib import Path

from homing.cloud.destroy import end_finding
from homing.cloud.home import Home
from homing.cloud.providers.base import Instance
from homing.cloud.reconcile.inventory import Finding, survey
from homing.world import World

__all__ = ["end_what_was_forgotten"]


def end_what_was_forgotten(made: Instance, path: Path, owner: str, world: World) -> list[Finding]:
    """`path` is the home that `made` was rented from, without a ledger. Returns what was found, as a person sees it."""
    path.mkdir(exist_ok=True)
    (path / "owner").write_text(owner)
    home = Home(path, world)
    assert home.ledger.lines() == []
    found = survey(home)
    assert found.problems == []
    (instance,) = [each for each in found.to_answer if each.thing == "instance"]
    assert (instance.kind, instance.provider, instance.id) == ("forgotten", made.provider, made.id)
    assert instance.rate_usd_per_hour > 0
    assert end_finding(home, instance) == ""
    (line,) = home.ledger.lines()
    assert (line.billing, line.state) == ("no", "gone")
    # Its other resources no longer belong to a live instance.
    for left in survey(home).to_answer:
        assert (left.kind, end_finding(home, left)) == ("left over", "")
    assert [each for each in survey(home).findings if each.kind != "kept"] == []
    assert home.provider(made.provider).list_owned() == []
    return found.findings
