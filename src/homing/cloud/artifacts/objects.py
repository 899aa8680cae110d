"""Content-addressed objects in the store: objects/<sha256>.

The key is known before the object exists, so another writer of the store may have planted a wrong one. An existing
object is therefore hashed, and written again if it differs. An instance verifies each object before use anyway; this
keeps a planted one from failing a launch.
"""

from __future__ import annotations

import hashlib

from homing.errors import IntegrityError
from homing.store.base import Store
from homing.wire import file_names

__all__ = ["object_key", "push_object", "read_object"]


def object_key(sha256: str) -> str:
    return f"{file_names.STORE_OBJECTS}/{sha256}"


def push_object(store: Store, data: bytes) -> str:
    """Make sure that the store holds these bytes under their hash. Return the hash."""
    digest = hashlib.sha256(data).hexdigest()
    key = object_key(digest)
    # Create rather than ask first: asking a store that was never written to would be an error.
    if not store.create_if_absent(key, data) and store.sha256(key) != digest:
        store.put_bytes(key, data)
    return digest


def read_object(store: Store, sha256: str) -> bytes:
    """Return the bytes with this hash. Raises IntegrityError if the object has other content."""
    data = store.read(object_key(sha256))
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise IntegrityError(
            what=f"{object_key(sha256)} in {store.url} was replaced.",
            why=f"Its sha256 is {found}, but its name says {sha256}. Someone else can write to this store.",
            fix=f"Remove it, then launch again: homing store rm {object_key(sha256)} --store {store.url}",
        )
    return data
