"""`cloud.aws`: what only AWS understands. The card, its number and the spend limit have keys of their own."""

from __future__ import annotations

import ipaddress
import re
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, model_validator

from homing.config.kinds import Bytes, Flag, Number, Usd
from homing.config.placeholders import Filled, FilledList
from homing.config.section import Section, key

__all__ = ["IMAGE_NAME", "IMAGE_OWNER", "METADATA_URL", "AwsCloud"]

# Ubuntu 24.04: its own python3 is new enough for homing. The owner is Amazon's account of these images.
IMAGE_NAME = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) *"
IMAGE_OWNER = "898082745236"
METADATA_URL = "http://169.254.169.254"
_WORLD = 0  # bits of a network that is everybody's


def _regions(names: list[str]) -> list[str]:
    for name in names:
        if not re.fullmatch(r"[a-z]{2,3}(-[a-z]+)+-\d", name):
            raise ValueError(f"{name!r} is no region; AWS writes them like us-east-1, without the letter of a zone")
    return names


def _types(names: list[str]) -> list[str]:
    for name in names:
        if not re.fullmatch(r"[a-z][a-z0-9-]*\.([a-z0-9-]+|\*)", name):
            raise ValueError(f"{name!r} is no instance type; such as g5.xlarge, or g5.* for all sizes")
    return names


def _ssh_from(text: str) -> str:
    if not text:
        return ""
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is no address; such as 203.0.113.7 or 203.0.113.0/24") from None
    if network.prefixlen == _WORLD:
        raise ValueError(f"{text!r} would open SSH to everybody; name the address of this computer")
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
    """Settings for `providers: [aws]`: where, which machines, its image, network, disks and alarms."""

    regions: Annotated[FilledList, AfterValidator(_regions)] = key(
        "Regions to look in. Keep the store's bucket in the same one: what crosses regions is slow and billed.",
        default=[],
        derived="AWS_REGION, or the profile's",
        example="[us-east-1, us-east-2]",
    )
    instance_types: Annotated[FilledList, AfterValidator(_types)] = key(
        "Only these types; a star stands for all sizes.",
        default=[],
        derived="all with NVIDIA cards that training can use",
        example="[g5.*, g6.xlarge]",
    )
    spot: Flag = key(
        "Also spot instances, which are cheaper and may be taken away with two minutes' notice.",
        default=True,
        example="false",
    )
    spot_headroom: Number = key(
        "How far the spot price may rise before AWS takes the instance away; the rate that is shown contains it.",
        default=0.1,
        example="20%",
        ge=0.0,
        le=2.0,
    )
    image: Annotated[Filled, _like(r"ami-[0-9a-f]{8,17}", "ami-0123456789abcdef0")] = key(
        "A certain image; it needs an NVIDIA driver, bash, curl and python3 (where that is older than 3.11 another one"
        " is brought).",
        default="",
        derived="the newest that image_name finds",
        example="ami-0123456789abcdef0",
    )
    image_name: Filled = key("The newest image with such a name is taken.", default=IMAGE_NAME, example=IMAGE_NAME)
    image_owner: Annotated[Filled, _like(r"\d{12}|amazon|self", "an account's twelve digits, amazon or self")] = key(
        "Whose images are looked at.", default=IMAGE_OWNER, example="self"
    )
    subnets: Annotated[FilledList, _all_like(r"subnet-[0-9a-f]{8,17}", "subnet-0123456789abcdef0")] = key(
        "Where instances get their address; they need a way to the internet.",
        default=[],
        derived="those of the default network",
        example="[subnet-0123456789abcdef0]",
    )
    key_name: Filled = key(
        "A key pair of your own that may log in too. It must be there already; none is made.",
        default="",
        example="my-laptop",
    )
    ssh_from: Annotated[Filled, AfterValidator(_ssh_from)] = key(
        "The one address that may reach the instance by SSH, usually this computer's. Left out: nobody may.",
        default="",
        example="203.0.113.7",
    )
    disk: Bytes = key(
        "Root disk; it goes with the instance.",
        default=0,
        derived="the image, data, checkpoints and environment, at least 100GB",
        example="200GB",
        ge=0,
        le=16 * 10**12,
    )
    volume: Bytes = key(
        "Size of a persistent EBS volume for this run: environment and inputs lie on it, and a later attempt finds them"
        " again. It ties the run to one zone, outlives the instance and bills on until it is destroyed:"
        " `homing destroy --all --kept`.",
        default=0,
        example="100GB",
        ge=0,
        le=16 * 10**12,
    )
    monthly_budget: Usd | None = key(
        "Make a monthly cost budget of so much in AWS Budgets, which mails at 60 and 100 percent. An alarm that comes"
        " hours late, never a limit.",
        example="$50.00",
        gt=Decimal(0),
    )
    budget_email: Annotated[Filled, _like(r"[^@\s]+@[^@\s]+", "an address for mail")] = key(
        "Who gets the mail.", default="", example="me@example.org"
    )
    metadata_url: Annotated[Filled, _like(r"https?://\S+", "http://169.254.169.254")] = key(
        "Where the instance asks about itself; there it reads the notice that it will be taken away.",
        default=METADATA_URL,
        example=METADATA_URL,
    )

    @model_validator(mode="after")
    def _belongs_together(self) -> AwsCloud:
        if (self.monthly_budget is None) != (not self.budget_email):
            raise ValueError("monthly_budget and budget_email belong together: how much, and who is told")
        return self
