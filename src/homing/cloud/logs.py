"""What trainer, agent and sync wrote, from the store; followed without losing a line when the store is away a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from homing.cloud.home import Home
from homing.cloud.ledger import RunRow
from homing.cloud.reconcile import refresh
from homing.cloud.signs import Tail
from homing.errors import HomingError, StoreError, UsageError
from homing.store import run_key
from homing.wire import names
from homing.wire.codec import WireError
from homing.world import World

__all__ = ["PROGRAMS", "boot_log", "check_program", "follow", "follow_tail", "read_log"]

PROGRAMS = ("trainer", "agent", "sync")
_EVERY_S = 2.0


def read_log(home: Home, run: RunRow, program: str = "trainer") -> list[str]:
    return _tail(home, run, program).lines()


def follow(
    home: Home, run: RunRow, program: str = "trainer", *, tell: Callable[[str], None] = lambda text: None
) -> Iterator[str]:
    """Until the run ends."""

    def is_over() -> bool:
        refresh(home)
        now = home.ledger.run(run.id)
        return now is not None and not now.is_live

    return follow_tail(_tail(home, run, program), is_over, home.world, tell)


def follow_tail(tail: Tail, ask: Callable[[], bool], world: World, tell: Callable[[str], None]) -> Iterator[str]:
    """Until the run is over. The place in the file is kept over failed looks, so nothing is lost and nothing twice."""
    said = ""
    while True:
        # Asked before the last read: what is written until the end is then read after it.
        is_over = False
        try:
            is_over = ask()
            yield from tail.lines()
            said = ""
        except (HomingError, WireError, OSError) as exc:
            problem = str(exc).splitlines()[0]
            if problem != said:
                tell(f"{problem} Trying again.")
            said, is_over = problem, False
        if is_over:
            return
        world.sleep(_EVERY_S)


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
