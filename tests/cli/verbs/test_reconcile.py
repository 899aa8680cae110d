"""`homing reconcile`: what the ledger forgot is shown, asked about, and not forgotten again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with
from tests.cloud.rig import forget, marked_now

from homing.cloud.home import Home
from homing.cloud.providers.local.provider import Local
from homing.errors import ProviderRefused
from homing.world import World

cli = cli_with(steps=100000)


@pytest.fixture
def forgotten(cli: Homing, homing_home: Path) -> Homing:
    """A home that lost its ledger while one of its instances is live."""
    assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    forget(homing_home)
    return cli


def test_where_there_is_nothing_it_says_so(cli: Homing) -> None:
    said = cli("reconcile", "--json")
    assert said.code == 0
    assert said.json["findings"] == []
    assert "No homing resources at any provider" in said.err
    assert cli("reconcile").out == "", "no table of nothing"


@pytest.mark.slow
def test_what_is_known_needs_no_answer(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    said = cli("reconcile")
    assert said.code == 0
    assert "known" in said.out
    assert "homing runs" in said.err


@pytest.mark.acceptance(140)
def test_an_unknown_instance_exits_6_until_the_user_decides(forgotten: Homing, homing_home: Path) -> None:
    for _ in range(2):
        said = forgotten("reconcile")
        assert said.code == 6
        assert "forgotten" in said.out
        assert "$0.36/h" in said.out
        assert "homing reconcile --destroy" in said.err
    refused = forgotten("reconcile", "--destroy")
    assert refused.code == 2
    assert "Destroy instance homing-" in refused.err
    done = forgotten("reconcile", "--destroy", "--yes", "--json")
    assert done.code == 0, done.err
    assert [each["answer"] for each in done.json["findings"]] == ["ended"]
    assert marked_now(Home(homing_home, World())) == []
    assert forgotten("reconcile").code == 0


@pytest.mark.slow
def test_under_json_exit_6_is_one_document_with_the_error_in_it(forgotten: Homing) -> None:
    said = forgotten("reconcile", "--json")
    assert said.code == 6
    (line,) = said.out.splitlines()
    document = json.loads(line)
    assert [each["kind"] for each in document["findings"]] == ["forgotten"]
    assert "homing reconcile --destroy" in document["error"]["fix"]
    assert "error:" in said.err
    assert json.loads(forgotten("reconcile", "--adopt", "--yes", "--json").out)["error"] is None


@pytest.mark.slow
def test_what_was_forgotten_may_be_kept_and_then_belongs_to_the_ledger(forgotten: Homing) -> None:
    said = forgotten("reconcile", "--adopt", "--yes", "--json")
    assert said.code == 0, said.err
    assert [each["answer"] for each in said.json["findings"]] == ["kept"]
    again = forgotten("reconcile", "--json").json["findings"]
    assert [(each["kind"], each["answer"]) for each in again] == [("known", "")]
    assert len(forgotten("runs", "--json").json["billing"]) == 1


def test_both_answers_at_once_are_refused(cli: Homing) -> None:
    assert cli("reconcile", "--destroy", "--adopt").code == 2


@pytest.mark.slow
def test_an_unreachable_provider_is_reported_and_exits_6_if_something_may_bill(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: Local) -> list[object]:
        raise ProviderRefused("the provider is away")

    with monkeypatch.context() as patch:
        patch.setattr(Local, "list_owned", away)
        said = cli("reconcile", "--json")
        assert said.code == 0  # nothing of ours was ever there
        assert "away" in said.json["problems"][0]
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    with monkeypatch.context() as patch:
        patch.setattr(Local, "list_owned", away)
        blind = cli("reconcile")
        assert blind.code == 6
        assert "away" in blind.err
