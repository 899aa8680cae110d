"""What a run leaves in its store, what that goes on costing after its instances are gone, and how it goes for good.

Its folder below runs/ and the model that it pushed. A store may be shared: models/NAME is its own only where the
manifest there says so, inputs below objects/ belong to whoever needs them, and a run that another home has adopted is
that home's.
"""

from __future__ import annotations

from homing.cloud.home import Home
from homing.cloud.keep import Removal, in_order, remove
from homing.cloud.lease import describe
from homing.cloud.ledger import RunRow
from homing.cloud.record import keep_no_record
from homing.cloud.signs import read_document
from homing.errors import HomingError
from homing.store import Store, run_key
from homing.store.base import Entries
from homing.store.lease import newest
from homing.store.price import Kept, kept
from homing.wire import names
from homing.wire.checkpoint import CheckpointManifest

__all__ = ["kept_by", "remove_stored", "stored_keys"]


def kept_by(home: Home, run: RunRow) -> Kept | None:
    """Its own folder and its model. None: it could not be seen."""
    try:
        entries = _entries(home.store_of(run), run)
        environment = home.world.environment()
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or ""
        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or ""
        return kept(run.store, sum(entry.num_bytes for entry in entries), region, endpoint)
    except (HomingError, OSError):
        return None  # what cannot be seen now must not keep a receipt from being shown


def stored_keys(home: Home, run: RunRow) -> tuple[list[str], list[str]]:
    """All that only this run pushed, its model included; and what has its name and is another's, one sentence each."""
    store = home.store_of(run)
    lease = newest(store, run.id)  # raises where it cannot be told whose it is: what goes, goes for good
    if lease is not None and lease.owner != home.owner:
        return [], [f"{run.id} was adopted {describe(lease)}"]
    named = f"{names.STORE_MODELS}/{run.name}"
    others = [] if _pushed(store, named) == run.id or not store.list(named + "/") else [_others(store, named)]
    return [entry.key for entry in _entries(store, run)], others


def remove_stored(home: Home, run: RunRow, keys: list[str]) -> None:
    """For good, and looked for again. Whoever calls this has asked a person."""
    store = home.store_of(run)
    keep_no_record(home, run.id)  # first: a guard that looks meanwhile would write it back
    remove(store, Removal(in_order(keys), 0, folders=tuple(_folders(store, run))))


def _entries(store: Store, run: RunRow) -> Entries:
    return [entry for folder in _folders(store, run) for entry in store.list(folder + "/")]


def _folders(store: Store, run: RunRow) -> list[str]:
    named = f"{names.STORE_MODELS}/{run.name}"
    own = [named] if _pushed(store, named) == run.id else []
    return [run_key(run.id), f"{names.STORE_MODELS}/{run.id}", *own]


def _pushed(store: Store, model: str) -> str:
    """The run that pushed this model; "" where nothing there tells it."""
    manifest = read_document(store, f"{model}/{names.MANIFEST}", CheckpointManifest)
    return manifest.run_id if manifest is not None else ""


def _others(store: Store, model: str) -> str:
    theirs = _pushed(store, model)
    return f"{model} in {store.url} is of {theirs}" if theirs else f"Nothing tells whose {model} in {store.url} is"
