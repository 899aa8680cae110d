"""`homing rehearse`: the trip on the fake cloud, and what it says of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.cli.control_rig import lay_out
from tests.cloud.rig import TRAINER, homing, look_more_often, make_run

from homing.api.tools.rehearse_run import for_real
from homing.cloud.providers.fake.faults import Faults
from homing.cloud.providers.fake.machines import machine_prefix
from homing.cloud.providers.simulated_machine import MACHINE_ENV
from homing.config.load import Loaded
from homing.rehearse.scenes import SCENES, faults_of, find_scenes
from homing.world import World

Capture = pytest.CaptureFixture[str]


def test_the_faults_are_listed_with_what_happens(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    said = homing(capsys, monkeypatch, "rehearse", "--list-faults")
    assert said.code == 0
    for name in SCENES:
        assert name in said.out
    assert "homing rehearse RUN --fault preempt" in said.err
    assert set(homing(capsys, monkeypatch, "rehearse", "--list-faults", "--json").json["faults"]) == set(SCENES)


def test_a_fault_that_does_not_exist_is_refused_before_anything_is_done(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, homing_home: Path
) -> None:
    said = homing(capsys, monkeypatch, "rehearse", "moss", "--fault", "earthquake")
    assert said.code == 2
    assert "earthquake" in said.err
    assert "--list-faults" in said.err
    assert not (homing_home / "rehearsals").exists()


def test_without_a_run_it_asks_for_one(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert homing(capsys, monkeypatch, "rehearse").code == 2


def marked(homing_home: Path) -> list[int]:
    """Processes of machines of any rehearsal below this home."""
    folders = (homing_home / "rehearsals").iterdir()
    prefixes = [machine_prefix(folder / "fake" / "machines") for folder in folders]
    return [process.pid for prefix in prefixes for process, _ in World().marked(MACHINE_ENV, prefix)]


@pytest.mark.parametrize("name", list(SCENES))
def test_each_fault_does_something(name: str) -> None:
    scene = SCENES[name]
    assert scene.act or faults_of(find_scenes([name])) != Faults()
    assert scene.text.endswith(".")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is prepared, with a trainer of a few lines in the trainer's place."""
    look_more_often(monkeypatch)
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    run = make_run(tmp_path)
    nothing = None
    loaded = Loaded(run, tmp_path / "moss.yaml", "name: moss\n", nothing, [], is_prepared=True)  # type: ignore[arg-type]
    monkeypatch.setattr("homing.api.tools.rehearse_run._prepared", lambda run, *others: loaded)
    monkeypatch.setattr("homing.api.tools.rehearse_run.load_run", lambda run, sets: loaded)
    monkeypatch.setattr(
        "homing.cloud.machine_setup.boot_files.trainer_argv",
        lambda python, work_dir: [sys.executable, str(script), f"{work_dir}/run", "40", "0.25", "ok"],
    )


@pytest.mark.acceptance("X26")
@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_a_preempted_run_comes_home_despite_lost_answers_and_a_false_destroy(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, homing_home: Path
) -> None:
    faults = [word for name in ("preempt", "create-lost", "destroy-lies") for word in ("--fault", name)]
    said = homing(capsys, monkeypatch, "rehearse", "moss", *faults, "--json")
    assert said.code == 0, said.err
    body = said.json
    assert body["is_good"]
    assert body["launches"] == 2
    assert body["step"] == 40
    assert len(body["instances"]) == 2
    assert Path(body["model"], "model.safetensors").is_file()
    assert "preempt: now" in said.err
    assert re.search(r"For real: homing launch moss --spend-limit \d+\.\d\d", said.err)
    assert marked(homing_home) == []
    assert not (homing_home / "ledger.sqlite").exists()  # the real ledger is untouched


def test_what_it_takes_for_real_is_a_sum_or_where_to_find_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path, monkeypatch, steps=1, step_s=0.0)
    assert re.fullmatch(r"homing launch moss --spend-limit \d+\.\d+", for_real("moss", []))
    limited = ["limits.spend=3"]
    assert for_real("moss", limited) == "homing launch moss --set limits.spend=3   within $3.00"
    clouds = ["cloud.providers=[fake]"]
    assert for_real("moss", clouds).startswith("homing plan moss --set 'cloud.providers=[fake]'   ")


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_a_rehearsal_that_leaks_is_bad(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: an adapter that sees no volumes. The verdict must see the one that bills."""
    monkeypatch.setattr("homing.cloud.providers.fake.provider.Fake.list_resources", lambda self: [])
    said = homing(capsys, monkeypatch, "rehearse", "moss", "--fault", "volume-left", "--json")
    assert said.code == 1
    assert "still billing" in said.err
    assert "The rehearsal failed" in said.err


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_a_run_that_does_not_end_is_bad_and_nothing_is_left_running(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, homing_home: Path
) -> None:
    monkeypatch.setattr("homing.rehearse.rehearsal._WATCH_S", 2.0)
    monkeypatch.setattr("homing.rehearse.rehearsal._LOOK_S", 1.0)
    said = homing(capsys, monkeypatch, "rehearse", "moss")
    assert said.code == 1
    assert "did not end within" in said.err
    assert "No model was fetched" in said.err
    assert marked(homing_home) == []
