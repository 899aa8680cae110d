"""Splits text into documents of bounded size: at <|endoftext|>, or one per JSON line or Parquet row.

plain text   The marker <|endoftext|> ends a document and is not part of its text. A file with no marker in its first
             block is cut at paragraph breaks into documents of about `Cuts.unmarked_bytes`, so that one big file can
             still be shuffled and split into train and val. A file smaller than twice that size stays whole.
JSON lines   The text field of each line is a document.
Parquet      The text column of each row is a document.
all          A document larger than `MAX_DOCUMENT_BYTES` is cut at paragraph breaks too, so that memory use depends on
             the size of a document, not of the file. Only markers, a byte-order mark and blank documents are dropped.

Cuts depend only on the text, not on the blocks in which it is read, so every pass over a file gives the same documents.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from homing.errors import DataError
from homing.lm.data.text.parquet import texts_of
from homing.lm.data.text.read_bytes import Reading, open_blocks

__all__ = ["MARKER", "MAX_DOCUMENT_BYTES", "MAX_LINE_BYTES", "Cuts", "cut", "documents_of", "unmarked_bytes_for"]

MARKER = b"<|endoftext|>"
MAX_DOCUMENT_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
# Common formats that are not text: first bytes, file name endings, description, and conversion command.
_NO_TEXT = (
    (b"%PDF", "", "a PDF", "pdftotext {path} {text}"),
    (b"PK\x03\x04", (".docx", ".odt", ".epub"), "a zipped document", "pandoc -t plain -o {text} {path}"),
    (b"PK\x03\x04", "", "a zip", "unzip {path}"),
    (b"\xd0\xcf\x11\xe0", "", "an old Office file, such as .doc", "libreoffice --convert-to txt:Text {path}"),
)
# Where to cut, best first: after a blank line (with LF or CRLF), after a line, after a word.
_BORDERS = (b"\n\n", b"\n\r\n", b"\n", b" ")


@dataclass
class Cuts:
    """Settings for splitting text, and statistics collected while splitting it."""

    unmarked_bytes: int
    text_field: str = "text"
    is_checked: bool = True  # whether to validate UTF-8; only the first pass needs to
    num_plain_files: int = 0
    num_marked_files: int = 0
    files_cut: list[str] = field(default_factory=list)  # files without markers that are too large for one document
    windows_files: list[str] = field(default_factory=list)  # files with CRLF line endings


def unmarked_bytes_for(total_bytes: int) -> int:
    """Return the size of the documents into which text without markers is cut.

    It is small enough that even a short text becomes many documents, but large enough that each has some context.
    """
    return min(max(total_bytes // 256, 8 << 10), 256 << 10)


def documents_of(reading: Reading, cuts: Cuts) -> Iterator[bytes]:
    """Yield the non-blank documents of one file, in order."""
    for document in _CUTTERS[reading.source.form](reading, cuts):
        if not document.isspace() and document:
            yield document


def cut(text: bytes, limit: int) -> Iterator[bytes]:
    """Yield `text` in parts of at least `limit` and less than twice `limit` bytes. The last part may be smaller."""
    start = 0
    while len(text) - start >= 2 * limit:
        end = _border(text, start + limit, start + 2 * limit)
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def _border(text: bytes, first: int, last: int) -> int:
    """Return a position in [first, last] to cut at: after the best boundary found there, else between characters."""
    for border in _BORDERS:
        at = text.find(border, first, last)
        if at >= 0:
            return at + len(border)
    while last < len(text) and text[last] & 0xC0 == 0x80 and last > first:  # inside a multi-byte character
        last -= 1
    return last


def _plain_documents(reading: Reading, cuts: Cuts) -> Iterator[bytes]:
    path, offset = reading.source.path, 0
    blocks = open_blocks(reading)
    rest = next(blocks, b"")
    if rest.startswith(_BOM):
        rest, offset = rest[len(_BOM) :], len(_BOM)
    cuts.num_plain_files += 1
    if b"\r\n" in rest:
        cuts.windows_files.append(path)
    # Count the file here and not after the loop, because callers that need only part of the text never reach the end.
    is_marked = MARKER in rest
    cuts.num_marked_files += is_marked
    limit = MAX_DOCUMENT_BYTES // 2 if is_marked else cuts.unmarked_bytes
    num_cuts = 0
    block: bytes | None = b""
    while block is not None:
        *whole, rest = (rest + block).split(MARKER)
        if whole and not is_marked:
            is_marked = True
            cuts.num_marked_files += 1
        for text in whole:
            yield from _checked(cut(text, limit), path, offset, cuts)
            offset += len(text) + len(MARKER)
        # `rest` may end with the beginning of a marker, so cut it only where more text is certain to follow.
        start = 0
        while len(rest) - start >= 2 * limit + len(MARKER):
            end = _border(rest, start + limit, start + 2 * limit)
            if not is_marked and not num_cuts:
                cuts.files_cut.append(path)
            num_cuts += 1
            yield from _checked([rest[start:end]], path, offset, cuts)
            offset, start = offset + end - start, end
        rest = rest[start:]
        block = next(blocks, None)
    last = list(cut(rest, limit))
    if not is_marked and not num_cuts and len(last) > 1:
        cuts.files_cut.append(path)
    yield from _checked(last, path, offset, cuts)


def _checked(texts: Iterable[bytes], path: str, offset: int, cuts: Cuts) -> Iterator[bytes]:
    for text in texts:
        if cuts.is_checked and not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError as exc:
                raise _not_utf8(path, offset + exc.start, text[exc.start], exc.reason) from exc
        offset += len(text)
        yield text


def _not_utf8(path: str, offset: int, byte: int, reason: str) -> DataError:
    quoted = shlex.quote(path)
    # The user must remove the original from the list, because a glob would match both it and the converted file.
    left_out = f"and remove {quoted} from the list"
    for beginning, endings, kind, how in _NO_TEXT:
        if path.lower().endswith(endings) and _begins_with(path, beginning):
            return DataError(
                what=f"{path} is {kind}, not text.",
                why=f"It starts with {beginning!r}, and byte {offset:,} is not UTF-8.",
                fix=f"Convert it with {how.format(path=quoted, text=shlex.quote(path + '.txt'))}, {left_out}.",
            )
    return DataError(
        what=f"{path} is not UTF-8 text: byte 0x{byte:02x} at offset {offset:,}.",
        why=f"{reason}. The file may be compressed, binary or Latin-1.",
        fix=f"Convert it with iconv -f latin1 -t utf-8 {quoted} > {shlex.quote(path + '.utf8')}, {left_out}.",
    )


def _begins_with(path: str, beginning: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(beginning)) == beginning
    except OSError:
        return False


def _json_documents(reading: Reading, cuts: Cuts) -> Iterator[bytes]:
    path = reading.source.path
    for number, line in enumerate(_lines(reading), start=1):
        if line.isspace() or not line:
            continue
        try:
            value = json.loads(line)
        except UnicodeDecodeError as exc:
            raise _bad_line(path, number, f"not UTF-8: byte 0x{line[exc.start]:02x} at column {exc.start + 1}") from exc
        except ValueError as exc:
            raise _bad_line(path, number, f"not JSON: {exc}") from exc
        except RecursionError as exc:
            raise _bad_line(path, number, "not usable JSON: nested too deeply") from exc
        if not isinstance(value, dict):
            raise _bad_line(path, number, f"expected an object with a text field, found {type(value).__name__}")
        text = value.get(cuts.text_field)
        if not isinstance(text, str):
            names = ", ".join(list(value)[:8]) or "none"
            got = f"no field {cuts.text_field!r}" if text is None else f"field {cuts.text_field!r} is not text"
            raise _bad_line(
                path,
                number,
                f"{got}; fields found: {names}",
                "Set the field: data.text_field, or --text-field in homing eval",
            )
        try:
            document = text.encode()
        except UnicodeEncodeError as exc:
            raise _bad_line(path, number, f"unpaired surrogate at character {exc.start + 1} of the text") from exc
        yield from cut(document, MAX_DOCUMENT_BYTES // 2)


def _lines(reading: Reading) -> Iterator[bytes]:
    rest, number = b"", 1
    for block in open_blocks(reading):
        if b"\n" not in block:
            rest += block
        else:
            *whole, rest = (rest + block).split(b"\n")
            yield from whole
            number += len(whole)
        if len(rest) > MAX_LINE_BYTES:
            raise _bad_line(reading.source.path, number, f"longer than {MAX_LINE_BYTES:,} bytes")
    yield rest


def _bad_line(path: str, number: int, problem: str, fix: str = "") -> DataError:
    return DataError(
        what=f"Invalid line {path}:{number}: {problem}.",
        why="Each line must be one JSON object.",
        fix=fix or "Fix the line.",
    )


def _parquet_documents(reading: Reading, cuts: Cuts) -> Iterator[bytes]:
    path = reading.source.path
    for number, text in texts_of(reading, cuts.text_field):
        if cuts.is_checked and not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError as exc:
                raise DataError(
                    what=f"Row {path}:{number} is not UTF-8: byte 0x{text[exc.start]:02x} at offset {exc.start:,}.",
                    why=f"{exc.reason}. Column {cuts.text_field!r} is declared as text.",
                    fix="Rewrite the file with UTF-8 text, or remove it from the list.",
                ) from exc
        yield from cut(text, MAX_DOCUMENT_BYTES // 2)


_CUTTERS = {"plain": _plain_documents, "jsonl": _json_documents, "parquet": _parquet_documents}
