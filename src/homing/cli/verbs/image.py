"""`homing image build`: build a container image from the tested versions, and push it, with your own Docker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homing.api.notices import say_problems
from homing.api.run_changes import as_typed
from homing.cli import output
from homing.cli.options import Json, RunRequired, Sets
from homing.cli.verb_help import Verb
from homing.cloud.launch.container_image import BASE, Built, Context, build, check_name, write_context
from homing.config.load import load_run
from homing.world import World

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
    no_docker: Annotated[bool, typer.Option("--no-docker", help="Write the folder only; do not run Docker.")] = False,
    base: Annotated[str | None, typer.Option("--base", metavar="IMAGE", help=f"Base image; default: {BASE}.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Output folder; default: ./image/RUN.")
    ] = None,
    sets: Sets = None,
    json_: Json = False,
) -> None:
    """Write a Dockerfile from the tested versions, build and test the image, and push it. Rents nothing."""
    image = check_name(push) if push else ""
    loaded = load_run(run, sets or [])
    say_problems(loaded.warnings)
    name, world = loaded.run.name, World()
    image = image or f"homing-{name}"
    context = write_context(loaded.run, folder or Path("image") / name, world, base=base or BASE)
    output.say(f"Wrote {context.folder}/Dockerfile: {context.num_packages} packages on {context.base}")
    built = None if no_docker else build(context, image, world, is_pushed=push is not None, notify=output.say)
    output.emit("image/1", _document(context, image, built))
    _say_next(context, image, built, f"{name}{as_typed(sets)}")


def _document(context: Context, image: str, built: Built | None) -> dict[str, object]:
    return {
        "folder": str(context.folder),
        "base": context.base,
        "lock_sha256": context.lock_sha256,
        "image": image,
        "id": built.id if built else None,
        "pushed": built.pinned if built and built.digest else None,
    }


def _say_next(context: Context, image: str, built: Built | None, run: str) -> None:
    if built is None:
        output.say(f"Docker was not run. To build it: docker build -t {image} {context.folder} && docker push {image}")
        return
    output.say(f"{image} works: {built.says}")
    if not built.digest:
        output.say(
            f"The image is only on this computer. For rented instances, push it: homing image build {run} --push NAME"
        )
        return
    output.say(f"Pushed. Use it: homing launch {run} --set cloud.image={built.pinned}")
