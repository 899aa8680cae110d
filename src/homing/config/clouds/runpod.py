"""`cloud.runpod`: what only RunPod understands."""

from __future__ import annotations

from homing.config.section import Section

__all__ = ["RunpodCloud"]


class RunpodCloud(Section):
    """Settings for `providers: [runpod]`."""
