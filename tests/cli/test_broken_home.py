"""A home on a full or read-only disk, or with a damaged ledger: what bills is shown, stopped, fetched and ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.broken_disk import fill, make_read_only
from tests.cli.lost_rig import NEW, Rig, rig

__all__ = ["rig"]

Break = Callable[..., None]


def damage(patch: pytest.MonkeyPatch, folder: object) -> None:
    for path in folder.glob("ledger.sqlite*"):  # type: ignore[attr-defined]
        path.write_bytes(b"no database at all" * 500)


IS_SHOWN = pytest.mark.regression("broken-home")


@pytest.mark.parametrize(
    "broken", [fill, pytest.param(make_read_only, marks=IS_SHOWN), pytest.param(damage, marks=IS_SHOWN)]
)
def test_destroy_ends_what_bills(rig: Rig, monkeypatch: pytest.MonkeyPatch, broken: Break) -> None:
    instance = rig.rent()
    assert rig.billing == [instance]
    with monkeypatch.context() as patch:
        broken(patch, rig.path)
        said = rig.cli("destroy", "moss", "--yes")
    assert rig.billing == [], said.err
    assert said.code in (0, 6), said.err
    assert "Traceback" not in said.err
    assert rig.cli("destroy", "moss", "--yes").code == 0
    assert rig.home.ledger.lines()[0].destroyed_at is not None


@pytest.mark.regression("broken-home")
@pytest.mark.parametrize("broken", [make_read_only, damage])
def test_the_guard_ends_what_reached_its_limit(rig: Rig, monkeypatch: pytest.MonkeyPatch, broken: Break) -> None:
    rig.rent(limit="0.10")
    rig.world.pass_time(990)
    with monkeypatch.context() as patch:
        broken(patch, rig.path)
        said = rig.cli("guard", "--once")
    assert rig.billing == [], said.err
    assert "Traceback" not in said.err


@pytest.mark.regression("looking-writes")
@pytest.mark.parametrize("words", [("runs",), ("status", "moss"), ("stop", "moss", "--no-wait"), ("fetch", "--list")])
@pytest.mark.parametrize("broken", [fill, make_read_only])
def test_looking_and_stopping_need_no_room_at_home(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], broken: Break
) -> None:
    rig.rent()
    with monkeypatch.context() as patch:
        broken(patch, rig.path)
        said = rig.cli(*words, "--json")
    assert said.code == 0, said.err
    assert "move it away" not in said.err
    assert NEW in said.out
    assert len(rig.billing) == 1
