"""Repeat a run from its resolved run.json, value by value, whatever the presets say now.

`homing launch $HOMING_HOME/runs/ID/run.json --spend-limit 5` repeats a run from its record. Nothing is derived again;
only the data must be unchanged, by the hash of its manifest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from homing.errors import UsageError
from homing.wire import codec, file_names
from homing.wire.run_json import Run

__all__ = ["is_record", "read_record"]


def is_record(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # the run file reader reports the problem
    return isinstance(found, dict) and str(found.get("schema", "")).startswith("homing.run/")


def read_record(path: Path) -> tuple[Run, str]:
    """Return the run, without an id and with its data located and verified, and the text of the run file next to it."""
    try:
        run = codec.loads(Run, path.read_bytes())
    except codec.WireError as exc:
        raise UsageError(
            what=f"{path} is not a complete run record.", why=str(exc), fix="Use the run.yaml next to it."
        ) from exc
    data_dir = (path.parent / run.data.dir).resolve()
    manifest = data_dir / file_names.MANIFEST
    found = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else "nothing"
    if found != run.data.manifest_sha256:
        raise UsageError(
            what=f"The data of {path} is no longer in {data_dir}.",
            why=f"Its manifest had sha256 {run.data.manifest_sha256[:12]}, but found {found[:12]}.",
            fix=f"Prepare it again from the same text: homing prep {run.name}",
        )
    run_file = path.with_name(file_names.RUN_FILE)
    text = run_file.read_text(encoding="utf-8") if run_file.is_file() else ""
    again = dataclasses.replace(run, id="", data=dataclasses.replace(run.data, dir=str(data_dir)))
    return again, text
