"""Checks that messages form a conversation that a model can learn from: roles, text, and the order of turns.

    (system)? then user -> assistant, repeatedly; an assistant turn that calls tools is followed by the tools' results

Checking stops at the first fault, because a conversation with any fault is skipped. Harmless deviations are corrected:
text given in parts is joined, and an unanswered question at the end is dropped, which counts as a cut.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

from homing.lm.data.chat.messages import ROLES, Conversation, Fault, Message, Raw

__all__ = ["check", "drop_unanswered"]

_USUAL_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system"}
_KEPT = ("name", "tool_call_id", "reasoning_content")
# Tab, line feed, form feed and carriage return count as text. Other control characters come from terminal output,
# truncated files, or text decoded with the wrong encoding.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_DEEPEST = 64  # maximum nesting in tool calls and definitions, to limit recursion; no real schema is deeper
_FOLLOWS: dict[str, tuple[str, ...]] = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "calls": ("tool",),
    "tool": ("tool", "assistant"),
}


def check(raw: Raw) -> Conversation:
    given, tools = raw
    if not given:
        raise Fault("no-turns", "no messages")
    messages = [_message(message, number) for number, message in enumerate(given, start=1)]
    unlearned = frozenset(number for number, message in enumerate(given) if _is_unlearned(message, number + 1))
    _check_order(messages)
    _check_results(messages)
    conversation = Conversation(messages, _tools(tools), unlearned)
    if not conversation.answers:
        raise Fault("no-assistant", "no assistant turn")
    if unlearned.issuperset(conversation.answers):
        raise Fault("no-assistant", "every assistant turn has weight 0, so there is nothing to train on")
    return conversation


def drop_unanswered(conversation: Conversation) -> tuple[Conversation, int]:
    """Return the conversation without the turns after the last answer, and the number of turns removed."""
    end = conversation.answers[-1] + 1
    dropped = len(conversation.messages) - end
    return (_until(conversation, end) if dropped else conversation), dropped


def _until(conversation: Conversation, end: int) -> Conversation:
    unlearned = frozenset(number for number in conversation.unlearned if number < end)
    return Conversation(conversation.messages[:end], conversation.tools, unlearned)


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, dict):
        raise Fault("wrong-type", f"turn {number}: not an object with role and content")
    role = _role(message, number)
    tidy: Message = {"role": role, "content": _content(message, role, number)}
    for name in _KEPT:
        if message.get(name) is not None:
            tidy[name] = _text(message[name], f"turn {number}: {name}")
    if message.get("tool_calls"):
        if role != "assistant":
            raise Fault("bad-tools", f"turn {number}: only the assistant may call tools, not {role}")
        tidy["tool_calls"] = _calls(message["tool_calls"], number)
    elif not tidy["content"].strip():
        raise Fault("empty-turn", f"turn {number}: the {role} turn is empty")
    return tidy


def _role(message: dict[str, Any], number: int) -> str:
    role = message.get("role")
    if role is None:
        raise Fault("no-role", f"turn {number}: no role; fields found: {', '.join(list(message)[:8]) or 'none'}")
    if not isinstance(role, str) or role not in ROLES:
        name = str(role)
        near = _USUAL_NAMES.get(name.lower()) or next(iter(difflib.get_close_matches(name.lower(), ROLES, n=1)), "")
        meant = f" Did you mean {near}?" if near else ""
        raise Fault("unknown-role", f"turn {number}: unknown role {role!r}; known: {', '.join(ROLES)}.{meant}")
    return role


def _content(message: dict[str, Any], role: str, number: int) -> str:
    content = message.get("content")
    if content is None:
        if role == "assistant" and message.get("tool_calls"):
            return ""
        raise Fault("no-content", f"turn {number}: the {role} turn has no content")
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
    return _text(content, f"turn {number}: content")


def _part(part: Any, number: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise Fault("not-text", f"turn {number}: a part of type {kind!r}; only text is supported")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise Fault("wrong-type", f"{where} is {type(value).__name__}, not text")
    _check_characters(value, where)
    return value


def _check_characters(text: str, where: str) -> None:
    if half := _SURROGATE.search(text):
        raise Fault("surrogate", f"{where}: unpaired surrogate at character {half.start() + 1}")
    if control := _CONTROL.search(text):
        character = ord(control.group())
        raise Fault("control-character", f"{where}: control character U+{character:04X} at {control.start() + 1}")


def _check_values(value: Any, where: str, depth: int = 0) -> None:
    """Check the characters of every string inside the value, including keys."""
    if depth > _DEEPEST:
        raise Fault("too-deep", f"{where}: nested more than {_DEEPEST} levels deep")
    if isinstance(value, str):
        _check_characters(value, where)
    elif isinstance(value, (list, dict)):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_values(item, where, depth + 1)


def _is_unlearned(message: Any, number: int) -> bool:
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1, None):
        raise Fault("wrong-type", f"turn {number}: weight is {weight!r}; use 0 (not in the loss) or 1")
    return bool(message["role"] == "assistant" and weight == 0)


def _calls(calls: Any, number: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise Fault("bad-tools", f"turn {number}: tool_calls is not a list")
    return [_call(call, number) for call in calls]


def _call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise Fault("bad-tools", f"turn {number}: a tool call without a function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # in OpenAI's format, the arguments are a JSON string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as exc:
            raise Fault("bad-tools", f"turn {number}: the arguments of {function['name']} are not JSON: {exc}") from exc
    if not isinstance(arguments, dict):
        raise Fault("bad-tools", f"turn {number}: the arguments of {function['name']} are not an object")
    tidy: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    tidy = {**({"id": call["id"]} if isinstance(call.get("id"), str) else {}), **tidy}
    _check_values(tidy, f"turn {number}: a tool call")
    return tidy


def _check_order(messages: list[Message]) -> None:
    before = ""
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if role not in _FOLLOWS[before]:
            raise Fault("wrong-order", f"turn {number}: {_out_of_turn(role, before)}")
        before = "calls" if message.get("tool_calls") else role


def _out_of_turn(role: str, before: str) -> str:
    if role == "system":
        return "a system turn must come first"
    if not before:
        return f"the conversation starts with {role}; it must start with user, or with system and then user"
    if before == "calls":
        return f"{role} follows a tool call; the result (role tool) is missing"
    if role == "tool":
        return "a tool result without a tool call"
    if role == before:
        return f"{role} twice in a row"
    return f"{role} follows {before}"


def _check_results(messages: list[Message]) -> None:
    """Raise Fault if a tool result refers to a call that was not made."""
    called: set[str] = set()
    for number, message in enumerate(messages, start=1):
        called |= {call["id"] for call in message.get("tool_calls", []) if "id" in call}
        wanted = message.get("tool_call_id")
        if message["role"] == "tool" and wanted and called and wanted not in called:
            raise Fault("bad-tools", f"turn {number}: a result for the unknown call {wanted!r}")


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Fault("bad-tools", "'tools' is not a list of objects")
    _check_values(tools, "'tools'")
    return tools
