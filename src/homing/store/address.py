"""Parses the store address that a user writes after `store:`, without access to the disk, the network or an SDK.

file:/path/to/folder
s3://bucket/prefix       also s3:bucket/prefix; ?endpoint=https://...&region=... for R2, MinIO and similar services
hf:OWNER/NAME            a model repository; hf:datasets/OWNER/NAME for a dataset; /prefix may follow
modal:VOLUME/prefix      a Modal Volume; homing adds ?mount=/path for a sandbox in which the Volume is mounted
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from homing.errors import UsageError

__all__ = [
    "FORMS",
    "HubAddress",
    "ModalAddress",
    "S3Address",
    "parse_hub",
    "parse_modal",
    "parse_s3",
    "scheme_of",
]

# URL scheme -> the form of its addresses, as shown to the user.
FORMS = {
    "file": "file:/path/to/folder",
    "s3": "s3://bucket/prefix",
    "hf": "hf:OWNER/NAME",
    "modal": "modal:VOLUME",
}


@dataclass(frozen=True)
class S3Address:
    bucket: str
    prefix: str  # either "" or ends in a slash
    endpoint: str = ""
    region: str = ""

    @property
    def url(self) -> str:
        """Return the canonical address. It includes the endpoint, which the instance cannot find in any other way."""
        parts = [f"{name}={value}" for name, value in (("endpoint", self.endpoint), ("region", self.region)) if value]
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/") + ("?" + "&".join(parts) if parts else "")


@dataclass(frozen=True)
class HubAddress:
    repo_type: str  # model | dataset
    repo_id: str
    prefix: str = ""

    @property
    def url(self) -> str:
        kind = "datasets/" if self.repo_type == "dataset" else ""
        return f"hf:{kind}{self.repo_id}/{self.prefix}".rstrip("/")


@dataclass(frozen=True)
class ModalAddress:
    volume: str
    prefix: str = ""  # either "" or ends in a slash
    mount: str = ""  # the Volume's mount point in a sandbox; if empty, the Volume is accessed through Modal's API

    @property
    def url(self) -> str:
        """Return the address without the mount, so that it is the same on the user's computer and in a sandbox."""
        return f"modal:{self.volume}/{self.prefix}".rstrip("/")


def scheme_of(url: str) -> str:
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in FORMS:
        raise UsageError(
            what=f"{url!r} is not a store address that homing supports.",
            why=f"Supported: {', '.join(FORMS.values())}",
            fix=f"Set a supported address in the run file, for example: store: {FORMS['file']}",
        )
    if not rest.strip("/"):
        thing = {"file": "folder", "s3": "bucket", "hf": "repository", "modal": "Volume"}[scheme]
        raise UsageError(
            what=f"{url!r} does not name a {thing}.",
            why=f"`{scheme}:` must be followed by the name of a {thing}. Supported: {', '.join(FORMS.values())}",
            fix=f"Set a complete address in the run file, for example: store: {FORMS[scheme]}",
        )
    return scheme


def parse_s3(url: str) -> S3Address:
    place, _, query = url.partition(":")[2].partition("?")
    bucket, _, prefix = place.lstrip("/").partition("/")
    options = dict(parse_qsl(query, keep_blank_values=True))
    strange = sorted(set(options) - {"endpoint", "region"})
    problem = ""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
        problem = f"{bucket!r} is not a valid bucket name: use 3 to 63 characters from a-z, 0-9, dot and dash."
    elif strange:
        problem = f"{strange[0]!r} is not a valid option; an s3 address can have the options endpoint and region."
    elif any(part in ("", ".", "..") for part in prefix.strip("/").split("/")) and prefix.strip("/"):
        problem = f"The prefix {prefix!r} has an empty, `.` or `..` part."
    elif options.get("endpoint") and urlsplit(options["endpoint"]).scheme not in ("http", "https"):
        problem = f"The endpoint {options['endpoint']!r} is not an http or https URL."
    elif "@" in options.get("endpoint", ""):
        problem = "An endpoint must not contain a user name or password; set the keys as environment variables."
    if problem:
        raise UsageError(f"{url!r} is not a valid s3 address.", problem, f"Use {FORMS['s3']}?endpoint=https://...")
    folder = prefix.strip("/")
    return S3Address(bucket, f"{folder}/" if folder else "", options.get("endpoint", ""), options.get("region", ""))


def parse_hub(url: str) -> HubAddress:
    parts = url.partition(":")[2].strip("/").split("/")
    repo_type = {"datasets": "dataset", "models": "model"}.get(parts[0], "")
    owner_name, rest = (parts[1:3], parts[3:]) if repo_type else (parts[:2], parts[2:])
    is_named = len(owner_name) == 2 and all(re.fullmatch(r"\w[\w.-]{0,95}", part) for part in owner_name)
    if not is_named or any(part in ("", ".", "..") for part in rest):
        raise UsageError(
            what=f"{url!r} does not name a repository on the Hub.",
            why="The address must contain an owner (you or an organization) and a name.",
            fix=f"Use {FORMS['hf']}   or, for a dataset: hf:datasets/OWNER/NAME",
        )
    return HubAddress(repo_type or "model", "/".join(owner_name), "".join(f"{part}/" for part in rest))


def parse_modal(url: str) -> ModalAddress:
    place, _, query = url.partition(":")[2].partition("?")
    volume, _, prefix = place.strip("/").partition("/")
    options = dict(parse_qsl(query, keep_blank_values=True))
    problem = ""
    # Modal allows 64 characters, but the Dict that accompanies the Volume has the same name plus a suffix.
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,49}", volume, re.ASCII):
        problem = f"{volume!r} is not a valid Volume name: use 1 to 50 of a-z, A-Z, 0-9, dot, dash and underscore."
    elif prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
        problem = f"The prefix {prefix!r} has an empty, `.` or `..` part."
    elif set(options) - {"mount"} or ("mount" in options and not options["mount"].startswith("/")):
        problem = f"{query!r} is not valid in a modal address."
    if problem:
        raise UsageError(
            f"{url!r} is not a valid modal address.", problem, f"Use {FORMS['modal']}   or modal:VOLUME/prefix"
        )
    return ModalAddress(volume, f"{prefix}/" if prefix else "", options.get("mount", ""))
