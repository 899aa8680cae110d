"""The chat page of `homing serve`, and the routes that send its files.

    page.html         the parts of the page
    page.css          its layout; colors and controls are in homing.page_assets
    markdown.js       text of a model -> elements, block by block, so that a growing text is cheap to show
    server.js         requests to /v1: the token, streams, and a plain sentence for each error
    conversations.js  conversations in this browser's storage, their export as JSONL and their import
    settings.js       the drawer with sampling settings
    thread.js         one conversation on the screen
    side_list.js      the list of conversations
    page.js           the rest: login, models, composer, drawer, keys

The scripts are classic scripts that share their global names, and page.html loads them in this order. The files are the
same for everyone and need no token. The page loads nothing from other servers and writes no HTML.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from homing.page_assets import read_asset

__all__ = ["HEADERS", "SCRIPTS", "chat_routes"]

SCRIPTS = ("markdown.js", "server.js", "conversations.js", "settings.js", "thread.js", "side_list.js", "page.js")
HEADERS = {
    # Only the page's own files may run or be loaded: no inline code, no images, no other servers.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_KINDS = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}


def chat_routes() -> list[Route]:
    own = {name: files("homing.web.chat").joinpath(name).read_text(encoding="utf-8") for name in ("page.css", *SCRIPTS)}
    shared = {name: read_asset(name) for name in ("style.css", "shared.js")}
    html = files("homing.web.chat").joinpath("page.html").read_text(encoding="utf-8")
    return [
        Route("/", _file(html, "html")),
        *(Route(f"/chat/{name}", _file(text, name.rpartition(".")[2])) for name, text in {**shared, **own}.items()),
    ]


def _file(text: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        return Response(text, media_type=_KINDS[kind], headers=HEADERS)

    return send
