"""Schema of `cloud.modal`: settings that only Modal has. The GPU, the GPU count and the limits are keys elsewhere."""

from __future__ import annotations

from homing.config.parse.placeholders import Filled
from homing.config.schema.section import Section, key
from homing.config.schema.value_types import Bytes, Duration, Number

__all__ = ["ModalCloud"]


class ModalCloud(Section):
    """Settings for `providers: [modal]`: CPU cores, memory, image and how long to wait for a GPU."""

    cores: Number = key(
        "Physical CPU cores per GPU; a machine without a GPU gets twice as many. Reserved and capped, so"
        " the rate is fixed.",
        default=2.0,
        example="4",
        ge=0.125,
        le=64,
    )
    memory: Bytes = key(
        "Host memory per GPU; a machine without a GPU gets twice as much. Reserved and capped, so the rate is fixed.",
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
