"""`cloud.runpod`: what only RunPod understands. The card, its number and the spend limit have keys of their own."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator

from homing.config.kinds import Bytes, Duration, Flag
from homing.config.placeholders import Filled, FilledList
from homing.config.section import Section, key

__all__ = ["IMAGE", "RunpodCloud", "cuda_of_image"]

# Its torch is in our range, so a boot installs none. Its CUDA is the oldest that RunPod builds images for, so that it
# starts on hosts with older drivers too.
IMAGE = "runpod/pytorch:1.3.3-cu1281-torch2130-ubuntu2404"
# What RunPod puts there itself, and what we do.
_TAKEN = ("PUBLIC_KEY", "RUNPOD_", "HOMING_")
_SECRET = re.compile(r"(?i)(key|token|secret|passw|credential)")


def _data_centers(names: list[str]) -> list[str]:
    for name in names:
        if not re.fullmatch(r"[A-Z]{2,4}(-[A-Z]{2,4})?-\d+", name):
            raise ValueError(f"{name!r} is no data center; RunPod writes them like EU-RO-1, in capitals")
    return names


def _ports(ports: list[str]) -> list[str]:
    for port in ports:
        number, _, kind = port.partition("/")
        if kind not in ("tcp", "http") or not number.isdigit() or not 1 <= int(number) <= 70000:
            raise ValueError(f"{port!r} is no port; such as 6006/tcp or 8888/http")
    return ports


def _env(lines: list[str]) -> list[str]:
    for line in lines:
        name, sign, _ = line.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"{line!r} is not NAME=VALUE")
        if _SECRET.search(name):
            raise ValueError(f"{name} looks like a secret; secrets are never in the file, RunPod shows these values")
        if name.startswith(_TAKEN):
            raise ValueError(f"{name} is set by RunPod or by homing itself")
    return lines


def _cuda(version: str) -> str:
    if version and not re.fullmatch(r"\d+\.\d+", version):
        raise ValueError(f"{version!r} is no CUDA version; such as '13.0', in quotes")
    return version


def _size(num_bytes: int) -> int:
    if num_bytes and not 10 * 10**9 <= num_bytes <= 4096 * 10**9:
        raise ValueError(f"{num_bytes / 10**9:g} GB is out of range: RunPod makes volumes of 10GB to 4096GB")
    return num_bytes


def _path(path: str) -> str:
    if not re.fullmatch(r"(/[\w.-]+)+", path):
        raise ValueError(f"{path!r} is no absolute path; such as /workspace")
    return path


def cuda_of_image(image: str) -> str:
    """12.8 for runpod/pytorch:1.3.3-cu1281-... and for pytorch/pytorch:2.13.0-cuda12.8-...; IMAGE's for other names."""
    found = re.search(r"cu(?:da)?(\d\d)\.?(\d)", image.rpartition(":")[2])
    return f"{found[1]}.{found[2]}" if found else cuda_of_image(IMAGE)


class RunpodCloud(Section):
    """Settings for `providers: [runpod]`: the pod's image, disk, place and network volume."""

    image: Filled = key(
        "Container image; it needs bash, python3 (where that is older than 3.11 another one is brought) and sshd, by"
        " which it gets its files. Its own torch is used where homing knows that version, else one is installed at"
        " boot, which takes minutes.",
        default="",
        derived=f"the template's, else {IMAGE}",
        example="me/train:latest",
    )
    template: Filled = key(
        "A pod template of RunPod to start from; what is set here wins over it.",
        default="",
        example="runpod-torch-v280",
    )
    registry: Filled = key(
        "Id of a registry credential at RunPod, for a private image.", default="", example="clzdaifot0001l90809257ynb"
    )
    cloud: Literal["secure", "community", "any"] = key(
        "secure: RunPod's own data centers. community: other people's machines, cheaper, not all with an address.",
        default="secure",
        example="any",
    )
    data_centers: Annotated[FilledList, AfterValidator(_data_centers)] = key(
        "Only in these data centers, each an offer of its own.", default=[], example="[EU-RO-1, US-KS-2]"
    )
    disk: Bytes | None = key(
        "Container disk; it goes with the pod. Less than data, checkpoints and environment take is refused.",
        derived="data, checkpoints and environment, at least 20GB",
        example="60GB",
        ge=10**9,
        le=10**14,
    )
    min_cuda: Annotated[Filled, AfterValidator(_cuda)] = key(
        "Only hosts whose driver knows this CUDA version: an image that was built for a newer one does not start there."
        " A driver older than the CUDA of our torch gets a torch that was built for it.",
        default="",
        derived="the CUDA version in the image's name, else 12.8",
        example="'13.0'",
    )
    env: Annotated[FilledList, AfterValidator(_env)] = key(
        "Variables of the pod, NAME=VALUE; RunPod shows them to everyone in the account. Never secrets.",
        default=[],
        example="[NCCL_DEBUG=WARN]",
    )
    ports: Annotated[FilledList, AfterValidator(_ports)] = key(
        "Ports to open beside 22/tcp. An http one is public for everybody: no password stands before it.",
        default=[],
        example="[6006/tcp]",
    )
    global_networking: Flag = key("A private address among the account's pods.", default=False, example="true")
    volume: Filled = key(
        "Name or id of a network volume, mounted at volume_path; it outlives the pod and bills on. Secure cloud only.",
        default="",
        example="transformer-shared",
    )
    volume_size: Annotated[Bytes, AfterValidator(_size)] = key(
        "Make the volume, so large, where there is none of that name. 0: it must be there already.",
        default=0,
        example="1TB",
    )
    volume_path: Annotated[Filled, AfterValidator(_path)] = key(
        "Where the volume is mounted; name it in cloud.volume too to have datasets and caches in it.",
        default="/workspace",
        example="/workspace",
    )
    start_limit: Duration = key(
        "A pod that cannot be reached by SSH for so long is destroyed, and the launch fails.",
        default=900.0,
        example="20m",
        ge=30.0,
        le=3600.0,
    )
    must_end_itself: Flag = key(
        "Refuse a pod whose own key may not end it. false: only the guard at home can, so keep one on duty.",
        default=True,
        example="false",
    )
