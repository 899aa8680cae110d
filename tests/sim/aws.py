"""AWS on the stage: the real adapter and the real boto3; World sends its requests to moto through AwsDouble.

    SimAws     the line to EC2 (tests/sim/ec2.py), and its machines
    _Clients   botocore's clients: one for a service and region serves all actors, to make one takes longer than a verb

An instance is a host. Its operating system is here too, as far as money goes: `shutdown` terminates it, and its own
timer fires whatever became of our programs, unless the machine hangs. The metadata has the notice of a preemption.
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

from tests.doubles import aws as double
from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults
from tests.sim.cloud import CLOUD_HOST, SimCloud
from tests.sim.ec2 import FIRST_PORT, REGION, Ec2
from tests.sim.host import EPOCH, Host
from tests.sim.runpod import SimRunpod, Startup
from tests.sim.world import SimWorld

from homing.cloud.machine_setup.startup_script import WORK_DIR
from homing.cloud.providers.aws import api as aws_api
from homing.cloud.providers.aws import offers
from homing.cloud.providers.aws.provider import Aws
from homing.cloud.providers.base import Feature
from homing.wire import file_names
from homing.wire.guard_timing import PROVIDER, allowed_s, reserve_s
from homing.world import Completed, HttpRequest, HttpResponse

if TYPE_CHECKING:
    from tests.sim.stage import Stage

__all__ = ["ENV", "SETTINGS", "SimAws", "pace"]

_KIND = "p5.4xlarge"
_CLOCK_S = 10.0  # how soon a clock that was set is noticed by what waits for a time of day
_IMDS = f"http://{CLOUD_HOST}/imds"
_KEYS = {"AWS_ACCESS_KEY_ID": "AKIASIM", "AWS_SECRET_ACCESS_KEY": "of-the-account"}
ENV = {**_KEYS, "AWS_REGION": REGION}
# What the run file says.
SETTINGS = {"instance_types": [_KIND], "ssh_from": "203.0.113.7", "metadata_url": _IMDS}


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
        offers.BOOT_S = settings.boot_s + 10.0  # until `pace` ends
        _Clients.stage = stage
        self._timers: dict[str, tuple[float, float]] = {}  # instance -> when by its clock, and that clock's skew then
        self.num_timers_fired = 0

    def http(self, world: SimWorld, request: HttpRequest) -> HttpResponse:
        if not request.url.startswith(_IMDS):
            return super().http(world, request)
        world.point("http", f"{request.method} metadata")  # of the machine itself: no line that could be cut
        path = request.url.removeprefix(_IMDS)
        return self.cloud.aws.metadata(world.machine.name, request.method, path, dict(request.headers))

    # --- what its machines are ---

    def boot(self, instance_id: str, script: str) -> None:
        # Amazon's own clock is that of its machines, as far as they keep it.
        skew_s = self._stage.random.uniform(-self.machine_skew_s, self.machine_skew_s) + self.cloud.faults.clock_skew_s
        host = self.machines[instance_id] = self._stage.add_host(instance_id, skew_s=skew_s)
        self._stage.say(f"aws boots {instance_id}")
        begin = lambda world: _Startup(world, script, self).run()  # noqa: E731
        self.first[instance_id] = self._stage.programs.begin(host, "startup", begin, dict(host.env))

    def notice(self, instance_id: str, seconds: float) -> None:
        self._stage.say(f"aws gives notice to {instance_id}: {seconds:g} s")
        life = self.cloud.aws.lives[instance_id]
        life.notice_at, life.taken_at = self.cloud.now(), self.cloud.now() + seconds

    def arm(self, host: Host, minutes: int) -> None:
        """`shutdown -h +M`: the system keeps it, and of two the last counts. It waits for a time of day (systemd-logind
        has it on CLOCK_REALTIME), so it moves when that is set."""
        timer = self._timers[host.name] = (host.now() + 60.0 * minutes, host.skew_s)
        self._stage.say(f"{host.name} shuts down in {minutes} min at the latest")
        self._look_at_timer(host, timer)

    def is_armed(self, host: Host) -> bool:
        return host.is_up and not host.is_frozen and self._timers.get(host.name, (0.0, None))[1] == host.skew_s

    def _look_at_timer(self, host: Host, timer: tuple[float, float]) -> None:
        if self._timers[host.name] != timer or not host.is_up:
            return
        if host.now() < timer[0] or host.is_frozen:  # a machine that hangs does not obey; awake again, it does
            wait_s = min(_CLOCK_S, max(1e-3, timer[0] - host.now())) if not host.is_frozen else _CLOCK_S
            self._stage.at(self._stage.t + wait_s, lambda: self._look_at_timer(host, timer))
            return
        self.num_timers_fired += 1
        self.cloud.shut_down(host.name)

    # --- OpenSSH ---

    def ssh(self, world: SimWorld, argv: Sequence[str], timeout_s: float, stdin: str) -> Completed:
        number = int(argv[argv.index("-p") + 1]) - FIRST_PORT - 1
        name = list(self.cloud.scripts)[number]
        return super().ssh(world, [f"root@{name}" if "@" in word else word for word in argv], timeout_s, stdin)


class _Startup(Startup):
    """user data: startup.sh, and before it what aws_prepare.sh does about the system's own timer."""

    def __init__(self, world: SimWorld, script: str, cloud: SimAws) -> None:
        super().__init__(world, script.replace("BEGIN_BY=''", "BEGIN_BY='1e18'"))
        messages = dict(re.findall(r"^([A-Z_]+)=(-?\d+)$", script, re.MULTILINE))
        self._cloud, self._follow_s = cloud, float(messages["FOLLOW_S"])
        self._at, self._most_s = int(messages["SYSTEM_TIMER_AT"]), 60 * int(messages["SYSTEM_TIMER_MAX_M"])
        self._armed = self._offset = self._looked_at = 0.0

    def prepare(self) -> None:
        self._looked_at = self.world.monotonic()
        if self._most_s:
            self._arm(min(self._most_s, self._at - self.world.now()))

    def look_around(self) -> None:
        """Limits may be changed while it trains: the agent writes them down, and the timer follows."""
        if not self._most_s or self.world.monotonic() - self._looked_at < self._follow_s:
            return
        self._looked_at = self.world.monotonic()
        try:
            messages = json.loads(self.world.read(f"{WORK_DIR}/{file_names.BOOT}"))
            before, began = map(float, self.world.read(f"{WORK_DIR}/{file_names.CLOCK}").split(b" ")[:2])
        except OSError:
            return
        with contextlib.suppress(OSError):
            changed = json.loads(self.world.read(f"{WORK_DIR}/run/limits.json"))
            messages.update({name: value for name, value in changed.items() if value is not None})
        spend = messages["spend_limit_usd"] and Decimal(messages["spend_limit_usd"])
        rate, spent = Decimal(messages["rate_usd_per_hour"]), Decimal(messages["spent_before_usd"])
        allowed = allowed_s(rate, spend, spent, messages["time_limit_s"])
        now = self.world.boottime()
        left = int(allowed - reserve_s(PROVIDER, allowed, messages["stop_grace_s"]) - before - now + began)
        is_late, is_early = self._armed - now - left > 5 and self._armed - now > 65, now + left - self._armed > 90
        if is_late or is_early or abs(self.world.now() - now - self._offset) > 5:
            self._arm(left)

    def _arm(self, seconds: float) -> None:
        minutes = max(1, int(seconds) // 60)
        self._cloud.arm(self.world.machine, minutes)
        self._armed = self.world.boottime() + 60 * minutes
        self._offset = self.world.now() - self.world.boottime()

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
    def _send(cls, request: Any, **messages: Any) -> Any:
        assert cls.stage.running is not None, "the director asks AWS nothing"
        return _through(cls.stage.running.proc.world)(request, **messages)  # type: ignore[attr-defined]


_open, _through = aws_api.AwsApi._open, aws_api._through
_really_cannot = Aws.cannot.fget
assert _really_cannot is not None


def _cannot(aws: Aws) -> dict[Feature, str]:
    """Keep what launch reports: the missing features decide its messages about the guards."""
    return {feature: text for feature, text in _really_cannot(aws).items() if feature != "file_store"}


@contextlib.contextmanager
def pace() -> Iterator[None]:
    """What the simulation cannot do is left out, as on RunPod; the offer costs what a day's limits are drawn for."""
    neighbor = offers.disk_usd_per_hour(offers.LEAST_GB) + offers._ADDRESS_USD_PER_HOUR
    price = (Decimal("3.6") - neighbor) / Decimal("1.1") / Decimal(str(min(double.SPOT_SHARE.values())))
    endpoint = {"AWS_ENDPOINT_URL": f"https://{CLOUD_HOST}", "AWS_EC2_METADATA_DISABLED": "true"}
    with (
        mock.patch.object(Aws, "cannot", property(_cannot)),
        mock.patch.object(aws_api.AwsApi, "_open", lambda api, service, region: _Clients.open(api, service, region)),
        mock.patch.object(offers, "BOOT_S", 45.0),
        mock.patch.dict(double.PRICES, {_KIND: f"{price:.5f}"}),
        mock.patch.dict(os.environ, {**_KEYS, **endpoint}),
    ):
        yield
