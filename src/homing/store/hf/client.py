"""Client for the Hub: credentials, single requests, and the mapping of the Hub's errors to ours.

    connect                finds the endpoint and the token: HF_ENDPOINT and the variables in `hub_token.NAMES`, else
                           the token saved by `hf auth login`
    connection.api         huggingface_hub's HfApi, for commits; large files use LFS
    connection.fetch       sends a GET or HEAD request through World and follows redirects; only the Hub gets the token
    connection.error       maps a status to a StoreError that names the token used, masked

Only exceptions that huggingface_hub itself exports are caught, because its releases 1 and 2 use different HTTP
libraries. In both releases, its `HTTPError` is the base class of that library's exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

from homing.api_address import api_address
from homing.errors import MissingExtra, StoreError, StoreRefused
from homing.hub_token import token_in, use_lfs
from homing.store.address import HubAddress
from homing.world import HttpRequest, HttpResponse, NetworkError, Retries, World

__all__ = ["Connection", "UploadFailed", "code_of", "connect", "hub_failures", "status_of"]

TIMEOUT_S = 60.0
_RETRIES = Retries(tries=5, first_s=0.5, longest_s=8.0)
_ENDPOINT = "https://huggingface.co"
_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Connection:
    address: HubAddress
    api: Any
    endpoint: str
    token: str
    token_source: str  # the masked token and where it comes from, for display
    world: World

    def resolve_url(self, name: str, revision: str) -> str:
        from huggingface_hub import hf_hub_url

        at = {"repo_type": self.address.repo_type, "revision": revision, "endpoint": self.endpoint}
        return hf_hub_url(self.address.repo_id, name, **at)

    def fetch(self, url: str, method: str = "GET", headers: dict[str, str] | None = None) -> HttpResponse:
        """Follow all redirects and return the last response, with the Hub's own headers for commit, size and hash."""
        named: dict[str, str] = {}
        for _ in range(6):
            reply = self._try(HttpRequest(method, url, {**self._own(url), **(headers or {})}, timeout_s=TIMEOUT_S))
            named = {**_named(reply.headers), **named}
            if reply.status not in _REDIRECTS or "location" not in reply.headers:
                if not self._is_hub(url):  # another host's ETag is not a hash of the file's content
                    reply.headers.pop("etag", None)
                return HttpResponse(reply.status, {**reply.headers, **named}, reply.body)
            further = urljoin(url, reply.headers["location"])
            if method == "HEAD" and urlsplit(further).netloc != urlsplit(url).netloc:
                # Do not follow the redirect: another host serves the bytes, at a URL signed only for GET. The redirect
                # itself proves that the file exists.
                return HttpResponse(200, {**reply.headers, **named}, b"")
            url = further
        raise StoreError(f"{self.address.url} redirects too many times.", url.split("?")[0], "Try again.")

    def _own(self, url: str) -> dict[str, str]:
        """Return the authorization header if the URL is on the Hub, and no headers for other hosts.

        Other hosts serve the contents of files. They need no token and must not see ours.
        """
        return {"Authorization": f"Bearer {self.token}"} if self.token and self._is_hub(url) else {}

    def _is_hub(self, url: str) -> bool:
        return urlsplit(url).netloc == urlsplit(self.endpoint).netloc

    def _try(self, request: HttpRequest) -> HttpResponse:
        for is_last in _RETRIES.attempts(self.world):
            try:
                reply = self.world.http(request)
            except NetworkError:
                if is_last:
                    raise
            else:
                if reply.status not in _PASSING or is_last:
                    return reply
        raise AssertionError("the last try returns or raises")

    def error(self, done: str, key: str, status: int, code: str = "", detail: str = "") -> StoreError:
        why, fix = self._meaning(status, code)
        said = f" The Hub says: {detail}" if detail else ""
        kind = StoreRefused if status in (401, 403, 404) else StoreError
        return kind(f"{key or 'The store'} could not be {done} ({self.address.url}).", why + said, fix)

    def raised(self, exc: BaseException, done: str, key: str = "") -> StoreError:
        """Convert an SDK exception or a network exception to a StoreError."""
        status = status_of(exc)
        if status:
            return self.error(done, key, status, code_of(exc), str(getattr(exc, "server_message", "") or ""))
        if isinstance(exc, OSError) and exc.errno and not isinstance(exc, NetworkError):
            what = f"{key or 'The store'} could not be {done} ({self.address.url})."
            return StoreError(
                what, f"{type(exc).__name__}: {exc}", "Check the disk space and permissions on this computer."
            )
        return StoreError(
            what=f"{key or 'The store'} could not be {done} ({self.address.url}).",
            why=f"{self.endpoint} did not respond: {type(exc).__name__}: {str(exc)[:300]}",
            fix="Check the network, and HF_ENDPOINT if it is set, then try again.",
        )

    def _meaning(self, status: int, code: str) -> tuple[str, str]:
        repo, token, is_dataset = self.address.repo_id, self.token_source, self.address.repo_type == "dataset"
        if code == "GatedRepo":
            page = f"{self.endpoint}/{'datasets/' * is_dataset}{repo}"
            has_none = f"{token} has no access" if self.token else "there is no token"
            return f"{repo} is gated, and {has_none}.", f"Request access: {page}"
        if code == "RevisionNotFound":
            return f"{repo} has no such branch, tag or commit.", "Fix the part after the @ in the address."
        if status == 401 and not self.token:
            return (
                f"{repo} is private or does not exist, and there is no token.",
                "Log in: hf auth login   or export HF_TOKEN=...",
            )
        if status in (401, 404) or code == "RepoNotFound":
            why = f"{repo} does not exist, or it is private, and there is no token."
            if self.token:
                why = f"{token} cannot see {repo}: it does not exist or is private, or the token is invalid."
            # A dataset repository is usually a source of training text, so do not suggest creating it.
            if is_dataset:
                return why, "Fix the name, or use another token: export HF_TOKEN=..."
            return why, f"Create it: hf repo create {repo} --private   or fix `store:`, or use another token"
        if status == 403:
            why = f"The Hub refuses to write to {repo} without a token."
            if self.token:
                why = f"{token} has no write access to {repo}: it is read-only, or someone else owns the repository."
            return why, f"Create a token with write access: {self.endpoint}/settings/tokens   then export HF_TOKEN=..."
        if status == 429:
            why = (
                f"The Hub's rate limit was reached: too many requests or commits in an hour, using {token.rstrip(',')}."
            )
            return why, "Try again later." + " A token raises the limit: hf auth login" * (not self.token)
        return f"The Hub responded with status {status}. {code}".strip(), "Try again; see https://status.huggingface.co"


def connect(address: HubAddress, world: World) -> Connection:
    try:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as exc:
        missing = MissingExtra("store", "hub", "huggingface_hub")
        missing.what = f"A store at {address.url} needs the extra `hub`."
        raise missing from exc
    disable_progress_bars()  # otherwise the SDK shows a progress bar for every small commit
    use_lfs(huggingface_hub)
    environment = world.environment()
    endpoint = api_address(environment, "HF_ENDPOINT", _ENDPOINT)
    token, source = token_in(environment)
    if not token:
        token, source = huggingface_hub.get_token() or "", "hf auth login"
    shown = f"the token of {source}, {_masked(token)}," if token else "no token"
    api = huggingface_hub.HfApi(endpoint=endpoint, token=token or False, library_name="homing")
    return Connection(address, api, endpoint, token, shown, world)


class UploadFailed(OSError):
    """Raised if an upload fails. The message includes the cause of the SDK's RuntimeError, which is the real error."""

    def __init__(self, exc: BaseException) -> None:
        cause = exc.__cause__ or exc
        super().__init__(f"{exc} {type(cause).__name__}: {cause}")
        self.response = getattr(cause, "response", None)


def hub_failures() -> tuple[type[BaseException], ...]:
    """Return the exceptions that huggingface_hub may raise if a request is refused or a connection breaks.

    OSError covers all exceptions that are not listed explicitly.
    """
    from huggingface_hub import errors

    return (errors.HTTPError, errors.HFValidationError, OSError)  # type: ignore[attr-defined]  # not marked as exported


def status_of(exc: BaseException) -> int:
    return int(getattr(getattr(exc, "response", None), "status_code", 0) or 0)


def code_of(exc: BaseException | None) -> str:
    """Return the Hub's error code, such as EntryNotFound, or "" if the exception has none."""
    return str(getattr(getattr(exc, "response", None), "headers", {}).get("X-Error-Code", ""))


def _named(headers: dict[str, str]) -> dict[str, str]:
    kept = ("x-repo-commit", "x-error-code", "x-linked-size", "x-linked-etag")
    return {name: headers[name] for name in kept if name in headers}


def _masked(token: str) -> str:
    return f"{token[:3]}...{token[-2:]}" if len(token) > 12 else "****"
