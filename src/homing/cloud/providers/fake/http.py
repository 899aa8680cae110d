"""HTTP layer of the fake cloud: its paths, request bodies and responses."""

from __future__ import annotations

import json
from typing import Any

from homing.world import HttpRequest, HttpResponse

__all__ = ["Refusal", "answer", "body_of", "route_of"]


class Refusal(Exception):
    """A request that is understood and refused."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


def route_of(method: str, path: list[str]) -> str:
    """Return the name of the route; "" if there is no such path."""
    head, length = (path[0] if path else ""), len(path)
    if head in ("volumes", "keys") and (length == 1) == (method in ("GET", "POST")) and method in _OTHER_METHODS:
        return head
    tail = path[2] if length == 3 else ""
    return _PATHS.get((method, head, length, tail), "")


_OTHER_METHODS = ("GET", "POST", "DELETE")
_PATHS = {
    ("GET", "account", 1, ""): "account",
    ("GET", "offers", 1, ""): "offers",
    ("POST", "instances", 1, ""): "create",
    ("GET", "instances", 1, ""): "list",
    ("GET", "instances", 2, ""): "describe",
    ("DELETE", "instances", 2, ""): "destroy",
    ("PUT", "instances", 3, "guard"): "guard",
    ("GET", "instances", 3, "log"): "log",
    ("GET", "instances", 3, "notice"): "notice",
    ("GET", "notices", 2, ""): "notice",
}


def body_of(request: HttpRequest) -> dict[str, Any]:
    try:
        body = json.loads(request.body or b"{}")
    except ValueError as exc:
        raise Refusal(400, f"the body is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise Refusal(400, "the body is not an object")
    return body


def answer(status: int, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> HttpResponse:
    all_headers = {"content-type": "application/json", **(headers or {})}
    return HttpResponse(status, all_headers, b"" if body is None else json.dumps(body).encode())
