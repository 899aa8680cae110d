"""The formats of OpenAI's API: request body -> Wanted, generated text -> responses and chunks, refusals -> errors.

Fields that would change the answer are never silently ignored. If such a field is not supported, an error names it,
unless it has a value that changes nothing (`n: 1`, `top_p: 1`). Fields that never change an answer, such as `user`, are
accepted. A null value is the same as leaving the field out.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from homing.lm.data.chat.messages import Message
from homing.web.model_session import Settings, Spoken

__all__ = ["Answer", "Defaults", "Refusal", "Wanted", "event", "read_body", "read_chat", "read_completion"]

Body = dict[str, Any]

_KNOWN = {"model", "stream", "stream_options", "max_tokens", "temperature", "top_k", "seed", "stop"}
# Fields that never change the answer: they identify the request's sender and purpose, or control billing and storage.
_HARMLESS = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# Unsupported field -> the values that have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_COLDEST = 1e-6  # below this, use 0: sampling is already greedy, and dividing logits by a tiny number overflows
_MAX_STOPS = 4
_MAX_STOP_LETTERS = 1_000


class Refusal(Exception):
    """An error that is sent in the format that OpenAI's clients expect."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        # JSON may contain a field name with a lone surrogate, which could not be encoded in the response.
        message, param = _sendable(message), param and _sendable(param)
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Defaults:
    """The sampling settings for requests that do not specify their own."""

    num_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50


@dataclass(frozen=True)
class Wanted:
    settings: Settings
    is_stream: bool
    has_usage: bool  # whether to send a final chunk with the token counts
    messages: list[Message] | None = None  # the conversation, or None for a text completion
    prompt: str = ""  # the prompt of a text completion


def read_body(raw: bytes) -> Body:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise Refusal(f"The body is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise Refusal("The body must be a JSON object.")
    return {name: value for name, value in body.items() if value is not None}


def read_chat(body: Body, model: str, defaults: Defaults) -> Wanted:
    _check_fields(body, {"messages", "max_completion_tokens"})
    _check_model(body, model)
    if "max_tokens" in body and "max_completion_tokens" in body:
        raise Refusal("max_tokens and max_completion_tokens are the same setting: send only one.", param="max_tokens")
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise Refusal("messages must be a list with at least one message.", param="messages")
    messages = [_read_message(message, f"messages[{number}]") for number, message in enumerate(given)]
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    return Wanted(_settings(body, limit, defaults), *_stream(body), messages=messages)


def read_completion(body: Body, model: str, defaults: Defaults) -> Wanted:
    _check_fields(body, {"prompt"})
    _check_model(body, model)
    prompt = body.get("prompt", "")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise Refusal(
            "prompt must be one string or a list with one string: each request generates one text.", param="prompt"
        )
    return Wanted(_settings(body, "max_tokens", defaults), *_stream(body), prompt=_text(prompt, "prompt"))


def _check_fields(body: Body, own: set[str]) -> None:
    for name, value in body.items():
        if name in _KNOWN | own | _HARMLESS:
            continue
        neutral = _NEUTRAL.get(name)
        if neutral is None:
            raise Refusal(f"Unknown field: {name!r}.", param=name, code="unknown_parameter")
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
            said = " or ".join(json.dumps(each) for each in neutral)
            message = f"This server does not support {name}: leave it out, or send {said}."
            raise Refusal(message, param=name, code="unsupported_parameter")


def _check_model(body: Body, model: str) -> None:
    """Raise a 404 if the request names a model other than the one that is served. The name may be missing."""
    if body.get("model", model) != model:
        message = f"Unknown model {body['model']!r}; this server has {model!r}."
        raise Refusal(message, status=404, param="model", code="model_not_found")


def _read_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise Refusal(f"{where} must be an object with role and content.", param=where)
    others = sorted(name for name, value in message.items() if value and name not in ("role", "content"))
    if others:
        raise Refusal(f"{where} has {', '.join(others)}; this server supports only role and content.", param=where)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise Refusal(f"{where}.role must be one of {', '.join(_ROLES)}.", param=f"{where}.role")
    if isinstance(content, list):
        content = "".join(_read_part(part, f"{where}.content") for part in content)
    if not isinstance(content, str):
        raise Refusal(f"{where}.content must be a string.", param=f"{where}.content")
    return {"role": _ROLES[role], "content": _text(content, f"{where}.content")}


def _read_part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise Refusal(f"{where} may contain only parts of type text.", param=where)
    return text


def _settings(body: Body, limit: str, defaults: Defaults) -> Settings:
    return Settings(
        num_tokens=_whole(body, limit, defaults.num_tokens, 1, 2**31 - 1),
        temperature=_temperature(body, defaults.temperature),
        top_k=_whole(body, "top_k", defaults.top_k, 0, 2**31 - 1),
        seed=_whole(body, "seed", secrets.randbelow(2**31), -(2**63), 2**63 - 1),
        stop=_stops(body.get("stop", [])),
    )


def _whole(body: Body, name: str, default: int, least: int, most: int) -> int:
    value = body.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Refusal(f"{name} must be a whole number from {least} to {most}.", param=name)
    return value


def _temperature(body: Body, default: float) -> float:
    value = body.get("temperature", default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 100:
        raise Refusal("temperature must be a number from 0 to 100.", param="temperature")
    return 0.0 if value < _COLDEST else float(value)


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    is_good = isinstance(stops, list) and all(
        isinstance(stop, str) and 0 < len(stop) <= _MAX_STOP_LETTERS for stop in stops
    )
    if not is_good or len(stops) > _MAX_STOPS:
        raise Refusal(
            f"stop must be a string or a list of at most {_MAX_STOPS} strings, none of them empty.", param="stop"
        )
    return tuple(_text(stop, "stop") for stop in stops)


def _stream(body: Body) -> tuple[bool, bool]:
    is_stream, options = body.get("stream", False), body.get("stream_options", {})
    if not isinstance(is_stream, bool):
        raise Refusal("stream must be true or false.", param="stream")
    if not isinstance(options, dict) or (options and not is_stream):
        raise Refusal("stream_options must be an object, and needs stream: true.", param="stream_options")
    for name, value in options.items():
        if not isinstance(value, bool) or (name != "include_usage" and value):
            raise Refusal(
                "stream_options may contain only include_usage: true or false.", param=f"stream_options.{name}"
            )
    return is_stream, options.get("include_usage", False)


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as exc:  # a JSON string may contain a lone surrogate
        raise Refusal(f"{where} is not valid Unicode: {exc.reason}.", param=where) from exc
    return text


class Answer:
    """Formats the response to one request as its route requires, either complete or in chunks."""

    def __init__(self, model: str, wanted: Wanted, spoken: Spoken) -> None:
        self._is_chat, self._has_usage, self._spoken = wanted.messages is not None, wanted.has_usage, spoken
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    @property
    def _ending(self) -> str:
        return "stop" if self._spoken.is_ended else "length"

    def usage(self) -> dict[str, int]:
        read, made = self._spoken.num_prompt_tokens, self._spoken.num_tokens
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    def whole(self, text: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self._ending}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        name = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": name, "choices": [choice], "usage": self.usage()}

    def first(self) -> Iterator[dict[str, Any]]:
        if self._is_chat:
            yield self._chunk({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text}, None)

    def last(self) -> Iterator[dict[str, Any]]:
        yield self._chunk({}, self._ending)
        if self._has_usage:
            yield {**self._chunk({}, None), "choices": [], "usage": self.usage()}

    def _chunk(self, delta: dict[str, str], ending: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": ending}
        choice |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage = {"usage": None} if self._has_usage else {}
        return {**self._head, "object": name, "choices": [choice], **usage}


def event(document: dict[str, Any] | str) -> bytes:
    """Return one server-sent event.

    ASCII JSON contains neither line breaks nor characters that clients treat as line breaks, so one line is one event.
    """
    data = document if isinstance(document, str) else json.dumps(document)
    return f"data: {data}\n\n".encode()
