"""The mark: our tag on every instance, by which we recognize it at any provider, even if the ledger has lost it.

    homing-<owner6>-<run>-<attempt>        [a-z0-9-], at most 50 characters

The owner is six characters that identify one $HOMING_HOME, and we touch only resources that carry them. A run id that
is too long is truncated and gets a hash, so that two long ids never share a mark.
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
    "duplicate_mark",
    "make_mark",
    "new_run_id",
    "owner_in",
    "owner_of",
    "owner_prefix",
    "plain_name",
    "shown_mark",
    "volume_mark",
]

MAX_MARK_CHARS = 50
OWNER = "owner"  # file name in the home
_HASH_CHARS = 8
_OWNER_CHARS = 6
_DUPLICATE = "+"  # does not occur in any mark that a provider sees


def owner_of(home: Path, world: World, known: Callable[[], str] = lambda: "") -> str:
    """Return the home's owner: six characters, created once.

    If two processes both find none, they agree on the one that was written first.

    `known` returns a lost owner if it can be recovered, because with a new one we would not recognize our own
    instances.
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
            return lost  # our own instances must stay recognizable even if the disk cannot be written
    owner = world.read(path).decode("ascii", "replace").strip()
    if not re.fullmatch(r"[a-z0-9]{6}", owner):
        raise UsageError(
            what=f"{path} is damaged.",
            why=f"It should contain six characters of a-z and 0-9, but contains {owner!r}.",
            fix="Restore it: it identifies your instances. If there is a ledger, delete the file,"
            f" and homing recreates it: rm {path}",
        )
    return owner


def owner_prefix(owner: str) -> str:
    return f"homing-{owner}-"


def owner_in(mark: str) -> str:
    """Return the owner that the mark contains, or "" if the text is not a mark."""
    found = re.match(r"homing-([a-z0-9]{6})-", mark)
    return found.group(1) if found else ""


def make_mark(owner: str, run_id: str, attempt: int) -> str:
    assert attempt >= 1, attempt
    head, tail = owner_prefix(owner), f"-{attempt}"
    room = MAX_MARK_CHARS - len(head) - len(tail)
    run = plain_name(run_id)
    if len(run) > room or run != run_id:
        # The id was sanitized or truncated, so a hash of the full id distinguishes two ids that now look the same.
        digest = hashlib.sha256(run_id.encode()).hexdigest()[:_HASH_CHARS]
        run = f"{run[: room - _HASH_CHARS - 1].rstrip('-')}-{digest}"
    return head + run + tail


def duplicate_mark(mark: str, instance_id: str) -> str:
    """Return the mark for a duplicate instance's own ledger line. Every instance that bills needs a line."""
    return f"{mark}{_DUPLICATE}{plain_name(instance_id)}"


def shown_mark(mark: str) -> str:
    """Return the mark that the provider shows. For a duplicate, that is the mark of the original instance."""
    return mark.partition(_DUPLICATE)[0]


def volume_mark(mark: str) -> str:
    """Return the mark of a run's persistent volume, without an attempt number, so that all attempts share it."""
    return f"{mark.rpartition('-')[0]}-volume"


def plain_name(name: str) -> str:
    return re.sub(r"-{2,}", "-", re.sub(r"[^a-z0-9]+", "-", name.lower())).strip("-") or "run"


def new_run_id(name: str, world: World) -> str:
    """Return NAME-yyyymmdd-hhmmss-xxxx in UTC, so that ids sort by age wherever they were created."""
    at = datetime.datetime.fromtimestamp(world.now(), tz=datetime.UTC)
    return f"{name}-{at:%Y%m%d-%H%M%S}-{world.random_hex(4)}"
