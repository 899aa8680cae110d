"""EC2 on the stage: the engine (cloud_state.py) decides what happens, moto and AwsDouble say it in EC2's words.

Ec2     faults, time, bills: those of the other clouds' days
    Shown   AwsDouble without a clock of its own: tokens, prices, groups, images; instances as the engine has them
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from moto.moto_api._internal import mock_random
from tests.doubles import aws as double
from tests.doubles.aws import AwsDouble
from tests.doubles.cloud_state import CloudState, Rental

from homing.world import HttpRequest, HttpResponse, NetworkError

if TYPE_CHECKING:
    from tests.sim.aws import SimAws

__all__ = ["FIRST_PORT", "REGION", "Ec2"]

REGION = "us-east-1"
FIRST_PORT = 2200  # all instances have one address; the port tells them apart
_ROUTES = {"RunInstances": "create", "TerminateInstances": "destroy", "GetConsoleOutput": "log"}
_OFFERS = ("DescribeInstanceTypes", "DescribeInstanceTypeOfferings", "DescribeSpotPriceHistory", "GetProducts")
_STATES = {
    "pending": ("pending", 0),
    "running": ("running", 16),
    "ending": ("shutting-down", 32),
    "gone": ("terminated", 48),
}
_ODD = ("migrating", 99)
_TYPES: dict[tuple[str, bytes], HttpResponse] = {}
_REASONS = {"preempted": "Server.SpotInstanceTermination", "itself": "Client.InstanceInitiatedShutdown"}


class Ec2(CloudState):
    """The engine; what it says, `aws` says for it."""

    def __init__(self, *, machines: SimAws, rate_usd_per_hour: str, seed: int, **messages: Any) -> None:
        super().__init__(machines=machines, seed=seed, **messages)
        self.aws = Shown(self)
        mock_random.seed(seed)
        double._backend(REGION)  # moto lays out its networks at the first question; here before any
        self._rate = Decimal(rate_usd_per_hour)
        self._said: dict[Any, HttpResponse] = {}
        self.scripts: dict[str, str] = {}

    def handle(self, request: HttpRequest) -> HttpResponse:
        return self.aws.dated(self._handle(request))

    def _handle(self, request: HttpRequest) -> HttpResponse:
        self.tick()
        service, action, form = self.aws._read(request)
        ways = self._dice.throw(_route(action, form))
        if "lost_before" in ways:
            raise NetworkError(f"{action}: the line was cut before it arrived")
        if "busy" in ways:
            return double._refusal(service, 503, "RequestLimitExceeded", "Request limit exceeded.")
        if "error_before" in ways:
            return double._refusal(service, 503, "Unavailable", "The service is unavailable.")
        response = self._reply(action, form, request, ways)
        self._publish()
        if "lost_after" in ways:
            raise NetworkError(f"{action}: the line was cut before the answer")
        if "error_after" in ways:
            return double._refusal(service, 500, "InternalError", "An internal error has occurred")
        return response

    def shut_down(self, instance_id: str) -> None:
        """Its operating system did; it was started with the word that this terminates it."""
        thing = self._live.get(instance_id)
        if thing is not None:
            self._end(thing, self.now(), "itself")
            self._publish()

    def _reply(self, action: str, form: dict[str, str], request: HttpRequest, ways: tuple[str, ...]) -> HttpResponse:
        if action == "RunInstances":
            if "no_capacity" in ways:
                text = double.NO_ROOM.format(type=form["InstanceType"], zone=f"{REGION}b")
                return double._refusal("ec2", 500, "InsufficientInstanceCapacity", text)
            return self._run(request, ways)
        if action == "TerminateInstances":
            thing = self._live.get(form["InstanceId.1"])
            if thing is not None:
                self._request_end(thing, ways)
                return double._xml("TerminateInstances", "<instancesSet/>")
        if action == "DescribeInstances":
            late_s = self.faults.list_lag_s * self._dice.rng.random() if "list_late" in ways else 0.0
            self.aws.look(self.now() - late_s, is_odd="odd_state" in ways)
        return self._remembered(action, request)

    def _remembered(self, action: str, request: HttpRequest) -> HttpResponse:
        """moto takes milliseconds to say the same again: between two changes it is asked once."""
        if not action.startswith(("Describe", "List", "Get")):
            self._said.clear()
            return self.aws.handle(request)
        key = (action, _plain(request), self.aws.shown)
        if action == "DescribeInstanceTypes":  # for as long as there is an EC2
            if key[1] not in _TYPES:
                dice = mock_random.getstate()
                _TYPES[key[1]] = self.aws.handle(request)
                mock_random.setstate(dice)  # the day that asks first is like every other
            return _TYPES[key[1]]
        if key not in self._said:
            self._said[key] = self.aws.handle(request)
        return self._said[key]

    def _run(self, request: HttpRequest, ways: tuple[str, ...]) -> HttpResponse:
        known = set(self.aws.lives)
        self._said.clear()
        response = self.aws.handle(request)
        for instance_id in set(self.aws.lives) - known:
            life = self.aws.lives[instance_id]
            # Always at the offered rate: a spot request names its highest price.
            self._draw_fate(self._add("instance", life.mark, self._rate, instance_id), ways)
        return response

    def _start(self, thing: Rental) -> None:
        self._machines.boot(thing.id, self.scripts[thing.id])

    def _end(self, thing: Rental, at: float, by: str) -> None:
        super()._end(thing, at, by)
        self._said.clear()
        self.aws._end(self.aws.lives[thing.id], _REASONS.get(by, "Client.UserInitiatedShutdown"))


class Shown(AwsDouble):
    """EC2's words about what the engine has; no time of its own passes in it."""

    def __init__(self, engine: Ec2) -> None:
        super().__init__(engine.now, self)  # type: ignore[arg-type]
        self._engine = engine
        self.unseen: set[str] = set()
        self.shown: tuple[tuple[str, str, bool], ...] = ()

    def tick(self) -> None:
        pass

    def look(self, at: float, *, is_odd: bool) -> None:
        """Each instance as it was `at` that moment; for ever, until the next look."""
        self.unseen = set()
        shown = []
        for thing in [each for each in self._engine._things.values() if each.kind == "instance"]:
            has_left = thing.ended_at is not None and at > thing.ended_at + self._engine.settings.retention_s
            if thing.created_at > at or has_left:
                self.unseen.add(thing.id)
            name, code = _STATES[thing.state(at)]
            if is_odd and name == "running":
                name, code = _ODD
            state = self._instance(self.lives[thing.id])._state
            state.name, state.code = name, code
            shown.append((thing.id, name, thing.id in self.unseen))
        self.shown = tuple(shown)

    def hidden(self) -> set[str]:
        return self.unseen

    # --- what it runs is started by the engine, when it has booted ---

    def start(self, instance_id: str, script: str, env: dict[str, str]) -> int:
        self._engine.scripts[instance_id] = script
        return FIRST_PORT + len(self._engine.scripts)

    def end(self, instance_id: str) -> None:
        pass

    def log(self, instance_id: str) -> str:
        return ""


def _plain(request: HttpRequest) -> tuple[str, bytes]:
    """What is asked, and where: neither signature nor date."""
    body = b"&".join(part for part in request.body.split(b"&") if not part.startswith(b"StartTime"))
    return double._region_of(request), body


def _route(action: str, form: dict[str, str]) -> str:
    if action == "DescribeInstances":
        return "describe" if any(name.startswith("InstanceId.") for name in form) else "list"
    return _ROUTES.get(action) or ("offers" if action in _OFFERS else "volumes")
