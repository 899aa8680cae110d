"""Routes of the dashboard, all read-only.

    GET /                        the page; its files are in _FILES
    GET /health                  health check
    GET /api/runs                all runs and what is billing now; /api/runs/live sends the same as a stream of events
    GET /api/runs/RUN            one run as it is now; /api/runs/RUN/live sends the same as a stream of events
    GET /api/compare/live?run=RUN&run=RUN    the curves and settings of several runs, as one stream of events

One stream for all compared runs, because a browser opens only six connections to a server.

A stream first sends everything, then only what is new. If there is nothing new, it occasionally sends a comment, so
that the browser and the server each notice if the other is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.resources import files
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from homing.web.dashboard.access_check import AccessCheck
from homing.web.dashboard.section_feed import Feed, Place

__all__ = ["NoSuchRun", "Source", "make_app"]

_LOOK_S = 0.25  # how often a stream checks its feed for new data, in seconds
_FIRST_S = 30.0  # maximum time to wait for the first data of a feed
_FIRST_LOOK_S = 0.05
_QUIET_S = 10.0  # seconds without new data before a stream sends a comment; page.js reconnects after three times this
_MOST_COMPARED = 20  # as in runs_table.js
_COMPARED = ("head", "config", "point_columns", "points", "problems")  # sections of a run that are compared
_RUNS, _RUN = "homing.dashboard-runs/2", "homing.dashboard-run/2"  # schemas
_CSS, _JS = "text/css; charset=utf-8", "text/javascript; charset=utf-8"
_FILES = {
    "/": ("homing.web.dashboard", "page.html", "text/html; charset=utf-8"),
    **{f"/{name}": ("homing.web.dashboard", name, _CSS) for name in ("page.css", "uplot.css")},
    **{
        f"/{name}": ("homing.web.dashboard", name, _JS)
        for name in ("charts.js", "compare.js", "figures.js", "one_run.js", "page.js", "runs_table.js", "uplot.js")
    },
    "/style.css": ("homing.page_assets", "style.css", _CSS),
    "/shared.js": ("homing.page_assets", "shared.js", _JS),
}


class NoSuchRun(LookupError):
    pass


class Source(Protocol):
    """Provides the feeds. Its methods may be called from any thread."""

    @property
    def is_ending(self) -> bool: ...  # True if the dashboard is shutting down and streams must end
    def all_runs(self) -> AbstractContextManager[Feed]: ...  # the feed stays open until the `with` block ends
    def one_run(self, run_id: str) -> AbstractContextManager[Feed]: ...  # raises NoSuchRun


def make_app(source: Source, *, token: str, hosts: Sequence[str]) -> ASGIApp:
    routes = _Routes(source)
    app = Starlette(
        routes=[
            *(Route(path, _file(package, name, kind)) for path, (package, name, kind) in _FILES.items()),
            Route("/health", routes.health),
            Route("/api/runs", routes.runs),
            Route("/api/runs/live", routes.runs_live),
            Route("/api/runs/{run}", routes.run),
            Route("/api/runs/{run}/live", routes.run_live),
            Route("/api/compare/live", routes.compare_live),
        ],
        exception_handlers={HTTPException: _no_route, NoSuchRun: _no_run, Exception: _broken},
    )
    app.router.redirect_slashes = False  # do not redirect paths with a trailing slash
    # Make the access check the outermost layer, so that even internal errors get its headers.
    return AccessCheck(app, token=token, hosts=hosts)


class _Routes:
    def __init__(self, source: Source) -> None:
        self._source = source

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def runs(self, request: Request) -> Response:
        return await self._now(self._source.all_runs(), _RUNS)

    async def run(self, request: Request) -> Response:
        return await self._now(await self._one_run(request.path_params["run"]), _RUN)

    async def runs_live(self, request: Request) -> Response:
        return _Live(self._source, {"": self._source.all_runs()})

    async def run_live(self, request: Request) -> Response:
        return _Live(self._source, {"": await self._one_run(request.path_params["run"])})

    async def compare_live(self, request: Request) -> Response:
        asked = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 1 <= len(asked) <= _MOST_COMPARED:
            return _error(f"A comparison can show 1 to {_MOST_COMPARED} runs, but {len(asked)} were selected.", 400)
        return _Live(self._source, {run: await self._one_run(run) for run in asked}, _COMPARED)

    async def _one_run(self, run_id: str) -> AbstractContextManager[Feed]:
        # Find the run in a thread, because this may require disk access.
        return await asyncio.to_thread(self._source.one_run, run_id)

    async def _now(self, opened: AbstractContextManager[Feed], schema: str) -> Response:
        """Respond once the feed has its first data, because before that it would look empty.

        Poll instead of blocking a thread, because a shutdown would have to wait for that thread.
        """
        deadline = asyncio.get_running_loop().time() + _FIRST_S
        with opened as feed:
            while not feed.is_reported.is_set():
                if self._source.is_ending:
                    return _error("The dashboard is shutting down.", 503)
                if asyncio.get_running_loop().time() >= deadline:
                    return _error(f"No data within {_FIRST_S:g} s. Reload, or run: homing doctor", 504)
                await asyncio.sleep(_FIRST_LOOK_S)
            return JSONResponse({"schema": schema, **feed.whole()})


class _Live(Response):
    """Sends one server-sent event for each new part of the feeds. The stream polls its feeds, so it needs no thread.

    With several feeds, each part names its run.
    """

    def __init__(
        self, source: Source, opened: Mapping[str, AbstractContextManager[Feed]], sections: Sequence[str] = ()
    ) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._source, self._opened, self._sections = source, opened, frozenset(sections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as stack:
            feeds = {run: stack.enter_context(each) for run, each in self._opened.items()}
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with _listening(receive) as has_left:
                async for part in self._parts(feeds, has_left):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self, feeds: Mapping[str, Feed], has_left: asyncio.Event) -> AsyncIterator[bytes]:
        places: dict[str, Place] = {}
        clock = asyncio.get_running_loop().time
        quiet_since = clock()
        yield b": homing\n\n"
        while not self._source.is_ending and not has_left.is_set():
            is_quiet = True
            for run, feed in feeds.items():
                places[run], parts = feed.since(places.get(run, {}))
                for part in parts:
                    if not self._sections or part["section"] in self._sections:
                        is_quiet = False
                        said = {"run": run, **part} if run else part
                        yield f"data: {json.dumps(said, ensure_ascii=True)}\n\n".encode()
            if not is_quiet:
                quiet_since = clock()
            elif clock() - quiet_since >= _QUIET_S:
                yield b": nothing new\n\n"
                quiet_since = clock()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(has_left.wait(), _LOOK_S)


@contextlib.asynccontextmanager
async def _listening(receive: Receive) -> AsyncIterator[asyncio.Event]:
    has_left = asyncio.Event()

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left.set()

    listener = asyncio.create_task(listen())
    try:
        yield has_left
    finally:
        listener.cancel()


def _file(package: str, name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler for one file. Read the file now, so that no request can select another file."""
    content = files(package).joinpath(name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, headers={"content-type": kind})

    return answer


def _error(message: str, status: int) -> JSONResponse:
    body: dict[str, Any] = {"error": {"message": message}}
    return JSONResponse(body, status)


async def _no_run(request: Request, exc: Exception) -> Response:
    return _error("No such run. List all runs: homing runs", 404)


async def _no_route(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException), "registered for it"
    return _error(f"{exc.detail}.", exc.status_code)


async def _broken(request: Request, exc: Exception) -> Response:
    """Return the response to an internal error; its traceback is in the log."""
    return _error(f"Internal server error: {type(exc).__name__}.", 500)
