"""`homing publish`: publish an export on the Hugging Face Hub, private by default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from homing.api.export_model import EXPORTS, export_model, name_of
from homing.api.extras import need, need_for_export
from homing.api.lookup.find_models import find_model
from homing.cli import output
from homing.cli.options import Base, Json, Yes
from homing.cli.verbs.export import Licence
from homing.errors import HomingError, UsageError
from homing.store.address import HubAddress, parse_hub
from homing.store.publish_to_hub import Looked, look, publish
from homing.units import format_bytes
from homing.world import World

__all__ = ["command"]


def command(
    to: Annotated[
        str, typer.Argument(metavar="hf:OWNER/NAME", help="Repository; created as private if it does not exist.")
    ],
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Run, model folder or export; default: the newest.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Create the repository as public.")] = False,
    licence: Licence = "",
    base: Base = "",
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Publish a model on the Hugging Face Hub. A model that is not an export yet is exported and checked first."""
    need("hub", verb="publish")
    address = _address(to)
    # Check the token first: an export takes minutes, and a token without write access is found in a second.
    looked = look(address, World())
    folder = _export_of(run, licence, base)
    if looked.files and not output.ask(_question(looked, address), yes=yes):
        raise HomingError(what="Nothing was published.", why="You answered no.", fix="Choose another repository.")
    if public and looked.exists and looked.is_private:
        raise UsageError(
            what=f"{address.url} already exists and is private.",
            why="--public applies only to a new repository.",
            fix=f"Make it public on its page: {looked.connection.endpoint}/{address.repo_id}/settings",
        )
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    done = publish(
        looked,
        str(folder),
        files,
        is_public=public,
        title=f"homing: {folder.name}",
        notify=lambda text: output.say(f"  {text}"),
    )
    document = {"url": done.url, "commit": done.commit, "from": str(folder), "files": files, "removed": done.removed}
    output.emit("publish/1", {**document, "num_bytes": done.num_bytes, "is_private": done.is_private})
    if not output.is_json():
        print(done.url)
    seen = "private: only you and your organization can see it" if done.is_private else "public"
    output.say(
        f"{len(files)} files, {format_bytes(done.num_bytes)}, verified against the Hub; the repository is {seen}."
    )
    output.say(f"Use it: AutoModelForCausalLM.from_pretrained({address.repo_id!r})   or model.from: {address.url}")


def _address(text: str) -> HubAddress:
    address = parse_hub(text) if text.startswith("hf:") else None
    if address is None or address.repo_type != "model" or address.prefix:
        raise UsageError(
            what=f"{text!r} is not a model on the Hub.",
            why="Publish a model to its own repository: hf:OWNER/NAME.",
            fix=f"homing publish hf:OWNER/NAME {'RUN' if ':' in text else text}",
        )
    return address


def _export_of(run: str | None, licence: str, base: str) -> Path:
    """Return the folder itself if it is an export; else export it now."""
    path = Path(run).expanduser() if run else None
    if path is not None and (path / "export.json").is_file():
        if licence:
            raise UsageError(
                what="--licence cannot change an existing export.",
                why="The licence is in its model card.",
                fix=f"homing export RUN --licence {licence} --force",
            )
        return path
    need_for_export("hf", verb="publish")
    folder = find_model(run)
    name = name_of(folder)
    out = EXPORTS / f"{name}-hf"
    output.say(f"  exporting {folder} to {out} first")
    export_model(folder, "hf", out, name=name, licence=licence, base=base, force=True)
    return out


def _question(looked: Looked, address: HubAddress) -> str:
    seen = "private" if looked.is_private else "PUBLIC"
    return f"{address.url} already exists ({seen}, {len(looked.files)} files). Replace its contents?"
