"""Publishes a folder to a repository on the Hub in one commit; a new repository is private unless requested otherwise.

    look     finds out who the user is, whether the token may write, and what the repository already contains
    publish  creates the repository if missing -> makes one commit on top of the state that `look` saw -> verifies it

Weights of an earlier model that are not in the folder are deleted in the same commit, because a mixture of old and new
files would not load as either model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from homing.errors import StoreError
from homing.store.address import HubAddress
from homing.store.hf.client import Connection, UploadFailed, connect, hub_failures, status_of
from homing.world import World

__all__ = ["Looked", "Published", "look", "publish"]

_STALE = (".safetensors", ".safetensors.index.json", ".gguf", ".bin")
_PIECE = 16 << 20


@dataclass(frozen=True)
class Looked:
    connection: Connection
    user: str
    exists: bool
    is_private: bool
    commit: str  # the newest commit, or "" if the repository does not exist
    # the files in the repository, except those that the Hub itself adds
    files: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Published:
    url: str
    commit: str
    num_bytes: int
    removed: list[str]
    is_private: bool


def look(address: HubAddress, world: World) -> Looked:
    """Inspect the repository without creating anything. Raise StoreError if the token does not allow publishing."""
    connection = connect(address, world)
    repo = {"repo_id": address.repo_id, "repo_type": address.repo_type}
    if not connection.token:
        raise _refused(connection, "No Hugging Face token was found on this computer.")
    try:
        who = connection.api.whoami()
    except hub_failures() as exc:
        if status_of(exc) in (401, 403):
            raise _refused(connection, "the token is invalid") from exc
        raise connection.raised(exc, "published") from exc
    role = str(((who.get("auth") or {}).get("accessToken") or {}).get("role", ""))
    if role == "read":
        raise _refused(connection, "the token is read-only")
    try:
        info = connection.api.repo_info(**repo)
        tree = list(connection.api.list_repo_tree(recursive=True, **repo))
    except hub_failures() as exc:
        if status_of(exc) not in (401, 404):
            raise connection.raised(exc, "checked") from exc
        return Looked(connection, str(who.get("name", "")), False, True, "")
    files = sorted(item.path for item in tree if hasattr(item, "size") and item.path != ".gitattributes")
    return Looked(connection, str(who.get("name", "")), True, bool(info.private), str(info.sha), files)


def publish(
    looked: Looked,
    folder: str,
    names: list[str],
    *,
    is_public: bool,
    title: str,
    notify: Callable[[str], None] = lambda text: None,
) -> Published:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    connection, address = looked.connection, looked.connection.address
    repo = {"repo_id": address.repo_id, "repo_type": address.repo_type}
    removed = [name for name in looked.files if name.endswith(_STALE) and name not in names]
    operations: list[Any] = [CommitOperationDelete(name) for name in removed]
    operations += [CommitOperationAdd(path_in_repo=name, path_or_fileobj=f"{folder}/{name}") for name in names]
    try:
        if not looked.exists:
            notify(f"creating {address.url}, {'public' if is_public else 'private'}")
            connection.api.create_repo(private=not is_public, exist_ok=True, **repo)
        parent = looked.commit or str(connection.api.repo_info(**repo).sha)
        notify(f"pushing {len(names)} files")
        made = connection.api.create_commit(operations=operations, commit_message=title, parent_commit=parent, **repo)
    except ValueError as exc:  # the SDK raises this if the Hub rejects the model card
        if status_of(exc):
            raise connection.raised(exc, "published") from exc
        raise StoreError(
            what=f"The Hub rejected the model card for {address.url}.",
            why=str(exc)[:500],
            fix="Fix the lines between the two --- at the top of README.md in the export, then publish again.",
        ) from exc
    except RuntimeError as exc:
        raise connection.raised(UploadFailed(exc), "published") from exc
    except hub_failures() as exc:
        if status_of(exc) in (409, 412):
            raise StoreError(
                what=f"Someone else changed {address.url} in the meantime.",
                why="You agreed to replace the earlier content, not the new content.",
                fix="Check what changed, then publish again.",
            ) from exc
        raise connection.raised(exc, "published") from exc
    num_bytes = _compare(connection, repo, folder, names, str(made.oid))
    is_private = looked.is_private if looked.exists else not is_public
    return Published(f"{connection.endpoint}/{address.repo_id}", str(made.oid), num_bytes, removed, is_private)


def _compare(connection: Connection, repo: dict[str, str], folder: str, names: list[str], commit: str) -> int:
    """Compare the files on the Hub with the local files and return their total size.

    Compare all sizes, and the sha256 of large files. Raise StoreError if any file differs.
    """
    try:
        tree = {item.path: item for item in connection.api.list_repo_tree(recursive=True, revision=commit, **repo)}
    except hub_failures() as exc:
        raise connection.raised(exc, "checked") from exc
    odd = []
    total = 0
    for name in names:
        size = connection.world.size(f"{folder}/{name}")
        total += size
        there = tree.get(name)
        lfs = getattr(there, "lfs", None)
        if (
            there is None
            or int(there.size) != size
            or (lfs and str(lfs.sha256) != _sha256(connection.world, folder, name))
        ):
            odd.append(name)
    if odd:
        raise StoreError(
            what=f"{connection.address.url} does not contain what was pushed.",
            why=f"These files differ: {', '.join(odd[:6])}.",
            fix="Publish again. The previous commit is still in the repository's history.",
        )
    return total


def _sha256(world: World, folder: str, name: str) -> str:
    digest, offset = hashlib.sha256(), 0
    while piece := world.read(f"{folder}/{name}", offset, _PIECE):
        digest.update(piece)
        offset += len(piece)
    return digest.hexdigest()


def _refused(connection: Connection, why: str) -> StoreError:
    used = f"Using {connection.token_source.rstrip(',')}: {why}." if connection.token else why
    return StoreError(
        what=f"Cannot publish to {connection.address.url}.",
        why=used,
        fix=f"Create a token with write access: {connection.endpoint}/settings/tokens   then export HF_TOKEN=...",
    )
