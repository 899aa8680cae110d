"""turns.json: what a model's chat template writes around what is said, taken apart at home by `lm.chat.take_apart`.

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
    """Each piece is text in which the markers stand by their names. None: the template has no such order."""

    template_sha256: str  # of the template's text
    begin: str  # before the first turn, where that is the person's
    end: str  # after the last turn, with the opening of the assistant's
    markers: Dict[str, int] = field(default_factory=dict)  # name -> id
    end_id: Optional[int] = None  # with which the assistant ends a turn
    is_trimmed: bool = False  # what is said loses the spaces around it
    begin_system: Optional[str] = None
    system_user: Optional[str] = None
    user_assistant: Optional[str] = None
    assistant_user: Optional[str] = None
    user_user: Optional[str] = None
