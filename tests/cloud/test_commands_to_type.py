"""Commands in errors name the run as it was typed, from the order down to the provider."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.cloud.rig import make_draft, make_run

from homing.cloud.commands_to_type import Words
from homing.cloud.home import Home
from homing.cloud.launch.inputs import travelling
from homing.cloud.launch.launch import Draft, draft, dry_run
from homing.cloud.machine_setup import boot_files
from homing.errors import DataError
from homing.store import FileStore
from homing.world import World

TYPED = "fern.yaml --set seed=3"


def as_typed(ready: Draft) -> Draft:
    return dataclasses.replace(ready, order=dataclasses.replace(ready.order, typed=TYPED))


@pytest.mark.parametrize("verb", ["prep", "verify", "plan", "launch"])
def test_a_command_names_the_run_as_typed_or_by_its_name(verb: str) -> None:
    assert Words("moss", TYPED).to(verb) == f"homing {verb} {TYPED}"
    assert Words("moss").to(verb) == f"homing {verb} moss"


def test_a_resume_command_uses_the_run_name_without_overrides() -> None:
    assert Words("moss", TYPED, is_resume=True).to("launch") == "homing launch moss --resume"
    assert Words("moss", TYPED, is_resume=True).to("plan") == f"homing plan {TYPED}"


def test_the_order_for_the_provider_holds_the_command_as_typed(home: Home, tmp_path: Path) -> None:
    ready = as_typed(make_draft(home, tmp_path))
    assert dry_run(ready, home).order.words == Words("moss", TYPED)
    (tmp_path / "store").mkdir()  # a resumed run has a store
    ready = dataclasses.replace(ready, order=dataclasses.replace(ready.order, resume=True))
    assert dry_run(ready, home).order.words.to("launch") == "homing launch moss --resume"


def test_the_fix_for_unprepared_data_repeats_the_command_as_typed(home: Home, tmp_path: Path) -> None:
    ready = as_typed(make_draft(home, tmp_path))
    with pytest.raises(DataError) as caught:
        draft(dataclasses.replace(ready.order, is_prepared=False), home)
    launch = f"homing launch {TYPED} --spend-limit {ready.order.spend_limit_usd}"
    assert caught.value.fix == f"homing prep {TYPED} && homing verify {TYPED} && {launch}"


def test_the_fix_for_missing_data_files_repeats_the_command_as_typed(home: Home, tmp_path: Path) -> None:
    ready = as_typed(make_draft(home, tmp_path))
    (Path(ready.run.data.dir) / "manifest.json").unlink()
    with pytest.raises(DataError) as caught:
        dry_run(ready, home)
    assert caught.value.fix == f"homing prep {TYPED}"


def test_the_fix_for_missing_weights_repeats_the_command_as_typed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run = dataclasses.replace(run, phases=[dataclasses.replace(run.phases[0], init_from=str(tmp_path / "none"))])
    with pytest.raises(DataError) as caught:
        travelling(run, World(), words=Words("moss", TYPED))
    assert caught.value.fix == f"homing prep {TYPED}"
    with pytest.raises(DataError) as caught:
        travelling(run, World())
    assert caught.value.fix == "homing prep moss"


def test_the_fix_for_missing_inputs_falls_back_to_the_run_name(tmp_path: Path) -> None:
    run = dataclasses.replace(make_run(tmp_path), id="moss-1")
    store = FileStore(f"file:{tmp_path}/store", World())
    with pytest.raises(DataError) as caught:
        boot_files.prepare_inputs(run, tmp_path / "nowhere", store, World())
    assert caught.value.fix == "homing prep moss"
