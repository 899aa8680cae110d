"""Reads the bytes of a tokenizer.json after checking its size: parsed, it takes five times as much memory."""

from __future__ import annotations

import os

from homing.errors import DataError

__all__ = ["MAX_TOKENIZER_BYTES", "read_tokenizer_bytes"]

MAX_TOKENIZER_BYTES = 128 << 20  # the largest among known open models have 35 MB


def read_tokenizer_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the file's bytes; raises DataError if it is too large, OSError if there is no such file."""
    with open(path, "rb") as file:
        data = file.read(MAX_TOKENIZER_BYTES + 1)
        if len(data) > MAX_TOKENIZER_BYTES:
            raise DataError(
                what=f"{os.fspath(path)} is too large for a tokenizer.",
                why=f"It has {os.fstat(file.fileno()).st_size:,} bytes; homing reads at most {MAX_TOKENIZER_BYTES:,}.",
                fix="Use the tokenizer.json that came with the model, or let homing train one.",
            )
    return data
