"""Schema of `cloud.aws`: settings that only AWS has. The GPU, the GPU count and the spend limit are keys elsewhere."""

from __future__ import annotations

import ipaddress
import re
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, model_validator

from homing.config.parse.placeholders import Filled, FilledList
from homing.config.schema.section import Section, key
from homing.config.schema.value_types import Bytes, Flag, Number, Usd

__all__ = ["IMAGE_NAME", "IMAGE_OWNER", "METADATA_URL", "AwsCloud"]

# Ubuntu 24.04, because its python3 is new enough for homing. IMAGE_OWNER is the Amazon account that publishes these
# images.
IMAGE_NAME = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) *"
IMAGE_OWNER = "898082745236"
METADATA_URL = "http://169.254.169.254"
_WORLD = 0  # prefix length of a network that contains every address


def _regions(names: list[str]) -> list[str]:
    for name in names:
        if not re.fullmatch(r"[a-z]{2,3}(-[a-z]+)+-\d", name):
            raise ValueError(f"{name!r} is not a region; use one such as us-east-1, without the zone letter")
    return names


def _types(names: list[str]) -> list[str]:
    for name in names:
        if not re.fullmatch(r"[a-z][a-z0-9-]*\.([a-z0-9-]+|\*)", name):
            raise ValueError(f"{name!r} is not an instance type; use one such as g5.xlarge, or g5.* for all sizes")
    return names


def _ssh_from(text: str) -> str:
    if not text:
        return ""
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is not an address; use one such as 203.0.113.7 or 203.0.113.0/24") from None
    if network.prefixlen == _WORLD:
        raise ValueError(f"{text!r} would open SSH to the whole internet; use the address of this computer")
    return str(network)


def _like(pattern: str, example: str) -> AfterValidator:
    def check(text: str) -> str:
        if text and not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} does not look like {example}")
        return text

    return AfterValidator(check)


def _all_like(pattern: str, example: str) -> AfterValidator:
    def check(texts: list[str]) -> list[str]:
        for text in texts:
            if not re.fullmatch(pattern, text):
                raise ValueError(f"{text!r} does not look like {example}")
        return texts

    return AfterValidator(check)


class AwsCloud(Section):
    """Settings for `providers: [aws]`: regions, instance types, image, network, disks and budget alarm."""

    regions: Annotated[FilledList, AfterValidator(_regions)] = key(
        "Regions to search. Keep the store's bucket in the same region: traffic between regions is slow and billed.",
        default=[],
        derived="AWS_REGION, or the region of your AWS profile",
        example="[us-east-1, us-east-2]",
    )
    instance_types: Annotated[FilledList, AfterValidator(_types)] = key(
        "Only these instance types; * matches all sizes.",
        default=[],
        derived="all types with NVIDIA GPUs that can train",
        example="[g5.*, g6.xlarge]",
    )
    spot: Flag = key(
        "Also offer spot instances, which are cheaper and may be preempted with two minutes' notice.",
        default=True,
        example="false",
    )
    spot_headroom: Number = key(
        "How far the spot price may rise before AWS reclaims the instance; the displayed rate includes it.",
        default=0.1,
        example="20%",
        ge=0.0,
        le=2.0,
    )
    image: Annotated[Filled, _like(r"ami-[0-9a-f]{8,17}", "ami-0123456789abcdef0")] = key(
        "A specific AMI. It needs an NVIDIA driver, bash, curl and python3 (if that is older than 3.11,"
        " another one is installed).",
        default="",
        derived="the newest that matches image_name",
        example="ami-0123456789abcdef0",
    )
    image_name: Filled = key(
        "Name pattern of the AMI; the newest match is used.", default=IMAGE_NAME, example=IMAGE_NAME
    )
    image_owner: Annotated[Filled, _like(r"\d{12}|amazon|self", "an account's twelve digits, amazon or self")] = key(
        "Owner account of the AMIs to search.", default=IMAGE_OWNER, example="self"
    )
    subnets: Annotated[FilledList, _all_like(r"subnet-[0-9a-f]{8,17}", "subnet-0123456789abcdef0")] = key(
        "Subnets for the instances; they need internet access.",
        default=[],
        derived="those of the default VPC",
        example="[subnet-0123456789abcdef0]",
    )
    key_name: Filled = key(
        "One of your EC2 key pairs, for additional SSH access. It must exist already; homing does not create one.",
        default="",
        example="my-laptop",
    )
    ssh_from: Annotated[Filled, AfterValidator(_ssh_from)] = key(
        "The only address that may reach the instance by SSH, usually this computer's. Without it, SSH is closed.",
        default="",
        example="203.0.113.7",
    )
    disk: Bytes = key(
        "Size of the root disk; it is deleted with the instance.",
        default=0,
        derived="the image, data, checkpoints and environment, at least 100GB",
        example="200GB",
        ge=0,
        le=16 * 10**12,
    )
    volume: Bytes = key(
        "Size of a persistent EBS volume for this run. It holds the environment and the inputs, so that a"
        " later attempt can reuse them. It ties the run to one availability zone, outlives the instance"
        " and keeps billing until it is destroyed: `homing destroy --all --kept`.",
        default=0,
        example="100GB",
        ge=0,
        le=16 * 10**12,
    )
    monthly_budget: Usd | None = key(
        "Create a monthly cost budget of this amount in AWS Budgets, which sends mail at 60 and 100"
        " percent. It is an alarm that comes hours late, not a limit.",
        example="$50.00",
        gt=Decimal(0),
    )
    budget_email: Annotated[Filled, _like(r"[^@\s]+@[^@\s]+", "an address for mail")] = key(
        "Recipient of the budget mail.", default="", example="me@example.org"
    )
    metadata_url: Annotated[Filled, _like(r"https?://\S+", "http://169.254.169.254")] = key(
        "Address of the instance metadata service, which announces preemption.",
        default=METADATA_URL,
        example=METADATA_URL,
    )

    @model_validator(mode="after")
    def _belongs_together(self) -> AwsCloud:
        if (self.monthly_budget is None) != (not self.budget_email):
            raise ValueError("monthly_budget and budget_email belong together: the amount and the address to notify")
        return self
