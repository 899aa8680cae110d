"""Defines a conversation and a fault in one, and converts five common formats to messages.

    messages   {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}
    list       [{"role": ..., "content": ...}, ...]                            as in nanochat
    sharegpt   {"conversations": [{"from": "human", "value": ...}, ...]}
    alpaca     {"instruction": ..., "input": ..., "output": ...}
    pair       {"prompt": ..., "completion": ...}                              as in TRL; each is text or messages

The format is detected once per file and reported. The conversion only rearranges fields; `rules` checks that they form
a conversation.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ROLES", "Conversation", "Fault", "Message", "Raw", "to_messages", "unused_fields", "which_form"]

ROLES = ("system", "user", "assistant", "tool")
# A message has role and content, and optionally tool_calls, tool_call_id, name and reasoning_content.
Message = dict[str, Any]


class Fault(Exception):
    """A fault in one line. `kind` is a stable identifier, and `text` is a message for users."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    # Indices of answers excluded from the loss: those with `weight: 0` in the file.
    unlearned: frozenset[int] = field(default_factory=frozenset)

    @property
    def answers(self) -> list[int]:
        return [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]

    def digest(self) -> bytes:
        """Return a hash of the content, independent of the format of the file."""
        return _digest([self.messages, self.tools, sorted(self.unlearned)])

    def loose_digest(self) -> bytes:
        """Return a hash that ignores case and white space, to detect conversations that are in both train and val."""
        return _digest([[message["role"], _loose(message)] for message in self.messages])


def _loose(message: Message) -> str:
    calls = json.dumps(message.get("tool_calls") or "", sort_keys=True)
    return " ".join(f"{message['content']} {calls}".casefold().split())


def _digest(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).digest()[:16]


Raw = tuple[list[Any], Any]  # messages and tools as found in the file, not validated yet

_SPEAKERS = {
    **{"human": "user", "user": "user", "prompter": "user"},
    **{"gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"},
    **{"system": "system", "tool": "tool", "observation": "tool", "function_response": "tool"},
}
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"))
_KNOWN = {
    "messages": {"messages", "tools"},
    "sharegpt": {"conversations", "system", "tools"},
    "alpaca": {"instruction", "input", "output", "system", "history"},
    "pair": {"system", *(name for pair in _PAIRS for name in pair)},
}


def which_form(value: Any) -> str:
    """Return the name of a value's format; raises Fault if the format is unknown."""
    if isinstance(value, list):
        return "list"
    if not isinstance(value, dict):
        raise Fault("not-object", f"expected an object or a list of messages, found {_kind(value)}")
    for form, name in (("messages", "messages"), ("sharegpt", "conversations"), ("alpaca", "instruction")):
        if name in value:
            return form
    if _pair_in(value):
        return "pair"
    names = ", ".join(list(value)[:8]) or "none"
    raise Fault("no-form", f"no messages, conversations, instruction, or prompt and completion; fields found: {names}")


def to_messages(value: Any, form: str) -> Raw:
    """Convert a value to messages. `form` is the file's format; raises Fault if the value is in a different one."""
    found = which_form(value)
    if found != form:
        raise Fault("other-form", f"is in the {found} format, but the file started in the {form} format")
    if form == "list":
        return value, None
    if form == "alpaca":
        return _from_alpaca(value), None
    if form == "pair":
        return _from_pair(value), None
    tools = value.get("tools")
    if isinstance(tools, str):
        tools = _json_text(tools, "tools")
    if form == "messages":
        return _need_list(value["messages"], "messages"), tools
    turns = [_from_sharegpt(turn, number) for number, turn in enumerate(_need_list(value["conversations"], form), 1)]
    system = value.get("system")
    return [*([{"role": "system", "content": system}] if system not in (None, "") else []), *turns], tools


def unused_fields(value: Any, form: str) -> list[str]:
    """Return the names of fields that are ignored because they are not part of the conversation."""
    return [] if form == "list" else sorted(value.keys() - _KNOWN[form])


def _from_alpaca(value: dict[str, Any]) -> list[Any]:
    for name in ("instruction", "output"):
        if not isinstance(value.get(name), str):
            raise Fault("wrong-type", f"{name!r} is {_kind(value[name]) if name in value else 'missing'}, not text")
    extra = value.get("input") if value.get("input") is not None else ""
    if not isinstance(extra, str):
        raise Fault("wrong-type", f"'input' is {_kind(extra)}, not text")
    asked = value["instruction"] + (f"\n\n{extra}" if extra.strip() else "")
    system = value.get("system")
    messages = [{"role": "system", "content": system}] if system not in (None, "") else []
    for pair in _need_list(value.get("history") or [], "history", least=0):
        if not isinstance(pair, list) or len(pair) != 2:
            raise Fault("wrong-type", "'history' is not a list of [question, answer] pairs")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return [*messages, {"role": "user", "content": asked}, {"role": "assistant", "content": value["output"]}]


def _pair_in(value: dict[str, Any]) -> tuple[str, str] | None:
    return next((pair for pair in _PAIRS if value.keys() >= set(pair)), None)


def _from_pair(value: dict[str, Any]) -> list[Any]:
    pair = _pair_in(value)
    assert pair is not None  # `which_form` has already checked that the value has these fields
    system = value.get("system")
    messages = [{"role": "system", "content": system}] if system not in (None, "") else []
    for name, role in zip(pair, ("user", "assistant"), strict=True):
        said = value[name]
        if not isinstance(said, (str, list)):
            raise Fault("wrong-type", f"{name!r} is {_kind(said)}, not text or a list of messages")
        messages += [{"role": role, "content": said}] if isinstance(said, str) else said
    return messages


def _from_sharegpt(turn: Any, number: int) -> Any:
    if not isinstance(turn, dict) or ("role" in turn and "from" not in turn):
        return turn  # a turn with role and content is already a message
    speaker = turn.get("from")
    if speaker == "function_call":
        call = _json_text(turn.get("value"), f"turn {number}: the function call")
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise Fault(
            "unknown-role", f"turn {number}: unknown speaker {speaker!r}; known: {', '.join(sorted(_SPEAKERS))}"
        )
    if "value" not in turn:
        raise Fault("wrong-type", f"turn {number}: 'value' is missing")
    weight = {"weight": turn["weight"]} if turn.get("weight") is not None else {}
    return {"role": _SPEAKERS[speaker], "content": turn["value"], **weight}


def _need_list(value: Any, name: str, *, least: int = 1) -> list[Any]:
    if not isinstance(value, list):
        raise Fault("wrong-type", f"{name!r} is {_kind(value)}, not a list")
    if len(value) < least:
        raise Fault("no-turns", f"{name!r} is empty")
    return value


def _json_text(text: Any, name: str) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as exc:
        raise Fault("bad-tools", f"{name}: not JSON: {exc}") from exc


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}.get(
        type(value), "a number"
    )
