"""Checks the sizes that a Parquet file declares, before pyarrow allocates memory for them.

    footer -> row groups -> column chunks -> the header of every page -> sizes, checked

A page is unpacked as a whole, and a dictionary page supplies values to any number of rows: in both ways a file of 1 KB
can demand gigabytes. pyarrow does not expose page headers, so this module parses the part of Thrift's compact protocol
that they use.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from homing.lm.data.text.size_limits import check_unpacked

__all__ = ["Group", "check_pages"]

_MAGIC = b"PAR1"
_HEADER_BYTES = 1 << 10  # usually under 100; statistics make it longer
_MOST_HEADER_BYTES = 64 << 20
_DICTIONARY_PAGE = 2
# Field numbers of parquet.thrift.
_ROW_GROUPS, _COLUMNS, _ROWS_OF_GROUP, _META = 4, 1, 3, 3
_VALUES, _PACKED_SIZE, _DATA_OFFSET, _DICTIONARY_OFFSET = 5, 7, 9, 11
_PAGE_TYPE, _PAGE_UNPACKED, _PAGE_PACKED = 1, 2, 3


@dataclass(frozen=True)
class Group:
    largest_row_bytes: int  # upper bound of what one row can take from dictionaries


def check_pages(path: str) -> list[Group]:
    """Return each row group.

    Raises DataError if a page unpacks to far more than its size; ValueError if not Parquet.
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
    """Parser of the compact protocol; structs become {field number: value}. IndexError if the data ends too early."""

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
        if kind in (1, 2, 3):  # a boolean inside a list, or a byte
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
