"""`init_from: hf:OWNER/REPO/path`: fetch a checkpoint folder from the Hub into a local folder.

hf:OWNER/REPO[@REVISION][/path] -> commit and files of the folder -> $HOMING_HOME/cache/checkpoints/...

Each commit is fetched once and compared with the hashes in the checkpoint's manifest, if it has one. After that it is
an ordinary folder: it is checked, sent with the run and hashed in the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from homing.config.paths import home
from homing.config.weights.hub_repo import bring_files, list_repository
from homing.errors import DataError
from homing.wire import file_names

__all__ = ["init_folder"]

_ADDRESS = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<path>.+))?")
_WHOLE = ".whole"


def init_folder(typed: str) -> Path:
    """Return the local folder of the checkpoint: the given folder, or the fetched copy of an address on the Hub."""
    if not typed.startswith("hf:"):
        return Path(typed).expanduser()
    found = _ADDRESS.fullmatch(typed)
    if found is None:
        raise DataError(
            what=f"{typed} is not a checkpoint on the Hub.",
            why="Use hf:OWNER/REPO/path, where path is the folder of the checkpoint.",
            fix="init_from: hf:me/moss/models/moss   at a commit: hf:me/moss@COMMIT/models/moss",
        )
    listing = list_repository(found["repo"], found["revision"] or "")
    path = (found["path"] or "").strip("/")
    inside = f"{path}/" if path else ""
    wanted = [name for name in listing.sizes if name.startswith(inside) and "/" not in name[len(inside) :]]
    if f"{inside}config.json" not in wanted:
        raise DataError(
            what=f"{found['repo']} has no checkpoint in {path or 'its first folder'}.",
            why=f"{inside}config.json does not exist at {listing.commit[:12]}.",
            fix=f"See https://huggingface.co/{found['repo']}/tree/{listing.commit}",
        )
    target = home() / "cache" / "checkpoints" / found["repo"].replace("/", "--") / listing.commit / path
    if not (target / _WHOLE).exists():
        _take(bring_files(listing, wanted) / path, [name[len(inside) :] for name in wanted], target)
    return target


def _take(source: Path, wanted: list[str], target: Path) -> None:
    """Copy the files into `target` as real files: the Hub cache holds symlinks, which a checkpoint folder must not.

    Hard links are used where possible, so that the files do not take space twice.
    """
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
        files = json.loads((folder / file_names.MANIFEST).read_bytes())["files"]
        expected_sha256 = {str(each["name"]): str(each["sha256"]) for each in files}
    except FileNotFoundError:
        return  # an export or someone else's weights: the Hub's own hashes were already compared
    except (ValueError, KeyError, TypeError) as exc:
        raise DataError(f"{folder / file_names.MANIFEST} cannot be read.", str(exc), "Use another checkpoint.") from exc
    for name, expected in expected_sha256.items():
        path = folder / name
        if path.is_file() and _sha256(path) != expected:
            raise DataError(
                what=f"{name} does not match its manifest.",
                why=f"Its sha256 is not {expected[:12]}..., so it was changed or damaged on the Hub.",
                fix=f"Use another checkpoint. Fetched files: {folder}",
            )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
