"""EC2 as a provider: spot first, one instance per mark, and no account keys on the instance.

    offers    offers.py: types, zones, prices, quotas         create   try zones in turn, each with its own ClientToken
    place     `shutdown -h now` terminates the instance       storage  resources.py: role, group, volume, budget

An instance id is REGION/i-..., so that it can be looked up without the run file. Every region ever used is recorded in
$HOMING_HOME/aws/. Without that record, all regions are queried. The instance's role grants access to one prefix of one
bucket, and the instance gets its first files through presigned URLs. Secrets are sent only over SSH, which accepts
connections from one address. Without SSH, they cannot be sent.
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

from homing.cloud.check_numbers import Figures, read_port
from homing.cloud.contact import ssh_access
from homing.cloud.ledger.mark import owner_prefix
from homing.cloud.machine_setup import startup_script
from homing.cloud.providers.aws import create_request
from homing.cloud.providers.aws.api import GLOBAL, AwsApi, AwsRefused
from homing.cloud.providers.aws.create import Creation, quota_refusal
from homing.cloud.providers.aws.doctor_checks import check_aws
from homing.cloud.providers.aws.offers import LEAST_GB, SYSTEM_GB, Choice, Market, region_of
from homing.cloud.providers.aws.resources import Things, s3_of
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
from homing.config.schema.provider_settings import AwsCloud
from homing.doctor.check import Check
from homing.errors import ProviderRefused, ProviderSilent, StartTimeout, UsageError
from homing.wire import file_names
from homing.wire.boot_json import EndBilling
from homing.world import World

__all__ = ["Aws"]

_GONE_CODES = ("InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed")
_YOUNG_S = 60.0  # how long EC2 may still report a new instance id as unknown
_RUNNING_S = 300.0
_HAND_OVER_S = 600.0
_LOOK_S = 2.0
_DESCRIBE_EVERY_S = 2.0  # minimum interval between queries; callers poll more often than EC2's rate limit allows
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
    "Server.InsufficientInstanceCapacity": "EC2 had no capacity",
    "Client.VolumeLimitExceeded": "the account's volume limit is reached",
    "Server.InternalError": "EC2 failed to start it",
}
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_NOT_THERE = ("AWS_CA_BUNDLE",)  # path of a file on this computer, which the instance does not have


class Aws:
    name = "aws"
    page = "https://console.aws.amazon.com/ec2/home#Instances:"
    guard = (
        "a timer in the instance's operating system shuts it down within the limit, and EC2 then"
        " terminates it. The timer needs no homing process, but has no effect on an instance that hangs."
    )
    settle_s = 10.0

    def __init__(self, *, home: Path, owner: str, world: World) -> None:
        self._home, self._world, self._owner = home, world, owner
        self._prefix = owner_prefix(owner)
        self._settings = AwsCloud()
        self._made: dict[str, float] = {}  # ids of instances created by this process -> time of creation
        self._ours: set[str] = set()  # ids of instances that this process has seen with our mark
        self._looked: dict[str, tuple[float, Instance]] = {}

    @staticmethod
    def is_configured(home: Path, world: World) -> bool:
        """Return True if AWS was ever used with this home directory.

        AWS keys alone do not show that, because they may be for an S3-compatible bucket at another service.
        """
        return world.exists(home / "aws")

    def account(self) -> str:
        return self.api.account

    def configure(self, settings: dict[str, Any]) -> None:
        self._settings = AwsCloud.model_validate(settings)

    @property
    def cannot(self) -> dict[Feature, str]:
        lacking: dict[Feature, str] = {
            "multi_node": "On AWS a run uses one instance.",
            "file_store": "An EC2 instance cannot read a local folder.",
            "native_deadline": "AWS has no timer for instances; the armed timer runs on the instance itself.",
        }
        if not self._settings.ssh_from:
            lacking["ssh"] = "SSH is closed: cloud.aws.ssh_from is not set."
        return lacking

    # --- offers ---

    def offers(self, needs: Needs) -> list[Offer]:
        choice = self._choice(needs)
        fitting = [offer for offer in self._market.offers(choice) if not lack(offer, needs)]
        allowed = [offer for offer in fitting if self._is_within_quota(offer)]
        if fitting and not allowed:
            # Raise an error instead of returning no offers, because new accounts often have a quota of zero.
            raise self._over_quota(fitting[0])
        return allowed

    def place(self, mark: str) -> Place:
        return startup_script.place(EndBilling(kind="command", argv=["shutdown", "-h", "now"]))

    def plan(self, offer: Offer, order: Order) -> Request:
        """Build the request. For a bucket on AWS, no keys are sent, because the instance's role grants access to it."""
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
            argv=("python3", "-I", f"{place.work_dir}/agent.zip", f"{place.work_dir}/{file_names.BOOT}"),
            env={},
        )

    # --- instances ---

    @legible
    def create(self, request: Request) -> Instance:
        region = region_of(request.offer.region)
        made = next(iter(self._with_mark(region, request.mark)), None)
        if made is None:
            self._remember(region)
            made = self._creation().start(request, region, self._choice_of(request.offer))
        found = self._instance(region, made)
        self._made[found.id] = self._world.monotonic()
        return found

    def hand_over(self, request: Request, instance_id: str) -> None:
        """Once the instance is running, attach the volume. Then send files and secrets if SSH access is configured."""
        settings = self._settings
        if not settings.volume and not settings.ssh_from:
            return
        region, _, name = instance_id.rpartition("/")
        until = self._world.monotonic() + request.order.start_within_s
        running_s = min(_RUNNING_S, request.order.start_within_s)
        late = StartTimeout(
            what=f"{instance_id} did not start within {running_s:.0f} s.",
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
            startup_script.hand_over(connection, request, world=self._world, timeout_s=min(_HAND_OVER_S, left_s))

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
            return Instance(instance_id, "", self.name, "requested", "yes", Decimal(0), detail="not listed yet")
        return Instance(instance_id, "", self.name, "gone", "no", Decimal(0), detail="unknown to the provider")

    @legible
    def list_owned(self) -> list[Instance]:
        self._looked.clear()  # clear the cache, so that an instance that is no longer listed is looked up again
        found = []
        for region in self.regions():
            found += [self._instance(region, body) for body in self._with_mark(region, f"{self._prefix}*")]
        return found

    @legible
    def destroy(self, instance_id: str) -> None:
        self._looked.pop(instance_id, None)
        region, _, name = instance_id.rpartition("/")
        if not region:
            return  # an id without a region is not an EC2 id
        if instance_id not in self._ours:
            with contextlib.suppress(ProviderSilent):  # terminate the instance even if its data is unreadable
                self._own(instance_id, self._find(instance_id) or {})
        try:
            self.api.call("ec2", "terminate_instances", region, InstanceIds=[name])
        except AwsRefused as exc:
            if exc.code not in _GONE_CODES:
                raise

    def log(self, instance_id: str) -> str:
        """Return the console output, which includes our script's. EC2 keeps the last 64 KB and may deliver it late."""
        region, _, name = instance_id.rpartition("/")
        if not region:
            return ""
        for newest in ({"Latest": True}, {}):  # only Nitro instances support "Latest"
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
        """Do nothing: the timer on the instance follows the limits that the agent records (see prepare.sh)."""

    # --- other resources ---

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
            read_port(_tags(self._own(instance_id, body)).get(create_request.SSH_TAG)),
            body.get("PublicIpAddress", ""),
        )
        pinned = ssh_access.find_host_key(self._home, _tags(body)[create_request.MARK_TAG], self._world)
        if port is None or not host or pinned is None:
            return None
        key = ssh_access.login_key(self._home, self._world)
        line = ssh_access.known_hosts_line(pinned, host, port)
        return Connection("root", host, port, str(key.private_path), line)

    # --- for doctor and setup ---

    def checks(self) -> list[Check]:
        return check_aws(self.api, self._market, self._creation(), list(self._choice(Needs()).regions))

    def setup_steps(self) -> list[Step]:
        """Return the only setup step, which records the regions so that later commands query AWS.

        All other AWS resources are created for a run and destroyed with it.
        """
        regions = self._choice(Needs()).regions
        text = f"{self._memory}, which records where homing looks for instances: {', '.join(regions)}"
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

    def _choice(self, needs: Needs) -> Choice:
        settings = self._settings
        wanted = SYSTEM_GB + _gb(int(needs.disk_bytes * 1.1))
        regions = settings.regions or [self.api.region]
        if regions == [""]:
            raise UsageError(
                what="No AWS region is configured.",
                why="Neither cloud.aws.regions, AWS_REGION nor the AWS profile sets a region.",
                fix="Run: export AWS_REGION=us-east-1   or set cloud.aws.regions: [us-east-1]",
            )
        return Choice(
            regions=tuple(regions),
            types=tuple(settings.instance_types),
            is_spot=settings.spot,
            headroom=Decimal(str(settings.spot_headroom)),
            root_gb=_gb(settings.disk) or max(LEAST_GB, wanted),
            volume_gb=_gb(settings.volume),
        )

    def _choice_of(self, offer: Offer) -> Choice:
        return dataclasses.replace(self._choice(Needs()), root_gb=offer.disk_bytes // 10**9 + SYSTEM_GB)

    def _is_within_quota(self, offer: Offer) -> bool:
        allowed = self._quota(offer)
        return allowed is None or offer.num_cores <= allowed

    def _over_quota(self, offer: Offer) -> AwsRefused:
        region, said = region_of(offer.region), f"the quota is {self._quota(offer)}"
        return quota_refusal(region, offer.instance_type, offer.num_cores, is_spot=offer.is_spot, said=said)

    def _quota(self, offer: Offer) -> Decimal | None:
        return self._market.quota(region_of(offer.region), offer.instance_type, is_spot=offer.is_spot).num_cores

    def _check_way(self, order: Order, secrets: dict[str, str]) -> None:
        """Raise UsageError if there is no way to send the instance its files or secrets.

        Without SSH, files can be sent only through presigned URLs of a bucket, and secrets cannot be sent at all.
        """
        if self._settings.ssh_from:
            return
        if not secrets and order.boot.store.startswith("s3:"):
            return
        what = ", ".join(sorted(secrets)) or f"With the store {order.boot.store}, its files"
        raise UsageError(
            what="An AWS instance cannot receive the files it needs.",
            why=f"{what} must be sent over SSH, but SSH access is closed."
            " EC2 user data is not a safe alternative, because any program on the instance can read it.",
            fix="Set cloud.aws.ssh_from to this computer's public address, or use a bucket: store: s3://bucket/prefix",
        )

    @property
    def _memory(self) -> Path:
        return self._home / "aws" / f"regions-{self._owner}.json"

    def regions(self) -> list[str]:
        """Return the regions where we may have resources: the recorded ones, or all if there is no record."""
        if self._world.exists(self._memory):
            return sorted(json.loads(self._world.read(self._memory)))
        rows = self.api.items("ec2", "describe_regions", "Regions", self.api.region or GLOBAL)
        return sorted(str(row["RegionName"]) for row in rows)

    def _remember(self, *regions: str) -> None:
        """Record regions on disk before anything is created there, so that list_owned queries them from then on."""
        known = set(json.loads(self._world.read(self._memory))) if self._world.exists(self._memory) else set()
        if not known.issuperset(regions):
            self._world.mkdir(self._memory.parent)
            self._world.write(self._memory, json.dumps(sorted({*known, *regions})).encode())

    def _with_mark(self, region: str, mark: str) -> list[dict[str, Any]]:
        """Return the live instances with this mark, oldest first. The mark may contain the wildcard `*`."""
        only = [
            {"Name": f"tag:{create_request.MARK_TAG}", "Values": [mark]},
            {"Name": "instance-state-name", "Values": ["pending", "running", "shutting-down", "stopping", "stopped"]},
        ]
        rows = self.api.items("ec2", "describe_instances", "Reservations", region, Filters=only)
        found = [body for row in rows for body in row["Instances"]]
        return sorted(found, key=lambda body: (str(body.get("LaunchTime", "")), str(body["InstanceId"])))

    def _find(self, instance_id: str) -> dict[str, Any] | None:
        """Return an instance's data, or None only if AWS itself says that there is no such instance."""
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
        if body and not _tags(body).get(create_request.MARK_TAG, "").startswith(self._prefix):
            raise ProviderRefused(
                what=f"{instance_id} does not belong to this homing home directory.",
                why=f"The names of its instances start with {self._prefix!r}.",
                fix="List its instances: homing runs",
            )
        return body

    def _is_up(self, instance_id: str) -> bool:
        """Return True if the instance is running and has the address that SSH needs; raise if it has ended."""
        now = self.describe(instance_id)
        if now.state in ("gone", "destroying") or not now.is_running:
            raise StartTimeout(
                what=f"{instance_id} stopped before it finished starting.",
                why=now.detail,
                fix="Launch again: another zone may have capacity.",
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
            mark=tags.get(create_request.MARK_TAG, ""),
            provider=self.name,
            state=state,
            billing="no" if state == "gone" else "maybe" if state == "destroying" else "yes",
            rate_usd_per_hour=read.rate(f"the tag {create_request.RATE_TAG}", tags.get(create_request.RATE_TAG))
            or Decimal(0),
            created_at=self._our_time(read, "LaunchTime", body.get("LaunchTime")),
            ended_at=self._our_time(read, "StateTransitionReason", _ended_at(body)) if state == "gone" else None,
            is_running=raw in ("pending", "running"),
            detail=_ENDED_BY.get(why, why) or (raw if state != "unknown" else f"{raw}: its volumes are still billing"),
            page=f"https://{region}.console.aws.amazon.com/ec2/home?region={region}#Instances:instanceId={body['InstanceId']}",
            problems=tuple(read.problems),
        )
        self._ours.add(instance.id)
        return instance

    def _our_time(self, read: Figures, name: str, value: Any) -> float | None:
        """Convert a time on the provider's clock to the same moment on our clock, which may differ."""
        moment = read.moment(name, value, self._world.now() + self.api.skew_s)
        return None if moment is None else moment - self.api.skew_s


def _gb(num_bytes: int) -> int:
    return -(-num_bytes // 10**9)


def _tags(body: dict[str, Any]) -> dict[str, str]:
    return {str(tag["Key"]): str(tag["Value"]) for tag in body.get("Tags", [])}


def _ended_at(body: dict[str, Any]) -> datetime.datetime | None:
    """Parse the end time from `User initiated (2026-11-16 08:22:00 GMT)`. EC2 reports it nowhere else."""
    found = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (GMT|UTC)\)", str(body.get("StateTransitionReason", "")))
    if found is None:
        return None
    try:
        at = datetime.datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None
    # EC2 reports whole seconds, so use the end of the reported second.
    return at.replace(tzinfo=datetime.UTC) + datetime.timedelta(seconds=1)
