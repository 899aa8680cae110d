"""The Hugging Face token in an environment, by the two names that people give it."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NAMES", "token_in"]

NAMES = ("HUGGINGFACEHUB_API_TOKEN", "HF_TOKEN")  # where both are set, the first is used


def token_in(environment: Mapping[str, str]) -> tuple[str, str]:
    """The token and the name it stands under; both empty where there is none."""
    set_here = ((environment.get(name, "").strip(), name) for name in NAMES)
    return next(((token, name) for token, name in set_here if token), ("", ""))
