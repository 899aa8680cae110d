"""Fetch files that a run file names in a store (s3://, hf:, modal:, file:) into its data folder, before prep.

  s3://bucket/folder/chats.jsonl                          one file
  hf:datasets/OWNER/NAME/folder/*.parquet                 every file that matches; ** matches any folders
  hf:datasets/OWNER/NAME@REVISION/folder/train.jsonl      a commit, tag or branch; default: the newest commit

If only part of the text is wanted (data.take, --smoke) and the text is a single pattern, only as many files as needed
are fetched, spread evenly over all matches. Files are fetched whole, and those from the Hub are checked against its
hashes. If a file cannot be fetched, prep fails; it never substitutes another file. Files that are already local are
not fetched again. On the Hub, all files of a pattern come from one commit, which is printed.
"""

from __future__ import annotations

import contextlib
import glob
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from homing.api import notices
from homing.errors import DataError, UsageError
from homing.find_source_files import is_in_store
from homing.units import counted, format_bytes

if TYPE_CHECKING:
    from homing.store import Entry, Store
    from homing.wire.shard_manifest import DataManifest

__all__ = ["addresses", "bring_file", "bring_files", "part_of", "say_if_less"]

_REPORT_EVERY_S = 10.0
_ENOUGH = 2  # factor by which to exceed the wanted size, because only part of a JSON line is text
_NEARLY = 0.9  # warn below this fraction of the wanted size
_IN_STORE = re.compile(r"(?P<path>(s3|hf|modal|file):[^?]*/[^/?]+)(?P<query>\?.*)?")
_REPO = re.compile(r"hf:/*((datasets|models)/)?[^/*]+/[^/*]+")
_MAGIC = re.compile(r"[*\[]")
# On the Hub, the revision names of pull requests and of Parquet conversions contain slashes.
_REVISION = re.compile(r"(?P<repo>hf:/*((datasets|models)/)?[^/@]+/[^/@]+)@(?P<revision>refs/(convert|pr)/[^/]+|[^/]+)")


def bring_files(paths: Iterable[str], into: Path, take_bytes: int = 0) -> list[str]:
    """Fetch each path into its own numbered folder, because files from two places may share a name.

    Return one local path per input, or several for a partially fetched pattern. `take_bytes`: the number of bytes of
    text needed; 0 means all.
    """
    places = [(path, into.with_name(f"{into.name}-{number}")) for number, path in enumerate(paths)]
    return [brought for path, place in places for brought in _brought(path, place, take_bytes)]


def addresses(text: Sequence[str], validation: Sequence[str]) -> dict[str, list[str]]:
    """Return the store addresses among these paths, to record them in the manifest; {} if there are none."""
    named = {"text": text, "validation": validation}
    far = {key: [path for path in paths if is_in_store(path)] for key, paths in named.items()}
    return {key: paths for key, paths in far.items() if paths}


def part_of(take_bytes: int, text: Sequence[str], validation: Sequence[str]) -> int:
    """Return the `take_bytes` to pass to `bring_files`; 0 if everything must be fetched.

    prep takes from each file in proportion to its share of all local text, so a partially fetched pattern would be
    underrepresented relative to other text or held-out text.
    """
    return take_bytes if len(text) == 1 and not validation else 0


def say_if_less(take_bytes: int, text: Sequence[str], manifest: DataManifest) -> None:
    """Warn if the fetched text is clearly less than `take_bytes`, as passed to `bring_files`."""
    got = sum(split.num_text_bytes for split in manifest.splits.values())
    if any(is_in_store(path) for path in text) and got < _NEARLY * take_bytes:
        notices.say(
            f"warning: data.take asks for {format_bytes(take_bytes)} of text, but the downloaded files contain"
            f" only {format_bytes(got)}. If the store has more files, increase data.take to download more of them."
        )


def bring_file(path: str, into: Path) -> str:
    """Return the fetched file, or a pattern that matches the fetched files. A local `path` is returned unchanged."""
    (brought,) = _brought(path, into, 0)
    return brought


def _brought(path: str, into: Path, take_bytes: int) -> list[str]:
    if not is_in_store(path):
        return [path]
    found = _IN_STORE.fullmatch(path)
    if found is None or _REPO.fullmatch(_REVISION.sub(r"\g<repo>", path)):
        raise UsageError(
            what=f"{path!r} is not a file in a store.",
            why="The address must end in a file name or a pattern.",
            fix="Use an address such as s3://bucket/folder/chats.jsonl or hf:datasets/OWNER/NAME/folder/*.parquet",
        )
    folder, wanted, revision = _apart(found["path"])
    store = _open(folder + (found["query"] or ""), revision, is_pinned="*" in wanted)
    if "*" in wanted:
        return _bring_all(store, wanted, path, into, take_bytes)
    _bring(store, wanted, path, into)
    return [str(into / wanted)]


def _apart(path: str) -> tuple[str, str, str]:
    """Split an address into the store to open, the key or pattern in it, and the Hub revision ("" if none is given)."""
    revision = ""
    if named := _REVISION.match(path):
        path, revision = named["repo"] + path[named.end() :], named["revision"]
    folder = (_MAGIC.split(path)[0] if "*" in path else path).rpartition("/")[0]
    return folder, path[len(folder) + 1 :], revision


def _open(url: str, revision: str, *, is_pinned: bool) -> Store:
    from homing.store import Versioned, open_store
    from homing.world import World

    store = open_store(url, World(), create=False)
    return store.pinned(revision) if isinstance(store, Versioned) and (revision or is_pinned) else store


def _bring_all(store: Store, pattern: str, address: str, into: Path, take_bytes: int) -> list[str]:
    from homing.store import Versioned

    below = store.list(_MAGIC.split(pattern)[0])
    met = [entry for entry in below if _matches(entry.key.split("/"), pattern.split("/"))]
    if not met:
        others = ", ".join(entry.key for entry in below[:5]) or "none"
        raise DataError(
            what=f"No file matches {address}.",
            why=f"Files in {store.url} that match the start of the pattern: {others}{' ...' * (len(below) > 5)}.",
            fix="Change the pattern: * matches part of a name, ** matches any number of folders.",
        )
    at = f", of commit {store.revision}" if isinstance(store, Versioned) else ""
    notices.say(f"{address}: {counted(len(met), 'file')}, {format_bytes(sum(entry.num_bytes for entry in met))}{at}.")
    part = _part(met, take_bytes)
    if len(part) < len(met):
        notices.say(
            f"Fetching {len(part):,} of {counted(len(met), 'file')}:"
            f" data.take asks for {format_bytes(take_bytes)} of text."
        )
    _check_room([entry for entry in part if not (into / entry.key).is_file()], into)
    for entry in part:
        _bring(store, entry.key, f"{store.url}/{entry.key}", into)
    if len(part) < len(met):  # keep the other files, which may be needed again for the full pattern
        return [str(into / entry.key) for entry in part]
    _keep_only({into / entry.key for entry in met}, into)
    return [f"{glob.escape(str(into))}/{pattern}"]


def _part(met: list[Entry], take_bytes: int) -> list[Entry]:
    """Choose as few files as possible that together reach the wanted size.

    The files are spread evenly over the whole range, because the first few may all be of the same kind.
    """
    if not take_bytes:
        return met
    wanted, largest = _ENOUGH * take_bytes, max(entry.num_bytes for entry in met)
    for count in range(max(1, wanted // max(1, largest)), len(met)):
        part = [met[number * len(met) // count] for number in range(count)]
        if sum(entry.num_bytes for entry in part) >= wanted:
            return part
    return met


def _keep_only(kept: set[Path], into: Path) -> None:
    """Delete files that are no longer in the store or were fetched for another pattern.

    The caller returns a pattern, which would match these files too. Deleting them is safe, because only homing writes
    to this folder.
    """
    for path in sorted(into.rglob("*"), reverse=True):  # a folder's contents come before the folder
        if path.is_dir():
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
        elif path not in kept:
            path.unlink()


def _check_room(to_come: list[Entry], into: Path) -> None:
    """Raise DataError before the first download if the files do not fit on the disk."""
    needed = sum(entry.num_bytes for entry in to_come)
    free = shutil.disk_usage(next(folder for folder in (into, *into.absolute().parents) if folder.exists())).free
    if free < needed:
        raise DataError(
            what=f"Not enough disk space at {into} for these files.",
            why=f"They need {format_bytes(needed)}; only {format_bytes(free)} is free.",
            fix="Free some space, use fewer files, or use another disk: --out DIR, or data.dir in the run file",
        )


def _matches(names: list[str], pattern: list[str]) -> bool:
    """Match as `glob` does: ** matches any number of folders, and * matches no name that begins with a dot."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        is_here = _matches(names, pattern[1:] or ["*"])
        return is_here or (len(names) > 1 and not names[0].startswith(".") and _matches(names[1:], pattern))
    is_met = bool(names) and fnmatchcase(names[0], pattern[0])
    is_hidden = is_met and names[0].startswith(".") and not pattern[0].startswith(".")
    return is_met and not is_hidden and _matches(names[1:], pattern[1:])


def _bring(store: Store, key: str, address: str, into: Path) -> None:
    from homing.find_source_files import need_reader

    need_reader(key)
    target = into / key
    if target.is_file() and store.is_same(key, str(target)):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    store.progress = _teller(address)
    store.get(key, str(target))
    notices.say(f"Fetched {address}: {format_bytes(target.stat().st_size)}.")


def _teller(address: str) -> Callable[[int, int], None]:
    """Return a progress callback that prints a line at intervals, so that a long download is never silent."""
    last_report, say = time.monotonic(), notices.listener()  # the callback may run in another thread

    def report_progress(done: int, total: int) -> None:
        nonlocal last_report
        if time.monotonic() - last_report >= _REPORT_EVERY_S:
            last_report = time.monotonic()
            say(f"{address}: {format_bytes(done)} of {format_bytes(total)}")

    return report_progress
