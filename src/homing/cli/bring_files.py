"""Files that a run file names in a store (s3://, hf:, modal:, file:), brought into its data folder before prep.

Each is checked by the hash that the store itself tells; one that cannot be had stops the run, and nothing takes its
place. What is here already is not brought again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from homing.cli import talk
from homing.config.text_files import is_in_store
from homing.errors import UsageError
from homing.units import format_bytes

__all__ = ["bring_file", "bring_files"]

_IN_STORE = re.compile(r"(?P<store>(s3|hf|modal|file):[^?]*)/(?P<key>[^/?]+)(?P<query>\?.*)?")


def bring_files(paths: Iterable[str], into: Path) -> list[str]:
    """Each into a folder of its own, by its number: two files of one name may come from two places."""
    return [bring_file(path, into.with_name(f"{into.name}-{number}")) for number, path in enumerate(paths)]


def bring_file(path: str, into: Path) -> str:
    """`path` itself where it is no address of a store; else the file here."""
    if not is_in_store(path):
        return path
    from homing.store import open_store
    from homing.world import World

    found = _IN_STORE.fullmatch(path)
    if found is None or "*" in path:
        raise UsageError(
            what=f"{path!r} names no file in a store.",
            why="A file in a store is named whole, without patterns.",
            fix="Such as s3://bucket/folder/chats.jsonl",
        )
    store = open_store(f"{found['store']}{found['query'] or ''}", World(), create=False)
    key, target = found["key"], into / found["key"]
    sha256 = store.sha256(key)
    if not target.is_file() or _sha256(target) != sha256:
        into.mkdir(parents=True, exist_ok=True)
        store.get(key, str(target), sha256)
        talk.say(f"Brought {path}: {format_bytes(target.stat().st_size)}, sha256 {sha256[:12]}.")
    return str(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
