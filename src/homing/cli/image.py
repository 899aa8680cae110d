"""`homing image build`: a container image from the tested versions, built and pushed with your own Docker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homing.cli import talk
from homing.cli.control import say_problems
from homing.cli.options import Json, RunRequired, Sets, as_typed
from homing.cli.verb_help import Verb
from homing.cloud.image import BASE, Built, Context, build, check_name, write_context
from homing.config import load_run
from homing.world import World

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Make a container image.")


@app.callback()
def _group() -> None:
    """Without this, typer would take the one command for the whole group."""


@app.command("build", cls=Verb, short_help="Write a Dockerfile, build it, try it, push it.")
def build_(
    run: RunRequired,
    push: Annotated[
        str | None, typer.Option("--push", metavar="NAME", help="Push it under this name, such as me/train:1.")
    ] = None,
    no_docker: Annotated[bool, typer.Option("--no-docker", help="Only write the folder; Docker is not asked.")] = False,
    base: Annotated[
        str | None, typer.Option("--base", metavar="IMAGE", help=f"Begin from this image; {BASE} if left out.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Where to write it; ./image/RUN if left out.")
    ] = None,
    sets: Sets = None,
    json_: Json = False,
) -> None:
    """Write a Dockerfile from the tested versions, build it, try it, and push it. Rents nothing."""
    image = check_name(push) if push else ""
    loaded = load_run(run, sets or [])
    say_problems(loaded.warnings)
    name, world = loaded.run.name, World()
    image = image or f"homing-{name}"
    context = write_context(loaded.run, folder or Path("image") / name, world, base=base or BASE)
    talk.say(f"Wrote {context.folder}/Dockerfile: {context.num_packages} packages on {context.base}")
    built = None if no_docker else build(context, image, world, is_pushed=push is not None, tell=talk.say)
    talk.emit("image/1", _document(context, image, built))
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
        talk.say(f"Docker was not asked. By hand: docker build -t {image} {context.folder} && docker push {image}")
        return
    talk.say(f"{image} works: {built.says}")
    if not built.digest:
        talk.say(f"It is on this computer only. For rented machines: homing image build {run} --push NAME")
        return
    talk.say(f"Pushed. Use it: homing launch {run} --set cloud.image={built.pinned}")
