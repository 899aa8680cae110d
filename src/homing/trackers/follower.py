"""Follows a run's metrics and sends them to one tracker until the run ends.

    source -> lines not sent yet -> sink.log ... -> flush -> record what was sent -> wait -> repeat

The follower retries forever and never blocks a run. The record of what was sent is a list of short hashes, one per
metrics line. When training rolls back to a checkpoint, the end of metrics.jsonl is cut off and rewritten. The sink is
then rewound to the first line that differs from the list.

`start` runs a follower as a separate process, one per run and tracker. The files of a follower:

$HOMING_HOME/runs/<run id>/trackers/NAME.order   what to follow and where to send it; secrets stay in the environment
                                    NAME.json    the record of what was sent
                                    NAME.lock    locked while the follower runs
                                    NAME.log     the follower's log, with errors
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from homing.store import open_store, run_key
from homing.trackers.sinks import Sink, What, open_sink
from homing.wire import codec, file_names
from homing.wire.codec import WireError
from homing.wire.event_lines import Metric, Outcome
from homing.world import World

__all__ = ["FolderSource", "Follower", "Following", "Source", "StoreSource", "is_following", "start"]


log = logging.getLogger(__name__)

EVERY_S = 10.0
_LONGEST_PAUSE_S = 300.0
# After this long without new metrics, the follower gives up, because the run will probably never report that it
# ended. The user can restart the follower at any time.
SILENT_S = 86400.0


@dataclass(frozen=True)
class Following:
    tracker: str
    run_id: str
    name: str  # the run's name in the tracker
    folder: str  # local folder that contains the files of all followers of the run
    files: str  # folder in which the tracker keeps its own files
    run_dir: str = ""  # folder that contains the metrics; "" if they are in `store`
    store: str = ""  # address of the store that contains the metrics
    config: dict[str, Any] = field(default_factory=dict)

    def path(self, suffix: str) -> Path:
        return Path(self.folder) / f"{self.tracker}.{suffix}"


def start(following: Following, world: World) -> bool:
    """Start a follower; return False if one is already running."""
    if is_following(following, world):
        return False
    world.mkdir(following.folder)
    world.write(following.path("order"), json.dumps(asdict(following), indent=1).encode())
    argv = [world.python(), "-m", "homing.trackers", str(following.path("order"))]
    world.spawn(argv, world.environment(), following.folder, following.path("log"))
    return True


def is_following(following: Following, world: World) -> bool:
    return world.is_locked(following.path("lock"))


class Source(Protocol):
    """Where the follower reads a run's files. `read` returns b"" if a file does not exist, and raises on failure."""

    def read(self, name: str) -> bytes: ...


@dataclass
class FolderSource:
    run_dir: Path
    world: World

    def read(self, name: str) -> bytes:
        try:
            return self.world.read(self.run_dir / name)
        except FileNotFoundError:
            return b""


@dataclass
class StoreSource:
    url: str
    run_id: str
    world: World

    def read(self, name: str) -> bytes:
        store = open_store(self.url, self.world, create=False)
        key = run_key(self.run_id, name)
        return store.read(key) if store.exists(key) else b""


@dataclass
class Follower:
    tracker: str
    what: What
    source: Source
    world: World
    state_path: Path  # file that records what was sent, so that a restarted follower can continue
    open_: Callable[[str, What], Sink] = open_sink
    sent: list[str] = field(default_factory=list)
    sink: Sink | None = None
    num_failed: int = 0  # consecutive failures

    def __post_init__(self) -> None:
        self.sent = _load(self.state_path, self.world)

    def follow(self, every_s: float = EVERY_S) -> str:
        """Follow the run until it has an outcome and all metrics are sent; return the run's final state.

        Also stop if no new line arrives for SILENT_S seconds; in that case, return "" if the run has no outcome yet.
        """
        active_at = self.world.monotonic()
        while True:
            # Read the outcome before the lines. Otherwise, lines written just before the outcome could be missed.
            state = self._outcome()
            num_before = len(self.sent)
            is_done = self.catch_up()
            if len(self.sent) != num_before:
                active_at = self.world.monotonic()
            is_silent = self.world.monotonic() - active_at > SILENT_S
            if (is_done and state) or is_silent:
                self._close(state)
                return state
            self.world.sleep(min(every_s * 2**self.num_failed, _LONGEST_PAUSE_S) if self.num_failed else every_s)

    def catch_up(self) -> bool:
        """Send the lines that have not been sent yet. Return False if the source or the tracker failed."""
        try:
            lines = self._lines()
            num_same = _num_same(self.sent, [short for short, _ in lines])
            fresh = [metric for _, metric in lines[num_same:] if metric is not None]
            if fresh:
                self._send(fresh, has_fallen_back=num_same < len(self.sent))
            self.sent = [short for short, _ in lines] if lines else self.sent
            _save(self.state_path, self.sent, self.world)
        except Exception as exc:
            # A tracker's package may raise any exception, so log it and retry later with a new sink.
            log.warning("%s failed; retrying: %s: %s", self.tracker, type(exc).__name__, exc)
            self.sink = None
            self.num_failed = min(self.num_failed + 1, 10)
            return False
        self.num_failed = 0
        return True

    def _lines(self) -> list[tuple[str, Metric | None]]:
        """Return the hash and the metric of each complete line. The metric is None if the line cannot be parsed."""
        data = self.source.read(file_names.METRICS)
        whole = data[: data.rfind(b"\n") + 1]
        return [(hashlib.sha256(line).hexdigest()[:12], _parse(line)) for line in whole.splitlines()]

    def _send(self, metrics: list[Metric], *, has_fallen_back: bool) -> None:
        if self.sink is None:
            self.sink = self.open_(self.tracker, self.what)
        if has_fallen_back:
            self.sink.rewind(metrics[0])
        for metric in metrics:
            self.sink.log(metric)
        self.sink.flush()

    def _outcome(self) -> str:
        try:
            data = self.source.read(file_names.OUTCOME)
            return codec.loads(Outcome, data).state if data else ""
        except Exception as exc:  # if the outcome cannot be read, assume that the run has not ended
            log.warning("could not check whether the run has ended: %s", exc)
            return ""

    def _close(self, state: str) -> None:
        try:
            if self.sink is not None:
                self.sink.close(state)
        except Exception as exc:  # any exception type is possible; harmless, as all metrics have been sent
            log.warning("%s did not close: %s", self.tracker, exc)


def _parse(line: bytes) -> Metric | None:
    try:
        return codec.loads(Metric, line)
    except WireError:
        return None


def _num_same(old: list[str], new: list[str]) -> int:
    number = 0
    while number < min(len(old), len(new)) and old[number] == new[number]:
        number += 1
    return number


def _load(path: Path, world: World) -> list[str]:
    try:
        return [str(each) for each in json.loads(world.read(path))["sent"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # with an empty record, the follower starts from the beginning


def _save(path: Path, sent: list[str], world: World) -> None:
    world.mkdir(path.parent)
    world.write(path, json.dumps({"schema": "homing.tracker/1", "sent": sent}).encode())
