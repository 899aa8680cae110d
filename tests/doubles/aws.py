"""AWS on this computer: moto, and before it what moto lacks of the real one's manners.

    AwsDouble(now, machines).handle(HttpRequest) -> HttpResponse      in this process; aws_server.py serves it

Added to moto: ClientToken (the same call gives the same instance, another one is refused), zones without room, quotas,
throttling, answers that are lost or fail after the deed, ids that are shown late, instances that are pending, a profile
that EC2 does not know yet, groups and volumes in use, spot prices, the price list, Deep Learning images, spot
instances that are taken away with a notice, the metadata service with its tokens, roles that open one prefix, and a
bill. User data runs on `machines`, which end with their instance, and end it where they shut down.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import email.utils
import functools
import gzip
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.doubles.aws_models import share_models

from homing.world import HttpRequest, HttpResponse, NetworkError

if TYPE_CHECKING:
    from werkzeug.test import Client

share_models()
ACCOUNT = "123456789012"
REGIONS = ("us-east-1", "us-east-2")
IMAGE_NAMES = ("20260301", "20260905", "20251111")  # the newest is neither the first nor the last
_EC2_XML = 'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"'
# On demand in us-east-1, and by which part of that spot is sold in each zone.
PRICES = {
    "g4dn.xlarge": "0.526", "g4dn.2xlarge": "0.752", "g5.xlarge": "1.006", "g5.12xlarge": "5.672",
    "g6.xlarge": "0.8048", "g6e.xlarge": "1.861", "g7e.2xlarge": "3.363", "p3dn.24xlarge": "31.212",
    "p4d.24xlarge": "21.957642", "p5.4xlarge": "6.88", "p5.48xlarge": "55.04", "m5.large": "0.096",
}  # fmt: skip
SPOT_SHARE = {"a": 0.40, "b": 0.35, "c": 0.55, "d": 0.36}
NO_ROOM = (
    "We currently do not have sufficient {type} capacity in the Availability Zone you requested ({zone}). Our system"
    " will be working on provisioning additional capacity. You can currently get {type} capacity by not specifying an"
    " Availability Zone in your request or choosing us-east-1f."
)
TOO_MANY = (
    "You have requested more vCPU capacity than your current vCPU limit of {limit} allows for the instance bucket that"
    " the specified instance type belongs to. Please visit http://aws.amazon.com/contact-us/ec2-request to request an"
    " adjustment to this limit."
)


class Machines(Protocol):
    def start(self, instance_id: str, script: str, env: dict[str, str]) -> int:
        """The port of its SSH."""

    def end(self, instance_id: str) -> None: ...

    def log(self, instance_id: str) -> str: ...


@dataclass
class NoMachines:
    """Remembers what it was to run."""

    scripts: dict[str, str] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)

    def start(self, instance_id: str, script: str, env: dict[str, str]) -> int:
        self.scripts[instance_id] = script
        self.running.append(instance_id)
        return 22

    def end(self, instance_id: str) -> None:
        if instance_id in self.running:
            self.running.remove(instance_id)

    def log(self, instance_id: str) -> str:
        return f"console of {instance_id}"


@dataclass(frozen=True)
class Strike:
    """One misbehaviour: lost_before, lost_after, error_before, error_after or throttle at the nth call of an action."""

    way: str
    action: str
    nth: int = 1
    times: int = 1


@dataclass
class Settings:
    no_room: set[str] = field(default_factory=set)  # zones, or "TYPE ZONE"
    late_s: float = 0.0  # how long a new id is not shown
    pending_s: float = 0.0
    profile_s: float = 0.0  # how long EC2 does not know a new instance profile
    quotas: dict[str, float] = field(default_factory=lambda: dict.fromkeys(QUOTA_CODES, 192.0))
    has_price_list: bool = True
    may_see_quotas: bool = True
    key_pairs: set[str] = field(default_factory=lambda: {"my-laptop"})
    allowed: set[str] | None = None  # IAM actions of the caller; None: an administrator


QUOTA_CODES = ("L-DB2E81BA", "L-3819A6DF", "L-417A185B", "L-7212CCBC", "L-C4BD4855", "L-1216C47A", "L-34B43A08")
_INSTANCE_TYPES: dict[tuple[str, bytes], HttpResponse] = {}  # region and question -> answer, of the whole process


@dataclass
class Life:
    """One instance as its bill and its metadata have it."""

    id: str
    region: str
    kind: str
    zone: str
    mark: str
    is_spot: bool
    began: float
    profile: str = ""
    group: str = ""
    ended: float | None = None
    reason: str = ""  # why it ended, as EC2 calls it
    shutdown_at: float | None = None  # the system's own timer
    notice_at: float | None = None
    taken_at: float | None = None
    tokens: set[str] = field(default_factory=set)
    timers: list[int] = field(default_factory=list)


class AwsDouble:
    def __init__(
        self, now: Callable[[], float], machines: Machines | None = None, settings: Settings | None = None
    ) -> None:
        os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"  # a second for each region, and we have images of our own
        self._now = now
        self.machines: Machines = machines or NoMachines()
        self.settings = settings or Settings()
        self.strikes: list[Strike] = []
        self.seen: list[tuple[str, str]] = []  # service, action
        self.asked: list[tuple[str, dict[str, str]]] = []  # action, form, of EC2
        self.lives: dict[str, Life] = {}
        self._counts: dict[str, int] = {}
        self._tokens: dict[str, tuple[str, HttpResponse]] = {}
        self._profiles: dict[str, float] = {}
        self._keys: dict[str, str] = {}  # access key id of an instance's role -> its profile
        self.accounts: dict[str, str] = {}  # access key id -> its account, where it is another; nothing is rented there
        self._lock = threading.RLock()
        self._moto = _moto()
        self._moto.post("http://127.0.0.1/moto-api/reset")

    # --- what a test says to it ---

    def strike(self, *strikes: Strike) -> None:
        self._counts.clear()
        self.strikes = list(strikes)

    def count(self, action: str) -> int:
        return sum(1 for _, name in self.seen if name == action)

    def living(self) -> list[Life]:
        return [life for life in self.lives.values() if life.ended is None]

    def bill(self) -> list[Life]:
        return list(self.lives.values())

    def preempt(self, instance_id: str, notice_s: float = 120.0) -> None:
        """As EC2 takes a spot instance back: the notice at once, the end two minutes later."""
        life = self.lives[instance_id]
        assert life.is_spot, "EC2 takes only spot instances back"
        life.notice_at, life.taken_at = self._now(), self._now() + notice_s

    def tick(self) -> None:
        """Time passes: what is due happens."""
        with self._lock:
            now = self._now()
            for life in self.living():
                if life.taken_at is not None and now >= life.taken_at:
                    self._end(life, "Server.SpotInstanceTermination")
                elif life.shutdown_at is not None and now >= life.shutdown_at:
                    self.shut_down(life.id)
                elif now - life.began >= self.settings.pending_s:
                    instance = self._instance(life)
                    if instance._state.name == "pending":
                        instance._state.name, instance._state.code = "running", 16

    def shut_down(self, instance_id: str) -> None:
        """The operating system shuts down; EC2 then stops or terminates it, as configured at launch."""
        with self._lock:
            life = self.lives[instance_id]
            if life.ended is not None:
                return
            behaviour = str(self._instance(life).instance_initiated_shutdown_behavior)
            if behaviour == "terminate" or life.is_spot:
                self._end(life, "Client.InstanceInitiatedShutdown")
            else:
                self.machines.end(instance_id)
                self._instance(life).stop()

    def set_timer(self, instance_id: str, minutes: int) -> None:
        life = self.lives[instance_id]
        life.timers.append(minutes)
        life.shutdown_at = self._now() + 60.0 * minutes

    # --- one request ---

    def handle(self, request: HttpRequest) -> HttpResponse:
        with self._lock:
            self.tick()
            service, action, form = self._read(request)
            self.seen.append((service, action))
            if service == "ec2":
                self.asked.append((action, form))
            way = self._way(action)
            if way == "lost_before":
                raise NetworkError(f"{action}: connection reset")
            if way == "throttle":
                return self.dated(_refusal(service, 503, "RequestLimitExceeded", "Request limit exceeded."))
            if way == "error_before":
                text = "The service is unavailable. Please try again shortly."
                return self.dated(_refusal(service, 503, "Unavailable", text))
            missing = self._missing(service, action, form)
            if missing:
                code = "UnauthorizedOperation" if service == "ec2" else "AccessDenied"
                text = f"You are not authorized to perform: {missing}"
                return self.dated(_refusal(service, 403, code, text))
            response = self.dated(self._answer(service, action, form, request))
            if way == "lost_after":
                raise NetworkError(f"{action}: connection reset after it was sent")
            if way == "error_after":
                return self.dated(_refusal(service, 500, "InternalError", "An internal error has occurred"))
            return response

    def _missing(self, service: str, action: str, form: dict[str, str]) -> str:
        """An IAM action that this call takes and the caller may not do, as AWS's pages list them; "" for none."""
        allowed = self.settings.allowed
        if allowed is None or service in ("sts", "s3"):  # S3 has a double of its own; everybody may ask who they are
            return ""
        prefix = {"service-quotas": "servicequotas"}.get(service, service)
        as_iam = {"CreateBudget": "ModifyBudget", "DeleteBudget": "ModifyBudget", "DescribeBudgets": "ViewBudget"}
        needed = [f"{prefix}:{as_iam.get(action, action)}"]
        is_tagged = any(name.startswith(("TagSpecification.", "Tags.")) for name in form)
        if is_tagged and service == "ec2":
            needed.append("ec2:CreateTags")
        if is_tagged and service == "iam":
            needed.append(action.replace("Create", "iam:Tag"))
        if any(name.startswith("IamInstanceProfile.") for name in form) or action == "AddRoleToInstanceProfile":
            needed.append("iam:PassRole")
        if form.get("InstanceMarketOptions.MarketType") == "spot" and not self.living():  # the account's first
            needed.append("iam:CreateServiceLinkedRole")
        return next((each for each in needed if each not in allowed), "")

    def dated(self, response: HttpResponse) -> HttpResponse:
        """By the double's clock: moto dates what it answers by that of this computer."""
        date = email.utils.formatdate(self._now(), usegmt=True)
        return dataclasses.replace(response, headers={**response.headers, "date": date})

    def metadata(self, instance_id: str, method: str, path: str, headers: dict[str, str]) -> HttpResponse:
        """The metadata service as one instance sees it: nothing without a token."""
        life = self.lives[instance_id]
        low = {name.lower(): value for name, value in headers.items()}
        if method == "PUT" and path == "/latest/api/token":
            if not 1 <= int(low.get("x-aws-ec2-metadata-token-ttl-seconds", "0") or 0) <= 21600:
                return HttpResponse(400, {}, b"")
            token = hashlib.sha256(f"{instance_id} {len(life.tokens)}".encode()).hexdigest()
            life.tokens.add(token)
            return HttpResponse(200, {}, token.encode())
        if low.get("x-aws-ec2-metadata-token") not in life.tokens:
            return HttpResponse(401, {}, b"")
        text = self._metadata_text(life, path.removeprefix("/latest/meta-data/").rstrip("/"))
        return HttpResponse(404, {}, b"") if text is None else HttpResponse(200, {}, text.encode())

    def _metadata_text(self, life: Life, path: str) -> str | None:
        plain = {"instance-id": life.id, "placement/region": life.region, "placement/availability-zone": life.zone}
        if path in plain:
            return plain[path]
        if path == "spot/instance-action" and life.notice_at is not None and life.taken_at is not None:
            return json.dumps({"action": "terminate", "time": _iso(life.taken_at)})
        if path == "iam/security-credentials" and life.profile:
            return life.profile
        if path == f"iam/security-credentials/{life.profile}" and life.profile:
            key = f"ASIA{hashlib.sha256(life.id.encode()).hexdigest()[:16].upper()}"
            self._keys[key] = life.profile
            return json.dumps(
                {
                    "Code": "Success",
                    "Type": "AWS-HMAC",
                    "AccessKeyId": key,
                    "SecretAccessKey": "secret-of-a-role",
                    "Token": "token-of-a-role",
                    "Expiration": _iso(self._now() + 6 * 3600),
                    "LastUpdated": _iso(self._now()),
                }
            )
        return None

    # --- reading ---

    def _read(self, request: HttpRequest) -> tuple[str, str, dict[str, str]]:
        headers = {name.lower(): value for name, value in request.headers.items()}
        scope = headers.get("authorization", "") or unquote(urlsplit(request.url).query)
        parts = scope.partition("Credential=")[2].split(",")[0].split("&")[0].split("/")
        service = parts[3] if len(parts) > 4 else "s3"
        target = headers.get("x-amz-target", "")
        if target:
            return service, target.rpartition(".")[2], {}
        form = dict(parse_qsl(request.body.decode("utf-8", "replace"))) if service in ("ec2", "iam", "sts") else {}
        return service, form.get("Action", request.method), form

    def _way(self, action: str) -> str:
        self._counts[action] = count = self._counts.get(action, 0) + 1
        for strike in self.strikes:
            if strike.action == action and strike.nth <= count < strike.nth + strike.times:
                return strike.way
        return ""

    # --- answering ---

    def _answer(self, service: str, action: str, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        own = getattr(self, f"_{service.replace('-', '_')}_{action}", None)
        if self._account(request) != ACCOUNT:
            assert action != "RunInstances", "the double rents in its first account alone"
            own = None if "Instances" in action or "Console" in action else own  # its lives are of the first account
        if own is not None:
            found: HttpResponse = own(form, request)
            return found
        if service == "s3":
            denied = self._denied(request)
            if denied:
                return _refusal("s3", 403, "AccessDenied", denied)
        return self._to_moto(request)

    def _to_moto(self, request: HttpRequest) -> HttpResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() != "content-length"}
        headers["x-moto-account-id"] = self._account(request)
        reply = self._moto.open(request.url, method=request.method, headers=headers, data=request.body)
        pairs = {name.lower(): value for name, value in reply.headers.items()}
        return HttpResponse(reply.status_code, pairs, reply.data)

    def _account(self, request: HttpRequest) -> str:
        return self.accounts.get(_access_key(request), ACCOUNT)

    def _ec2_DescribeRegions(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        items = "".join(f"<item><regionName>{name}</regionName></item>" for name in REGIONS)
        return _xml("DescribeRegions", f"<regionInfo>{items}</regionInfo>")

    def _ec2_DescribeImages(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        wanted = _filters(form).get("name", [""])[0]
        prefix = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) "
        if not wanted.startswith(prefix):
            return _xml("DescribeImages", "<imagesSet/>")
        items = "".join(
            f"<item><imageId>ami-{date}</imageId><name>{prefix}{date}</name><imageState>available</imageState>"
            f"<imageOwnerId>898082745236</imageOwnerId><creationDate>{date[:4]}-{date[4:6]}-{date[6:]}T10:00:00.000Z"
            "</creationDate><rootDeviceName>/dev/sda1</rootDeviceName><blockDeviceMapping><item><deviceName>/dev/sda1"
            "</deviceName><ebs><volumeSize>65</volumeSize></ebs></item></blockDeviceMapping></item>"
            for date in IMAGE_NAMES
        )
        return _xml("DescribeImages", f"<imagesSet>{items}</imagesSet>")

    def _ec2_DescribeInstanceTypes(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        """moto's own table, read once for each question: filtering it takes a tenth of a second."""
        question = (_region_of(request), request.body)
        if question not in _INSTANCE_TYPES:
            _INSTANCE_TYPES[question] = self._to_moto(request)
        return _INSTANCE_TYPES[question]

    def _ec2_DescribeInstanceTypeOfferings(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        region = _region_of(request)
        wanted = _filters(form).get("instance-type", [])
        kinds = [kind for kind in PRICES if any(_like(kind, pattern) for pattern in wanted)]
        items = "".join(
            f"<item><instanceType>{kind}</instanceType><locationType>availability-zone</locationType>"
            f"<location>{region}{letter}</location></item>"
            for kind in kinds
            for letter in (*SPOT_SHARE, "-bos-1a")
        )
        return _xml("DescribeInstanceTypeOfferings", f"<instanceTypeOfferingSet>{items}</instanceTypeOfferingSet>")

    def _ec2_DescribeSpotPriceHistory(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        region = _region_of(request)
        kinds = [value for name, value in form.items() if name.startswith("InstanceType.")]
        items = "".join(
            f"<item><instanceType>{kind}</instanceType><productDescription>Linux/UNIX</productDescription>"
            f"<spotPrice>{self.spot_price(kind, letter):.6f}</spotPrice>"
            f"<timestamp>{_iso(self._now() - 600)}</timestamp>"
            f"<availabilityZone>{region}{letter}</availabilityZone></item>"
            for kind in kinds
            if kind in PRICES
            for letter in SPOT_SHARE
        )
        return _xml("DescribeSpotPriceHistory", f"<spotPriceHistorySet>{items}</spotPriceHistorySet>")

    def spot_price(self, kind: str, letter: str) -> float:
        return float(PRICES[kind]) * SPOT_SHARE[letter]

    def _pricing_GetProducts(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        if not self.settings.has_price_list:
            return _refusal("json", 400, "AccessDeniedException", "not authorized to perform: pricing:GetProducts")
        asked = {each["Field"]: each["Value"] for each in json.loads(request.body)["Filters"]}
        rows = [
            json.dumps(
                {
                    "product": {"attributes": {"instanceType": kind, "regionCode": asked["regionCode"]}},
                    "terms": {"OnDemand": {"T": {"priceDimensions": {"D": _dimension(usd)}}}},
                }
            )
            for kind, usd in PRICES.items()
            if kind == asked.get("instanceType", kind) and (kind[0] in "gp" or "instanceType" in asked)
        ]
        return _json({"FormatVersion": "aws_v1", "PriceList": rows})

    def _servicequotas_GetServiceQuota(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        code = json.loads(request.body)["QuotaCode"]
        if not self.settings.may_see_quotas or code not in self.settings.quotas:
            return _refusal("json", 400, "AccessDeniedException", "not authorized: servicequotas:GetServiceQuota")
        return _json({"Quota": {"ServiceCode": "ec2", "QuotaCode": code, "Value": self.settings.quotas[code]}})

    def _iam_CreateInstanceProfile(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        self._profiles.setdefault(form["InstanceProfileName"], self._now())
        return self._to_moto(request)

    def _ec2_RunInstances(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        if form.get("DryRun") == "true":
            text = "Request would have succeeded, but DryRun flag is set."
            return _refusal("ec2", 412, "DryRunOperation", text)
        token, digest = form.get("ClientToken", ""), _digest(form)
        if token in self._tokens:
            before, response = self._tokens[token]
            if before != digest:
                text = "Arguments on this idempotent request are inconsistent with those of previous request(s)."
                return _refusal("ec2", 400, "IdempotentParameterMismatch", text)
            return response
        refusal = self._why_not(form, request)
        if refusal is not None:
            return refusal
        response = self._to_moto(request)
        if response.status == 200:
            began = f"<launchTime>{_iso(int(self._now()))}</launchTime>".encode()  # moto tells that of this computer
            body = re.sub(rb"<launchTime>[^<]*</launchTime>", began, response.body)
            response = dataclasses.replace(response, body=body)
            self._tokens[token] = (digest, response)
            self._born(form, _between(response.body.decode(), "<instanceId>", "</instanceId>"), _region_of(request))
        return response

    def _why_not(self, form: dict[str, str], request: HttpRequest) -> HttpResponse | None:
        region, kind = _region_of(request), form["InstanceType"]
        is_spot = form.get("InstanceMarketOptions.MarketType") == "spot"
        key, profile = form.get("KeyName", ""), form.get("IamInstanceProfile.Name", "")
        if key and key not in self.settings.key_pairs:
            return _refusal("ec2", 400, "InvalidKeyPair.NotFound", f"The key pair '{key}' does not exist")
        if profile and self._now() - self._profiles.get(profile, self._now()) < self.settings.profile_s:
            text = f"Value ({profile}) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile"
            return _refusal("ec2", 400, "InvalidParameterValue", text)
        subnet = _backend(region).get_subnet(form["NetworkInterface.1.SubnetId"])
        zone = str(subnet.availability_zone)
        if is_spot:
            price, most = self.spot_price(kind, zone[-1]), float(form["InstanceMarketOptions.SpotOptions.MaxPrice"])
            if price > most:
                text = f"Your Spot request price of {most} is lower than the minimum required price of {price}."
                return _refusal("ec2", 400, "SpotMaxPriceTooLow", text)
        refusal = self._over_quota(kind, is_spot)
        if refusal is not None:
            return refusal
        if {zone, f"{kind} {zone}"} & self.settings.no_room:
            return _refusal("ec2", 500, "InsufficientInstanceCapacity", NO_ROOM.format(type=kind, zone=zone))
        return None

    def _over_quota(self, kind: str, is_spot: bool) -> HttpResponse | None:
        code = _quota_code(kind, is_spot)
        limit = self.settings.quotas.get(code)
        used = sum(_cores(life.kind) for life in self.living() if _quota_code(life.kind, life.is_spot) == code)
        if limit is None or used + _cores(kind) <= limit:
            return None
        if is_spot:
            return _refusal("ec2", 400, "MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
        return _refusal("ec2", 400, "VcpuLimitExceeded", TOO_MANY.format(limit=int(limit)))

    def _born(self, form: dict[str, str], instance_id: str, region: str) -> None:
        instance = _backend(region).get_instance(instance_id)
        instance.launch_time = _moment(int(self._now())).replace(tzinfo=None)  # EC2 tells whole seconds
        if self.settings.pending_s:
            instance._state.name, instance._state.code = "pending", 0
        life = Life(
            id=instance_id,
            region=region,
            kind=form["InstanceType"],
            zone=str(instance.availability_zone),
            mark={tag["key"]: tag["value"] for tag in instance.get_tags()}.get("homing-mark", ""),
            is_spot=form.get("InstanceMarketOptions.MarketType") == "spot",
            began=self._now(),
            profile=form.get("IamInstanceProfile.Name", ""),
            group=form.get("NetworkInterface.1.SecurityGroupId.1", ""),
        )
        self.lives[instance_id] = life
        data = base64.b64decode(form["UserData"])
        script = gzip.decompress(data).decode() if data[:2] == b"\x1f\x8b" else data.decode()
        port = self.machines.start(instance_id, script, {"type": life.kind})
        for nic in instance.nics.values():
            nic.public_ip = "127.0.0.1"
        if port != 22 and any(tag["key"] == "homing-ssh" and tag["value"] for tag in instance.get_tags()):
            _backend(region).create_tags([instance_id], {"homing-ssh": str(port)})

    def _ec2_DescribeInstances(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        hidden = self.hidden()
        asked = [value for name, value in form.items() if name.startswith("InstanceId.")]
        for name in asked:
            if name in hidden:
                return _refusal("ec2", 400, "InvalidInstanceID.NotFound", f"The instance ID '{name}' does not exist")
        backend = _backend(_region_of(request))
        kept = dict(backend.reservations)
        try:
            for key, reservation in kept.items():
                if any(instance.id in hidden for instance in reservation.instances):
                    del backend.reservations[key]
            return self._to_moto(request)
        finally:
            backend.reservations.clear()
            backend.reservations.update(kept)

    def hidden(self) -> set[str]:
        """What is not shown yet."""
        return {life.id for life in self.living() if self._now() - life.began < self.settings.late_s}

    def _ec2_TerminateInstances(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        """Gone already is no error for an hour; moto would look for its network card."""
        ids = [value for name, value in form.items() if name.startswith("InstanceId.")]
        for name in ids:
            if name not in self.lives:
                return _refusal("ec2", 400, "InvalidInstanceID.NotFound", f"The instance ID '{name}' does not exist")
        for name in ids:
            self._end(self.lives[name], "Client.UserInitiatedShutdown")
        items = "".join(f"<item><instanceId>{name}</instanceId></item>" for name in ids)
        return _xml("TerminateInstances", f"<instancesSet>{items}</instancesSet>")

    def _ec2_GetConsoleOutput(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        name = form["InstanceId"]
        if name not in self.lives:
            return _refusal("ec2", 400, "InvalidInstanceID.NotFound", f"The instance ID '{name}' does not exist")
        text = base64.b64encode(self.machines.log(name).encode()[-65536:]).decode()
        return _xml("GetConsoleOutput", f"<instanceId>{name}</instanceId><output>{text}</output>")

    def _ec2_CreateVolume(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        token = form.get("ClientToken", "")
        if token in self._tokens:
            return self._tokens[token][1]
        response = self._to_moto(request)
        if response.status == 200 and token:
            self._tokens[token] = (_digest(form), response)
        return response

    def _ec2_AttachVolume(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        backend = _backend(_region_of(request))
        volume, instance = backend.get_volume(form["VolumeId"]), backend.get_instance(form["InstanceId"])
        if volume.attachment is not None and volume.attachment.status != "detached":
            return _refusal("ec2", 400, "VolumeInUse", f"{volume.id} is already attached to an instance")
        if instance._state.name != "running":
            return _refusal("ec2", 400, "IncorrectState", f"Instance '{instance.id}' is not 'running'.")
        if str(volume.zone.name) != str(instance.availability_zone):
            text = f"The volume '{volume.id}' is not in the same availability zone as instance '{instance.id}'"
            return _refusal("ec2", 400, "InvalidVolume.ZoneMismatch", text)
        response = self._to_moto(request)
        attach = getattr(self.machines, "attach", None)
        if response.status == 200 and attach is not None:
            attach(instance.id, volume.id)
        return response

    def _ec2_DeleteSecurityGroup(self, form: dict[str, str], request: HttpRequest) -> HttpResponse:
        group = form["GroupId"]
        if any(life.group == group for life in self.living()):
            return _refusal("ec2", 400, "DependencyViolation", f"resource {group} has a dependent object")
        return self._to_moto(request)

    # --- how an instance ends ---

    def _end(self, life: Life, reason: str) -> None:
        if life.ended is not None:
            return
        life.ended, life.reason = self._now(), reason
        self.machines.end(life.id)
        backend, instance = _backend(life.region), self._instance(life)
        for volume in list(backend.volumes.values()):
            held = volume.attachment is not None and volume.attachment.instance.id == life.id
            if held and "-volume" in {tag["key"]: tag["value"] for tag in volume.get_tags()}.get("homing-mark", ""):
                backend.detach_volume(volume.id, life.id, volume.attachment.device)
        if instance._state.name != "terminated":
            backend.terminate_instances([life.id])
        instance._reason = f"User initiated ({_moment(self._now()):%Y-%m-%d %H:%M:%S} GMT)"
        instance.state_reason.code, instance.state_reason.message = reason, reason

    def _instance(self, life: Life) -> Any:
        return _backend(life.region).get_instance(life.id)

    # --- roles ---

    def _denied(self, request: HttpRequest) -> str:
        """ "" where it may: keys of an instance's role open what its policy says, others open everything."""
        key = _access_key(request)
        if not key.startswith("ASIA"):
            return ""
        if key not in self._keys:
            return "The AWS Access Key Id you provided does not exist in our records."
        from moto.iam.models import iam_backends

        role = iam_backends[ACCOUNT]["aws"].get_role(self._keys[key])
        rules = json.loads(next(iter(role.policies.values())))["Statement"]
        where = urlsplit(request.url)
        bucket, _, name = unquote(where.path).lstrip("/").partition("/")
        if name:
            allowed = str(rules[1]["Resource"]).removeprefix("arn:aws:s3:::")
            return "" if _like(f"{bucket}/{name}", allowed) else f"not authorized on {bucket}/{name}"
        prefix = dict(parse_qsl(where.query)).get("prefix")
        patterns = rules[0]["Condition"]["StringLikeIfExists"]["s3:prefix"]
        is_fine = rules[0]["Resource"] == f"arn:aws:s3:::{bucket}"
        is_fine = is_fine and (prefix is None or any(_like(prefix, pattern) for pattern in patterns))
        return "" if is_fine else f"not authorized to list {bucket} {prefix}"


# --- small parts ---


def _dimension(usd: str) -> dict[str, Any]:
    return {"unit": "Hrs", "pricePerUnit": {"USD": usd}}


def _access_key(request: HttpRequest) -> str:
    auth = {name.lower(): value for name, value in request.headers.items()}.get("authorization", "")
    return auth.partition("Credential=")[2].partition("/")[0]


def _backend(region: str) -> Any:
    from moto.ec2.models import ec2_backends

    return ec2_backends[ACCOUNT][region]


@functools.cache
def _moto() -> Client:
    """moto's server, made once: it takes a tenth of a second, and what it holds is global in any case."""
    from moto.kms import models
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.test import Client

    # Each encrypted disk gets a key of its own, and nothing here signs with it.
    models.generate_private_key = functools.cache(models.generate_private_key)
    return Client(DomainDispatcherApplication(create_backend_app))


def _region_of(request: HttpRequest) -> str:
    auth = {name.lower(): value for name, value in request.headers.items()}["authorization"]
    return auth.partition("Credential=")[2].split("/")[2]


def _filters(form: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, name in form.items():
        if key.startswith("Filter.") and key.endswith(".Name"):
            at = key.removesuffix("Name")
            found[name] = [value for other, value in form.items() if other.startswith(f"{at}Value.")]
    return found


def _like(text: str, pattern: str) -> bool:
    head, star, tail = pattern.partition("*")
    return text == pattern if not star else text.startswith(head) and text.endswith(tail)


def _quota_code(kind: str, is_spot: bool) -> str:
    """Return the quota that limits the vCPUs of this instance type, as AWS's list of EC2 quotas names them.

    Running On-Demand: G and VT, P, Standard (A C D H I M R T Z). Spot requests: the same, but P2 to P4 and P5 apart.
    """
    family = kind.partition(".")[0]
    if family.startswith(("g", "vt")):
        return "L-3819A6DF" if is_spot else "L-DB2E81BA"
    if family.startswith("p"):
        spot = {"2": "L-7212CCBC", "3": "L-7212CCBC", "4": "L-7212CCBC", "5": "L-C4BD4855"}.get(family[1], "")
        return spot if is_spot else "L-417A185B"
    if family[0] in "acdhimrtz":
        return "L-34B43A08" if is_spot else "L-1216C47A"
    return ""


def _cores(kind: str) -> int:
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    return int(INSTANCE_TYPES[kind]["VCpuInfo"]["DefaultVCpus"])


def _digest(form: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()


def _between(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0]


def _iso(moment: float) -> str:
    return _moment(moment).strftime("%Y-%m-%dT%H:%M:%SZ")


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)


def _xml(action: str, inner: str) -> HttpResponse:
    text = f'<?xml version="1.0"?><{action}Response {_EC2_XML}><requestId>r</requestId>{inner}</{action}Response>'
    return HttpResponse(200, {"content-type": "text/xml"}, text.encode())


def _json(body: dict[str, Any]) -> HttpResponse:
    return HttpResponse(200, {"content-type": "application/x-amz-json-1.1"}, json.dumps(body).encode())


def _refusal(service: str, status: int, code: str, text: str) -> HttpResponse:
    if service == "ec2":
        inner = f"<Errors><Error><Code>{code}</Code><Message>{escape(text)}</Message></Error></Errors>"
        body = f'<?xml version="1.0"?><Response>{inner}<RequestID>r</RequestID></Response>'
    elif service == "s3":
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{escape(text)}</Message></Error>'
    elif service in ("iam", "sts"):
        inner = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>{escape(text)}</Message></Error>"
        body = f"<ErrorResponse>{inner}<RequestId>r</RequestId></ErrorResponse>"
    else:
        return HttpResponse(status, {"x-amzn-errortype": code}, json.dumps({"__type": code, "message": text}).encode())
    return HttpResponse(status, {"content-type": "text/xml"}, body.encode())
