"""Sends control requests to an instance through a single file that several commands may write at the same time.

    stop | limit | age of the instance  ->  the next numbered local file  ->  request.json in the store

Each numbered file is created once, by create-if-absent, and contains everything requested so far, so that neither of
two simultaneous requests is lost. After pushing its request, the writer checks for a file with a higher number and
pushes that one too. Only the home directory that owns the run sends requests, so files on its disk can coordinate them.
"""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from pathlib import Path
from typing import Any

from homing.cloud.contact.heartbeats import read_document
from homing.cloud.home import Home
from homing.cloud.providers.base import Delivering
from homing.cloud.providers.registry import HERE_ONLY
from homing.store import Store, run_key
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot
from homing.wire.codec import MOST_USD, WireError, read_figure
from homing.wire.control_files import Heartbeat, Request
from homing.world import NetworkError

__all__ = ["ask", "deliver", "last_asked", "send_age"]

_FOLDER = "wishes"  # subfolder of the run's local folder that contains the numbered requests
_ON_ITS_WAY_S = 2.0  # how long a heartbeat may take to reach this computer after the agent has written it


def ask(home: Home, run_id: str, store: Store, **wanted: Any) -> Request:
    """Merge `wanted` into the run's current request, push it to the store, and return it as stored."""
    try:
        return _ask_in_turn(home, run_id, store, wanted)
    except OSError as exc:
        if isinstance(exc, NetworkError):
            raise
    # The local disk is full or read-only, so use only the store. Simultaneous requests may then overwrite each other.
    last = last_asked(home, run_id, store) or Request(serial=0)
    request = dataclasses.replace(last, serial=last.serial + 1, t=home.world.now(), **wanted)
    store.put_bytes(run_key(run_id, file_names.REQUEST), codec.dumps(request).encode())
    deliver(home, run_id)
    return request


def _ask_in_turn(home: Home, run_id: str, store: Store, wanted: dict[str, Any]) -> Request:
    folder = home.run_dir(run_id) / _FOLDER
    home.world.mkdir(folder)
    while True:  # if several callers race for a number, one of them gets it and the others try the next one
        # List the numbers before reading the last request: in the opposite order, changes from a request created in
        # between would be lost.
        numbers = _numbers(home, folder)
        last = last_asked(home, run_id, store) or Request(serial=0)
        number = max([last.serial, *numbers]) + 1
        request = dataclasses.replace(last, serial=number, t=home.world.now(), **wanted)
        if home.world.create(_path(folder, number), codec.dumps(request).encode()):
            break
    while True:
        newest = _newest(home, folder) or request
        store.put_bytes(run_key(run_id, file_names.REQUEST), codec.dumps(newest).encode())
        if _numbers(home, folder)[-1] <= newest.serial:
            deliver(home, run_id)
            return newest


def deliver(home: Home, run_id: str) -> None:
    """Notify those of the run's instances that cache the store, so that they reload it and see the new request."""
    for line in home.ledger.lines(run_id):
        # Instances of local providers read the store directly and cannot be reached from other computers.
        if line.destroyed_at is None and line.instance_id is not None and line.provider not in HERE_ONLY:
            provider = home.provider_of(line)
            if isinstance(provider, Delivering):
                provider.deliver(line.instance_id)


def last_asked(home: Home, run_id: str, store: Store) -> Request | None:
    """Return the latest request, from this home directory or the run's previous owner, or None if there is none."""
    here = _newest(home, home.run_dir(run_id) / _FOLDER)
    there = read_document(store, run_key(run_id, file_names.REQUEST), Request)
    if here is None or (there is not None and there.serial >= here.serial):
        return there
    return here


def send_age(home: Home, store: Store, boot: Boot, beat: Heartbeat, began: float) -> bool:
    """If the agent underestimates how long its instance has been billing, send it our own count and return True.

    The agent counts by its own clock, from the start time in boot.json. If that clock is behind this computer's clock,
    the agent's count is too low, and it would enforce the limit too late. This computer measures the time with its boot
    clock, which cannot be set. `began` is the boot-clock time of the create call.
    """
    world, rate = home.world, Decimal(boot.rate_usd_per_hour)
    if rate <= 0:
        return False
    age_s = world.boottime() - began
    # An agent whose count cannot be read is sent the age, because it may count too little.
    spend = read_figure(beat.spend_usd, MOST_USD) or Decimal(0)
    counted_s = float((spend - Decimal(boot.spent_before_usd)) / rate * 3600)
    if age_s - counted_s <= boot.heartbeat_s + _ON_ITS_WAY_S:
        return False
    # Send a slightly higher age than measured, because some time passes before the agent reads it, and ending the run
    # too early costs less than ending it too late.
    last = last_asked(home, boot.run_id, store)
    why = (
        last.reason if last else ""
    ) or "The instance's clock is wrong, so homing sent the agent the instance's actual uptime"
    ask(home, boot.run_id, store, age_s=age_s + boot.heartbeat_s + _ON_ITS_WAY_S, reason=why)
    return True


def _newest(home: Home, folder: Path) -> Request | None:
    for number in reversed(_numbers(home, folder)):
        try:
            return codec.loads(Request, home.world.read(_path(folder, number)))
        except WireError:
            continue  # writes are atomic, so the disk must have corrupted this request; use the previous one
    return None


def _numbers(home: Home, folder: Path) -> list[int]:
    if not home.world.exists(folder):
        return []
    stems = [name.removesuffix(".json") for name in home.world.listdir(folder)]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.json"
