"""`cloud.aws`: what only AWS understands."""

from __future__ import annotations

from homing.config.section import Section

__all__ = ["AwsCloud"]


class AwsCloud(Section):
    """Settings for `providers: [aws]`."""
