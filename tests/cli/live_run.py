"""Runs that are under way, made without training: the files of a trainer, and what shows that it is alive.

training_here(home, tmp_path)   a run on this computer; the lock that a trainer would hold
rented(home, tmp_path, server)  a run on an instance of the fake cloud, with a heartbeat and a spend limit
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import random
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

from tests.cloud.many_records import FakeCloudServer
from tests.report.kept_run import RUN_ID, add, two_phases

from homing.api.lookup.local_runs import STARTED
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.mark import make_mark
from homing.cloud.providers.base import Offer
from homing.wire import codec, file_names
from homing.wire.control_files import Heartbeat
from homing.wire.event_lines import Event, Metric, Outcome
from homing.wire.run_json import Run
from homing.world import World

SAMPLE = "Kennst du das Land, wo die Zitronen blühn,\nIm dunkeln Laub die Gold-Orangen glühn,\n\x1b[2JEin sanfter Wind"


@contextlib.contextmanager
def training_here(home: Path, tmp_path: Path, *, num_steps: int = 400, step: int = 260) -> Iterator[Path]:
    """A run in its first phase of two; it trains until the block ends."""
    folder, now = home / "runs" / RUN_ID, time.time()
    _write(folder, _run(tmp_path, num_steps), now, step, num_steps)
    (folder / file_names.TRAINER_LOCK).touch()
    with open(folder / STARTED, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def rented(path: Path, tmp_path: Path, server: FakeCloudServer, *, num_steps: int = 4000, step: int = 2600) -> RunRow:
    """A run in its first phase of two, on an instance of the fake cloud that bills for as long as it trains."""
    home, now, store = Home(path, World()), time.time(), tmp_path / "store"
    run, mark = _run(tmp_path, num_steps), make_mark(home.owner, RUN_ID, 1)
    row = RunRow(RUN_ID, "moss", "running", now - step, f"file:{store}", "f" * 64, "12")
    line = LedgerLine(mark, RUN_ID, "moss", 1, "fake", "h100", "2.49", "12", now - step)
    home.ledger.intend(row, line)
    began = {"created_at": now - step, "state": "ready", "billing": "yes"}
    home.ledger.update(mark, instance_id=server.rent(mark), **began)
    offer = Offer("fake", "h100", "H100", 1, 16, 80 * 10**9, Decimal("2.49"))
    home.world.mkdir(home.run_dir(RUN_ID))
    note = {"offer": dataclasses.asdict(offer)}
    home.world.write(home.run_dir(RUN_ID) / LAUNCH_NOTE, json.dumps(note, default=str).encode())
    home.world.write(home.run_dir(RUN_ID) / file_names.RUN, codec.dumps(run).encode())
    folder = store / "runs" / RUN_ID
    _write(folder, run, now, step, num_steps)
    beat = Heartbeat(
        now, mark, 1, "training", now - step, "2.49", "1.83", "12", "pretrain", step, num_steps, now, loss=3.11,
        tokens_per_s=412_000.0, mfu=0.41, eta_s=float(num_steps - step), has_dead_man=True,
        use={"gpu": 0.97, "gpu_memory": 0.62},
    )  # fmt: skip
    (folder / file_names.HEARTBEAT).write_text(codec.dumps(beat))
    return row


def _run(tmp_path: Path, num_steps: int) -> Run:
    run = two_phases(tmp_path)
    phases = [dataclasses.replace(run.phases[0], num_steps=num_steps), run.phases[1]]
    return dataclasses.replace(run, phases=phases)


def _write(folder: Path, run: Run, now: float, step: int, num_steps: int) -> None:
    (folder / file_names.SAMPLES).mkdir(parents=True)
    (folder / file_names.RUN).write_text(codec.dumps(run))
    add(folder, file_names.METRICS, *metrics(step, num_steps, now - step))
    at = step - 10
    saved = Event(now - 20, "trainer", "checkpoint_saved", "Checkpoint saved.", "pretrain", at)
    add(folder, file_names.EVENTS, Event(now - step, "trainer", "phase_started", "Phase started."), saved)
    (folder / file_names.SAMPLES / f"pretrain-{at:08d}.txt").write_text(SAMPLE)


def metrics(step: int, num_steps: int, began: float) -> Iterator[Metric]:
    noise = random.Random(7)
    for each in range(1, step + 1):
        loss = 3.1 + 6.0 * math.exp(-each / num_steps * 6) + noise.uniform(-0.08, 0.08)
        checked = (
            {"val_loss": loss + 0.1, "val_bits_per_byte": (loss + 0.1) / 2.9} if each % (num_steps // 8) == 0 else {}
        )
        yield Metric(
            began + each, "pretrain", each, num_steps, 64 * each, loss=round(loss, 4), tokens_per_s=412_000.0, mfu=0.41,
            step_s=1.0, memory_bytes=61_000_000_000, eta_s=float(num_steps - each), **checked,
        )  # fmt: skip


def finish(folder: Path) -> None:
    done = Outcome("done", "Every phase is trained.", 0, "mid", 10, time.time(), True)
    (folder / file_names.OUTCOME).write_text(codec.dumps(done))
