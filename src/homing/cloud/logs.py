"""What trainer, agent and sync wrote, from the store; followed without losing a line when the store is away a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from homing.cloud.check_lost import is_lost
from homing.cloud.home import Home
from homing.cloud.ledger import ADOPTED, RunRow
from homing.cloud.reconcile import refresh
from homing.cloud.signs import Tail, read_signs
from homing.cloud.status import billing_lines
from homing.errors import HomingError, StoreError, UsageError
from homing.store import run_key
from homing.wire import names
from homing.wire.codec import WireError
from homing.world import World

__all__ = ["PROGRAMS", "boot_log", "check_program", "follow", "follow_tail", "read_log"]

PROGRAMS = ("trainer", "agent", "sync")
LAST_PUSH_S = 180.0  # so long after the end of a run its last lines are waited for
_EVERY_S = 2.0


def read_log(home: Home, run: RunRow, program: str = "trainer") -> list[str]:
    return _tail(home, run, program).lines(is_last=True)


def follow(
    home: Home, run: RunRow, program: str = "trainer", *, tell: Callable[[str], None] = lambda text: None
) -> Iterator[str]:
    """Until the run has ended and what it wrote is in the store: what tells of the end may come there before the last
    lines do."""
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

    return follow_tail(_tail(home, run, program), is_over, home.world, tell)


def follow_tail(tail: Tail, ask: Callable[[], bool], world: World, tell: Callable[[str], None]) -> Iterator[str]:
    """Until the run is over. The place in the file is kept over failed looks, so nothing is lost and nothing twice."""
    said = ""
    while True:
        # Asked before the last read: what is written until the end is then read after it.
        is_over = False
        try:
            is_over = ask()
            yield from tail.lines(is_last=is_over)
            said = ""
        except (HomingError, WireError, OSError) as exc:
            problem = str(exc).splitlines()[0]
            if problem != said:
                tell(f"{problem} Trying again.")
            said, is_over = problem, False
        if is_over:
            return
        world.sleep(_EVERY_S)


def _is_pushing(home: Home, run: RunRow) -> bool:
    """Whether its machine is there and has not said that everything is in the store."""
    lines = home.ledger.lines(run.id)
    if run.state == ADOPTED or not billing_lines(lines):
        return False
    beat = read_signs(home.store_of(run), run.id, lines[-1]).heartbeat
    return beat is None or not beat.is_pushed


def boot_log(home: Home, run: RunRow) -> str:
    """What the provider kept of the first command, or its mailbox took: all there is of a boot that died early."""
    with contextlib.suppress(StoreError):
        return home.store_of(run).read(run_key(run.id, names.LOGS, "boot.log")).decode("utf-8", "replace")
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
            what=f"There is no log of {program!r}.",
            why=f"Known: {', '.join(PROGRAMS)}.",
            fix=f"homing logs {run_id} trainer",
        )


def _tail(home: Home, run: RunRow, program: str) -> Tail:
    check_program(program, run.id)
    return Tail(home.store_of(run), run_key(run.id, names.LOGS, f"{program}.log"))
