"""Open weights from the Hub to the instance, without home and without any token: a file is whole and right, or absent.

    url -> FILE.part (goes on where it broke off) -> size and sha256, as home learned them from the Hub -> FILE

429, a server in trouble and a broken line are tried again, longer each time, while the Hub's own wish to wait is
heeded; after PATIENCE_S without one new byte that is over. Wrong bytes are thrown away and asked for once more. What
cannot get better (no such file, not for everybody) ends at once. Then it is HubFailed: nothing is trained on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from homing.errors import StoreError
from homing.units import format_bytes, format_duration
from homing.wire.boot import Input
from homing.world import NetworkError, World

__all__ = ["PATIENCE_S", "HubFailed", "take_from_hub"]

PATIENCE_S = 600.0
_TELL_EVERY_S = 60.0  # far below any idle limit: a slow line that moves is not idle
_LONGEST_WAIT_S = 60.0
_TRIES_AT_WRONG_BYTES = 2
_PIECE = 1 << 20
_TOO_MANY, _NOT_SATISFIABLE = 429, 416


class HubFailed(StoreError):
    """What home was told lies on the Hub cannot be had from there."""


def take_from_hub(item: Input, path: str, world: World, tell: Callable[[str, str], None]) -> None:
    """The file at `path`, with the sha256 of `item`. `tell` hears, now and then, how far it is, and of each new try."""
    taking = _Taking(item, f"{path}.part", world, tell)
    failures, wrong, moved_at = 0, 0, world.monotonic()
    furthest = taking.num_bytes  # what comes a second time, from a server that always begins anew, is no new byte
    while True:
        problem, wait_s = taking.go_on()
        if taking.num_bytes > furthest:
            failures, moved_at, furthest = 0, world.monotonic(), taking.num_bytes
        if not problem and taking.is_right():
            world.rename(taking.part, path)
            return
        if not problem:
            wrong += 1
            problem, furthest = taking.throw_away(), 0
            if wrong == _TRIES_AT_WRONG_BYTES:
                raise _failed(item, problem)
        quiet_s = world.monotonic() - moved_at
        if quiet_s >= PATIENCE_S:
            raise _failed(item, f"{problem}, and no new byte for {format_duration(quiet_s)}")
        tell("input_retried", f"{item.path}: {problem}; it is tried again.")
        world.sleep(min(max(wait_s, min(2.0**failures, _LONGEST_WAIT_S)), PATIENCE_S - quiet_s))
        failures += 1


class _Taking:
    def __init__(self, item: Input, part: str, world: World, tell: Callable[[str, str], None]) -> None:
        self.item, self.part, self.world, self.tell = item, part, world, tell
        self.num_bytes, self._hash, self._told_at = 0, hashlib.sha256(), world.monotonic()
        while self.world.exists(part) and (piece := world.read(part, self.num_bytes, _PIECE)):  # a process before us
            self._count(piece)

    def go_on(self) -> tuple[str, float]:
        """One request: what stands in the way, or "", and how long the Hub wants us to wait."""
        if self.num_bytes >= self.item.num_bytes:
            return "", 0.0
        had = self.num_bytes
        try:
            answer = self.world.download(self.item.url, self.part, self.item.num_bytes, self._take)
        except NetworkError as exc:
            self._start_again_unless_whole()
            return str(exc), 0.0
        if answer.status == (206 if had else 200) and self.num_bytes > had:
            is_cut = self.num_bytes < self.item.num_bytes
            return (f"the line broke after {self.num_bytes:,} of {self.item.num_bytes:,} bytes" if is_cut else ""), 0.0
        if had and answer.status in (200, 206, _NOT_SATISFIABLE):
            self.throw_away()  # it does not go on where we are
            return f"HTTP {answer.status} to the rest of it", 0.0
        if answer.status != _TOO_MANY and answer.status < 500 and answer.status != 200:
            raise _failed(self.item, f"HTTP {answer.status}")
        asked = answer.headers.get("retry-after", "")
        return f"HTTP {answer.status}" + (" and no bytes" if answer.status == 200 else ""), _seconds(asked)

    def _start_again_unless_whole(self) -> None:
        """What was counted must be what is written: a crash of the line leaves both, a full disk perhaps not."""
        there = self.world.size(self.part) if self.world.exists(self.part) else 0
        if there != self.num_bytes:
            self.throw_away()

    def _take(self, piece: bytes) -> None:
        self._count(piece)
        if self.world.monotonic() - self._told_at >= _TELL_EVERY_S:
            self._told_at = self.world.monotonic()
            of = format_bytes(self.item.num_bytes)
            self.tell("input_fetching", f"{self.item.path}: {format_bytes(self.num_bytes)} of {of} from the Hub.")

    def _count(self, piece: bytes) -> None:
        self._hash.update(piece)
        self.num_bytes += len(piece)

    def is_right(self) -> bool:
        return self.num_bytes == self.item.num_bytes and self._hash.hexdigest() == self.item.sha256

    def throw_away(self) -> str:
        """What was wrong with it, for a person."""
        found, size = self._hash.hexdigest(), self.num_bytes
        self.world.remove(self.part)
        self.num_bytes, self._hash = 0, hashlib.sha256()
        if size != self.item.num_bytes:
            return f"more than the {self.item.num_bytes:,} bytes that the Hub's listing says came"
        return f"the sha256 of what came is {found}, the Hub's listing says {self.item.sha256}"


def _seconds(text: str) -> float:
    return float(text) if text.isdigit() else 0.0


def _failed(item: Input, why: str) -> HubFailed:
    return HubFailed(
        what=f"{item.path} could not be taken from the Hub.",
        why=f"{item.url}: {why}.",
        fix="Launch again; or bring them here (hf download) and name the folder: model.from: FOLDER",
    )
