"""Writes an export to a temporary folder that is renamed only after the export passes its check.

An export is therefore either complete or absent. Only a folder that contains an export can be replaced, so a
mistake such as `--out ~` never deletes other files.
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
from homing.lm.generate.load_model import EXPORT

__all__ = ["RECORD", "new_folder", "read_record", "write_json"]

RECORD = EXPORT  # file in every export that records its format, its source and how it was checked


@contextlib.contextmanager
def new_folder(out: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to write to. It is renamed to `out` if the block succeeds, and deleted otherwise."""
    _check_free(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        yield temporary
        _let_others_read(temporary)
        if out.exists():
            gone = out.with_name(f".{out.name}.gone-{secrets.token_hex(4)}")
            os.replace(out, gone)
            os.replace(temporary, out)
            shutil.rmtree(gone)
        else:
            os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _let_others_read(folder: Path) -> None:
    """Set the permissions of all files to 0644.

    Otherwise, a server that runs as a different user could not open them, because safetensors creates files that only
    their owner can read.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)


def _check_free(out: Path, force: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not (out / RECORD).is_file():
        raise UsageError(
            what=f"{out} already exists and is not an export.",
            why="Exporting would replace its contents.",
            fix="Choose another folder: --out DIR",
        )
    if not force:
        raise UsageError(
            what=f"{out} already contains an export.",
            why="Exporting would replace it.",
            fix="Add --force to replace it, or choose another folder: --out DIR",
        )


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the export record, or None if the folder is not a homing export."""
    try:
        data = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and str(data.get("schema", "")).startswith("homing.export/") else None
