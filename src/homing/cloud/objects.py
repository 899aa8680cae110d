"""Objects in the store under the hash of their content: objects/<sha256>.

The key is known before the object exists, so one that is there may have been planted by another writer of the store. It
is read back and written again where it differs. An instance checks the hash of each object before it uses it anyway;
this keeps a planted one from costing a launch.
"""

from __future__ import annotations

import hashlib

from homing.errors import IntegrityError
from homing.store.base import Store
from homing.wire import names

__all__ = ["object_key", "push_object", "read_object"]


def object_key(sha256: str) -> str:
    return f"{names.STORE_OBJECTS}/{sha256}"


def push_object(store: Store, data: bytes) -> str:
    """Makes sure that the store holds these bytes under their hash; returns the hash."""
    digest = hashlib.sha256(data).hexdigest()
    key = object_key(digest)
    # Nothing is there yet in a store that has never been written to, and asking it would be an error; so create.
    if not store.create_if_absent(key, data) and store.sha256(key) != digest:
        store.put_bytes(key, data)
    return digest


def read_object(store: Store, sha256: str) -> bytes:
    """The bytes with this hash; raises IntegrityError where the object holds others."""
    data = store.read(object_key(sha256))
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise IntegrityError(
            what=f"{object_key(sha256)} in {store.url} was replaced.",
            why=f"Its sha256 is {found}, and its name says {sha256}. Somebody else can write to this store.",
            fix=f"Remove it, then launch again: homing store rm {object_key(sha256)} --store {store.url}",
        )
    return data
