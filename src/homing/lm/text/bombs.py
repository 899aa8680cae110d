"""How much text a packed file may hold: a small file that unpacks to gigabytes is a mistake or an attack.

Text shrinks 2 to 10 times, the logs of a machine that repeats itself perhaps 200 times. Nothing is refused below
`FREE_BYTES`, because a small file that repeats one line is harmless.
"""

from __future__ import annotations

from homing.errors import DataError
from homing.units import format_bytes

__all__ = ["FREE_BYTES", "MOST_TIMES", "check_unpacked", "is_bomb"]

FREE_BYTES = 256 << 20
MOST_TIMES = 1000


def is_bomb(packed_bytes: int, unpacked_bytes: int) -> bool:
    return unpacked_bytes > FREE_BYTES and unpacked_bytes > MOST_TIMES * max(packed_bytes, 1)


def check_unpacked(path: str, packed_bytes: int, unpacked_bytes: int, what: str = "unpacks to") -> None:
    if is_bomb(packed_bytes, unpacked_bytes):
        raise DataError(
            what=f"{path} {what} too much text for its size.",
            why=f"{packed_bytes:,} bytes give {format_bytes(unpacked_bytes)}, over {MOST_TIMES:,} times as much.",
            fix="Leave the file out. If its text is really like this, unpack it and name the result.",
        )
