"""End training at the next checkpoint: a wish laid into the store, and the wait until it came true."""

from __future__ import annotations

from collections.abc import Callable

from homing.cloud.destroy import destroy_lines
from homing.cloud.home import Home
from homing.cloud.lease import require_owner
from homing.cloud.ledger import RunRow
from homing.cloud.reconcile import refresh
from homing.cloud.signs import read_document, read_signs
from homing.cloud.status import Status, billing_lines, look, reached
from homing.cloud.unattended import waits_for_home
from homing.cloud.wish import ask, deliver
from homing.errors import HomingError, UsageError
from homing.store import run_key
from homing.units import format_duration
from homing.wire import names
from homing.wire.control import Heartbeat, Request

__all__ = ["ask_to_stop", "wait_for_stop"]

STOP_TIMEOUT_S = 600.0
_EVERY_S = 1.0


def ask_to_stop(home: Home, run: RunRow, reason: str = "A stop was asked for from home.") -> int:
    """Writes the request with a new serial; returns it. Asking twice is asking once."""
    require_owner(home, run)
    if not run.is_live and not home.may_go_on(run) and not _is_kept(home, run):
        raise UsageError(
            what=f"{run.id} is not running: it is {run.state}.", why=run.reason, fix=f"homing fetch {run.name}"
        )
    now = home.ledger.run(run.id) or run  # its store may have taken a while, and a guard may have been at it
    if home.may_go_on(now):  # no machine will hear of it, and a guard or its launch would rent the next one
        home.ledger.set_run(run.id, state="stopped", reason=reason, exit_code=0)
    store = home.store_of(run)
    last = read_document(store, run_key(run.id, names.REQUEST), Request)
    if last is not None and last.stop:
        deliver(home, run.id)  # it may have failed the first time
        return last.serial
    return ask(home, run.id, store, stop=True, reason=reason).serial


def _is_kept(home: Home, run: RunRow) -> bool:
    """It failed and its instance stays for a person to look at: a stop ends that too."""
    lines = billing_lines(home.ledger.lines(run.id))
    beat = read_signs(home.store_of(run), run.id, lines[-1]).heartbeat if lines else None
    return beat is not None and beat.state == "kept"


def wait_for_stop(
    home: Home, run: RunRow, *, timeout_s: float = STOP_TIMEOUT_S, tell: Callable[[str], None] = lambda text: None
) -> Status:
    """Until training and billing have ended. A failed look is told and tried again."""
    deadline = home.world.monotonic() + timeout_s
    said = ""
    while True:
        problems = refresh(home)
        status = look(home, home.ledger.run(run.id) or run)
        if not status.run.is_live and not status.is_billing:
            return status
        beat = status.signs.heartbeat if status.signs else None
        _end_what_waits(home, status, beat, tell)
        now = _where(status, beat) if beat else "no heartbeat yet"
        for text in [*problems, *([status.problem] if status.problem else []), f"waiting for the agent: {now}"]:
            if text != said:
                tell(text)
                said = text
        if home.world.monotonic() >= deadline:
            raise HomingError(
                what=f"{run.id} did not stop within {format_duration(timeout_s)}.",
                why=f"The agent's last word: {now}. The request stays in the store and will be obeyed when it is seen.",
                fix=f"homing watch {run.id}   or at once, losing what is not pushed: homing destroy {run.id}",
            )
        home.world.sleep(_EVERY_S)


def _where(status: Status, beat: Heartbeat) -> str:
    """A step only where one is known: the first line of numbers may not have come yet, or never come."""
    step = reached(status, beat).step
    return f"{beat.state} at step {step:,}" if step else beat.state


def _end_what_waits(home: Home, status: Status, beat: Heartbeat | None, tell: Callable[[str], None]) -> None:
    """A machine that cannot end its own billing is ended from here, once it has said goodbye."""
    for line in billing_lines(status.lines) if not status.run.is_live else []:
        if waits_for_home(home.provider_of(line), line.mark, beat):
            tell(f"{line.mark} has pushed everything and cannot end its own billing; ending it")
            destroy_lines(home, [line])
