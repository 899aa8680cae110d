"""Reads requests in OpenAI's format: body -> Wanted, or a Refusal that names the field.

Fields that would change the answer are never silently ignored. If such a field is not supported, an error names it,
unless it has a value that changes nothing (`suffix: ""`). Fields that never change an answer, such as `user`, are
accepted. A null value is the same as leaving the field out. `top_k`, `min_p` and `repetition_penalty` are not part of
OpenAI's API, but many clients send them. `skip_special_tokens` is vLLM's name for leaving special tokens out of the
text; here they are left in by default, as in `homing generate`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from homing.lm.data.chat.messages import Message
from homing.sampling_settings import COLDEST, SamplingSettings

__all__ = [
    "Defaults",
    "EmbeddingsWanted",
    "Refusal",
    "Wanted",
    "choose_model",
    "read_body",
    "read_chat",
    "read_completion",
    "read_embeddings",
]

Body = dict[str, Any]

MOST_LOGPROBS = 20
MOST_CHOICES = 128  # texts per request: prompts times n
MOST_INPUTS = 2048  # texts per request for embeddings, as in OpenAI's API
MOST_SCORES = 2**20  # log-probabilities per request: texts times tokens times alternatives
MOST_BIASES = 1024
_SAMPLING = {
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "seed",
}  # fmt: skip
_KNOWN = {
    "model", "stream", "stream_options", "max_tokens", "stop", "n", "logprobs", "skip_special_tokens", *_SAMPLING,
}  # fmt: skip
# Fields that never change the answer: they identify the request's sender and purpose, or control billing and storage.
_HARMLESS = {
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store",
}  # fmt: skip
# Unsupported field -> the values that have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "use_beam_search": (False,),
    "num_beams": (1,),
    "dimensions": (),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 1_000


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
    """The settings for requests that do not specify their own."""

    num_tokens: int = 200
    sampling: SamplingSettings = field(default_factory=SamplingSettings)


@dataclass(frozen=True)
class Wanted:
    """A request for one or more texts."""

    num_tokens: int
    sampling: SamplingSettings
    stop: tuple[str, ...] = ()
    hides_specials: bool = False  # whether special tokens are left out of the text
    num_choices: int = 1  # texts per prompt
    num_logprobs: int | None = None  # alternatives to report with each token; None: no log-probabilities
    is_stream: bool = False
    has_usage: bool = False  # whether to send a final chunk with the token counts
    messages: list[Message] | None = None  # the conversation, or None for text completions
    tools: list[dict[str, Any]] | None = None
    prompts: tuple[str | list[int], ...] = ()  # the prompts of text completions
    is_echoed: bool = False  # whether the texts begin with their prompts
    is_json: bool = False  # whether the answer must be JSON
    json_schema: dict[str, Any] | None = None

    @property
    def num_texts(self) -> int:
        return self.num_choices * (1 if self.messages is not None else len(self.prompts))

    @property
    def field(self) -> str:
        """The field of the request with its text."""
        return "prompt" if self.messages is None else "messages"

    @property
    def texts(self) -> list[str]:
        """All texts in the request that have to be encoded."""
        if self.messages is None:
            return [prompt for prompt in self.prompts if isinstance(prompt, str)]
        return [str(message["content"]) for message in self.messages]


@dataclass(frozen=True)
class EmbeddingsWanted:
    inputs: tuple[str | list[int], ...]
    is_base64: bool


def read_body(raw: bytes) -> Body:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise Refusal(f"The body is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise Refusal("The body must be a JSON object.")
    return {name: value for name, value in body.items() if value is not None}


def choose_model(name: Any, names: Sequence[str]) -> int:
    """Return the place of the model with this name; None stands for the first. Raise a 404 that lists the names."""
    if name is None:
        return 0
    if name not in names:
        has = ", ".join(map(repr, names))
        message = f"Unknown model {name!r}; this server has {has}."
        raise Refusal(message, status=404, param="model", code="model_not_found")
    return list(names).index(name)


# -- the three kinds of request ----------------------------------------------------------------------------------------


def read_chat(body: Body, defaults: Defaults, *, knows_tools: bool = False) -> Wanted:
    own = {"messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "response_format"}
    _check_fields(body, own)
    if "max_tokens" in body and "max_completion_tokens" in body:
        raise Refusal("max_tokens and max_completion_tokens are the same setting: send only one.", param="max_tokens")
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise Refusal("messages must be a list with at least one message.", param="messages")
    messages = [_read_message(message, f"messages[{number}]") for number, message in enumerate(given)]
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    has_logprobs = _true_or_false(body, "logprobs")
    num_top = _whole(body, "top_logprobs", 0, 0, MOST_LOGPROBS)
    if num_top and not has_logprobs:
        raise Refusal("top_logprobs needs logprobs: true.", param="top_logprobs")
    is_json, schema = _response_format(body.get("response_format", {"type": "text"}))
    return replace(
        _common(body, limit, defaults),
        messages=messages,
        num_logprobs=num_top if has_logprobs else None,
        tools=_tools(body, knows_tools=knows_tools),
        is_json=is_json,
        json_schema=schema,
    )


def read_completion(body: Body, defaults: Defaults) -> Wanted:
    _check_fields(body, {"prompt", "echo", "best_of"})
    is_echoed = _true_or_false(body, "echo")
    wanted = replace(
        _common(body, "max_tokens", defaults, least=0 if is_echoed else 1),
        prompts=_prompts(body.get("prompt", ""), "prompt"),
        is_echoed=is_echoed,
        num_logprobs=_whole(body, "logprobs", 0, 0, MOST_LOGPROBS) if _asks_logprobs(body) else None,
    )
    if _whole(body, "best_of", wanted.num_choices, 1, MOST_CHOICES) != wanted.num_choices:
        raise Refusal(
            "This server returns every text that it generates: leave best_of out, or send n.", param="best_of"
        )
    if wanted.num_texts > MOST_CHOICES:
        raise Refusal(
            f"The request asks for {wanted.num_texts} texts; at most {MOST_CHOICES} are allowed.", param="prompt"
        )
    return wanted


def read_embeddings(body: Body) -> EmbeddingsWanted:
    for name in body:
        if name not in {"model", "input", "encoding_format", *_HARMLESS}:
            raise Refusal(f"This server does not support {name}.", param=name, code="unsupported_parameter")
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise Refusal("encoding_format must be float or base64.", param="encoding_format")
    if "input" not in body:
        raise Refusal("input is missing.", param="input")
    inputs = _prompts(body["input"], "input")
    if len(inputs) > MOST_INPUTS:
        raise Refusal(f"input has {len(inputs):,} texts; at most {MOST_INPUTS:,} are allowed.", param="input")
    return EmbeddingsWanted(inputs, encoding == "base64")


def _common(body: Body, limit: str, defaults: Defaults, *, least: int = 1) -> Wanted:
    is_stream, has_usage = _stream(body)
    return Wanted(
        num_tokens=_whole(body, limit, defaults.num_tokens, least, 2**31 - 1),
        sampling=_sampling(body, defaults.sampling),
        stop=_stops(body.get("stop", [])),
        hides_specials=_true_or_false(body, "skip_special_tokens"),
        num_choices=_whole(body, "n", 1, 1, MOST_CHOICES),
        is_stream=is_stream,
        has_usage=has_usage,
    )


# -- fields ------------------------------------------------------------------------------------------------------------


def _check_fields(body: Body, own: set[str]) -> None:
    for name, value in body.items():
        if name in _KNOWN | own | _HARMLESS:
            continue
        if name == "timeout":
            raise Refusal(
                "The time limit of a request is an option of your client, or of the server: --request-timeout.",
                param=name, code="unsupported_parameter",
            )  # fmt: skip
        neutral = _NEUTRAL.get(name)
        if neutral is None:
            raise Refusal(f"Unknown field: {name!r}.", param=name, code="unknown_parameter")
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
            accepted = " or ".join(json.dumps(each) for each in neutral)
            message = f"This server does not support {name}: leave it out{f', or send {accepted}' if accepted else ''}."
            raise Refusal(message, param=name, code="unsupported_parameter")


def _sampling(body: Body, defaults: SamplingSettings) -> SamplingSettings:
    temperature = _number(body, "temperature", defaults.temperature, 0, 100)
    return SamplingSettings(
        temperature=0.0 if temperature < COLDEST else temperature,
        top_k=_top_k(body, defaults.top_k),
        top_p=_number(body, "top_p", defaults.top_p, 0, 1, is_open=True),
        min_p=_number(body, "min_p", defaults.min_p, 0, 1),
        repetition_penalty=_number(body, "repetition_penalty", defaults.repetition_penalty, 0, 100, is_open=True),
        presence_penalty=_number(body, "presence_penalty", defaults.presence_penalty, -2, 2),
        frequency_penalty=_number(body, "frequency_penalty", defaults.frequency_penalty, -2, 2),
        logit_bias=_bias(body.get("logit_bias", {})) or defaults.logit_bias,
        seed=_whole(body, "seed", secrets.randbelow(2**31), -(2**63), 2**63 - 1),
    )


def _top_k(body: Body, default: int) -> int:
    # -1 means no limit in vLLM and llama.cpp.
    return max(0, _whole(body, "top_k", default, -1, 2**31 - 1))


def _bias(given: Any) -> dict[int, float]:
    if not isinstance(given, dict):
        raise Refusal("logit_bias must be an object: token id -> number from -100 to 100.", param="logit_bias")
    if len(given) > MOST_BIASES:
        raise Refusal(f"logit_bias may have at most {MOST_BIASES:,} token ids.", param="logit_bias")
    found = {}
    for name, value in given.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and -100 <= value <= 100
        if not (name.isascii() and name.isdecimal() and len(name) < 10 and is_number):
            raise Refusal("logit_bias must map token ids to numbers from -100 to 100.", param="logit_bias")
        found[int(name)] = float(value)
    return found


def _whole(body: Body, name: str, default: int, least: int, most: int) -> int:
    value = body.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Refusal(f"{name} must be a whole number from {least} to {most}.", param=name)
    return value


def _number(body: Body, name: str, default: float, least: float, most: float, *, is_open: bool = False) -> float:
    """Return a number; `is_open` excludes the lower bound."""
    value = body.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or (is_open and value == least):
        span = f"more than {least:g} and at most {most:g}" if is_open else f"from {least:g} to {most:g}"
        raise Refusal(f"{name} must be a number {span}.", param=name)
    return float(value)


def _true_or_false(body: Body, name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise Refusal(f"{name} must be true or false.", param=name)
    return value


def _asks_logprobs(body: Body) -> bool:
    """Whether a text completion asks for log-probabilities: their number of alternatives, which may be 0."""
    value = body.get("logprobs", False)
    return value is not False


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    is_good = isinstance(stops, list) and all(
        isinstance(stop, str) and 0 < len(stop) <= _MAX_STOP_CHARACTERS for stop in stops
    )
    if not is_good or len(stops) > _MAX_STOPS:
        raise Refusal(
            f"stop must be a string or a list of at most {_MAX_STOPS} strings, none of them empty.", param="stop"
        )
    return tuple(_text(stop, "stop") for stop in stops)


def _stream(body: Body) -> tuple[bool, bool]:
    is_stream, options = _true_or_false(body, "stream"), body.get("stream_options", {})
    if not isinstance(options, dict) or (options and not is_stream):
        raise Refusal("stream_options must be an object, and needs stream: true.", param="stream_options")
    for name, value in options.items():
        if not isinstance(value, bool) or (name not in ("include_usage", "include_obfuscation") and value):
            raise Refusal(
                "stream_options may contain only include_usage: true or false.", param=f"stream_options.{name}"
            )
    return is_stream, options.get("include_usage", False)


def _prompts(given: Any, where: str) -> tuple[str | list[int], ...]:
    """Return prompts given as a string, a list of ids, or a list of either."""
    if isinstance(given, str):
        return (_text(given, where),)
    if isinstance(given, list) and given:
        if all(type(each) is int for each in given):
            return (given,)
        if all(isinstance(each, str) for each in given):
            return tuple(_text(each, where) for each in given)
        if all(isinstance(each, list) and each and all(type(i) is int for i in each) for each in given):
            return tuple(given)
    raise Refusal(
        f"{where} must be a string, a list of token ids, or a list of either; none may be empty.", param=where
    )


# -- messages, tools and formats of a chat request ---------------------------------------------------------------------


def _read_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise Refusal(f"{where} must be an object with role and content.", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise Refusal(f"{where}.role must be one of {', '.join(_ROLES)}.", param=f"{where}.role")
    known = {"role", "content", "name"}
    known |= {"tool_calls"} if role == "assistant" else {"tool_call_id"} if role == "tool" else set()
    others = sorted(name for name, value in message.items() if value and name not in known)
    if others:
        raise Refusal(f"{where} has {', '.join(others)}; this server supports only text and tool calls.", param=where)
    calls = _read_calls(message["tool_calls"], f"{where}.tool_calls") if message.get("tool_calls") else None
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_read_part(part, f"{where}.content") for part in content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise Refusal(f"{where}.content must be a string.", param=f"{where}.content")
    found: Message = {"role": _ROLES[role], "content": _text(content, f"{where}.content")}
    if calls:
        found["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            found[name] = _text(message[name], f"{where}.{name}")
    return found


def _read_part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise Refusal(f"{where} may contain only parts of type text.", param=where)
    return text


def _read_calls(given: Any, where: str) -> list[dict[str, Any]]:
    """Return earlier tool calls, with arguments as objects, as chat templates expect them."""
    refusal = Refusal(f"{where} must be a list of function calls with a name and JSON arguments.", param=where)
    if not isinstance(given, list):
        raise refusal
    found = []
    for call in given:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refusal
        arguments = function.get("arguments") or "{}"
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            raise refusal from None
        found.append({"type": "function", "function": {"name": function["name"], "arguments": parsed}})
    return found


def _tools(body: Body, *, knows_tools: bool) -> list[dict[str, Any]] | None:
    tools: list[dict[str, Any]] = body.get("tools", [])
    choice = body.get("tool_choice", "auto")
    is_good = isinstance(tools, list) and all(
        isinstance(tool, dict)
        and tool.get("type") == "function"
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        for tool in tools
    )
    if not is_good:
        raise Refusal("tools must be a list of functions, each with a name.", param="tools")
    if choice not in ("none", "auto"):
        raise Refusal(
            "This server cannot force a tool call: tool_choice may be auto or none.", param="tool_choice",
            code="unsupported_parameter",
        )  # fmt: skip
    if not tools or choice == "none":
        return None
    if not knows_tools:
        raise Refusal("This model's chat template does not support tools.", param="tools", code="unsupported_parameter")
    return tools


def _response_format(given: Any) -> tuple[bool, dict[str, Any] | None]:
    """Return whether the answer must be JSON, and its schema if there is one."""
    kind = given.get("type") if isinstance(given, dict) else None
    readers: dict[str, Callable[[Any], tuple[bool, dict[str, Any] | None]]] = {
        "text": lambda _: (False, None),
        "json_object": lambda _: (True, None),
        "json_schema": _json_schema,
    }
    if not isinstance(kind, str) or kind not in readers:
        raise Refusal(f"response_format.type must be one of {', '.join(readers)}.", param="response_format.type")
    return readers[kind](given)


def _json_schema(given: Any) -> tuple[bool, dict[str, Any]]:
    outer = given.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if not isinstance(schema, dict):
        raise Refusal("response_format.json_schema.schema must be an object.", param="response_format.json_schema")
    return True, schema


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as exc:  # a JSON string may contain a lone surrogate
        raise Refusal(f"{where} is not valid Unicode: {exc.reason}.", param=where) from exc
    return text
