"""AWS on the stage: the real adapter and the real boto3, whose requests World carries to moto and what is before it.

    engine     the fake cloud's: what goes wrong, what time brings, who bills; so the days are those of other clouds
    AwsDouble  what EC2 says: client tokens, prices, groups, images, in EC2's own XML; shown as the engine has it

An instance is a host. Its operating system is here too, as far as money goes: `shutdown` terminates it, and its own
timer fires whatever became of our programs, unless the machine hangs. A notice of preemption stands in the metadata.
One botocore client for a service and region serves all actors: to make one takes longer than most verbs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from unittest import mock

from moto.moto_api._internal import mock_random
from tests.doubles import aws as double
from tests.doubles.aws import AwsDouble
from tests.sim.cloud import CLOUD_HOST, SimCloud
from tests.sim.host import EPOCH, Host
from tests.sim.runpod import SimRunpod, Startup
from tests.sim.world import SimWorld

from homing.cloud.providers import aws_api, aws_market
from homing.cloud.providers.aws import Aws
from homing.cloud.providers.fake_cloud import FakeCloud
from homing.cloud.providers.fake_faults import Faults
from homing.cloud.providers.fake_things import Settings, Thing, state_of
from homing.cloud.startup import WORK_DIR
from homing.wire import names
from homing.wire.limit import PROVIDER, allowed_s, reserve_s
from homing.world import Completed, HttpRequest, HttpResponse, NetworkError

if TYPE_CHECKING:
    from tests.sim.stage import Stage

__all__ = ["ENV", "SETTINGS", "SimAws", "pace"]

_REGION, _KIND = "us-east-1", "p5.4xlarge"
_IMDS = f"http://{CLOUD_HOST}/imds"
_KEYS = {"AWS_ACCESS_KEY_ID": "AKIASIM", "AWS_SECRET_ACCESS_KEY": "of-the-account"}
ENV = {**_KEYS, "AWS_REGION": _REGION}
# What the run file says.
SETTINGS = {"instance_types": [_KIND], "ssh_from": "203.0.113.7", "metadata_url": _IMDS}
_FIRST_PORT = 2200  # all instances have one address; the port tells them apart
_ROUTES = {"RunInstances": "create", "TerminateInstances": "destroy", "GetConsoleOutput": "log"}
_OFFERS = ("DescribeInstanceTypes", "DescribeInstanceTypeOfferings", "DescribeSpotPriceHistory", "GetProducts")
_STATES = {"requested": ("pending", 0), "booting": ("pending", 0), "deleting": ("shutting-down", 32)}
_RUNNING, _TERMINATED, _ODD = ("running", 16), ("terminated", 48), ("migrating", 99)
_TYPES: dict[tuple[str, bytes], HttpResponse] = {}
_REASONS = {"preempted": "Server.SpotInstanceTermination", "itself": "Client.InstanceInitiatedShutdown"}


class Ec2(FakeCloud):
    """The engine; what it says, `aws` says for it."""

    def __init__(self, *, machines: SimAws, rate_usd_per_hour: str, seed: int, **told: Any) -> None:
        super().__init__(machines=machines, offers=[], api_key="", seed=seed, **told)
        self.aws = _Shown(self)
        mock_random.seed(seed)
        double._backend(_REGION)  # moto lays out its networks at the first question; here before any
        self._rate = Decimal(rate_usd_per_hour)
        self._said: dict[Any, HttpResponse] = {}
        self.scripts: dict[str, str] = {}

    def handle(self, request: HttpRequest) -> HttpResponse:
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
        self._save()
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
            self._plan_next()
            self._save()

    def _reply(self, action: str, form: dict[str, str], request: HttpRequest, ways: tuple[str, ...]) -> HttpResponse:
        if action == "RunInstances":
            if "no_capacity" in ways:
                text = double.NO_ROOM.format(type=form["InstanceType"], zone=f"{_REGION}b")
                return double._refusal("ec2", 500, "InsufficientInstanceCapacity", text)
            return self._run(request, ways)
        if action == "TerminateInstances":
            thing = self._live.get(form["InstanceId.1"])
            if thing is not None:
                self._destroy(thing, ways)
                self._plan_next()
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
            thing = self._add("instance", life.mark, self._rate)
            del self._things[thing.id], self._live[thing.id]
            thing.id = instance_id
            self._things[instance_id] = self._live[instance_id] = thing
            # Spot has a highest price and a root disk goes with its machine: neither way happens here.
            self._decide_fate(thing, tuple(way for way in ways if way not in ("leaves_volume", "dearer")))
            self._plan_next()
        return response

    def _start(self, thing: Thing) -> None:
        self._machines.boot(thing.id, self.scripts[thing.id])  # type: ignore[attr-defined]
        thing.is_started = self._is_changed = True

    def _end(self, thing: Thing, at: float, by: str) -> None:
        super()._end(thing, at, by)
        self._said.clear()
        self.aws._end(self.aws.lives[thing.id], _REASONS.get(by, "Client.UserInitiatedShutdown"))


class _Shown(AwsDouble):
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
            name, code = _TERMINATED if state_of(thing, at) == "deleted" else _STATES.get(state_of(thing, at), _RUNNING)
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
        return _FIRST_PORT + len(self._engine.scripts)

    def end(self, instance_id: str) -> None:
        pass

    def log(self, instance_id: str) -> str:
        return ""


class SimAws(SimRunpod):
    def __init__(self, stage: Stage, settings: Settings, faults: Faults, rate_usd_per_hour: str) -> None:
        SimCloud.__init__(self, stage, settings, faults, rate_usd_per_hour)
        self.cloud: Ec2 = Ec2(  # type: ignore[assignment]
            machines=self,
            rate_usd_per_hour=rate_usd_per_hour,
            now=lambda: EPOCH + stage.t,
            settings=settings,
            faults=faults,
            seed=stage.random.getrandbits(32),
            on_change=stage.on_cloud_change,
        )
        aws_market.BOOT_S = settings.boot_s + 10.0  # until `pace` ends
        _Clients.stage = stage
        self._timers: dict[str, float] = {}  # instance -> when its system shuts down, true time
        self.num_timers_fired = 0

    def http(self, world: SimWorld, request: HttpRequest) -> HttpResponse:
        if not request.url.startswith(_IMDS):
            return super().http(world, request)
        world.point("http", f"{request.method} metadata")  # of the machine itself: no line that could be cut
        path = request.url.removeprefix(_IMDS)
        return self.cloud.aws.metadata(world.machine.name, request.method, path, dict(request.headers))

    # --- what its machines are ---

    def boot(self, instance_id: str, script: str) -> None:
        skew_s = self._stage.random.uniform(-self.machine_skew_s, self.machine_skew_s)
        host = self.machines[instance_id] = self._stage.add_host(instance_id, skew_s=skew_s)
        self._stage.say(f"aws boots {instance_id}")
        begin = lambda world: _Startup(world, script, self).run()  # noqa: E731
        self.first[instance_id] = self._stage.programs.begin(host, "startup", begin, dict(host.env))

    def notice(self, instance_id: str, seconds: float) -> None:
        self._stage.say(f"aws gives notice to {instance_id}: {seconds:g} s")
        life = self.cloud.aws.lives[instance_id]
        life.notice_at, life.taken_at = self.cloud.now(), self.cloud.now() + seconds

    def arm(self, host: Host, minutes: int) -> None:
        """`shutdown -h +M`: process 1 keeps it, and of two the last counts."""
        at = self._timers[host.name] = self._stage.t + 60.0 * minutes
        self._stage.say(f"{host.name} shuts down in {minutes} min at the latest")
        self._stage.at(at, lambda: self._fire(host, at))

    def _fire(self, host: Host, at: float) -> None:
        if self._timers[host.name] != at or not host.is_up:
            return
        if host.is_frozen:  # a machine that hangs does not obey; awake again, it does
            self._stage.at(self._stage.t + 60.0, lambda: self._fire(host, at))
            return
        self.num_timers_fired += 1
        self.cloud.shut_down(host.name)

    # --- OpenSSH ---

    def ssh(self, world: SimWorld, argv: Sequence[str], timeout_s: float, stdin: str) -> Completed:
        number = int(argv[argv.index("-p") + 1]) - _FIRST_PORT - 1
        name = list(self.cloud.scripts)[number]
        return super().ssh(world, [f"root@{name}" if "@" in word else word for word in argv], timeout_s, stdin)


class _Startup(Startup):
    """user data: startup.sh, and before it what aws_prepare.sh does about the system's own timer."""

    def __init__(self, world: SimWorld, script: str, cloud: SimAws) -> None:
        super().__init__(world, script.replace("BEGIN_BY=''", "BEGIN_BY='1e18'"))
        told = dict(re.findall(r"^([A-Z_]+)=(\d+)$", script, re.MULTILINE))
        self._cloud, self._follow_s = cloud, float(told["FOLLOW_S"])
        self._armed, self._most_m = int(told["SYSTEM_TIMER_AT"]), int(told["SYSTEM_TIMER_MAX_M"])
        self._looked_at = 0.0

    def prepare(self) -> None:
        self._looked_at = self.world.monotonic()
        if self._most_m:
            self._arm()

    def look_around(self) -> None:
        """Limits may be changed while it trains: the agent writes them down, and the timer follows."""
        if not self._most_m or self.world.monotonic() - self._looked_at < self._follow_s:
            return
        self._looked_at = self.world.monotonic()
        try:
            told = json.loads(self.world.read(f"{WORK_DIR}/{names.BOOT}"))
        except OSError:
            return
        with contextlib.suppress(OSError):
            changed = json.loads(self.world.read(f"{WORK_DIR}/run/limits.json"))
            told.update({name: value for name, value in changed.items() if value is not None})
        spend = told["spend_limit_usd"] and Decimal(told["spend_limit_usd"])
        rate, before = Decimal(told["rate_usd_per_hour"]), Decimal(told["spent_before_usd"])
        allowed = allowed_s(rate, spend, before, told["time_limit_s"])
        now = self.world.now()
        left = int(told["started_at"] + allowed - reserve_s(PROVIDER, allowed, told["stop_grace_s"]) - now)
        if abs(now + left - self._armed) > 60:
            self._armed, self._most_m = int(now + left), left // 60 + 1
            self._arm()

    def _arm(self) -> None:
        minutes = int(self._armed - self.world.now()) // 60
        self._cloud.arm(self.world.machine, max(1, min(self._most_m, minutes)))

    def _end(self) -> None:
        self._keep("ended")
        shut_down(self.world)
        while True:
            self.world.sleep(60.0)


def shut_down(world: SimWorld) -> int:
    """`shutdown -h now`: the system says goodbye, and is gone a moment later."""
    world.point("shutdown")
    stage: Stage = world.sim  # type: ignore[assignment]
    host = world.machine

    def go() -> None:
        if host.is_up and not host.is_frozen:
            stage.cloud.cloud.shut_down(host.name)  # type: ignore[union-attr]

    stage.at(stage.t + 0.5, go)
    return 0


def _plain(request: HttpRequest) -> tuple[str, bytes]:
    """What is asked, and where: neither signature nor date."""
    body = b"&".join(part for part in request.body.split(b"&") if not part.startswith(b"StartTime"))
    return double._region_of(request), body


def _route(action: str, form: dict[str, str]) -> str:
    if action == "DescribeInstances":
        return "describe" if any(name.startswith("InstanceId.") for name in form) else "list"
    return _ROUTES.get(action) or ("offers" if action in _OFFERS else "volumes")


class _Clients:
    """One for a service and region, whoever asks: what it sends goes out of the world of whoever has the baton."""

    stage: Stage
    made: dict[tuple[str, str], Any] = {}  # noqa: RUF012 - of the process

    @classmethod
    def open(cls, api: aws_api.AwsApi, service: str, region: str) -> Any:
        if (service, region) not in cls.made:
            cls.made[service, region] = cls._make(api, service, region)
        return cls.made[service, region]

    @classmethod
    def _make(cls, api: aws_api.AwsApi, service: str, region: str) -> Any:
        with mock.patch.object(aws_api, "_through", return_value=cls._send):
            return _open(api, service, region)

    @classmethod
    def _send(cls, request: Any, **told: Any) -> Any:
        assert cls.stage.running is not None, "the director asks AWS nothing"
        return _through(cls.stage.running.proc.world)(request, **told)  # type: ignore[attr-defined]


_open, _through = aws_api.AwsApi._open, aws_api._through


@contextlib.contextmanager
def pace() -> Iterator[None]:
    """What the simulation cannot do is left out, as on RunPod; the offer costs what a day's limits are drawn for."""
    beside = aws_market.disk_usd_per_hour(aws_market.LEAST_GB) + aws_market._ADDRESS_USD_PER_HOUR
    price = (Decimal("3.6") - beside) / Decimal("1.1") / Decimal(str(min(double.SPOT_SHARE.values())))
    endpoint = {"AWS_ENDPOINT_URL": f"http://{CLOUD_HOST}", "AWS_EC2_METADATA_DISABLED": "true"}
    with (
        mock.patch.object(Aws, "cannot", {}),
        mock.patch.object(aws_api.AwsApi, "_open", lambda api, service, region: _Clients.open(api, service, region)),
        mock.patch.object(aws_market, "BOOT_S", 45.0),
        mock.patch.dict(double.PRICES, {_KIND: f"{price:.5f}"}),
        mock.patch.dict(os.environ, {**_KEYS, **endpoint}),
    ):
        yield
