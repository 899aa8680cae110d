"""What a person types as RUN becomes one checkpoint folder, or an error that says where it looked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from homing.cli.find_model import find_model
from homing.errors import DataError, UsageError
from homing.wire import codec, names
from homing.wire.checkpoint import Pointer


def weights(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / names.WEIGHTS).write_bytes(b"w")
    return folder


def run_with(
    folder: Path, *, phase: str = "pretrain", steps: tuple[int, ...] = (4, 8, 12), best: int | None = 8
) -> Path:
    for step in steps:
        weights(folder / names.CHECKPOINTS / phase / names.step_dir(step))
    phase_dir = folder / names.CHECKPOINTS / phase
    (phase_dir / names.LATEST).write_text(codec.dumps(Pointer(max(steps))))
    if best:
        (phase_dir / names.BEST).write_text(codec.dumps(Pointer(best)))
    return folder


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_checkpoint_folder_is_itself(tmp_path: Path) -> None:
    folder = weights(tmp_path / "some" / "step-00000004")
    assert find_model(str(folder)) == folder


@pytest.mark.parametrize("asked", [{"checkpoint": "4"}, {"phase": "pretrain"}])
def test_in_one_checkpoint_there_is_none_to_choose(tmp_path: Path, asked: dict[str, str]) -> None:
    folder = weights(tmp_path / "some" / "step-00000008")
    with pytest.raises(UsageError, match="none to choose"):
        find_model(str(folder), **asked)


def test_a_run_directory_gives_its_best_checkpoint_else_its_latest(tmp_path: Path) -> None:
    assert find_model(str(run_with(tmp_path / "a"))).name == "step-00000008"
    assert find_model(str(run_with(tmp_path / "b", best=None))).name == "step-00000012"


@pytest.mark.parametrize(("asked", "step"), [("best", 8), ("latest", 12), ("4", 4)])
def test_a_person_may_name_the_checkpoint(tmp_path: Path, asked: str, step: int) -> None:
    run_with(tmp_path / "a")
    assert find_model("./a", checkpoint=asked).name == names.step_dir(step)


def test_the_last_phase_counts_unless_another_is_named(tmp_path: Path) -> None:
    run_with(tmp_path / "a")
    run_with(tmp_path / "a", phase="sft", steps=(3,), best=None)
    assert find_model("./a").parent.name == "sft"
    assert find_model("./a", phase="pretrain").parent.name == "pretrain"
    with pytest.raises(DataError) as caught:
        find_model("./a", phase="rl")
    assert "pretrain, sft" in caught.value.why


def test_a_fetched_model_comes_before_the_run_it_came_from(tmp_path: Path, homing_home: Path) -> None:
    fetched = weights(tmp_path / "models" / "goethe")
    run_with(homing_home / "runs" / "goethe-20260101-120000-abcd")
    assert find_model("goethe") == fetched.relative_to(tmp_path)
    assert find_model("goethe", checkpoint="latest").name == "step-00000012"


def test_the_newest_run_of_that_name_counts_and_not_one_whose_name_only_begins_so(homing_home: Path) -> None:
    runs = homing_home / "runs"
    run_with(runs / "goethe-20260101-120000-abcd")
    newest = run_with(runs / "goethe-20260301-080000-0000")
    run_with(runs / "goethe-large-20260401-080000-0000")
    (runs / "goethe-20260501-080000-ffff").mkdir()  # launched, but no checkpoint came home yet
    assert newest in find_model("goethe").parents
    assert find_model("goethe-20260101-120000-abcd").is_relative_to(runs / "goethe-20260101-120000-abcd")


def test_with_nothing_named_the_newest_of_all_counts(tmp_path: Path, homing_home: Path) -> None:
    old = weights(tmp_path / "models" / "old")
    os.utime(old, (1, 1))
    new = run_with(homing_home / "runs" / "new-20260301-080000-0000")
    assert find_model(None).is_relative_to(new)


def test_nothing_anywhere_says_where_it_looked_and_what_to_do(homing_home: Path) -> None:
    with pytest.raises(DataError) as caught:
        find_model(None)
    assert "quickstart" in caught.value.fix
    with pytest.raises(DataError) as caught:
        find_model("goethe")
    assert "models/goethe" in caught.value.why
    assert str(homing_home) in caught.value.why
    assert "homing fetch goethe" in caught.value.fix


def test_a_step_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    run_with(tmp_path / "a", best=None)
    for asked in ("5", "best"):
        with pytest.raises(DataError) as caught:
            find_model("./a", checkpoint=asked)
        assert "4, 8, 12" in caught.value.why


def test_what_is_no_checkpoint_and_no_phase_is_a_usage_error(tmp_path: Path) -> None:
    run_with(tmp_path / "a")
    with pytest.raises(UsageError, match="names no checkpoint"):
        find_model("./a", checkpoint="newest")
    with pytest.raises(UsageError, match="no phase"):
        find_model("./a", phase="finetune")


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no model"):
        find_model("./empty")
    with pytest.raises(DataError, match="no folder"):
        find_model("./absent")


def test_a_broken_pointer_is_said_and_a_step_can_still_be_named(tmp_path: Path) -> None:
    run = run_with(tmp_path / "a")
    (run / names.CHECKPOINTS / "pretrain" / names.BEST).write_text("{")
    with pytest.raises(DataError, match=r"best\.json cannot be read"):
        find_model("./a")
    assert find_model("./a", checkpoint="4").name == "step-00000004"


def test_a_pointer_to_a_checkpoint_that_is_gone_falls_to_the_latest_only_when_none_was_asked_for(
    tmp_path: Path,
) -> None:
    run_with(tmp_path / "a", best=99)
    assert find_model("./a").name == "step-00000012"
    with pytest.raises(DataError):
        find_model("./a", checkpoint="best")
