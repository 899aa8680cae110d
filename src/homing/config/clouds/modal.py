"""`cloud.modal`: what only Modal understands."""

from __future__ import annotations

from homing.config.section import Section

__all__ = ["ModalCloud"]


class ModalCloud(Section):
    """Settings for `providers: [modal]`."""
