"""Schema of `cloud.aws`, `cloud.runpod`, `cloud.modal` and `cloud.shadeform`: settings that only one provider has.

The GPU, the GPU count and the limits are keys of other sections, because every provider has them.
"""

from __future__ import annotations

import ipaddress
import re
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from homing.config.schema.value_types import Bytes, Duration, Filled, FilledList, Flag, Number, Section, Usd, key

__all__ = [
    "AWS_IMAGE_NAME",
    "AWS_IMAGE_OWNER",
    "AWS_METADATA_URL",
    "RUNPOD_IMAGE",
    "AwsCloud",
    "ModalCloud",
    "RunpodCloud",
    "ShadeformCloud",
    "cuda_of_image",
]

# Ubuntu 24.04, because its python3 is new enough for homing. AWS_IMAGE_OWNER is the Amazon account that publishes these
# images.
AWS_IMAGE_NAME = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) *"
AWS_IMAGE_OWNER = "898082745236"
AWS_METADATA_URL = "http://169.254.169.254"
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
        raise ValueError(f"{text!r} would open SSH to the whole internet; use this computer's address")
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
        "ID of a specific AMI. It needs an NVIDIA driver, bash, curl and python3 (if python3 is older than"
        " 3.11, another one is installed).",
        default="",
        derived="the newest AMI that matches image_name",
        example="ami-0123456789abcdef0",
    )
    image_name: Filled = key(
        "Name pattern of the AMI; the newest match is used.", default=AWS_IMAGE_NAME, example=AWS_IMAGE_NAME
    )
    image_owner: Annotated[Filled, _like(r"\d{12}|amazon|self", "an account's twelve digits, amazon or self")] = key(
        "Owner account of the AMIs to search.", default=AWS_IMAGE_OWNER, example="self"
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
        derived="enough for the image, data, checkpoints and environment, at least 100GB",
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
        "Create a monthly cost budget of this amount in AWS Budgets, which sends an email at 60 and at 100"
        " percent. It is an alarm that arrives hours late, not a limit.",
        example="$50.00",
        gt=Decimal(0),
    )
    budget_email: Annotated[Filled, _like(r"[^@\s]+@[^@\s]+", "an email address")] = key(
        "Recipient of the budget emails.", default="", example="me@example.org"
    )
    metadata_url: Annotated[Filled, _like(r"https?://\S+", "http://169.254.169.254")] = key(
        "Address of the instance metadata service, which announces preemptions.",
        default=AWS_METADATA_URL,
        example=AWS_METADATA_URL,
    )

    @model_validator(mode="after")
    def _belongs_together(self) -> AwsCloud:
        if (self.monthly_budget is None) != (not self.budget_email):
            raise ValueError("monthly_budget and budget_email must be set together: the amount and the recipient")
        return self


# The torch version in this image is one that homing supports, so nothing is installed at boot. Its CUDA version is the
# oldest that RunPod builds images for, so it also starts on hosts with older drivers.
RUNPOD_IMAGE = "runpod/pytorch:1.3.3-cu1281-torch2130-ubuntu2404"
# Variables that RunPod or homing sets itself.
_RUNPOD_VARIABLES = ("PUBLIC_KEY", "RUNPOD_", "HOMING_")
_SECRET = re.compile(r"(?i)(key|token|secret|passw|credential)")


def _data_centers(names: list[str]) -> list[str]:
    for name in names:
        if not re.fullmatch(r"[A-Z]{2,4}(-[A-Z]{2,4})?-\d+", name):
            raise ValueError(f"{name!r} is not a data center; use RunPod's names such as EU-RO-1, in capitals")
    return names


def _ports(ports: list[str]) -> list[str]:
    for port in ports:
        number, _, kind = port.partition("/")
        if kind not in ("tcp", "http") or not number.isdigit() or not 1 <= int(number) <= 70000:
            raise ValueError(f"{port!r} is not a port; use a port such as 6006/tcp or 8888/http")
    return ports


def _env(lines: list[str]) -> list[str]:
    for line in lines:
        name, sign, _ = line.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"{line!r} is not NAME=VALUE")
        if _SECRET.search(name):
            raise ValueError(
                f"{name} looks like a secret; never put secrets in the file, because RunPod shows these values"
            )
        if name.startswith(_RUNPOD_VARIABLES):
            raise ValueError(f"{name} is set by RunPod or by homing itself")
    return lines


def _cuda(version: str) -> str:
    if version and not re.fullmatch(r"\d+\.\d+", version):
        raise ValueError(f"{version!r} is not a CUDA version; use one such as '13.0', in quotes")
    return version


def _size(num_bytes: int) -> int:
    if num_bytes and not 10 * 10**9 <= num_bytes <= 4096 * 10**9:
        raise ValueError(f"{num_bytes / 10**9:g} GB is out of range: RunPod volumes are 10GB to 4096GB")
    return num_bytes


def _path(path: str) -> str:
    if not re.fullmatch(r"(/[\w.-]+)+", path):
        raise ValueError(f"{path!r} is not an absolute path; use one such as /workspace")
    return path


def cuda_of_image(image: str) -> str:
    """Return the CUDA version in an image's name, or that of RUNPOD_IMAGE if the name has none.

    Both runpod/pytorch:1.3.3-cu1281-... and pytorch/pytorch:2.13.0-cuda12.8-... give 12.8.
    """
    found = re.search(r"cu(?:da)?(\d\d)\.?(\d)", image.rpartition(":")[2])
    return f"{found[1]}.{found[2]}" if found else cuda_of_image(RUNPOD_IMAGE)


class RunpodCloud(Section):
    """Settings for `providers: [runpod]`: image, disk, data centers and network volume of the pod."""

    image: Filled = key(
        "Container image. It needs bash, python3 (if that is older than 3.11, another one is installed)"
        " and sshd, which receives the files. The image's torch is used if homing supports its version."
        " Otherwise, torch is installed at boot, which takes minutes.",
        default="",
        derived=f"the template's, else {RUNPOD_IMAGE}",
        example="me/train:latest",
    )
    template: Filled = key(
        "A RunPod pod template to start from; settings in this section override it.",
        default="",
        example="runpod-torch-v280",
    )
    registry: Filled = key(
        "Id of a RunPod registry credential, for a private image.", default="", example="clzdaifot0001l90809257ynb"
    )
    cloud: Literal["secure", "community", "any"] = key(
        "secure: RunPod's own data centers. community: other people's machines, which are cheaper but do"
        " not all have a public address.",
        default="secure",
        example="any",
    )
    data_centers: Annotated[FilledList, AfterValidator(_data_centers)] = key(
        "Only these data centers; each one is a separate offer.", default=[], example="[EU-RO-1, US-KS-2]"
    )
    disk: Bytes | None = key(
        "Size of the container disk; it is deleted with the pod. A size below what data, checkpoints and"
        " environment need is refused.",
        derived="enough for data, checkpoints and environment, at least 20GB",
        example="60GB",
        ge=10**9,
        le=10**14,
    )
    min_cuda: Annotated[Filled, AfterValidator(_cuda)] = key(
        "Use only hosts with a driver that supports this CUDA version. An image does not start if it was"
        " built for a newer CUDA version than the driver supports. If the driver is too old for homing's"
        " usual torch, a matching torch is installed.",
        default="",
        derived="the CUDA version in the image's name, else 12.8",
        example="'13.0'",
    )
    env: Annotated[FilledList, AfterValidator(_env)] = key(
        "Environment variables of the pod, NAME=VALUE. Everyone in the RunPod account can see them, so"
        " never put secrets here.",
        default=[],
        example="[NCCL_DEBUG=WARN]",
    )
    ports: Annotated[FilledList, AfterValidator(_ports)] = key(
        "Ports to open in addition to 22/tcp. An http port is public, without a password.",
        default=[],
        example="[6006/tcp]",
    )
    global_networking: Flag = key(
        "Give the pod a private address that the account's other pods can reach.", default=False, example="true"
    )
    volume: Filled = key(
        "Name or id of a network volume, mounted at volume_path. It outlives the pod and keeps billing."
        " Secure cloud only.",
        default="",
        example="transformer-shared",
    )
    volume_size: Annotated[Bytes, AfterValidator(_size)] = key(
        "Create the volume with this size if no volume has that name. 0: the volume must already exist.",
        default=0,
        example="1TB",
    )
    volume_path: Annotated[Filled, AfterValidator(_path)] = key(
        "Where the volume is mounted. Set cloud.volume to the same path to keep datasets and caches on it.",
        default="/workspace",
        example="/workspace",
    )
    start_limit: Duration = key(
        "Destroy the pod and fail the launch if SSH is not reachable within this time.",
        default=900.0,
        example="20m",
        ge=30.0,
        le=3600.0,
    )
    must_end_itself: Flag = key(
        "Refuse a pod that cannot destroy itself with its own key. false: accept such a pod. Only a guard on"
        " your computer can then destroy it, so keep one running.",
        default=True,
        example="false",
    )


class ModalCloud(Section):
    """Settings for `providers: [modal]`: CPU cores, memory, image and how long to wait for a GPU."""

    cores: Number = key(
        "Physical CPU cores per GPU; a machine without a GPU gets twice as many. They are reserved and"
        " capped, so the rate is fixed.",
        default=2.0,
        example="4",
        ge=0.125,
        le=64,
    )
    memory: Bytes = key(
        "Host memory per GPU; a machine without a GPU gets twice as much. It is reserved and capped, so the"
        " rate is fixed.",
        default=16 * 2**30,
        example="32GiB",
        ge=2**30,
        le=1024 * 2**30,
    )
    queue: Duration = key(
        "How long to wait for a free GPU. Modal never reports that a GPU is sold out, so without this"
        " limit a launch could wait forever.",
        default=600.0,
        example="5m",
        ge=10.0,
        le=1200.0,
    )
    image: Filled = key(
        "A container image with Python 3.11 or newer and all packages, as built by `homing image build`.",
        derived="an image that Modal builds from the tested versions",
        default="",
        example="ghcr.io/me/training:1",
    )
    registry: Filled = key(
        "Name of the Modal Secret that holds the login for a private cloud.modal.image.",
        default="",
        example="my-registry",
    )


class ShadeformCloud(Section):
    """Settings for `providers: [shadeform]`: clouds, spot, operating system, and self-deletion of the machine."""

    clouds: FilledList = key(
        "Use only these clouds, of those that Shadeform offers.",
        default=[],
        derived="any",
        example="[hyperstack, lambdalabs]",
    )
    spot: Flag = key(
        "Also offer spot machines, which are cheaper and may be preempted without notice.",
        default=False,
        example="true",
    )
    os: Filled = key(
        "Operating system. Machine types that do not offer it are excluded.",
        default="",
        derived="the newest Ubuntu with drivers that Shadeform offers",
        example="ubuntu22.04_cuda12.4_shade_os",
    )
    self_delete: Flag = key(
        "Put the account's API key on the machine, so that it can delete itself when done. That key"
        " controls the whole account.",
        default=False,
        example="true",
    )
    start_limit: Duration = key(
        "Destroy the machine and fail the launch if SSH is not reachable within this time.",
        default=1800.0,
        example="45m",
        ge=60.0,
        le=7200.0,
    )
