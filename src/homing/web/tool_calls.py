"""Finds tool calls in generated text: marker, JSON with a name and arguments, marker.

    text before the first marker -> the answer's content
    each marked stretch          -> a call: {"name": ..., "arguments": {...}}

The markers are homing's own and those of the Hermes format, which Qwen and many other models use. While a text is
streamed, everything from the first marker on is held back until the text is complete.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

__all__ = ["BEGINNINGS", "split_calls"]

_MARKERS = (("<|tool_call|>", "<|tool_call_end|>"), ("<tool_call>", "</tool_call>"))
BEGINNINGS = tuple(begin for begin, _ in _MARKERS)
_CALL = re.compile("|".join(f"{re.escape(begin)}(.*?)(?:{re.escape(end)}|$)" for begin, end in _MARKERS), re.DOTALL)


def split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text before the calls, and the calls in OpenAI's format; the whole text if a call is not valid."""
    calls = []
    for found in _CALL.finditer(text):
        try:
            call = json.loads(next(group for group in found.groups() if group is not None))
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return text, []
        if not isinstance(name, str):
            return text, []
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        function = {"name": name, "arguments": written}
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    before = _CALL.split(text, maxsplit=1)[0].rstrip() if calls else text
    return before, calls
