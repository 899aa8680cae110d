"""turns.json: the text that a model's chat template puts around messages, extracted at home by `lm.chat.take_apart`.

begin USER end | begin_system SYSTEM system_user USER end | ... USER user_assistant ASSISTANT assistant_user USER end
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Optional

from homing.wire.codec import record

__all__ = ["Turns"]


@record("turns", 1)
@dataclass(frozen=True)
class Turns:
    """Text fragments in which special tokens appear by name. None: the template does not allow that sequence."""

    template_sha256: str  # of the template's text
    begin: str  # before the first turn, if that is the user's
    end: str  # after the last turn, including the opening of the assistant's
    markers: Dict[str, int] = field(default_factory=dict)  # special token -> id
    end_id: Optional[int] = None  # token with which the assistant ends a turn
    is_trimmed: bool = False  # the template strips the whitespace around messages
    begin_system: Optional[str] = None
    system_user: Optional[str] = None
    user_assistant: Optional[str] = None
    assistant_user: Optional[str] = None
    user_user: Optional[str] = None
