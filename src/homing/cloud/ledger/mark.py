"""Builds marks: the names or tags that identify instances, even those that the ledger has lost.

    homing-<owner6>-<run>-<attempt>        [a-z0-9-], at most 50 characters

The owner is six characters that identify one $HOMING_HOME. homing changes only resources whose mark contains
its own owner. A run id that is too long is truncated, and a hash is appended, so that two long ids never share a mark.
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
OWNER = "owner"  # name of the file in $HOMING_HOME
_HASH_CHARS = 8
_OWNER_CHARS = 6
_DUPLICATE = "+"  # does not occur in any mark that a provider sees


def owner_of(home: Path, world: World, known: Callable[[], str] = lambda: "") -> str:
    """Return the owner, six characters that identify this $HOMING_HOME. Creates it if there is none yet.

    If two processes create it at the same time, both use the one that was written first.

    `known` returns the owner if its file was lost but the owner can be recovered. With a new owner, homing would not
    recognize its own instances.
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
            return lost  # even if the disk cannot be written, homing must recognize its own instances
    owner = world.read(path).decode("ascii", "replace").strip()
    if not re.fullmatch(r"[a-z0-9]{6}", owner):
        raise UsageError(
            what=f"{path} is damaged.",
            why=f"It should contain six characters of a-z and 0-9, but contains {owner!r}.",
            fix="Restore this file from a backup: it identifies your instances. If you still have the ledger, you can"
            f" delete the file instead, and homing will recreate it: rm {path}",
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
        # The id was sanitized or truncated, so add a hash of the full id to distinguish two ids that now look the same.
        digest = hashlib.sha256(run_id.encode()).hexdigest()[:_HASH_CHARS]
        run = f"{run[: room - _HASH_CHARS - 1].rstrip('-')}-{digest}"
    return head + run + tail


def duplicate_mark(mark: str, instance_id: str) -> str:
    """Return a separate mark for a duplicate instance, so that its cost is recorded in a ledger line of its own."""
    return f"{mark}{_DUPLICATE}{plain_name(instance_id)}"


def shown_mark(mark: str) -> str:
    """Return the mark that the provider shows. A duplicate instance has the same mark there as the original."""
    return mark.partition(_DUPLICATE)[0]


def volume_mark(mark: str) -> str:
    """Return the mark of a run's persistent volume. It has no attempt number, because all attempts share the volume."""
    return f"{mark.rpartition('-')[0]}-volume"


def plain_name(name: str) -> str:
    return re.sub(r"-{2,}", "-", re.sub(r"[^a-z0-9]+", "-", name.lower())).strip("-") or "run"


def new_run_id(name: str, world: World) -> str:
    """Return a run id, NAME-yyyymmdd-hhmmss-xxxx, with the time in UTC, so that ids from all computers sort by age."""
    at = datetime.datetime.fromtimestamp(world.now(), tz=datetime.UTC)
    return f"{name}-{at:%Y%m%d-%H%M%S}-{world.random_hex(4)}"
