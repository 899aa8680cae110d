"""Store to home, verified by hash."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from tests.cloud.rig import look_more_often, make_draft, read_json

from homing import progress
from homing.cloud.artifacts.checkpoints import fetch
from homing.cloud.guard.change_limit_or_stop import ask_to_stop
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.watch.follow import watch
from homing.errors import IntegrityError, UsageError
from homing.store import FileStore
from homing.store.base import unwatched
from homing.world import World


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished run of twelve steps, made once per module: its folder and a pristine copy of that folder."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        look_more_often(patch)
        home = Home(folder / "homing-home", World())
        launched = launch(make_draft(home, folder, steps=12), home)
        list(watch(home, launched.run, every_s=1))
    kept = tmp_path_factory.mktemp("kept") / "finished"
    shutil.copytree(folder, kept, symlinks=True)
    return folder, kept


@pytest.fixture
def tmp_path(finished: tuple[Path, Path]) -> Path:
    """The finished run's folder, restored before each test; ledger and store refer to it by its path."""
    folder, kept = finished
    shutil.rmtree(folder)
    shutil.copytree(kept, folder, symlinks=True)
    return folder


@pytest.fixture
def done(home: Home) -> RunRow:
    """Checkpoints at 5, 10 and 12."""
    return home.ledger.find("moss")


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.acceptance(19)
def test_fetch_brings_the_newest_complete_checkpoint_and_the_run_documents(
    home: Home, tmp_path: Path, done: RunRow
) -> None:
    got = fetch(home, done, tmp_path / "models/moss")
    assert weights(got.model_dir) == b"weights at 12"
    assert got.manifest.is_final
    assert (got.model_dir / "tokenizer.json").exists()
    assert "step 12" in (got.run_dir / "logs/trainer.log").read_text()
    assert (got.run_dir / "metrics.jsonl").exists()
    assert (got.run_dir / "samples/pretrain-00000005.txt").exists()
    assert home.ledger.find("moss").fetched_step == 12


def test_a_fetch_reports_its_progress_over_all_files(home: Home, tmp_path: Path, done: RunRow) -> None:
    seen: list[progress.Progress] = []
    with progress.listening(seen.append):
        got = fetch(home, done, tmp_path / "models/moss")
    shown = [each for each in seen if each.what]
    assert {(each.what, each.total) for each in shown} == {
        ("Fetching checkpoints/pretrain/step-00000012", got.num_bytes)
    }
    assert [each.done for each in shown] == sorted(each.done for each in shown)
    assert seen[-1].what == "", "the bar disappears"


def test_what_is_fetched_after_the_model_is_not_reported_as_a_part_of_it(
    home: Home, tmp_path: Path, done: RunRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[FileStore] = []

    def store_of(self: Home, run: RunRow) -> FileStore:
        opened.append(FileStore(run.store.removeprefix("file:"), World()))
        return opened[-1]

    monkeypatch.setattr(Home, "store_of", store_of)
    fetch(home, done, tmp_path / "models/moss")
    assert all(store.progress is unwatched for store in opened)


def test_a_second_fetch_does_nothing_and_keeps_files_changed_locally(home: Home, tmp_path: Path, done: RunRow) -> None:
    assert fetch(home, done, tmp_path / "models/moss").is_new
    assert not fetch(home, done, tmp_path / "models/moss").is_new
    (tmp_path / "models/moss/model.safetensors").write_bytes(b"damaged here")
    with pytest.raises(UsageError, match="not overwritten") as caught:
        fetch(home, done, tmp_path / "models/moss")
    assert "changed since it was fetched: model.safetensors" in caught.value.why


@pytest.mark.acceptance(131)
def test_fetch_replaces_an_earlier_checkpoint_of_the_same_run(home: Home, tmp_path: Path, done: RunRow) -> None:
    """As after a run that was stopped, fetched and resumed."""
    target = tmp_path / "models/moss"
    fetch(home, done, target, which="10")
    (target / ".DS_Store").write_bytes(b"a look at the folder")
    (target / "tokenizer.json").unlink()  # a missing file is fetched again
    assert fetch(home, done, target).is_new
    assert weights(target) == b"weights at 12"
    assert (target / "tokenizer.json").exists()
    assert [path.name for path in target.parent.iterdir()] == ["moss"]


def test_fetch_does_not_overwrite_another_run_of_the_same_name(home: Home, tmp_path: Path, done: RunRow) -> None:
    target = tmp_path / "models/moss"
    fetch(home, done, target, which="10")
    manifest = read_json(target / "manifest.json")
    (target / "manifest.json").write_text(json.dumps({**manifest, "run_id": "moss-of-may"}))
    with pytest.raises(UsageError, match="not overwritten") as caught:
        fetch(home, done, target)
    assert "another model, pretrain step 10 of moss-of-may" in caught.value.why
    assert weights(target) == b"weights at 10"


@pytest.mark.acceptance(131)
def test_fetch_does_not_overwrite_a_folder_to_which_a_person_added_files(
    home: Home, tmp_path: Path, done: RunRow
) -> None:
    target = tmp_path / "models/moss"
    fetch(home, done, target, which="10")
    (target / "notes").mkdir()
    (target / "notes/mine.txt").write_text("she likes the rain")
    with pytest.raises(UsageError, match="not overwritten") as caught:
        fetch(home, done, target)
    assert "added since: notes/mine.txt" in caught.value.why
    assert fetch(home, done, target, force=True).is_new


def test_fetch_keeps_files_that_are_added_while_it_downloads(home: Home, tmp_path: Path, done: RunRow) -> None:
    """Large weights can take an hour to download."""
    target = tmp_path / "models/moss"
    fetch(home, done, target, which="10")
    with pytest.raises(UsageError, match="changed during"):
        fetch(home, done, target, notify=lambda text: (target / "mine.gguf").write_text("made meanwhile") and None)
    assert (target / "mine.gguf").read_text() == "made meanwhile"
    assert weights(target) == b"weights at 10"
    assert [path.name for path in target.parent.iterdir()] == ["moss"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_fetch_does_not_overwrite_the_only_copy_of_a_later_checkpoint(
    home: Home, tmp_path: Path, done: RunRow, is_damaged: bool
) -> None:
    target = tmp_path / "models/moss"
    fetch(home, done, target)
    (manifest,) = (tmp_path / "store").rglob("step-00000012/manifest.json")
    if is_damaged:
        manifest.write_bytes(b"{")
    else:
        shutil.rmtree(manifest.parent)
    with pytest.raises(UsageError, match="not overwritten") as caught:
        fetch(home, done, target, or_older=True)
    assert "pretrain step 12, which is newer than step 10 and no longer intact in the store" in caught.value.why
    assert weights(target) == b"weights at 12"
    assert weights(fetch(home, done, target, or_older=True, force=True).model_dir) == b"weights at 10"


def test_fetch_does_not_overwrite_a_later_checkpoint_that_is_corrupt_in_the_store(
    home: Home, tmp_path: Path, done: RunRow
) -> None:
    target = fetch(home, done, tmp_path / "models/moss").model_dir
    (stored,) = (tmp_path / "store").rglob("checkpoints/*/step-00000012/model.safetensors")
    stored.write_bytes(b"weights at 1Z")
    with pytest.raises(UsageError, match="not overwritten") as caught:
        fetch(home, done, target, which="10")
    assert "no longer intact in the store" in caught.value.why
    assert weights(target) == b"weights at 12"


def test_fetch_does_not_overwrite_another_phase_if_run_json_is_missing(
    home: Home, tmp_path: Path, done: RunRow
) -> None:
    """Only run.json gives the order of the phases; step numbers cannot be compared across phases."""
    target = fetch(home, done, tmp_path / "models/moss").model_dir
    messages = json.loads((target / "manifest.json").read_text())
    messages.update(phase="sft", step=3, sha256="")
    (target / "manifest.json").write_text(json.dumps(messages))
    (tmp_path / "store" / "runs" / done.id / "run.json").unlink()
    with pytest.raises(UsageError, match="not overwritten") as caught:
        fetch(home, done, target)
    assert "It contains sft step 3" in caught.value.why
    assert weights(target) == b"weights at 12"
    # Within one phase step numbers can be compared without the order of the phases.
    messages.update(phase="pretrain")
    (target / "manifest.json").write_text(json.dumps(messages))
    assert fetch(home, done, target).is_new


@pytest.mark.acceptance(131)
def test_fetch_does_not_overwrite_another_model_unless_forced(home: Home, tmp_path: Path, done: RunRow) -> None:
    target = tmp_path / "models/moss"
    target.mkdir(parents=True)
    (target / "model.safetensors").write_bytes(b"another model")
    with pytest.raises(UsageError, match="not overwritten") as caught:
        fetch(home, done, target)
    assert "a model that homing cannot identify" in caught.value.why
    assert weights(target) == b"another model"
    fetch(home, done, target, force=True)
    assert weights(target) == b"weights at 12"
    assert sorted(path.name for path in target.parent.iterdir()) == ["moss"]


def test_fetch_never_deletes_a_folder_that_is_not_a_model(home: Home, tmp_path: Path, done: RunRow) -> None:
    target = tmp_path / "thesis"
    target.mkdir()
    (target / "chapter1.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not a model") as caught:
        fetch(home, done, target, force=True)
    assert "--to FOLDER" in caught.value.fix
    assert (target / "chapter1.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    assert fetch(home, done, tmp_path / "empty", force=True).is_new


def test_fetch_keeps_the_old_model_if_the_final_rename_fails(
    home: Home, tmp_path: Path, done: RunRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "models/moss"
    fetch(home, done, target, which="10")
    real = World.rename

    def fail(self: World, source: object, to: object) -> None:
        if to == target and "fetching" in str(source):
            raise OSError(28, "No space left on device")
        real(self, source, to)  # type: ignore[arg-type]

    monkeypatch.setattr(World, "rename", fail)
    with pytest.raises(OSError, match="No space"):
        fetch(home, done, target, force=True)
    assert weights(target) == b"weights at 10"
    assert [path.name for path in target.parent.iterdir()] == ["moss"]


@pytest.mark.acceptance(108)
def test_fetch_takes_a_step_and_lists_the_existing_ones_if_it_is_wrong(
    home: Home, tmp_path: Path, done: RunRow
) -> None:
    there = {path.name for path in (tmp_path / "store/runs" / done.id / "checkpoints/pretrain").glob("step-*")}
    step = sorted(int(name[5:]) for name in there)[0]
    got = fetch(home, done, tmp_path / "m", which=str(step))
    assert weights(got.model_dir) == b"weights at %d" % step
    assert weights(fetch(home, done, tmp_path / "n", which=f"pretrain:{step}").model_dir) == b"weights at %d" % step
    with pytest.raises(UsageError):
        fetch(home, done, tmp_path / "m", which=f"sft:{step}")
    with pytest.raises(UsageError) as caught:
        fetch(home, done, tmp_path / "m", which="7777")
    assert "pretrain 12" in caught.value.why
    with pytest.raises(UsageError):
        fetch(home, done, tmp_path / "m", which="newest please")


def damage_newest(tmp_path: Path, run: RunRow) -> Path:
    path = tmp_path / "store/runs" / run.id / "checkpoints/pretrain/step-00000012/model.safetensors"
    path.write_bytes(b"weights at 13")
    return path


@pytest.mark.acceptance(130)
def test_fetch_refuses_a_damaged_checkpoint_and_leaves_no_files(home: Home, tmp_path: Path, done: RunRow) -> None:
    damage_newest(tmp_path, done)
    with pytest.raises(IntegrityError) as caught:
        fetch(home, done, tmp_path / "models/moss")
    assert caught.value.exit_code == 7
    assert "--or-older" in caught.value.fix
    assert list((tmp_path / "models").iterdir()) == []


def test_or_older_fetches_the_previous_checkpoint_and_reports_the_damage(
    home: Home, tmp_path: Path, done: RunRow
) -> None:
    damage_newest(tmp_path, done)
    said: list[str] = []
    got = fetch(home, done, tmp_path / "m", or_older=True, notify=said.append)
    assert got.manifest.step == 10
    assert len(got.passed_over) == 1
    assert any("damaged" in text for text in said)


def test_a_checkpoint_with_a_missing_file_is_damaged(home: Home, tmp_path: Path, done: RunRow) -> None:
    damage_newest(tmp_path, done).unlink()
    with pytest.raises(IntegrityError):
        fetch(home, done, tmp_path / "m")


@pytest.mark.parametrize("text", [b"{", b'{"schema": "homing.checkpoint/1"}'])
def test_a_damaged_manifest_does_not_hide_the_other_checkpoints(
    home: Home, tmp_path: Path, done: RunRow, text: bytes
) -> None:
    path = tmp_path / "store/runs" / done.id / "checkpoints/pretrain/step-00000012/manifest.json"
    path.write_bytes(text)
    with pytest.raises(IntegrityError, match="damaged") as caught:
        fetch(home, done, tmp_path / "m")
    assert "--or-older" in caught.value.fix
    assert fetch(home, done, tmp_path / "m", or_older=True).manifest.step == 10
    assert fetch(home, done, tmp_path / "n", which="10").manifest.step == 10


def test_a_manifest_that_does_not_match_its_own_hash_is_damaged(home: Home, tmp_path: Path, done: RunRow) -> None:
    path = tmp_path / "store/runs" / done.id / "checkpoints/pretrain/step-00000012/manifest.json"
    manifest = read_json(path)
    sealed = json.dumps({**manifest, "sha256": ""}).encode()
    path.write_bytes(json.dumps({**manifest, "sha256": hashlib.sha256(sealed).hexdigest()}).encode())
    assert fetch(home, done, tmp_path / "m").manifest.step == 12
    path.write_bytes(path.read_bytes().replace(b'"seed": 0', b'"seed": 7'))
    with pytest.raises(IntegrityError, match="damaged") as caught:
        fetch(home, done, tmp_path / "n")
    assert "its manifest" in caught.value.why


@pytest.mark.parametrize("name", ["run.json", "request.json"])
def test_a_damaged_document_in_the_store_is_an_integrity_error(
    home: Home, tmp_path: Path, done: RunRow, name: str
) -> None:
    (tmp_path / "store/runs" / done.id / name).write_bytes(b"{")
    home.ledger.set_run(done.id, state="running")
    with pytest.raises(IntegrityError, match=f"Cannot read .*{name} in "):
        fetch(home, done, tmp_path / "m") if name == "run.json" else ask_to_stop(home, home.ledger.find("moss"))


def test_a_manifest_with_a_path_outside_the_checkpoint_is_refused(home: Home, tmp_path: Path, done: RunRow) -> None:
    path = tmp_path / "store/runs" / done.id / "checkpoints/pretrain/step-00000012/manifest.json"
    manifest = read_json(path)
    manifest["files"] = [{"name": "../../../evil", "num_bytes": 1, "sha256": "0" * 64}]
    path.write_text(json.dumps(manifest))
    with pytest.raises(IntegrityError, match="do not belong to a checkpoint"):
        fetch(home, done, tmp_path / "m")


def test_a_checkpoint_without_a_manifest_is_ignored(home: Home, tmp_path: Path, done: RunRow) -> None:
    (tmp_path / "store/runs" / done.id / "checkpoints/pretrain/step-00000012/manifest.json").unlink()
    assert fetch(home, done, tmp_path / "m").manifest.step == 10


@pytest.mark.slow
def test_a_run_without_a_checkpoint_says_so(home: Home, tmp_path: Path) -> None:
    launched = launch(make_draft(home, tmp_path, name="fern", how="fail"), home)
    list(watch(home, launched.run, every_s=1))
    with pytest.raises(UsageError, match="no checkpoint") as caught:
        fetch(home, home.ledger.find("fern"), tmp_path / "m")
    assert caught.value.fix == "homing logs fern"
