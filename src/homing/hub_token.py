"""Finds the Hugging Face token, and makes huggingface_hub transfer large files with LFS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["NAMES", "token_in", "use_lfs"]

NAMES = ("HUGGINGFACEHUB_API_TOKEN", "HF_TOKEN")  # if both are set, the first wins


def token_in(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the token and the name of the variable that holds it, or two empty strings if there is no token."""
    set_here = ((environment.get(name, "").strip(), name) for name in NAMES)
    return next(((token, name) for token, name in set_here if token), ("", ""))


def use_lfs(library: Any) -> None:
    """Transfer large files with LFS, which the Hub accepts for every repository, instead of Xet.

    huggingface_hub would use Xet if hf-xet is installed, without a fallback. Our tests cannot run Xet, because only the
    Hub has Xet servers. With LFS, the user's computer and the instances run code that we have tested.
    LFS is slower for files that are already partly on the Hub.
    """
    library.constants.HF_HUB_DISABLE_XET = True
