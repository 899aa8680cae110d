"""EC2 as a provider: spot first, one instance under a mark, and nothing of the account's keys on it.

    offers    aws_market: types, zones, prices, quotas        create   zones in turn, each with its own ClientToken
    place     `shutdown -h now`: shutting down terminates     things   aws_things: role, group, volume, budget

An instance is known as REGION/i-..., so that it can be asked about without the run file. Which regions were ever used
stands in $HOMING_HOME/aws/; a home that does not know asks all of them. The role of an instance opens one prefix of one
bucket, and its first files come by signed addresses; secrets come by SSH, from the one address that may, or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import re
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

from homing.cloud import ssh_keys, startup
from homing.cloud.checks import Check
from homing.cloud.figures import Figures, read_port
from homing.cloud.mark import owner_prefix
from homing.cloud.providers import aws_machine as machine
from homing.cloud.providers.aws_api import GLOBAL, AwsApi, AwsRefused
from homing.cloud.providers.aws_checks import check_aws
from homing.cloud.providers.aws_create import Creation, quota_refusal
from homing.cloud.providers.aws_market import LEAST_GB, SYSTEM_GB, Market, Wish, region_of
from homing.cloud.providers.aws_things import Things, s3_of
from homing.cloud.providers.base import (
    Connection,
    Feature,
    Instance,
    InstanceState,
    Needs,
    Offer,
    Order,
    Place,
    Request,
    Resource,
    lack,
    wait_until,
)
from homing.cloud.providers.rest import legible
from homing.cloud.setup import Step
from homing.config.clouds.aws import AwsCloud
from homing.errors import ProviderRefused, ProviderSilent, StartTimeout, UsageError
from homing.wire import names
from homing.wire.boot import EndBilling
from homing.world import World

__all__ = ["Aws"]

_GONE_CODES = ("InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed")
_YOUNG_S = 60.0  # a new id is not known everywhere at once
_RUNNING_S = 300.0
_HAND_OVER_S = 600.0
_LOOK_S = 2.0
_DESCRIBE_EVERY_S = 2.0  # whoever waits looks more often than EC2 likes to be asked
_STATES: dict[str, InstanceState] = {
    "pending": "requested",
    "running": "ready",
    "shutting-down": "destroying",
    "terminated": "gone",
}
_ENDED_BY = {
    "Server.SpotInstanceTermination": "preempted by the provider: EC2 took the spot instance back",
    "Server.SpotInstanceShutdown": "preempted by the provider: EC2 took the spot instance back",
    "Client.InstanceInitiatedShutdown": "shut itself down",
    "Client.UserInitiatedShutdown": "terminated",
    "Server.InsufficientInstanceCapacity": "EC2 had no room for it after all",
    "Client.VolumeLimitExceeded": "the account's limit for disks is reached",
    "Server.InternalError": "EC2 failed to start it",
}
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_NOT_THERE = ("AWS_CA_BUNDLE",)  # a file of this computer


class Aws:
    name = "aws"
    page = "https://console.aws.amazon.com/ec2/home#Instances:"
    guard = (
        "a timer of the instance's own operating system shuts it down inside the limit, and EC2 terminates what shuts"
        " down; it needs no program of ours, but a machine that hangs would not obey it."
    )
    settle_s = 10.0

    def __init__(self, *, home: Path, owner: str, world: World) -> None:
        self._home, self._world, self._owner = home, world, owner
        self._prefix = owner_prefix(owner)
        self._settings = AwsCloud()
        self._made: dict[str, float] = {}  # what this process created -> when
        self._ours: set[str] = set()  # ids that it has seen under our mark
        self._looked: dict[str, tuple[float, Instance]] = {}

    @staticmethod
    def is_configured(home: Path, world: World) -> bool:
        """Whether this home has ever used it. Keys alone do not tell: they may be those of a bucket elsewhere."""
        return world.exists(home / "aws")

    def account(self) -> str:
        return self.api.account

    def configure(self, settings: dict[str, Any]) -> None:
        self._settings = AwsCloud.model_validate(settings)

    @property
    def cannot(self) -> dict[Feature, str]:
        lacking: dict[Feature, str] = {
            "multi_node": "On aws a run is one instance.",
            "file_store": "An instance of EC2 cannot read a folder on this computer.",
            "native_deadline": "AWS itself ends no instance at a time; the timer that is armed is the machine's own.",
        }
        if not self._settings.ssh_from:
            lacking["ssh"] = "Nobody may log in: cloud.aws.ssh_from names no address."
        return lacking

    # --- what it would rent ---

    def offers(self, needs: Needs) -> list[Offer]:
        wish = self._wish(needs)
        fitting = [offer for offer in self._market.offers(wish) if not lack(offer, needs)]
        allowed = [offer for offer in fitting if self._is_within_quota(offer)]
        if fitting and not allowed:
            raise self._over_quota(fitting[0])  # said, not left out: to have none is what a new account has
        return allowed

    def place(self, mark: str) -> Place:
        return startup.place(EndBilling(kind="command", argv=["shutdown", "-h", "now"]))

    def plan(self, offer: Offer, order: Order) -> Request:
        """Keys to AWS itself never travel: the instance's role opens the bucket."""
        place, boot = self.place(order.mark), order.boot
        env, secrets = dict(boot.env), dict(order.secrets)
        address = s3_of(boot.store, self._world.environment())
        if address is not None:
            plain = {name: value for name, value in secrets.items() if name not in (*_KEYS, *_NOT_THERE)}
            is_plain = {name: value for name, value in plain.items() if name.startswith("AWS_")}
            region = address.region or region_of(offer.region)
            env = {"AWS_REGION": region, "AWS_DEFAULT_REGION": region, **env, **is_plain}
            secrets = {name: value for name, value in plain.items() if name not in is_plain}
        self._check_way(order, secrets)
        metadata = f"{self._settings.metadata_url.rstrip('/')}/latest"
        boot = dataclasses.replace(
            boot,
            env=env,
            secret_names=sorted(set(boot.secret_names) & set(secrets)),
            notice_url=f"{metadata}/meta-data/spot/instance-action" if offer.is_spot else "",
            notice_token_url=f"{metadata}/api/token" if offer.is_spot else "",
        )
        return Request(
            provider=self.name,
            mark=order.mark,
            offer=offer,
            order=dataclasses.replace(order, boot=boot, secrets=secrets),
            argv=("python3", "-I", f"{place.work_dir}/agent.zip", f"{place.work_dir}/{names.BOOT}"),
            env={},
        )

    # --- its life ---

    @legible
    def create(self, request: Request) -> Instance:
        region = region_of(request.offer.region)
        made = next(iter(self._with_mark(region, request.mark)), None)
        if made is None:
            self._remember(region)
            made = self._creation().start(request, region, self._wish_of(request.offer))
        found = self._instance(region, made)
        self._made[found.id] = self._world.monotonic()
        return found

    def hand_over(self, request: Request, instance_id: str) -> None:
        """The volume, which must wait until the instance runs; then the files and secrets, where SSH is open."""
        settings = self._settings
        if not settings.volume and not settings.ssh_from:
            return
        region, _, name = instance_id.rpartition("/")
        until = self._world.monotonic() + request.order.start_within_s
        running_s = min(_RUNNING_S, request.order.start_within_s)
        late = StartTimeout(
            what=f"{instance_id} was not running within {running_s:.0f} s.",
            fix=f"Try again: {request.order.words.to('launch')}",
        )
        wait_until(lambda: self._is_up(instance_id), timeout_s=running_s, every_s=_LOOK_S, world=self._world,
                   by=request.order.start_by, on_timeout=late)  # fmt: skip
        if settings.volume:
            zone = str((self._find(instance_id) or {}).get("Placement", {}).get("AvailabilityZone", ""))
            left_s = max(1.0, until - self._world.monotonic())
            by = request.order.start_by
            self.things.attach_volume(region, request.mark, name, zone, _gb(settings.volume), left_s, by)
        if settings.ssh_from:
            connection = self.connection(instance_id)
            if connection is None:
                raise StartTimeout(
                    what=f"{instance_id} disappeared, or lost its address, before SSH came up.",
                    fix=f"Try again: {request.order.words.to('launch')}",
                )
            left_s = max(1.0, until - self._world.monotonic())
            startup.hand_over(connection, request, world=self._world, timeout_s=min(_HAND_OVER_S, left_s))

    @legible
    def describe(self, instance_id: str) -> Instance:
        at, known = self._looked.get(instance_id, (0.0, None))
        if known is not None and self._world.monotonic() - at < _DESCRIBE_EVERY_S:
            return known
        body = self._find(instance_id)
        if body is not None:
            found = self._instance(instance_id.rpartition("/")[0], self._own(instance_id, body))
            self._looked[instance_id] = (self._world.monotonic(), found)
            return found
        age_s = self._world.monotonic() - self._made.get(instance_id, -_YOUNG_S)
        if age_s < _YOUNG_S:
            return Instance(instance_id, "", self.name, "requested", "yes", Decimal(0), detail="not shown yet")
        return Instance(instance_id, "", self.name, "gone", "no", Decimal(0), detail="not known to the provider")

    @legible
    def list_owned(self) -> list[Instance]:
        self._looked.clear()  # what is no longer listed must be looked at afresh
        found = []
        for region in self.regions():
            found += [self._instance(region, body) for body in self._with_mark(region, f"{self._prefix}*")]
        return found

    @legible
    def destroy(self, instance_id: str) -> None:
        self._looked.pop(instance_id, None)
        region, _, name = instance_id.rpartition("/")
        if not region:
            return  # no id of EC2's
        if instance_id not in self._ours:
            with contextlib.suppress(ProviderSilent):  # not shown, or not legibly: it is asked for all the same
                self._own(instance_id, self._find(instance_id) or {})
        try:
            self.api.call("ec2", "terminate_instances", region, InstanceIds=[name])
        except AwsRefused as exc:
            if exc.code not in _GONE_CODES:
                raise

    def log(self, instance_id: str) -> str:
        """The console, which holds what our script wrote; EC2 keeps the last 64 KB, and brings it late at times."""
        region, _, name = instance_id.rpartition("/")
        if not region:
            return ""
        for newest in ({"Latest": True}, {}):  # types before Nitro know no "latest"
            try:
                said = self.api.call("ec2", "get_console_output", region, InstanceId=name, **newest)
                return str(said.get("Output") or "")
            except AwsRefused as exc:
                if exc.code in _GONE_CODES:
                    return ""
                if not newest:
                    raise
        raise AssertionError("the second try returns or raises")

    def set_guard(self, instance_id: str, spend_limit_usd: Decimal, end_by: float | None) -> None:
        """Nothing to do from here: the timer there follows the limits that the agent writes down (aws_prepare.sh)."""

    # --- beside instances ---

    @legible
    def list_resources(self) -> list[Resource]:
        return self.things.everything(self.regions())

    def destroy_resource(self, resource: Resource) -> None:
        self.things.destroy(resource)

    def connection(self, instance_id: str) -> Connection | None:
        body = self._find(instance_id)
        if body is None:
            return None
        port, host = (
            read_port(_tags(self._own(instance_id, body)).get(machine.SSH_TAG)),
            body.get("PublicIpAddress", ""),
        )
        pinned = ssh_keys.find_host_key(self._home, _tags(body)[machine.MARK_TAG], self._world)
        if port is None or not host or pinned is None:
            return None
        key = ssh_keys.login_key(self._home, self._world)
        line = ssh_keys.known_hosts_line(pinned, host, port)
        return Connection("root", host, port, str(key.private_path), line)

    # --- for doctor and setup ---

    def checks(self) -> list[Check]:
        return check_aws(self.api, self._market, self._creation(), list(self._wish(Needs()).regions))

    def setup_steps(self) -> list[Step]:
        """One: from then on every verb of this home asks AWS too. All else is made for a run, and goes with it."""
        regions = self._wish(Needs()).regions
        text = f"{self._memory}: verbs of this home look for instances in {', '.join(regions)}"
        return [Step(text, self._world.exists(self._memory), lambda: self._remember(*regions))]

    # --- helpers, in the order they are called ---

    @cached_property
    def api(self) -> AwsApi:
        return AwsApi(self._world)

    @cached_property
    def _market(self) -> Market:
        return Market(self.api, self._world)

    @cached_property
    def things(self) -> Things:
        return Things(self.api, self._prefix, self._owner, self._world)

    def _creation(self) -> Creation:
        return Creation(
            self.api,
            self._market,
            self.things,
            self._settings,
            self._home,
            self._owner,
            self._world,
            self.settle_s,
            self._with_mark,
        )

    def _wish(self, needs: Needs) -> Wish:
        settings = self._settings
        wanted = SYSTEM_GB + _gb(int(needs.disk_bytes * 1.1))
        regions = settings.regions or [self.api.region]
        if regions == [""]:
            raise UsageError(
                what="It is not known in which region of AWS to look.",
                why="Neither cloud.aws.regions nor AWS_REGION nor the profile names one.",
                fix="export AWS_REGION=us-east-1   or write cloud.aws.regions: [us-east-1]",
            )
        return Wish(
            regions=tuple(regions),
            types=tuple(settings.instance_types),
            is_spot=settings.spot,
            headroom=Decimal(str(settings.spot_headroom)),
            root_gb=_gb(settings.disk) or max(LEAST_GB, wanted),
            volume_gb=_gb(settings.volume),
        )

    def _wish_of(self, offer: Offer) -> Wish:
        return dataclasses.replace(self._wish(Needs()), root_gb=offer.disk_bytes // 10**9 + SYSTEM_GB)

    def _is_within_quota(self, offer: Offer) -> bool:
        allowed = self._quota(offer)
        return allowed is None or offer.num_cores <= allowed

    def _over_quota(self, offer: Offer) -> AwsRefused:
        region, said = region_of(offer.region), f"it is {self._quota(offer)}"
        return quota_refusal(region, offer.instance_type, offer.num_cores, is_spot=offer.is_spot, said=said)

    def _quota(self, offer: Offer) -> Decimal | None:
        return self._market.quota(region_of(offer.region), offer.instance_type, is_spot=offer.is_spot).num_cores

    def _check_way(self, order: Order, secrets: dict[str, str]) -> None:
        """Without SSH only a signed address of a bucket can bring files, and nothing brings secrets."""
        if self._settings.ssh_from:
            return
        if not secrets and order.boot.store.startswith("s3:"):
            return
        what = ", ".join(sorted(secrets)) or f"The files of its store, {order.boot.store}"
        raise UsageError(
            what="An instance of aws could not be given what it needs.",
            why=f"{what} would have to travel by SSH, which is closed: any program there can read user data.",
            fix="Set cloud.aws.ssh_from to this computer's public address, or use a bucket: store: s3://bucket/prefix",
        )

    @property
    def _memory(self) -> Path:
        return self._home / "aws" / f"regions-{self._owner}.json"

    def regions(self) -> list[str]:
        """Where something of ours may be. A home that knows nothing of it asks all regions there are."""
        if self._world.exists(self._memory):
            return sorted(json.loads(self._world.read(self._memory)))
        rows = self.api.items("ec2", "describe_regions", "Regions", self.api.region or GLOBAL)
        return sorted(str(row["RegionName"]) for row in rows)

    def _remember(self, *regions: str) -> None:
        """Durable before anything is made there: from here on list_owned looks there."""
        known = set(json.loads(self._world.read(self._memory))) if self._world.exists(self._memory) else set()
        if not known.issuperset(regions):
            self._world.mkdir(self._memory.parent)
            self._world.write(self._memory, json.dumps(sorted({*known, *regions})).encode())

    def _with_mark(self, region: str, mark: str) -> list[dict[str, Any]]:
        """What lives under a mark (a star stands for any ending), the oldest first."""
        only = [
            {"Name": f"tag:{machine.MARK_TAG}", "Values": [mark]},
            {"Name": "instance-state-name", "Values": ["pending", "running", "shutting-down", "stopping", "stopped"]},
        ]
        rows = self.api.items("ec2", "describe_instances", "Reservations", region, Filters=only)
        found = [body for row in rows for body in row["Instances"]]
        return sorted(found, key=lambda body: (str(body.get("LaunchTime", "")), str(body["InstanceId"])))

    def _find(self, instance_id: str) -> dict[str, Any] | None:
        """None only where AWS itself says that there is none."""
        region, _, name = instance_id.rpartition("/")
        if not region or not name.startswith("i-"):
            return None
        try:
            rows = self.api.items("ec2", "describe_instances", "Reservations", region, InstanceIds=[name])
        except AwsRefused as exc:
            if exc.code in _GONE_CODES:
                return None
            raise
        return next((body for row in rows for body in row["Instances"]), None)

    def _own(self, instance_id: str, body: dict[str, Any]) -> dict[str, Any]:
        if body and not _tags(body).get(machine.MARK_TAG, "").startswith(self._prefix):
            raise ProviderRefused(
                what=f"{instance_id} is not ours.", why=f"Ours begin with {self._prefix}", fix="homing runs"
            )
        return body

    def _is_up(self, instance_id: str) -> bool:
        """Running, with the address that SSH needs. Raises where it will never be."""
        now = self.describe(instance_id)
        if now.state in ("gone", "destroying") or not now.is_running:
            raise StartTimeout(
                what=f"{instance_id} ended before it was running.",
                why=now.detail,
                fix="Launch again: another zone may have room.",
            )
        is_reachable = not self._settings.ssh_from or self.connection(instance_id) is not None
        return now.state == "ready" and is_reachable

    def _instance(self, region: str, body: dict[str, Any]) -> Instance:
        raw = str(body.get("State", {}).get("Name", ""))
        state = _STATES.get(raw, "unknown")
        tags, read = _tags(body), Figures(self.name)
        why = str(body.get("StateReason", {}).get("Code", ""))
        instance = Instance(
            id=f"{region}/{body['InstanceId']}",
            mark=tags.get(machine.MARK_TAG, ""),
            provider=self.name,
            state=state,
            billing="no" if state == "gone" else "maybe" if state == "destroying" else "yes",
            rate_usd_per_hour=read.rate(f"the tag {machine.RATE_TAG}", tags.get(machine.RATE_TAG)) or Decimal(0),
            created_at=self._our_time(read, "LaunchTime", body.get("LaunchTime")),
            ended_at=self._our_time(read, "StateTransitionReason", _ended_at(body)) if state == "gone" else None,
            is_running=raw in ("pending", "running"),
            detail=_ENDED_BY.get(why, why) or (raw if state != "unknown" else f"{raw}: its disks bill on"),
            page=f"https://{region}.console.aws.amazon.com/ec2/home?region={region}#Instances:instanceId={body['InstanceId']}",
            problems=tuple(read.problems),
        )
        self._ours.add(instance.id)
        return instance

    def _our_time(self, read: Figures, name: str, value: Any) -> float | None:
        """Their clock may differ from ours; ages do not."""
        moment = read.moment(name, value, self._world.now() + self.api.skew_s)
        return None if moment is None else moment - self.api.skew_s


def _gb(num_bytes: int) -> int:
    return -(-num_bytes // 10**9)


def _tags(body: dict[str, Any]) -> dict[str, str]:
    return {str(tag["Key"]): str(tag["Value"]) for tag in body.get("Tags", [])}


def _ended_at(body: dict[str, Any]) -> datetime.datetime | None:
    """From its reason, `User initiated (2026-11-16 08:22:00 GMT)`; EC2 has it nowhere else."""
    found = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (GMT|UTC)\)", str(body.get("StateTransitionReason", "")))
    if found is None:
        return None
    try:
        at = datetime.datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None
    return at.replace(tzinfo=datetime.UTC) + datetime.timedelta(seconds=1)  # told in whole ones: at the end of that one
