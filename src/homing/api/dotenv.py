"""`.env` in the current folder: API keys and tokens that are not exported.

.env -> names that hold a credential -> the environment of this process, unless exported -> the names, on stderr

The folder may belong to someone else, so the file may set only credentials. Otherwise, an address could send exported
keys elsewhere, PYTHONPATH or LD_PRELOAD could run code, and HOMING_HOME could move the ledger.
"""

from __future__ import annotations

import os
from pathlib import Path

from homing.api import notices
from homing.errors import UsageError

__all__ = ["FILE", "load"]

FILE = ".env"
_MOST_IGNORED = 8  # names to print


def load(folder: Path) -> None:
    path = folder / FILE
    if not path.is_file():
        return
    from dotenv import dotenv_values

    # Imported here, not at the top, so that a folder without .env does not slow down the start.
    from homing.cloud.api_key_table import CREDENTIALS

    try:
        # Without interpolation: a dollar sign in a key is part of the key, not a variable.
        found = dotenv_values(path, interpolate=False, encoding="utf-8")
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            what=f"Cannot read {path}.", why=str(exc), fix="Repair the file, or move it away and export its variables."
        ) from exc
    if mode & 0o077:
        notices.say(f"warning: other users can read {path}, which may contain keys. Make it private: chmod 600 {FILE}")
    used = {name: value for name, value in found.items() if value and name in CREDENTIALS and name not in os.environ}
    for name, value in used.items():
        if not value.isprintable():
            raise UsageError(
                what=f"{name} in {path} is not a valid key.",
                why="Its value has line breaks or control characters.",
                fix=f"Copy the key again, on one line: {name}=...",
            )
    os.environ.update(used)
    if used:
        notices.say(f"From {FILE}: {', '.join(used)}")
    ignored = [name for name in found if name not in CREDENTIALS]
    if ignored:
        more = f" and {len(ignored) - _MOST_IGNORED} more" if len(ignored) > _MOST_IGNORED else ""
        notices.say(
            f"Ignored in {FILE}: {', '.join(ignored[:_MOST_IGNORED])}{more}. Only API keys and tokens are read from it;"
            " export other variables yourself."
        )
