"""Logs of trainer, agent and sync from the store; following them loses no line while the store is unreachable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from homing.cloud.contact.heartbeats import Tail, read_reports
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import ADOPTED, RunRow
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.unknown_billing import is_lost
from homing.errors import HomingError, StoreError, UsageError
from homing.store import run_key
from homing.wire import file_names
from homing.wire.codec import WireError
from homing.world import World

__all__ = ["PROGRAMS", "boot_log", "check_program", "follow", "follow_tail", "read_log"]

PROGRAMS = ("trainer", "agent", "sync")
LAST_PUSH_S = 180.0  # how long after the end of a run to wait for its last lines
_EVERY_S = 2.0


def read_log(home: Home, run: RunRow, program: str = "trainer") -> list[str]:
    return _tail(home, run, program).lines(is_last=True)


def follow(
    home: Home, run: RunRow, program: str = "trainer", *, notify: Callable[[str], None] = lambda text: None
) -> Iterator[str]:
    """Yield log lines until the run has ended and its output is in the store.

    The outcome may arrive there before the last lines do.
    """
    ended_at: float | None = None

    def is_over() -> bool:
        nonlocal ended_at
        refresh(home)
        now = home.ledger.run(run.id)
        if now is None:
            return is_lost(home, run)
        if now.is_live:
            ended_at = None
            return False
        ended_at = home.world.monotonic() if ended_at is None else ended_at
        return home.world.monotonic() - ended_at >= LAST_PUSH_S or not _is_pushing(home, now)

    return follow_tail(_tail(home, run, program), is_over, home.world, notify)


def follow_tail(tail: Tail, ask: Callable[[], bool], world: World, notify: Callable[[str], None]) -> Iterator[str]:
    """Yield lines until `ask` returns True. The file offset survives failed reads, so no line is lost or repeated."""
    said = ""
    while True:
        # Ask before the last read, so that everything written until the end is still read.
        is_over = False
        try:
            is_over = ask()
            yield from tail.lines(is_last=is_over)
            said = ""
        except (HomingError, WireError, OSError) as exc:
            problem = str(exc).splitlines()[0]
            if problem != said:
                notify(f"{problem} Retrying.")
            said, is_over = problem, False
        if is_over:
            return
        world.sleep(_EVERY_S)


def _is_pushing(home: Home, run: RunRow) -> bool:
    """Return whether the machine is there and has not reported its final push."""
    lines = home.ledger.lines(run.id)
    if run.state == ADOPTED or not billing_lines(lines):
        return False
    beat = read_reports(home.store_of(run), run.id, lines[-1]).heartbeat
    return beat is None or not beat.is_pushed


def boot_log(home: Home, run: RunRow) -> str:
    """Return the boot output, from the mailbox or the provider: the only log if the instance died early."""
    with contextlib.suppress(StoreError):
        return home.store_of(run).read(run_key(run.id, file_names.LOGS, "boot.log")).decode("utf-8", "replace")
    lines = [line for line in home.ledger.lines(run.id) if line.instance_id is not None]
    if not lines:
        return ""
    last = lines[-1]
    assert last.instance_id is not None, last
    kept = home.kept_log(run.id, last.mark)
    if home.world.exists(kept):
        return home.world.read(kept).decode("utf-8", "replace")
    return home.provider_of(last).log(last.instance_id)


def check_program(program: str, run_id: str) -> None:
    if program not in PROGRAMS:
        raise UsageError(
            what=f"Unknown log: {program!r}.",
            why=f"Known: {', '.join(PROGRAMS)}.",
            fix=f"homing logs {run_id} trainer",
        )


def _tail(home: Home, run: RunRow, program: str) -> Tail:
    check_program(program, run.id)
    return Tail(home.store_of(run), run_key(run.id, file_names.LOGS, f"{program}.log"))
