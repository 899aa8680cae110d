"""One instance, started somewhere: the zones of an offer in turn, until one has room.

zones that cost no more than was offered -> image, subnet, group, role, files -> run_instances, zone by zone
no room           the next zone; none left: NoOffer          quota    refused, with its code and its page
no clear answer   the same call again: its ClientToken makes that safe; then the mark is looked for. Never another
                  zone: whatever this one did not say, it may have done
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from homing.cloud import ssh_keys
from homing.cloud.providers import aws_machine as machine
from homing.cloud.providers.aws_api import AwsApi, AwsRefused
from homing.cloud.providers.aws_market import SYSTEM_GB, Market, Wish, quota_code, quota_page
from homing.cloud.providers.aws_things import Things, make_budget, make_group, make_role, s3_of
from homing.cloud.providers.base import Request
from homing.cloud.providers.once import LOOKS, look_for
from homing.cloud.providers.rest import TRIES, Unsure
from homing.cloud.startup import Fetch, startup_script
from homing.config.clouds.aws import AwsCloud
from homing.errors import CreateFailed, NoOffer, ProviderRefused
from homing.store import open_store
from homing.store.s3 import S3Store
from homing.wire import codec, names
from homing.world import World

__all__ = ["Creation", "quota_refusal"]

_NO_ROOM = (
    "InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientCapacityOnHost", "UnfulfillableCapacity",
    "Unsupported", "SpotMaxPriceTooLow", "InsufficientFreeAddressesInSubnet",
)  # fmt: skip
_QUOTA = ("VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded")
_PROFILE_S = 90.0  # a new instance profile is not known to EC2 at once
_PROFILE_EVERY_S = 3.0
_PAUSE_S = 1.0
_LINK_S = 3600.0  # for so long the addresses are good by which an instance gets its first files
_END_ALONE_S = 1800.0  # without an agent of ours an instance ends itself after this at the latest


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
    with_mark: Callable[[str, str], list[dict[str, Any]]]  # region, mark -> what lives under it, the oldest first

    def start(self, request: Request, region: str, wish: Wish) -> dict[str, Any]:
        zones = self._zones(request, region, wish)
        subnets, network = self.subnets(region)
        image = self.image(region)
        usable = [zone for zone in zones if zone in subnets]
        if not usable:
            raise self._no_room(request, region, "no zone has it at this rate now" if not zones else "no subnet there")
        group = make_group(self.api, region, network, request.mark, self.settings.ssh_from)
        profile = self._profile(request)
        if self.settings.monthly_budget is not None:
            make_budget(
                self.api, f"homing-{self.owner}-", str(self.settings.monthly_budget), self.settings.budget_email
            )
        data = machine.user_data(self._script(request))
        root = image["BlockDeviceMappings"][0]
        problems = []
        for zone in usable:
            launch = machine.Launch(
                image=str(image["ImageId"]),
                root_device=str(image.get("RootDeviceName") or root["DeviceName"]),
                root_gb=max(int(root["Ebs"]["VolumeSize"]), request.offer.disk_bytes // 10**9 + SYSTEM_GB),
                zone=zone,
                subnet=subnets[zone],
                group=group,
                profile=profile,
                key_name=self.settings.key_name,
                user_data=data,
                most_usd_per_hour=self.market.most_usd(request.offer, wish) if request.offer.is_spot else None,
                is_ssh=bool(self.settings.ssh_from),
            )
            try:
                return self._run(request, region, machine.run_parameters(request, launch))
            except AwsRefused as exc:
                if exc.code not in _NO_ROOM and not _is_elsewhere(exc):
                    raise self._refusal(exc, request, region, wish) from exc
                problems.append(f"{zone}: {exc.code}, {exc.text}")
        raise self._no_room(request, region, "\n".join(problems))

    # --- what it needs ---

    def _zones(self, request: Request, region: str, wish: Wish) -> list[str]:
        zones = self.market.zones(request.offer, wish)
        volume = self.things.find_volume(region, request.mark) if self.settings.volume else None
        if volume is None:
            return zones
        # A volume cannot leave its zone, and what is on it would be made again elsewhere.
        return [zone for zone in zones if zone == volume["AvailabilityZone"]]

    def subnets(self, region: str) -> tuple[dict[str, str], str]:
        """Zone -> subnet, of one network: a security group belongs to one."""
        if self.settings.subnets:
            rows = self.api.items("ec2", "describe_subnets", "Subnets", region, SubnetIds=list(self.settings.subnets))
        else:
            only = [{"Name": "default-for-az", "Values": ["true"]}]
            rows = self.api.items("ec2", "describe_subnets", "Subnets", region, Filters=only)
        if not rows:
            raise ProviderRefused(
                what=f"The account has no default network in {region}.",
                why="So it is not known where an instance would get its address.",
                fix="aws ec2 create-default-vpc   or name yours: cloud.aws.subnets",
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
            raise ProviderRefused(
                what=f"There is no image to start in {region}.",
                why=f"{self.settings.image_owner} has none that is named {self.settings.image_name!r}.",
                fix="Name one: cloud.aws.image   or another pattern: cloud.aws.image_name",
            )
        return max(found, key=lambda image: (str(image["CreationDate"]), str(image["ImageId"])))

    def _profile(self, request: Request) -> str:
        """ "" where the store is not S3 of AWS itself: no role opens it."""
        address = s3_of(request.order.boot.store, self.world.environment())
        if address is None:
            return ""
        policy = machine.policy_of(address.bucket, address.prefix)
        return make_role(self.api, request.mark, self.owner, policy)

    def _script(self, request: Request) -> str:
        boot = request.order.boot
        return startup_script(
            mark=request.mark,
            end_command="shutdown -h now",
            end_within_s=min(machine.ends_in_s(boot), _END_ALONE_S),
            login_key=ssh_keys.login_key(self.home, self.world).public_line,
            host_key=ssh_keys.host_key(self.home, request.mark, self.world),
            is_container=False,
            fetch=() if self.settings.ssh_from else self._fetches(request),
            prepare=machine.prepare_text(boot, has_volume=bool(self.settings.volume), skew_s=self.api.skew_s),
        )

    def _fetches(self, request: Request) -> tuple[Fetch, ...]:
        """Its first files in the store, each with its hash and an address that opens this one key for an hour.

        Written each time: the key is known beforehand, so an object that is there may be somebody else's. The instance
        compares each file with the hash in its user data before it uses it.
        """
        store = open_store(request.order.boot.store, self.world)
        assert isinstance(store, S3Store), store.url
        boot = codec.dumps(request.order.boot, indent=1).encode()
        files = {file.path: self.world.read(file.source) for file in request.order.files} | {names.BOOT: boot}
        found = []
        for path, data in files.items():
            digest = hashlib.sha256(data).hexdigest()
            key = f"{names.STORE_OBJECTS}/{digest}"
            store.put_bytes(key, data)
            found.append(Fetch(store.get_url(key, _LINK_S), path, digest))
        return tuple(found)

    # --- the call ---

    def _run(self, request: Request, region: str, parameters: dict[str, Any]) -> dict[str, Any]:
        problem: Exception | None = None
        for number in range(TRIES):
            try:
                return self._run_when_known(region, parameters)
            except Unsure as exc:
                problem = exc
            except AwsRefused as exc:
                # With other parameters the token was used before: whoever did so may have been served.
                if problem is None and exc.code != "IdempotentParameterMismatch":
                    raise
                problem = exc
                break
            self.world.sleep(_PAUSE_S * float(2**number))
        find = partial(self.with_mark, region, request.mark)
        made = look_for(request.mark, find, "aws", problem, self.settle_s, self.world)
        if made is not None:
            return made
        raise CreateFailed(
            what=f"aws did not start {request.offer.name}: it gave no clear answer.",
            why=f"{problem}. Its list was looked at {LOOKS} times and showed nothing under {request.mark}.",
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

    # --- what it may be refused for ---

    def _refusal(self, exc: AwsRefused, request: Request, region: str, wish: Wish) -> ProviderRefused:
        kind = request.offer.name.split("/")[1]
        if exc.code in _QUOTA:
            cores = self.market.num_cores(region, kind, wish)
            return quota_refusal(region, kind, cores, is_spot=request.offer.is_spot, said=f"{exc.code}: {exc.text}")
        if exc.code == "InvalidKeyPair.NotFound":
            return AwsRefused(
                what=f"There is no key pair {self.settings.key_name!r} in {region}.",
                why=exc.why,
                fix="Name one that is there: cloud.aws.key_name   (aws ec2 describe-key-pairs), or leave it out",
                code=exc.code,
                text=exc.text,
            )
        return exc

    def _no_room(self, request: Request, region: str, why: str) -> NoOffer:
        other = "on demand: --no-spot, " if request.offer.is_spot else ""
        return NoOffer(
            what=f"aws cannot start {request.offer.name} now.",
            why=why,
            fix=f"Take another: {request.order.words.to('plan')}   ({other}another type, or cloud.aws.regions)",
        )


def quota_refusal(region: str, kind: str, num_cores: int, *, is_spot: bool, said: str) -> AwsRefused:
    code = quota_code(kind, is_spot=is_spot)
    market = "spot" if is_spot else "on-demand"
    where = f": {quota_page(region, code)}" if code else " of EC2 in Service Quotas"
    other = "on demand, which has a quota of its own: --no-spot" if is_spot else "spot, which has a quota of its own"
    return AwsRefused(
        what=f"The account may not start {kind} in {region}: its quota of {market} vCPUs is too small.",
        why=f"{kind} needs {num_cores} vCPUs; quota {code or '(unknown)'}. AWS says {said}",
        fix=f"Ask AWS for more{where}   or rent {other}, or in another region: cloud.aws.regions",
        code="VcpuLimitExceeded",
        text=said,
    )


def _is_elsewhere(exc: AwsRefused) -> bool:
    """A type that this zone does not have is refused as a bad combination."""
    return exc.code == "InvalidParameterCombination" and "vailability Zone" in exc.text
