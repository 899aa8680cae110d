"""Worlds in which no time is lost: a clock that is a number, or waits that are not waited for. The disk is real."""

from __future__ import annotations

from typing import Any

from homing.world import HttpRequest, HttpResponse, World

__all__ = ["CloudWorld", "Hasty"]


class CloudWorld(World):
    """Its network ends in a cloud double, which lives on the same clock: a bad hour takes milliseconds."""

    cloud: Any  # given by the subclass; it has `tick` and `handle`

    def __init__(self, t: float = 1_000_000.0) -> None:
        self.t = t
        self.slept: list[float] = []
        self.requests: list[HttpRequest] = []

    def now(self) -> float:
        return self.t

    def boottime(self) -> float:
        return self.t

    def monotonic(self) -> float:
        return self.t

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.pass_time(seconds)

    def pass_time(self, seconds: float) -> None:
        self.t += seconds
        self.cloud.tick()

    def http(self, request: HttpRequest) -> HttpResponse:
        self.requests.append(request)
        reply: HttpResponse = self.cloud.handle(request)
        return reply


class Hasty(World):
    """The real one; waits between tries are not waited for."""

    def sleep(self, seconds: float) -> None:
        pass
