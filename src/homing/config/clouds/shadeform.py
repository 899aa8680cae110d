"""`cloud.shadeform`: what only Shadeform understands."""

from __future__ import annotations

from homing.config.section import Section

__all__ = ["ShadeformCloud"]


class ShadeformCloud(Section):
    """Settings for `providers: [shadeform]`."""
