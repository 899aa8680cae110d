"""The object-store servers of tests/store, for the whole launch that the canaries ride."""

from __future__ import annotations

from tests.store.conftest import keys, moto, new_bucket

__all__ = ["keys", "moto", "new_bucket"]
