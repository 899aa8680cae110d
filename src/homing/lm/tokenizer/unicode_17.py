"""Letters and digits added in Unicode 17: gigatoken knows them, `tokenizers` does not yet.

Where one of them is next to another character, the two split text differently, and ids may differ from there on.
`tokenizers` defines the meaning of tokenizer.json, so it encodes the part of a document around such a character. They
are very rare in real text: unusual ideographs, and scripts that no font had before.
"""

from __future__ import annotations

import re
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

__all__ = ["NEW_LETTERS", "has_new_letter", "parts_by_new_letters"]

# First and last of each range; found by encoding every Unicode character with both, which a test repeats.
NEW_LETTERS = [
    *[(0x088F, 0x088F), (0x0C5C, 0x0C5C), (0x0CDC, 0x0CDC), (0xA7CE, 0xA7CF), (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4)],
    *[(0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9)],
    *[(0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3), (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E)],
    *[(0x18D80, 0x18DF2), (0x1E6C0, 0x1E6DE), (0x1E6E0, 0x1E6E2), (0x1E6E4, 0x1E6E5), (0x1E6E7, 0x1E6ED)],
    *[(0x1E6F0, 0x1E6F4), (0x1E6FE, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479)],
]
_ANY = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in NEW_LETTERS) + "]")
# First byte and first two bytes of each in UTF-8: checking only these is fast and rules out nearly all text.
_STARTS = {chr(number).encode()[:2] for first, last in NEW_LETTERS for number in range(first, last + 1)}
_FIRST_BYTES = sorted({start[:1] for start in _STARTS})
_IS_START = np.zeros(1 << 16, dtype=bool)
_IS_START[[int.from_bytes(start, "big") for start in _STARTS]] = True
# Places where both of our split patterns end a word regardless of context, so that both sides can be encoded
# separately: after a line end between two visible characters, and before a space between two letters.
_LINE_END = re.compile(rb"\n(?<=[!-~]\n)(?=[!-~])")
_SPACE = re.compile(rb" (?<=[A-Za-z] )(?=[A-Za-z])")


def has_new_letter(document: bytes) -> bool:
    """Return whether `document`, which must be UTF-8, contains one of these characters."""
    if document.isascii() or not any(byte in document for byte in _FIRST_BYTES):
        return False
    if len(document) > 1000:  # otherwise not worth it
        data = np.frombuffer(document, dtype=np.uint8)
        at = np.flatnonzero(data >= 0xE0)  # three or four bytes, so there is a second one
        if not _IS_START[(data[at].astype(np.uint16) << 8) | data[at + 1]].any():
            return False
    return _ANY.search(document.decode()) is not None


def parts_by_new_letters(document: bytes) -> list[tuple[bool, bytes]]:
    """Split the document into parts with (True) and without new letters; their concatenated ids are the document's."""
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
