"""Client for a provider's REST API: JSON, timeouts, safe retries, and the mapping of its errors to ours.

    GET, DELETE, PUT   retried with backoff if there is no response, or after 408, 429 and 5xx; respects Retry-After.
                       A POST that the adapter declares idempotent is treated the same way
    POST               retried only after 429, which means that nothing was done; raises Unsure if it may have taken
                       effect, so that the adapter checks before it retries

A missing response never means "gone". It raises ProviderSilent, and so does a response that lacks required fields
(`legible`). This module does not interpret the content of requests and responses.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from homing.cloud.check_numbers import read_figure
from homing.errors import ProviderRefused, ProviderSilent
from homing.pip_command import pip_upgrade
from homing.world import HttpRequest, HttpResponse, NetworkError, Retries, World

__all__ = ["RETRIES", "Api", "Reply", "Unsure", "Unwelcome", "legible"]

P = ParamSpec("P")
T = TypeVar("T")
RETRIES = Retries(tries=4, first_s=0.5, longest_s=60.0)
_TIMEOUT_S = 30.0
_NO_MORE_TEXT = 300
_BUSY, _TIMED_OUT = 429, 408


class Unsure(Exception):
    """Raised if it is unclear whether a call took effect. Such a call must not be retried without checking first."""


class Unwelcome(ProviderRefused):
    """The provider understood the request and refused it with a 4xx. If `create` raises this, nothing was created.

    `status` and `text` are those of the response. The adapter interprets them.
    """

    def __init__(self, what: str, why: str = "", fix: str = "", *, status: int = 0, text: str = "") -> None:
        super().__init__(what, why, fix)
        self.status, self.text = status, text


def legible(ask: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method that parses a provider's response, so that a missing or unexpected field raises ProviderSilent.

    Otherwise, such a response could crash the local guard or interrupt `homing destroy`.
    """

    @functools.wraps(ask)
    def read(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return ask(*args, **kwargs)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
            name = getattr(args[0], "name", "The provider")
            raise ProviderSilent(
                what=f"{name} responded to {ask.__name__} in an unknown format.",
                why=f"{type(exc).__name__}: {exc}.",
                doubt="The current state is unknown; instances may still be billing.",
                fix=f"Check again in a minute: homing runs   If its API has changed, upgrade homing: {pip_upgrade()}",
            ) from exc

    return read


@dataclass(frozen=True)
class Reply:
    status: int
    body: dict[str, Any]


@dataclass
class Api:
    """Client for one provider's API, with its key. `fix` tells the user what to do if the key is rejected."""

    name: str
    url: str
    headers: dict[str, str] = field(repr=False)
    world: World
    fix: str
    # Seconds by which the provider's clock is ahead of ours, according to the Date header of its last response; 0
    # before the first response.
    skew_s: float = field(default=0.0, init=False)

    def get(self, path: str) -> dict[str, Any]:
        return self._repeat("GET", path).body

    def items(self, path: str, key: str) -> list[dict[str, Any]]:
        """Return the list in this field of the response; raise if it is missing, rather than return an empty list."""
        found = self.get(path).get(key)
        if not isinstance(found, list):
            raise ProviderSilent(
                what=f"{self.name}'s response to GET {path} has no {key!r} field.",
                doubt="The list of instances is unknown; instances may still be billing.",
                fix="Check again in a minute: homing runs",
            )
        return found

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._repeat("PUT", path, body).body

    def find(self, path: str) -> dict[str, Any] | None:
        """GET one object; return None only if the provider itself says that it does not exist."""
        try:
            return self.get(path)
        except Unwelcome as exc:
            if exc.status == 404:
                return None
            raise

    def delete(self, path: str) -> None:
        """DELETE an object; succeeds if it is already gone."""
        try:
            self._repeat("DELETE", path)
        except Unwelcome as exc:
            if exc.status != 404:
                raise

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a POST, retrying only after 429; raise Unsure if the call may have taken effect."""
        for number in range(1, RETRIES.tries + 1):
            try:
                response = self._send("POST", path, body)
            except NetworkError as exc:
                raise Unsure(str(exc)) from exc
            if response.status != _BUSY:
                break
            if number < RETRIES.tries:
                self.world.sleep(_pause_s(response, number))
        if _is_unclear(response):
            raise Unsure(f"{self.name} answered {response.status} {_text_of(response)}")
        return self._reply("POST", path, response).body

    def post_again(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Send an idempotent POST with retries. Ignore the response, because the caller reads the result back."""
        with contextlib.suppress(Unsure):  # 2xx without JSON
            self._repeat("POST", path, body)

    def _repeat(self, method: str, path: str, body: dict[str, Any] | None = None) -> Reply:
        problem = ""
        for number in range(1, RETRIES.tries + 1):
            response: HttpResponse | None = None
            try:
                response = self._send(method, path, body)
            except NetworkError as exc:
                problem = str(exc)
            if response is not None:
                if response.status != _BUSY and not _is_unclear(response):
                    return self._reply(method, path, response)
                problem = f"It answered {response.status} {_text_of(response)}"
            if number < RETRIES.tries:
                self.world.sleep(_pause_s(response, number))
        raise ProviderSilent(
            what=f"{self.name} is not responding: {method} {path} failed {RETRIES.tries} times.",
            why=f"{problem}.",
            doubt="The current state is unknown; instances may still be billing.",
            fix="Check again in a minute: homing runs",
        )

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> HttpResponse:
        data = b"" if body is None else json.dumps(body).encode()
        headers = {**self.headers, "content-type": "application/json"}
        response = self.world.http(HttpRequest(method, self.url + path, headers, data, _TIMEOUT_S))
        with contextlib.suppress(ArithmeticError, KeyError, TypeError, ValueError):  # missing or invalid
            self.skew_s = email.utils.parsedate_to_datetime(response.headers["date"]).timestamp() - self.world.now()
        return response

    def _reply(self, method: str, path: str, response: HttpResponse) -> Reply:
        text = _text_of(response)
        if response.status in (401, 403):
            # A 403 means that the key is valid but not allowed to do this.
            what = f"{self.name} rejected the API key" + (f" for {method} {path}." if response.status == 403 else ".")
            raise Unwelcome(what, f"It answered {response.status} {text}", self.fix, status=response.status, text=text)
        if not 200 <= response.status < 300:
            raise Unwelcome(
                f"{self.name} refused {method} {path}.", f"It answered {response.status} {text}",
                "See the provider's message above; its web console may show more.", status=response.status, text=text,
            )  # fmt: skip
        if not response.body:
            return Reply(response.status, {})
        try:
            body = json.loads(response.body)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            # A proxy's error page is not a response from the provider, so it must not be read as an empty list.
            if method == "POST":
                raise Unsure(f"{self.name} answered {response.status} with something other than a JSON object")
            raise ProviderSilent(
                what=f"{self.name} responded to {method} {path} with something other than a JSON object.",
                why=f"The response starts with: {text}",
                fix="Check again in a minute: homing runs",
            )
        return Reply(response.status, body)


def _is_unclear(response: HttpResponse) -> bool:
    """Return True if the request may have taken effect: 5xx, or 408 from a proxy that may have forwarded it."""
    return response.status >= 500 or response.status == _TIMED_OUT


def _pause_s(response: HttpResponse | None, failures: int) -> float:
    wanted = response.headers.get("retry-after", "") if response is not None else ""
    # None if the header is missing or contains a date, in which case our own retry delay applies
    asked_s = read_figure(wanted, 10**9)
    return RETRIES.pause_s(failures, float(asked_s or 0))


def _text_of(response: HttpResponse) -> str:
    """Return the provider's own message, shortened, for display and for distinguishing refusals."""
    text = response.body.decode("utf-8", "replace").strip()
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if isinstance(body, dict):
        # `detail` and `errors` belong to application/problem+json (RFC 9457), which some clouds use.
        said = next((str(body[key]) for key in ("error", "detail", "message") if body.get(key)), text)
        said = f"{body['error_code']}: {said}" if body.get("error_code") else said
        each = body.get("errors")
        text = " ".join([said, *(str(error) for error in each)]) if isinstance(each, list) else said
    return text[:_NO_MORE_TEXT]
