"""Open weights that an instance takes from the Hub itself: they go neither through this computer nor the store.

    hub_files(run)    which of them: public, with a hash that the Hub told; where the store is a folder here, only those
                      that are not here already
    hub_inputs(run)   the same as inputs of the run: hf:OWNER/NAME@COMMIT/FILE and the sha256
    url_of(item)      where the instance gets it; HF_ENDPOINT of this computer, as everywhere
    check_hub(run)    asked without a token, as the instance will ask, before anything is rented

What is gated or private goes the other way: the token that may read it stays at home.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from homing.api_address import api_address
from homing.errors import DataError, StoreError, UsageError
from homing.units import format_bytes
from homing.wire.run import HubFile, Run, RunInput
from homing.world import HttpRequest, NetworkError, World

__all__ = ["check_hub", "hub_files", "hub_inputs", "is_from_hub", "tell_way", "url_of"]

_ENDPOINT = "https://huggingface.co"
_SOURCE = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)@(?P<commit>[\w.-]+)/(?P<name>.+)")
_REFUSED = (401, 403, 404, 410)


def hub_files(run: Run, world: World) -> list[HubFile]:
    base = run.base
    if base is None:
        return []
    is_near = run.store.startswith("file:")  # nothing is sent anywhere: what is here need not come twice
    return [file for file in base.hub_files if not is_near or not world.exists(os.path.join(base.dir, file.name))]


def hub_inputs(run: Run, world: World, into: str) -> list[RunInput]:
    assert run.base is not None, "asked of a run with open weights"
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
    """One question: all files lie in one commit, and the commit is for everybody or for nobody."""
    item = next(filter(is_from_hub, run.inputs), None)
    if item is None:
        return
    url, fix = url_of(item, world.environment()), "hf download, and model.from: FOLDER"
    if "@" in urlsplit(url).netloc:
        raise UsageError(
            what="HF_ENDPOINT holds a password, and that is not told to a rented machine.",
            why=f"{item.source} was listed by a Hub that needs none.",
            fix="Unset it; or bring the weights here: " + fix,
        )
    try:
        # A redirect is a yes, and is not followed.
        answer = world.http(HttpRequest("HEAD", url, {"User-Agent": "homing"}))
    except NetworkError as exc:
        raise _silent(item, str(exc)) from exc
    if answer.status in _REFUSED:
        raise DataError(
            what=f"A rented machine could not take {item.source} from the Hub.",
            why=f"Without a token it answers {answer.status}: it is gated, private or gone by now.",
            fix=f"Bring it here with a token that may read it: {fix}",
        )
    if answer.status >= 400:
        raise _silent(item, f"it answered {answer.status}")
    told = answer.headers.get("x-linked-etag", "").strip('"') or item.sha256  # a mirror may not say it
    if told != item.sha256:
        raise DataError(
            what=f"{item.source} is not the file that the Hub listed.",
            why=f"Its sha256 is {told}, the listing said {item.sha256}.",
            fix=f"Check HF_ENDPOINT; or bring it here: {fix}",
        )


def tell_way(run: Run, world: World) -> str:
    """How the open weights of a launched run travel, for a person; "" where nothing is sent far."""
    if run.base is None or not run.base.address.startswith("hf:"):
        return ""
    taken = [item.num_bytes for item in run.inputs if is_from_hub(item)]
    if taken:
        return f"The machine takes {format_bytes(sum(taken))} of {run.base.address} from the Hub itself, by sha256"
    if run.store.startswith("file:") or run.base.hub_files:
        return ""
    folder = os.path.normpath(run.base.dir)
    own = [item.source for item in run.inputs if os.path.normpath(os.path.dirname(item.source)) == folder]
    here = [world.size(path) for path in own if world.exists(path)]
    if not here:  # a run of another home: all of it lies in the store already
        return ""
    return (
        f"{format_bytes(sum(here))} of {run.base.address} go from this computer through the store: it is not public,"
        " or the Hub could not be asked, and no token of yours goes to a rented machine"
    )


def _silent(item: RunInput, why: str) -> StoreError:
    return StoreError(
        what=f"The Hub does not give {item.source} now, and a rented machine would wait for it.",
        why=f"{why}. Nothing was rented.",
        fix="Try again later; HF_ENDPOINT names another Hub",
    )


def _endpoint(env: Mapping[str, str]) -> str:
    return api_address(env, "HF_ENDPOINT", _ENDPOINT)
