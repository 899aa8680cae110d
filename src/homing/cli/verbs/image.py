"""`homing image build`: build a container image from the tested package versions and push it, with your own Docker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homing.api.tools.build_image import BASE, BuiltImage, build_image
from homing.cli import output
from homing.cli.options import Json, RunRequired, Sets
from homing.cli.verb_help import Verb

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Build a container image.")


@app.callback()
def _group() -> None:
    """Keep this a group: without a callback, typer would treat the only command as the whole app."""


@app.command("build", cls=Verb, short_help="Write a Dockerfile, then build, test and push the image.")
def build_(
    run: RunRequired,
    push: Annotated[
        str | None, typer.Option("--push", metavar="NAME", help="Push the image under this name, such as me/train:1.")
    ] = None,
    no_docker: Annotated[bool, typer.Option("--no-docker", help="Only write the folder; do not run Docker.")] = False,
    base: Annotated[str | None, typer.Option("--base", metavar="IMAGE", help=f"Base image; default: {BASE}.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Output folder; default: ./image/RUN.")
    ] = None,
    sets: Sets = None,
    json_: Json = False,
) -> None:
    """Write a Dockerfile with the tested package versions, build and test the image, and push it. Rents nothing."""
    done = build_image(run, push=push, no_docker=no_docker, base=base, folder=folder, sets=sets or [])
    output.emit("image/1", done.to_dict())
    _say_next(done)


def _say_next(done: BuiltImage) -> None:
    image, built, run = done.image, done.built, done.run
    if built is None:
        output.say(
            "Docker was not run. To build and push the image:"
            f" docker build -t {image} {done.context.folder} && docker push {image}"
        )
        return
    output.say(f"{image} works: {built.says}")
    if not built.digest:
        output.say(
            f"The image is only on this computer. For rented instances, push it: homing image build {run} --push NAME"
        )
        return
    output.say(f"Pushed. Use it: homing launch {run} --set cloud.image={built.pinned}")
