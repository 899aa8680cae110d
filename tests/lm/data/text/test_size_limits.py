"""Small files that unpack to very much, and files in another encoding: refused with the numbers, in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from homing.errors import DataError
from homing.lm.data.text import Cuts, documents_of, find_sources
from homing.lm.data.text.read_bytes import Reading, open_blocks

MIB = 1 << 20

# Prints bytes of text, the memory it took beyond the imports, and the error if there was one.
READ = """
import json, resource, sys
from homing.errors import HomingError
from homing.lm.data.text import Cuts, documents_of, find_sources
from homing.lm.data.text.read_bytes import Reading
import pyarrow.parquet, zstandard
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before, num_bytes, error = peak(), 0, ""
(source,) = find_sources([sys.argv[1]], key="text").sources
try:
    with Reading(source) as reading:
        for document in documents_of(reading, Cuts(1 << 20)):
            num_bytes += len(document)
except HomingError as exc:
    error = str(exc)
print(json.dumps([num_bytes, peak() - before, error]))
"""


def read_apart(path: Path, timeout_s: float = 120) -> tuple[int, int, str]:
    """Bytes of text, MiB of memory, and the error: in a process of its own, so that its memory can be measured."""
    argv = [sys.executable, "-c", READ, str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=True)
    num_bytes, num_mib, error = json.loads(done.stdout)
    return num_bytes, num_mib, error


def packed(path: Path, num_mib: int) -> Path:
    zstandard = pytest.importorskip("zstandard")
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as writer:
        for _ in range(num_mib):
            writer.write(b"0123456789abcde\n" * (MIB // 16))
    return path


@pytest.mark.regression("decompression-bombs")
def test_a_zst_file_that_unpacks_to_too_much_is_refused_in_little_memory(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.txt.zst", 400)
    assert path.stat().st_size < 90_000
    _, num_mib, error = read_apart(path)
    assert f"{path.stat().st_size:,} bytes expand to" in error
    assert "more than 1,000 times as much" in error
    assert num_mib < 100


def test_zst_blocks_are_unpacked_a_few_at_a_time(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.txt.zst", 200)
    num_bytes, num_mib, error = read_apart(path)
    assert (num_bytes, error) == (200 * MIB, "")
    assert num_mib < 60


def test_zst_frames_checksums_and_skippable_frames_are_read_and_a_cut_is_found(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    texts = [b"", b"one", bytes(range(256)) * 3000, b"x" * 300_000]
    frames = b"\x5a\x2a\x4d\x18\x05\x00\x00\x00skip!"
    for number, text in enumerate(texts):
        compressor = zstandard.ZstdCompressor(
            level=1 + 6 * number, write_checksum=bool(number % 2), write_content_size=number < 2
        )
        frames += compressor.compress(text)
    path = tmp_path / "a.txt.zst"
    path.write_bytes(frames)
    (source,) = find_sources([str(path)], key="text").sources
    with Reading(source) as reading:
        assert b"".join(open_blocks(reading)) == b"".join(texts)
    for end in (len(frames) - 1, len(frames) - 5, 16, len(frames) // 2):
        path.write_bytes(frames[:end])
        (source,) = find_sources([str(path)], key="text").sources
        with Reading(source) as reading, pytest.raises(DataError, match="is not a complete zstd file"):
            list(open_blocks(reading))


@pytest.mark.regression("decompression-bombs")
@pytest.mark.slow
def test_a_parquet_file_of_one_kilobyte_takes_no_gigabyte(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    texts = pa.array(["x" * MIB] * 600)
    parquet.write_table(pa.table({"text": texts}), path, compression="zstd")
    assert path.stat().st_size < 2000
    num_bytes, num_mib, error = read_apart(path)
    assert num_bytes < 600 * MIB
    assert f"{path.stat().st_size:,} bytes expand to" in error
    assert num_mib < 200


@pytest.mark.regression("decompression-bombs")
@pytest.mark.slow
def test_a_parquet_page_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    texts = pa.array(["x" * (400 * MIB)])
    parquet.write_table(
        pa.table({"text": texts}), path, compression="brotli", use_dictionary=False, write_statistics=False
    )
    num_bytes, num_mib, error = read_apart(path)
    assert (num_bytes, "has a page that decompresses to too much text" in error) == (0, True)
    assert num_mib < 100


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy", "zstd", "gzip"])
def test_ordinary_parquet_files_pass_the_check_of_their_pages(tmp_path: Path, version: str, codec: str) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    texts = [f"Text {n}: {'word ' * (n % 50)}" for n in range(3000)]
    nested = [[{"role": "user", "content": text}] for text in texts]
    table = pa.table({"text": texts, "messages": nested, "flag": [n % 2 == 0 for n in range(3000)], "n": [0.5] * 3000})
    parquet.write_table(
        table, path, compression=codec, data_page_version=version, row_group_size=700, data_page_size=4000,
        write_page_index=True, write_page_checksum=True,
    )  # fmt: skip
    (source,) = find_sources([str(path)], key="text").sources
    with Reading(source) as reading:
        assert [document.decode() for document in documents_of(reading, Cuts(MIB))] == texts


@pytest.mark.regression("decompression-bombs")
@pytest.mark.parametrize("reader", ["run file", "trainer"])
def test_a_huge_tokenizer_is_refused_by_its_size(tmp_path: Path, reader: str) -> None:
    from homing.config.prepared_data import tokenizer_vocab_size
    from homing.lm.tokenizer.tokenizer import read_tokenizer_json

    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(500 << 20)  # a hole: it takes no room on the disk
    read = tokenizer_vocab_size if reader == "run file" else read_tokenizer_json
    with pytest.raises(DataError, match="is too large for a tokenizer") as raised:
        read(path)
    assert "524,288,000 bytes" in str(raised.value)


@pytest.mark.regression("utf16-jsonl")
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_text_in_utf_16_is_named_with_the_command_that_converts_it(tmp_path: Path, encoding: str, name: str) -> None:
    path = tmp_path / name
    path.write_bytes((json.dumps({"text": "Grüße aus Bern"}, ensure_ascii=False) + "\n").encode(encoding))
    (source,) = find_sources([str(path)], key="text").sources
    with Reading(source) as reading, pytest.raises(DataError) as raised:
        list(documents_of(reading, Cuts(MIB)))
    known = {"utf-16-le": "utf-16le", "utf-16-be": "utf-16be"}.get(encoding, encoding)
    assert known.upper() in raised.value.what
    assert f"iconv -f {known} -t utf-8 {path}" in raised.value.fix


@pytest.mark.regression("utf16-jsonl")
def test_conversations_in_utf_16_are_named_too(tmp_path: Path) -> None:
    from homing.lm.data.chat.read_rows import values_of

    path = tmp_path / "a.jsonl"
    path.write_bytes('{"prompt": "a", "completion": "b"}\n'.encode("utf-16-le"))
    (source,) = find_sources([str(path)], key="chat").sources
    with Reading(source) as reading, pytest.raises(DataError, match="UTF-16LE"):
        list(values_of(reading))
