"""The alphabet in which byte-level BPE writes bytes as printable characters, one to one (GPT-2's table)."""

from __future__ import annotations

__all__ = ["BYTE_TO_CHAR", "CHAR_TO_BYTE", "as_text"]


def _table() -> dict[int, str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return table


BYTE_TO_CHAR = _table()
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}


def as_text(token: bytes) -> str:
    return "".join([BYTE_TO_CHAR[byte] for byte in token])
