"""For each verb a request, as a person types it and as a program makes it. The tests in test_cli_equals_api run both.

A request that rents or asks a provider is tried on `local` and on `fake`. Where the verb prints a document, `--json` is
typed, and the document must be what the function returns.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.cli_and_api import Scenario

__all__ = ["SCENARIOS"]

BOTH = ("local", "fake")
SLOW = (pytest.mark.slow,)


def finished(steps: Any) -> Any:
    """Go through what a function returns piece by piece, to its end."""
    for _ in steps:
        pass
    return steps


def asked(session: Any, *lines: str) -> list[dict[str, object]]:
    """Ask each line in a chat, and return what `homing chat --json` prints of it."""
    return [
        {"seed": session.seed, "prompt": line, "text": "".join(session.reply(line)), "mode": session.mode}
        for line in lines
    ]


# Get started

SCENARIOS: dict[str, list[Scenario]] = {
    "new": [Scenario("first --from tiny --text moss.txt", lambda new: new("first", "tiny", text=["moss.txt"]), "text")],
}

# Data and models

SCENARIOS |= {
    "generate": [
        Scenario(
            "tiny --prompt 'the cat' --tokens 8 --seed 1 --device cpu --json",
            lambda generate: finished(generate("tiny", prompt="the cat", tokens=8, seed=1, device="cpu")),
            "model",
            is_reading=True,
        )
    ],
    "chat": [
        Scenario(
            "tiny --tokens 8 --seed 1 --device cpu --json",
            lambda chat: asked(chat("tiny", tokens=8, seed=1, device="cpu"), "the cat", "the dog"),
            "model",
            is_reading=True,
            stdin="the cat\nthe dog\n",
        )
    ],
}

# Cloud runs

SCENARIOS |= {
    "watch": [Scenario("moss", lambda watch: finished(watch("moss")), "finished", BOTH, is_reading=True)],
    "stop": [Scenario("moss", lambda stop: stop("moss"), "live", BOTH)],
}
