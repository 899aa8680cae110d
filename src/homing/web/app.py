"""The routes: the page for people, /v1 for programs.

    GET  /                     the page; it asks for nothing outside, and has the token from the address's fragment
    GET  /health               whether it lives
    GET  /v1/models            the one model
    POST /v1/chat/completions  turns, for a model that learned them
    POST /v1/completions       a text to go on from

Everything under /v1 wants the token. A request waits in a short queue; who hangs up is forgotten at the next token.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
import secrets
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
from homing.lm.chat.messages import Fault
from homing.web import openai
from homing.web.openai import Answer, Defaults, Refusal, Wanted, event
from homing.web.voice import GivenUp, Spoken, TooLong, Voice
from homing.web.worker import QueueFull, Text, Worker

__all__ = ["make_app"]

MAX_BODY_BYTES = 4 * 1024 * 1024
_JSON_BYTES = 6  # at most, for one byte of text: a control character is written as an escape
_BESIDE_BYTES = 256 * 1024  # for the names, roles and settings around the text
_BODY_S = 60.0
_RETRY_S = "5"
_HERE = "GET /v1/models, POST /v1/chat/completions and POST /v1/completions"
_log = logging.getLogger(__name__)


def make_app(
    voice: Voice, worker: Worker, *, token: str, hosts: Sequence[str], defaults: Defaults | None = None
) -> Starlette:
    """`hosts`: the names under which it may be asked for, against pages of others that turn their own name to us."""
    routes = _Routes(voice, worker, token, defaults or Defaults())
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
        exception_handlers={Refusal: _refused, HTTPException: _no_route, ClientDisconnect: _nobody, Exception: _broken},
    )


class _Routes:
    def __init__(self, voice: Voice, worker: Worker, token: str, defaults: Defaults) -> None:
        self._voice, self._worker, self._token, self._defaults = voice, worker, token.encode(), defaults
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        self._check_token(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_token(request)
        if (name := request.path_params["name"]) != self._voice.name:
            message = f"There is no model {name!r} here; this server has {self._voice.name!r}."
            raise Refusal(message, status=404, param="model", code="model_not_found")
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        mode = "chat" if self._voice.is_chat else "completion"
        head = {"id": self._voice.name, "object": "model", "created": self._created, "owned_by": "homing"}
        # Beyond OpenAI's shape, for the page: how it is asked, how much it reads, what it does where nothing is said.
        given = self._defaults
        defaults = {"max_tokens": given.num_tokens, "temperature": given.temperature, "top_k": given.top_k}
        return {**head, "mode": mode, "context": self._voice.context, "defaults": defaults}

    async def chat(self, request: Request) -> Response:
        self._check_token(request)
        wanted = openai.read_chat(await self._read(request), self._voice.name, self._defaults)
        if not self._voice.is_chat:
            raise Refusal(
                "This is a base model: it goes on with a text, and was never taught to answer in turns."
                " Use /v1/completions.",
                code="base_model",
            )
        assert wanted.messages is not None, "a conversation has its turns"
        return await self._answer(request, wanted)

    async def complete(self, request: Request) -> Response:
        self._check_token(request)
        wanted = openai.read_completion(await self._read(request), self._voice.name, self._defaults)
        return await self._answer(request, wanted)

    async def _read(self, request: Request) -> dict[str, Any]:
        """The body, refused by its size alone where no prompt in it could fit: what it says is told, and what comes is
        counted, because a body in chunks says nothing."""
        most = min(MAX_BODY_BYTES, _JSON_BYTES * self._voice.max_prompt_bytes + _BESIDE_BYTES)
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told) > most:
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
        return openai.read_body(bytes(raw))

    async def _answer(self, request: Request, wanted: Wanted) -> Response:
        texts = [wanted.prompt] if wanted.messages is None else [message["content"] for message in wanted.messages]
        try:
            self._voice.check_bytes(texts)
        except TooLong as exc:
            raise self._refused_length(exc, wanted) from None
        spoken, in_turns = Spoken(0), wanted.messages is not None

        def work(is_wanted: Callable[[], bool]) -> Iterator[str]:
            # In the worker's thread, one at a time: twenty long prompts at once would take the memory of all of them.
            if wanted.messages is None:
                ids = self._voice.begin(wanted.prompt, is_wanted)
            else:
                ids = self._voice.ask(wanted.messages, is_wanted)
            spoken.num_prompt_tokens = len(ids)
            yield ""
            yield from self._voice.speak(ids, wanted.settings, spoken, in_turns=in_turns, is_wanted=is_wanted)

        try:
            text = self._worker.submit(work)
        except QueueFull:
            raise Refusal("Too many texts wait already. Ask again soon.", status=503, code="queue_full") from None
        await self._accepted(request, text, wanted)
        answer = Answer(self._voice.name, wanted, spoken)
        if wanted.is_stream:
            return _Stream(text, answer)
        return await _whole(request, text, answer)

    async def _accepted(self, request: Request, text: Text, wanted: Wanted) -> None:
        """Until the worker has encoded it, so that a refusal still has its own status. A client that hangs up while it
        waits in the queue is forgotten there."""
        async with _given_up_with(request.receive, text):
            try:
                await text.accepted()
            except TooLong as exc:
                raise self._refused_length(exc, wanted) from None
            except Fault as fault:
                raise Refusal(f"The model cannot be asked this: {fault.text}.", param="messages") from fault
            except DataError as exc:  # the template, which exceeded its bounds too often
                # Not 500: clients ask again after that, and each time it would hold up everyone else's texts.
                _log.warning("%s", exc)
                message = f"The model cannot be asked this: its chat template cannot be used. {exc.why}"
                raise Refusal(message, param="messages", code="chat_template_failed") from exc
            except GivenUp:
                raise ClientDisconnect from None
            except Exception as exc:
                raise _failed(exc) from exc

    def _refused_length(self, exc: TooLong, wanted: Wanted) -> Refusal:
        number = f"at least {exc.num_tokens:,}" if exc.is_at_least else f"{exc.num_tokens:,}"
        message = f"The prompt has {number} tokens; this model reads {self._voice.context:,}, answer included."
        field = "prompt" if wanted.messages is None else "messages"
        return Refusal(message, param=field, code="context_length_exceeded")  # 400, as clients that cut look for

    def _check_token(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), self._token):
            message = "The token is missing or wrong: Authorization: Bearer TOKEN, as homing serve printed it."
            raise Refusal(message, status=401, code="invalid_api_key")


def _too_large(most: int) -> Refusal:
    return Refusal(f"The body has more than {most:,} bytes, and no prompt that large can fit.", status=413)


async def _whole(request: Request, text: Text, answer: Answer) -> Response:
    async with _given_up_with(request.receive, text):
        try:
            said = "".join([piece async for piece in text])
        except Exception as exc:
            raise _failed(exc) from exc
    if not text.is_wanted:  # it hung up, or the server ends: then this is read
        raise _ending()
    return JSONResponse(answer.whole(said))


class _Stream(Response):
    """Server-sent events as they come. Not Starlette's: that one listens for a hang-up only where it is idle."""

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
    """While the answer is made somebody listens for the hang-up; however it ends, the text is not computed further."""

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
    _log.error("a text failed", exc_info=exc)
    return Refusal(f"The text failed: {type(exc).__name__}: {exc}", status=500)


def _ending() -> Refusal:
    return Refusal("The server ends.", status=503, code="server_ends")


async def _refused(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, Refusal), "registered for it"
    headers = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": _RETRY_S}}.get(exc.status)
    return JSONResponse(exc.body, exc.status, headers)


async def _no_route(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException), "registered for it"
    # A client with another base_url, or with a part of the API that is not here, learns what is.
    here = f" Here are {_HERE}." if exc.status_code == 404 else ""
    refusal = Refusal(f"{request.method} {request.url.path}: {exc.detail}.{here}", status=exc.status_code)
    return JSONResponse(refusal.body, exc.status_code, exc.headers)


async def _broken(request: Request, exc: Exception) -> Response:
    """Our own mistake; its trace is in the log."""
    return JSONResponse(Refusal(f"The server made a mistake: {type(exc).__name__}.", status=500).body, 500)


async def _nobody(request: Request, exc: Exception) -> Response:
    return Response(status_code=400)  # who would read it has left in the middle of the body


def _page() -> Callable[[Request], Awaitable[Response]]:
    html = files("homing.web").joinpath("page.html").read_text(encoding="utf-8")
    # Its own script and style by their hashes, its own server to speak to, and nothing else from anywhere.
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
