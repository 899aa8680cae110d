"""A run file of a new run: whole or not at all, with names and paths as YAML wants them."""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path

from homing.errors import UsageError

__all__ = ["written_aside", "yaml_list", "yaml_name"]


@contextlib.contextmanager
def written_aside(target: Path, name: str) -> Iterator[Path]:
    """A path to write to; what lies there at the end becomes `target`. After an error there is neither."""
    aside = target.parent / f".{name}.new.yaml"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        aside.replace(target)
    except OSError as exc:
        is_full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = (
            "Free some space, or go to a folder on another disk."
            if is_full
            else "Go to a folder that you may write to."
        )
        raise UsageError(what=f"Cannot write {target}.", why=exc.strerror or str(exc), fix=fix) from exc
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def yaml_name(name: str) -> str:
    """In quotes where YAML would read a number or a word of its own: 12, 1e5, null."""
    is_plain = name[0].isalpha() and name not in ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
    return name if is_plain else f'"{name}"'


def yaml_list(paths: list[str]) -> str:
    plain = re.compile(r"[A-Za-z0-9_./~*-][A-Za-z0-9_./~*+-]*")
    # A JSON string is a YAML string too; `*` may not come first unquoted, it would be an alias.
    quoted = [p if plain.fullmatch(p) and p[0] not in "*-~" else json.dumps(p, ensure_ascii=False) for p in paths]
    return f"[{', '.join(quoted)}]"
