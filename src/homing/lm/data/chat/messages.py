"""Defines the data types used in this package: a conversation, and a fault in one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ROLES", "Conversation", "Fault", "Message"]

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
