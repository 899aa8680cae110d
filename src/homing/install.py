"""Finds out how homing was installed, and so which pip command adds an extra to it.

If it came from a package index, the command names the package: `homing[aws]`. If it was installed from a folder (`pip
install -e '.[lm]'`, as in the README), no index knows it, and pip needs the folder: `pip install -e
'/home/ada/homing[aws]'`. pip records which case it was in direct_url.json.
"""

from __future__ import annotations

import json
import shlex

__all__ = ["pip_install", "pip_upgrade"]


def pip_install(extra: str = "", *options: str) -> str:
    """Return the pip command that installs homing, or one of its extras; `options` are passed to pip."""
    flags, folder = _origin()
    wanted = f"{folder or 'homing'}[{extra}]" if extra else folder or "homing"
    # Always quote an extra, even if shlex would not: zsh treats brackets as a pattern.
    quoted = f"'{wanted}'" if extra and "'" not in wanted else shlex.quote(wanted)
    return " ".join(["pip install", *options, *flags, quoted])


def pip_upgrade() -> str:
    """Return how to upgrade homing. pip cannot update a source folder."""
    _, folder = _origin()
    return f"Update {folder}, then: {pip_install()}" if folder else pip_install("", "--upgrade")


def _origin() -> tuple[list[str], str]:
    """Return pip's flag for an editable install and the source folder; both empty if it came from an index."""
    # Imported here because --help and errors that name no extra do not need it.
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        written = json.loads(distribution("homing").read_text("direct_url.json") or "{}")
        address, about = urlsplit(written.get("url", "")), written.get("dir_info")
    except (PackageNotFoundError, ValueError, AttributeError):
        return [], ""  # a source tree on sys.path, or a direct_url.json that pip did not write
    if address.scheme != "file" or about is None:  # a wheel file is not a folder either
        return [], ""
    return ["-e"] if about.get("editable") else [], unquote(address.path)
