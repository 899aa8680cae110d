"""`homing publish`: an export to the Hugging Face Hub, private unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homing.cli import talk
from homing.cli.export import EXPORTS, Licence, export_model, name_of
from homing.cli.extras import need, need_for_export
from homing.cli.find_base import Base
from homing.cli.find_model import find_model
from homing.cli.options import Json, Yes
from homing.errors import HomingError, UsageError
from homing.store.address import HubAddress, parse_hub
from homing.store.publish import Looked, look, publish
from homing.units import format_bytes
from homing.world import World

__all__ = ["command"]


def command(
    to: Annotated[str, typer.Argument(metavar="hf:OWNER/NAME", help="The repository; made, private, if absent.")],
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Run, model folder or export; the newest when left out.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository for everybody to see.")] = False,
    licence: Licence = "",
    base: Base = "",
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Give a model to others on the Hugging Face Hub. What is no export yet is exported and checked first."""
    need("hub", verb="publish")
    address = _address(to)
    # The token first: an export takes minutes, and a token that may not write is known in a second.
    looked = look(address, World())
    folder = _export_of(run, licence, base)
    if looked.files and not talk.ask(_question(looked, address), yes=yes):
        raise HomingError(what="Nothing was published.", why="The answer was no.", fix="Name another repository.")
    if public and looked.exists and looked.is_private:
        raise UsageError(
            what=f"{address.url} is there already, and is private.",
            why="--public is for a repository that is made now.",
            fix=f"Make it public on its page: {looked.door.endpoint}/{address.repo_id}/settings",
        )
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    done = publish(
        looked,
        str(folder),
        files,
        is_public=public,
        title=f"homing: {folder.name}",
        tell=lambda text: talk.say(f"  {text}"),
    )
    document = {"url": done.url, "commit": done.commit, "from": str(folder), "files": files, "removed": done.removed}
    talk.emit("publish/1", {**document, "num_bytes": done.num_bytes, "is_private": done.is_private})
    if not talk.is_json():
        print(done.url)
    seen = "private: only you and your organisation see it" if done.is_private else "public"
    talk.say(f"{len(files)} files, {format_bytes(done.num_bytes)}, compared with what the Hub holds; it is {seen}.")
    talk.say(f"Use it: AutoModelForCausalLM.from_pretrained({address.repo_id!r})   or model.from: {address.url}")


def _address(text: str) -> HubAddress:
    address = parse_hub(text) if text.startswith("hf:") else None
    if address is None or address.repo_type != "model" or address.prefix:
        raise UsageError(
            what=f"{text!r} names no model on the Hub.",
            why="A model is published to a repository of its own: hf:OWNER/NAME.",
            fix=f"homing publish hf:OWNER/NAME {'RUN' if ':' in text else text}",
        )
    return address


def _export_of(run: str | None, licence: str, base: str) -> Path:
    """The folder itself where it is an export; else an export of it, made now."""
    path = Path(run).expanduser() if run else None
    if path is not None and (path / "export.json").is_file():
        if licence:
            raise UsageError(
                what="--licence cannot change an export that is there already.",
                why="It stands in its model card.",
                fix=f"homing export RUN --licence {licence} --force",
            )
        return path
    need_for_export("hf", verb="publish")
    folder = find_model(run)
    name = name_of(folder)
    out = EXPORTS / f"{name}-hf"
    talk.say(f"  exporting {folder} to {out} first")
    export_model(folder, "hf", out, name=name, licence=licence, base=base, force=True)
    return out


def _question(looked: Looked, address: HubAddress) -> str:
    seen = "private" if looked.is_private else "PUBLIC"
    return f"{address.url} is there already ({seen}, {len(looked.files)} files). Replace what is in it?"
