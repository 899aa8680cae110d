"""The whole trip on Modal: the real SDK against the double, in which sandboxes run their real command."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import clear, look_more_often, make_run, trainer_argv
from tests.doubles import modal as modal_double
from tests.doubles.modal import TOKEN_ID, TOKEN_SECRET, Modal
from tests.e2e.trips import look_at_clouds_more_often

from homing.cloud.artifacts.checkpoints import fetch
from homing.cloud.guard import relaunch
from homing.cloud.guard.change_limit_or_stop import ask_to_stop, change_limit, propose
from homing.cloud.guard.guard_pass import guard_pass
from homing.cloud.home import Home
from homing.cloud.launch.launch import Draft, LaunchOrder, draft, launch
from homing.cloud.providers.base import Needs, wait_until
from homing.cloud.reconcile.reconcile import refresh
from homing.wire.run_json import Cloud
from homing.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REPLACE = {"/opt/homing": "{box}/root"}
RUN_FILE = """
name: moss
data: {text: [moss.txt]}
tokenizer: {vocab_size: 300}
model: {arch: llama, layers: 2, width: 64, heads: 4, ffn_width: 128, context: 64, tied: true}
phases:
  - {kind: pretrain, steps: 20, batch_tokens: 512, lr: 0.01, warmup_steps: 1}
train: {device: cpu}
store: modal:moss-runs
limits: {spend: $3, rate: $0.60}
cloud:
  providers: [modal]
  modal: {cores: 1, memory: 4GiB}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Modal]:
    with modal_double.running(tmp_path_factory.mktemp("modal"), REPLACE) as modal:
        yield modal


@pytest.fixture
def modal(server: Modal, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modal]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.reset()


@pytest.fixture
def home(homing_home: Path, modal: Modal, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    look_more_often(monkeypatch)
    look_at_clouds_more_often(monkeypatch)
    home = Home(homing_home, World())
    yield home
    clear(homing_home)


def ready(home: Home, tmp_path: Path, *, steps: int = 12, step_s: float = 0.05, **cloud: Any) -> Draft:
    where = Cloud(providers=["modal"], settings={"modal": {}}, **cloud)
    run = dataclasses.replace(make_run(tmp_path), cloud=where, store="modal:moss-runs/here")
    home.configure(run)
    offer = home.provider("modal").offers(Needs(gpu="T4"))[0]
    order = LaunchOrder(run, "name: moss\n", is_prepared=True, offer=offer, spend_limit_usd=Decimal("5.00"))
    made = draft(order, home)
    argv = trainer_argv(tmp_path, "/opt/homing/work", steps=steps, step_s=step_s)
    return dataclasses.replace(made, order=dataclasses.replace(order, trainer_argv=tuple(argv), heartbeat_s=0.5))


def until_over(home: Home, modal: Modal) -> None:
    assert wait_until(lambda: not modal.billing(), timeout_s=180, every_s=0.5, world=home.world)
    refresh(home)


@pytest.mark.acceptance(48)
def test_offers_launch_train_watch_push_self_destruct_fetch_receipt(modal: Modal, tmp_path: Path) -> None:
    """By the commands a person types; the tiny model is really trained, in a sandbox without a card."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "moss.yaml").write_text(RUN_FILE)
    (tmp_path / "moss.txt").write_text("moss grows on stones and under trees, slowly and everywhere\n" * 400)

    def homing(*argv: str) -> str:
        words = [sys.executable, "-m", "homing.cli", *argv]
        done = subprocess.run(words, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]} {done.stderr[-3000:]}"
        assert TOKEN_SECRET not in done.stdout + done.stderr
        return done.stdout

    homing("prep", "moss")
    offers = json.loads(homing("offers", "--provider", "modal", "--gpu", "H100", "--json"))["offers"]
    assert [offer["device"] for offer in offers] == ["H100"]
    homing("launch", "moss", "--yes")
    homing("watch", "moss")
    homing("fetch", "moss")
    assert json.loads((tmp_path / "models" / "moss" / "manifest.json").read_text())["step"] == 20
    (one,) = modal.sandboxes.values()
    (line,) = json.loads(homing("ledger", "--json"))["lines"]
    assert (line["state"], line["billing"]) == ("gone", "no")
    ours, reference = float(line["spend_usd"]), modal.bill_usd(one.id)
    assert reference <= ours <= reference + 180 * one.rate_usd / 3600, "at least what is billed, and not much more"
    assert json.loads(homing("runs", "--json"))["billing"] == []


@pytest.mark.acceptance(48, 104, 106)
def test_a_lost_host_loses_uncommitted_files_and_the_run_resumes_elsewhere(
    home: Home, modal: Modal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = launch(ready(home, tmp_path, steps=150, step_s=0.1), home)
    stored = lambda: [path for path in modal.volume("moss-runs").files if path.endswith("manifest.json")]  # noqa: E731
    assert wait_until(lambda: len(stored()) >= 2, timeout_s=120, every_s=0.5, world=home.world)
    modal.lose(started.instance.id)
    refresh(home)
    row = home.ledger.find("moss")
    assert row.is_interrupted, row
    assert modal.billing() == []

    # The guard finds it on another provider, with another trainer argv: this computer's own folders.
    kept = relaunch.load_documents(home, row)
    order = LaunchOrder(
        run=dataclasses.replace(kept.run, cloud=dataclasses.replace(kept.run.cloud, providers=["local"])),
        run_file_text=kept.run_file_text,
        is_prepared=True,
        offer=home.provider("local").offers(Needs())[0],
        spend_limit_usd=Decimal("5.00"),
        resume=True,
    )
    made = draft(order, home)
    work_dir = home.provider("local").place(made.mark).work_dir
    argv = tuple(trainer_argv(tmp_path, work_dir, steps=150, step_s=0.01))
    launch(dataclasses.replace(made, order=dataclasses.replace(order, trainer_argv=argv, heartbeat_s=0.5)), home)

    def is_done() -> bool:
        refresh(home)
        return home.ledger.find("moss").state == "done"

    assert wait_until(is_done, timeout_s=180, every_s=1.0, world=home.world)
    got = fetch(home, home.ledger.find("moss"), tmp_path / "models" / "moss")
    assert got.manifest.step == 150
    log = modal.volume("moss-runs").files[f"here/runs/{row.id}/logs/trainer.log"].decode()
    begins = [line for line in log.splitlines() if line.startswith("trainer begins")]
    assert len(begins) == 2
    assert int(begins[1].split()[-1]) > 5, "from its last committed checkpoint, not from the beginning"


def test_a_stop_and_a_new_limit_reach_the_sandbox_and_no_token_does(home: Home, modal: Modal, tmp_path: Path) -> None:
    done = launch(ready(home, tmp_path, steps=3000, step_s=0.1), home)
    box = modal.sandboxes[done.instance.id].box
    assert box is not None
    known = box.environments()
    assert "agent.zip" in known
    for canary in (TOKEN_ID, TOKEN_SECRET):
        assert canary not in known
        assert [path for path in box.folder.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()] == []
    assert change_limit(home, propose(home, done.run, Decimal("4.00"), None)), "the agent has confirmed it"
    ask_to_stop(home, done.run)
    until_over(home, modal)
    row = home.ledger.find("moss")
    assert row.state == "stopped", row.reason
    assert fetch(home, row, tmp_path / "models" / "moss").manifest.step > 0


def test_a_run_longer_than_a_sandbox_may_live_saves_in_time_and_resumes_in_a_new_one(
    home: Home, modal: Modal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day of one minute: what the guard at home does for days it does here at once."""
    monkeypatch.setattr("homing.cloud.providers.modal.create_request.LIFETIME_S", 60.0)
    monkeypatch.setattr("homing.cloud.providers.modal.create_request._LEAST_S", 30)
    made = ready(home, tmp_path, steps=100, step_s=0.8)
    monkeypatch.setattr(
        "homing.cloud.machine_setup.boot_files.trainer_argv",
        lambda python, work_dir: trainer_argv(tmp_path, "/opt/homing/work", steps=100, step_s=0.02),
    )
    first = launch(made, home)
    assert modal.sandboxes[first.instance.id].definition.timeout_secs == 60
    until_over(home, modal)
    row = home.ledger.find("moss")
    assert row.is_interrupted, f"{row.state}: {row.reason}"
    assert "exited with code 0" in home.provider("modal").describe(first.instance.id).detail, (
        "it left before it was ended"
    )
    made_pass = guard_pass(home)
    assert [text for text in made_pass.done if "Attempt 2 launches" in text], made_pass
    until_over(home, modal)
    assert home.ledger.find("moss").state == "done"
    assert len(modal.sandboxes) == 2
    assert fetch(home, home.ledger.find("moss"), tmp_path / "models" / "moss").manifest.step == 100
