"""What a changed key may never do: close the line of a machine that another account still pays for.

The machine is rented with one key. Another account's key is set, everything looks, and nothing is gone; with the first
key again it is found, ended and gets its receipt.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from homing.cloud.destroy import destroy_lines
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine
from homing.cloud.providers.base import Instance
from homing.cloud.reconcile.reconcile import refresh
from homing.errors import StillBilling
from homing.world import World

__all__ = ["another_key_ends_nothing", "line_of"]


def line_of(made: Instance, path: Path, owner: str, world: World) -> Home:
    """The home that rented it, its line in the ledger with the account."""
    path.mkdir(exist_ok=True)
    (path / "owner").write_text(owner)
    home = Home(path, world)
    for _ in range(2):  # found by its mark, then its account
        assert refresh(home) == []
    (line,) = home.ledger.lines()
    assert (line.instance_id, line.account) == (made.id, home.provider(made.provider).account())
    return home


def another_key_ends_nothing(
    made: Instance, path: Path, owner: str, world: World, *, use: Callable[[], None], use_first: Callable[[], None]
) -> LedgerLine:
    """Returns the line as it was while the other key was set."""
    rented = line_of(made, path, owner, world).ledger.lines()[0].account
    use()
    home = Home(path, world)  # another process: keys are read once
    for _ in range(3):
        (problem,) = refresh(home)
        assert "may be billing" in problem
        assert str(rented).removeprefix("key:") in problem
        assert f"homing destroy {made.mark} --same-account" in problem
        (line,) = home.ledger.lines()
        assert (line.destroyed_at, line.state, line.billing) == (None, "unknown", "maybe")
    with pytest.raises(StillBilling) as caught:
        destroy_lines(home, [line])
    assert str(rented).removeprefix("key:") in caught.value.why
    assert "--same-account" in caught.value.fix
    (line,) = home.ledger.lines()
    assert (line.destroyed_at, line.billing, line.account) == (None, "maybe", rented)
    use_first()
    home = Home(path, world)
    assert refresh(home) == []
    assert home.ledger.lines()[0].state != "unknown", "nothing ended it meanwhile"
    destroy_lines(home, home.ledger.lines())
    assert home.ledger.lines()[0].state == "gone"
    return line
