"""Starts one EC2 instance, trying the zones of an offer in turn until one has capacity.

zones within the offered rate -> image, subnet, security group, role, files -> run_instances, zone by zone
no capacity       try the next zone; raise NoOffer if none is left
quota exceeded    raise a refusal that names the quota's code and console page
no clear answer   repeat the same call (its ClientToken makes that safe), then look for an instance with the mark. Never
                  try another zone, because the instance may already have been started in the current zone
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from homing.cloud.contact import ssh_access
from homing.cloud.machine_setup.startup_script import Fetch, startup_script
from homing.cloud.providers.aws import create_request
from homing.cloud.providers.aws.api import AwsApi, AwsRefused
from homing.cloud.providers.aws.offers import SYSTEM_GB, Choice, Market, quota_code, quota_page
from homing.cloud.providers.aws.resources import Things, make_budget, make_group, make_role, s3_of
from homing.cloud.providers.base import Request
from homing.cloud.providers.once import LOOKS, look_for
from homing.cloud.providers.rest import Unsure, Unwelcome
from homing.config.schema.provider_settings import AwsCloud
from homing.errors import CreateFailed, NoOffer, ProviderRefused
from homing.store import open_store
from homing.store.s3.store import S3Store
from homing.wire import codec, file_names
from homing.world import Retries, World

__all__ = ["Creation", "quota_refusal"]

_NO_ROOM = (
    "InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientCapacityOnHost", "UnfulfillableCapacity",
    "Unsupported", "SpotMaxPriceTooLow", "InsufficientFreeAddressesInSubnet",
)  # fmt: skip
_QUOTA = ("VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded")
_PROFILE_S = 90.0  # how long to retry, because EC2 may take a while to see a new instance profile
_PROFILE_EVERY_S = 3.0
_RETRIES = Retries(tries=4, first_s=1.0)
_LINK_S = 3600.0  # how long the presigned URLs of an instance's first files stay valid
_END_ALONE_S = 1800.0  # if our agent never starts, the instance terminates itself within this time


@dataclass
class Creation:
    api: AwsApi
    market: Market
    things: Things
    settings: AwsCloud
    home: Path
    owner: str
    world: World
    settle_s: float
    # (region, mark) -> the live instances with that mark, oldest first
    with_mark: Callable[[str, str], list[dict[str, Any]]]

    def start(self, request: Request, region: str, choice: Choice) -> dict[str, Any]:
        zones = self._zones(request, region, choice)
        subnets, network = self.subnets(region)
        image = self.image(region)
        usable = [zone for zone in zones if zone in subnets]
        if not usable:
            raise self._no_room(
                request,
                region,
                "No zone offers it at this rate now." if not zones else "No subnet is in a zone that offers it.",
            )
        group = make_group(self.api, region, network, request.mark, self.settings.ssh_from)
        profile = self._profile(request)
        if self.settings.monthly_budget is not None:
            make_budget(
                self.api, f"homing-{self.owner}-", str(self.settings.monthly_budget), self.settings.budget_email
            )
        data = create_request.user_data(self._script(request))
        root = image["BlockDeviceMappings"][0]
        problems = []
        for zone in usable:
            launch = create_request.Launch(
                image=str(image["ImageId"]),
                root_device=str(image.get("RootDeviceName") or root["DeviceName"]),
                root_gb=max(int(root["Ebs"]["VolumeSize"]), request.offer.disk_bytes // 10**9 + SYSTEM_GB),
                zone=zone,
                subnet=subnets[zone],
                group=group,
                profile=profile,
                key_name=self.settings.key_name,
                user_data=data,
                most_usd_per_hour=self.market.most_usd(request.offer, choice) if request.offer.is_spot else None,
                is_ssh=bool(self.settings.ssh_from),
            )
            try:
                return self._run(request, region, create_request.run_parameters(request, launch))
            except AwsRefused as exc:
                if exc.code not in _NO_ROOM and not _is_elsewhere(exc):
                    raise self._refusal(exc, request, region, choice) from exc
                problems.append(f"{zone}: {exc.code}, {exc.text}")
        raise self._no_room(request, region, "\n".join(problems))

    # --- prerequisites ---

    def _zones(self, request: Request, region: str, choice: Choice) -> list[str]:
        zones = self.market.zones(request.offer, choice)
        volume = self.things.find_volume(region, request.mark) if self.settings.volume else None
        if volume is None:
            return zones
        # A volume cannot move to another zone, so the instance must start in the zone of the run's existing volume.
        return [zone for zone in zones if zone == volume["AvailabilityZone"]]

    def _named_subnets(self, region: str) -> list[dict[str, Any]]:
        try:
            return self.api.items("ec2", "describe_subnets", "Subnets", region, SubnetIds=list(self.settings.subnets))
        except AwsRefused as exc:
            if exc.code != "InvalidSubnetID.NotFound":
                raise
            raise self._no_such_subnet(region) from exc

    def _no_such_subnet(self, region: str) -> Unwelcome:
        return Unwelcome(
            what=f"cloud.aws.subnets names a subnet that does not exist in {region}.",
            why=f"Named: {', '.join(self.settings.subnets)}. A subnet belongs to one region and one account.",
            fix=f"Fix cloud.aws.subnets. See the subnets there: aws ec2 describe-subnets --region {region}",
        )

    def subnets(self, region: str) -> tuple[dict[str, str], str]:
        """Return the subnets by zone, and the VPC that contains them. The security group must belong to that VPC."""
        if self.settings.subnets:
            rows = self._named_subnets(region)
        else:
            only = [{"Name": "default-for-az", "Values": ["true"]}]
            rows = self.api.items("ec2", "describe_subnets", "Subnets", region, Filters=only)
        if not rows:
            # Unwelcome means that nothing was created, so undoing the launch need not wait for an instance.
            if self.settings.subnets:
                raise self._no_such_subnet(region)
            raise Unwelcome(
                what=f"The account has no default VPC in {region}.",
                why="An instance needs a subnet.",
                fix="Create a default VPC: aws ec2 create-default-vpc   or use existing subnets: cloud.aws.subnets",
            )
        network = str(rows[0]["VpcId"])
        return {str(row["AvailabilityZone"]): str(row["SubnetId"]) for row in rows if row["VpcId"] == network}, network

    def image(self, region: str) -> dict[str, Any]:
        if self.settings.image:
            found = self.api.items("ec2", "describe_images", "Images", region, ImageIds=[self.settings.image])
        else:
            match = {"name": self.settings.image_name, "state": "available", "architecture": "x86_64"}
            only = [{"Name": key, "Values": [value]} for key, value in match.items()]
            owners = [self.settings.image_owner]
            found = self.api.items("ec2", "describe_images", "Images", region, Owners=owners, Filters=only)
        if not found:
            raise Unwelcome(
                what=f"No machine image found in {region}.",
                why=f"{self.settings.image_owner} has no image named {self.settings.image_name!r}.",
                fix="Set cloud.aws.image, or change the name pattern in cloud.aws.image_name.",
            )
        return max(found, key=lambda image: (str(image["CreationDate"]), str(image["ImageId"])))

    def _profile(self, request: Request) -> str:
        """Create the role and return its instance profile, or "" if no role is needed (the store is not on AWS S3)."""
        address = s3_of(request.order.boot.store, self.world.environment())
        if address is None:
            return ""
        policy = create_request.policy_of(address.bucket, address.prefix)
        return make_role(self.api, request.mark, self.owner, policy)

    def _script(self, request: Request) -> str:
        boot = request.order.boot
        return startup_script(
            mark=request.mark,
            end_command="shutdown -h now",
            end_within_s=min(create_request.ends_in_s(boot), _END_ALONE_S),
            login_key=ssh_access.login_key(self.home, self.world).public_line,
            host_key=ssh_access.host_key(self.home, request.mark, self.world),
            is_container=False,
            fetch=() if self.settings.ssh_from else self._fetches(request),
            prepare=create_request.prepare_text(boot, has_volume=bool(self.settings.volume), skew_s=self.api.skew_s),
        )

    def _fetches(self, request: Request) -> tuple[Fetch, ...]:
        """Put the instance's first files into the store; return the path, hash and presigned URL of each.

        Each URL gives access to a single key, for an hour. The files are always written again, because the keys are
        predictable and an existing object may be someone else's. The instance compares each file with the hash in its
        user data before using it.
        """
        store = open_store(request.order.boot.store, self.world)
        assert isinstance(store, S3Store), store.url
        boot = codec.dumps(request.order.boot, indent=1).encode()
        files = {file.path: self.world.read(file.source) for file in request.order.files} | {file_names.BOOT: boot}
        found = []
        for path, data in files.items():
            digest = hashlib.sha256(data).hexdigest()
            key = f"{file_names.STORE_OBJECTS}/{digest}"
            store.put_bytes(key, data)
            found.append(Fetch(store.get_url(key, _LINK_S), path, digest))
        return tuple(found)

    # --- the call ---

    def _run(self, request: Request, region: str, parameters: dict[str, Any]) -> dict[str, Any]:
        problem: Exception | None = None
        for number in range(1, _RETRIES.tries + 1):
            try:
                return self._run_when_known(region, parameters)
            except Unsure as exc:
                problem = exc
            except AwsRefused as exc:
                # A parameter mismatch means that an earlier call used this token, and it may have started an instance.
                if problem is None and exc.code != "IdempotentParameterMismatch":
                    raise
                problem = exc
                break
            self.world.sleep(_RETRIES.pause_s(number))
        find = partial(self.with_mark, region, request.mark)
        made = look_for(request.mark, find, "aws", problem, self.settle_s, self.world)
        if made is not None:
            return made
        raise CreateFailed(
            what=f"aws did not start {request.offer.name}: the create call got no clear answer.",
            why=f"{problem}. homing listed the instances {LOOKS} times and found none named {request.mark}.",
            fix=f"Try again: {request.order.words.to('launch')}",
        )

    def _run_when_known(self, region: str, parameters: dict[str, Any]) -> dict[str, Any]:
        deadline = self.world.monotonic() + _PROFILE_S
        while True:
            try:
                made: dict[str, Any] = self.api.once("ec2", "run_instances", region, **parameters)["Instances"][0]
                return made
            except AwsRefused as exc:
                is_young = exc.code == "InvalidParameterValue" and "IAM Instance Profile" in exc.text
                if not is_young or self.world.monotonic() > deadline:
                    raise
            except (KeyError, IndexError) as exc:
                raise Unsure("AWS answered run_instances without an instance") from exc
            self.world.sleep(_PROFILE_EVERY_S)

    # --- refusals ---

    def _refusal(self, exc: AwsRefused, request: Request, region: str, choice: Choice) -> ProviderRefused:
        kind = request.offer.name.split("/")[1]
        if exc.code in _QUOTA:
            cores = self.market.num_cores(region, kind, choice)
            return quota_refusal(region, kind, cores, is_spot=request.offer.is_spot, said=f"{exc.code}: {exc.text}")
        if exc.code == "InvalidKeyPair.NotFound":
            return AwsRefused(
                what=f"There is no key pair {self.settings.key_name!r} in {region}.",
                why=exc.why,
                fix="Set cloud.aws.key_name to an existing one, or remove it. List them: aws ec2 describe-key-pairs",
                code=exc.code,
                text=exc.text,
            )
        return exc

    def _no_room(self, request: Request, region: str, why: str) -> NoOffer:
        other = "on demand: --no-spot, " if request.offer.is_spot else ""
        return NoOffer(
            what=f"aws cannot start {request.offer.name} now.",
            why=why,
            fix=f"Choose another offer: {request.order.words.to('plan')}"
            f"   ({other}another instance type, or other regions: cloud.aws.regions)",
        )


def quota_refusal(region: str, kind: str, num_cores: int, *, is_spot: bool, said: str) -> AwsRefused:
    code = quota_code(kind, is_spot=is_spot)
    market = "spot" if is_spot else "on-demand"
    where = f": {quota_page(region, code)}" if code else " of EC2 in Service Quotas"
    other = "on demand, which has a separate quota: --no-spot" if is_spot else "spot, which has a separate quota"
    return AwsRefused(
        what=f"The account is not allowed to start {kind} in {region}: its quota of {market} vCPUs is too small.",
        why=f"{kind} needs {num_cores} vCPUs (quota code: {code or 'unknown'}). AWS reports: {said}",
        fix=f"Request a higher quota from AWS{where}   or rent {other}, or set another region: cloud.aws.regions",
        code="VcpuLimitExceeded",
        text=said,
    )


def _is_elsewhere(exc: AwsRefused) -> bool:
    """Return True if the zone does not offer the instance type. EC2 reports that as an invalid combination."""
    return exc.code == "InvalidParameterCombination" and "vailability Zone" in exc.text
