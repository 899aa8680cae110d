"""Publish an export on the Hugging Face Hub, private by default. Implements `homing publish`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.api import notices
from homing.api.confirmation import Agrees, refuse
from homing.api.extras import need, need_for_export
from homing.api.models.export_model import EXPORTS, name_of, write_export
from homing.api.models.open_model import find_folder
from homing.errors import HomingError, UsageError
from homing.store.address import HubAddress, parse_hub
from homing.store.publish_to_hub import Looked, Published, look, publish
from homing.world import World

__all__ = ["PublishedModel", "publish_model"]


@dataclass(frozen=True)
class PublishedModel:
    address: HubAddress
    folder: Path
    files: list[str]
    done: Published

    def to_dict(self) -> dict[str, Any]:
        done = self.done
        return {
            "url": done.url,
            "commit": done.commit,
            "from": str(self.folder),
            "files": self.files,
            "removed": done.removed,
            "num_bytes": done.num_bytes,
            "is_private": done.is_private,
        }


def publish_model(
    to: str,
    run: str | Path | None = None,
    *,
    public: bool = False,
    licence: str = "",
    base: str = "",
    agrees: Agrees = refuse,
) -> PublishedModel:
    """Upload a model to hf:OWNER/NAME; if it is not an export yet, export and check it first.

    `agrees` is called before the contents of an existing repository are replaced.
    """
    need("hub", verb="publish")
    address = _address(to)
    # Check the token before exporting: the check takes less than a second, but the export takes minutes.
    looked = look(address, World())
    folder = _export_of(run, licence, base)
    if looked.files and not agrees(_question(looked, address)):
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
        notify=lambda text: notices.say(f"  {text}"),
    )
    return PublishedModel(address, folder, files, done)


def _address(text: str) -> HubAddress:
    address = parse_hub(text) if text.startswith("hf:") else None
    if address is None or address.repo_type != "model" or address.prefix:
        raise UsageError(
            what=f"{text!r} is not a model on the Hub.",
            why="Publish a model to its own repository: hf:OWNER/NAME.",
            fix=f"homing publish hf:OWNER/NAME {'RUN' if ':' in text else text}",
        )
    return address


def _export_of(run: str | Path | None, licence: str, base: str) -> Path:
    """Return the folder itself if it is an export; otherwise export it now and return the new folder."""
    path = Path(run).expanduser() if run else None
    if path is not None and (path / "export.json").is_file():
        if licence:
            raise UsageError(
                what="--licence cannot change an existing export.",
                why="The licence is part of the export's model card.",
                fix=f"homing export RUN --licence {licence} --force",
            )
        return path
    need_for_export("hf", verb="publish")
    folder = find_folder(run)
    name = name_of(folder)
    out = EXPORTS / f"{name}-hf"
    notices.say(f"  exporting {folder} to {out} first")
    write_export(folder, "hf", out, name=name, licence=licence, base=base, force=True)
    return out


def _question(looked: Looked, address: HubAddress) -> str:
    seen = "private" if looked.is_private else "PUBLIC"
    return f"{address.url} already exists ({seen}, {len(looked.files)} files). Replace its contents?"
