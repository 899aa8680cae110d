"""The mark: how we know our own machines again, on every provider, even when the ledger forgot them.

    homing-<owner6>-<run>-<attempt>        [a-z0-9-], at most 50 characters

The owner is six characters that stay the same for one $HOMING_HOME; we touch only what carries them. A run id that is
too long keeps its beginning and gets a hash, so that two long ids never share a mark.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from homing.errors import UsageError
from homing.world import World

__all__ = [
    "MAX_MARK_CHARS",
    "OWNER",
    "make_mark",
    "new_run_id",
    "owner_in",
    "owner_of",
    "owner_prefix",
    "plain_name",
    "shown_mark",
    "twin_mark",
    "volume_mark",
]

MAX_MARK_CHARS = 50
OWNER = "owner"  # the file in the home
_HASH_CHARS = 8
_OWNER_CHARS = 6
_TWIN = "+"  # in no mark that a provider sees


def owner_of(home: Path, world: World, known: Callable[[], str] = lambda: "") -> str:
    """Six characters, made once per home. Two processes that both find none agree on the first that was written.

    `known` tells a lost one where something still does: with a new one our own machines would be strangers.
    """
    path = home / OWNER
    if not world.exists(path):
        lost = known()
        try:
            world.mkdir(home)
            world.create(path, (lost or world.random_hex(_OWNER_CHARS)).encode())
        except OSError:
            if not lost:
                raise
            return lost  # a disk that cannot be written must not make strangers of our machines
    owner = world.read(path).decode("ascii", "replace").strip()
    if not re.fullmatch(r"[a-z0-9]{6}", owner):
        raise UsageError(
            what=f"{path} is damaged.",
            why=f"It should hold six characters of a-z and 0-9 and holds {owner!r}.",
            fix=f"Restore it: homing knows its own instances by it. Where there is a ledger, its marks do: rm {path}",
        )
    return owner


def owner_prefix(owner: str) -> str:
    return f"homing-{owner}-"


def owner_in(mark: str) -> str:
    """Whose mark it is; "" where it is no mark of any home."""
    found = re.match(r"homing-([a-z0-9]{6})-", mark)
    return found.group(1) if found else ""


def make_mark(owner: str, run_id: str, attempt: int) -> str:
    assert attempt >= 1, attempt
    head, tail = owner_prefix(owner), f"-{attempt}"
    room = MAX_MARK_CHARS - len(head) - len(tail)
    run = plain_name(run_id)
    if len(run) > room or run != run_id:
        # Changed or cut: the hash of the whole id keeps two ids apart that now look the same.
        digest = hashlib.sha256(run_id.encode()).hexdigest()[:_HASH_CHARS]
        run = f"{run[: room - _HASH_CHARS - 1].rstrip('-')}-{digest}"
    return head + run + tail


def twin_mark(mark: str, instance_id: str) -> str:
    """Under which the ledger has a second machine of one mark: each that bills has a line of its own."""
    return f"{mark}{_TWIN}{plain_name(instance_id)}"


def shown_mark(mark: str) -> str:
    """What its provider shows: a twin carries the mark of the machine that it was made beside."""
    return mark.partition(_TWIN)[0]


def volume_mark(mark: str) -> str:
    """Of the volume that a run keeps, whatever the attempt: the mark without its number."""
    return f"{mark.rpartition('-')[0]}-volume"


def plain_name(name: str) -> str:
    return re.sub(r"-{2,}", "-", re.sub(r"[^a-z0-9]+", "-", name.lower())).strip("-") or "run"


def new_run_id(name: str, world: World) -> str:
    """NAME-yyyymmdd-hhmmss-xxxx in UTC, so that ids sort by age wherever they were made."""
    at = datetime.datetime.fromtimestamp(world.now(), tz=datetime.UTC)
    return f"{name}-{at:%Y%m%d-%H%M%S}-{world.random_hex(4)}"
