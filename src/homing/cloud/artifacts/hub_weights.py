"""Selects the open weights that the instance fetches directly from the Hub, bypassing this computer and the store.

    hub_files(run)    the files to fetch: public ones with a hash from the Hub; if the store is a folder on this
                      computer, only those that are not on this computer yet
    hub_inputs(run)   the same files as inputs of the run: hf:OWNER/NAME@COMMIT/FILE and the sha256
    url_of(item)      the URL that the instance fetches; respects this computer's HF_ENDPOINT
    check_hub(run)    requests a file without a token, as the instance will, before anything is rented

Gated and private files go through the store, so that the token needed to read them stays on the user's computer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from homing.api_address import api_address
from homing.errors import DataError, StoreError, UsageError
from homing.units import format_bytes
from homing.wire.run_json import HubFile, Run, RunInput
from homing.world import HttpRequest, NetworkError, World

__all__ = ["check_hub", "describe_hub_download", "hub_files", "hub_inputs", "is_from_hub", "url_of"]

_ENDPOINT = "https://huggingface.co"
_SOURCE = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)@(?P<commit>[\w.-]+)/(?P<name>.+)")
_REFUSED = (401, 403, 404, 410)


def hub_files(run: Run, world: World) -> list[HubFile]:
    base = run.base
    if base is None:
        return []
    # A store on this computer needs no upload, so files that are already on this computer are not downloaded again.
    is_near = run.store.startswith("file:")
    return [file for file in base.hub_files if not is_near or not world.exists(os.path.join(base.dir, file.name))]


def hub_inputs(run: Run, world: World, into: str) -> list[RunInput]:
    assert run.base is not None, "only for a run with open weights"
    address = run.base.address
    return [
        RunInput(f"{into}/{file.name}", f"{address}/{file.name}", file.sha256, file.num_bytes)
        for file in hub_files(run, world)
    ]


def is_from_hub(item: RunInput) -> bool:
    return item.source.startswith("hf:")


def url_of(item: RunInput, env: Mapping[str, str]) -> str:
    found = _SOURCE.fullmatch(item.source)
    assert found is not None, f"no file on the Hub: {item.source}"
    return f"{_endpoint(env)}/{found['repo']}/resolve/{found['commit']}/{quote(found['name'])}"


def check_hub(run: Run, world: World) -> None:
    """Check that the instance can fetch the files. Checking one file is enough, because all are in the same commit."""
    item = next(filter(is_from_hub, run.inputs), None)
    if item is None:
        return
    url, fix = url_of(item, world.environment()), "hf download, then set model.from: FOLDER"
    if "@" in urlsplit(url).netloc:
        raise UsageError(
            what="HF_ENDPOINT contains a password, which homing does not send to a rented instance.",
            why=f"A rented instance would fetch {item.source} directly from that address.",
            fix="Unset HF_ENDPOINT, or download the weights locally: " + fix,
        )
    try:
        # A redirect means that the file is accessible, so there is no need to follow it.
        answer = world.http(HttpRequest("HEAD", url, {"User-Agent": "homing"}))
    except NetworkError as exc:
        raise _silent(item, str(exc)) from exc
    if answer.status in _REFUSED:
        raise DataError(
            what=f"A rented instance cannot download {item.source} from the Hub.",
            why=f"Without a token, the Hub returns status {answer.status}: the file is gated, private or gone.",
            fix=f"Download it locally with a token that can read it: {fix}",
        )
    if answer.status >= 400:
        raise _silent(item, f"it answered {answer.status}")
    found_sha256 = answer.headers.get("x-linked-etag", "").strip('"') or item.sha256  # a mirror may omit this header
    if found_sha256 != item.sha256:
        raise DataError(
            what=f"{item.source} differs from the file the Hub listed.",
            why=f"Its sha256 is {found_sha256}, but the Hub's listing reported {item.sha256}.",
            fix=f"Check HF_ENDPOINT, or download it locally: {fix}",
        )


def describe_hub_download(run: Run, world: World) -> str:
    """Describe how the instance of a launched run gets its open weights, or return "" if there is nothing to report."""
    if run.base is None or not run.base.address.startswith("hf:"):
        return ""
    taken = [item.num_bytes for item in run.inputs if is_from_hub(item)]
    if taken:
        return (
            f"The instance downloads {format_bytes(sum(taken))} of {run.base.address} from the Hub, verified by sha256"
        )
    if run.store.startswith("file:") or run.base.hub_files:
        return ""
    folder = os.path.normpath(run.base.dir)
    own = [item.source for item in run.inputs if os.path.normpath(os.path.dirname(item.source)) == folder]
    here = [world.size(path) for path in own if world.exists(path)]
    if not here:  # launched from another home directory, so the weights are already in the store
        return ""
    return (
        f"This computer sends {format_bytes(sum(here))} of {run.base.address} through the store:"
        " the weights are not public,"
        " or the Hub did not answer, and homing never sends your token to a rented instance"
    )


def _silent(item: RunInput, why: str) -> StoreError:
    return StoreError(
        what=f"The Hub is not serving {item.source} right now, so a rented instance would have to wait for it.",
        why=f"{why}. Nothing was rented.",
        fix="Try again later, or set HF_ENDPOINT to a mirror of the Hub",
    )


def _endpoint(env: Mapping[str, str]) -> str:
    return api_address(env, "HF_ENDPOINT", _ENDPOINT)
