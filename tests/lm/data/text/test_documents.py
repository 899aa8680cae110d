"""Bytes to documents: nothing lost, nothing too large, every pass the same."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from homing.errors import DataError
from homing.find_source_files import find_sources
from homing.lm.data.text import read_bytes
from homing.lm.data.text.documents import MARKER, MAX_DOCUMENT_BYTES, Cuts, cut, documents_of, unmarked_bytes_for
from homing.lm.data.text.read_bytes import Reading

Pack = Callable[[bytes], bytes]


def documents(path: Path, *, unmarked_bytes: int = 8192, text_field: str = "text") -> list[bytes]:
    source = find_sources([str(path)], key="text").sources[0]
    with Reading(source, is_hashed=True) as reading:
        return list(documents_of(reading, Cuts(unmarked_bytes, text_field)))


@pytest.mark.acceptance(16)
def test_the_marker_ends_a_document_and_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n<|endoftext|>\ntwo<|endoftext|><|endoftext|> \n<|endoftext|>three")
    assert documents(path) == [b"one\n", b"\ntwo", b"three"]


def test_a_small_file_without_a_marker_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"first paragraph\n\nsecond paragraph\n")
    assert documents(path) == [path.read_bytes()]


def test_a_large_file_without_a_marker_is_cut_at_paragraphs_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "play.txt"
    path.write_text("".join(f"Speaker {n}:\nWords that are spoken, number {n}.\n\n" for n in range(40_000)))
    got = documents(path)
    assert b"".join(got) == path.read_bytes()
    assert all(document.endswith(b"\n\n") for document in got)
    assert all(8192 <= len(document) < 2 * 8192 for document in got[:-1])


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffhello".encode())
    assert documents(path) == [b"hello"]


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 20])
def test_where_text_is_cut_does_not_depend_on_the_blocks_it_came_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    path = tmp_path / "a.txt"
    # The first block decides whether a file counts as marked, so every block size must see a marker in it or none.
    texts = ["é" * 40, "word " * 30, "line\n" * 30, "p\n\n" * 50, "x" * 79, "x" * 80, "x" * 81, "x" * 93, ""]
    body = "".join("y" * 100 + text for text in texts)
    path.write_bytes(body.encode())
    monkeypatch.setattr(read_bytes, "BLOCK_BYTES", block_bytes)
    assert documents(path, unmarked_bytes=40) == list(cut(body.encode(), 40))


@given(st.text(max_size=400), st.integers(min_value=4, max_value=50))
def test_cutting_loses_nothing_and_never_splits_a_character(text: str, limit: int) -> None:
    parts = list(cut(text.encode(), limit))
    assert b"".join(parts) == text.encode()
    assert "".join(part.decode() for part in parts) == text
    assert all(len(part) <= 2 * limit for part in parts)


@pytest.mark.acceptance(18)
def test_a_document_past_the_bound_is_cut_also_between_markers(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"small" + MARKER + b"word " * 700_000 + MARKER + b"end")
    got = documents(path)
    assert got[0] == b"small"
    assert got[-1] == b"end"
    assert max(map(len, got)) <= MAX_DOCUMENT_BYTES
    assert b"".join(got[1:-1]) == b"word " * 700_000


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.txt.gz", gzip.compress),
        ("a.txt.xz", lzma.compress),
        ("a.txt.zst", lambda data: zstandard.compress(data[:10]) + zstandard.compress(data[10:])),
    ],
)
def test_packed_files_give_the_same_documents(tmp_path: Path, name: str, pack: Pack) -> None:
    data = "eins\n<|endoftext|>zwei äöü ".encode() * 1000
    (tmp_path / "plain.txt").write_bytes(data)
    (tmp_path / name).write_bytes(pack(data))
    assert documents(tmp_path / name) == documents(tmp_path / "plain.txt")


@pytest.mark.parametrize(
    ("name", "pack"), [("a.gz", gzip.compress), ("a.xz", lzma.compress), ("a.zst", zstandard.compress)]
)
def test_a_damaged_archive_is_named(tmp_path: Path, name: str, pack: Pack) -> None:
    packed = pack(random.Random(1).randbytes(50_000).hex().encode())
    (tmp_path / name).write_bytes(b"not packed at all")
    with pytest.raises(DataError, match=r"is not a complete"):
        documents(tmp_path / name)
    (tmp_path / name).write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"is not a complete"):
        documents(tmp_path / name)


def test_json_lines_give_one_document_each(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    lines = [json.dumps({"body": text}) for text in ("one", "zwei ä", "<|endoftext|> is text here", "")]
    path.write_bytes(gzip.compress(("\n\n".join(lines) + "\n").encode()))
    assert documents(path, text_field="body") == [b"one", "zwei ä".encode(), b"<|endoftext|> is text here"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "cut', r"a\.jsonl:2: not JSON"),
        (b'["text"]', r"a\.jsonl:2: expected an object"),
        (b'{"body": "x", "id": 1}', r"a\.jsonl:2: no field 'text'; fields found: body, id"),
        (b'{"text": 5}', r"a\.jsonl:2: field 'text' is not text"),
        (b'{"text": "\xff"}', r"a\.jsonl:2: not UTF-8"),
        (b'{"text": "\\ud800"}', r"a\.jsonl:2: unpaired surrogate"),
        (b"[" * 100_000, r"a\.jsonl:2: not usable JSON"),
    ],
)
def test_a_bad_json_line_is_named_by_its_number(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=complaint):
        documents(path)


@pytest.mark.parametrize(
    ("encoding", "messages"), [("utf-16", "utf-16"), ("utf-16-be", "utf-16be"), ("latin1", "latin1")]
)
def test_the_command_that_mends_another_encoding_can_be_pasted(tmp_path: Path, encoding: str, messages: str) -> None:
    path = tmp_path / "my notes.txt"
    path.write_bytes("caf\u00e9 au lait".encode(encoding))
    with pytest.raises(DataError) as raised:
        documents(path)
    assert (
        raised.value.fix
        == f"Convert it with iconv -f {messages} -t utf-8 '{path}' > '{path}.utf8', and remove '{path}' from the list."
    )


@pytest.mark.parametrize(
    ("name", "beginning", "kind", "command"),
    [
        ("my notes", b"%PDF-1.7\n", "a PDF", "pdftotext '{path}' '{path}.txt'"),
        ("my notes.DOCX", b"PK\x03\x04", "a zipped document", "pandoc -t plain -o '{path}.txt' '{path}'"),
        ("my notes", b"PK\x03\x04", "a zip", "unzip '{path}'"),
        (
            "my notes.doc",
            b"\xd0\xcf\x11\xe0",
            r"an old Office file, such as \.doc",
            "libreoffice --convert-to txt:Text",
        ),
    ],
)
def test_what_only_looks_like_text_to_its_owner_is_called_what_it_is(
    tmp_path: Path, name: str, beginning: bytes, kind: str, command: str
) -> None:
    path = tmp_path / name
    path.write_bytes(beginning + b"\xff\xfe\xfd" * 100)
    with pytest.raises(DataError, match=f"{kind}, not text") as raised:
        documents(path)
    assert raised.value.fix.startswith("Convert it with " + command.format(path=path))
    # Otherwise a pattern would match it again, in addition to the result.
    assert raised.value.fix.endswith(f", and remove '{path}' from the list.")


@pytest.mark.parametrize("marker", [b"", b"<|endoftext|>"])
def test_text_that_is_not_utf8_is_named_by_its_byte(tmp_path: Path, marker: bytes) -> None:
    path = tmp_path / "a.txt"
    good = b"good text\n\n" * 30_000 + marker
    path.write_bytes(good + b"caf\xe9 au lait\n" + b"more\n" * 10_000)
    with pytest.raises(DataError, match=f"byte 0xe9 at offset {len(good) + 3:,}"):
        documents(path)


def test_little_text_gives_small_documents_and_much_text_large_ones() -> None:
    assert unmarked_bytes_for(1_100_000) == 8192
    assert 8192 < unmarked_bytes_for(10_000_000) < 256 << 10
    assert unmarked_bytes_for(10**12) == 256 << 10
