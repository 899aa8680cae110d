"""Letters and digits that came with Unicode 17: gigatoken knows them, `tokenizers` does not yet.

Where one of them meets another character, the two split text differently, and ids may differ from there on. What
tokenizer.json says is what `tokenizers` makes of it, so the part of a document around such a character is left to
`tokenizers`. Real text has them hardly ever: they are rare ideographs and scripts that no font had before.
"""

from __future__ import annotations

import re
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

__all__ = ["NEW_LETTERS", "has_new_letter", "parts_by_new_letters"]

# First and last of each range; found by encoding every character there is with both, which a test repeats.
NEW_LETTERS = [
    *[(0x088F, 0x088F), (0x0C5C, 0x0C5C), (0x0CDC, 0x0CDC), (0xA7CE, 0xA7CF), (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4)],
    *[(0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9)],
    *[(0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3), (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E)],
    *[(0x18D80, 0x18DF2), (0x1E6C0, 0x1E6DE), (0x1E6E0, 0x1E6E2), (0x1E6E4, 0x1E6E5), (0x1E6E7, 0x1E6ED)],
    *[(0x1E6F0, 0x1E6F4), (0x1E6FE, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479)],
]
_ANY = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in NEW_LETTERS) + "]")
# The first byte and the first two bytes of each in UTF-8: looking at those alone is so fast that nearly all text is
# through after that.
_STARTS = {chr(number).encode()[:2] for first, last in NEW_LETTERS for number in range(first, last + 1)}
_FIRST_BYTES = sorted({start[:1] for start in _STARTS})
_IS_START = np.zeros(1 << 16, dtype=bool)
_IS_START[[int.from_bytes(start, "big") for start in _STARTS]] = True
# Where both of our splits end a word whatever stands before and after, so that both sides can be encoded alone: after
# a line's end between two visible characters, and before the space between two letters.
_LINE_END = re.compile(rb"\n(?<=[!-~]\n)(?=[!-~])")
_SPACE = re.compile(rb" (?<=[A-Za-z] )(?=[A-Za-z])")


def has_new_letter(document: bytes) -> bool:
    """`document` must be UTF-8."""
    if document.isascii() or not any(byte in document for byte in _FIRST_BYTES):
        return False
    if len(document) > 1000:  # else it is not worth the while
        data = np.frombuffer(document, dtype=np.uint8)
        at = np.flatnonzero(data >= 0xE0)  # three bytes or four, so there is a second one
        if not _IS_START[(data[at].astype(np.uint16) << 8) | data[at + 1]].any():
            return False
    return _ANY.search(document.decode()) is not None


def parts_by_new_letters(document: bytes) -> list[tuple[bool, bytes]]:
    """The document in parts with and without new letters (True: with), whose ids are the document's, end to end."""
    parts: list[tuple[bool, bytes]] = []
    for line in _cut(document, _LINE_END, 1):
        if has_new_letter(line):
            parts += [(has_new_letter(part), part) for part in _cut(line, _SPACE, 0)]
        else:
            parts.append((False, line))
    runs = groupby(parts, key=itemgetter(0))
    return [(is_odd, b"".join(part for _, part in run)) for is_odd, run in runs]


def _cut(text: bytes, border: re.Pattern[bytes], offset: int) -> list[bytes]:
    ends = [match.start() + offset for match in border.finditer(text)]
    return [text[start:end] for start, end in pairwise([0, *ends, len(text)])]
