"""Schema of `cloud.shadeform`: settings that only Shadeform has."""

from __future__ import annotations

from homing.config.parse.placeholders import Filled, FilledList
from homing.config.schema.section import Section, key
from homing.config.schema.value_types import Duration, Flag

__all__ = ["ShadeformCloud"]


class ShadeformCloud(Section):
    """Settings for `providers: [shadeform]`: clouds, spot, operating system, and self-deletion of the machine."""

    clouds: FilledList = key(
        "Only machines of these clouds behind Shadeform.", default=[], derived="any", example="[hyperstack, lambdalabs]"
    )
    spot: Flag = key(
        "Also offer spot machines, which are cheaper and may be preempted without notice.",
        default=False,
        example="true",
    )
    os: Filled = key(
        "Operating system, one of those that the machine type offers; types without it are excluded.",
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
