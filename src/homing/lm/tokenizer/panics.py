"""Turns a panic inside the tokenizers package into an error that names the file.

The package aborts a regex search that takes too long, and some expressions it cannot compile, with a Rust panic. In
Python that is a BaseException, which no handler for errors catches: a single text would end the whole process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from homing.errors import DataError

__all__ = ["panics_as_errors"]


@contextmanager
def panics_as_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":
            raise
        raise DataError(
            what=f"{os.fspath(path)} cannot encode this text.",
            why=f"The tokenizers package failed: {str(exc) or 'it panicked'}.",
            fix="Use another tokenizer; the regular expression of this one is invalid or too slow for this text.",
        ) from exc
