"""`.env` in the folder where homing is called: names and values for the environment, for keys that nobody exported.

exported wins over the file; the file wins over nothing. Only this process and what it starts see them.
"""

from __future__ import annotations

import os
from pathlib import Path

from homing.cli import talk
from homing.errors import UsageError

__all__ = ["FILE", "load"]

FILE = ".env"


def load(folder: Path) -> None:
    path = folder / FILE
    if not path.is_file():
        return
    from dotenv import dotenv_values

    try:
        # Without interpolation: a key that holds a dollar sign is that key, and not the name of another.
        found = dotenv_values(path, interpolate=False, encoding="utf-8")
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            what=f"{path} cannot be read.", why=str(exc), fix="Mend it, or move it away: exported variables do as well."
        ) from exc
    if mode & 0o077:
        talk.say(f"warning: {path} can be read by others on this computer; it may hold keys: chmod 600 {FILE}")
    for name, value in found.items():
        if value is not None and name not in os.environ:
            os.environ[name] = value
