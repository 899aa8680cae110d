"""Data types of the fake cloud: offers, settings, billed resources, the machine interface and the HTTP format."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Protocol

from homing.world import HttpRequest, HttpResponse

__all__ = [
    "VOLUME_USD_PER_GB_HOUR",
    "BillLine",
    "FakeOffer",
    "Machines",
    "Refusal",
    "Settings",
    "Thing",
    "answer",
    "body_of",
    "route_of",
    "state_of",
    "total_rate",
]

VOLUME_USD_PER_GB_HOUR = Decimal("0.0001")


class Machines(Protocol):
    """Interface for running the cloud's machines. Every call may be repeated, and no call may block."""

    def start(self, instance_id: str, files: dict[str, bytes], argv: list[str], env: dict[str, str]) -> None: ...

    def end(self, instance_id: str) -> None: ...  # ends the instance permanently; ignores unknown ids

    def is_running(self, instance_id: str) -> bool: ...

    # Tells the machine that it will be preempted in `seconds` seconds. Real clouds send SIGTERM.
    def notice(self, instance_id: str, seconds: float) -> None: ...

    def freeze(self, instance_id: str) -> None: ...

    def log(self, instance_id: str) -> str: ...


@dataclass(frozen=True)
class FakeOffer:
    name: str
    device: str
    num_gpus: int
    num_cores: int
    memory_bytes: int
    rate_usd_per_hour: str
    disk_gb: int = 20
    is_spot: bool = False


@dataclass(frozen=True)
class Settings:
    """Properties of the cloud. Unlike faults, they are documented, so clients can rely on them."""

    has_guard: bool = True  # whether the cloud has its own guard, which ends an instance at a given spend or date
    settle_s: float = 2.0  # how stale the list of instances may be
    boot_s: float = 0.5  # time from create to the first command
    destroy_s: float = 0.0  # time from the delete call until the instance is gone and stops billing
    retention_s: float = 86400.0  # how long ended instances can still be described
    deduplicates: bool = False  # whether create deduplicates by name, which most real clouds do not


@dataclass(frozen=True)
class BillLine:
    id: str
    mark: str
    since: float
    until: float | None  # None: still billing
    usd: Decimal
    kind: str = "instance"


@dataclass
class Thing:
    """An instance or a volume: anything that is billed."""

    id: str
    mark: str
    rate_usd_per_hour: str
    created_at: float
    kind: str = "instance"
    ended_at: float | None = None
    ended_by: str = ""
    offer: str = ""
    # What the instance is to run; cleared once the instance has started.
    files: dict[str, str] = field(default_factory=dict)  # base64
    argv: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    # Times of scheduled changes. Infinity means never.
    boots_at: float = math.inf
    dies_at: float = math.inf
    notices_at: float = math.inf
    taken_at: float = math.inf
    hangs_at: float = math.inf
    leaves_at: float = math.inf  # when an accepted delete call takes effect
    guard_usd: str | None = None
    guard_end_by: float | None = None
    is_started: bool = False
    is_dead: bool = False
    is_hung: bool = False
    is_noticed: bool = False
    # After a destroy that falsely reported success, the instance appears as deleted until this time.
    hidden_until: float = -math.inf
    tries_left: int = 0  # how many more destroy calls it takes to end the instance
    leaves_volume: bool = False

    def spend(self, now: float) -> Decimal:
        until = now if self.ended_at is None else min(now, self.ended_at)
        return Decimal(self.rate_usd_per_hour) * Decimal(str(max(0.0, until - self.created_at))) / 3600

    def guarded_until(self) -> float:
        """Return the time at which the cloud's own guard ends the instance."""
        ends = [self.guard_end_by if self.guard_end_by is not None else math.inf]
        if self.guard_usd is not None:
            ends.append(self.created_at + float(Decimal(self.guard_usd) / Decimal(self.rate_usd_per_hour)) * 3600)
        return min(ends)


def state_of(thing: Thing, at: float) -> str:
    if (thing.ended_at is not None and thing.ended_at <= at) or at < thing.hidden_until:
        return "deleted"
    if thing.leaves_at < math.inf or thing.tries_left:
        return "deleting"
    if thing.is_dead:
        return "failed"
    if thing.is_noticed:
        return "preempting"
    if thing.is_started:
        return "ready"
    # Like real clouds: the create call is acknowledged immediately, but the machine itself appears later.
    return "requested" if at <= thing.created_at else "booting"


def total_rate(offer: FakeOffer) -> Decimal:
    """Return the hourly rate of the machine and its disk together."""
    return Decimal(offer.rate_usd_per_hour) + offer.disk_gb * VOLUME_USD_PER_GB_HOUR


# --- HTTP: paths, request bodies, responses ---


class Refusal(Exception):
    """Raised when the cloud understands a request but refuses it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


def route_of(method: str, path: list[str]) -> str:
    """Return the name of the route for a method and path, or "" if there is none."""
    head, length = (path[0] if path else ""), len(path)
    if head in ("volumes", "keys") and (length == 1) == (method in ("GET", "POST")) and method in _OTHER_METHODS:
        return head
    tail = path[2] if length == 3 else ""
    return _PATHS.get((method, head, length, tail), "")


_OTHER_METHODS = ("GET", "POST", "DELETE")
_PATHS = {
    ("GET", "account", 1, ""): "account",
    ("GET", "offers", 1, ""): "offers",
    ("POST", "instances", 1, ""): "create",
    ("GET", "instances", 1, ""): "list",
    ("GET", "instances", 2, ""): "describe",
    ("DELETE", "instances", 2, ""): "destroy",
    ("PUT", "instances", 3, "guard"): "guard",
    ("GET", "instances", 3, "log"): "log",
    ("GET", "instances", 3, "notice"): "notice",
    ("GET", "notices", 2, ""): "notice",
}


def body_of(request: HttpRequest) -> dict[str, Any]:
    try:
        body = json.loads(request.body or b"{}")
    except ValueError as exc:
        raise Refusal(400, f"the body is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise Refusal(400, "the body is not an object")
    return body


def answer(status: int, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> HttpResponse:
    all_headers = {"content-type": "application/json", **(headers or {})}
    return HttpResponse(status, all_headers, b"" if body is None else json.dumps(body).encode())
