"""How this homing was installed, and so what to type for more of it.

From an index it has a name, `homing[aws]`. From a folder (`pip install -e '.[lm]'`, as the README says) no index knows
it, and pip wants the folder: `pip install -e '/home/ada/homing[aws]'`. pip wrote down which, in direct_url.json.
"""

from __future__ import annotations

import json
import shlex

__all__ = ["pip_install", "pip_upgrade"]


def pip_install(extra: str = "", *options: str) -> str:
    """The command that brings homing, or an extra of it; `options` are pip's."""
    flags, folder = _origin()
    wanted = f"{folder or 'homing'}[{extra}]" if extra else folder or "homing"
    # Where the shell needs no quotes it reads better in them all the same: zsh takes brackets for a pattern.
    quoted = f"'{wanted}'" if extra and "'" not in wanted else shlex.quote(wanted)
    return " ".join(["pip install", *options, *flags, quoted])


def pip_upgrade() -> str:
    """What brings a newer homing. pip makes no folder newer."""
    _, folder = _origin()
    return f"Bring {folder} up to date, then: {pip_install()}" if folder else pip_install("", "--upgrade")


def _origin() -> tuple[list[str], str]:
    """pip's flag for an editable one, and the folder; both empty where it came from an index."""
    # Here and not above: an error that names no extra must not pay for it, and neither must --help.
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        written = json.loads(distribution("homing").read_text("direct_url.json") or "{}")
        address, about = urlsplit(written.get("url", "")), written.get("dir_info")
    except (PackageNotFoundError, ValueError, AttributeError):
        return [], ""  # a bare tree on the path, or a paper that pip did not write
    if address.scheme != "file" or about is None:  # a wheel in a file is no folder either
        return [], ""
    return ["-e"] if about.get("editable") else [], unquote(address.path)
