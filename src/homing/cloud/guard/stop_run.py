"""Stop a run at its next checkpoint: write a request to the store and wait until it took effect."""

from __future__ import annotations

from collections.abc import Callable

from homing.cloud.contact.control_request import ask, deliver
from homing.cloud.contact.heartbeats import read_document, read_reports
from homing.cloud.destroy import destroy_lines
from homing.cloud.home import Home
from homing.cloud.launch.unattended_limit import waits_for_home
from homing.cloud.ledger.lease import require_owner
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.run_status import Status, look, reached
from homing.errors import HomingError, UsageError
from homing.store import run_key
from homing.units import format_duration
from homing.wire import file_names
from homing.wire.control_files import Heartbeat, Request

__all__ = ["ask_to_stop", "wait_for_stop"]

STOP_TIMEOUT_S = 600.0
_EVERY_S = 1.0


def ask_to_stop(home: Home, run: RunRow, reason: str = "A stop was requested.") -> int:
    """Write the stop request. Return its serial. Repeating it changes nothing."""
    require_owner(home, run)
    if not run.is_live and not home.may_go_on(run) and not _is_kept(home, run):
        raise UsageError(
            what=f"{run.id} is not running: it is {run.state}.", why=run.reason, fix=f"homing fetch {run.name}"
        )
    now = home.ledger.run(run.id) or run  # reading the store may have taken a while, and a guard may have acted
    if home.may_go_on(now):  # no machine will read it, and a guard or its launch would rent the next one
        home.ledger.set_run(run.id, state="stopped", reason=reason, exit_code=0)
    store = home.store_of(run)
    last = read_document(store, run_key(run.id, file_names.REQUEST), Request)
    if last is not None and last.stop:
        deliver(home, run.id)  # it may have failed the first time
        return last.serial
    return ask(home, run.id, store, stop=True, reason=reason).serial


def _is_kept(home: Home, run: RunRow) -> bool:
    """Return whether the run failed and its instance is kept for inspection: a stop ends that too."""
    lines = billing_lines(home.ledger.lines(run.id))
    beat = read_reports(home.store_of(run), run.id, lines[-1]).heartbeat if lines else None
    return beat is not None and beat.state == "kept"


def wait_for_stop(
    home: Home, run: RunRow, *, timeout_s: float = STOP_TIMEOUT_S, notify: Callable[[str], None] = lambda text: None
) -> Status:
    """Wait until training and billing have ended. A failed status check is reported and retried."""
    deadline = home.world.monotonic() + timeout_s
    said = ""
    while True:
        problems = refresh(home)
        status = look(home, home.ledger.run(run.id) or run)
        if not status.run.is_live and not status.is_billing:
            return status
        beat = status.reports.heartbeat if status.reports else None
        _end_what_waits(home, status, beat, notify)
        now = _where(status, beat) if beat else "no heartbeat yet"
        for text in [*problems, *([status.problem] if status.problem else []), f"waiting for the agent: {now}"]:
            if text != said:
                notify(text)
                said = text
        if home.world.monotonic() >= deadline:
            raise HomingError(
                what=f"{run.id} did not stop within {format_duration(timeout_s)}.",
                why=f"The agent last reported: {now}. The request stays in the store until the agent sees it.",
                fix=f"homing watch {run.id}   or end it now, losing what is not pushed: homing destroy {run.id}",
            )
        home.world.sleep(_EVERY_S)


def _where(status: Status, beat: Heartbeat) -> str:
    """Describe the agent's state, with the step only if known: the first metrics line may be missing."""
    step = reached(status, beat).step
    return f"{beat.state} at step {step:,}" if step else beat.state


def _end_what_waits(home: Home, status: Status, beat: Heartbeat | None, notify: Callable[[str], None]) -> None:
    """Destroy a machine that cannot end its own billing, once its agent has reported that it is finished."""
    for line in billing_lines(status.lines) if not status.run.is_live else []:
        if waits_for_home(home.provider_of(line), line.mark, beat):
            notify(f"{line.mark} has pushed everything and cannot end its own billing; destroying it")
            destroy_lines(home, [line])
