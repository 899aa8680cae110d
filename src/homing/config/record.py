"""A resolved run.json as a run file: what ran is run again, value by value, whatever the presets say by now.

`homing launch $HOMING_HOME/runs/ID/run.json --spend-limit 5` repeats a run from its record. Nothing is derived anew;
only the data must still be what it was, by the hash of its manifest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from homing.errors import UsageError
from homing.wire import codec, names
from homing.wire.run import Run

__all__ = ["is_record", "read_record"]


def is_record(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # the reader of run files says what is wrong with it
    return isinstance(found, dict) and str(found.get("schema", "")).startswith("homing.run/")


def read_record(path: Path) -> tuple[Run, str]:
    """The run, with a new id to come and its data found and checked; and the run file that lay beside it."""
    try:
        run = codec.loads(Run, path.read_bytes())
    except codec.WireError as exc:
        raise UsageError(
            what=f"{path} is no whole record of a run.", why=str(exc), fix="Use the run.yaml beside it."
        ) from exc
    data_dir = (path.parent / run.data.dir).resolve()
    manifest = data_dir / names.MANIFEST
    found = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else "nothing"
    if found != run.data.manifest_sha256:
        raise UsageError(
            what=f"The data of {path} is not in {data_dir} any more.",
            why=f"Its manifest had sha256 {run.data.manifest_sha256[:12]}, there is {found[:12]}.",
            fix=f"Prepare it again from the same text: homing prep {run.name}",
        )
    beside = path.with_name(names.RUN_FILE)
    text = beside.read_text(encoding="utf-8") if beside.is_file() else ""
    again = dataclasses.replace(run, id="", data=dataclasses.replace(run.data, dir=str(data_dir)))
    return again, text
