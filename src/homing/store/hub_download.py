"""Downloads open weights from the Hub directly to the instance, without a token.

    url -> FILE.part (resumed after an interruption) -> compare with the Hub's size and sha256 -> FILE

FILE is either complete and verified, or absent. After HTTP 429, a server error or a broken connection, the download is
retried at increasing intervals that respect Retry-After, until PATIENCE_S seconds have passed without a new byte. Wrong
bytes are discarded and downloaded once more. A permanent error (no such file, access denied) raises HubFailed
immediately, and the run ends before training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from homing.errors import StoreError
from homing.units import format_bytes, format_duration
from homing.wire.boot_json import Input
from homing.world import NetworkError, World

__all__ = ["PATIENCE_S", "HubFailed", "take_from_hub"]

PATIENCE_S = 600.0
_REPORT_EVERY_S = 60.0  # far below any idle limit, so that a slow download is not mistaken for an idle run
_LONGEST_WAIT_S = 60.0
_TRIES_AT_WRONG_BYTES = 2
_CHUNK = 1 << 20
_TOO_MANY, _NOT_SATISFIABLE = 429, 416


class HubFailed(StoreError):
    """Raised if a file that the Hub listed at launch cannot be downloaded."""


def take_from_hub(item: Input, path: str, world: World, notify: Callable[[str, str], None]) -> None:
    """Download `item` to `path` and verify its sha256. Raise HubFailed if that is impossible.

    `notify` is called with regular progress reports, and with a message before every retry.
    """
    taking = _Taking(item, f"{path}.part", world, notify)
    failures, wrong, moved_at = 0, 0, world.monotonic()
    # A server without range support sends the same bytes again, which must not count as progress.
    furthest = taking.num_bytes
    while True:
        problem, wait_s = taking.resume()
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
            raise _failed(item, f"{problem}, and no new bytes for {format_duration(quiet_s)}")
        notify("input_retried", f"{item.path}: {problem}; retrying.")
        world.sleep(min(max(wait_s, min(2.0**failures, _LONGEST_WAIT_S)), PATIENCE_S - quiet_s))
        failures += 1


class _Taking:
    def __init__(self, item: Input, part: str, world: World, notify: Callable[[str, str], None]) -> None:
        self.item, self.part, self.world, self.notify = item, part, world, notify
        self.num_bytes, self._hash, self._reported_at = 0, hashlib.sha256(), world.monotonic()
        while self.world.exists(part) and (chunk := world.read(part, self.num_bytes, _CHUNK)):
            # An earlier process left a partial file, so resume from it.
            self._count(chunk)

    def resume(self) -> tuple[str, float]:
        """Send one request. Return the problem ("" if none) and how many seconds the Hub asks us to wait."""
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
            return (
                f"the connection dropped after {self.num_bytes:,} of {self.item.num_bytes:,} bytes" if is_cut else ""
            ), 0.0
        if had and answer.status in (200, 206, _NOT_SATISFIABLE):
            self.throw_away()  # the server ignored our offset and sent the file from its beginning
            return f"HTTP {answer.status} when resuming", 0.0
        if answer.status != _TOO_MANY and answer.status < 500 and answer.status != 200:
            raise _failed(self.item, f"HTTP {answer.status}")
        asked = answer.headers.get("retry-after", "")
        return f"HTTP {answer.status}" + (" and no bytes" if answer.status == 200 else ""), _seconds(asked)

    def _start_again_unless_whole(self) -> None:
        """Discard the partial file if some of the received bytes are missing, as happens when the disk is full."""
        there = self.world.size(self.part) if self.world.exists(self.part) else 0
        if there != self.num_bytes:
            self.throw_away()

    def _take(self, chunk: bytes) -> None:
        self._count(chunk)
        if self.world.monotonic() - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = self.world.monotonic()
            of = format_bytes(self.item.num_bytes)
            self.notify("input_fetching", f"{self.item.path}: {format_bytes(self.num_bytes)} of {of} downloaded.")

    def _count(self, chunk: bytes) -> None:
        self._hash.update(chunk)
        self.num_bytes += len(chunk)

    def is_right(self) -> bool:
        return self.num_bytes == self.item.num_bytes and self._hash.hexdigest() == self.item.sha256

    def throw_away(self) -> str:
        """Delete the partial file and return what was wrong with it."""
        found, size = self._hash.hexdigest(), self.num_bytes
        self.world.remove(self.part)
        self.num_bytes, self._hash = 0, hashlib.sha256()
        if size != self.item.num_bytes:
            return f"received more than the {self.item.num_bytes:,} bytes that the Hub lists"
        return f"the sha256 is {found}, but the Hub lists {self.item.sha256}"


def _seconds(text: str) -> float:
    return float(text) if text.isdigit() else 0.0


def _failed(item: Input, why: str) -> HubFailed:
    return HubFailed(
        what=f"{item.path} could not be downloaded from the Hub.",
        why=f"{item.url}: {why}.",
        fix="Launch again, or download the weights (hf download) and set model.from to their folder.",
    )
