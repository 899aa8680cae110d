"""Schema of `cloud.runpod`: settings that only RunPod has. GPU, GPU count and spend limit are keys elsewhere."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator

from homing.config.parse.placeholders import Filled, FilledList
from homing.config.schema.section import Section, key
from homing.config.schema.value_types import Bytes, Duration, Flag

__all__ = ["IMAGE", "RunpodCloud", "cuda_of_image"]

# The torch version in this image is one that homing supports, so nothing is installed at boot. Its CUDA version is the
# oldest that RunPod builds images for, so it also starts on hosts with older drivers.
IMAGE = "runpod/pytorch:1.3.3-cu1281-torch2130-ubuntu2404"
# Variables that RunPod or homing sets itself.
_TAKEN = ("PUBLIC_KEY", "RUNPOD_", "HOMING_")
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
        if name.startswith(_TAKEN):
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
    """Return the CUDA version in an image's name, or that of IMAGE if the name has none.

    Both runpod/pytorch:1.3.3-cu1281-... and pytorch/pytorch:2.13.0-cuda12.8-... give 12.8.
    """
    found = re.search(r"cu(?:da)?(\d\d)\.?(\d)", image.rpartition(":")[2])
    return f"{found[1]}.{found[2]}" if found else cuda_of_image(IMAGE)


class RunpodCloud(Section):
    """Settings for `providers: [runpod]`: image, disk, data centers and network volume of the pod."""

    image: Filled = key(
        "Container image. It needs bash, python3 (if that is older than 3.11, another one is installed)"
        " and sshd, which receives the files. Its torch is used if homing supports that version; else one"
        " is installed at boot, which takes minutes.",
        default="",
        derived=f"the template's, else {IMAGE}",
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
        derived="data, checkpoints and environment, at least 20GB",
        example="60GB",
        ge=10**9,
        le=10**14,
    )
    min_cuda: Annotated[Filled, AfterValidator(_cuda)] = key(
        "Only hosts with a driver that supports this CUDA version: an image built for a newer one does"
        " not start there. If the driver is older than the CUDA version of our torch, a matching torch is"
        " installed.",
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
        "Create the volume with this size if none has that name. 0: it must exist already.",
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
        "Refuse a pod that cannot destroy itself with its own key. false: only the guard at home can"
        " destroy it, so keep one running.",
        default=True,
        example="false",
    )
