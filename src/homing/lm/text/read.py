"""A source as a stream of bytes: plain, gzip, xz or zstd, in blocks of one size.

    open_blocks(source) -> blocks, each BLOCK_BYTES long but the last, the same on every pass

`Reading` follows along: how far into the file on disk (for progress and an even sample), and, when asked, the sha256 of
the file as it lies there. A damaged archive is the person's to mend, so it is a DataError here.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import Any

from homing.errors import DataError
from homing.text_sources import Source

__all__ = ["BLOCK_BYTES", "Reading", "open_blocks"]

BLOCK_BYTES = 1 << 20
# Of a packed file at a time: it holds several blocks of text, and an even sample needs to know where it is.
_PACKED_BYTES = 1 << 16
_ZSTD_BYTES = 1 << 14  # unpacked at one go, so less


class Reading(io.RawIOBase):
    """The file on disk, counted and, if asked, hashed while someone else unpacks it."""

    def __init__(self, source: Source, *, is_hashed: bool = False) -> None:
        self.source = source
        self.num_bytes_read = 0  # counted here; of a Parquet file told by who reads its rows
        self.unpacked: io.BufferedIOBase | None = None  # held here: when it goes, it closes what it reads from
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
        """Of the whole file: what an unpacker left unread (padding after the last stream) is read now."""
        assert self._hash is not None, "this reading was not asked to hash"
        while self.read(BLOCK_BYTES):
            pass
        return self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()
        super().close()


def open_blocks(reading: Reading) -> Iterator[bytes]:
    unpacked = reading.unpacked = _unpack(reading)
    try:
        while block := unpacked.read(BLOCK_BYTES):
            yield block
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as exc:
        raise _damaged(reading.source, exc) from exc
    except OSError as exc:
        raise DataError(
            f"{reading.source.path} cannot be read to its end.", why=exc.strerror or str(exc), fix="Check the disk."
        ) from exc
    except Exception as exc:
        # zstandard's own error; its class is known only where the package is.
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
    """Frame after frame. The package's own stream reader takes a file cut short for a whole one."""

    def __init__(self, reading: Reading) -> None:
        from zstandard import ZstdDecompressor

        self._reading = reading
        self._new_frame = ZstdDecompressor().decompressobj
        self._frame: Any = None  # None between two frames
        self._packed = self._text = b""

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
        packed = self._packed or self._reading.read(_ZSTD_BYTES)
        self._packed = b""
        if not packed:
            if self._frame is not None:
                raise EOFError("The file ends inside a frame.")
            return False
        self._frame = self._frame or self._new_frame()
        self._text = self._frame.decompress(packed)
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
        return True


def _damaged(source: Source, exc: Exception) -> DataError:
    return DataError(
        what=f"{source.path} is not whole {source.packing}.",
        why=str(exc) or type(exc).__name__,
        fix="Fetch the file again; its ending must say how it is packed.",
    )
