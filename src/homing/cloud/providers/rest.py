"""How an adapter speaks to a provider's REST API: JSON, timeouts, safe repetition, their errors as ours.

    GET, DELETE, PUT   repeated after no answer, 408, 429 and 5xx, with growing pauses and Retry-After kept; so is a
                       POST of which the adapter says that twice is as good as once
    POST               sent once; Unsure when nobody knows whether it took effect, so that the adapter looks before it
                       asks again. Only 429 is repeated: it says that nothing was done

No answer is never "gone": it raises ProviderSilent, and so does one that lacks what it must say (`legible`). Nothing
here knows what is asked.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from homing.cloud.figures import read_figure
from homing.errors import ProviderRefused, ProviderSilent
from homing.install import pip_upgrade
from homing.world import HttpRequest, HttpResponse, NetworkError, World

__all__ = ["TRIES", "Api", "Reply", "Unsure", "Unwelcome", "legible"]

P = ParamSpec("P")
T = TypeVar("T")
TRIES = 4
_TIMEOUT_S = 30.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_NO_MORE_TEXT = 300
_BUSY, _TIMED_OUT = 429, 408


class Unsure(Exception):
    """A call that must not be repeated blindly got no answer, or an answer that does not say whether it took effect."""


class Unwelcome(ProviderRefused):
    """A 4xx: the provider understood and said no. `status` and `text` are its own, for the adapter to tell apart."""

    def __init__(self, what: str, why: str = "", fix: str = "", *, status: int = 0, text: str = "") -> None:
        super().__init__(what, why, fix)
        self.status, self.text = status, text


def legible(ask: Callable[P, T]) -> Callable[P, T]:
    """For a method that reads what a provider says: a field that is missing or of another kind than ever before must
    end neither the guard at home nor a destroy that has more to do."""

    @functools.wraps(ask)
    def read(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return ask(*args, **kwargs)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
            name = getattr(args[0], "name", "The provider")
            raise ProviderSilent(
                what=f"{name} answers {ask.__name__} in words that this homing does not know.",
                why=f"{type(exc).__name__}: {exc}.",
                doubt="So nothing is known: what was billing may bill on.",
                fix=f"Try again in a minute: homing runs   Its API may have changed: {pip_upgrade()}",
            ) from exc

    return read


@dataclass(frozen=True)
class Reply:
    status: int
    body: dict[str, Any]


@dataclass
class Api:
    """One provider's API, opened with its key. `fix` is what a person does when the key is refused."""

    name: str
    url: str
    headers: dict[str, str] = field(repr=False)
    world: World
    fix: str
    # How far their clock is ahead of ours, by the Date of their last answer; 0 where none was told.
    skew_s: float = field(default=0.0, init=False)

    def get(self, path: str) -> dict[str, Any]:
        return self._repeat("GET", path).body

    def items(self, path: str, key: str) -> list[dict[str, Any]]:
        """A list; one that is not in the answer raises, it is not empty."""
        found = self.get(path).get(key)
        if not isinstance(found, list):
            raise ProviderSilent(
                what=f"{self.name} answered GET {path} without {key!r}.",
                doubt="What it lists is not known: what was billing may bill on.",
                fix="Try again in a minute: homing runs",
            )
        return found

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._repeat("PUT", path, body).body

    def find(self, path: str) -> dict[str, Any] | None:
        """A GET of one thing; None only where the provider itself says that there is none."""
        try:
            return self.get(path)
        except Unwelcome as exc:
            if exc.status == 404:
                return None
            raise

    def delete(self, path: str) -> None:
        """Absent already is success."""
        try:
            self._repeat("DELETE", path)
        except Unwelcome as exc:
            if exc.status != 404:
                raise

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Sent once, but for 429. Raises Unsure where it may have taken effect."""
        for number in range(TRIES):
            try:
                response = self._send("POST", path, body)
            except NetworkError as exc:
                raise Unsure(str(exc)) from exc
            if response.status != _BUSY:
                break
            if number + 1 < TRIES:
                self.world.sleep(_pause_s(response, number))
        if _is_unclear(response):
            raise Unsure(f"{self.name} answered {response.status} {_text_of(response)}")
        return self._reply("POST", path, response).body

    def post_again(self, path: str, body: dict[str, Any] | None = None) -> None:
        """A POST whose effect is the same once or twice. What it answers is not looked at: whoever asks reads back."""
        with contextlib.suppress(Unsure):  # 2xx with no JSON in it
            self._repeat("POST", path, body)

    def _repeat(self, method: str, path: str, body: dict[str, Any] | None = None) -> Reply:
        problem = ""
        for number in range(TRIES):
            response: HttpResponse | None = None
            try:
                response = self._send(method, path, body)
            except NetworkError as exc:
                problem = str(exc)
            if response is not None:
                if response.status != _BUSY and not _is_unclear(response):
                    return self._reply(method, path, response)
                problem = f"It answered {response.status} {_text_of(response)}"
            if number + 1 < TRIES:
                self.world.sleep(_pause_s(response, number))
        raise ProviderSilent(
            what=f"{self.name} cannot be asked now: {method} {path} failed {TRIES} times.",
            why=f"{problem}.",
            doubt="So nothing is known: what was billing may bill on.",
            fix="Try again in a minute: homing runs",
        )

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> HttpResponse:
        data = b"" if body is None else json.dumps(body).encode()
        headers = {**self.headers, "content-type": "application/json"}
        response = self.world.http(HttpRequest(method, self.url + path, headers, data, _TIMEOUT_S))
        with contextlib.suppress(ArithmeticError, KeyError, TypeError, ValueError):  # none, or none that can be read
            self.skew_s = email.utils.parsedate_to_datetime(response.headers["date"]).timestamp() - self.world.now()
        return response

    def _reply(self, method: str, path: str, response: HttpResponse) -> Reply:
        text = _text_of(response)
        if response.status in (401, 403):
            # The second one knows the key: it is good, and not for this.
            what = f"{self.name} refuses the key" + (f" for {method} {path}." if response.status == 403 else ".")
            raise Unwelcome(what, f"It answered {response.status} {text}", self.fix, status=response.status, text=text)
        if not 200 <= response.status < 300:
            raise Unwelcome(
                f"{self.name} refuses {method} {path}.", f"It answered {response.status} {text}",
                "Read its words above; its own page may say more.", status=response.status, text=text,
            )  # fmt: skip
        if not response.body:
            return Reply(response.status, {})
        try:
            body = json.loads(response.body)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            # A proxy's page in place of the answer is no answer: an empty list read from it would be a lie.
            if method == "POST":
                raise Unsure(f"{self.name} answered {response.status} with what is no JSON object")
            raise ProviderSilent(
                what=f"{self.name} answered {method} {path} with what is no JSON object.",
                why=f"It begins: {text}",
                fix="Try again in a minute: homing runs",
            )
        return Reply(response.status, body)


def _is_unclear(response: HttpResponse) -> bool:
    """5xx; and 408, by which whoever stands between says that it waited in vain: it may have passed the request on."""
    return response.status >= 500 or response.status == _TIMED_OUT


def _pause_s(response: HttpResponse | None, number: int) -> float:
    wanted = response.headers.get("retry-after", "") if response is not None else ""
    told = read_figure(wanted, 10**9)  # none, or a date: then our own pause does
    return min(max(float(told or 0), _FIRST_PAUSE_S * float(2**number)), _LONGEST_PAUSE_S)


def _text_of(response: HttpResponse) -> str:
    """The provider's own words, short: for people, and for telling one refusal from another."""
    text = response.body.decode("utf-8", "replace").strip()
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if isinstance(body, dict):
        # `detail` and `errors`: application/problem+json, as RFC 9457 has it and some clouds speak it.
        said = next((str(body[key]) for key in ("error", "detail", "message") if body.get(key)), text)
        said = f"{body['error_code']}: {said}" if body.get("error_code") else said
        each = body.get("errors")
        text = " ".join([said, *(str(error) for error in each)]) if isinstance(each, list) else said
    return text[:_NO_MORE_TEXT]
