"""What a person types as RUN becomes one checkpoint folder, or an error that says where it looked."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from tests.report.kept_run import two_phases

from homing.api.lookup.find_models import find_model
from homing.config.home_and_run_files import PROJECT_NOTE, project_note
from homing.errors import DataError, UsageError
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, Pointer
from homing.wire.event_lines import Outcome


def weights(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / file_names.WEIGHTS).write_bytes(b"w")
    return folder


def run_with(
    folder: Path, *, phase: str = "pretrain", steps: tuple[int, ...] = (4, 8, 12), best: int | None = 8
) -> Path:
    for step in steps:
        weights(folder / file_names.CHECKPOINTS / phase / file_names.step_dir(step))
    phase_dir = folder / file_names.CHECKPOINTS / phase
    (phase_dir / file_names.LATEST).write_text(codec.dumps(Pointer(max(steps))))
    if best:
        (phase_dir / file_names.BEST).write_text(codec.dumps(Pointer(best)))
    return folder


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_checkpoint_folder_is_itself(tmp_path: Path) -> None:
    folder = weights(tmp_path / "some" / "step-00000004")
    assert find_model(str(folder)) == folder


def test_what_was_exported_for_other_programs_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/moss-F16.gguf").write_bytes(b"GGUF")
    for typed in ("./out", "out/moss-F16.gguf"):
        with pytest.raises(DataError, match="is a GGUF file, which homing can write but not open"):
            find_model(typed)
    (tmp_path / "out" / file_names.WEIGHTS).touch()
    assert find_model("./out") == Path("out"), "a model that also has a GGUF is a model"
    (weights(tmp_path / "adapter") / "adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match="an adapter for peft without its base weights") as raised:
        find_model("./adapter")
    assert "homing export RUN --to merged" in raised.value.fix
    (tmp_path / "adapter" / file_names.RUN).write_text("{}")
    assert find_model("./adapter") == Path("adapter"), "a checkpoint of ours has its run next to it"


@pytest.mark.parametrize("asked", [{"checkpoint": "4"}, {"phase": "pretrain"}])
def test_in_one_checkpoint_there_is_none_to_choose(tmp_path: Path, asked: dict[str, str]) -> None:
    folder = weights(tmp_path / "some" / "step-00000008")
    with pytest.raises(UsageError, match="nothing to choose"):
        find_model(str(folder), **asked)


def test_a_run_directory_gives_its_best_checkpoint_else_its_latest(tmp_path: Path) -> None:
    assert find_model(str(run_with(tmp_path / "a"))).name == "step-00000008"
    assert find_model(str(run_with(tmp_path / "b", best=None))).name == "step-00000012"


@pytest.mark.parametrize(("asked", "step"), [("best", 8), ("latest", 12), ("4", 4)])
def test_a_person_may_name_the_checkpoint(tmp_path: Path, asked: str, step: int) -> None:
    run_with(tmp_path / "a")
    assert find_model("./a", checkpoint=asked).name == file_names.step_dir(step)


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


def test_a_name_means_its_newest_run_and_not_a_run_with_a_longer_name(homing_home: Path) -> None:
    runs = homing_home / "runs"
    run_with(runs / "goethe-20260101-120000-abcd")
    newest = run_with(runs / "goethe-20260301-080000-0000")
    run_with(runs / "goethe-large-20260401-080000-0000")
    (runs / "goethe-20260501-080000-ffff").mkdir()  # launched, but no checkpoint came home yet
    assert newest in find_model("goethe").parents
    assert find_model("goethe-20260101-120000-abcd").is_relative_to(runs / "goethe-20260101-120000-abcd")


def test_a_plain_name_means_the_run_and_a_folder_of_that_name_is_mentioned(
    tmp_path: Path, homing_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = weights(tmp_path / "tinyllama")
    assert find_model("tinyllama") == Path("tinyllama"), "there is no run of that name yet"
    run = run_with(homing_home / "runs" / "tinyllama-20260101-120000-abcd", phase="sft", best=None)
    assert capsys.readouterr().err == ""
    assert find_model("tinyllama").is_relative_to(run)
    said = f"tinyllama is both a run and a folder: using {run}. For the folder, type ./tinyllama\n"
    assert capsys.readouterr().err == said
    assert find_model("./tinyllama").absolute() == folder
    assert find_model(run.name).is_relative_to(run)
    assert capsys.readouterr().err == "", "who names one of them means it"


def test_a_phase_comes_from_the_run_that_has_it_with_a_note(
    tmp_path: Path, homing_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sft = run_with(homing_home / "runs" / "ll-20260101-120000-abcd", phase="sft", best=None)
    rl = run_with(homing_home / "runs" / "ll-20260102-120000-abcd", phase="rl", best=None)
    assert find_model("ll").is_relative_to(rl)
    assert capsys.readouterr().err == ""
    assert find_model("ll", phase="sft", checkpoint="4") == sft / file_names.CHECKPOINTS / "sft" / file_names.step_dir(
        4
    )
    assert capsys.readouterr().err == f"{rl.name} has no sft checkpoint: using {sft}\n"
    with pytest.raises(DataError) as caught:
        find_model("ll", phase="mid")
    assert "Phases with checkpoints: rl" in caught.value.why
    for name, phase in (("ll", "pretrain"), ("ll-mid", "mid")):
        folder = weights(tmp_path / "models" / name)
        manifest = CheckpointManifest("ll", "ll-1", phase, 4, 1, True, "", 7, [])
        (folder / file_names.MANIFEST).write_text(codec.dumps(manifest))
        assert find_model("ll", phase=phase) == Path("models") / name, "fetched"
    with pytest.raises(UsageError, match="nothing to choose"):
        find_model("models/ll", phase="sft")
    for run_dir in (sft, rl):
        run_dir.rename(tmp_path / run_dir.name)
    with pytest.raises(UsageError, match="ll has no local checkpoint of the rl phase") as refused:
        find_model("ll", phase="rl")
    assert refused.value.why == "Local checkpoints: pretrain in models/ll, mid in models/ll-mid."
    assert "homing fetch ll --checkpoint rl:STEP" in refused.value.fix
    for run_dir in (sft, rl):
        (tmp_path / run_dir.name).rename(run_dir)
    capsys.readouterr()
    assert find_model("ll").is_relative_to(rl), "the last phase there is, fetched or not"
    assert capsys.readouterr().err == f"{rl}, rl   (--phase pretrain: models/ll; --phase mid: models/ll-mid)\n"


def fetched(folder: str, name: str, phase: str, step: int, run_id: str = "") -> Path:
    weights(Path(folder))
    manifest = CheckpointManifest(name, run_id or f"{name}-{phase}-1", phase, step, 1, True, "", 7, [])
    (Path(folder) / file_names.MANIFEST).write_text(codec.dumps(manifest))
    return Path(folder)


@pytest.mark.acceptance(131)
def test_the_last_phase_of_a_fetched_chain_is_taken_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    base = fetched("models/goethe", "goethe", "pretrain", 1200)
    assert find_model("goethe") == base
    assert capsys.readouterr().err == "models/goethe, pretrain step 1,200\n"
    sft = fetched("models/goethe-sft", "goethe", "sft", 60)
    assert find_model("goethe") == sft
    assert capsys.readouterr().err == "models/goethe-sft, sft step 60   (--phase pretrain: models/goethe)\n"
    assert find_model("goethe", phase="pretrain") == base
    fetched("models/goethe-rl", "goethe-rl", "rl", 9)  # a run of that very name, and not the chain's rl
    assert find_model("goethe") == sft
    weights(Path("models/mine"))
    fetched("models/mine-sft", "mine", "sft", 60)
    assert find_model("mine") == Path("models/mine"), "a foreign folder, and no phase of ours"


def begun_in(run_dir: Path, folder: Path) -> None:
    (run_dir / PROJECT_NOTE).write_bytes(project_note(str(folder)))


def test_a_run_of_another_folder_is_not_taken_for_the_one_that_a_run_file_here_describes(
    tmp_path: Path, homing_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = run_with(homing_home / "runs" / "goethe-20260301-080000-0000")
    begun_in(reference, tmp_path / "w")
    assert find_model("goethe").is_relative_to(reference), "nothing else here has that name"
    Path("runs").mkdir()
    Path("runs/goethe.yaml").write_text("name: goethe\n")
    with pytest.raises(DataError) as caught:
        find_model("goethe")
    assert f"{reference.name} was started in {tmp_path / 'w'}; runs/goethe.yaml describes" in caught.value.why
    assert caught.value.fix.endswith(reference.name)
    assert find_model(reference.name).is_relative_to(reference), "by its id it is meant"
    ours = run_with(homing_home / "runs" / "goethe-20260101-080000-0000")
    begun_in(ours, tmp_path)
    assert find_model("goethe").is_relative_to(ours), "older, and this folder's own"
    capsys.readouterr()
    fetched("models/goethe", "goethe", "sft", 60, reference.name)
    find_model("goethe")
    assert capsys.readouterr().err == f"models/goethe, sft step 60, started in {tmp_path / 'w'}\n"


def test_a_run_file_with_another_name_inside_means_that_run_and_a_copy_that_kept_the_name_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("runs").mkdir()
    Path("runs/gg.yaml").write_text("name: goethe\n")
    base = fetched("models/goethe", "goethe", "pretrain", 12)
    assert find_model("gg") == base
    assert "runs/gg.yaml describes the run goethe." in capsys.readouterr().err
    Path("runs/goethe.yaml").write_text("name: goethe\n")
    with pytest.raises(UsageError) as caught:
        find_model("gg")
    assert caught.value.what == "runs/gg.yaml and runs/goethe.yaml both describe the run goethe."
    assert caught.value.fix == "Add to runs/gg.yaml: name: gg"
    assert find_model("goethe") == base


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


@pytest.mark.acceptance(108)
def test_a_step_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    run_with(tmp_path / "a", best=None)
    for asked in ("5", "best"):
        with pytest.raises(DataError) as caught:
            find_model("./a", checkpoint=asked)
        assert "4, 8, 12" in caught.value.why


def test_what_is_no_checkpoint_and_no_phase_is_a_usage_error(tmp_path: Path) -> None:
    run_with(tmp_path / "a")
    with pytest.raises(UsageError, match="Invalid checkpoint"):
        find_model("./a", checkpoint="newest")
    with pytest.raises(UsageError, match="Unknown phase"):
        find_model("./a", phase="finetune")
    with pytest.raises(UsageError) as caught:
        find_model("./a", phase="stf")
    assert caught.value.fix == "Use --phase sft"


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="contains no model"):
        find_model("./empty")
    with pytest.raises(DataError, match="Folder not found"):
        find_model("./absent")


def test_a_broken_pointer_is_said_and_a_step_can_still_be_named(tmp_path: Path) -> None:
    run = run_with(tmp_path / "a")
    (run / file_names.CHECKPOINTS / "pretrain" / file_names.BEST).write_text("{")
    with pytest.raises(DataError, match=r"Cannot read .*best\.json"):
        find_model("./a")
    assert find_model("./a", checkpoint="4").name == "step-00000004"


def test_a_pointer_to_a_checkpoint_that_is_gone_falls_to_the_latest_only_when_none_was_asked_for(
    tmp_path: Path,
) -> None:
    run_with(tmp_path / "a", best=99)
    assert find_model("./a").name == "step-00000012"
    with pytest.raises(DataError):
        find_model("./a", checkpoint="best")


def test_a_best_checkpoint_that_is_not_the_last_is_opened_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(tmp_path / "a", phase="rl", steps=(2, 5))
    (tmp_path / "a/checkpoints/rl" / file_names.BEST).write_text(codec.dumps(Pointer(2, val_loss=0.9722)))
    find_model("./a")
    said = capsys.readouterr().err
    assert "rl step 2: best of 2, by missing reward 0.9722; the last is step 5 (--checkpoint latest)" in said
    find_model("./a", checkpoint="best")
    find_model("./a", checkpoint="latest")
    find_model(str(tmp_path / "a/checkpoints/rl/step-00000002"))
    find_model(str(run_with(tmp_path / "b", best=12)))
    assert capsys.readouterr().err == "", "a choice of the person's own, or the last: nothing to explain"


def test_of_a_run_that_is_not_finished_it_is_said_how_far_it_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = run_with(tmp_path / "a") / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(12)
    stopped = CheckpointManifest("a", "a-1", "pretrain", 12, 1, False, "", 7, [])
    (last / file_names.MANIFEST).write_text(codec.dumps(stopped))
    find_model(str(tmp_path / "a"))
    assert "a is not finished: its last checkpoint is pretrain step 12." in capsys.readouterr().err
    find_model(str(tmp_path / "a"), checkpoint="4")  # whoever names a step knows what it is
    (last / file_names.MANIFEST).write_text(codec.dumps(dataclasses.replace(stopped, is_final=True)))
    find_model(str(tmp_path / "a"))
    assert "not finished" not in capsys.readouterr().err


def test_without_a_name_the_newest_model_of_this_folder_is_taken_with_a_note(
    tmp_path: Path, homing_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = run_with(homing_home / "runs" / "moss-20260101-120000-aaaa")
    begun_in(own, tmp_path)
    reference = run_with(homing_home / "runs" / "fern-20260201-120000-bbbb")
    begun_in(reference, tmp_path / "there")
    os.utime(own, (1, 1))
    os.utime(reference, (9, 9))
    assert own in find_model(None).parents, "older than the other folder's, and this one's"
    assert f"Using {own}, the newest finished model from this folder." in capsys.readouterr().err
    fetched = weights(Path("models/moss"))
    os.utime(fetched, (2, 2))
    assert find_model(None) == fetched


def test_without_a_name_and_a_model_here_models_elsewhere_are_named(tmp_path: Path, homing_home: Path) -> None:
    for number in range(7):
        run = run_with(homing_home / "runs" / f"moss-2026010{number}-120000-aaaa")
        begun_in(run, tmp_path / f"there{number}")
        os.utime(run, (number, number))
    with pytest.raises(DataError, match="No trained model from this folder") as caught:
        find_model(None)
    assert caught.value.why.startswith(
        f"Models from other folders: moss-20260106-120000-aaaa ({tmp_path / 'there6'}), moss-"
    )
    assert caught.value.why.count("moss-") == 5
    assert caught.value.fix.endswith(": moss-20260106-120000-aaaa")
    assert run in find_model(run.name).parents, "by its id from anywhere"


def trained(homing_home: Path, run_id: str, step: int, *, is_final: bool, phase: str = "pretrain") -> Path:
    """A run directory of `homing train`, with one checkpoint in it."""
    name = run_id.rsplit("-", 3)[0]
    folder = weights(homing_home / "runs" / run_id / file_names.CHECKPOINTS / phase / file_names.step_dir(step))
    manifest = CheckpointManifest(name, run_id, phase, step, 1, is_final, "", 7, [])
    (folder / file_names.MANIFEST).write_text(codec.dumps(manifest))
    return folder


@pytest.mark.acceptance(108)
@pytest.mark.regression("name-means-newest-finished")
def test_a_later_run_that_was_stopped_does_not_replace_the_finished_model(
    homing_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = trained(homing_home, "goethe-20260101-120000-aaaa", 200, is_final=True)
    stopped = trained(homing_home, "goethe-20260102-120000-bbbb", 1, is_final=False)
    assert find_model("goethe") == finished
    said = capsys.readouterr().err
    assert "goethe-20260101-120000-aaaa is the newest finished run of goethe." in said
    assert "goethe@goethe-20260102-120000-bbbb" in said, "how to open the other one"
    for typed in ("goethe@goethe-20260102-120000-bbbb", "goethe@20260102-120000-bbbb", "goethe@bbbb"):
        assert find_model(typed) == stopped
        assert "goethe-20260102-120000-bbbb is not finished" in capsys.readouterr().err
    os.utime(homing_home / "runs" / "goethe-20260102-120000-bbbb", (2**31, 2**31))
    assert find_model(None) == finished, "without a name it is the same rule"


@pytest.mark.regression("name-means-newest-finished")
def test_where_no_run_has_finished_it_is_the_newest_checkpoint_and_that_is_said(
    homing_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(homing_home, "goethe-20260101-120000-aaaa", 60, is_final=False)
    newest = trained(homing_home, "goethe-20260102-120000-bbbb", 7, is_final=False)
    assert find_model("goethe") == newest
    said = capsys.readouterr().err
    assert "No run of goethe has finished: using the newest checkpoint." in said
    assert "its last checkpoint is pretrain step 7" in said


@pytest.mark.regression("name-means-newest-finished")
def test_a_second_run_that_was_fetched_is_the_one_that_the_name_means(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = "goethe-20260101-120000-aaaa", "goethe-20260102-120000-bbbb"
    fetched("models/goethe", "goethe", "pretrain", 200, first)
    newer = fetched(f"models/{second}", "goethe", "pretrain", 200, second)  # where fetch puts it
    assert find_model("goethe") == newer
    assert "--phase" not in capsys.readouterr().err, "--phase cannot choose between two runs of one phase"
    assert find_model("goethe@aaaa") == Path("models/goethe")
    assert find_model("goethe", phase="pretrain") == newer
    assert find_model("goethe", checkpoint="200") == newer, "the step that is there may be named"
    capsys.readouterr()
    with pytest.raises(UsageError, match="nothing to choose") as caught:
        find_model("goethe", checkpoint="100")
    assert f"homing fetch {second} --checkpoint 100" in caught.value.fix
    assert "--step" in caught.value.why


def test_a_run_that_is_not_here_or_not_one_run_is_refused_with_those_that_are(homing_home: Path) -> None:
    trained(homing_home, "goethe-20260101-120000-aaaa", 60, is_final=True)
    trained(homing_home, "goethe-20260102-120000-aaaa", 60, is_final=True)
    with pytest.raises(UsageError, match="goethe has no local run ffff") as caught:
        find_model("goethe@ffff")
    assert "goethe-20260102-120000-aaaa, goethe-20260101-120000-aaaa" in caught.value.why
    with pytest.raises(UsageError, match="goethe@aaaa matches several runs"):
        find_model("goethe@aaaa")
    with pytest.raises(DataError, match="No trained model called 'faust'"):
        find_model("faust@aaaa")


def test_a_run_that_ended_before_its_last_phase_is_not_finished(homing_home: Path, tmp_path: Path) -> None:
    finished = trained(homing_home, "moss-20260101-120000-aaaa", 10, is_final=True, phase="mid")
    between = trained(homing_home, "moss-20260102-120000-bbbb", 20, is_final=True)
    for folder in (finished, between):
        (folder / file_names.RUN).write_text(codec.dumps(two_phases(tmp_path)))
    assert find_model("moss") == finished, "the later one has trained the first of its two phases"
    assert find_model("moss", phase="pretrain") == between, "and that phase it has finished"
    (homing_home / "runs" / "moss-20260102-120000-bbbb" / file_names.OUTCOME).write_text(
        codec.dumps(Outcome("done", "Every phase is trained.", 0))
    )
    assert find_model("moss") == between, "what the run says of itself counts"


def test_the_end_of_an_id_may_be_shorter_than_its_last_part(homing_home: Path) -> None:
    first = trained(homing_home, "goethe-20260101-120000-1a2b", 16, is_final=True)
    trained(homing_home, "goethe-20260102-120000-ffff", 60, is_final=True)
    for typed in ("goethe@1a2b", "goethe@a2b", "goethe@000-1a2b"):
        assert find_model(typed) == first


def test_a_step_that_only_another_run_has_is_answered_with_that_run(homing_home: Path) -> None:
    trained(homing_home, "goethe-20260101-120000-aaaa", 16, is_final=True)
    trained(homing_home, "goethe-20260102-120000-bbbb", 60, is_final=True)
    with pytest.raises(DataError, match="has no checkpoint 16") as caught:
        find_model("goethe", checkpoint="16")
    assert caught.value.fix == "Another run has it: use goethe-20260101-120000-aaaa instead of goethe"
    with pytest.raises(DataError, match="has no checkpoint 17") as caught:
        find_model("goethe", checkpoint="17")
    assert caught.value.fix == "Use --checkpoint 60"


def test_a_run_file_without_a_trained_run_is_answered_with_train() -> None:
    Path("runs").mkdir()
    Path("runs/moss.yaml").write_text("name: moss\n")
    with pytest.raises(DataError, match="No trained model called 'moss'") as caught:
        find_model("moss")
    assert caught.value.fix.startswith(
        "Train it here: homing train moss   Fetch it if it was launched: homing fetch moss"
    )
    with pytest.raises(DataError) as caught:
        find_model("fern")
    assert caught.value.fix.startswith("Fetch it: homing fetch fern")
