"""Routes of `homing serve`: a page for people, /v1 for programs.

    GET  /                     the chat page, whose files are below /chat; it takes the token from the URL fragment
    GET  /health               health check
    GET  /v1/models            a list of the models that are served; the first one is the default
    POST /v1/chat/completions  the answer to a conversation, if the model is a chat model
    POST /v1/completions       continuations of texts
    POST /v1/embeddings        the mean of the last hidden states of texts
    GET  /metrics              counters for Prometheus

Everything under /v1, and /metrics, requires the token. Many texts are generated at once; further ones wait in a queue.
When a client disconnects, the server stops generating its texts at the next token. A request has a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from homing.errors import DataError, UsageError
from homing.lm.data.chat.messages import Fault
from homing.lm.generate.json_constraint import TooExpensive
from homing.pip_command import pip_install
from homing.web import openai_requests, openai_responses
from homing.web.chat import chat_routes
from homing.web.generation import Generation, TimedOut
from homing.web.metrics import CONTENT_TYPE, Metrics
from homing.web.model_session import BadIds, GenerationSession, GivenUp, TooLong
from homing.web.openai_requests import Defaults, Refusal, Wanted
from homing.web.openai_responses import Answer, event_line
from homing.web.threaded_server import Server
from homing.web.worker import QueueFull, Worker

__all__ = ["REQUEST_TIMEOUT_S", "make_app", "serving"]

MAX_ROWS = 64  # number of texts of a model that are generated at once, if their keys and values fit into memory
NUM_WAITING = 256  # number of texts that may wait in addition, for each model
REQUEST_TIMEOUT_S = 600.0
MAX_BODY_BYTES = 4 * 1024 * 1024
_JSON_BYTES = 6  # maximum number of JSON bytes per byte of text, reached by an escaped control character
_ID_BYTES = 8  # maximum number of JSON bytes per token of a prompt that is given as ids: 123456, and a space
_ENVELOPE_BYTES = 256 * 1024  # maximum size of everything in a request except its text: names, roles and settings
_BODY_S = 60.0
_RETRY_S = "5"
_HERE = "GET /v1/models, POST /v1/chat/completions, /v1/completions and /v1/embeddings"
_ROUTES = {
    "/", "/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/embeddings",
}  # fmt: skip
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def serving(
    sessions: Sequence[GenerationSession],
    sock: socket.socket,
    *,
    token: str,
    hosts: list[str],
    defaults: Defaults,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Server]:
    """Serve the models until the `with` block ends. The socket comes from `threaded_server.listen`."""
    share = 1 / len(sessions)
    batches = [session.new_batch(MAX_ROWS, memory_share=share) for session in sessions]
    worker = Worker(batches, num_waiting=NUM_WAITING, clock=clock)
    limits = _Limits(request_timeout_s, clock)
    app = make_app(sessions, worker, token=token, hosts=hosts, defaults=defaults, limits=limits)
    server = Server(app, sock, worker.close, "homing-serve")
    try:
        yield server
    finally:
        server.end()


def make_app(
    sessions: Sequence[GenerationSession],
    worker: Worker,
    *,
    token: str,
    hosts: Sequence[str],
    defaults: Defaults | None = None,
    limits: _Limits | None = None,
) -> Starlette:
    """Return the app. It accepts only the host names in `hosts`, to protect against DNS rebinding.

    `worker` has a batch for each session, in the same order.
    """
    routes = _Routes(sessions, worker, token, defaults or Defaults(), limits or _Limits())
    return Starlette(
        routes=[
            *chat_routes(),
            Route("/health", routes.health),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.complete, methods=["POST"]),
            Route("/v1/embeddings", routes.embed, methods=["POST"]),
            Route("/metrics", routes.show_metrics),
        ],
        middleware=[
            Middleware(_Counted, metrics=routes.metrics),
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
        ],
        exception_handlers={
            Refusal: _refused,
            HTTPException: _no_route,
            ClientDisconnect: _client_left,
            Exception: _broken,
        },
    )


@dataclasses.dataclass(frozen=True)
class _Limits:
    """How long a request may take, by which clock."""

    request_timeout_s: float = REQUEST_TIMEOUT_S
    clock: Callable[[], float] = time.monotonic

    def deadline(self) -> float:
        return self.clock() + self.request_timeout_s


@dataclasses.dataclass(frozen=True)
class _Model:
    """One of the models: `lane` is its place in the worker."""

    session: GenerationSession
    lane: int


class _Routes:
    def __init__(
        self, sessions: Sequence[GenerationSession], worker: Worker, token: str, defaults: Defaults, limits: _Limits
    ) -> None:
        self._models = [_Model(session, lane) for lane, session in enumerate(sessions)]
        self._names = [session.name for session in sessions]
        self._worker, self._token, self._defaults, self._limits = worker, token.encode(), defaults, limits
        self._created = int(time.time())
        self.metrics = Metrics(worker, self._names)

    async def health(self, request: Request) -> Response:
        if not self._worker.is_working:  # one thread generates the texts of all models
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        self._check_token(request)
        return Response(self.metrics.document(), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        self._check_token(request)
        return JSONResponse({"object": "list", "data": [self._card(model.session) for model in self._models]})

    async def model(self, request: Request) -> Response:
        self._check_token(request)
        return JSONResponse(self._card(self._model(request.path_params["name"]).session))

    def _model(self, name: Any) -> _Model:
        return self._models[openai_requests.choose_model(name, self._names)]

    def _card(self, session: GenerationSession) -> dict[str, Any]:
        head = {"id": session.name, "object": "model", "created": self._created, "owned_by": "homing"}
        # The page needs more than OpenAI's format contains: chat or completion, context length, and default settings.
        sampling = self._defaults.sampling
        defaults = {"max_tokens": self._defaults.num_tokens, **dataclasses.asdict(sampling)}
        defaults = {name: value for name, value in defaults.items() if name not in ("seed", "logit_bias")}
        mode = "chat" if session.is_chat else "completion"
        checkpoint = {"phase": session.phase or None, "step": session.step}
        return {**head, "mode": mode, "context": session.context, **checkpoint, "defaults": defaults}

    async def chat(self, request: Request) -> Response:
        self._check_token(request)
        body = await self._read(request)
        model = self._model(body.get("model"))
        wanted = openai_requests.read_chat(body, self._defaults, knows_tools=model.session.knows_tools)
        if not model.session.is_chat:
            raise Refusal(
                "This is a base model: it continues a text and was not trained for chat. Use /v1/completions.",
                code="base_model",
            )
        return await self._answer(request, wanted, model)

    async def complete(self, request: Request) -> Response:
        self._check_token(request)
        body = await self._read(request, num_prompts=openai_requests.MOST_CHOICES)
        model = self._model(body.get("model"))
        return await self._answer(request, openai_requests.read_completion(body, self._defaults), model)

    async def embed(self, request: Request) -> Response:
        self._check_token(request)
        body = await self._read(request)
        model = self._model(body.get("model"))
        session, wanted = model.session, openai_requests.read_embeddings(body)
        deadline = self._limits.deadline()

        def is_in_time() -> bool:
            return self._limits.clock() < deadline

        found = []
        for prompt in wanted.inputs:
            if await request.is_disconnected():
                raise ClientDisconnect
            try:
                session.check_bytes([prompt] if isinstance(prompt, str) else [])
                ids = await asyncio.to_thread(session.begin_embedding, prompt, is_in_time)
                computed = self._worker.compute(partial(session.embed, ids), model.lane, deadline=deadline)
                found.append((await asyncio.wrap_future(computed), len(ids)))
            except (GivenUp, TimedOut):
                self.metrics.timed_out(session.name)
                raise _timed_out(f"after {len(found)} of its {len(wanted.inputs)} embeddings") from None
            except TooLong as exc:
                raise _refused_length(exc, "input", session) from None
            except BadIds as exc:
                raise Refusal(f"input has unknown token ids: {exc}.", param="input") from None
            except QueueFull:
                raise _queue_full() from None
            except asyncio.CancelledError:
                if self._worker.is_working:
                    raise
                raise _ending() from None
        return JSONResponse(openai_responses.embeddings_document(session.name, found, is_base64=wanted.is_base64))

    async def _read(self, request: Request, *, num_prompts: int = 1) -> dict[str, Any]:
        """Return the parsed body, or reject a body so large that its prompts, at most `num_prompts`, could not fit.

        Both the declared length and the received bytes are checked, because a chunked body does not declare its length.
        """
        # The body names the model, so the largest one counts here.
        prompt_bytes = max(
            max(_JSON_BYTES * model.session.max_prompt_bytes, _ID_BYTES * model.session.context)
            for model in self._models
        )
        most = min(MAX_BODY_BYTES, num_prompts * prompt_bytes + _ENVELOPE_BYTES)
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
        return openai_requests.read_body(bytes(raw))

    async def _answer(self, request: Request, wanted: Wanted, model: _Model) -> Response:
        started, session = time.monotonic(), model.session
        try:
            # The messages of a conversation share the context; each prompt has its own.
            for texts in [wanted.texts] if wanted.messages is not None else [[text] for text in wanted.texts]:
                session.check_bytes(texts)
        except TooLong as exc:
            raise _refused_length(exc, wanted.field, session) from None
        generation = Generation(
            partial(session.prepare, wanted),
            num_texts=wanted.num_texts,
            deadline=self._limits.deadline(),
            on_expired=partial(self.metrics.timed_out, session.name),
        )
        try:
            self._worker.submit(generation, model.lane)
        except QueueFull:
            raise _queue_full() from None
        try:
            await self._accepted(request, generation, wanted, session)
            answer = Answer(session.name, wanted, generation, session.tokenizer)
            response = _Stream(generation, answer) if wanted.is_stream else await _whole(request, generation, answer)
        except TimedOut:
            raise _timed_out() from None
        except Exception:  # such as a client that disconnected: what was generated for it counts too
            if generation.num_tokens:
                self._finished(generation, started, session.name)
            raise
        response.background = BackgroundTask(self._finished, generation, started, session.name)
        return response

    def _finished(self, generation: Generation, started: float, model: str) -> None:
        if generation.first_at is not None:
            self.metrics.began(model, started, generation.first_at)
        self.metrics.finished(
            model, started, num_prompt_tokens=generation.num_prompt_tokens, num_tokens=generation.num_tokens
        )

    async def _accepted(
        self, request: Request, generation: Generation, wanted: Wanted, session: GenerationSession
    ) -> None:
        """Wait until the worker has encoded the prompts, so that an error can still set the status of the response.

        If the client disconnects while waiting, its request leaves the queue.
        """
        async with _given_up_with(request.receive, generation):
            try:
                await generation.accepted()
            except TooLong as exc:
                raise _refused_length(exc, wanted.field, session) from None
            except BadIds as exc:
                raise Refusal(f"prompt has unknown token ids: {exc}.", param="prompt") from None
            except Fault as fault:
                raise Refusal(f"Invalid conversation for this model: {fault.text}.", param="messages") from fault
            except ModuleNotFoundError as exc:
                message = f"JSON answers need the extra `structured` on the server: {pip_install('structured')}"
                raise Refusal(message, param="response_format", code="unsupported_parameter") from exc
            except DataError as exc:  # raised if the chat template has exceeded its limits too often
                # Do not send status 500: clients would retry, and each retry would delay everyone else's requests.
                _log.warning("%s", exc)
                message = f"The chat template of this model cannot be used. {exc.why}"
                raise Refusal(message, param="messages", code="chat_template_failed") from exc
            except UsageError as exc:  # a JSON schema or a setting that only the model can judge
                raise Refusal(f"{exc.what} {exc.why}", param="response_format" if wanted.is_json else None) from exc
            except GivenUp:
                raise ClientDisconnect from None
            except TimedOut:
                raise
            except Exception as exc:
                raise _failed(exc) from exc

    def _check_token(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), self._token):
            message = "The token is missing or wrong: Authorization: Bearer TOKEN, as homing serve printed it."
            raise Refusal(message, status=401, code="invalid_api_key")


def _refused_length(exc: TooLong, field: str, session: GenerationSession) -> Refusal:
    number = f"at least {exc.num_tokens:,}" if exc.is_at_least else f"{exc.num_tokens:,}"
    message = (
        f"The prompt has {number} tokens; prompt and answer must fit in the context of {session.context:,} tokens."
    )
    # Send status 400, the default, because clients that truncate long prompts check for it.
    return Refusal(message, param=field, code="context_length_exceeded")


def _timed_out(when: str = "before its first token") -> Refusal:
    message = f"The request reached its time limit {when}. Try again when the server is less busy."
    return Refusal(message, status=503, code="timeout")


def _queue_full() -> Refusal:
    return Refusal("Too many requests are queued. Try again soon.", status=503, code="queue_full")


def _too_large(most: int) -> Refusal:
    return Refusal(f"The body exceeds {most:,} bytes; no prompt of that size fits the context.", status=413)


async def _whole(request: Request, generation: Generation, answer: Answer) -> Response:
    async with _given_up_with(request.receive, generation):
        try:
            events = [event async for event in generation]
        except TimedOut:
            raise
        except Exception as exc:
            raise _failed(exc) from exc
    if not generation.is_wanted:
        # The client disconnected, or the server is shutting down. Only in the latter case can the client see the error.
        raise _ending()
    # In a thread, because many texts with log-probabilities make a large document.
    return await asyncio.to_thread(lambda: JSONResponse(answer.whole(events)))


class _Stream(Response):
    """Sends server-sent events as text is generated. Unlike Starlette's own class, it always detects a disconnect."""

    def __init__(self, generation: Generation, answer: Answer) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._generation, self._answer = generation, answer
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _given_up_with(receive, self._generation):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for part in self._events():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        if self.background is not None:
            await self.background()

    async def _events(self) -> AsyncIterator[bytes]:
        for chunk in self._answer.first():
            yield event_line(chunk)
        try:
            async for event in self._generation:
                for chunk in self._answer.pieces(event):
                    yield event_line(chunk)
        except Exception as exc:
            refusal = _timed_out() if isinstance(exc, TimedOut) else _failed(exc)
            yield event_line(refusal.body)
            return
        if not self._generation.is_wanted:
            yield event_line(_ending().body)
            return
        for chunk in self._answer.last():
            yield event_line(chunk)
        yield event_line("[DONE]")


@contextlib.asynccontextmanager
async def _given_up_with(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Cancel the texts if the client disconnects before the response is complete, or if producing it fails."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.cancel()

    listener = asyncio.create_task(listen())
    is_whole = False
    try:
        yield
        is_whole = True
    finally:
        listener.cancel()
        if not is_whole:
            generation.cancel()


class _Counted:
    """Counts responses by route and status. Unknown paths count as one route, so that strangers cannot add routes."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                route = scope["path"] if scope["path"] in _ROUTES else "other"
                self._metrics.responded(route, message["status"])
            await send(message)

        await self._app(scope, receive, counted)


def _failed(exc: Exception) -> Refusal:
    if isinstance(exc, TooExpensive):
        # Do not send status 500: clients would retry, and the schema would cost as much again.
        return Refusal(str(exc), param="response_format", code="schema_too_complex")
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
