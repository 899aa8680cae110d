"""Routes of `homing serve`: a page for people, /v1 for programs.

    GET  /                     the page; it loads nothing external, and takes the token from the URL fragment
    GET  /health               health check
    GET  /v1/models            a list with the one model that is served
    POST /v1/chat/completions  the answer to a conversation, if the model is a chat model
    POST /v1/completions       the continuation of a text

Everything under /v1 requires the token. Requests wait in a short queue. When a client disconnects, the server stops
generating its text at the next token.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from homing.errors import DataError
from homing.lm.data.chat.messages import Fault
from homing.web import openai_format
from homing.web.model_session import GenerationSession, GivenUp, Spoken, TooLong
from homing.web.openai_format import Answer, Defaults, Refusal, Wanted, event
from homing.web.threaded_server import Server
from homing.web.worker import QueueFull, Text, Worker

__all__ = ["make_app", "serving"]

NUM_WAITING = 8  # number of requests that may wait while another one is being answered
MAX_BODY_BYTES = 4 * 1024 * 1024
_JSON_BYTES = 6  # maximum number of JSON bytes per byte of text, reached by an escaped control character
_ENVELOPE_BYTES = 256 * 1024  # maximum size of everything in a request except its text: names, roles and settings
_BODY_S = 60.0
_RETRY_S = "5"
_HERE = "GET /v1/models, POST /v1/chat/completions and POST /v1/completions"
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def serving(
    session: GenerationSession, sock: socket.socket, *, token: str, hosts: list[str], defaults: Defaults
) -> Iterator[Server]:
    """Serve the model until the `with` block ends. The socket comes from `threaded_server.listen`."""
    worker = Worker(num_waiting=NUM_WAITING)
    app = make_app(session, worker, token=token, hosts=hosts, defaults=defaults)
    server = Server(app, sock, worker.close, "homing-serve")
    try:
        yield server
    finally:
        server.end()


def make_app(
    session: GenerationSession, worker: Worker, *, token: str, hosts: Sequence[str], defaults: Defaults | None = None
) -> Starlette:
    """Return the app. It accepts only the host names in `hosts`, to protect against DNS rebinding."""
    routes = _Routes(session, worker, token, defaults or Defaults())
    return Starlette(
        routes=[
            Route("/", _page()),
            Route("/health", routes.health),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.complete, methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)],
        exception_handlers={
            Refusal: _refused,
            HTTPException: _no_route,
            ClientDisconnect: _client_left,
            Exception: _broken,
        },
    )


class _Routes:
    def __init__(self, session: GenerationSession, worker: Worker, token: str, defaults: Defaults) -> None:
        self._session, self._worker, self._token, self._defaults = session, worker, token.encode(), defaults
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        self._check_token(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_token(request)
        if (name := request.path_params["name"]) != self._session.name:
            message = f"Unknown model {name!r}; this server has {self._session.name!r}."
            raise Refusal(message, status=404, param="model", code="model_not_found")
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        mode = "chat" if self._session.is_chat else "completion"
        head = {"id": self._session.name, "object": "model", "created": self._created, "owned_by": "homing"}
        # The page needs more than OpenAI's format contains: chat or completion, context length, and default settings.
        given = self._defaults
        defaults = {"max_tokens": given.num_tokens, "temperature": given.temperature, "top_k": given.top_k}
        return {**head, "mode": mode, "context": self._session.context, "defaults": defaults}

    async def chat(self, request: Request) -> Response:
        self._check_token(request)
        wanted = openai_format.read_chat(await self._read(request), self._session.name, self._defaults)
        if not self._session.is_chat:
            raise Refusal(
                "This is a base model: it continues a text and was not trained for chat. Use /v1/completions.",
                code="base_model",
            )
        assert wanted.messages is not None, "a conversation has its turns"
        return await self._answer(request, wanted)

    async def complete(self, request: Request) -> Response:
        self._check_token(request)
        wanted = openai_format.read_completion(await self._read(request), self._session.name, self._defaults)
        return await self._answer(request, wanted)

    async def _read(self, request: Request) -> dict[str, Any]:
        """Return the parsed body, or reject a body so large that its prompt could not fit.

        Both the declared length and the received bytes are checked, because a chunked body does not declare its length.
        """
        most = min(MAX_BODY_BYTES, _JSON_BYTES * self._session.max_prompt_bytes + _ENVELOPE_BYTES)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise _too_large(most)
        raw = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    raw += part
                    if len(raw) > most:
                        raise _too_large(most)
        except TimeoutError:
            raise Refusal(f"The body did not arrive within {_BODY_S:g} s.", status=408) from None
        return openai_format.read_body(bytes(raw))

    async def _answer(self, request: Request, wanted: Wanted) -> Response:
        texts = [wanted.prompt] if wanted.messages is None else [message["content"] for message in wanted.messages]
        try:
            self._session.check_bytes(texts)
        except TooLong as exc:
            raise self._refused_length(exc, wanted) from None
        spoken, in_turns = Spoken(0), wanted.messages is not None

        def work(is_wanted: Callable[[], bool]) -> Iterator[str]:
            # Encode in the worker's thread, one prompt at a time, because encoding many long prompts at once would need
            # too much memory.
            if wanted.messages is None:
                ids = self._session.begin(wanted.prompt, is_wanted)
            else:
                ids = self._session.ask(wanted.messages, is_wanted)
            spoken.num_prompt_tokens = len(ids)
            yield ""
            yield from self._session.speak(ids, wanted.settings, spoken, in_turns=in_turns, is_wanted=is_wanted)

        try:
            text = self._worker.submit(work)
        except QueueFull:
            raise Refusal("Too many requests are queued. Try again soon.", status=503, code="queue_full") from None
        await self._accepted(request, text, wanted)
        answer = Answer(self._session.name, wanted, spoken)
        if wanted.is_stream:
            return _Stream(text, answer)
        return await _whole(request, text, answer)

    async def _accepted(self, request: Request, text: Text, wanted: Wanted) -> None:
        """Wait until the worker has encoded the prompt, so that an error can still set the status of the response.

        If the client disconnects while waiting, its request leaves the queue.
        """
        async with _given_up_with(request.receive, text):
            try:
                await text.accepted()
            except TooLong as exc:
                raise self._refused_length(exc, wanted) from None
            except Fault as fault:
                raise Refusal(f"Invalid conversation for this model: {fault.text}.", param="messages") from fault
            except DataError as exc:  # raised if the chat template has exceeded its limits too often
                # Do not send status 500: clients would retry, and each retry would delay everyone else's requests.
                _log.warning("%s", exc)
                message = f"The chat template of this model cannot be used. {exc.why}"
                raise Refusal(message, param="messages", code="chat_template_failed") from exc
            except GivenUp:
                raise ClientDisconnect from None
            except Exception as exc:
                raise _failed(exc) from exc

    def _refused_length(self, exc: TooLong, wanted: Wanted) -> Refusal:
        number = f"at least {exc.num_tokens:,}" if exc.is_at_least else f"{exc.num_tokens:,}"
        message = (
            f"The prompt has {number} tokens; prompt and answer must fit in the context of"
            f" {self._session.context:,} tokens."
        )
        field = "prompt" if wanted.messages is None else "messages"
        # Send status 400, the default, because clients that truncate long prompts check for it.
        return Refusal(message, param=field, code="context_length_exceeded")

    def _check_token(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), self._token):
            message = "The token is missing or wrong: Authorization: Bearer TOKEN, as homing serve printed it."
            raise Refusal(message, status=401, code="invalid_api_key")


def _too_large(most: int) -> Refusal:
    return Refusal(f"The body exceeds {most:,} bytes; no prompt of that size fits the context.", status=413)


async def _whole(request: Request, text: Text, answer: Answer) -> Response:
    async with _given_up_with(request.receive, text):
        try:
            said = "".join([piece async for piece in text])
        except Exception as exc:
            raise _failed(exc) from exc
    if not text.is_wanted:
        # The client disconnected, or the server is shutting down. Only in the latter case can the client see the error.
        raise _ending()
    return JSONResponse(answer.whole(said))


class _Stream(Response):
    """Sends server-sent events as text is generated. Unlike Starlette's own class, it always detects a disconnect."""

    def __init__(self, text: Text, answer: Answer) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._text, self._answer = text, answer
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _given_up_with(receive, self._text):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for part in self._events():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        for chunk in self._answer.first():
            yield event(chunk)
        try:
            async for piece in self._text:
                yield event(self._answer.piece(piece))
        except Exception as exc:
            yield event(_failed(exc).body)
            return
        if not self._text.is_wanted:
            yield event(_ending().body)
            return
        for chunk in self._answer.last():
            yield event(chunk)
        yield event("[DONE]")


@contextlib.asynccontextmanager
async def _given_up_with(receive: Receive, text: Text) -> AsyncIterator[None]:
    """Cancel the text if the client disconnects before the response is complete, or if producing the response fails."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        text.cancel()

    listener = asyncio.create_task(listen())
    is_whole = False
    try:
        yield
        is_whole = True
    finally:
        listener.cancel()
        if not is_whole:
            text.cancel()


def _failed(exc: Exception) -> Refusal:
    _log.error("generation failed", exc_info=exc)
    return Refusal(f"Generation failed: {type(exc).__name__}: {exc}", status=500)


def _ending() -> Refusal:
    return Refusal("The server is shutting down.", status=503, code="server_ends")


async def _refused(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, Refusal), "registered for it"
    headers = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": _RETRY_S}}.get(exc.status)
    return JSONResponse(exc.body, exc.status, headers)


async def _no_route(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException), "registered for it"
    # List the routes, because the client may have a wrong base_url or use a part of the API that is not supported.
    here = f" Available: {_HERE}." if exc.status_code == 404 else ""
    refusal = Refusal(f"{request.method} {request.url.path}: {exc.detail}.{here}", status=exc.status_code)
    return JSONResponse(refusal.body, exc.status_code, exc.headers)


async def _broken(request: Request, exc: Exception) -> Response:
    """Return the response to an internal error; its traceback is in the log."""
    return JSONResponse(Refusal(f"Internal server error: {type(exc).__name__}.", status=500).body, 500)


async def _client_left(request: Request, exc: Exception) -> Response:
    return Response(status_code=400)  # the client disconnected while sending the body, so nobody receives this response


def _page() -> Callable[[Request], Awaitable[Response]]:
    html = files("homing.web").joinpath("page.html").read_text(encoding="utf-8")
    # The policy allows only the page's own script and style, identified by hash, and requests to its own server.
    own = {tag: _sha256(re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)) for tag in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {own['script']}; style-src {own['style']}; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }

    async def page(request: Request) -> Response:
        return HTMLResponse(html, headers=headers)

    return page


def _sha256(found: list[str]) -> str:
    (text,) = found
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
