"""The whole trip on Shadeform's double: its API on loopback, machines that boot by our script, a store like S3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import marked_now
from tests.doubles.s3_servers import SECRET_KEY
from tests.doubles.shadeform import KEY
from tests.doubles.shadeform_server import ShadeformServer
from tests.doubles.sshd import need_sshd
from tests.e2e.trips import (
    ENDLESS,
    bucket,
    check_resume_here,
    files_with,
    open_home,
    ready,
    stand_in,
    stone,
    wait_for_checkpoint,
)

from homing.cloud.artifacts.checkpoints import fetch
from homing.cloud.contact.home_guard import sign_in
from homing.cloud.contact.ssh_access import find_login
from homing.cloud.destroy import destroy_run
from homing.cloud.guard.change_limit_or_stop import ask_to_stop, change_limit, propose
from homing.cloud.guard.guard_pass import guard_pass
from homing.cloud.home import Home
from homing.cloud.launch.armed_guards import guards
from homing.cloud.launch.launch import Draft, launch
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.providers.base import wait_until
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.watch.follow import watch
from homing.cloud.watch.run_output import boot_log
from homing.errors import StartTimeout, UsageError
from homing.wire import file_names

pytestmark = [pytest.mark.machine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    need_sshd()
    with bucket() as url:
        yield url


@pytest.fixture
def shadeform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShadeformServer]:
    with ShadeformServer(tmp_path / "machines") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield server
        assert server.violations == []


@pytest.fixture
def home(homing_home: Path, shadeform: ShadeformServer, monkeypatch: pytest.MonkeyPatch) -> Home:
    return open_home(homing_home, monkeypatch)


def rented(home: Home, store: str, tmp_path: Path, steps: int, step_s: float = 0.02, **messages: Any) -> Draft:
    messages = {"is_one_guard_enough": True, **messages}
    return stand_in(home, store, tmp_path, "shadeform", steps=steps, step_s=step_s, **messages)


def made_at(home: Home, run_id: str) -> float:
    return home.ledger.lines(run_id)[-1].created_at or 0.0


@pytest.mark.acceptance(48)
def test_offers_launch_boot_train_watch_push_end_fetch_receipt(
    home: Home, shadeform: ShadeformServer, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the account's key at home, so that whoever watches ends the machine."""
    loaded = stone(tmp_path, monkeypatch, f"store: {store}\ncloud: {{providers: [shadeform]}}")
    made = ready(home, loaded.run, "shadeform")
    said = " ".join(guards(made, home))
    assert "cannot end its own billing" in said
    assert made.worst_case_usd < Decimal("1.00"), "the plan bounds what it can cost if no computer at home is on"
    with pytest.raises(UsageError, match="Only one guard"):
        launch(made, home)
    assert shadeform.cloud.bill() == []
    sign_in(home, 60, reached=["shadeform"])

    done = launch(made, home)
    instance_id = done.instance.id
    machine = shadeform.machine(instance_id)
    seen = machine.processes()
    assert any("agent.zip" in argv for argv, _ in seen.values())
    assert find_login(home, done.run).connection.port == machine.port
    assert "starting the agent" in boot_log(home, done.run)
    machine_there = shadeform.cloud.rented[instance_id]
    assert 0 < made.run.limits.time_s - (machine_there.guarded_until() - made_at(home, done.run.id)) < 30

    texts = [report.text for report in watch(home, done.run, every_s=1)]
    assert texts[-1].startswith("done"), texts[-3:]
    assert shadeform.cloud.live() == {}
    refresh(home)
    (line,) = home.ledger.lines(done.run.id)
    assert (line.state, line.billing) == ("gone", "no")
    (billed,) = shadeform.cloud.bill()
    assert Decimal(line.spend_usd) >= billed.usd > 0
    assert home.provider("shadeform").list_resources() == []
    got = fetch(home, home.ledger.find("stone"), tmp_path / "models/stone")
    assert (got.manifest.step, got.manifest.is_final) == (30, True)

    # The account's key is nowhere but at home: neither in what was sent, nor there, nor in what home wrote down.
    assert all(KEY not in argv and KEY not in env.values() for argv, env in seen.values())
    assert KEY not in json.dumps([each.asked for each in shadeform.cloud.rented.values()])
    assert files_with(KEY, tmp_path / "machines") == []
    assert files_with(KEY, home.path) == []
    # The store's keys came by SSH and lie on no disk there.
    assert files_with(SECRET_KEY, tmp_path / "machines") == []


@pytest.mark.acceptance(65)
def test_with_self_delete_it_ends_itself_and_the_key_is_in_no_file(
    home: Home, shadeform: ShadeformServer, store: str, tmp_path: Path
) -> None:
    made = rented(home, store, tmp_path, ENDLESS, 0.1, settings={"self_delete": True}, is_one_guard_enough=False)
    assert any("the account's key is sent to the instance" in said for said in guards(made, home))
    assert made.run.limits.time_s == 0, "nothing has to bound what it wastes"
    done = launch(made, home)
    seen = shadeform.machine(done.instance.id).processes()
    holders = [argv for argv, env in seen.values() if KEY in env.values()]
    assert holders
    assert all("agent.zip" in argv for argv in holders), "the trainer and what it starts never see it"
    assert all(KEY not in argv for argv, _ in seen.values())
    ask_to_stop(home, done.run)
    assert wait_until(lambda: shadeform.cloud.live() == {}, timeout_s=300, every_s=0.3, world=home.world)
    # It bills no more from its own request on; a moment later its machine is taken down.
    assert wait_until(lambda: marked_now(home) == [], timeout_s=30, every_s=0.3, world=home.world)
    refresh(home)
    row = home.ledger.find("moss")
    assert (row.state, row.exit_code) == ("stopped", 0), row.reason
    assert billing_lines(home.ledger.lines(row.id)) == []
    assert files_with(KEY, tmp_path / "machines") == []
    assert files_with(KEY, home.path) == []
    assert KEY not in json.dumps([each.asked for each in shadeform.cloud.rented.values()])


def test_a_finished_instance_waits_for_home_or_for_its_auto_delete_date(
    home: Home, shadeform: ShadeformServer, store: str, tmp_path: Path
) -> None:
    done = launch(rented(home, store, tmp_path, 10), home)
    beat = f"{file_names.STORE_RUNS}/{done.run.id}/{file_names.HEARTBEAT}"
    there = home.store_of(done.run)
    assert wait_until(lambda: b'"ended"' in there.read(beat), timeout_s=300, every_s=0.5, world=home.world)
    assert sum(shadeform.cloud.live().values()) == 1, "it cannot end itself, and bills"
    guard_pass(home)
    assert shadeform.cloud.live() == {}, "whoever looks ends it at once"
    assert billing_lines(home.ledger.lines()) == []

    again = launch(rented(home, store, tmp_path, ENDLESS), home)
    machine_there = shadeform.cloud.rented[again.instance.id]
    row = home.ledger.find("moss")
    change_limit(home, propose(home, row, None, 7000.0), confirm_s=30.0)
    until = machine_there.guarded_until()
    assert 6800 < until - machine_there.created_at < 7200, "a person gave it more time"
    shadeform.ahead_s = until - shadeform.cloud.now() + 1
    assert wait_until(lambda: shadeform.cloud.live() == {}, timeout_s=30, every_s=0.2, world=home.world)
    refresh(home)
    assert billing_lines(home.ledger.lines()) == []


@pytest.mark.acceptance(48, 106)
def test_a_run_resumes_elsewhere_after_its_spot_machine_is_preempted(
    home: Home, shadeform: ShadeformServer, store: str, tmp_path: Path
) -> None:
    shadeform.machines.card = "H100 PCIe"
    spot = {"spot": True, "clouds": ["hyperstack"]}
    made = rented(home, store, tmp_path, 60, 0.25, settings=spot)
    assert made.order.offer.is_spot
    done = launch(made, home)
    assert done.instance.rate_usd_per_hour == Decimal("1.25")
    wait_for_checkpoint(home, done.run)
    shadeform.take(done.instance.id)
    refresh(home)
    row = home.ledger.find("moss")
    assert (row.state, row.is_interrupted) == ("failed", True)
    (line,) = home.ledger.lines(row.id)
    assert (line.billing, line.note) == ("no", "preempted by the provider")

    check_resume_here(home, row, tmp_path, steps=60)
    assert shadeform.cloud.live() == {}


@pytest.mark.acceptance(65)
def test_a_machine_that_is_not_what_was_rented_is_seen_at_once_and_ended_from_home(
    home: Home, shadeform: ShadeformServer, store: str, tmp_path: Path
) -> None:
    """Its agent cannot end it and could not speak to the store yet; for Shadeform it is active all the time."""
    shadeform.machines.card = "T4"
    began = home.world.monotonic()
    with pytest.raises(StartTimeout, match="exited before its first heartbeat") as caught:
        launch(rented(home, store, tmp_path, ENDLESS), home)
    assert "T4" in caught.value.why
    assert home.world.monotonic() - began < 300, "not the half hour that a slow boot may take"
    assert shadeform.cloud.live() == {}
    assert shadeform.cloud.keys == {}
    assert billing_lines(home.ledger.lines()) == []


def test_destroy_ends_a_machine_that_is_training_and_removes_its_key(
    home: Home, shadeform: ShadeformServer, store: str, tmp_path: Path
) -> None:
    done = launch(rented(home, store, tmp_path, ENDLESS), home)
    assert [key["name"] for key in shadeform.cloud.keys.values()] == [done.instance.mark]
    destroy_run(home, done.run)
    assert shadeform.cloud.live() == {}
    assert marked_now(home) == []
    assert shadeform.cloud.keys == {}
