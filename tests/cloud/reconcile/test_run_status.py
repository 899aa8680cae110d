"""What `status` shows of a run, read from its store."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cloud.rig import make_run

from homing.cloud.contact.heartbeats import RunReports
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.reconcile.run_status import Status, newest_pushed
from homing.cloud.watch.progress import progress_line
from homing.store import open_store, run_key
from homing.wire import codec, file_names
from homing.wire.control_files import Heartbeat
from homing.wire.event_lines import Outcome
from homing.world import World


def test_the_newest_checkpoint_is_chosen_by_phase_order_and_not_alphabetically(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = open_store(f"file:{tmp_path}/store", World())
    row = RunRow("moss-1", "moss", "running", 0.0, f"file:{tmp_path}/store", "")
    home: Any = SimpleNamespace(store_of=lambda run: store)
    assert newest_pushed(home, row) == ""
    run = make_run(tmp_path)
    phases = [dataclasses.replace(run.phases[0], kind=kind) for kind in ("pretrain", "sft", "rl")]
    run = dataclasses.replace(run, id=row.id, phases=phases)
    store.put_bytes(run_key(row.id, file_names.RUN), codec.dumps(run).encode())
    for phase, step, file in (
        ("sft", 900, file_names.MANIFEST),
        ("pretrain", 2000, file_names.MANIFEST),
        ("rl", 20, "model"),
    ):
        store.put_bytes(run_key(row.id, f"{file_names.CHECKPOINTS}/{phase}/step-{step:08d}/{file}"), b"{}")
    assert newest_pushed(home, row) == "sft step 900", "the rl checkpoint has no manifest yet and is incomplete"
    store.put_bytes(run_key(row.id, f"{file_names.CHECKPOINTS}/rl/step-00000010/{file_names.MANIFEST}"), b"{}")
    assert newest_pushed(home, row) == "rl step 10"


@pytest.mark.parametrize(
    ("beat", "outcome", "said"),
    [
        # Stopped before the first metrics, which come after ten steps: only the trainer's outcome has the step.
        (("", 0, 0), ("pretrain", 7), "pretrain 1/2 | step 7/20"),
        (("", 0, 0), ("pretrain", 0), "pretrain 1/2 | before the first of 20 steps"),
        (("pretrain", 10, 20), ("pretrain", 17), "pretrain 1/2 | step 17/20 | loss 3.000"),
        (("pretrain", 20, 20), ("sft", 0), "sft 2/2 | before the first of 8 steps"),
        # An outcome of an earlier phase, or an empty one, does not override the heartbeat.
        (("sft", 4, 8), ("pretrain", 20), "sft 2/2 | step 4/8 | loss 3.000"),
        (("pretrain", 10, 20), ("", 0), "pretrain 1/2 | step 10/20 | loss 3.000"),
        (("", 0, 0), ("", 0), ""),
    ],
)
def test_the_last_step_of_an_ended_run_comes_from_the_trainers_outcome(
    beat: tuple[str, int, int], outcome: tuple[str, int], said: str
) -> None:
    run = RunRow("moss-1", "moss", "stopped", 0.0, "file:/s", "", spend_limit_usd="12.00")
    phase, step, num_steps = beat
    received = Heartbeat(0.0, "m", 1, "ended", 0.0, "1", "1", phase=phase, step=step, num_steps=num_steps)
    received = dataclasses.replace(received, loss=3.0 if num_steps else None)
    reports = RunReports(received, Outcome("stopped", "", 75, *outcome))
    steps = {"pretrain": 20, "sft": 8}
    status = Status(run, [], reports, Decimal("1.83"), 0.0, phases=tuple(steps), steps=steps)
    assert progress_line(status, received) == " | ".join(filter(None, [said, "$1.83 of $12.00"]))
