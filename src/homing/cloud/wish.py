"""What home wants of an instance: one request in the store, asked for by several verbs that may run at once.

    stop | limit | the age that launch tells  ->  the next numbered file at home  ->  request.json in the store

Each number is made once, by create-if-absent, and holds everything wanted so far, so that none of two who ask in the
same moment is lost. Whoever has written the request looks again: a newer number that came meanwhile is brought too.
Only the home that owns the run asks, so its own disk is the place where they meet.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from homing.cloud.home import Home
from homing.cloud.providers.base import Delivering
from homing.cloud.providers.registry import HERE_ONLY
from homing.cloud.signs import read_document
from homing.store import Store, run_key
from homing.wire import codec, names
from homing.wire.codec import WireError
from homing.wire.control import Request
from homing.world import NetworkError

__all__ = ["ask", "deliver", "last_asked"]

_FOLDER = "wishes"  # in the run's folder at home


def ask(home: Home, run_id: str, store: Store, **wanted: Any) -> Request:
    """All that was asked for before stays, but for what `wanted` names. Returns it as it lies in the store now."""
    try:
        return _ask_in_turn(home, run_id, store, wanted)
    except OSError as exc:
        if isinstance(exc, NetworkError):
            raise
    # A full or read-only disk at home: the store alone has it. Two who ask at this moment may overtake each other.
    last = last_asked(home, run_id, store) or Request(serial=0)
    wish = dataclasses.replace(last, serial=last.serial + 1, t=home.world.now(), **wanted)
    store.put_bytes(run_key(run_id, names.REQUEST), codec.dumps(wish).encode())
    deliver(home, run_id)
    return wish


def _ask_in_turn(home: Home, run_id: str, store: Store, wanted: dict[str, Any]) -> Request:
    folder = home.run_dir(run_id) / _FOLDER
    home.world.mkdir(folder)
    while True:  # whoever is too late for a number finds the next one: somebody got on each time
        numbers = _numbers(home, folder)  # before the look: a number that comes after it may hold what it did not see
        last = last_asked(home, run_id, store) or Request(serial=0)
        number = max([last.serial, *numbers]) + 1
        wish = dataclasses.replace(last, serial=number, t=home.world.now(), **wanted)
        if home.world.create(_path(folder, number), codec.dumps(wish).encode()):
            break
    while True:
        newest = _newest(home, folder) or wish
        store.put_bytes(run_key(run_id, names.REQUEST), codec.dumps(newest).encode())
        if _numbers(home, folder)[-1] <= newest.serial:
            deliver(home, run_id)
            return newest


def deliver(home: Home, run_id: str) -> None:
    """Some instances do not see by themselves what comes into their store after they began."""
    for line in home.ledger.lines(run_id):
        # Those of this computer alone read the store themselves, and could not be asked from another one.
        if line.destroyed_at is None and line.instance_id is not None and line.provider not in HERE_ONLY:
            provider = home.provider_of(line)
            if isinstance(provider, Delivering):
                provider.deliver(line.instance_id)


def last_asked(home: Home, run_id: str, store: Store) -> Request | None:
    """Here or by the home that owned the run before; None where nobody asked for anything."""
    here = _newest(home, home.run_dir(run_id) / _FOLDER)
    there = read_document(store, run_key(run_id, names.REQUEST), Request)
    if here is None or (there is not None and there.serial >= here.serial):
        return there
    return here


def _newest(home: Home, folder: Path) -> Request | None:
    for number in reversed(_numbers(home, folder)):
        try:
            return codec.loads(Request, home.world.read(_path(folder, number)))
        except WireError:
            continue  # written whole, so a disk has damaged it: what was asked for before it counts
    return None


def _numbers(home: Home, folder: Path) -> list[int]:
    if not home.world.exists(folder):
        return []
    stems = [name.removesuffix(".json") for name in home.world.listdir(folder)]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.json"
