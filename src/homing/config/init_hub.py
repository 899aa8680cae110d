"""`init_from: hf:OWNER/REPO/path`: the folder of a checkpoint on the Hub, as a folder here.

    hf:OWNER/REPO[@REVISION][/path]  ->  commit and files of the folder  ->  $HOMING_HOME/cache/checkpoints/...

Fetched once for each commit, and compared with the hashes of the checkpoint's manifest where it has one. From then on
it is a folder like any other: it is checked, sent with the run and hashed in the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from homing.config.open_weights_hub import bring_files, list_repository
from homing.config.paths import home
from homing.errors import DataError
from homing.wire import names

__all__ = ["init_folder"]

_ADDRESS = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<path>.+))?")
_WHOLE = ".whole"


def init_folder(typed: str) -> Path:
    """Where the checkpoint lies here: the typed folder, or what was fetched for an address on the Hub."""
    if not typed.startswith("hf:"):
        return Path(typed).expanduser()
    found = _ADDRESS.fullmatch(typed)
    if found is None:
        raise DataError(
            what=f"{typed} is no checkpoint on the Hub.",
            why="It is written hf:OWNER/REPO/path, with the folder of the checkpoint as the path.",
            fix="init_from: hf:me/moss/models/moss   at a commit: hf:me/moss@COMMIT/models/moss",
        )
    listing = list_repository(found["repo"], found["revision"] or "")
    path = (found["path"] or "").strip("/")
    inside = f"{path}/" if path else ""
    wanted = [name for name in listing.sizes if name.startswith(inside) and "/" not in name[len(inside) :]]
    if f"{inside}config.json" not in wanted:
        raise DataError(
            what=f"{found['repo']} has no checkpoint in {path or 'its first folder'}.",
            why=f"There is no {inside}config.json at {listing.commit[:12]}.",
            fix=f"See https://huggingface.co/{found['repo']}/tree/{listing.commit}",
        )
    target = home() / "cache" / "checkpoints" / found["repo"].replace("/", "--") / listing.commit / path
    if not (target / _WHOLE).exists():
        _take(bring_files(listing, wanted) / path, [name[len(inside) :] for name in wanted], target)
    return target


def _take(source: Path, wanted: list[str], target: Path) -> None:
    """Real files: what is in the Hub's cache are links, which a checkpoint's folder must not hold. Hard ones, where it
    can be, take no space twice."""
    target.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        with contextlib.suppress(FileNotFoundError):
            (target / name).unlink()
        try:
            os.link((source / name).resolve(), target / name)
        except OSError:
            shutil.copyfile(source / name, target / name)
    _check_hashes(target)
    (target / _WHOLE).touch()


def _check_hashes(folder: Path) -> None:
    try:
        files = json.loads((folder / names.MANIFEST).read_bytes())["files"]
        told = {str(each["name"]): str(each["sha256"]) for each in files}
    except FileNotFoundError:
        return  # an export, or weights of somebody else: the Hub's own hashes were compared
    except (ValueError, KeyError, TypeError) as exc:
        raise DataError(f"{folder / names.MANIFEST} cannot be read.", str(exc), "Name another checkpoint.") from exc
    for name, expected in told.items():
        path = folder / name
        if path.is_file() and _sha256(path) != expected:
            raise DataError(
                what=f"{name} is not the file that its manifest names.",
                why=f"Its sha256 is another than {expected[:12]}..., so it was changed or damaged on the Hub.",
                fix=f"Name another checkpoint. What was fetched: {folder}",
            )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
