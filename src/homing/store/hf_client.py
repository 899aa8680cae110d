"""The door to the Hub: who we are there, one request, and what its refusals mean in our words.

    open_door        endpoint and token: HF_ENDPOINT and `hub_token.NAMES`, else the token that `hf auth login` saved
    door.api         huggingface_hub's HfApi, for commits; large files by LFS
    door.fetch       a GET or HEAD by World: redirects followed, the token only to the Hub itself
    door.error       what an SDK exception or a status means: what, why, fix, and which token was used, masked

Only hub's own exceptions are caught by name: releases 1 and 2 speak through different HTTP libraries, whose common root
hub itself names `HTTPError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

from homing.api_address import api_address
from homing.errors import MissingExtra, StoreError, StoreRefused
from homing.hub_token import token_in, use_lfs
from homing.store.address import HubAddress
from homing.world import HttpRequest, HttpResponse, NetworkError, World

__all__ = ["Door", "UploadFailed", "code_of", "hub_failures", "open_door", "status_of"]

TIMEOUT_S = 60.0
TRIES = 5
_LONGEST_PAUSE_S = 8.0
_ENDPOINT = "https://huggingface.co"
_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Door:
    address: HubAddress
    api: Any
    endpoint: str
    token: str
    token_source: str  # for people: which token, masked
    world: World

    def resolve_url(self, name: str, revision: str) -> str:
        from huggingface_hub import hf_hub_url

        at = {"repo_type": self.address.repo_type, "revision": revision, "endpoint": self.endpoint}
        return hf_hub_url(self.address.repo_id, name, **at)

    def fetch(self, url: str, method: str = "GET", headers: dict[str, str] | None = None) -> HttpResponse:
        """The answer behind all redirects, with what the Hub itself said on the way: commit, size and hash."""
        named: dict[str, str] = {}
        for _ in range(6):
            reply = self._try(HttpRequest(method, url, {**self._own(url), **(headers or {})}, timeout_s=TIMEOUT_S))
            named = {**_named(reply.headers), **named}
            if reply.status not in _REDIRECTS or "location" not in reply.headers:
                if not self._is_hub(url):  # a tag of its own making, which says nothing of the file's content
                    reply.headers.pop("etag", None)
                return HttpResponse(reply.status, {**reply.headers, **named}, reply.body)
            further = urljoin(url, reply.headers["location"])
            if method == "HEAD" and urlsplit(further).netloc != urlsplit(url).netloc:
                # The bytes lie elsewhere under an address that is signed for GET alone; that it exists is answered.
                return HttpResponse(200, {**reply.headers, **named}, b"")
            url = further
        raise StoreError(f"{self.address.url} sends from one address to the next.", url.split("?")[0], "Try again.")

    def _own(self, url: str) -> dict[str, str]:
        """A file's bytes lie on other hosts, under addresses that need no token and must not see ours."""
        return {"Authorization": f"Bearer {self.token}"} if self.token and self._is_hub(url) else {}

    def _is_hub(self, url: str) -> bool:
        return urlsplit(url).netloc == urlsplit(self.endpoint).netloc

    def _try(self, request: HttpRequest) -> HttpResponse:
        for number in range(1, TRIES + 1):
            try:
                reply = self.world.http(request)
            except NetworkError:
                if number == TRIES:
                    raise
            else:
                if reply.status not in _PASSING or number == TRIES:
                    return reply
            self.world.sleep(min(0.25 * 2**number, _LONGEST_PAUSE_S))
        raise AssertionError("the last try returns or raises")

    def error(self, done: str, key: str, status: int, code: str = "", detail: str = "") -> StoreError:
        why, fix = self._meaning(status, code)
        said = f" The Hub says: {detail}" if detail else ""
        kind = StoreRefused if status in (401, 403, 404) else StoreError
        return kind(f"{key or 'The store'} could not be {done} in {self.address.url}.", why + said, fix)

    def raised(self, exc: BaseException, done: str, key: str = "") -> StoreError:
        """An exception of the SDK or of the network."""
        status = status_of(exc)
        if status:
            return self.error(done, key, status, code_of(exc), str(getattr(exc, "server_message", "") or ""))
        if isinstance(exc, OSError) and exc.errno and not isinstance(exc, NetworkError):
            what = f"{key or 'The store'} could not be {done} in {self.address.url}."
            return StoreError(what, f"{type(exc).__name__}: {exc}", "Check the disk's space and permissions here.")
        return StoreError(
            what=f"{key or 'The store'} could not be {done} in {self.address.url}.",
            why=f"{self.endpoint} gave no answer: {type(exc).__name__}: {str(exc)[:300]}",
            fix="Check the network, and HF_ENDPOINT if it is set, then try again.",
        )

    def _meaning(self, status: int, code: str) -> tuple[str, str]:
        repo, token, is_dataset = self.address.repo_id, self.token_source, self.address.repo_type == "dataset"
        if code == "GatedRepo":
            page = f"{self.endpoint}/{'datasets/' * is_dataset}{repo}"
            return f"{repo} is gated, and {token} was not let in.", f"Ask for access: {page}"
        if code == "RevisionNotFound":
            return f"{repo} has no branch, tag or commit of that name.", "Mend what stands after the @."
        if status == 401 and not self.token:
            return f"{repo} is private or not there, and there is no token.", "hf auth login   or export HF_TOKEN=..."
        if status in (401, 404) or code == "RepoNotFound":
            why = (
                f"There is no repository {repo} that {token} may see: it is missing, private, or the token is invalid."
            )
            if is_dataset:  # more often text to learn from than a store
                return why, "Mend its name, or use another token: export HF_TOKEN=..."
            return why, f"hf repo create {repo} --private   or mend `store:`, or use another token"
        if status == 403:
            why = f"{token} may not write to {repo}: a read-only token, or somebody else's repository."
            return why, f"Make a token with write access: {self.endpoint}/settings/tokens   then export HF_TOKEN=..."
        if status == 429:
            why = f"The Hub asks to slow down: too many requests or commits in this hour, with {token.rstrip(',')}."
            return why, "Try again later." + " With a token more are let in: hf auth login" * (not self.token)
        return f"The Hub answered {status}. {code}".strip(), "Try again; see https://status.huggingface.co"


def open_door(address: HubAddress, world: World) -> Door:
    try:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as exc:
        missing = MissingExtra("store", "hub", "huggingface_hub")
        missing.what = f"A store at {address.url} needs the extra `hub`."
        raise missing from exc
    disable_progress_bars()  # a bar of its own on every small commit
    use_lfs(huggingface_hub)
    environment = world.environment()
    endpoint = api_address(environment, "HF_ENDPOINT", _ENDPOINT)
    token, source = token_in(environment)
    if not token:
        token, source = huggingface_hub.get_token() or "", "the saved one (hf auth login)"
    shown = f"the token of {source}, {_masked(token)}," if token else "no token"
    api = huggingface_hub.HfApi(endpoint=endpoint, token=token or False, library_name="homing")
    return Door(address, api, endpoint, token, shown, world)


class UploadFailed(OSError):
    """The SDK says of a file that did not go up only "RuntimeError"; what was behind it is the cause."""

    def __init__(self, exc: BaseException) -> None:
        cause = exc.__cause__ or exc
        super().__init__(f"{exc} {type(cause).__name__}: {cause}")
        self.response = getattr(cause, "response", None)


def hub_failures() -> tuple[type[BaseException], ...]:
    """What huggingface_hub may raise: refusals and lines that broke. OSError holds the rest of its own."""
    from huggingface_hub import errors

    return (errors.HTTPError, errors.HFValidationError, OSError)  # type: ignore[attr-defined]  # not said to be exported


def status_of(exc: BaseException) -> int:
    return int(getattr(getattr(exc, "response", None), "status_code", 0) or 0)


def code_of(exc: BaseException | None) -> str:
    """The Hub's own word for a refusal, such as EntryNotFound; "" where it has none."""
    return str(getattr(getattr(exc, "response", None), "headers", {}).get("X-Error-Code", ""))


def _named(headers: dict[str, str]) -> dict[str, str]:
    kept = ("x-repo-commit", "x-error-code", "x-linked-size", "x-linked-etag")
    return {name: headers[name] for name in kept if name in headers}


def _masked(token: str) -> str:
    return f"{token[:3]}...{token[-2:]}" if len(token) > 12 else "****"
