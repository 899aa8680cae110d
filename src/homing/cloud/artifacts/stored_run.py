"""What a run keeps in its store, what that costs after its instances are gone, and how to remove it for good.

That is its folder below runs/ and the model that it pushed. A store may be shared: models/NAME belongs to the run only
if the manifest there says so, inputs below objects/ belong to every run that needs them, and an adopted run belongs to
the home that adopted it.
"""

from __future__ import annotations

from homing.cloud.artifacts.prune import Removal, in_order, remove
from homing.cloud.contact.heartbeats import read_document
from homing.cloud.home import Home
from homing.cloud.ledger.lease import describe
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.ledger.run_record import keep_no_record
from homing.errors import HomingError
from homing.store import Store, run_key
from homing.store.base import Entries
from homing.store.lease_file import newest
from homing.store.storage_price import Kept, kept
from homing.wire import file_names
from homing.wire.checkpoint_manifest import CheckpointManifest

__all__ = ["kept_by", "remove_stored", "stored_keys"]


def kept_by(home: Home, run: RunRow) -> Kept | None:
    """Return the size and cost of the run's folder and model; None if they cannot be listed."""
    try:
        entries = _entries(home.store_of(run), run)
        environment = home.world.environment()
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or ""
        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or ""
        return kept(run.store, sum(entry.num_bytes for entry in entries), region, endpoint)
    except (HomingError, OSError):
        return None  # an unreadable store must not keep a receipt from being shown


def stored_keys(home: Home, run: RunRow) -> tuple[list[str], list[str]]:
    """Return all keys that only this run pushed, its model included, and one sentence per thing that is another's."""
    store = home.store_of(run)
    lease = newest(store, run.id)  # raises if the owner cannot be determined: removal is permanent
    if lease is not None and lease.owner != home.owner:
        return [], [f"{run.id} was adopted {describe(lease)}"]
    named = f"{file_names.STORE_MODELS}/{run.name}"
    others = [] if _pushed(store, named) == run.id or not store.list(named + "/") else [_others(store, named)]
    return [entry.key for entry in _entries(store, run)], others


def remove_stored(home: Home, run: RunRow, keys: list[str]) -> None:
    """Remove the keys for good, and verify it. The caller has asked a person."""
    store = home.store_of(run)
    keep_no_record(home, run.id)  # first: a guard that runs meanwhile would write it back
    remove(store, Removal(in_order(keys), 0, folders=tuple(_folders(store, run))))


def _entries(store: Store, run: RunRow) -> Entries:
    return [entry for folder in _folders(store, run) for entry in store.list(folder + "/")]


def _folders(store: Store, run: RunRow) -> list[str]:
    named = f"{file_names.STORE_MODELS}/{run.name}"
    own = [named] if _pushed(store, named) == run.id else []
    return [run_key(run.id), f"{file_names.STORE_MODELS}/{run.id}", *own]


def _pushed(store: Store, model: str) -> str:
    """Return the id of the run that pushed this model; "" if unknown."""
    manifest = read_document(store, f"{model}/{file_names.MANIFEST}", CheckpointManifest)
    return manifest.run_id if manifest is not None else ""


def _others(store: Store, model: str) -> str:
    owner = _pushed(store, model)
    return f"{model} in {store.url} belongs to {owner}" if owner else f"The owner of {model} in {store.url} is unknown"
