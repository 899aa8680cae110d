"""Signs of life: what an instance left in the store about a run, read without ever talking to the instance.

A sign that is not there yet is None. A store that cannot be read raises: silence and blindness are different things.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TypeVar

from homing.cloud.ledger import LedgerLine
from homing.errors import IntegrityError
from homing.store import NotInStore, Store, run_key
from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest
from homing.wire.control import Heartbeat, Request
from homing.wire.event import Event, Outcome

__all__ = ["Signs", "Tail", "read_document", "read_signs"]

T = TypeVar("T")


# Heartbeat states in which the agent has written its own outcome; before that the trainer's may be of a life that the
# agent is about to restart.
_ENDING = ("pushing", "kept", "ending", "ended")
_LIMIT_EVENTS = ("limit_reached", "landed")


@dataclass(frozen=True)
class Signs:
    heartbeat: Heartbeat | None
    outcome: Outcome | None
    is_limit: bool = False  # it ended because a limit was reached
    is_saved: bool = True  # of a run that is done: its final model is in the store, verified
    is_unasked: bool = False  # it stopped, and neither a person nor a limit asked for that: an interruption


def read_signs(store: Store, run_id: str, line: LedgerLine | None) -> Signs:
    """Of this attempt only: what an earlier one left behind says nothing about this one."""
    # The heartbeat first: it is pushed last, so an outcome read after it is at least as new.
    heartbeat = read_document(store, run_key(run_id, names.HEARTBEAT), Heartbeat)
    if heartbeat is not None and line is not None and heartbeat.mark != line.mark:
        heartbeat = None
    is_gone = line is not None and line.destroyed_at is not None
    outcome = None
    if is_gone or (heartbeat is not None and heartbeat.state in _ENDING):
        outcome = read_document(store, run_key(run_id, names.OUTCOME), Outcome)
    if outcome is None:
        return Signs(heartbeat, None)
    is_limit = _is_limit(store, run_id, outcome, line.intent_at if line is not None else 0.0)
    is_saved = outcome.state != "done" or (heartbeat is not None and heartbeat.is_pushed)
    is_saved = is_saved or _has_model(store, run_id, line.run_name if line is not None else "", outcome)
    is_unasked = not is_limit and _is_unasked(store, run_id, outcome)
    return Signs(heartbeat, outcome, is_limit, is_saved, is_unasked)


def _is_limit(store: Store, run_id: str, outcome: Outcome, since: float) -> bool:
    if outcome.state != "stopped":
        return False
    events = Tail(store, run_key(run_id, names.EVENTS)).documents(Event)
    is_told = any(event.kind in _LIMIT_EVENTS and event.t >= since for event in events)
    return is_told or "limit" in outcome.reason


def _has_model(store: Store, run_id: str, run_name: str, outcome: Outcome) -> bool:
    """Whether models/ has the weights that this outcome tells of; their manifest is written last, when all of them were
    read back. A machine may go between that and its last heartbeat."""
    for name in filter(None, (run_name, run_id)):
        key = f"{names.STORE_MODELS}/{name}/{names.MANIFEST}"
        with contextlib.suppress(IntegrityError):
            found = read_document(store, key, CheckpointManifest)
            if found is not None and (found.run_id, found.phase, found.step) == (run_id, outcome.phase, outcome.step):
                return True
    return False


def _is_unasked(store: Store, run_id: str, outcome: Outcome) -> bool:
    """The agent calls a stop final when somebody asked for it. Where a machine was taken away before the agent had
    amended the trainer's outcome, the request in the store tells whether a person did."""
    if outcome.state != "stopped" or outcome.is_final:
        return False
    request = read_document(store, run_key(run_id, names.REQUEST), Request)
    return request is None or not request.stop


def read_document(store: Store, key: str, cls: type[T]) -> T | None:
    """None where it is not there; one that is there and cannot be read is damage."""
    try:
        return codec.loads(cls, store.read(key))
    except NotInStore:
        return None
    except codec.WireError as exc:
        raise IntegrityError(
            what=f"{key} in {store.url} cannot be read.",
            why=str(exc),
            fix="Whoever wrote it writes it again soon; if it stays so, delete it from the store.",
        ) from exc


class Tail:
    """Lines of a growing file in the store, each given out once.

    The file is pushed whole again and again. A trainer that goes back to a checkpoint cuts it, and a resumed attempt
    may begin it anew: then it no longer holds what we read last where we read it, and we start over rather than miss
    lines. A last line without its newline is still being written and waits for the next look, unless there is none.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._offset = 0
        self._last = b""  # the last line that was given out

    def lines(self, *, is_last: bool = False) -> list[str]:
        return self._fresh(is_last).splitlines()

    def _fresh(self, is_last: bool = False) -> str:
        try:
            data = self._store.read(self._key)
        except NotInStore:
            return ""
        if data[self._offset - len(self._last) : self._offset] != self._last:
            self._offset = 0
        end = len(data) if is_last else data.rfind(b"\n") + 1
        fresh = data[self._offset : end]
        if fresh:
            self._offset = end
            self._last = fresh.splitlines(keepends=True)[-1]
        return fresh.decode("utf-8", "replace")

    def documents(self, cls: type[T]) -> list[T]:
        """The lines as `cls`. One that cannot be read was cut by a crash of its writer and says nothing."""
        found = []
        for text in self._fresh().split("\n")[:-1]:  # a text in a document may hold what splitlines takes for an end
            try:
                found.append(codec.loads(cls, text))
            except codec.WireError:
                continue
        return found
