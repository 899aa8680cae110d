"""What every provider does with absurd figures: they are no bill, and never keep the request to end from being sent.

check_absurd_figures(Spoiled(...), values)   in each figure of its answers, one after another, and in all at once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from homing.cloud.providers.base import Instance, Provider
from homing.errors import HomingError

__all__ = ["Spoiled", "check_absurd_figures"]

# No instance of ours costs so much, nor lives so far from now.
_MOST_USD = Decimal(10**7)
_FAR_S = 20 * 365 * 86400.0


@dataclass
class Spoiled:
    """A cloud with one live instance and answers that can be spoiled."""

    open: Callable[[], Provider]  # as a fresh process opens it: it has seen nothing yet
    create: Callable[[], Instance]
    names: Callable[[Provider], Iterable[str]]  # of all figures in the answers about it
    spoil: Callable[[dict[str, Any]], None]  # from now on these names have these values; {} ends it
    num_living: Callable[[], int]
    now: Callable[[], float]
    may_be_illegible: bool = False  # an SDK reads its answers, and may refuse a whole one for one figure


def check_absurd_figures(cloud: Spoiled, values: Iterable[Any]) -> None:
    cloud.create()
    names = sorted(cloud.names(cloud.open()))
    assert names, "there is no figure to spoil"
    for spoiled, value in [(each, value) for each in [*([name] for name in names), names] for value in values]:
        made = cloud.create()
        assert cloud.num_living() == 1, spoiled
        cloud.spoil(dict.fromkeys(spoiled, value))
        provider = cloud.open()
        for look in (provider.list_owned, lambda made=made, provider=provider: [provider.describe(made.id)]):
            found = _check_look(look, cloud, spoiled)
            is_there = [made.id] == [instance.id for instance in found]
            assert is_there or cloud.may_be_illegible, f"{spoiled}: {value!r} hides the whole list"
        _ask(provider.list_resources)
        _ask(lambda made=made: cloud.open().destroy(made.id))
        assert cloud.num_living() == 0, f"{spoiled}: {value!r} kept the request to end from being sent"
        cloud.spoil({})


def _check_look(look: Callable[[], list[Instance]], cloud: Spoiled, spoiled: list[str]) -> list[Instance]:
    """It works, or it raises a named problem; what it tells can be counted with."""
    found: list[Instance] = _ask(look) or []
    for instance in found:
        assert instance.state != "gone", spoiled
        assert instance.billing != "no", spoiled
        for amount in (instance.rate_usd_per_hour, instance.spend_usd):
            assert amount is None or (amount.is_finite() and 0 <= amount <= _MOST_USD), (spoiled, amount)
        for at in (instance.created_at, instance.ended_at):
            assert at is None or abs(at - cloud.now()) < _FAR_S, (spoiled, at)
    return found


def _ask(call: Callable[[], Any]) -> Any:
    """None where a named problem came instead of an answer."""
    try:
        return call()
    except HomingError:
        return None
