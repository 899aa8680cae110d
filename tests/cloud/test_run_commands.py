"""Commands in errors name the run as it was typed, from the order down to the provider."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.cloud.rig import make_draft, make_run

from homing.cloud.home import Home
from homing.cloud.launch.inputs import travelling
from homing.cloud.launch.launch import Draft, draft, dry_run
from homing.cloud.machine_setup import boot_files
from homing.cloud.run_commands import Words
from homing.errors import DataError
from homing.store import FileStore
from homing.world import World

TYPED = "fern.yaml --set seed=3"


def as_typed(ready: Draft) -> Draft:
    return dataclasses.replace(ready, order=dataclasses.replace(ready.order, typed=TYPED))


@pytest.mark.parametrize("verb", ["prep", "verify", "plan", "launch"])
def test_a_command_names_the_run_as_it_was_typed_or_by_its_name(verb: str) -> None:
    assert Words("moss", TYPED).to(verb) == f"homing {verb} {TYPED}"
    assert Words("moss").to(verb) == f"homing {verb} moss"


def test_a_run_that_goes_on_is_launched_by_its_name_and_without_changes() -> None:
    assert Words("moss", TYPED, is_resume=True).to("launch") == "homing launch moss --resume"
    assert Words("moss", TYPED, is_resume=True).to("plan") == f"homing plan {TYPED}"


def test_the_providers_are_told_how_the_run_was_typed(home: Home, tmp_path: Path) -> None:
    ready = as_typed(make_draft(home, tmp_path))
    assert dry_run(ready, home).order.words == Words("moss", TYPED)
    (tmp_path / "store").mkdir()  # a run that goes on has one
    ready = dataclasses.replace(ready, order=dataclasses.replace(ready.order, resume=True))
    assert dry_run(ready, home).order.words.to("launch") == "homing launch moss --resume"


def test_what_is_not_prepared_is_to_be_prepared_in_the_words_that_were_typed(home: Home, tmp_path: Path) -> None:
    ready = as_typed(make_draft(home, tmp_path))
    with pytest.raises(DataError) as caught:
        draft(dataclasses.replace(ready.order, is_prepared=False), home)
    launch = f"homing launch {TYPED} --spend-limit {ready.order.spend_limit_usd}"
    assert caught.value.fix == f"homing prep {TYPED} && homing verify {TYPED} && {launch}"


def test_files_that_are_gone_since_are_prepared_again_in_the_words_that_were_typed(home: Home, tmp_path: Path) -> None:
    ready = as_typed(make_draft(home, tmp_path))
    (Path(ready.run.data.dir) / "manifest.json").unlink()
    with pytest.raises(DataError) as caught:
        dry_run(ready, home)
    assert caught.value.fix == f"homing prep {TYPED}"


def test_weights_that_are_missing_name_the_run_likewise(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run = dataclasses.replace(run, phases=[dataclasses.replace(run.phases[0], init_from=str(tmp_path / "none"))])
    with pytest.raises(DataError) as caught:
        travelling(run, World(), words=Words("moss", TYPED))
    assert caught.value.fix == f"homing prep {TYPED}"
    with pytest.raises(DataError) as caught:
        travelling(run, World())
    assert caught.value.fix == "homing prep moss"


def test_inputs_of_nobody_in_particular_are_named_by_the_run(tmp_path: Path) -> None:
    run = dataclasses.replace(make_run(tmp_path), id="moss-1")
    store = FileStore(f"file:{tmp_path}/store", World())
    with pytest.raises(DataError) as caught:
        boot_files.prepare_inputs(run, tmp_path / "nowhere", store, World())
    assert caught.value.fix == "homing prep moss"
