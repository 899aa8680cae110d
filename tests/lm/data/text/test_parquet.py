"""Parquet rows to documents: the same as JSON lines, in little memory, and every fault names file and row."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from homing.errors import DataError, UsageError
from homing.find_source_files import find_sources, need_reader
from homing.lm.data.text.documents import MAX_DOCUMENT_BYTES, Cuts, documents_of
from homing.lm.data.text.parquet import rows_of
from homing.lm.data.text.read_bytes import Reading
from homing.pip_command import pip_install

in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def documents(path: Path, text_field: str = "text") -> list[bytes]:
    source = find_sources([str(path)], key="text").sources[0]
    with Reading(source, is_hashed=True) as reading:
        return list(documents_of(reading, Cuts(8192, text_field)))


def rows(path: Path) -> list[Any]:
    source = find_sources([str(path)], key="text").sources[0]
    with Reading(source) as reading:
        return list(rows_of(reading))


def write(path: Path, columns: dict[str, Any], **how: Any) -> Path:
    pq.write_table(pa.table(columns), path, **how)
    return path


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@in_one_folder
@given(texts=st.lists(TEXT, min_size=1, max_size=40), rows_per_group=st.integers(1, 50))
def test_rows_are_the_documents_that_json_lines_are(tmp_path: Path, texts: list[str], rows_per_group: int) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(json.dumps({"text": text, "id": n}) for n, text in enumerate(texts)), encoding="utf-8")
    table = write(tmp_path / "a.parquet", {"id": list(range(len(texts))), "text": texts}, row_group_size=rows_per_group)
    assert documents(table) == documents(lines)


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "brotli", "lz4"])
def test_every_way_to_keep_text_reads_the_same(tmp_path: Path, kind: pa.DataType, compression: str) -> None:
    texts = ["Größe", "漢字 and 🎉", "Größe", "x" * 5000, "Größe"]
    path = write(tmp_path / "a.PARQUET", {"text": pa.array(texts).cast(kind)}, compression=compression)
    assert documents(path) == [text.encode() for text in texts]


def test_the_column_is_named_as_the_field_of_a_line_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["no"], "content": ["yes"], "a.b": ["dotted"], "a": [{"b": "inner"}]})
    assert documents(path, "content") == [b"yes"]
    assert documents(path, "a.b") == [b"dotted"]


def test_a_long_document_is_cut_as_one_of_a_line_is(tmp_path: Path) -> None:
    text = "A paragraph of some words.\n\n" * (3 * MAX_DOCUMENT_BYTES // 28)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    got = documents(write(tmp_path / "a.parquet", {"text": [text]}))
    assert len(got) > 2
    assert got == documents(tmp_path / "a.jsonl")


# --- how far, how much ------------------------------------------------------------------------------------------------


def test_memory_is_bounded_however_large_a_row_group_is(tmp_path: Path) -> None:
    chance = random.Random(1)
    some = ["".join(chance.choices("abcdefgh ", k=4000)) for _ in range(400)]
    texts = [f"{number} {some[number % len(some)]}" for number in range(8000)]
    path = write(tmp_path / "a.parquet", {"text": texts, "more": texts}, row_group_size=len(texts))
    num_bytes = sum(map(len, texts))
    assert pq.ParquetFile(path).metadata.row_group(0).total_byte_size > 2 * num_bytes > 60e6, "one group, and large"
    source = find_sources([str(path)], key="text").sources[0]
    del texts
    pool, held, seen = pa.default_memory_pool(), 0, 0
    before = pool.bytes_allocated()
    with Reading(source) as reading:
        for document in documents_of(reading, Cuts(8192)):
            seen += len(document)
            held = max(held, pool.bytes_allocated() - before)
    assert seen == num_bytes
    assert held < num_bytes / 2, "as much for a group of any size; whole columns would be two and four times this"


def test_progress_is_even_over_the_rows_though_one_column_is_read(tmp_path: Path) -> None:
    count = 4000
    noise = [random.Random(n).randbytes(400) for n in range(count)]
    path = write(tmp_path / "a.parquet", {"noise": noise, "text": ["some words"] * count}, row_group_size=1000)
    source = find_sources([str(path)], key="text").sources[0]
    with Reading(source, is_hashed=True) as reading:
        seen = [reading.num_bytes_read / source.num_bytes for _ in documents_of(reading, Cuts(8192))]
        assert seen == sorted(seen)
        assert all(abs(share - number / count) < 0.2 for number, share in enumerate(seen))
        assert seen[-1] == 1.0
        assert reading.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()


# --- what is wrong with it --------------------------------------------------------------------------------------------


def test_a_missing_column_names_those_that_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"content": ["x"], "url": ["y"]})
    with pytest.raises(DataError, match=r"a\.parquet: no column 'text'; columns found: content, url\.") as caught:
        documents(path)
    assert "data.text_field" in caught.value.fix


@pytest.mark.parametrize(
    ("column", "complaint"),
    [
        (["a", None, "b"], r"a\.parquet:2 has no text: column 'text' is null"),
        ([1, 2, 3], "column 'text' is not text, but int64"),
        ([b"a", b"b", b"c"], "column 'text' is not text, but binary"),
        ([["a"], ["b"], ["c"]], "column 'text' is not text, but list"),
        (pa.array([], pa.string()), r"a\.parquet is empty"),
    ],
)
def test_a_column_that_is_not_all_text_is_refused(tmp_path: Path, column: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        documents(write(tmp_path / "a.parquet", {"text": column}))


def test_one_name_for_two_columns_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="more than one column 'text'; columns found: text, text"):
        documents(tmp_path / "a.parquet")


def not_utf8(texts: list[bytes]) -> pa.Array:
    """Text with bytes that were never validated, as a careless writer leaves it."""
    plain = pa.array(texts, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(plain), plain.buffers())


def test_text_that_is_not_utf8_is_reported_with_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": not_utf8([b"good", b"sm\xf8rrebr\xf8d", b"good"])})
    with pytest.raises(DataError, match=r"a\.parquet:2 is not UTF-8: byte 0xf8 at offset 2"):
        documents(path)
    (first, one), (second, other), (third, three) = rows(path)
    assert (first, one, second, third, three) == (1, {"text": "good"}, 2, 3, {"text": "good"})
    assert isinstance(other, UnicodeDecodeError)


@pytest.mark.parametrize("kept", [3, 0.4, 0.99])
def test_a_file_that_breaks_off_is_named(tmp_path: Path, kept: float) -> None:
    path = write(tmp_path / "a.parquet", {"text": [f"text {n}" for n in range(1000)]})
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if kept < 1 else int(kept)])
    for read in (documents, rows):
        with pytest.raises(DataError, match=r"a\.parquet is not a complete Parquet file"):
            read(path)


def test_a_wrong_byte_is_reported_or_changes_no_text(tmp_path: Path) -> None:
    """Pages have sums; of the footer much is of no use here, such as the name of the writer."""
    texts = [f"text number {n} of some" for n in range(300)]
    columns = {"text": texts, "n": list(range(300))}
    path = write(tmp_path / "a.parquet", columns, write_page_checksum=True, row_group_size=100)
    good, as_written, messages = path.read_bytes(), documents(path), 0
    for at in range(0, len(good), 5):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :])
        with contextlib.suppress(DataError):
            rows(path)
        try:
            got, complaint = documents(path), ""
        except DataError as exc:
            got, complaint = as_written, exc.what
            messages += 1
        assert got == as_written, at
        assert not complaint or str(path) in complaint
    assert messages > len(good) // 5 // 3


def test_a_packed_one_is_refused_for_it_is_packed_inside(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["x"]}).rename(tmp_path / "a.parquet.gz")
    with pytest.raises(DataError, match=r"a\.parquet\.gz cannot be read in compressed form"):
        documents(path)


def test_without_the_reader_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["x"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"a\.parquet needs the extra `parquet`") as caught:
        documents(path)
    assert caught.value.fix == pip_install("parquet")
    need_reader("a.jsonl")
    (tmp_path / "a.txt").write_text("no matter to other text")
    assert documents(tmp_path / "a.txt")


# --- whole rows -------------------------------------------------------------------------------------------------------


def test_rows_have_the_fields_that_they_had_before_they_were_made_columns(tmp_path: Path) -> None:
    given = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}], "n": 1},
        {"messages": [{"role": "user", "content": "c"}], "tools": [{"name": "f", "arguments": {"x": 1}}]},
        {"messages": [], "tools": [{"name": "g", "arguments": {"y": [1, 2]}}]},
    ]
    pq.write_table(
        pa.Table.from_pylist([{**dict.fromkeys(("n", "tools")), **row} for row in given]), tmp_path / "a.parquet"
    )
    assert rows(tmp_path / "a.parquet") == list(enumerate(given, start=1))


def test_timestamps_next_to_a_conversation_are_ignored(tmp_path: Path) -> None:
    times = {
        "at": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")),
        "there": pa.array([0], pa.timestamp("us", tz="Nowhere/Land")),
        "took": pa.array([1_000_000_001], pa.duration("ns")),
    }
    path = write(tmp_path / "a.parquet", {"prompt": ["Who?"], **times, "completion": ["I."]})
    assert rows(path) == [(1, {"prompt": "Who?", "completion": "I."})]
    assert rows(write(tmp_path / "b.parquet", times)) == [(1, {})]
