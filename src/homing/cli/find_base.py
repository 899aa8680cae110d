"""The weights that an adapter was trained on, as a folder here: named by the person, or by the run itself.

Only what the checkpoint cannot find by itself is found here: a model on the Hub, brought through its cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homing.cli import talk
from homing.wire import codec, names
from homing.wire.run import Run

__all__ = ["Base", "find_base"]

Base = Annotated[str, typer.Option("--base", metavar="FOLDER|hf:...", help="The weights an adapter was trained on.")]


def find_base(folder: Path, given: str) -> Path | None:
    """None: no adapter, or one whose base lies where its run says."""
    if given:
        return _bring(given)
    try:
        run = codec.loads(Run, (folder / names.RUN).read_bytes())
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
    from homing.config.open_weights import bring, read_source

    source = read_source(address)
    if source.note:
        talk.say(source.note)
    return bring(source)
