"""Find the local folder that contains an adapter's base weights, downloading them from the Hub if necessary.

The user or the run names the base weights. If they are in a local folder, the loader finds them. If they are on the
Hub, they are looked up here and downloaded through the cache.
"""

from __future__ import annotations

from pathlib import Path

from homing.api import notices
from homing.wire import codec, file_names
from homing.wire.run_json import Run

__all__ = ["find_base"]


def find_base(folder: Path, given: str) -> Path | None:
    """Return the folder of the base weights; None if `folder` has no adapter, or if the loader finds the base."""
    if given:
        return _bring(given)
    try:
        run = codec.loads(Run, (folder / file_names.RUN).read_bytes())
    except (OSError, codec.WireError):
        return None
    is_adapter = any(phase.method != "full" for phase in run.phases)
    if not is_adapter or run.base is None or not run.base.address.startswith("hf:"):
        return None
    here = folder.parents[2] / run.base.dir if run.base.dir and len(folder.parents) > 2 else None
    if here is not None and here.is_dir():
        return None
    return _bring(run.base.address)


def _bring(address: str) -> Path:
    from homing.config.weights.open_weights import bring, read_source

    source = read_source(address)
    if source.note:
        notices.say(source.note)
    return bring(source)
