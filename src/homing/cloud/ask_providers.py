"""Queries providers or stores in parallel, with a deadline, so that an unresponsive one does not delay the others.

    {name: question} -> in parallel, each with the deadline -> {name: its answer, or the error}

The deadline is shorter when a run is about to reach a limit, because the caller must then be free to enforce it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from homing.errors import HomingError, ProviderSilent
from homing.world import World

__all__ = ["ASK_S", "NEAR_LIMIT_TIMEOUT_S", "ask_all", "ask_store", "cause", "patience_s"]

ASK_S = 30.0  # how long a provider may take to answer
# The timeout when a limit is about to be reached. It is shorter because several such calls precede the limit check.
NEAR_LIMIT_TIMEOUT_S = 5.0
T = TypeVar("T")


def patience_s(world: World, by: float) -> float:
    """Return how many seconds to wait for an answer if the caller must enforce a limit at `by` (Unix seconds)."""
    return min(ASK_S, max(NEAR_LIMIT_TIMEOUT_S, by - world.now()))


def ask_store(address: str, question: Callable[[], T], name: str, world: World) -> T:
    """Call `question`, which queries the store at `address`, and return its answer.

    Raises ProviderSilent if a remote store does not answer before the deadline. Without a deadline, a hanging S3
    request would be retried for minutes, and the caller may be the only process that enforces an instance's limit.
    """
    if address.startswith("file:"):
        return question()
    answer = ask_all({name: question}, world)[name]
    if isinstance(answer, (HomingError, OSError)):
        raise answer
    return answer


def ask_all(
    questions: Mapping[str, Callable[[], T]], world: World, timeout_s: float | None = None
) -> dict[str, T | HomingError | OSError]:
    """Return the answer or error for each question, in the order of the questions.

    An exception of any other type is a bug in our code and is raised.
    """
    found: dict[str, T | HomingError | OSError] = {}
    timeout_s = ASK_S if timeout_s is None else timeout_s
    for name, answer in zip(questions, world.together(list(questions.values()), timeout_s), strict=True):
        if isinstance(answer, TimeoutError):
            answer = ProviderSilent(
                what=f"{name} did not answer within {timeout_s:.3g} s.",
                fix="Try again in a minute. To check whether a proxy or firewall blocks it: homing doctor",
            )
        elif isinstance(answer, Exception) and not isinstance(answer, (HomingError, OSError)):
            raise answer
        found[name] = answer
    return found


def cause(exc: Exception) -> str:
    """Return a one-line reason why a store or provider did not answer."""
    texts = [exc.what, exc.why] if isinstance(exc, HomingError) else [str(exc) or type(exc).__name__]
    return " ".join(text.splitlines()[0] for text in texts if text)
