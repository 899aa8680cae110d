"""Text in a store: each file read once, patterns, and all of one commit of the Hub."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.doubles import hub as hub_double
from tests.doubles.hub import LFS_FROM, Hub

from homing.api.data.download_input_files import bring_file, bring_files, part_of, say_if_less
from homing.cli.main import main
from homing.errors import DataError, IntegrityError, StoreError, UsageError
from homing.find_source_files import find_sources
from homing.pip_command import pip_install
from homing.store import NotInStore, open_store
from homing.store.hf.store import HubStore
from homing.units import format_bytes
from homing.world import World

# Of the SDK's own HTTP library, about how the SDK calls it.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

SMALL, LARGE = b'{"text": "the cat"}\n', b'{"text": "the cat sat on the mat"}\n' * (LFS_FROM // 20)
ADDRESS = "hf:datasets/me/corpus"


def put(hub: Hub, files: dict[str, bytes]) -> None:
    hub.add("me/corpus", "dataset", is_private=False)
    store = open_store(ADDRESS, World())
    for key, data in files.items():
        store.put_bytes(key, data)
    hub.seen.clear()


def bytes_asked_for(hub: Hub) -> list[str]:
    """Paths of the requests that hand over bytes of files, and not only say something of them."""
    return [path for method, path, _, ranged in hub.seen if method == "GET" and ranged and "/cdn/" not in path]


def reads_of_bringing(folder: str, here: Path, count: Callable[[], int]) -> list[int]:
    """How often the bytes of a file were read: when it came, when it was here, and when it was longer in the store."""
    store, (path, _, query), reads = open_store(folder, World()), folder.partition("?"), []
    for data in (SMALL, SMALL, SMALL * 2):
        store.put_bytes("1.jsonl", data)
        before = count()
        assert Path(bring_file(f"{path}/1.jsonl?{query}".rstrip("?"), here)).read_bytes() == data
        reads.append(count() - before)
    return reads


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["by git", "by lfs"])
def test_a_file_of_the_hub_is_downloaded_once_and_only_looked_at_when_it_is_here(
    hub: Hub, tmp_path: Path, data: bytes
) -> None:
    put(hub, {"en/train.jsonl": data})
    for _ in range(3):
        brought = bring_file(f"{ADDRESS}/en/train.jsonl", tmp_path / "here")
        assert Path(brought).read_bytes() == data
    assert len(bytes_asked_for(hub)) == 1
    put(hub, {"en/train.jsonl": data + SMALL})
    brought = bring_file(f"{ADDRESS}/en/train.jsonl", tmp_path / "here")
    assert Path(brought).read_bytes() == data + SMALL, "another state of it"
    assert len(bytes_asked_for(hub)) == 1


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["by git", "by lfs"])
def test_a_file_that_was_spoiled_here_or_on_the_way_is_not_taken_for_the_hubs(
    hub: Hub, tmp_path: Path, data: bytes
) -> None:
    put(hub, {"train.jsonl": data})
    here = Path(bring_file(f"{ADDRESS}/train.jsonl", tmp_path / "here"))
    here.write_bytes(data[:-1] + b" ")
    hub.spoiled = ["/train.jsonl", "/cdn/"]
    with pytest.raises(IntegrityError, match=r"train\.jsonl") as caught:
        bring_file(f"{ADDRESS}/train.jsonl", tmp_path / "here")
    assert ("Git hash" if data is SMALL else hashlib.sha256(data).hexdigest()) in caught.value.why
    hub.spoiled = []
    assert Path(bring_file(f"{ADDRESS}/train.jsonl", tmp_path / "here")).read_bytes() == data


def test_a_missing_one_stops_it_also_where_an_older_one_is_here(hub: Hub, tmp_path: Path) -> None:
    put(hub, {"train.jsonl": SMALL, "other": b"1"})
    bring_file(f"{ADDRESS}/train.jsonl", tmp_path / "here")
    open_store(ADDRESS, World()).delete("train.jsonl")
    with pytest.raises(NotInStore, match=r"train\.jsonl is not in"):
        bring_file(f"{ADDRESS}/train.jsonl", tmp_path / "here")


def test_a_hub_that_tells_no_hash_is_read(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, {"train.jsonl": SMALL})
    monkeypatch.setattr("homing.store.hf.store._tag", lambda headers: "of a mirror")
    for _ in range(2):
        assert Path(bring_file(f"{ADDRESS}/train.jsonl", tmp_path / "here")).read_bytes() == SMALL
    assert len(bytes_asked_for(hub)) == 2


def test_a_tag_of_the_host_that_has_the_bytes_is_not_taken_for_the_hubs(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(hub, {"train.jsonl": LARGE})
    monkeypatch.setattr("homing.store.hf.client._named", lambda headers: {})  # of a mirror that links nothing
    monkeypatch.setattr(hub_double, "_ranged", with_tag(hub_double._ranged, "f" * 64))
    assert Path(bring_file(f"{ADDRESS}/train.jsonl", tmp_path / "here")).read_bytes() == LARGE


def with_tag(plain: Callable[..., Any], tag: str) -> Callable[..., Any]:
    return lambda ask, data, headers: plain(ask, data, {"ETag": f'"{tag}"', **headers})


# --- patterns ---------------------------------------------------------------------------------------------------------

TREE = [
    "a.jsonl",
    "b.txt",
    "en/1.jsonl",
    "en/2.jsonl",
    "en/.hidden.jsonl",
    "en/deep/3.jsonl",
    "en/deep/x.bin",
    "en/raw/y.bin",
    "enough",
]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["hub", "file"])
@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("en/*.jsonl", ["en/1.jsonl", "en/2.jsonl"]),
        ("*", ["a.jsonl", "b.txt", "enough"]),
        ("**/*.jsonl", ["a.jsonl", "en/1.jsonl", "en/2.jsonl", "en/deep/3.jsonl"]),
        ("en/**", ["en/1.jsonl", "en/2.jsonl", "en/deep/3.jsonl", "en/deep/x.bin", "en/raw/y.bin"]),
        ("*/[23]*", ["en/2.jsonl"]),
        ("en/[23]*", ["en/2.jsonl"]),
        ("[ade]n/1*", ["en/1.jsonl"]),
        ("*/deep/*.jsonl", ["en/deep/3.jsonl"]),
    ],
)
def test_a_pattern_brings_what_it_would_find_here(
    hub: Hub, tmp_path: Path, where: str, pattern: str, wanted: list[str]
) -> None:
    address = ADDRESS if where == "hub" else f"file:{tmp_path}/store"
    (tmp_path / "store").mkdir()
    hub.add("me/corpus", "dataset", is_private=False)
    store = open_store(address, World())
    for key in TREE:
        store.put_bytes(key, f"text of {key}".encode())
    (brought,) = bring_files([f"{address}/{pattern}"], tmp_path / "here")
    sources = find_sources([brought], key="text").sources
    found = {str(Path(source.path).relative_to(tmp_path / "here-0")): Path(source.path) for source in sources}
    prefix = re.split(r"[*\[]", pattern)[0].rpartition("/")[0]
    assert sorted(f"{prefix}/{key}".lstrip("/") for key in found) == wanted
    assert all(path.read_text() == f"text of {prefix}/{key}".replace(" /", " ") for key, path in found.items())


@pytest.mark.acceptance(23)
def test_all_files_of_a_pattern_come_from_one_reported_commit(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(hub, {f"en/{number}.jsonl": b"old %d" % number for number in range(5)})
    commit = hub.repos["dataset", "me/corpus"].head.oid
    plain = HubStore.get

    def get(store: HubStore, key: str, path: str, sha256: str | None = None) -> None:
        plain(store, key, path, sha256)
        if key == "1.jsonl":  # another process pushes during the download
            put(hub, {f"en/{number}.jsonl": b"new" for number in range(3, 7)})

    monkeypatch.setattr(HubStore, "get", get)
    bring_file(f"{ADDRESS}/en/*.jsonl", tmp_path / "here")
    got = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    assert got == {f"{number}.jsonl": b"old %d" % number for number in range(5)}
    assert f"5 files, {format_bytes(25)}, of commit {commit}" in capsys.readouterr().err


def test_a_revision_keeps_to_one_state_and_what_is_gone_is_gone_here_too(hub: Hub, tmp_path: Path) -> None:
    put(hub, {"1.jsonl": b"one", "2.jsonl": b"two"})
    old = hub.repos["dataset", "me/corpus"].head.oid
    put(hub, {"1.jsonl": b"another"})
    open_store(ADDRESS, World()).delete("2.jsonl")

    def names() -> list[str]:
        return sorted(f"{path.name} {path.read_text()}" for path in (tmp_path / "here").iterdir())

    bring_file(f"hf://datasets/me/corpus@{old}/*.jsonl", tmp_path / "here")
    assert names() == ["1.jsonl one", "2.jsonl two"]
    bring_file(f"{ADDRESS}/*.jsonl", tmp_path / "here")
    assert names() == ["1.jsonl another"]
    assert Path(bring_file(f"{ADDRESS}@{old}/2.jsonl", tmp_path / "one")).read_bytes() == b"two"
    for missing in ("*.jsonl", "2.jsonl"):
        with pytest.raises(StoreError, match="me/corpus") as caught:
            bring_file(f"{ADDRESS}@nowhere/{missing}", tmp_path / "here")
        assert "no such branch, tag or commit" in caught.value.why


def test_what_was_brought_for_another_pattern_is_not_taken_for_this_one(hub: Hub, tmp_path: Path) -> None:
    put(hub, {"a.jsonl": b"a", "en/1.jsonl": b"one", "en/deep/2.jsonl": b"two"})
    for pattern, wanted in (
        ("**/*.jsonl", ["1.jsonl", "2.jsonl", "a.jsonl"]),
        ("*", ["a.jsonl"]),
        ("e*/*", ["1.jsonl"]),
    ):
        brought = bring_file(f"{ADDRESS}/{pattern}", tmp_path / "here")
        sources = find_sources([brought], key="text").sources
        assert sorted(Path(source.path).name for source in sources) == wanted


def test_a_pattern_that_meets_nothing_says_what_there_is(hub: Hub, tmp_path: Path) -> None:
    put(hub, {"en/train.csv": b"1", "en/test.csv": b"1"})
    with pytest.raises(DataError, match=r"No file matches .*\*\.parquet") as caught:
        bring_file(f"{ADDRESS}/en/*.parquet", tmp_path / "here")
    assert "test.csv, train.csv" in caught.value.why
    with pytest.raises(UsageError, match="does not name a repository"):
        bring_file("hf:datasets/*.parquet", tmp_path / "here")
    for whole in (ADDRESS, f"{ADDRESS}@main", f"{ADDRESS}@refs/convert/parquet", "hf://me/corpus"):
        with pytest.raises(UsageError, match="is not a file in a store"):
            bring_file(whole, tmp_path / "here")


def test_an_unavailable_data_set_is_reported_with_a_fix(hub: Hub, tmp_path: Path) -> None:
    hub.add("them/closed", "dataset", is_private=False, is_gated=True)
    put(hub, {"1.jsonl": b"one"})
    cases = {
        "hf:datasets/them/closed/*.jsonl": f"Request access: {hub.endpoint}/datasets/them/closed",
        "hf:datasets/them/nothing/*.jsonl": "Fix the name, or use another token: export HF_TOKEN=...",
        f"{ADDRESS}/2.jsonl": f"homing store ls --store {ADDRESS}",
    }
    for address, fix in cases.items():
        with pytest.raises(StoreError) as caught:
            bring_file(address, tmp_path / "here")
        assert fix in caught.value.fix


def test_a_long_download_tells_how_far_it_is(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("homing.api.data.download_input_files._REPORT_EVERY_S", 0.0)
    monkeypatch.setattr("homing.store.hf.store._PIECE", 60_000)
    put(hub, {"train.jsonl": LARGE})
    bring_file(f"{ADDRESS}/train.jsonl", tmp_path / "here")
    assert f"train.jsonl: {format_bytes(120_000)} of {format_bytes(len(LARGE))}" in capsys.readouterr().err


def test_a_full_disk_is_reported_before_any_download(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, {"1.jsonl": SMALL, "2.jsonl": SMALL})
    bring_file(f"{ADDRESS}/1.jsonl", tmp_path / "here")
    hub.seen.clear()
    room = SimpleNamespace(free=len(SMALL))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: room)
    bring_file(f"{ADDRESS}/*.jsonl", tmp_path / "here")
    room.free -= 1
    with pytest.raises(DataError, match="Not enough disk space") as caught:
        bring_file(f"{ADDRESS}/*.jsonl", tmp_path / "elsewhere" / "deep")
    assert format_bytes(2 * len(SMALL)) in caught.value.why
    assert len(bytes_asked_for(hub)) == 1


def test_without_the_reader_nothing_is_downloaded(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, {"train.parquet": b"PAR1"})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("train.parquet", "*.parquet"):
        with pytest.raises(UsageError, match="needs the extra `parquet`") as caught:
            bring_file(f"{ADDRESS}/{name}", tmp_path / "here")
        assert caught.value.fix == pip_install("parquet")
    assert bytes_asked_for(hub) == []


# --- the whole way ----------------------------------------------------------------------------------------------------


@pytest.mark.acceptance(23)
def test_prep_of_a_folder_of_parquet_on_the_hub_gives_the_shards_of_the_same_lines_here(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [f"Line {n}: the cat sat on the mat, and the {n % 7} hats were flat." for n in range(400)]
    lines = "".join(json.dumps({"content": text}) + "\n" for text in texts)
    (tmp_path / "all.jsonl").write_text(lines, encoding="utf-8")
    tables = {}
    for number in range(2):
        pq.write_table(pa.table({"content": texts[200 * number :][:200]}), tmp_path / "part", row_group_size=64)
        tables[f"data/train-0000{number}.parquet"] = (tmp_path / "part").read_bytes()
    put(hub, tables)

    def prep(text: str, out: str) -> str:
        arguments = ["prep", "--text", text, "--out", out, "--text-field", "content", "--vocab-size", "300"]
        monkeypatch.setattr(sys, "argv", ["homing", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert not ended.value.code, said.err
        return said.out + said.err

    first = prep(f"{ADDRESS}/data/*.parquet", "far")
    assert first.count("Fetched") == 2
    prep("all.jsonl", "near")
    for name in ("tokenizer.json", "train-00000.bin", "train-00000.idx", "val-00000.bin"):
        assert (tmp_path / "far" / name).read_bytes() == (tmp_path / "near" / name).read_bytes()
    hub.seen.clear()
    again = prep(f"{ADDRESS}/data/*.parquet", "far")
    assert "Fetched" not in again
    assert "Already up to date" in again
    assert bytes_asked_for(hub) == []


@pytest.mark.acceptance(23, 24)
def test_for_a_part_of_the_text_only_so_many_files_are_brought_and_they_are_of_the_whole_range(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = b'{"text": "the cat sat on the mat"}\n'
    put(hub, {f"en/{number}.jsonl": line * (10 + number) for number in range(8)})
    pattern, here = f"{ADDRESS}/en/*.jsonl", tmp_path / "from-store"
    few = bring_files([pattern], here, take_bytes=12 * len(line))
    assert [Path(path).name for path in few] == ["0.jsonl", "4.jsonl"]
    assert [source.num_bytes for source in find_sources(few, key="text").sources] == [10 * len(line), 14 * len(line)]
    assert "Fetching 2 of 8 files: data.take asks for 420 B of text" in capsys.readouterr().err
    assert len([path for path in tmp_path.rglob("*.jsonl")]) == 2

    (every,) = bring_files([pattern], here)
    assert len(find_sources([every], key="text").sources) == 8
    hub.seen.clear()
    assert bring_files([pattern], here, take_bytes=12 * len(line)) == few
    assert bytes_asked_for(hub) == []
    assert len([path for path in tmp_path.rglob("*.jsonl")]) == 8, "what was brought for all of it stays"
    assert len(bring_files([pattern], here, take_bytes=10**6)) == 1, "all of them, as the pattern"


def test_a_part_is_brought_only_where_it_cannot_change_the_mix(capsys: pytest.CaptureFixture[str]) -> None:
    # What is taken of each file goes by its share of all that is here.
    pattern = "hf:datasets/me/corpus/*.jsonl"
    assert part_of(100, [pattern], []) == 100
    assert part_of(100, [pattern, "book.txt"], []) == 0
    assert part_of(100, [pattern], ["held-out.txt"]) == 0
    manifest = SimpleNamespace(splits={"train": SimpleNamespace(num_text_bytes=80)})
    say_if_less(100, ["book.txt"], manifest)  # type: ignore[arg-type]
    say_if_less(80, [pattern], manifest)  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""
    say_if_less(100, [pattern], manifest)  # type: ignore[arg-type]
    assert "data.take asks for 100 B of text, but the downloaded files contain only 80 B" in capsys.readouterr().err
