"""A panic inside the tokenizers package as an error that names the file.

The package ends a search that takes too long, and some regular expressions that it cannot compile, by a Rust panic. In
Python that is a BaseException, which no handler for errors catches: one text would end the whole process.
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
            why=f"The tokenizers package gave up: {str(exc) or 'it panicked'}.",
            fix="Its regular expression is unsound, or takes too long on such text: use another tokenizer.",
        ) from exc
