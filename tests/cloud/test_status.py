"""What `status` says of a run, from its store."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.cloud.rig import make_run

from homing.cloud.ledger import RunRow
from homing.cloud.status import newest_pushed
from homing.store import open_store, run_key
from homing.wire import codec, names
from homing.world import World


def test_the_newest_checkpoint_is_that_of_the_last_phase_and_not_of_the_last_letter(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = open_store(f"file:{tmp_path}/store", World())
    row = RunRow("moss-1", "moss", "running", 0.0, f"file:{tmp_path}/store", "")
    home: Any = SimpleNamespace(store_of=lambda run: store)
    assert newest_pushed(home, row) == ""
    run = make_run(tmp_path)
    phases = [dataclasses.replace(run.phases[0], kind=kind) for kind in ("pretrain", "sft", "rl")]
    run = dataclasses.replace(run, id=row.id, phases=phases)
    store.put_bytes(run_key(row.id, names.RUN), codec.dumps(run).encode())
    for phase, step, file in (("sft", 900, names.MANIFEST), ("pretrain", 2000, names.MANIFEST), ("rl", 20, "model")):
        store.put_bytes(run_key(row.id, f"{names.CHECKPOINTS}/{phase}/step-{step:08d}/{file}"), b"{}")
    assert newest_pushed(home, row) == "sft step 900", "that of rl has no manifest yet, and is not whole"
    store.put_bytes(run_key(row.id, f"{names.CHECKPOINTS}/rl/step-00000010/{names.MANIFEST}"), b"{}")
    assert newest_pushed(home, row) == "rl step 10"
