"""What a run leaves in its store, what that goes on costing after its instances are gone, and how it goes for good."""

from __future__ import annotations

from homing.cloud.home import Home
from homing.cloud.ledger import RunRow
from homing.errors import HomingError
from homing.store import run_key
from homing.store.base import Entries
from homing.store.price import Kept, kept
from homing.wire import names

__all__ = ["kept_by", "remove_stored", "stored_keys"]


def kept_by(home: Home, run: RunRow) -> Kept | None:
    """Its own folder and its model; inputs under objects/ are shared with other runs. None: it could not be seen."""
    try:
        entries = _entries(home, run)
        environment = home.world.environment()
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or ""
        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or ""
        return kept(run.store, sum(entry.num_bytes for entry in entries), region, endpoint)
    except (HomingError, OSError):
        return None  # what cannot be seen now must not keep a receipt from being shown


def stored_keys(home: Home, run: RunRow) -> list[str]:
    """All that only this run pushed, its model included. Another run of its name may have written that since."""
    return [entry.key for entry in _entries(home, run)]


def remove_stored(home: Home, run: RunRow, keys: list[str]) -> None:
    """For good. Whoever calls this has asked a person."""
    home.store_of(run).delete_many(keys)


def _entries(home: Home, run: RunRow) -> Entries:
    store = home.store_of(run)
    folders = (run_key(run.id), f"{names.STORE_MODELS}/{run.name}", f"{names.STORE_MODELS}/{run.id}")
    return [entry for folder in folders for entry in store.list(folder + "/")]
