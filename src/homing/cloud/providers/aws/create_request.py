"""Pure functions that build the user data of an EC2 instance and the parameters of run_instances.

user data     startup.sh, which also sets a timer in the operating system and mounts the persistent volume; no secrets
run_instances spot with a maximum price, terminate on shutdown, IMDSv2, tags on everything that the call creates
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from importlib import resources
from typing import Any

from homing.cloud.providers.base import Request
from homing.errors import CreateFailed
from homing.wire.boot_json import Boot
from homing.wire.guard_timing import PROVIDER, allowed_s, reserve_s

__all__ = [
    "MARK_TAG",
    "RATE_TAG",
    "SSH_TAG",
    "Launch",
    "client_token",
    "ends_in_s",
    "policy_of",
    "prepare_text",
    "run_parameters",
    "tag_list",
    "user_data",
]

MARK_TAG, RATE_TAG, SSH_TAG, RUN_TAG = "homing-mark", "homing-rate", "homing-ssh", "homing-run"
VOLUME_WAIT_S = 300
FOLLOW_S = 60
_SAME_CLOCK_S = 10.0  # smaller clock differences are ignored, because a Date header has whole seconds and arrives late
_MOST_USER_DATA = 16_384
_HOPS = 2  # hop limit of the metadata service: two, so that containers on the instance can reach it too


@dataclass(frozen=True)
class Launch:
    """Parameters of one attempt to start an instance in one zone."""

    image: str
    root_device: str
    root_gb: int
    zone: str
    subnet: str
    group: str
    profile: str  # "" if the store needs no role
    key_name: str
    user_data: bytes
    most_usd_per_hour: Decimal | None  # maximum spot price; None for on demand
    is_ssh: bool  # whether SSH login is allowed


def ends_in_s(boot: Boot) -> float:
    """Return the seconds from the start of billing until the provider's guard acts; infinity if there is no limit."""
    limit = None if boot.spend_limit_usd is None else Decimal(boot.spend_limit_usd)
    allowed = allowed_s(Decimal(boot.rate_usd_per_hour), limit, Decimal(boot.spent_before_usd), boot.time_limit_s)
    return allowed - reserve_s(PROVIDER, allowed, boot.stop_grace_s) if math.isfinite(allowed) else math.inf


def prepare_text(boot: Boot, *, has_volume: bool, skew_s: float = 0.0) -> str:
    """Return the part of startup.sh that only AWS instances run, before SSH login is possible.

    `skew_s` is how many seconds AWS's clock, which the instances use, is ahead of the clock that recorded the start of
    billing.
    """
    seconds = ends_in_s(boot)
    is_limited = math.isfinite(seconds)
    ahead_s = int(skew_s) if abs(skew_s) > _SAME_CLOCK_S else 0
    settings = {
        "SYSTEM_TIMER_AT": int(boot.started_at + ahead_s + seconds) if is_limited else 0,
        # Upper bound on the timer in minutes from now, in case the instance's clock is wrong.
        "SYSTEM_TIMER_MAX_M": max(1, int(seconds // 60)) if is_limited else 0,
        "FOLLOW_S": FOLLOW_S,
        "VOLUME_WAIT_S": VOLUME_WAIT_S if has_volume else 0,
    }
    text = resources.files("homing.cloud.providers.aws").joinpath("prepare.sh").read_text(encoding="utf-8")
    return text.replace("# SETTINGS\n", "".join(f"{name}={value}\n" for name, value in settings.items()))


def user_data(script: str) -> bytes:
    """Return the startup script as user data, gzip-compressed if it is too long. cloud-init decompresses it.

    The script can exceed the limit if it contains presigned URLs with session tokens.
    """
    data = script.encode()
    if len(data) > _MOST_USER_DATA:
        data = gzip.compress(data, mtime=0)
    if len(data) > _MOST_USER_DATA:
        raise CreateFailed(
            what="The instance's startup script is too long for EC2.",
            why=f"Compressed, it is {len(data):,} bytes long; EC2 allows {_MOST_USER_DATA:,} bytes of user data.",
            fix="Set cloud.aws.ssh_from to send files over SSH instead of through presigned URLs.",
        )
    return data


def client_token(mark: str, zone: str) -> str:
    """Return a ClientToken that depends only on the mark and the zone, so that a repeated call is idempotent.

    Each zone gets its own token, because EC2 refuses a token that is reused with different parameters, perhaps even
    after a failed call.
    """
    return hashlib.sha256(f"{mark} {zone}".encode()).hexdigest()


def run_parameters(request: Request, launch: Launch) -> dict[str, Any]:
    tags = {
        "Name": request.mark,
        MARK_TAG: request.mark,
        RUN_TAG: request.order.run_name,
        RATE_TAG: str(request.offer.rate_usd_per_hour),
        SSH_TAG: "22" if launch.is_ssh else "",
    }
    root = {"VolumeSize": launch.root_gb, "VolumeType": "gp3", "DeleteOnTermination": True, "Encrypted": True}
    parameters: dict[str, Any] = {
        "ImageId": launch.image,
        "InstanceType": request.offer.name.split("/")[1],
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": client_token(request.mark, launch.zone),
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpEndpoint": "enabled",
            "HttpPutResponseHopLimit": _HOPS,
            "InstanceMetadataTags": "enabled",
        },
        "BlockDeviceMappings": [{"DeviceName": launch.root_device, "Ebs": root}],
        "NetworkInterfaces": [
            {
                "DeviceIndex": 0,
                "SubnetId": launch.subnet,
                "Groups": [launch.group],
                "AssociatePublicIpAddress": True,
                "DeleteOnTermination": True,
            }
        ],
        "UserData": launch.user_data,
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": tag_list(tags)} for kind in ("instance", "volume", "network-interface")
        ],
    }
    if launch.profile:
        parameters["IamInstanceProfile"] = {"Name": launch.profile}
    if launch.key_name:
        parameters["KeyName"] = launch.key_name
    if launch.most_usd_per_hour is not None:
        # The spot request is one-time, because a persistent request would start a new instance after we terminate this
        # one.
        spot = {
            "SpotInstanceType": "one-time",
            "InstanceInterruptionBehavior": "terminate",
            "MaxPrice": str(launch.most_usd_per_hour),
        }
        parameters["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
        parameters["TagSpecifications"].append({"ResourceType": "spot-instances-request", "Tags": tag_list(tags)})
    return parameters


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def policy_of(bucket: str, prefix: str, partition: str = "aws") -> str:
    """Return the instance's IAM policy, which allows reading, writing and listing below one prefix of one bucket.

    The condition uses IfExists because requests that check for the bucket or a key send no prefix. A strict condition
    would turn every "not found" into "forbidden".
    """
    arn = f"arn:{partition}:s3:::{bucket}"
    below = [f"{prefix}*"] if prefix else ["*"]
    statements = [
        {
            "Effect": "Allow",
            "Action": ["s3:ListBucket", "s3:ListBucketMultipartUploads"],
            "Resource": arn,
            "Condition": {"StringLikeIfExists": {"s3:prefix": below}},
        },
        {
            "Effect": "Allow",
            "Action": [
                "s3:GetObject",
                "s3:PutObject",
                "s3:DeleteObject",
                "s3:AbortMultipartUpload",
                "s3:ListMultipartUploadParts",
            ],
            "Resource": f"{arn}/{prefix}*",
        },
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": statements})
