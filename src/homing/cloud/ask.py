"""The same question to several providers at once: nobody's answer waits for another's silence.

    {name: question} -> side by side, each with the deadline -> {name: its answer, or why there is none}

The deadline is shorter while a limit is near: whoever holds it has something to do then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from homing.errors import HomingError, ProviderSilent
from homing.world import World

__all__ = ["ASK_S", "HURRY_S", "ask_all", "ask_store", "patience_s"]

ASK_S = 30.0  # so long a provider may take to say what it has
HURRY_S = 5.0  # and so long while a limit is near: a handful of such questions come before it is looked at
T = TypeVar("T")


def patience_s(world: World, by: float) -> float:
    """How long an answer may take where `by`, in Unix seconds, a limit needs whoever asks."""
    return min(ASK_S, max(HURRY_S, by - world.now()))


def ask_store(address: str, question: Callable[[], T], name: str, world: World) -> T:
    """One question to a store, by its address. One far away gets the deadline, and ProviderSilent tells that it passed:
    an S3 that hangs is tried for minutes, and whoever asks may be all that guards a machine."""
    if address.startswith("file:"):
        return question()
    answer = ask_all({name: question}, world)[name]
    if isinstance(answer, (HomingError, OSError)):
        raise answer
    return answer


def ask_all(
    questions: Mapping[str, Callable[[], T]], world: World, timeout_s: float | None = None
) -> dict[str, T | HomingError | OSError]:
    """In the order of the questions. What is neither an answer nor a failure of theirs is a mistake of ours: raised."""
    found: dict[str, T | HomingError | OSError] = {}
    timeout_s = ASK_S if timeout_s is None else timeout_s
    for name, answer in zip(questions, world.together(list(questions.values()), timeout_s), strict=True):
        if isinstance(answer, TimeoutError):
            answer = ProviderSilent(
                what=f"{name} did not answer within {timeout_s:.3g} s.",
                fix="Try again in a minute; is a proxy or a firewall between? homing doctor",
            )
        elif isinstance(answer, Exception) and not isinstance(answer, (HomingError, OSError)):
            raise answer
        found[name] = answer
    return found
