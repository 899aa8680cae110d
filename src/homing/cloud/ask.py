"""The same question to several providers at once: nobody's answer waits for another's silence.

{name: question} -> side by side, each with the deadline -> {name: its answer, or why there is none}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from homing.errors import HomingError, ProviderSilent
from homing.world import World

__all__ = ["ASK_S", "ask_all"]

ASK_S = 30.0  # so long a provider may take to say what it has
T = TypeVar("T")


def ask_all(questions: Mapping[str, Callable[[], T]], world: World) -> dict[str, T | HomingError | OSError]:
    """In the order of the questions. What is neither an answer nor a failure of theirs is a mistake of ours: raised."""
    found: dict[str, T | HomingError | OSError] = {}
    for name, answer in zip(questions, world.together(list(questions.values()), ASK_S), strict=True):
        if isinstance(answer, TimeoutError):
            answer = ProviderSilent(
                what=f"{name} did not answer within {ASK_S:g} s.",
                fix="Try again in a minute; is a proxy or a firewall between? homing doctor",
            )
        elif isinstance(answer, Exception) and not isinstance(answer, (HomingError, OSError)):
            raise answer
        found[name] = answer
    return found
