"""A conversation, and a fault in one: what every module here hands on to the next."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ROLES", "Conversation", "Fault", "Message"]

ROLES = ("system", "user", "assistant", "tool")
Message = dict[str, Any]  # role, content, and where there are some: tool_calls, tool_call_id, name, reasoning_content


class Fault(Exception):
    """Something wrong with one line. `kind` is a short name that never changes, `text` is for people."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    # Answers that are read and not learned from: `weight: 0` beside them in the file.
    unlearned: frozenset[int] = field(default_factory=frozenset)

    @property
    def answers(self) -> list[int]:
        return [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]

    def digest(self) -> bytes:
        """The same for the same words, whatever the file's form was."""
        return _digest([self.messages, self.tools, sorted(self.unlearned)])

    def loose_digest(self) -> bytes:
        """Also the same where only case and spaces differ: for a leak that is no less one for them."""
        return _digest([[message["role"], _loose(message)] for message in self.messages])


def _loose(message: Message) -> str:
    calls = json.dumps(message.get("tool_calls") or "", sort_keys=True)
    return " ".join(f"{message['content']} {calls}".casefold().split())


def _digest(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).digest()[:16]
