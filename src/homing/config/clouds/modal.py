"""`cloud.modal`: what only Modal understands. The card, its number and the limits have keys of their own."""

from __future__ import annotations

from homing.config.kinds import Bytes, Duration, Number
from homing.config.placeholders import Filled
from homing.config.section import Section, key

__all__ = ["ModalCloud"]


class ModalCloud(Section):
    """Settings for `providers: [modal]`."""

    cores: Number = key(
        "Physical cores for each GPU; a machine without one gets twice as many. Reserved and capped: the rate holds.",
        default=2.0,
        example="4",
        ge=0.125,
        le=64,
    )
    memory: Bytes = key(
        "Main memory for each GPU; a machine without one gets twice as much. Reserved and capped: the rate holds.",
        default=16 * 2**30,
        example="32GiB",
        ge=2**30,
        le=1024 * 2**30,
    )
    queue: Duration = key(
        "How long to wait for a free GPU. Modal knows no `sold out`: without an end to it a launch would wait.",
        default=600.0,
        example="5m",
        ge=10.0,
        le=1200.0,
    )
    image: Filled = key(
        "A container image with Python 3.11 or newer and all packages, as `homing image build` makes it.",
        derived="an image that Modal builds from the tested versions",
        default="",
        example="ghcr.io/me/training:1",
    )
    registry: Filled = key(
        "Name of the Modal Secret that holds the login for a private cloud.modal.image.",
        default="",
        example="my-registry",
    )
