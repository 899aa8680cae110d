"""`.env` in the current folder: API keys and tokens that are not exported.

    .env -> names that hold a credential -> the environment of this process, unless exported -> which names, on stderr

The folder may be somebody else's, so the file may set credentials and nothing more: an address would send exported keys
elsewhere, PYTHONPATH or LD_PRELOAD would run code, HOMING_HOME would move the ledger.
"""

from __future__ import annotations

import os
from pathlib import Path

from homing.cli import talk
from homing.errors import UsageError

__all__ = ["FILE", "load"]

FILE = ".env"
_MOST_IGNORED = 8  # names to print


def load(folder: Path) -> None:
    path = folder / FILE
    if not path.is_file():
        return
    from dotenv import dotenv_values

    # Loaded here, not at the top: a folder without .env must not pay for it.
    from homing.cloud.accounts import CREDENTIALS

    try:
        # Without interpolation: a key that holds a dollar sign is that key, and not the name of another.
        found = dotenv_values(path, interpolate=False, encoding="utf-8")
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            what=f"{path} cannot be read.", why=str(exc), fix="Fix it, or move it away and export the variables."
        ) from exc
    if mode & 0o077:
        talk.say(f"warning: {path} can be read by others on this computer; it may hold keys: chmod 600 {FILE}")
    used = {name: value for name, value in found.items() if value and name in CREDENTIALS and name not in os.environ}
    for name, value in used.items():
        if not value.isprintable():
            raise UsageError(
                what=f"{name} in {path} is not a key.",
                why="Its value has line breaks or control characters.",
                fix=f"Copy the key again, on one line: {name}=...",
            )
    os.environ.update(used)
    if used:
        talk.say(f"From {FILE}: {', '.join(used)}")
    ignored = [name for name in found if name not in CREDENTIALS]
    if ignored:
        more = f" and {len(ignored) - _MOST_IGNORED} more" if len(ignored) > _MOST_IGNORED else ""
        talk.say(
            f"Ignored in {FILE}: {', '.join(ignored[:_MOST_IGNORED])}{more}. Only API keys and tokens are read from it;"
            " export other variables yourself."
        )
