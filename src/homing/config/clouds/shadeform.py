"""`cloud.shadeform`: what only Shadeform understands."""

from __future__ import annotations

from homing.config.kinds import Duration, Flag
from homing.config.placeholders import Filled, FilledList
from homing.config.section import Section, key

__all__ = ["ShadeformCloud"]


class ShadeformCloud(Section):
    """Settings for `providers: [shadeform]`: whose machines, with which system, and who may end them."""

    clouds: FilledList = key(
        "Only machines of these clouds behind Shadeform.", default=[], derived="any", example="[hyperstack, lambdalabs]"
    )
    spot: Flag = key(
        "Offer spot machines too: cheaper, and taken away without a notice.", default=False, example="true"
    )
    os: Filled = key(
        "Operating system, one of the machine type's own; types that lack it are left out.",
        default="",
        derived="the newest Ubuntu that Shadeform ships with drivers",
        example="ubuntu22.04_cuda12.4_shade_os",
    )
    self_delete: Flag = key(
        "Put the account's key on the machine, so that it deletes itself when done. That key rules the whole account.",
        default=False,
        example="true",
    )
    start_limit: Duration = key(
        "A machine that cannot be reached by SSH for so long is destroyed, and the launch fails.",
        default=1800.0,
        example="45m",
        ge=60.0,
        le=7200.0,
    )
