"""A sample as it may stand on a terminal."""

from __future__ import annotations

import unicodedata

__all__ = ["harmless"]


def harmless(sample: str) -> str:
    """A model may learn any byte: those that would move the cursor or change the terminal are only pointed at."""
    return "".join(c if unicodedata.category(c) != "Cc" or c in "\t\n" else "\N{REPLACEMENT CHARACTER}" for c in sample)
