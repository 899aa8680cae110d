"""Reads a file as numbered values: JSON lines, elements of the array in a `.json` file, or Parquet rows.

If a line cannot be parsed, its value is a Fault, and reading continues with the next line, so that every fault is
reported. If the file cannot be read any further (a damaged archive, a truncated array), an error with the line number
is raised. The parser is stricter than `json.loads`, which silently accepts duplicate keys and NaN.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from homing.errors import DataError
from homing.find_source_files import PACKINGS
from homing.lm.data.chat.messages import Fault
from homing.lm.data.text.documents import MAX_LINE_BYTES
from homing.lm.data.text.parquet import rows_of
from homing.lm.data.text.read_bytes import Reading, open_blocks

__all__ = ["BrokenFile", "Line", "values_of"]

MAX_ARRAY_BYTES = 1 << 30
_BOM = b"\xef\xbb\xbf"


class BrokenFile(DataError):
    def __init__(
        self, path: str, line: int, problem: str, fix: str = "Fix the file, or remove it from the list."
    ) -> None:
        super().__init__(
            f"{path}:{line}: {problem}.", why="homing cannot find where the next conversation starts.", fix=fix
        )
        self.line = line


@dataclass(frozen=True)
class Line:
    number: int
    value: Any  # or a Fault


def values_of(reading: Reading) -> Iterator[Line]:
    """Yield every value of the file, in order. Blank lines are skipped."""
    if reading.source.form == "parquet":
        yield from _rows(reading)
    elif _is_json(reading.source.path):
        yield from _array_or_lines(reading)
    else:
        yield from _from_lines(_lines(reading))


def _is_json(path: str) -> bool:
    stem, ending = os.path.splitext(path.lower())
    return (os.path.splitext(stem)[1] if ending in PACKINGS else ending) == ".json"


def _rows(reading: Reading) -> Iterator[Line]:
    for number, row in rows_of(reading):
        yield Line(number, _not_utf8(row) if isinstance(row, UnicodeDecodeError) else row)


def _not_utf8(exc: UnicodeDecodeError) -> Fault:
    return Fault(
        "not-utf8", f"not UTF-8: byte 0x{exc.object[exc.start]:02x} at byte {exc.start + 1} of a text in this row"
    )


def _lines(reading: Reading) -> Iterator[bytes]:
    rest, number = b"", 1
    for block in open_blocks(reading):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
        number += len(whole)
        if len(rest) > MAX_LINE_BYTES:
            raise BrokenFile(reading.source.path, number, f"longer than {MAX_LINE_BYTES:,} bytes")
    yield rest


def _from_lines(lines: Iterator[bytes]) -> Iterator[Line]:
    for number, raw in enumerate(lines, start=1):
        line = raw.removeprefix(_BOM) if number == 1 else raw
        if line.strip():
            yield Line(number, _parsed(line))


def _parsed(line: bytes) -> Any:
    try:
        return _DECODER.decode(line.decode().strip())
    except UnicodeDecodeError as exc:
        return Fault("not-utf8", f"not UTF-8: byte 0x{line[exc.start]:02x} at column {exc.start + 1}")
    except Fault as fault:
        return fault
    except RecursionError:
        return Fault("too-deep", "JSON nested too deeply")
    except ValueError as exc:
        return Fault("bad-json", f"not JSON: {exc}")


def _array_or_lines(reading: Reading) -> Iterator[Line]:
    """Read a `.json` file, which contains one array of conversations (as in Alpaca and ShareGPT) or JSON lines."""
    data = bytearray()
    for block in open_blocks(reading):
        data += block
        if len(data) > MAX_ARRAY_BYTES:
            problem = f"longer than {MAX_ARRAY_BYTES:,} bytes"
            raise BrokenFile(reading.source.path, 1, problem, "Write one conversation per line, as .jsonl.")
    lines = bytes(data).removeprefix(_BOM).split(b"\n")
    first = next((line for line in lines if line.strip()), b"")
    value = _parsed(first)
    num_filled = sum(1 for line in lines if line.strip())
    is_conversation = isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]
    if not first.lstrip().startswith(b"[") or is_conversation or (num_filled > 1 and isinstance(value, list)):
        yield from _from_lines(iter(lines))
    else:
        yield from _from_array(reading.source.path, bytes(data).removeprefix(_BOM))


def _from_array(path: str, data: bytes) -> Iterator[Line]:
    try:
        text = data.decode()
    except UnicodeDecodeError as exc:
        number = data.count(b"\n", 0, exc.start) + 1
        raise BrokenFile(path, number, f"not UTF-8: byte 0x{data[exc.start]:02x}") from exc
    at, number, counted = _skip(text, text.index("[") + 1), 1, 0
    while not text.startswith("]", at):
        number, counted = number + text.count("\n", counted, at), at
        try:
            value, end = _DECODER.raw_decode(text, at)
        except Fault as fault:
            # Parse again without the strict checks, only to find where the value ends.
            value, end = fault, json.JSONDecoder().raw_decode(text, at)[1]
        except (ValueError, RecursionError) as exc:
            line = number if isinstance(exc, RecursionError) else text.count("\n", 0, getattr(exc, "pos", at)) + 1
            raise BrokenFile(path, line, f"not JSON: {exc}") from exc
        yield Line(number, value)
        at = _skip(text, end)
        if text.startswith(",", at):
            at = _skip(text, at + 1)
        elif not text.startswith("]", at):
            raise BrokenFile(path, text.count("\n", 0, at) + 1, "the array is truncated, or a comma is missing")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Fault("key-twice", f"duplicate key {twice!r} in one object")
    return value


def _no_number(name: str) -> NoReturn:
    raise Fault("bad-json", f"not JSON: {name} is not a valid number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_number)
