"""`homing publish`: publish an export on the Hugging Face Hub, private by default."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.api.models.publish_model import publish_model
from homing.cli import output
from homing.cli.options import Base, Json, Yes
from homing.cli.verbs.export import Licence
from homing.units import format_bytes

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
    made = publish_model(
        to, run, public=public, licence=licence, base=base, agrees=lambda question: output.ask(question, yes=yes)
    )
    done, address = made.done, made.address
    output.emit("publish/1", made.to_dict())
    if not output.is_json():
        print(done.url)
    seen = "private: only you and your organization can see it" if done.is_private else "public"
    output.say(
        f"Uploaded {len(made.files)} files, {format_bytes(done.num_bytes)}, verified against the Hub;"
        f" the repository is {seen}."
    )
    output.say(f"Use it: AutoModelForCausalLM.from_pretrained({address.repo_id!r})   or model.from: {address.url}")
