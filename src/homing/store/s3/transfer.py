"""Transfers files to and from a bucket in parts, so that an interruption loses at most the part in transit.

    send     uploads a small file with one PUT and a large one in parts. To resume, it looks for an interrupted upload
             in the bucket, compares the finished parts with the file by size and hash, and sends only missing parts
    stream   yields one object in chunks; after an interruption, requests the remaining range of the same version
    sweep    aborts uploads below our prefix that were idle for a day: they are billed but not listed as objects

Parts are sent one after another, so at most one is lost when the connection breaks. No local record of an upload is
kept, because the bucket's own list is more reliable and also works from another machine.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from homing.errors import StoreError
from homing.store.base import Progress
from homing.store.s3.client import Connection, code_of, is_absent, s3_failures
from homing.world import Retries, World

__all__ = ["PART_BYTES", "Sent", "send", "send_small", "stream", "sweep"]

PART_BYTES = 8 << 20
_MOST_PARTS = 9_000  # S3 allows 10,000
_STALE_S = 86_400.0
_PIECE = 1 << 20
_RETRIES = Retries(tries=5, first_s=0.5, longest_s=8.0)  # applies only to consecutive tries that received no new bytes
_NO_CHECKSUM = ("NotImplemented", "InvalidArgument", "InvalidRequest", "XNotImplemented")


@dataclass(frozen=True)
class Sent:
    num_bytes: int
    sha256: str


class _OtherContent(Exception):
    """Raised if an interrupted upload does not match the file, or was aborted, so that a new upload must be started."""


@dataclass(frozen=True)
class _Upload:
    id: str
    has_sha256: bool
    parts: dict[int, dict[str, Any]]  # part number -> a part that was uploaded before the interruption


# --- upload ---


def send_small(connection: Connection, key: str, data: bytes, **extra: Any) -> Sent:
    """Upload data with one PUT. The service checks its hashes: MD5, and SHA-256 if the service supports it."""
    digest = hashlib.sha256(data)
    call = {"Bucket": connection.address.bucket, "Key": key, "Body": data, "ContentMD5": _md5(data), **extra}
    try:
        connection.client.put_object(ChecksumSHA256=_b64(digest.digest()), **call)
    except s3_failures() as exc:
        if code_of(exc) not in _NO_CHECKSUM:
            raise
        connection.client.put_object(**call)
    return Sent(len(data), digest.hexdigest())


def send(connection: Connection, key: str, path: str, world: World, part_bytes: int, progress: Progress) -> Sent:
    """Upload the file up to its current length, ignoring data that is appended during the upload."""
    size = world.size(path)
    if size <= part_bytes:
        sent = send_small(connection, key, world.read(path))
        progress(sent.num_bytes, sent.num_bytes)
        return sent
    part_bytes = max(part_bytes, -(-size // _MOST_PARTS))
    for upload in _resumable(connection, key, world):
        try:
            return _send_parts(connection, key, path, size, part_bytes, upload, world, progress)
        except _OtherContent:
            continue
    try:
        return _send_parts(connection, key, path, size, part_bytes, _begin(connection, key), world, progress)
    except _OtherContent as exc:
        raise StoreError(
            what=f"{key} could not be pushed to {connection.address.url}.",
            why="The upload was aborted before it finished: another process is writing the same key.",
            fix="See who owns the run: homing runs   then push again",
        ) from exc


def _send_parts(
    connection: Connection,
    key: str,
    path: str,
    size: int,
    part_bytes: int,
    upload: _Upload,
    world: World,
    progress: Progress,
) -> Sent:
    at = {"Bucket": connection.address.bucket, "Key": key, "UploadId": upload.id}
    digest, finished = hashlib.sha256(), []
    count = -(-size // part_bytes)
    if any(number > count for number in upload.parts):
        raise _OtherContent
    for number in range(1, count + 1):
        offset = (number - 1) * part_bytes
        data = world.read(path, offset, min(part_bytes, size - offset))
        if len(data) < min(part_bytes, size - offset):
            raise OSError(f"{path} shrank while it was pushed")
        digest.update(data)
        finished.append(_finished_part(connection, at, number, data, upload))
        progress(offset + len(data), size)
    _complete(connection, key, at, finished, digest.hexdigest(), world)
    return Sent(size, digest.hexdigest())


def _finished_part(
    connection: Connection, at: dict[str, str], number: int, data: bytes, upload: _Upload
) -> dict[str, Any]:
    """Return the part's number and ETag (and checksum), uploading the part if it is missing."""
    sha256, there = _b64(hashlib.sha256(data).digest()), upload.parts.get(number)
    if there is None:
        checks = {"ContentMD5": _md5(data), **({"ChecksumSHA256": sha256} if upload.has_sha256 else {})}
        try:
            there = connection.client.upload_part(PartNumber=number, Body=data, **at, **checks)
        except connection.client.exceptions.NoSuchUpload as exc:
            raise _OtherContent from exc
    elif not _is_same(there, data, sha256):
        raise _OtherContent
    kept = {"PartNumber": number, "ETag": there["ETag"]}
    return {**kept, "ChecksumSHA256": there["ChecksumSHA256"]} if there.get("ChecksumSHA256") else kept


def _is_same(part: dict[str, Any], data: bytes, sha256: str) -> bool:
    if part["Size"] != len(data):
        return False
    if part.get("ChecksumSHA256"):
        return bool(part["ChecksumSHA256"] == sha256)
    return bool(part["ETag"].strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest())


def _complete(
    connection: Connection, key: str, at: dict[str, str], parts: list[dict[str, Any]], sha256: str, world: World
) -> None:
    try:
        connection.client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **at)
    except s3_failures() as exc:
        if code_of(exc) not in ("NoSuchUpload", "InvalidPart", "InvalidPartOrder"):
            raise
        # The response to an earlier try may have been lost although the object is complete, so compare the bytes.
        if not _holds(connection, key, sha256, world):
            raise _OtherContent from exc


def _holds(connection: Connection, key: str, sha256: str, world: World) -> bool:
    digest = hashlib.sha256()
    try:
        for piece in stream(connection, key, world):
            digest.update(piece)
    except s3_failures() as exc:
        if is_absent(exc):
            return False
        raise
    return digest.hexdigest() == sha256


def _begin(connection: Connection, key: str) -> _Upload:
    at = {"Bucket": connection.address.bucket, "Key": key}
    try:
        made = connection.client.create_multipart_upload(ChecksumAlgorithm="SHA256", **at)
    except s3_failures() as exc:
        if code_of(exc) not in _NO_CHECKSUM:
            raise
        made = connection.client.create_multipart_upload(**at)
    return _Upload(made["UploadId"], made.get("ChecksumAlgorithm") == "SHA256", {})


# --- interrupted uploads ---


def _resumable(connection: Connection, key: str, world: World) -> list[_Upload]:
    """Return the interrupted uploads of exactly this key, newest first."""
    found = []
    for listed in _uploads(connection, key):
        parts = _parts(connection, key, listed["UploadId"]) if listed["Key"] == key else None
        if parts is not None and world.now() - _touched_at(listed, parts) < _STALE_S:
            is_sha256 = listed.get("ChecksumAlgorithm") == "SHA256" or any(p.get("ChecksumSHA256") for p in parts)
            upload = _Upload(listed["UploadId"], is_sha256, {part["PartNumber"]: part for part in parts})
            found.append((_touched_at(listed, parts), upload))
    return [upload for _, upload in sorted(found, key=lambda pair: pair[0], reverse=True)]


def sweep(connection: Connection, world: World, below: str = "", untouched_s: float = _STALE_S) -> int:
    """Abort uploads below our prefix that had no activity for `untouched_s`, and return how many there were.

    `below` limits this to one folder.
    """
    aborted = 0
    for listed in _uploads(connection, connection.address.prefix + below):
        parts = _parts(connection, listed["Key"], listed["UploadId"])
        if parts is not None and world.now() - _touched_at(listed, parts) >= untouched_s:
            at = {"Bucket": connection.address.bucket, "Key": listed["Key"], "UploadId": listed["UploadId"]}
            _unless_gone(functools.partial(connection.client.abort_multipart_upload, **at))
            aborted += 1
    return aborted


def _touched_at(listed: dict[str, Any], parts: list[dict[str, Any]]) -> float:
    """Return the time of an upload's last activity. The start time is not enough: a large file may take over a day."""
    return float(max(moment.timestamp() for moment in [listed["Initiated"], *(p["LastModified"] for p in parts)]))


def _uploads(connection: Connection, prefix: str) -> list[dict[str, Any]]:
    pages = connection.client.get_paginator("list_multipart_uploads").paginate(
        Bucket=connection.address.bucket, Prefix=prefix
    )
    found: list[dict[str, Any]] = []
    # rclone's server returns NoSuchUpload if a bucket has never had an upload.
    _unless_gone(lambda: found.extend(upload for page in pages for upload in page.get("Uploads", [])))
    return found


def _parts(connection: Connection, key: str, upload_id: str) -> list[dict[str, Any]] | None:
    pages = connection.client.get_paginator("list_parts").paginate(
        Bucket=connection.address.bucket, Key=key, UploadId=upload_id
    )
    found: list[dict[str, Any]] = []
    is_there = _unless_gone(lambda: found.extend(part for page in pages for part in page.get("Parts", [])))
    return found if is_there else None


def _unless_gone(call: Callable[[], Any]) -> bool:
    """Run the call; return False if the upload has been completed or aborted in the meantime."""
    try:
        call()
    except s3_failures() as exc:
        if code_of(exc) != "NoSuchUpload":
            raise
        return False
    return True


# --- download ---


def stream(connection: Connection, key: str, world: World, offset: int = 0, etag: str = "") -> Iterator[bytes]:
    """Yield the object's bytes from `offset` on, all from one version: `etag`, or else the first response's ETag."""
    total, failures = -1, 0
    while offset != total:
        reply = _open_range(connection, key, offset)
        total, etag, before = offset + int(reply["ContentLength"]), etag or reply["ETag"], offset
        if reply["ETag"] != etag:
            raise StoreError(
                what=f"{key} changed in {connection.address.url} while homing was reading it.",
                why="Another process is writing the same key.",
                fix="Try again.",
            )
        problem: Exception = OSError("the response ended early")
        try:
            for piece in iter(functools.partial(reply["Body"].read, _PIECE), b""):
                offset += len(piece)
                yield piece
        except s3_failures() as exc:
            problem = exc
        if offset != total:
            failures = failures + 1 if offset == before else 1
            if failures >= _RETRIES.tries:
                raise problem
            world.sleep(_RETRIES.pause_s(failures))


def _open_range(connection: Connection, key: str, offset: int) -> Any:
    at = {"Bucket": connection.address.bucket, "Key": key}
    if not offset:
        return connection.client.get_object(**at)
    reply = connection.client.get_object(Range=f"bytes={offset}-", **at)
    if not str(reply.get("ContentRange", "")).startswith(f"bytes {offset}-"):
        raise StoreError(
            what=f"{key} could not be read from {connection.address.url}.",
            why="The service ignores HTTP range requests, so an interrupted download cannot resume.",
            fix="Use another store.",
        )
    return reply


def _md5(data: bytes) -> str:
    return _b64(hashlib.md5(data, usedforsecurity=False).digest())


def _b64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
