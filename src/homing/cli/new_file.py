"""Write a new run file atomically, and quote names and paths for YAML."""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path

from homing.errors import UsageError

__all__ = ["written_atomically", "yaml_list", "yaml_name"]


@contextlib.contextmanager
def written_atomically(target: Path, name: str) -> Iterator[Path]:
    """Yield a temporary path; its content becomes `target` at the end. After an error neither file exists."""
    draft = target.parent / f".{name}.new.yaml"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        draft.replace(target)
    except OSError as exc:
        is_full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "Free some space, or use a folder on another disk." if is_full else "Use a writable folder."
        raise UsageError(what=f"Cannot write {target}.", why=exc.strerror or str(exc), fix=fix) from exc
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def yaml_name(name: str) -> str:
    """Quote a name that YAML would read as a number or keyword: 12, 1e5, null."""
    is_plain = name[0].isalpha() and name not in ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
    return name if is_plain else f'"{name}"'


def yaml_list(paths: list[str]) -> str:
    plain = re.compile(r"[A-Za-z0-9_./~*-][A-Za-z0-9_./~*+-]*")
    # A JSON string is also a YAML string. An unquoted leading `*` would be an alias.
    quoted = [p if plain.fullmatch(p) and p[0] not in "*-~" else json.dumps(p, ensure_ascii=False) for p in paths]
    return f"[{', '.join(quoted)}]"
