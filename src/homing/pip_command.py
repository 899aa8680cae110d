"""Finds out how homing was installed, to show the pip command that adds an extra to this installation.

If homing came from a package index, the command names the package: `homing[aws]`. If it was installed from a folder
(`pip install -e '.[lm]'`, as in the README), pip needs that folder: `pip install -e '/home/ada/homing[aws]'`. pip
records in direct_url.json where a package came from.
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
    """Return the command that upgrades homing, or advice for a source folder, which pip cannot update."""
    _, folder = _origin()
    return f"Update {folder}, then: {pip_install()}" if folder else pip_install("", "--upgrade")


def _origin() -> tuple[list[str], str]:
    """Return pip's flag for an editable install and the source folder; both are empty if homing came from an index."""
    # Imported here because --help and most errors do not need these modules.
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        written = json.loads(distribution("homing").read_text("direct_url.json") or "{}")
        address, about = urlsplit(written.get("url", "")), written.get("dir_info")
    except (PackageNotFoundError, ValueError, AttributeError):
        return [], ""  # homing is a source tree on sys.path, or another tool wrote direct_url.json
    if address.scheme != "file" or about is None:  # the URL may point to a wheel file instead of a folder
        return [], ""
    return ["-e"] if about.get("editable") else [], unquote(address.path)
