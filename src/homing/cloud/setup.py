"""Sets up a provider for the first time, in repeatable steps that do not change what already exists.

    $HOMING_HOME and owner -> an SSH key, if the provider's machines are accessed by SSH -> the store, if one was named
                           -> the provider's own steps, from its optional method setup_steps()

The steps are only collected at first, so that the user can see all of them before any is executed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from homing.cloud.contact.ssh_access import login_key
from homing.cloud.home import Home
from homing.errors import StoreError
from homing.store import open_store
from homing.store.address import parse_s3, scheme_of
from homing.store.preflight import TO_BE_CREATED, preflight

__all__ = ["SetUp", "Step", "steps_for", "write_key"]


@dataclass(frozen=True)
class Step:
    text: str  # says what the step creates, and where
    is_done: bool
    do: Callable[[], None]
    costs: str = ""  # says how the created resource is billed; "" if it is free


@runtime_checkable
class SetUp(Protocol):
    """A provider that needs something to be created once in the user's account: a role, a volume or an alert."""

    def setup_steps(self) -> list[Step]: ...


def steps_for(name: str, home: Home, store: str = "") -> list[Step]:
    provider = home.provider(name)
    steps = []
    if "ssh" not in provider.cannot and name != "ssh":
        path = home.path / "keys" / "login" / "key"
        steps.append(
            Step(
                f"an SSH key for rented instances, {path} (mode 600); only its public key leaves this computer",
                home.world.exists(path),
                lambda: _make_key(home),
            )
        )
    if store:
        steps.append(_store_step(store, home))
    if isinstance(provider, SetUp):
        steps += provider.setup_steps()
    return steps


def write_key(path: Path, name: str, value: str, home: Home) -> None:
    """Write NAME=VALUE to the .env file at `path`, replacing an earlier value. Only the user can read the file."""
    world = home.world
    lines = world.read(path).decode("utf-8").splitlines() if world.exists(path) else []
    kept = [line for line in lines if line.partition("=")[0].strip().removeprefix("export ") != name]
    world.write(path, ("\n".join([*kept, f"{name}={value}"]) + "\n").encode(), mode=0o600)


def _make_key(home: Home) -> None:
    login_key(home.path, home.world)


def _store_step(url: str, home: Home) -> Step:
    scheme = scheme_of(url)
    costs = {"s3": "stored data is billed to the bucket's owner", "modal": "Volumes are billed by size"}
    return Step(f"the store {url}", _is_there(url, home), lambda: _make_store(url, home), costs.get(scheme, ""))


def _is_there(url: str, home: Home) -> bool:
    try:
        notes = preflight(url, home.world, needs_write=False, create=False)
    except StoreError:
        return False
    if url.startswith("file:"):
        return home.world.exists(url.removeprefix("file:"))
    return not any(TO_BE_CREATED in note for note in notes)


def _make_store(url: str, home: Home) -> None:
    """Create the store and test it, because a bucket that cannot be written to is useless."""
    if scheme_of(url) == "s3":
        _make_bucket(url)
    elif scheme_of(url) == "file":
        open_store(url, home.world, create=True)
    preflight(url, home.world)


def _make_bucket(url: str) -> None:
    from homing.store.s3.client import connect, region_of, s3_failures

    address = parse_s3(url)
    s3 = connect(address)
    region = address.region or region_of(address)
    # S3 rejects us-east-1 as a location constraint. It is the default region.
    where = {} if region in ("", "us-east-1") else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    try:
        s3.client.create_bucket(Bucket=address.bucket, **where)
    except s3_failures() as exc:
        raise s3.error(exc, "made") from exc
