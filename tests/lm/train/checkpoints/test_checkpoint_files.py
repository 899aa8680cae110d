"""Checkpoints: whole or absent, refused by hash when damaged, and retention that never takes the last good one."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from homing.errors import IntegrityError, RunFailed
from homing.lm.train.checkpoints import checkpoint_files
from homing.lm.train.checkpoints.checkpoint_files import TrainState
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, Pointer


def save(
    phase_dir: Path, step: int, *, val_loss: float | None = None, exam: str = "", keep_last: int | None = None
) -> Path:
    manifest = CheckpointManifest(
        run_name="tiny", run_id="", phase="pretrain", step=step, num_tokens=step * 10, is_final=False,
        config_sha256="c", seed=1, files=[], val_loss=val_loss, val_exam=exam,
    )  # fmt: skip
    state = TrainState(phase="pretrain", step=step, num_tokens=step * 10, rows_consumed=step * 2)
    shared = torch.arange(12.0).view(3, 4) + step
    folder = checkpoint_files.save(
        phase_dir,
        manifest,
        state,
        weights={"w": torch.full((4, 5), float(step)), "bias": torch.arange(3.0)},
        optimizer={"a.momentum": shared[0], "b.momentum": shared[1], "num_steps": torch.tensor(step)},
        metadata_files={"run.json": b"{}", "tokenizer.json": b"{}", "config.json": b"{}"},
    )
    checkpoint_files.repair_pointers(phase_dir, manifest)
    if keep_last is not None:
        checkpoint_files.retain(phase_dir, keep_last=keep_last)
    return folder


def pointer(path: Path) -> int:
    return codec.loads(Pointer, path.read_bytes()).step


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = save(tmp_path, 7, val_loss=2.5)
    loaded = checkpoint_files.load(folder, checkpoint_files.verify(folder))
    assert torch.equal(loaded.weights["w"], torch.full((4, 5), 7.0))
    assert torch.equal(loaded.optimizer["b.momentum"], torch.arange(4.0, 8.0) + 7)
    assert (loaded.state.step, loaded.state.rows_consumed) == (7, 14)
    listed = {file.name for file in loaded.manifest.files}
    assert listed == {path.name for path in folder.iterdir()} - {file_names.MANIFEST}


def test_the_newest_complete_checkpoint_is_found_and_damaged_ones_are_reported(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / file_names.step_dir(3) / file_names.WEIGHTS).write_bytes(b"short")
    (tmp_path / file_names.step_dir(2) / file_names.MANIFEST).unlink()
    found = checkpoint_files.find_latest(tmp_path)
    assert found.folder == tmp_path / file_names.step_dir(1)
    assert [entry.folder.name for entry in found.refused] == [file_names.step_dir(3), file_names.step_dir(2)]
    assert "model.safetensors has 5 bytes" in found.refused[0].why
    assert "manifest.json is missing" in found.refused[1].why


def test_nothing_saved_is_nothing_found(tmp_path: Path) -> None:
    found = checkpoint_files.find_latest(tmp_path / "absent")
    assert (found.folder, found.manifest, found.refused) == (None, None, [])


@pytest.mark.acceptance("X7")
def test_any_flipped_or_cut_byte_in_any_file_is_refused(tmp_path: Path) -> None:
    folder, random_ = save(tmp_path, 1, val_loss=1.5), random.Random(5)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        damages = [whole[:-1], whole[: len(whole) // 2], b"", whole + b" "]
        for _ in range(25):
            flipped = bytearray(whole)
            flipped[random_.randrange(len(whole))] ^= 1 << random_.randrange(8)
            damages.append(bytes(flipped))
        for damage in damages:
            path.write_bytes(damage)
            with pytest.raises(IntegrityError, match="is damaged"):
                checkpoint_files.verify(folder)
        path.unlink()
        with pytest.raises(IntegrityError, match="is damaged"):
            checkpoint_files.verify(folder)
        path.write_bytes(whole)
    checkpoint_files.verify(folder)


@pytest.mark.acceptance("X13")
def test_pointers_name_the_last_and_the_best(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5), (4, None)):
        save(tmp_path, step, val_loss=loss)
    assert (pointer(tmp_path / file_names.LATEST), pointer(tmp_path / file_names.BEST)) == (4, 2)


def test_the_best_is_the_best_in_the_exam_that_was_held_last(tmp_path: Path) -> None:
    """Of other rows the losses are others: an easier part must not keep an old one the best for good."""
    messages = []
    for step, loss, exam in ((1, 1.0, ""), (2, 2.5, "8 rows"), (3, 2.0, "8 rows"), (4, 2.2, "8 rows"), (5, None, "")):
        save(tmp_path, step, val_loss=loss, exam=exam)
        messages.append(pointer(tmp_path / file_names.BEST))
    assert messages == [1, 2, 3, 3, 3]  # one that was not measured has held no exam


def test_a_damaged_best_is_no_longer_pointed_at(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5)):
        save(tmp_path, step, val_loss=loss)
    damaged = [checkpoint_files.Refused(tmp_path / file_names.step_dir(2), "bad")]
    checkpoint_files.repair_pointers(
        tmp_path, checkpoint_files.verify(tmp_path / file_names.step_dir(3)), damaged=damaged
    )
    assert pointer(tmp_path / file_names.BEST) == 3


@pytest.mark.acceptance(89, 107, "X18")
@settings(deadline=None, max_examples=25)
@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=1, max_size=8), st.integers(0, 3))
def test_retention_keeps_the_best_and_the_newest_whatever_the_losses(losses: list[int | None], keep_last: int) -> None:
    folder = Path(os.environ["HOMING_HOME"]) / "retention"
    shutil.rmtree(folder, ignore_errors=True)
    for step, loss in enumerate(losses, start=1):
        save(folder, step, val_loss=None if loss is None else float(loss), keep_last=keep_last)
        kept, known = checkpoint_files.list_steps(folder), [v for v in losses[:step] if v is not None]
        assert checkpoint_files.find_latest(folder).folder == folder / file_names.step_dir(step)
        assert set(range(max(1, step - max(1, keep_last) + 1), step + 1)) <= set(kept)
        if known:
            best = checkpoint_files.verify(folder / file_names.step_dir(pointer(folder / file_names.BEST)))
            assert best.val_loss == min(known)
        assert len(kept) <= max(1, keep_last) + 1


def test_damaged_ones_never_count_among_the_kept(tmp_path: Path) -> None:
    for step, loss in ((1, None), (3, 1.0), (2, None)):  # 3 is found damaged, and 2 reached again from 1
        save(tmp_path, step, val_loss=loss)
    damaged = [checkpoint_files.Refused(tmp_path / file_names.step_dir(3), "bad")]
    checkpoint_files.repair_pointers(
        tmp_path, checkpoint_files.verify(tmp_path / file_names.step_dir(2)), damaged=damaged
    )
    assert not (tmp_path / file_names.BEST).exists()
    assert checkpoint_files.retain(tmp_path, keep_last=1, damaged=damaged) == [1, 3]
    assert checkpoint_files.list_steps(tmp_path) == [2]


def test_saving_a_step_again_replaces_the_damaged_one(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    (folder / file_names.STATE).write_text("")
    save(tmp_path, 4)
    checkpoint_files.verify(folder)


class Killed(BaseException):
    pass


@pytest.mark.acceptance(102)
@pytest.mark.parametrize("point", range(1, 30))
def test_a_save_killed_at_any_sync_rename_or_delete_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    save(tmp_path, 1, val_loss=3.0)
    calls = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == point:
                raise Killed
            return call(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        for name in ("fsync", "rename", "replace"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            save(tmp_path, 2, val_loss=2.0, keep_last=1)
        except Killed:
            pass
        else:
            assert calls < point, "the call number was reached but did not kill"
    checkpoint_files.clean_up(tmp_path)
    found = checkpoint_files.find_latest(tmp_path)
    assert found.folder is not None
    assert found.refused == []
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith(".")]


@pytest.mark.acceptance(103)
def test_a_full_disk_fails_the_save_and_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
        with pytest.raises(RunFailed) as caught:
            save(tmp_path, 2)
    assert "are free" in caught.value.why

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunFailed, match="step 2 could not be written"):
            save(tmp_path, 2)

    def full_too(*args: object, **kwargs: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["homing.lm.model.open_weights.load_and_save"], "save_file", full_too)
        with pytest.raises(RunFailed, match="step 2 could not be written") as caught:
            save(tmp_path, 2)
    assert "No space left" in caught.value.why
    assert checkpoint_files.list_steps(tmp_path) == [1]
    assert checkpoint_files.clean_up(tmp_path) == []
    assert checkpoint_files.find_latest(tmp_path).folder == tmp_path / file_names.step_dir(1)
