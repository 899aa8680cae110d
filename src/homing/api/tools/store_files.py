"""List a store, copy single files from and to it, remove old checkpoints. Implements `homing store ls|get|put|rm`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from homing import progress
from homing.api.confirmation import Agrees, refuse
from homing.api.lookup.find_runs import open_home
from homing.cloud.artifacts.checkpoints import known_hash
from homing.cloud.artifacts.remove_from_store import Removal, not_there, plan_removal, remove
from homing.cloud.home import Home
from homing.errors import UsageError
from homing.store import NotInStore, Store, open_store
from homing.store.base import Progress, unwatched
from homing.units import format_bytes

if TYPE_CHECKING:
    from homing.store import Entry

__all__ = ["get_file", "list_files", "put_file", "remove_files"]


def list_files(prefix: str = "", *, store: str | None = None) -> list[Entry]:
    """Return every file of the store with its key and size. `store`: a URL; None: the store in $HOMING_HOME."""
    with open_home() as home:
        return _open(home, store).list(prefix)


def get_file(
    key: str,
    to: Path | None = None,
    *,
    force: bool = False,
    store: str | None = None,
    on_progress: Progress = unwatched,
) -> dict[str, Any]:
    """Copy one file from the store, completely or not at all, and verify its hash if the store has one."""
    target = to or Path(key.rsplit("/", 1)[-1])
    target = target / key.rsplit("/", 1)[-1] if target.is_dir() else target
    if target.exists() and not force:
        raise UsageError(
            f"{target} already exists.", "Files are not overwritten by default.", "Add --force, or use another path."
        )
    with open_home() as home:
        opened = _open(home, store)
        target.parent.mkdir(parents=True, exist_ok=True)
        sha256 = known_hash(opened, key)
        opened.progress = on_progress
        try:
            opened.get(key, str(target), sha256)
        except NotInStore as exc:
            known = not_there(opened, key)
            raise NotInStore(known.what, known.why, known.fix) from exc
        return {"key": key, "path": str(target), "num_bytes": target.stat().st_size, "is_checked": bool(sha256)}


def put_file(
    path: Path, key: str, *, force: bool = False, store: str | None = None, on_progress: Progress = unwatched
) -> dict[str, Any]:
    """Copy one file to the store, and verify it by reading it back."""
    if not path.is_file():
        raise UsageError(f"{path} is not a file.", "Only single files can be put.", "Pass the path of a file.")
    with open_home() as home:
        opened = _open(home, store)
        if opened.exists(key) and not force:
            raise UsageError(f"{key} already exists.", "Files are not replaced by default.", "Add --force.")
        opened.progress = on_progress
        entry = opened.put(key, str(path))
        with progress.working(f"Reading {key} back"):
            is_same = opened.sha256(key) == entry.sha256
        if not is_same:
            raise UsageError(f"{key} was read back with different content.", opened.url, "Try again; check the disk.")
        return {"key": key, "num_bytes": entry.num_bytes, "sha256": entry.sha256}


def remove_files(key: str, *, store: str | None = None, agrees: Agrees = refuse) -> Removal | None:
    """Remove a key or a folder. Return None if `agrees` returns False.

    The best and the last checkpoint of a run are kept, and so are all files of a live run.
    """
    with open_home() as home:
        opened = _open(home, store)
        removal = plan_removal(opened, key, home)
        what = f"{len(removal.keys)} files, {format_bytes(removal.num_bytes)}"
        if not agrees(f"Remove {what}, from {opened.url}? {removal.warning}".rstrip()):
            return None
        remove(opened, removal)
        return removal


def _open(home: Home, url: str | None) -> Store:
    return open_store(url or f"file:{home.path / 'store'}", home.world, create=False)
