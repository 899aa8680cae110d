"""Reads a source (plain, gzip, xz or zstd) as a stream of blocks of equal size.

    open_blocks(source) -> blocks of BLOCK_BYTES, the last one shorter; the same on every pass

`Reading` keeps track of the position in the file on disk (to report progress and to sample evenly) and, on request,
computes the file's sha256. Only the user can fix a damaged archive, so it is reported as a DataError.

The decompressed size of a file is limited: a small file that expands to gigabytes is a mistake or an attack. Text
compresses 2 to 10 times, very repetitive logs perhaps 200 times. Anything up to `FREE_BYTES` is accepted, because a
small file that repeats one line is harmless.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import os
import shlex
import zlib
from collections.abc import Iterator
from typing import Any

from homing.errors import DataError
from homing.find_source_files import Source
from homing.units import format_bytes

__all__ = ["BLOCK_BYTES", "FREE_BYTES", "MOST_TIMES", "Reading", "check_unpacked", "is_bomb", "open_blocks"]

BLOCK_BYTES = 1 << 20
# Number of bytes of a compressed file to read at a time. Even this many can decompress to several blocks of text. If
# the number were larger, the position in the file would be too inaccurate for even sampling.
_PACKED_BYTES = 1 << 16
_BYTE_ORDER_MARKS = (
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = 0x184D2A50  # the first of 16 consecutive magic numbers of skippable frames
_ZSTD_BLOCK_BYTES = 128 << 10  # maximum size of a decompressed zstd block
# Maximum number of zstd blocks per read. Empty blocks yield no output, so a read could otherwise go on without end.
_ZSTD_BLOCKS = 4096


class Reading(io.RawIOBase):
    """A file on disk, opened for reading. Counts the bytes that are read and, on request, hashes them."""

    def __init__(self, source: Source, *, is_hashed: bool = False) -> None:
        self.source = source
        self.num_bytes_read = 0  # for a Parquet file, the `parquet` module sets this
        # Keep a reference to the decompressor, because it closes its file when it is garbage-collected.
        self.unpacked: io.BufferedIOBase | None = None
        self._hash = hashlib.sha256() if is_hashed else None
        self._file: io.FileIO = open(source.path, "rb", buffering=0)  # noqa: SIM115, closed by close

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self.num_bytes_read += count
        if self._hash is not None:
            self._hash.update(memoryview(buffer)[:count])
        return count

    def sha256(self) -> str:
        """Return the sha256 of the whole file, including padding that a decompressor left unread."""
        assert self._hash is not None, "create the Reading with is_hashed=True"
        while self.read(BLOCK_BYTES):
            pass
        return self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()
        super().close()


def open_blocks(reading: Reading) -> Iterator[bytes]:
    source, num_bytes = reading.source, 0
    unpacked = reading.unpacked = _unpack(reading)
    try:
        while block := unpacked.read(BLOCK_BYTES):
            if not num_bytes and (encoding := _other_encoding(block)):
                raise _not_utf8(source, encoding)
            num_bytes += len(block)
            if source.packing:
                check_unpacked(source.path, source.num_bytes, num_bytes)
            yield block
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as exc:
        raise _damaged(reading.source, exc) from exc
    except OSError as exc:
        raise DataError(
            f"{reading.source.path} cannot be read to the end.", why=exc.strerror or str(exc), fix="Check the disk."
        ) from exc
    except Exception as exc:
        # Compare the name of the class, because ZstdError exists only if the zstandard package is installed.
        if type(exc).__name__ != "ZstdError":
            raise
        raise _damaged(reading.source, exc) from exc


def _unpack(reading: Reading) -> io.BufferedIOBase:
    packing = reading.source.packing
    if packing == "gzip":
        return gzip.GzipFile(fileobj=io.BufferedReader(reading, _PACKED_BYTES))
    if packing == "xz":
        return lzma.LZMAFile(io.BufferedReader(reading, _PACKED_BYTES))
    if packing == "zstd":
        return io.BufferedReader(_Zstd(reading), BLOCK_BYTES)
    return io.BufferedReader(reading, BLOCK_BYTES)


class _Zstd(io.RawIOBase):
    """Decompresses zstd frame by frame, a few blocks at a time.

    The stream reader of the zstandard package accepts a truncated file as complete, and its frame object decompresses
    all its input at once, although 16 KB can decompress to 512 MB. Therefore this class finds the block boundaries
    itself, by reading the 3-byte block headers.
    """

    def __init__(self, reading: Reading) -> None:
        from zstandard import ZstdDecompressor

        self._file = io.BufferedReader(reading, _PACKED_BYTES)
        self._new_frame = ZstdDecompressor().decompressobj
        self._frame: Any = None  # None between two frames
        self._has_checksum = False
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text and self._unpack_some():
            pass
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count

    def _unpack_some(self) -> bool:
        if self._frame is None:
            header = self._next_frame()
            if not header:
                return False
            self._frame = self._new_frame()
            self._text = memoryview(self._frame.decompress(header))
            return True
        packed, is_last = self._blocks()
        self._text = memoryview(self._frame.decompress(packed))
        if is_last:
            if not self._frame.eof:
                raise EOFError("The file ends inside a frame.")
            self._frame = None
        return True

    def _next_frame(self) -> bytes:
        """Return the header of the next frame, or b"" at the end of the file."""
        while magic := self._file.read(4):
            if len(magic) == 4 and _ZSTD_SKIPPABLE <= int.from_bytes(magic, "little") <= _ZSTD_SKIPPABLE + 15:
                self._skip(int.from_bytes(self._exactly(4), "little"))
                continue
            if magic != _ZSTD_MAGIC:
                return magic  # the zstandard package will reject this magic number with its own message
            flags = self._exactly(1)[0]
            is_single, self._has_checksum = bool(flags & 0x20), bool(flags & 0x04)
            sizes = ((1 if is_single else 0), 2, 4, 8)
            length = (0 if is_single else 1) + (0, 1, 2, 4)[flags & 3] + sizes[flags >> 6]
            return magic + bytes([flags]) + self._exactly(length)
        return b""

    def _blocks(self) -> tuple[bytes, bool]:
        """Return blocks that decompress to about BLOCK_BYTES at most, and whether the last of them ends the frame."""
        parts, num_bytes, is_last = list[bytes](), 0, False
        while num_bytes < BLOCK_BYTES and len(parts) < _ZSTD_BLOCKS and not is_last:
            header = self._exactly(3)
            value = int.from_bytes(header, "little")
            is_last, kind, size = bool(value & 1), value >> 1 & 3, value >> 3
            parts.append(header + self._exactly(1 if kind == 1 else size))
            # A compressed block does not declare its unpacked size, so assume the maximum.
            num_bytes += _ZSTD_BLOCK_BYTES if kind == 2 else size
        if is_last and self._has_checksum:
            parts.append(self._exactly(4))
        return b"".join(parts), is_last

    def _exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise EOFError("The file ends inside a frame.")
        return data

    def _skip(self, count: int) -> None:
        while count:
            count -= len(self._exactly(min(count, _PACKED_BYTES)))


def _other_encoding(beginning: bytes) -> str:
    """Return the UTF-16 or UTF-32 encoding that a byte-order mark or alternating NUL bytes indicate, else ""."""
    for mark, name in _BYTE_ORDER_MARKS:
        if beginning.startswith(mark):
            return name
    first, second = beginning[:16:2], beginning[1:16:2]
    if len(beginning) < 8:
        return ""
    if not any(second) and all(first):
        return "utf-16le"
    return "utf-16be" if not any(first) and all(second) else ""


def _not_utf8(source: Source, encoding: str) -> DataError:
    name = os.path.basename(source.path)
    target = (
        source.path + ".utf8" if source.form == "plain" else os.path.join(os.path.dirname(source.path), f"utf8-{name}")
    )
    path = shlex.quote(source.path)
    command = f"iconv -f {encoding} -t utf-8 {path} > {shlex.quote(target)}"
    return DataError(
        what=f"{source.path} is {encoding.upper()} text, not UTF-8.",
        why="It starts with the byte-order mark of that encoding, or every other byte is 0.",
        fix=f"Convert it with {command}, and remove {path} from the list."
        if not source.packing
        else f"Decompress it, then convert it with iconv -f {encoding} -t utf-8.",
    )


def _damaged(source: Source, exc: Exception) -> DataError:
    return DataError(
        what=f"{source.path} is not a complete {source.packing} file.",
        why=str(exc) or type(exc).__name__,
        fix="Download the file again, and make sure that its extension matches its compression.",
    )


FREE_BYTES = 256 << 20
MOST_TIMES = 1000


def is_bomb(packed_bytes: int, unpacked_bytes: int) -> bool:
    return unpacked_bytes > FREE_BYTES and unpacked_bytes > MOST_TIMES * max(packed_bytes, 1)


def check_unpacked(path: str, packed_bytes: int, unpacked_bytes: int, what: str = "decompresses to") -> None:
    if is_bomb(packed_bytes, unpacked_bytes):
        raise DataError(
            what=f"{path} {what} too much text for its size.",
            why=f"{packed_bytes:,} bytes expand to {format_bytes(unpacked_bytes)},"
            f" more than {MOST_TIMES:,} times as much.",
            fix="Remove the file from the list. If its text is genuine, decompress it and list the result instead.",
        )
