"""The design that all pages share: the chat page, the dashboard and the report.

    style.css   colors, type, buttons, tables, badges and other components; light, dark and narrow windows
    shared.js   the token, the color theme and copy buttons; the report has no scripts and does not use it

The pages load nothing from other servers, so every file ships with the package.
"""

from __future__ import annotations

from importlib.resources import files

__all__ = ["read_asset"]


def read_asset(name: str) -> str:
    return files("homing.page_assets").joinpath(name).read_text(encoding="utf-8")
