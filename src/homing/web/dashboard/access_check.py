"""Access control in front of all routes. The same checks apply to every path, so that no route can be forgotten.

    host      must be one of the server's names, sent once else 400 (DNS rebinding)
    origin    must be absent, or the page's own            else 403 (a page of another site)
    method    must be GET                                  else 405 (the server is read-only)
    token     required except for the page and its files   else 401

Every response, even an error, carries headers that restrict what a browser may do with it. No other origin may read a
response, and there are no cookies.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["OPEN", "AccessCheck"]

# Paths that need no token. The page and its files are the same for everyone and contain no information about any run.
OPEN = (
    "/", "/health", "/page.css", "/style.css", "/uplot.css", "/charts.js", "/compare.js", "/figures.js", "/one_run.js",
    "/page.js", "/runs_table.js", "/shared.js", "/uplot.js",
)  # fmt: skip

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Refused(NamedTuple):
    status: int
    message: str
    headers: dict[str, str]


class AccessCheck:
    def __init__(self, app: ASGIApp, *, token: str, hosts: Sequence[str]) -> None:
        self._app, self._token, self._hosts = app, token.encode(), frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # ignore websockets and lifespan events, which the dashboard does not use
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        refused = self._judge(scope["method"], scope["path"], Headers(scope=scope))
        if refused is None:
            await self._app(scope, receive, send_guarded)
        else:
            answer = JSONResponse({"error": {"message": refused.message}}, refused.status, refused.headers)
            await answer(scope, receive, send_guarded)

    def _judge(self, method: str, path: str, headers: Headers) -> Refused | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or _name_in(hosts[0]) not in self._hosts:
            return Refused(400, "Unknown host name.", {})
        is_open = path in OPEN
        if not _is_own(headers, hosts[0], is_open=is_open):
            return Refused(403, "Requests from other sites are not allowed.", {})
        if method != "GET":
            return Refused(405, "This server is read-only: use GET.", {"allow": "GET"})
        if not is_open and not self._has_token(headers):
            message = "The token is missing or wrong. Send Authorization: Bearer TOKEN, as homing dashboard printed it."
            return Refused(401, message, {"www-authenticate": "Bearer"})
        return None

    def _has_token(self, headers: Headers) -> bool:
        given = headers.getlist("authorization")
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        return scheme.lower() == "bearer" and secrets.compare_digest(token.strip().encode(), self._token)


def _name_in(host: str) -> str:
    """Return the host name without its port, which may differ behind a tunnel. An IPv6 address keeps its brackets."""
    name, colon, port = host.rpartition(":")
    if colon and port.isascii() and port.isdigit():
        host = name
    return host.lower()


def _is_own(headers: Headers, host: str, *, is_open: bool) -> bool:
    """Return False if, according to headers that browsers set, the request comes from another origin.

    Pages cannot change these headers. Other programs do not send them, so for those programs only the token matters.
    """
    if any(origin != f"http://{host}" for origin in headers.getlist("origin")):
        return False
    # Links on other sites may open the page itself, because the page still asks for the token.
    return is_open or all(site in ("same-origin", "none") for site in headers.getlist("sec-fetch-site"))
