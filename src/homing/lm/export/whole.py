"""An export is whole or absent: written aside, checked there, and only then given its name.

A folder that is replaced must be an export too: `--out` pointed at somebody's home must never cost them anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from homing.errors import UsageError
from homing.lm.generate.load import EXPORT

__all__ = ["RECORD", "new_folder", "read_record", "write_json"]

RECORD = EXPORT  # in every export: what it is, what it was made from, how it was checked


@contextlib.contextmanager
def new_folder(out: Path, *, force: bool = False) -> Iterator[Path]:
    """Yields the folder to write into; it is called `out` when the block ends well, and is gone when it does not."""
    _check_free(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.aside-{secrets.token_hex(4)}")
    aside.mkdir()
    try:
        yield aside
        _let_others_read(aside)
        if out.exists():
            gone = out.with_name(f".{out.name}.gone-{secrets.token_hex(4)}")
            os.replace(out, gone)
            os.replace(aside, out)
            shutil.rmtree(gone)
        else:
            os.replace(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _let_others_read(folder: Path) -> None:
    """0644, as every other file of a person: safetensors writes its own for the owner alone, which a server that runs
    as another user cannot open."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)


def _check_free(out: Path, force: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not (out / RECORD).is_file():
        raise UsageError(
            what=f"{out} is there already and is not an export.",
            why="Exporting would replace what lies in it.",
            fix="Name another folder: --out DIR",
        )
    if not force:
        raise UsageError(
            what=f"{out} holds an export already.",
            why="It would be replaced.",
            fix="Add --force to replace it, or name another folder: --out DIR",
        )


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any] | None:
    """None where the folder is no export of ours."""
    try:
        data = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and str(data.get("schema", "")).startswith("homing.export/") else None
