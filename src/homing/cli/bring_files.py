"""Files that a run file names in a store (s3://, hf:, modal:, file:), brought into its data folder before prep.

    s3://bucket/folder/chats.jsonl                          one file
    hf:datasets/OWNER/NAME/folder/*.parquet                 every file that the pattern meets; ** is any folders
    hf:datasets/OWNER/NAME@REVISION/folder/train.jsonl      of one commit, tag or branch; without it, of the newest

Where only a part of the text is wanted (data.take, --smoke), of a pattern that is all there is only so many files come
as hold it, spread over all of them. Each comes whole, one of the Hub checked by the Hub's hash; one that cannot be had
stops the run, and nothing takes its place. What is here already is not brought again. On the Hub all files of a pattern
are of one commit, which is said.
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

from homing.cli import talk
from homing.config.text_files import is_in_store
from homing.errors import DataError, UsageError
from homing.units import counted, format_bytes

if TYPE_CHECKING:
    from homing.store import Entry, Store
    from homing.wire.data import DataManifest

__all__ = ["addresses", "bring_file", "bring_files", "part_of", "say_if_less"]

_TELL_EVERY_S = 10.0
_ENOUGH = 2  # times what is to be taken: a line of JSON holds less text than it has bytes
_NEARLY = 0.9  # of what is to be taken
_IN_STORE = re.compile(r"(?P<path>(s3|hf|modal|file):[^?]*/[^/?]+)(?P<query>\?.*)?")
_REPO = re.compile(r"hf:/*((datasets|models)/)?[^/*]+/[^/*]+")
_MAGIC = re.compile(r"[*\[]")
# A pull request or the Hub's own conversion to Parquet has slashes in its name.
_REVISION = re.compile(r"(?P<repo>hf:/*((datasets|models)/)?[^/@]+/[^/@]+)@(?P<revision>refs/(convert|pr)/[^/]+|[^/]+)")


def bring_files(paths: Iterable[str], into: Path, take_bytes: int = 0) -> list[str]:
    """Each into a folder of its own, by its number: two files of one name may come from two places. One path for each,
    but for a pattern of which only a part was brought: `take_bytes` of text are wanted, 0: all."""
    places = [(path, into.with_name(f"{into.name}-{number}")) for number, path in enumerate(paths)]
    return [brought for path, place in places for brought in _brought(path, place, take_bytes)]


def addresses(text: Sequence[str], validation: Sequence[str]) -> dict[str, list[str]]:
    """Those in a store, for the manifest; {} where there are none."""
    named = {"text": text, "validation": validation}
    far = {key: [path for path in paths if is_in_store(path)] for key, paths in named.items()}
    return {key: paths for key, paths in far.items() if paths}


def part_of(take_bytes: int, text: Sequence[str], validation: Sequence[str]) -> int:
    """Of `take_bytes`, for `bring_files`. What is taken of each file goes by its share of all that is here: a pattern
    of which only a part came would count too little beside other text, or beside text that is held out."""
    return take_bytes if len(text) == 1 and not validation else 0


def say_if_less(take_bytes: int, text: Sequence[str], manifest: DataManifest) -> None:
    """`take_bytes` as `bring_files` was given them."""
    got = sum(split.num_text_bytes for split in manifest.splits.values())
    if any(is_in_store(path) for path in text) and got < _NEARLY * take_bytes:
        talk.say(
            f"warning: data.take asks for {format_bytes(take_bytes)} of text, and what was brought holds"
            f" {format_bytes(got)}. A larger data.take brings more files, where there are more."
        )


def bring_file(path: str, into: Path) -> str:
    """`path` itself where it is no address of a store; else the file here, or a pattern that meets those brought."""
    (brought,) = _brought(path, into, 0)
    return brought


def _brought(path: str, into: Path, take_bytes: int) -> list[str]:
    if not is_in_store(path):
        return [path]
    found = _IN_STORE.fullmatch(path)
    if found is None or _REPO.fullmatch(_REVISION.sub(r"\g<repo>", path)):
        raise UsageError(
            what=f"{path!r} names no file in a store.",
            why="It ends in the name of a file, or in a pattern.",
            fix="Such as s3://bucket/folder/chats.jsonl, or hf:datasets/OWNER/NAME/folder/*.parquet",
        )
    folder, wanted, revision = _apart(found["path"])
    store = _open(folder + (found["query"] or ""), revision, is_pinned="*" in wanted)
    if "*" in wanted:
        return _bring_all(store, wanted, path, into, take_bytes)
    _bring(store, wanted, path, into)
    return [str(into / wanted)]


def _apart(path: str) -> tuple[str, str, str]:
    """What is opened as a store, the key or pattern in it, and the revision on the Hub where one is named."""
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
        others = ", ".join(entry.key for entry in below[:5]) or "nothing"
        raise DataError(
            what=f"No file matches {address}.",
            why=f"In {store.url}, so far as the pattern names it, there is {others}{' ...' * (len(below) > 5)}.",
            fix="Mend the pattern: * stands for a part of a name, ** for any folders.",
        )
    at = f", of commit {store.revision}" if isinstance(store, Versioned) else ""
    talk.say(f"{address}: {counted(len(met), 'file')}, {format_bytes(sum(entry.num_bytes for entry in met))}{at}.")
    part = _part(met, take_bytes)
    if len(part) < len(met):
        talk.say(
            f"{len(part):,} of {counted(len(met), 'file')}, for data.take asks for {format_bytes(take_bytes)} of text."
        )
    _check_room([entry for entry in part if not (into / entry.key).is_file()], into)
    for entry in part:
        _bring(store, entry.key, f"{store.url}/{entry.key}", into)
    if len(part) < len(met):  # what was brought for all of it stays, for that may be asked for again
        return [str(into / entry.key) for entry in part]
    _keep_only({into / entry.key for entry in met}, into)
    return [f"{glob.escape(str(into))}/{pattern}"]


def _part(met: list[Entry], take_bytes: int) -> list[Entry]:
    """As few as hold what is to be taken, evenly from the whole range: the first ones may all be of one kind."""
    if not take_bytes:
        return met
    wanted, largest = _ENOUGH * take_bytes, max(entry.num_bytes for entry in met)
    for count in range(max(1, wanted // max(1, largest)), len(met)):
        part = [met[number * len(met) // count] for number in range(count)]
        if sum(entry.num_bytes for entry in part) >= wanted:
            return part
    return met


def _keep_only(kept: set[Path], into: Path) -> None:
    """What is no longer there, or was brought for another pattern, would be taken by this one, or by a folder that it
    meets. The folder is ours alone."""
    for path in sorted(into.rglob("*"), reverse=True):  # what is in a folder comes before it
        if path.is_dir():
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
        elif path not in kept:
            path.unlink()


def _check_room(to_come: list[Entry], into: Path) -> None:
    """Before the first of them: an hour of downloads is too late to hear of it."""
    needed = sum(entry.num_bytes for entry in to_come)
    free = shutil.disk_usage(next(folder for folder in (into, *into.absolute().parents) if folder.exists())).free
    if free < needed:
        raise DataError(
            what=f"The disk under {into} has no room for what is named.",
            why=f"{format_bytes(needed)} are to come, {format_bytes(free)} are free.",
            fix="Make room, or name fewer files; another disk: --out DIR, or data.dir in the run file",
        )


def _matches(names: list[str], pattern: list[str]) -> bool:
    """As `glob` would find it here: ** is any folders, and * meets no name that begins with a dot."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        is_here = _matches(names, pattern[1:] or ["*"])
        return is_here or (len(names) > 1 and not names[0].startswith(".") and _matches(names[1:], pattern))
    is_met = bool(names) and fnmatchcase(names[0], pattern[0])
    is_hidden = is_met and names[0].startswith(".") and not pattern[0].startswith(".")
    return is_met and not is_hidden and _matches(names[1:], pattern[1:])


def _bring(store: Store, key: str, address: str, into: Path) -> None:
    from homing.text_sources import need_reader

    need_reader(key)
    target = into / key
    if target.is_file() and store.is_same(key, str(target)):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    store.progress = _teller(address)
    store.get(key, str(target))
    talk.say(f"Brought {address}: {format_bytes(target.stat().st_size)}.")


def _teller(address: str) -> Callable[[int, int], None]:
    """A line now and then, so that no long download is silent."""
    told = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _TELL_EVERY_S:
            told = time.monotonic()
            talk.say(f"{address}: {format_bytes(done)} of {format_bytes(total)}")

    return tell
