"""AWS resources other than instances: roles, security groups, persistent volumes and a budget alert.

    role, instance profile, security group    created for one attempt, identified by its mark, and destroyed with it
    volume, budget alert                      kept at the user's request until `destroy --all --kept`

Each resource is looked up before it is created, and is tagged in the call that creates it. Destroying a resource that
is already gone succeeds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from homing.cloud.check_numbers import Figures, read_moment
from homing.cloud.ledger.mark import volume_mark
from homing.cloud.providers.aws.api import GLOBAL, AwsApi, AwsRefused
from homing.cloud.providers.aws.create_request import MARK_TAG, tag_list
from homing.cloud.providers.aws.offers import disk_usd_per_hour
from homing.cloud.providers.base import Resource, wait_until
from homing.cloud.providers.rest import Unwelcome
from homing.errors import ProviderRefused, StartTimeout, UsageError
from homing.store.address import S3Address, parse_s3
from homing.world import World

__all__ = ["Things", "make_budget", "make_group", "make_role", "s3_of"]

_POLICY = "one-prefix"
_TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}
_MOST_GB = 10**6
_DEVICE = "/dev/sdf"
_ATTACH_S = 240.0
_LOOK_S = 3.0
_ALERTS = (60, 100)  # percent of a budget
_GONE = ("NoSuchEntity", "InvalidGroup.NotFound", "InvalidVolume.NotFound", "NotFoundException")
_THERE = ("EntityAlreadyExists", "InvalidGroup.Duplicate", "InvalidPermission.Duplicate", "DuplicateRecordException")


def make_role(api: AwsApi, mark: str, owner: str, policy: str) -> str:
    """Create the role and the instance profile; return the profile's name.

    The owner is part of the path of both, so that they are identifiable as ours from the start.
    """
    tags = tag_list({MARK_TAG: mark, "Name": mark})
    common = {"Path": _path(owner), "Tags": tags}
    _unless(_THERE, lambda: api.call("iam", "create_role", GLOBAL, RoleName=mark,
                                     AssumeRolePolicyDocument=json.dumps(_TRUST), **common))  # fmt: skip
    api.call("iam", "put_role_policy", GLOBAL, RoleName=mark, PolicyName=_POLICY, PolicyDocument=policy)
    _unless(_THERE, lambda: api.call("iam", "create_instance_profile", GLOBAL, InstanceProfileName=mark, **common))
    # An instance profile can contain only one role, so LimitExceeded means that ours is already in it.
    _unless(("LimitExceeded",), lambda: api.call("iam", "add_role_to_instance_profile", GLOBAL,
                                                 InstanceProfileName=mark, RoleName=mark))  # fmt: skip
    return mark


def make_group(api: AwsApi, region: str, network: str, mark: str, ssh_from: str) -> str:
    """Create the security group and return its id. It allows inbound SSH from one address, or no inbound traffic."""
    found = _group(api, region, mark)
    if found is None:
        spec = [{"ResourceType": "security-group", "Tags": tag_list({MARK_TAG: mark, "Name": mark})}]
        _unless(_THERE, lambda: api.call("ec2", "create_security_group", region, GroupName=mark, VpcId=network,
                                         Description=f"homing: {ssh_from or 'nobody'} by SSH",
                                         TagSpecifications=spec))  # fmt: skip
        found = _group(api, region, mark)
    if found is None:
        raise Unwelcome(
            what=f"The security group {mark} was created but is not listed yet.",
            why="AWS sometimes lists new resources with a delay.",
            fix="Try again in a minute.",
        )
    if ssh_from:
        kind = "Ipv6Ranges" if ":" in ssh_from else "IpRanges"
        field = "CidrIpv6" if ":" in ssh_from else "CidrIp"
        rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, kind: [{field: ssh_from}]}
        _unless(_THERE, lambda: api.call("ec2", "authorize_security_group_ingress", region, GroupId=found["GroupId"],
                                         IpPermissions=[rule]))  # fmt: skip
    return str(found["GroupId"])


def make_budget(api: AwsApi, prefix: str, dollars: str, email: str) -> None:
    """Create the account's monthly budget. Its emails arrive hours late, so it is an alert and not a limit."""
    account = api.account
    budget = {
        "BudgetName": f"{prefix}budget",
        "BudgetLimit": {"Amount": dollars, "Unit": "USD"},
        "TimeUnit": "MONTHLY",
        "BudgetType": "COST",
    }
    alerts = [
        {
            "Notification": {
                "NotificationType": "ACTUAL",
                "ComparisonOperator": "GREATER_THAN",
                "Threshold": float(percent),
                "ThresholdType": "PERCENTAGE",
            },
            "Subscribers": [{"SubscriptionType": "EMAIL", "Address": email}],
        }
        for percent in _ALERTS
    ]
    _unless(_THERE, lambda: api.call("budgets", "create_budget", GLOBAL, AccountId=account, Budget=budget,
                                     NotificationsWithSubscribers=alerts))  # fmt: skip


class Things:
    """Lists and destroys this home directory's AWS resources other than instances."""

    def __init__(self, api: AwsApi, prefix: str, owner: str, world: World) -> None:
        self._api, self._prefix, self._owner, self._world = api, prefix, owner, world

    # --- the volume of a run ---

    def find_volume(self, region: str, mark: str) -> dict[str, Any] | None:
        wanted = [{"Name": f"tag:{MARK_TAG}", "Values": [volume_mark(mark)]}]
        found = self._api.items("ec2", "describe_volumes", "Volumes", region, Filters=wanted)
        living = [volume for volume in found if volume["State"] not in ("deleting", "deleted", "error")]
        return min(living, key=lambda volume: volume["VolumeId"], default=None)

    def attach_volume(
        self, region: str, mark: str, instance_id: str, zone: str, num_gb: int, within_s: float, by: float
    ) -> None:
        """Attach the run's volume, creating it in the instance's zone if there is none. Safe to repeat."""
        name = volume_mark(mark)
        volume = self.find_volume(region, mark)
        if volume is None:
            tags = [{"ResourceType": "volume", "Tags": tag_list({MARK_TAG: name, "Name": name})}]
            token = hashlib.sha256(f"{name} {zone}".encode()).hexdigest()
            volume = self._api.call("ec2", "create_volume", region, AvailabilityZone=zone, Size=num_gb,
                                    VolumeType="gp3", Encrypted=True, ClientToken=token,
                                    TagSpecifications=tags)  # fmt: skip
        volume_id = str(volume["VolumeId"])
        problem = "the attachment was never requested"

        def is_attached() -> bool:
            nonlocal problem
            found = self._api.items("ec2", "describe_volumes", "Volumes", region, VolumeIds=[volume_id])[0]
            places = {str(each["InstanceId"]): str(each.get("State")) for each in found.get("Attachments", [])}
            if places.get(instance_id) in ("attached", "attaching"):
                return True
            problem = f"it is {found['State']}" + (f" at {', '.join(places)}" if places else "")
            if found["State"] == "available":
                try:
                    self._api.call("ec2", "attach_volume", region, Device=_DEVICE, InstanceId=instance_id,
                                   VolumeId=volume_id)  # fmt: skip
                except AwsRefused as exc:
                    # The new instance is still starting, or the volume is still attached to the preempted instance.
                    if exc.code not in ("IncorrectState", "VolumeInUse", "InvalidVolume.NotFound"):
                        raise
                    problem = exc.text
            return False

        timeout_s = min(_ATTACH_S, within_s)
        late = StartTimeout(
            what=f"The volume {volume_id} could not be attached to {instance_id} within {timeout_s:.0f} s.",
            fix="See whether an old instance still holds the volume: homing reconcile   Then launch again.",
        )
        if not wait_until(is_attached, timeout_s=timeout_s, every_s=_LOOK_S, world=self._world, by=by):
            late.why = f"Last seen: {problem}."
            raise late

    # --- listing and destroying ---

    def everything(self, regions: Iterable[str]) -> list[Resource]:
        found: list[Resource] = []
        for region in regions:
            found += [*self._volumes(region), *self._groups(region)]
        return [*found, *self._roles(), *self._budgets()]

    def destroy(self, resource: Resource) -> None:
        if not resource.mark.startswith(self._prefix):
            raise ProviderRefused(
                what=f"{resource.id} does not belong to this homing home directory.",
                why=f"The names of its resources start with {self._prefix!r}.",
                fix="List its resources: homing runs",
            )
        region, _, name = resource.id.rpartition("/")
        if resource.kind == "volume":
            self._drop("ec2", "delete_volume", region, VolumeId=name)
        elif resource.kind == "group":
            self._drop("ec2", "delete_security_group", region, GroupId=name)
        elif resource.kind == "role":
            self._destroy_role(name)
        elif resource.kind == "budget":
            self._drop("budgets", "delete_budget", GLOBAL, AccountId=self._api.account, BudgetName=name)
        else:
            raise UsageError(
                what=f"homing does not create {resource.kind!r} resources on AWS.",
                fix="List the resources that exist: homing reconcile",
            )

    def _destroy_role(self, name: str) -> None:
        """Delete the profile and then the role, because a role that is in a profile cannot be deleted."""
        self._drop("iam", "remove_role_from_instance_profile", GLOBAL, InstanceProfileName=name, RoleName=name)
        self._drop("iam", "delete_instance_profile", GLOBAL, InstanceProfileName=name)
        self._drop("iam", "delete_role_policy", GLOBAL, RoleName=name, PolicyName=_POLICY)
        self._drop("iam", "delete_role", GLOBAL, RoleName=name)

    def _drop(self, service: str, operation: str, region: str, **params: str) -> None:
        _unless(_GONE, lambda: self._api.call(service, operation, region, **params))

    def _volumes(self, region: str) -> list[Resource]:
        rows = self._api.items("ec2", "describe_volumes", "Volumes", region, Filters=self._ours())
        found = []
        for row in rows:
            name = _mark_of(row)
            if not name.endswith("-volume") or row["State"] == "deleting":
                continue  # skip root disks, which are deleted with their instances
            users = ", ".join(str(each["InstanceId"]) for each in row.get("Attachments", []))
            read, now = Figures("aws"), self._world.now() + self._api.skew_s
            num_gb, made_at = read.whole("Size", row["Size"], _MOST_GB), read.moment("", row.get("CreateTime"), now)
            detail = f"{row['Size']} GB, " if num_gb is not None else "its size is not valid, so its price is unknown, "
            detail += f"attached to {users}" if users else "kept for the run's next attempt"
            rate = disk_usd_per_hour(num_gb or 0)
            found.append(
                Resource("volume", f"{region}/{row['VolumeId']}", name, "aws", rate, made_at, detail, is_kept=True)
            )
        return found

    def _groups(self, region: str) -> list[Resource]:
        rows = self._api.items("ec2", "describe_security_groups", "SecurityGroups", region, Filters=self._ours())
        return [
            Resource(
                "group", f"{region}/{row['GroupId']}", _mark_of(row), "aws", detail=str(row.get("Description", ""))
            )
            for row in rows
        ]

    def _roles(self) -> list[Resource]:
        """Return the roles and instance profiles. A launch that was killed may have created only one of the two."""
        found: dict[str, Resource] = {}
        for operation, key in (("list_roles", "Role"), ("list_instance_profiles", "InstanceProfile")):
            for row in self._api.items("iam", operation, f"{key}s", GLOBAL, PathPrefix=_path(self._owner)):
                name = str(row[f"{key}Name"])
                if not name.startswith(self._prefix):
                    continue  # an API that ignores the path filter also returns the roles of other home directories
                at = read_moment(row.get("CreateDate"))
                found.setdefault(name, Resource("role", f"iam/{name}", name, "aws", Decimal(0), at, "with its profile"))
        return list(found.values())

    def _budgets(self) -> list[Resource]:
        try:
            asked = {"AccountId": self._api.account}
            rows = self._api.call("budgets", "describe_budgets", GLOBAL, **asked).get("Budgets", [])
        except AwsRefused as exc:
            if exc.code.startswith(("AccessDenied", "NotFound")):
                return []  # without permission to list budgets, assume that this key has created none
            raise
        names = [str(row["BudgetName"]) for row in rows]
        ours = [name for name in names if name.startswith(self._prefix)]
        return [Resource("budget", f"budgets/{name}", name, "aws", detail="alerts", is_kept=True) for name in ours]

    def _ours(self) -> list[dict[str, Any]]:
        return [{"Name": f"tag:{MARK_TAG}", "Values": [f"{self._prefix}*"]}]


def s3_of(store: str, environment: dict[str, str]) -> S3Address | None:
    """Return the bucket's address if the store is on AWS S3, else None. The instance's role applies only to AWS S3."""
    if not store.startswith("s3:") or environment.get("AWS_ENDPOINT_URL_S3"):
        return None
    address = parse_s3(store)
    return None if address.endpoint else address


def _path(owner: str) -> str:
    return f"/homing/{owner}/"


def _group(api: AwsApi, region: str, mark: str) -> dict[str, Any] | None:
    wanted = [{"Name": "group-name", "Values": [mark]}]
    return next(iter(api.items("ec2", "describe_security_groups", "SecurityGroups", region, Filters=wanted)), None)


def _unless(codes: tuple[str, ...], do: Callable[[], object]) -> None:
    try:
        do()
    except AwsRefused as exc:
        if exc.code not in codes:
            raise


def _mark_of(row: dict[str, Any]) -> str:
    return next((str(tag["Value"]) for tag in row.get("Tags", []) if tag["Key"] == MARK_TAG), "")
