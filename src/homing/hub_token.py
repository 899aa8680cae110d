"""What every use of the Hugging Face Hub shares: the token, under either of its names, and LFS for large files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["NAMES", "token_in", "use_lfs"]

NAMES = ("HUGGINGFACEHUB_API_TOKEN", "HF_TOKEN")  # where both are set, the first is used


def token_in(environment: Mapping[str, str]) -> tuple[str, str]:
    """The token and the name it stands under; both empty where there is none."""
    set_here = ((environment.get(name, "").strip(), name) for name in NAMES)
    return next(((token, name) for token, name in set_here if token), ("", ""))


def use_lfs(library: Any) -> None:
    """Large files go by LFS, which the Hub takes for every repository, and not by Xet. huggingface_hub would take Xet
    wherever hf-xet is installed, without falling back; no test here can run Xet, whose servers are the Hub's alone. So
    what is tested is what runs, at home and on instances. Slower for files of which the Hub has parts already."""
    library.constants.HF_HUB_DISABLE_XET = True
