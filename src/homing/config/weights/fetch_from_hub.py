"""Access to repositories on the Hub, for `model.from` and `init_from`: list the files and fetch them.

  list_repository   commit, files, sizes, sha256 of large files, license; from the cache if the Hub does not respond
  bring_files       the files in the Hub's own cache, downloaded if missing
  init_folder       a checkpoint folder of a repository as a local folder in $HOMING_HOME/cache/checkpoints

Each command queries the Hub only once, no matter how often it reads the run file. The contents of a commit never
change, so they are cached in $HOMING_HOME/cache/hub, and a cached model that is specified with its commit needs no
request. Every error names the token that was used, in masked form. huggingface_hub does the network access and the
caching.

A checkpoint's files are compared with the hashes in its manifest, if it has one. From then on, homing checks, hashes
and sends the fetched folder like any other local folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from homing.api_address import api_address
from homing.config.home_and_run_files import home
from homing.errors import DataError, MissingExtra, StoreError
from homing.hub_token import token_in, use_lfs
from homing.wire import file_names

__all__ = ["Listing", "bring_files", "init_folder", "list_repository"]

_ENDPOINT = "https://huggingface.co"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_T = TypeVar("_T")
_answers: dict[tuple[str, ...], Listing] = {}  # request -> the listing that this process got from the Hub or its cache


@dataclass(frozen=True)
class Listing:
    repo_id: str  # "" for a folder
    commit: str
    sizes: dict[str, int]
    hashes: dict[str, str]  # of large files
    licence: str = ""
    note: str = ""
    is_public: bool = False  # the Hub reports that the files can be read without a token


def list_repository(repo_id: str, revision: str = "") -> Listing:
    hub = _need_hub(repo_id)
    if _is_offline():
        return _from_cache(hub, repo_id, revision, "HF_HUB_OFFLINE is set, so the local Hub cache is used.")
    question = (_endpoint(), _cache(hub), _token(hub)[0], repo_id, revision)
    if question not in _answers:
        _answers[question] = _recall(repo_id, revision) or _ask(hub, repo_id, revision)
    return _answers[question]


def _ask(hub: Any, repo_id: str, revision: str) -> Listing:
    api = _api(hub)
    try:
        info = _asked(repo_id, revision, lambda: api.model_info(repo_id, revision=revision or None))
        commit = str(info.sha)
        if (known := _recall(repo_id, commit)) is not None:
            return known
        tree = _asked(repo_id, commit, lambda: list(api.list_repo_tree(repo_id, revision=commit, recursive=True)))
    except _NoAnswer as exc:
        return _from_cache(hub, repo_id, revision, f"The Hub did not respond ({exc}); using the local Hub cache.")
    files = [item for item in tree if hasattr(item, "size")]
    listing = Listing(
        repo_id=repo_id,
        commit=commit,
        sizes={item.path: int(item.size) for item in files},
        hashes={item.path: str(item.lfs.sha256) for item in files if getattr(item, "lfs", None)},
        licence=str(getattr(getattr(info, "card_data", None), "license", None) or ""),
        # `gated` is False or the kind of access control. A missing attribute does not count as public.
        is_public=getattr(info, "private", None) is False
        and getattr(info, "gated", None) is False
        and "@" not in urlsplit(_endpoint()).netloc,  # an endpoint with a password in its address is not public
    )
    _remember(listing)
    return listing


def _recall(repo_id: str, revision: str) -> Listing | None:
    """Return the cached listing of this commit; None if it is not cached, or `revision` is a branch or tag."""
    if not _COMMIT.fullmatch(revision):
        return None
    try:
        saved = json.loads(_memory(repo_id, revision).read_bytes())
        listing = Listing(**saved["listing"])
        is_it = (saved["endpoint"], listing.repo_id, listing.commit) == (_endpoint(), repo_id, revision)
        is_it = is_it and all(isinstance(size, int) for size in listing.sizes.values()) and "" not in listing.hashes
        is_it = (
            is_it and "is_public" in saved["listing"]
        )  # older versions of homing did not write this field; in that case, query the Hub again
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return listing if is_it else None


def _remember(listing: Listing) -> None:
    path = _memory(listing.repo_id, listing.commit)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps({"endpoint": _endpoint(), "listing": dataclasses.asdict(listing)}, indent=1)
    with contextlib.suppress(OSError):  # if the cache cannot be written, the Hub is queried again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)


def _memory(repo_id: str, commit: str) -> Path:
    return home() / "cache" / "hub" / repo_id.replace("/", "--") / f"{commit}.json"


def bring_files(listing: Listing, wanted: list[str]) -> Path:
    """Return the cache folder that holds all `wanted` files, downloading those that are missing."""
    hub = _need_hub(listing.repo_id)
    token = _token(hub)[0]
    cached: dict[str, Any] = {"revision": listing.commit, "cache_dir": _cache(hub)}
    at = {**cached, "token": token or False, "endpoint": _endpoint()}
    folders = set()
    for name in wanted:
        here = hub.try_to_load_from_cache(listing.repo_id, name, **cached)
        if not isinstance(here, str):
            fetch = _fetching(hub, listing.repo_id, name, at)
            try:
                here = _asked(listing.repo_id, listing.commit, fetch)
            except _NoAnswer as exc:
                raise StoreError(
                    what=f"{name} could not be fetched from {listing.repo_id}.",
                    why=f"{_endpoint()} did not respond: {exc}",
                    fix="Check the network, and HF_ENDPOINT if it is set, then try again.",
                ) from exc
        # The cache layout is snapshots/COMMIT/NAME, and a name may contain folders.
        folders.add(Path(here).parents[name.count("/")])
    assert len(folders) == 1, f"one snapshot, not {folders}"
    return folders.pop()


def _fetching(hub: Any, repo_id: str, name: str, at: dict[str, Any]) -> Callable[[], str]:
    return lambda: str(hub.hf_hub_download(repo_id, name, **at))


class _NoAnswer(Exception):
    """Raised if a network failure or a server error kept the Hub from answering the request."""


def _asked(repo_id: str, revision: str, question: Callable[[], _T]) -> _T:
    from huggingface_hub import errors

    try:
        return question()
    except errors.GatedRepoError as exc:
        raise _refused(
            repo_id, "is gated", f"access was denied with {{token}}. Request access: {_page(repo_id)}"
        ) from exc
    except errors.RepositoryNotFoundError as exc:
        why = "no such model is visible with {token}: it is missing, private, or the token is invalid."
        raise _refused(repo_id, "was not found", why) from exc
    except errors.HFValidationError as exc:
        why = "Owner and name consist of letters and digits, with - _ or . between them."
        raise DataError(f"{repo_id!r} is not a model on the Hub.", why, "Fix model.from: hf:OWNER/NAME") from exc
    except errors.RevisionNotFoundError as exc:
        raise _refused(repo_id, f"has no revision {revision}", "homing used {token}.") from exc
    except errors.LocalEntryNotFoundError as exc:  # the SDK's error if a file is not cached and there is no connection
        raise _NoAnswer(str(exc.__cause__ or exc)[:200]) from exc
    except errors.EntryNotFoundError as exc:
        raise _refused(repo_id, "lacks a file", f"{exc}; homing used {{token}}.") from exc
    except errors.HfHubHTTPError as exc:
        status = int(getattr(getattr(exc, "response", None), "status_code", 0) or 0)
        if status in (401, 403):
            raise _refused(repo_id, "cannot be accessed", f"the Hub returned {status}; homing used {{token}}.") from exc
        raise _NoAnswer(f"HTTP {status}" if status else type(exc).__name__) from exc
    except (errors.HTTPError, OSError) as exc:  # type: ignore[attr-defined]  # not exported explicitly
        raise _NoAnswer(f"{type(exc).__name__}: {str(exc)[:200]}") from exc


def _refused(repo_id: str, what: str, why: str) -> DataError:
    _, token = _token(_need_hub(repo_id))
    return DataError(
        what=f"{repo_id} on the Hub {what}.",
        why=why.format(token=token)[:1].upper() + why.format(token=token)[1:],
        fix=f"Fix model.from, or use a token with read access: export HF_TOKEN=...   ({_page(repo_id)})",
    )


def _from_cache(hub: Any, repo_id: str, revision: str, note: str) -> Listing:
    folder = _snapshot(hub, repo_id, revision)
    if folder is None:
        raise DataError(
            what=f"{repo_id} is not in the Hugging Face cache on this computer.",
            why=f"{note} homing looked in {_cache(hub)}.",
            fix=f"Connect to the network, then: hf download {repo_id}   or set model.from to a folder with the weights",
        )
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    return Listing(repo_id, folder.name, sizes, {}, note=f"{note} The cache has commit {folder.name[:12]}.")


def _snapshot(hub: Any, repo_id: str, revision: str) -> Path | None:
    """Return the cached snapshot of `revision`. If none is given, return the snapshot of main, else the newest one.

    The cache knows which commit is main only if main itself was fetched, not just a commit.
    """
    at: dict[str, Any] = {"revision": revision or None, "cache_dir": _cache(hub)}
    try:
        return Path(hub.snapshot_download(repo_id, local_files_only=True, **at))
    except (OSError, ValueError):
        snapshots = Path(_cache(hub), f"models--{repo_id.replace('/', '--')}", "snapshots")
        found = [] if revision else sorted(snapshots.glob("*/"), key=lambda path: path.stat().st_mtime)
        return found[-1] if found else None


def _need_hub(repo_id: str) -> Any:
    try:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as exc:
        missing = MissingExtra("model.from", "hub", "huggingface_hub")
        missing.what = f"model.from: hf:{repo_id} needs the extra `hub`."
        raise missing from exc
    disable_progress_bars()
    use_lfs(huggingface_hub)
    return huggingface_hub


def _api(hub: Any) -> Any:
    return hub.HfApi(endpoint=_endpoint(), token=_token(hub)[0] or False, library_name="homing")


def _endpoint() -> str:
    return api_address(os.environ, "HF_ENDPOINT", _ENDPOINT)


def _cache(hub: Any) -> str:
    """Return the Hub cache folder from the current environment; the SDK reads the environment only on import."""
    home = os.environ.get("HF_HOME", "")
    own = os.environ.get("HF_HUB_CACHE", "") or (f"{home}/hub" if home else "")
    return os.path.expanduser(own) if own else str(hub.constants.HF_HUB_CACHE)


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "TRUE", "YES", "ON")


def _token(hub: Any) -> tuple[str, str]:
    """Return the token and, for messages, a description that masks it."""
    token, source = token_in(os.environ)
    if not token:
        token, source = hub.get_token() or "", "the saved one (hf auth login)"
    if not token:
        return "", "no token"
    shown = f"{token[:3]}...{token[-2:]}" if len(token) > 12 else "****"
    return token, f"the token of {source} ({shown})"


def _page(repo_id: str) -> str:
    return f"{_endpoint()}/{repo_id}"


_ADDRESS = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<path>.+))?")
_WHOLE = ".whole"


def init_folder(typed: str) -> Path:
    """Return the local folder of the checkpoint: the given one, or the fetched copy of a Hub checkpoint."""
    if not typed.startswith("hf:"):
        return Path(typed).expanduser()
    found = _ADDRESS.fullmatch(typed)
    if found is None:
        raise DataError(
            what=f"{typed} is not the address of a checkpoint on the Hub.",
            why="Such an address has the form hf:OWNER/REPO/path, where path is the folder of the checkpoint.",
            fix="Set init_from: hf:me/moss/models/moss   or, at a commit: hf:me/moss@COMMIT/models/moss",
        )
    listing = list_repository(found["repo"], found["revision"] or "")
    path = (found["path"] or "").strip("/")
    inside = f"{path}/" if path else ""
    wanted = [name for name in listing.sizes if name.startswith(inside) and "/" not in name[len(inside) :]]
    if f"{inside}config.json" not in wanted:
        raise DataError(
            what=f"{found['repo']} has no checkpoint in {path or 'its top folder'}.",
            why=f"There is no {inside}config.json in commit {listing.commit[:12]}.",
            fix=f"Choose another folder: https://huggingface.co/{found['repo']}/tree/{listing.commit}",
        )
    target = home() / "cache" / "checkpoints" / found["repo"].replace("/", "--") / listing.commit / path
    if not (target / _WHOLE).exists():
        _take(bring_files(listing, wanted) / path, [name[len(inside) :] for name in wanted], target)
    return target


def _take(source: Path, wanted: list[str], target: Path) -> None:
    """Copy the files to `target` as real files, because a checkpoint folder must not have the Hub cache's symlinks.

    Hard links are used if possible, so that the files do not take up space twice.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        with contextlib.suppress(FileNotFoundError):
            (target / name).unlink()
        try:
            os.link((source / name).resolve(), target / name)
        except OSError:
            shutil.copyfile(source / name, target / name)
    _check_hashes(target)
    (target / _WHOLE).touch()


def _check_hashes(folder: Path) -> None:
    try:
        files = json.loads((folder / file_names.MANIFEST).read_bytes())["files"]
        expected_sha256 = {str(each["name"]): str(each["sha256"]) for each in files}
    except FileNotFoundError:
        return  # no manifest, as in exports and other people's weights; the Hub's own hashes were already compared
    except (ValueError, KeyError, TypeError) as exc:
        raise DataError(f"{folder / file_names.MANIFEST} cannot be read.", str(exc), "Use another checkpoint.") from exc
    for name, expected in expected_sha256.items():
        path = folder / name
        if path.is_file() and _sha256(path) != expected:
            raise DataError(
                what=f"{name} does not match its manifest.",
                why=f"Its sha256 is not {expected[:12]}..., so the file was changed or damaged on the Hub.",
                fix=f"Use another checkpoint. Fetched files: {folder}",
            )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
