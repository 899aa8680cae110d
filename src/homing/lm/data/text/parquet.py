"""Reads Parquet files row by row: the text of one column, or whole rows.

    texts_of(reading, column)   row number and text, as UTF-8 bytes that are not validated yet
    rows_of(reading)            row number and fields

Row groups are read one at a time, page by page, and only the columns that are needed. So memory use is limited to a few
rows and pages, however large a row group is. Rows are numbered from 1, like lines.

Parquet cannot distinguish an absent field from a null one, because every row has every column. In conversations, fields
that a turn does not have are usually left out, so null fields are treated as absent.

Parquet is read with pyarrow, an optional dependency. Only this module imports pyarrow, and only when it opens a Parquet
file, so training never needs it.

The sizes that a file declares are checked before pyarrow allocates memory for them:

    footer -> row groups -> column chunks -> the header of every page -> check the sizes

A page is decompressed as a whole, and a dictionary page supplies values to any number of rows. Either way, a file of 1
KB can require gigabytes of memory. pyarrow does not expose page headers, so the second half of this module parses the
part of Thrift's compact protocol that page headers use.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from homing.errors import DataError
from homing.find_source_files import Source
from homing.lm.data.text.read_bytes import Reading, check_unpacked

__all__ = ["Group", "check_pages", "rows_of", "texts_of"]

_BATCH_BYTES = 1 << 20  # target size of a batch of rows, estimated from the mean row size of the row group
_ROWS_BYTES = 16 << 20  # maximum size of a batch, assuming that every row holds the largest value of each dictionary
# Maximum number of rows per batch: if texts repeat, rows take far more memory than their row group declares.
_MOST_ROWS = 512
_PAGES_BYTES = 1 << 20  # number of bytes to read ahead in a column
_MOST_NAMED = 20  # maximum number of columns listed in an error


def texts_of(reading: Reading, column: str) -> Iterator[tuple[int, bytes]]:
    import pyarrow as pa

    path, num_bytes = reading.source.path, 0
    with _open(reading) as table:
        _check_column(table.schema_arrow, column, path)
        for first, batch in _batches(reading, table, [column]):
            texts = batch.column(column).cast(pa.large_binary()).to_pylist()
            for number, text in enumerate(texts, start=first):
                if text is None:
                    raise DataError(
                        what=f"Row {path}:{number} has no text: column {column!r} is null.",
                        why="Each row must have text.",
                        fix="Rewrite the file without the rows that have no text.",
                    )
                num_bytes += len(text)
                check_unpacked(path, reading.source.num_bytes, num_bytes)
                yield number, text


def rows_of(reading: Reading) -> Iterator[tuple[int, dict[str, Any] | UnicodeDecodeError]]:
    """Yield (row number, fields). If a row's text is not UTF-8, yield the UnicodeDecodeError instead of its fields."""
    with _open(reading) as table:
        for first, batch in _batches(reading, table, _worded(table.schema_arrow)):
            try:
                yield from enumerate(map(_without_nulls, batch.to_pylist()), start=first)
            except UnicodeDecodeError:
                yield from ((first + place, _row(batch.slice(place, 1))) for place in range(len(batch)))


def _row(batch: Any) -> dict[str, Any] | UnicodeDecodeError:
    try:
        fields: dict[str, Any] = _without_nulls(batch.to_pylist()[0])
    except UnicodeDecodeError as exc:
        return exc
    return fields


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


@contextmanager
def _open(reading: Reading) -> Iterator[Any]:
    """Open the file again for pyarrow, which seeks in it, while `Reading` hashes the file through its own handle."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    source = reading.source
    try:
        with (
            pa.OSFile(source.path) as file,
            # pre_buffer would hold whole columns of a row group in memory.
            ParquetFile(file, pre_buffer=False, buffer_size=_PAGES_BYTES, page_checksum_verification=True) as table,
        ):
            if not table.metadata.num_rows:
                raise DataError(f"{source.path} is empty.", why="It has 0 rows.", fix="Remove it from the list.")
            yield table
    except (pa.ArrowException, ValueError, OSError) as exc:
        raise _damaged(source, exc) from exc


def _worded(schema: Any) -> list[str]:
    """Return the names of all columns except those that contain dates or times.

    Dates and times do not matter in conversations, and Python cannot represent nanoseconds and some time zones.
    """
    import pyarrow.types as kinds

    return list(dict.fromkeys(field.name for field in schema if not kinds.is_temporal(field.type)))


def _batches(reading: Reading, table: Any, columns: list[str]) -> Iterator[tuple[int, Any]]:
    """Yield batches of rows, each with the number of its first row."""
    done, num_rows = 0, table.metadata.num_rows
    for number, group in enumerate(check_pages(reading.source.path)):
        wanted = {
            "batch_size": _rows_at_once(table.metadata.row_group(number), group),
            "row_groups": [number],
            "columns": columns,
            "use_threads": False,  # another thread already processes rows while this one reads
        }
        for batch in table.iter_batches(**wanted):
            first, done = done + 1, done + len(batch)
            # Measure progress in rows, not in bytes, because columns that are not needed are never read.
            reading.num_bytes_read = reading.source.num_bytes * min(done, num_rows) // num_rows
            yield first, batch
    if done != num_rows:
        raise ValueError(f"Its metadata declares {num_rows:,} rows, but it contains {done:,}.")


def _rows_at_once(group: Any, pages: Group) -> int:
    # Use the size of all columns even if only one is read: if the footer is damaged, pyarrow aborts the process when it
    # looks up the size of one column.
    each = max(group.total_byte_size // max(group.num_rows, 1), 1)
    most = min(_MOST_ROWS, _ROWS_BYTES // max(pages.largest_row_bytes, 1))
    return int(max(min(_BATCH_BYTES // each, most), 1))


def _check_column(schema: Any, column: str, path: str) -> None:
    import pyarrow.types as kinds

    if schema.names.count(column) > 1:
        problem = f"more than one column {column!r}"
    elif column in schema.names:
        kind = schema.field(column).type
        plain = kind.value_type if kinds.is_dictionary(kind) else kind
        if kinds.is_string(plain) or kinds.is_large_string(plain) or kinds.is_string_view(plain):
            return
        problem = f"column {column!r} is not text, but {kind}"
    else:
        problem = f"no column {column!r}"
    more = ", ..." if len(schema.names) > _MOST_NAMED else ""
    raise DataError(
        what=f"No text in {path}: {problem}; columns found: {', '.join(schema.names[:_MOST_NAMED]) or 'none'}{more}.",
        why="One column must contain the text of each row.",
        fix="Set the column: data.text_field, or --text-field",
    )


def _damaged(source: Source, exc: Exception) -> DataError:
    if isinstance(exc, OSError) and exc.errno:  # this is a disk error; pyarrow's own errors have no errno
        return DataError(
            f"{source.path} cannot be read to the end.", why=exc.strerror or str(exc), fix="Check the disk."
        )
    return DataError(
        what=f"{source.path} is not a complete Parquet file.",
        why=(str(exc) or type(exc).__name__).splitlines()[0],
        fix="Download the file again, or remove it from the list.",
    )


_MAGIC = b"PAR1"
_HEADER_BYTES = 1 << 10  # page headers are usually under 100 bytes long, but statistics make them longer
_MOST_HEADER_BYTES = 64 << 20
_DICTIONARY_PAGE = 2
# Field numbers of parquet.thrift.
_ROW_GROUPS, _COLUMNS, _ROWS_OF_GROUP, _META = 4, 1, 3, 3
_VALUES, _PACKED_SIZE, _DATA_OFFSET, _DICTIONARY_OFFSET = 5, 7, 9, 11
_PAGE_TYPE, _PAGE_UNPACKED, _PAGE_PACKED = 1, 2, 3


@dataclass(frozen=True)
class Group:
    largest_row_bytes: int  # upper bound on the bytes that one row can take from dictionaries


def check_pages(path: str) -> list[Group]:
    """Check the sizes of all pages and return the row groups.

    Raises DataError if a page decompresses to far more than its size, and ValueError if the file is not Parquet.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            footer = _footer(file, size)
            return [_group(file, path, size, group) for group in footer[_ROW_GROUPS]]
        except (IndexError, KeyError, TypeError, AttributeError, struct.error) as exc:
            raise ValueError("The footer or a page header is unreadable.") from exc


def _footer(file: BinaryIO, size: int) -> dict[int, Any]:
    file.seek(max(0, size - 8))
    end = file.read(8)
    (length,) = struct.unpack("<I", end[:4])
    if end[4:] != _MAGIC or length > size - 8:
        raise ValueError("It does not end with a Parquet footer.")
    file.seek(size - 8 - length)
    return _Thrift(file.read(length)).struct()


def _group(file: BinaryIO, path: str, size: int, group: dict[int, Any]) -> Group:
    num_rows, largest = max(group[_ROWS_OF_GROUP], 1), 0
    for chunk in group[_COLUMNS]:
        meta = chunk[_META]
        values_per_row = -(-meta[_VALUES] // num_rows)
        for kind, packed, unpacked in _pages(file, size, meta):
            check_unpacked(path, packed, unpacked, "has a page that decompresses to")
            if kind == _DICTIONARY_PAGE:
                largest += unpacked * values_per_row
    return Group(largest)


def _pages(file: BinaryIO, size: int, meta: dict[int, Any]) -> Iterator[tuple[int, int, int]]:
    at = meta[_DATA_OFFSET]
    if 0 < meta.get(_DICTIONARY_OFFSET, 0) < at:
        at = meta[_DICTIONARY_OFFSET]
    end = min(at + meta[_PACKED_SIZE], size)
    while at < end:
        header, length = _header(file, at)
        packed = header[_PAGE_PACKED]
        if packed < 0 or header[_PAGE_UNPACKED] < 0:
            raise ValueError("A page has a negative size.")
        yield header[_PAGE_TYPE], packed, header[_PAGE_UNPACKED]
        at += length + packed


def _header(file: BinaryIO, at: int) -> tuple[dict[int, Any], int]:
    wanted = _HEADER_BYTES
    while True:
        file.seek(at)
        thrift = _Thrift(file.read(wanted))
        try:
            return thrift.struct(), thrift.at
        except IndexError:
            if len(thrift.data) < wanted or wanted >= _MOST_HEADER_BYTES:
                raise
            wanted *= 8


class _Thrift:
    """Parses Thrift's compact protocol. A struct becomes {field number: value}. Raises IndexError on truncated data."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self._depth = data, 0, 0

    def struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number, self._depth = 0, self._depth + 1
        if self._depth > 64:
            raise ValueError("It is nested too deeply.")
        while byte := self._byte():
            number = number + (byte >> 4) if byte >> 4 else self._signed()
            kind = byte & 15
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind)
        self._depth -= 1
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (1, 2, 3):  # a byte, or a boolean inside a list, which also takes one byte
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 7:
            return self._bytes(8)
        if kind == 8:
            return self._bytes(self._unsigned())
        if kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._unsigned()
            return [self.struct() if head & 15 == 12 else self._value(head & 15) for _ in range(count)]
        if kind == 12:
            return self.struct()
        raise ValueError(f"It has a value of unknown type {kind}.")

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _bytes(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self.data):
            raise IndexError
        return self.data[self.at - count : self.at]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("It has a number of more than 64 bits.")

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
