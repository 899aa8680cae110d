"""`homing tensorboard`: show a run's curves in TensorBoard on loopback, from the store or a local folder."""

from __future__ import annotations

import subprocess
from typing import Annotated

import typer

from homing.api.tools.write_curves import write_curves
from homing.cli import output
from homing.cli.options import Json, RunName

__all__ = ["command"]


def command(
    run: RunName = None,
    port: Annotated[int, typer.Option("--port", help="Local port. If it is in use, another one is chosen.")] = 6006,
    no_serve: Annotated[
        bool, typer.Option("--no-serve", help="Write the files only; do not start TensorBoard.")
    ] = False,
    json_: Json = False,
) -> None:
    """Show a run's loss, speed and validation in TensorBoard, during the run or after it.

    Reads the store, so it needs no tunnel.
    """
    curves = write_curves(run, port=port)
    url = None if no_serve else curves.url
    output.emit("tensorboard/1", {"run": curves.run, "folder": str(curves.folder), "url": url})
    if no_serve or output.is_json():
        output.say(f"Written: {curves.folder}")
        return
    if curves.port != port:
        output.say(f"Port {port} is in use; using {curves.port}.")
    output.say(f"{url} shows the curves of {curves.run}. Ctrl-C stops TensorBoard; the run continues.")
    raise typer.Exit(subprocess.run(curves.argv, check=False).returncode)
