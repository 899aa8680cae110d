"""Before anything is rented, checks a store by using it, and finds the credentials that the instance needs.

    the store responds -> it exists -> region and token are valid -> write a probe, read it back, try to create it
    twice, delete it

Each failure is a StoreError that says what to change. `preflight` returns notes for the user: what it found, and what
to know before relying on the store. Without `needs_write`, it writes nothing, as --dry-run requires.

`secrets` returns the credentials that an instance needs for the store, as environment variables, so that they never
appear in a file, an argument or a log.

s3     AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), region and endpoint
hf     the token under both of its names, even if only one of them is set here, and HF_ENDPOINT if set
file   nothing
modal  the account's token, only for instances on this computer; a rented instance never gets it (a sandbox has the
       Volume mounted, and other providers cannot use this store)
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from homing.errors import StoreError
from homing.hub_token import NAMES, token_in
from homing.store import open_store
from homing.store.address import parse_modal, parse_s3, scheme_of
from homing.store.base import PROBES, Store
from homing.store.hf.store import HubStore
from homing.store.modal.store import VolumeStore
from homing.store.s3.client import region_of, s3_failures
from homing.store.s3.store import S3Store
from homing.store.s3.transfer import sweep
from homing.world import World

__all__ = ["TO_BE_CREATED", "preflight", "secrets", "try_out"]

TO_BE_CREATED = "`homing launch` creates it"  # part of the note that `preflight` returns if there is no store yet


def preflight(url: str, world: World, *, needs_write: bool = True, create: bool = True) -> list[str]:
    """Check the store and return notes for the user. Raise StoreError if the store cannot be used.

    If `create` is false, never create a missing store, because a resumed run needs the store it started with.
    """
    store = open_store(url, world, create=create and needs_write)
    notes = _look(store, needs_write)
    if needs_write:
        _try_out(store, world)
    return notes


def try_out(url: str, world: World) -> None:
    """Write, read and delete a probe, without any other check. Raise StoreError if the store does not exist."""
    _try_out(open_store(url, world, create=False), world)


def _look(store: Store, needs_write: bool) -> list[str]:
    """Run the checks that apply to this kind of store, and return notes for the user."""
    if isinstance(store, S3Store):
        return _look_s3(store, needs_write)
    if isinstance(store, HubStore):
        return _look_hub(store, needs_write)
    if isinstance(store, VolumeStore):
        return _look_modal(store, needs_write)
    if not needs_write:
        # A missing folder is not an error, because the first push creates it.
        with contextlib.suppress(StoreError):
            store.list("runs/")
    return []


def _look_s3(store: S3Store, needs_write: bool) -> list[str]:
    connection, address = store.connection, store.address
    try:
        is_inside = str(connection.client.head_bucket(Bucket=address.bucket).get("BucketRegion") or "")
        swept = sweep(connection, store.world) if needs_write else 0
    except s3_failures() as exc:
        raise connection.error(exc, "used") from exc
    named = address.region or (region_of(address) if connection.is_amazon else "")
    if named and is_inside and named != is_inside:
        raise StoreError(
            what=f"The bucket for {store.url} is in another region.",
            why=f"The bucket {address.bucket} is in {is_inside}, not in {named}.",
            fix=f"Add ?region={is_inside} to the store's address, or set AWS_REGION={is_inside}",
        )
    store.list(f"{PROBES}/")
    notes = [f"{address.bucket} is reachable at {connection.where} with the credentials from {connection.source}"]
    if connection.is_temporary:
        notes.append("warning: these credentials are temporary; once they expire, the run can no longer push anything")
    if swept:
        notes.append(f"aborted {swept} incomplete uploads that had been idle for more than a day")
    return notes


def _look_hub(store: HubStore, needs_write: bool) -> list[str]:
    if needs_write:
        store.head()  # if the repository does not exist, this also creates it, as private
    else:
        try:
            store.list("runs/")
        except StoreError:
            if not store.connection.token:
                raise
            return [f"{store.url} does not exist or is not visible to this token; {TO_BE_CREATED} as a private one"]
    return [f"{store.url} is reachable at {store.connection.endpoint} with {store.connection.token_source.rstrip(',')}"]


def _look_modal(store: VolumeStore, needs_write: bool) -> list[str]:
    if store.is_there():
        return [f"{store.url} is reachable with {store.connection.who}"]
    if needs_write and store.may_create:
        return [f"creating {store.url} with {store.connection.who}"]
    if needs_write:
        store.list("")  # raises the error for a missing Volume
    return [f"{store.url} does not exist; {TO_BE_CREATED}"]


def _try_out(store: Store, world: World) -> None:
    one, two = (f"{PROBES}/{world.random_hex(16)}" for _ in range(2))
    data = world.random_hex(32).encode()
    try:
        store.put_bytes(one, data)
        if store.read(one) != data:
            raise _broken(store, "Data that was written does not read back unchanged.")
        if store.create_if_absent(one, b"over it"):
            raise _broken(store, "An exclusive write replaced an existing key, so two computers could own one run.")
        if not store.create_if_absent(two, data) or store.create_if_absent(two, data):
            raise _broken(store, "Of two exclusive writes to one key, exactly the first must succeed. It did not.")
        store.delete_many([one, two])
        if store.exists(one) or store.exists(two):
            raise _broken(store, "Deleted data is still present.")
    except BaseException:  # delete the probe after any failure, even after Ctrl-C
        with contextlib.suppress(StoreError):
            store.delete_many([one, two])
        raise


def _broken(store: Store, why: str) -> StoreError:
    return StoreError(f"{store.url} does not work as a store.", why, "Set another `store:` in the run file.")


_S3_AS_THEY_ARE = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CA_BUNDLE")
_MODAL_AS_THEY_ARE = (
    "MODAL_TOKEN_ID",
    "MODAL_TOKEN_SECRET",
    "MODAL_PROFILE",
    "MODAL_CONFIG_PATH",
    "MODAL_ENVIRONMENT",
    "MODAL_SERVER_URL",
)
_HUB_AS_THEY_ARE = ("HF_ENDPOINT",)


def secrets(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that give the instance access to the store; empty if the user has no keys.

    Even without keys, the instance may have access through a role assigned to it.
    """
    scheme = scheme_of(url)
    if scheme == "s3":
        return {**_plain(environment, _S3_AS_THEY_ARE), **_aws_keys(url, environment)}
    if scheme == "hf":
        return {**_plain(environment, _HUB_AS_THEY_ARE), **_hub_token(environment)}
    if scheme == "modal" and not parse_modal(url).mount:
        return _plain(environment, _MODAL_AS_THEY_ARE)
    return {}


def _plain(environment: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: environment[name] for name in names if environment.get(name)}


def _aws_keys(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    if environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"):
        return _plain(environment, ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"))
    from homing.store.s3.client import connect

    # The keys come from a profile, single sign-on or a role. The instance cannot read those, so pass the current
    # values.
    connection = connect(parse_s3(url))
    found: Any = connection.credentials
    if found is None:
        return {}
    frozen = found.get_frozen_credentials()
    named = {
        "AWS_ACCESS_KEY_ID": frozen.access_key,
        "AWS_SECRET_ACCESS_KEY": frozen.secret_key,
        "AWS_SESSION_TOKEN": frozen.token,
        "AWS_REGION": str(connection.client.meta.region_name or ""),
    }
    return {name: value for name, value in named.items() if value}


def _hub_token(environment: Mapping[str, str]) -> dict[str, str]:
    token, _ = token_in(environment)
    if not token:
        try:
            from huggingface_hub import get_token
        except ImportError:
            return {}  # the missing extra is reported when the store is opened
        token = get_token() or ""
    return dict.fromkeys(NAMES, token) if token else {}  # set both variables, because the first one takes precedence
