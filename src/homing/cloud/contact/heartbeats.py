"""Reads what an instance has reported to the store about a run, and measures how long it has been silent.

A document that does not exist yet is returned as None. A store that cannot be read raises an error, because an
unreadable store does not mean a silent instance. The instance itself is never contacted.

Silence is measured by this computer's own clock. A heartbeat carries the time of the machine that wrote it, and that
clock may be minutes off. A machine with a slow clock would look dead while it reports, and one with a fast clock would
look alive after it died. So the guard records the latest heartbeat, and the time at which it first saw that heartbeat,
in $HOMING_HOME/runs/<run id>/heard.json.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any, TypeVar

from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.meter import elapsed_s, stamp
from homing.errors import IntegrityError
from homing.store import NotInStore, Store, run_key
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest
from homing.wire.control_files import Heartbeat, Request
from homing.wire.event_lines import Event, Outcome
from homing.wire.run_json import Run

__all__ = ["RunReports", "Tail", "age_s", "last_word", "phases_of", "quiet_s", "read_document", "read_reports"]

T = TypeVar("T")


# Heartbeat states in which the agent has written its own outcome. In any earlier state, the outcome may come from a
# trainer process that the agent is about to restart.
_ENDING = ("pushing", "kept", "ending", "ended")
_LIMIT_EVENTS = ("limit_reached", "landed")
_LAST_HEARTBEAT = "heard.json"


@dataclass(frozen=True)
class RunReports:
    heartbeat: Heartbeat | None
    outcome: Outcome | None
    is_limit: bool = False  # the run ended because of a limit
    is_saved: bool = True  # False if the run is done but its final model is not in the store or not verified
    # True if the run was interrupted: it stopped, but not because of a person or a limit
    is_unasked: bool = False


def read_reports(store: Store, run_id: str, line: LedgerLine | None) -> RunReports:
    """Return the heartbeat and outcome of this attempt only, ignoring those of earlier attempts."""
    # Read the heartbeat first. It is pushed last, so an outcome read after it is at least as new.
    heartbeat = read_document(store, run_key(run_id, file_names.HEARTBEAT), Heartbeat)
    if heartbeat is not None and line is not None and heartbeat.mark != line.mark:
        heartbeat = None
    is_gone = line is not None and line.destroyed_at is not None
    outcome = None
    if is_gone or (heartbeat is not None and heartbeat.state in _ENDING):
        outcome = read_document(store, run_key(run_id, file_names.OUTCOME), Outcome)
    if outcome is None:
        return RunReports(heartbeat, None)
    is_limit = _is_limit(store, run_id, outcome, line.intent_at if line is not None else 0.0)
    is_saved = outcome.state != "done" or (heartbeat is not None and heartbeat.is_pushed)
    is_saved = is_saved or _has_model(store, run_id, line.run_name if line is not None else "", outcome)
    is_unasked = not is_limit and _is_unasked(store, run_id, outcome)
    return RunReports(heartbeat, outcome, is_limit, is_saved, is_unasked)


def _is_limit(store: Store, run_id: str, outcome: Outcome, since: float) -> bool:
    if outcome.state != "stopped":
        return False
    events = Tail(store, run_key(run_id, file_names.EVENTS)).documents(Event)
    is_reported = any(event.kind in _LIMIT_EVENTS and event.t >= since for event in events)
    return is_reported or "limit" in outcome.reason


def _has_model(store: Store, run_id: str, run_name: str, outcome: Outcome) -> bool:
    """Return True if models/ has the weights of this outcome: their manifest is written last, after a read-back.

    A machine may disappear after writing the manifest but before sending its last heartbeat.
    """
    for name in filter(None, (run_name, run_id)):
        key = f"{file_names.STORE_MODELS}/{name}/{file_names.MANIFEST}"
        with contextlib.suppress(IntegrityError):
            found = read_document(store, key, CheckpointManifest)
            if found is not None and (found.run_id, found.phase, found.step) == (run_id, outcome.phase, outcome.step):
                return True
    return False


def _is_unasked(store: Store, run_id: str, outcome: Outcome) -> bool:
    """Return True if the run stopped although no one asked it to.

    The agent marks a requested stop as final. If a machine was preempted before the agent could amend the trainer's
    outcome, the request in the store shows whether a person asked for the stop.
    """
    if outcome.state != "stopped" or outcome.is_final:
        return False
    request = read_document(store, run_key(run_id, file_names.REQUEST), Request)
    return request is None or not request.stop


def read_document(store: Store, key: str, cls: type[T]) -> T | None:
    """Return the document, or None if it does not exist; raises IntegrityError if it cannot be parsed."""
    try:
        return codec.loads(cls, store.read(key))
    except NotInStore:
        return None
    except codec.WireError as exc:
        raise IntegrityError(
            what=f"Cannot read {key} in {store.url}.",
            why=str(exc),
            fix="Try again later: the file is rewritten regularly. If the error persists, delete it from the store.",
        ) from exc


def phases_of(store: Store, run: RunRow) -> list[str]:
    """Return the phases of a run in training order, or an empty list if its store has no run.json."""
    resolved = read_document(store, run_key(run.id, file_names.RUN), Run)
    return [phase.kind for phase in resolved.phases] if resolved is not None else []


class Tail:
    """Reads the lines of a growing file in the store, and returns each line once.

    The instance pushes the whole file each time. A trainer that goes back to a checkpoint truncates it, and a resumed
    attempt may start a new one. If the last line read is no longer at its offset, reading starts over, so that no line
    is missed. A final line without a newline is still being written and is not returned until a later call, unless
    `is_last` is set.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._offset = 0
        self._last = b""  # the last line returned

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
        """Return the new lines parsed as `cls`. Skip unreadable lines, which were cut off when their writer crashed."""
        found = []
        for text in self._fresh().split("\n")[:-1]:  # splitlines() would also split at other line separators
            try:
                found.append(codec.loads(cls, text))
            except codec.WireError:
                continue
        return found


# --- how long an instance has been silent ---


def quiet_s(home: Home, run_id: str, beat: Heartbeat) -> float | None:
    """Return the seconds since this heartbeat was first seen here, or record it and return None if it is new."""
    now, word = home.world.now(), [beat.mark, beat.t]
    note = _read(home, run_id)
    if note is not None and note["word"] == word:
        seen_s = elapsed_s(home, note["seen"])
        if seen_s >= 0:  # a negative value means that this clock was set back while the computer was off
            return seen_s
    note = {"schema": "homing.heard/2", "word": word, "state": beat.state, "seen": stamp(home)}
    try:
        home.world.mkdir(home.run_dir(run_id))
        home.world.write(home.run_dir(run_id) / _LAST_HEARTBEAT, json.dumps(note).encode())
    except OSError:
        return max(0.0, now - beat.t)  # cannot write (the disk is full), so trust the heartbeat's own timestamp
    return None


def age_s(home: Home, run_id: str, beat: Heartbeat) -> float:
    """Return a heartbeat's age for display, based on its own timestamp or on when a local guard first saw it."""
    now, note = home.world.now(), _read(home, run_id)
    said_s = max(0.0, now - beat.t)
    heartbeat_age_s = elapsed_s(home, note["seen"]) if note is not None else 0.0
    if note is None or note["word"][0] != beat.mark or heartbeat_age_s < 0:
        return said_s
    # If this is not the recorded heartbeat, it is newer, so its age is at most the time since that one was first seen.
    return heartbeat_age_s if note["word"][1] == beat.t else min(said_s, heartbeat_age_s)


def last_word(home: Home, run_id: str, mark: str) -> tuple[str, float]:
    """Return the last recorded state and its age in seconds, or ("", 0.0). Used if the store cannot be read."""
    note = _read(home, run_id)
    if note is None or note["word"][0] != mark:
        return "", 0.0
    return str(note["state"]), max(0.0, elapsed_s(home, note["seen"]))


def _read(home: Home, run_id: str) -> dict[str, Any] | None:
    """Return the recorded heartbeat, or None if it is missing or damaged, so that the next one counts as new."""
    try:
        note = json.loads(home.world.read(home.run_dir(run_id) / _LAST_HEARTBEAT))
        mark, t = note["word"]
        seen = note["seen"]
        stamp_seen = {"now": float(seen["now"]), "boottime": float(seen["boottime"]), "boot_id": str(seen["boot_id"])}
        return {"word": [str(mark), float(t)], "state": str(note["state"]), "seen": stamp_seen}
    except (OSError, ValueError, KeyError, TypeError):
        return None
