"""Limits how much a compressed file may unpack to: a small file that gives gigabytes is a mistake or an attack.

Text compresses 2 to 10 times, very repetitive logs perhaps 200 times. Anything up to `FREE_BYTES` is accepted, because
a small file that repeats one line is harmless.
"""

from __future__ import annotations

from homing.errors import DataError
from homing.units import format_bytes

__all__ = ["FREE_BYTES", "MOST_TIMES", "check_unpacked", "is_bomb"]

FREE_BYTES = 256 << 20
MOST_TIMES = 1000


def is_bomb(packed_bytes: int, unpacked_bytes: int) -> bool:
    return unpacked_bytes > FREE_BYTES and unpacked_bytes > MOST_TIMES * max(packed_bytes, 1)


def check_unpacked(path: str, packed_bytes: int, unpacked_bytes: int, what: str = "decompresses to") -> None:
    if is_bomb(packed_bytes, unpacked_bytes):
        raise DataError(
            what=f"{path} {what} too much text for its size.",
            why=f"{packed_bytes:,} bytes give {format_bytes(unpacked_bytes)}, more than {MOST_TIMES:,} times as much.",
            fix="Remove the file from the list. If its text is genuine, decompress it and list the result instead.",
        )
