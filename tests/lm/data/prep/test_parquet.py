"""Prep of Parquet files: token for token what the same documents give as JSON lines, also in part and after a cut."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.lm.data.prep.test_pipeline import decoded, files, killed_after, order_of, run, stages, text_of

from homing.errors import DataError
from homing.lm.data.prep import chunks, encode_pass


def write(path: Path, texts: list[str], **how: Any) -> Path:
    table = pa.table({"id": [f"row {n}" for n in range(len(texts))], "text": texts, "score": [0.5] * len(texts)})
    pq.write_table(table, path, **{"row_group_size": 70, **how})
    return path


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """Three files each, of the same documents; the second has one that is long and one that is blank."""
    for number in range(3):
        texts = text_of(300, seed=number) + (["  \n", "a long tale. " * 90_000] if number == 1 else [])
        write(tmp_path / f"{number}.parquet", texts)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{number}.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path / "*.parquet", tmp_path / "*.jsonl"


@pytest.mark.acceptance(23)
@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_rows_and_lines_give_the_same_shards(both: tuple[Path, Path], tmp_path: Path, has_tokenizer: bool) -> None:
    rows, lines = both
    given = {"tokenizer": str(tmp_path / "first" / "tokenizer.json")} if has_tokenizer else {}
    if has_tokenizer:
        run(order_of(lines, dir=tmp_path / "first"))
    made, _ = run(order_of(rows, dir=tmp_path / "rows", shard_tokens=9000, **given))
    run(order_of(lines, dir=tmp_path / "lines", shard_tokens=9000, **given))
    assert files(tmp_path / "rows") == files(tmp_path / "lines")
    assert len(made.splits["train"].shards) > 3
    on_disk = [hashlib.sha256((tmp_path / f"{n}.parquet").read_bytes()).hexdigest() for n in range(3)]
    assert [source.sha256 for source in made.source] == on_disk


def test_of_every_file_its_share_is_taken(tmp_path: Path) -> None:
    texts = {name: text_of(count, seed=ord(name)) for name, count in (("a", 300), ("b", 900), ("c", 300))}
    paths = {name: write(tmp_path / f"{name}.parquet", each) for name, each in texts.items()}
    order = order_of(tmp_path / "*.parquet", take_bytes=20_000, val_fraction=0.0, vocab_size=280, dir=tmp_path / "out")
    made, _ = run(order)
    got = decoded(order.dir)
    assert 20_000 <= made.splits["train"].num_text_bytes < 21_000
    whole = sum(path.stat().st_size for path in paths.values())
    for name, each in texts.items():
        taken = [text for text in got if text in set(each)]
        assert taken == each[: len(taken)]
        share = 20_000 * paths[name].stat().st_size / whole
        assert sum(len(text.encode()) for text in taken) == pytest.approx(share, abs=600)


@pytest.mark.slow
@pytest.mark.parametrize("take_bytes", [0, 60_000])
@pytest.mark.parametrize("kill_after", [0, 3, 8, 14, 20])
def test_a_prep_stopped_at_any_write_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_after: int, take_bytes: int
) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.parquet", text_of(300, seed=number), compression="zstd")
    order = order_of(tmp_path / "*.parquet", take_bytes=take_bytes, shard_tokens=2000, dir=tmp_path / "out")
    run(dataclasses.replace(order, dir=tmp_path / "whole"))
    monkeypatch.setattr(chunks, "_chunk_bytes", lambda: 4000)
    monkeypatch.setattr(encode_pass, "MARK_BYTES", 8000)
    killed_after(kill_after, order, monkeypatch)
    _, seen = run(order)
    assert files(order.dir) == files(tmp_path / "whole")
    assert ("resumed" in stages(seen)) == (kill_after > 2)


def test_finished_work_is_done_again_only_when_the_file_has_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", text_of(300))
    first, _ = run(order_of(path))
    _, seen = run(order_of(path))
    assert "reused" in stages(seen)
    write(path, text_of(310))
    second, seen = run(order_of(path))
    assert "reused" not in stages(seen)
    counts = [sum(split.num_documents for split in made.splits.values()) for made in (first, second)]
    assert counts == [300, 310]


def test_progress_ends_at_all_bytes_of_the_files_and_never_turns_back(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{number}.parquet", text_of(2000, seed=number)) for number in range(2)]
    _, seen = run(order_of(tmp_path / "*.parquet", dir=tmp_path / "out"))
    done = [progress.done_bytes for progress in seen if progress.stage == "encode"]
    assert done == sorted(done)
    assert done[-1] == sum(path.stat().st_size for path in paths)


def test_a_damaged_file_stops_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", text_of(300))
    broken = write(tmp_path / "b.parquet", text_of(300))
    broken.write_bytes(broken.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"b\.parquet is not a complete Parquet file"):
        run(order_of(tmp_path / "*.parquet", dir=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
