"""What the ledger says against what the providers and the store say; theirs is the truth.

    list_owned of each provider  ->  open lines get state and spend; one that ended by itself gets its receipt
                                     a machine that no line knows, or that a line calls gone, is written down
    heartbeat, outcome           ->  the run's state

A provider or store that cannot be asked is reported and leaves everything as it was: unknown, never gone.
"""

from __future__ import annotations

from decimal import Decimal

from homing.cloud import meter
from homing.cloud.home import Home
from homing.cloud.ledger import LedgerLine, RunRow
from homing.cloud.providers.base import Instance, Provider
from homing.cloud.providers.registry import PROVIDERS
from homing.cloud.signs import read_signs
from homing.errors import HomingError, LimitReached
from homing.wire.codec import WireError

__all__ = ["CREATE_GRACE_S", "LOOKS", "is_absent", "receipt", "refresh"]

LOOKS = 3  # a list may be late: absent means absent in this many looks over the provider's settle time
CREATE_GRACE_S = 900.0  # a create call that never got an answer may still be on its way for so long


def refresh(home: Home) -> list[str]:
    """Brings the ledger up to date. Returns what could not be asked, one sentence each."""
    problems = [problem for name in _providers_in_use(home) for problem in _refresh_lines(home, name)]
    for run in home.ledger.runs():
        if run.is_live:
            problems += _refresh_run(home, run)
    return problems


def is_absent(provider: Provider, home: Home, mark: str, instance_id: str | None) -> bool:
    """Whether the provider shows nothing of ours under this mark, in several looks."""
    for look in range(LOOKS):
        if look and provider.settle_s:
            home.world.sleep(provider.settle_s / (LOOKS - 1))
        if any(instance.mark == mark for instance in provider.list_owned()):
            return False
        if instance_id is not None and provider.describe(instance_id).state != "gone":
            return False
    return True


def receipt(home: Home, line: LedgerLine, instance: Instance | None, note: str) -> None:
    """Closes a line: ends when the provider says it ended, else now; costs the larger of their figure and ours."""
    ended_at = instance.ended_at if instance is not None and instance.ended_at is not None else home.world.now()
    if instance is None:
        home.ledger.close(line.mark, at=ended_at, spend_usd=Decimal(line.spend_usd), note=note)
        return
    assert line.created_at is not None, line
    ours = meter.cost(Decimal(line.rate_usd_per_hour), ended_at - line.created_at)
    theirs = instance.spend_usd or Decimal(0)
    home.ledger.close(line.mark, at=ended_at, spend_usd=max(ours, theirs), note=note)


def _providers_in_use(home: Home) -> list[str]:
    named = {line.provider for line in home.ledger.lines()}
    return sorted(named | {name for name, (_, extra) in PROVIDERS.items() if extra is None})


def _refresh_lines(home: Home, name: str) -> list[str]:
    lines = {line.mark: line for line in home.ledger.lines() if line.provider == name}
    try:
        provider = home.provider(name)
        owned = {instance.mark: instance for instance in provider.list_owned()}
    except (HomingError, OSError) as exc:
        for line in lines.values():
            if line.destroyed_at is None and line.created_at is not None:
                home.ledger.update(line.mark, state="unknown", billing="maybe")
        return [f"{name} could not be asked, so its instances may bill: {_first_line(exc)}"]
    problems = []
    for mark, instance in owned.items():
        _note_owned(home, lines.get(mark), instance)
    for line in lines.values():
        if line.destroyed_at is None and line.created_at is not None and line.mark not in owned:
            try:
                _note_absent(home, provider, line)
            except (HomingError, OSError) as exc:
                problems.append(f"{line.mark} on {name} could not be looked at: {_first_line(exc)}")
    return problems


def _note_owned(home: Home, line: LedgerLine | None, instance: Instance) -> None:
    if line is None:
        home.ledger.adopt(_forgotten(instance, home.world.now()))
    elif line.destroyed_at is not None:
        home.ledger.reopen(line.mark, instance_id=instance.id, note="was closed, but the provider shows it")
    spend = max(Decimal(line.spend_usd) if line else Decimal(0), instance.spend_usd or Decimal(0))
    home.ledger.update(
        instance.mark,
        instance_id=instance.id,
        state=instance.state,
        billing=instance.billing,
        spend_usd=str(spend),
        note=instance.detail,
    )


def _note_absent(home: Home, provider: Provider, line: LedgerLine) -> None:
    if line.instance_id is None:
        assert line.created_at is not None, line
        if home.world.now() - line.created_at < CREATE_GRACE_S:
            return  # its create call may be under way in another process
        if is_absent(provider, home, line.mark, None):
            receipt(home, line, None, "never seen at the provider")
        return
    if is_absent(provider, home, line.mark, line.instance_id):
        instance = provider.describe(line.instance_id)
        receipt(home, line, instance, instance.detail or "ended by itself")


def _forgotten(instance: Instance, now: float) -> LedgerLine:
    """The mark ends in the attempt; the run id before it may have been shortened, so it is not taken for one."""
    number = instance.mark.rsplit("-", 1)[-1]
    return LedgerLine(
        mark=instance.mark,
        run_id="",
        run_name="?",
        attempt=int(number) if number.isdigit() else 1,
        provider=instance.provider,
        offer="?",
        rate_usd_per_hour=str(instance.rate_usd_per_hour),
        limit_usd=None,
        intent_at=instance.created_at or now,
        instance_id=instance.id,
        created_at=instance.created_at or now,
        note="found at the provider; the ledger had no line for it",
    )


def _refresh_run(home: Home, run: RunRow) -> list[str]:
    lines = home.ledger.lines(run.id)
    last = lines[-1] if lines else None
    signs = None
    if any(line.created_at is not None for line in lines):  # before that nobody has written, and there may be no store
        try:
            signs = read_signs(home.store_of(run), run.id, last)
        except (HomingError, WireError, OSError) as exc:
            if last is None or last.destroyed_at is None or last.instance_id is not None:
                return [f"The store of {run.id} could not be read: {_first_line(exc)}"]
    now = home.world.now()
    if signs is not None and signs.outcome is not None:
        outcome = signs.outcome
        # What `homing watch` ends with: a stop that a person asked for is no failure, a limit is its own code.
        code = LimitReached.exit_code if signs.is_limit else int(outcome.state == "failed")
        ended_at = outcome.t or now
        home.ledger.set_run(
            run.id, only_live=True, state=outcome.state, reason=outcome.reason, exit_code=code, ended_at=ended_at
        )
    elif last is not None and last.destroyed_at is not None:
        reason = "its instance ended without saying how" if last.instance_id else "its launch was cut short"
        home.ledger.set_run(
            run.id, only_live=True, state="failed", reason=reason, exit_code=1, ended_at=last.destroyed_at
        )
    elif signs is not None and signs.heartbeat is not None:
        home.ledger.set_run(run.id, only_live=True, state="running")
    return []


def _first_line(exc: Exception) -> str:
    return (str(exc) or type(exc).__name__).splitlines()[0]
