"""A run directory as a trainer leaves it, with two phases, made without training."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

from tests.cloud.rig import make_run

from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger.ledger import AT_MOST, LedgerLine, RunRow
from homing.cloud.ledger.mark import make_mark
from homing.report import Report, Subject, read_report
from homing.report.report_data import Eval
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, FileHash, Pointer
from homing.wire.event_lines import Event, Metric, Outcome
from homing.wire.run_json import Run
from homing.world import World

RUN_ID = "moss-20260101-120000-abcd"
WEIGHTS_SHA256 = "a" * 64


def two_phases(tmp_path: Path) -> Run:
    run = make_run(tmp_path)
    mid = dataclasses.replace(run.phases[0], kind="mid", num_steps=10)
    return dataclasses.replace(run, id=RUN_ID, seed=7, code_version="0.1.0", phases=[run.phases[0], mid])


def write_run_dir(folder: Path, run: Run) -> None:
    """Twenty steps of pretrain and ten of mid, done."""
    (folder / file_names.SAMPLES).mkdir(parents=True)
    (folder / file_names.RUN).write_text(codec.dumps(run))
    add(folder, file_names.METRICS, *(_metric("pretrain", step, 20) for step in range(1, 21)))
    add(folder, file_names.METRICS, *(_metric("mid", step, 10) for step in range(1, 11)))
    began = Event(100.0, "trainer", "run_started", "homing 0.1.0 trains moss on cuda (NVIDIA H200), torch 2.9.")
    lowered = Event(102.0, "trainer", "micro_batch_lowered", "Out of memory: 8 rows instead of 16.", "pretrain", 2)
    add(
        folder,
        file_names.EVENTS,
        began,
        began,
        lowered,
        Event(103.0, "trainer", "evaluated", "Evaluated.", "pretrain", 3),
    )
    for step in (5, 10, 15, 20):
        (folder / file_names.SAMPLES / f"pretrain-{step:08d}.txt").write_text(f"once at {step}")
    outcome = Outcome("done", "Every phase is trained.", 0, "mid", 10, 160.0, True)
    (folder / file_names.OUTCOME).write_text(codec.dumps(outcome))
    write_checkpoint(folder, "mid", 10)


def write_checkpoint(folder: Path, phase: str, step: int) -> None:
    there = folder / file_names.CHECKPOINTS / phase / file_names.step_dir(step)
    there.mkdir(parents=True)
    files = [FileHash(file_names.WEIGHTS, 400, WEIGHTS_SHA256), FileHash(file_names.STATE, 2, "b" * 64)]
    manifest = CheckpointManifest(
        "moss", RUN_ID, phase, step, 640, True, "", 7, files, val_loss=2.5, choices={"precision": "bf16"}
    )
    (there / file_names.MANIFEST).write_text(codec.dumps(manifest))
    (there.parent / file_names.BEST).write_text(codec.dumps(Pointer(step)))


def add(folder: Path, name: str, *documents: object) -> None:
    with open(folder / name, "a", encoding="utf-8") as file:
        file.writelines(codec.dumps(each) + "\n" for each in documents)


def _metric(phase: str, step: int, num_steps: int) -> Metric:
    messages = {"val_loss": 3.0 - step / 10, "val_bits_per_byte": 1.0} if step % 5 == 0 else {}
    return Metric(
        100.0 + step,
        phase,
        step,
        num_steps,
        64 * step,
        loss=5.0 / step,
        tokens_per_s=100.0 * step,
        mfu=0.4,
        step_s=0.5,
        **messages,
    )


def trained(state: str = "done") -> Subject:
    return Subject(RUN_ID, "moss", state, "", None)


def launched(home: Home, store: str, state: str = "done") -> Subject:
    """Two attempts, the second without an observed end."""
    first, second = (make_mark(home.owner, RUN_ID, number) for number in (1, 2))
    row = RunRow(RUN_ID, "moss", "running", 90.0, store, "f" * 64, "12")
    line = LedgerLine(first, RUN_ID, "moss", 1, "fake", "1x H200", "3.6", "12", 90.0, created_at=90.0)
    home.ledger.intend(row, line)
    home.ledger.close(first, at=990.0, spend_usd=Decimal("0.90"), note="preempted by the provider")
    home.ledger.set_run(RUN_ID, state="stopped", reason="preempted: taken away")
    again = dataclasses.replace(line, mark=second, attempt=2, intent_at=1000.0, created_at=1000.0)
    home.ledger.intend(row, again, home.ledger.run(RUN_ID))
    home.ledger.close(second, at=1900.0, spend_usd=Decimal("1.10"), note=f"{AT_MOST}its end was not seen")
    home.ledger.set_run(RUN_ID, state=state, reason="Every phase is trained.", ended_at=1900.0)
    offer = {"provider": "fake", "name": "1x H200", "device": "NVIDIA H200", "num_gpus": 1, "region": "eu"}
    home.world.mkdir(home.run_dir(RUN_ID))
    home.world.write(home.run_dir(RUN_ID) / LAUNCH_NOTE, json.dumps({"offer": offer}).encode())
    found = home.ledger.run(RUN_ID)
    assert found is not None
    return Subject(RUN_ID, "moss", found.state, found.reason, found)


def sample_report(tmp_path: Path) -> Report:
    """The report on a launched run with two attempts and two phases whose curves look like those of a real run."""
    home, store = Home(tmp_path / "home", World()), tmp_path / "store"
    run, folder = two_phases(tmp_path), store / "runs" / RUN_ID
    phases = [dataclasses.replace(run.phases[0], num_steps=2000), dataclasses.replace(run.phases[1], num_steps=400)]
    write_run_dir(folder, dataclasses.replace(run, phases=phases))
    (folder / file_names.METRICS).write_text("")
    add(folder, file_names.METRICS, *_curve("pretrain", 2000, 200.0, 3.1, 5.5), *_curve("mid", 400, 2300.0, 2.7, 0.5))
    (folder / file_names.RUN_FILE).write_text(
        "name: moss\ndata:\n  text: [books/*.txt]\nmodel:\n  depth: 12\nphases:\n  - {kind: pretrain, tokens: 2B}\n"
        "  - {kind: mid, tokens: 400M}\nlimits:\n  spend: $12.00\n"
    )
    verses = (
        "the the of and the in a of the", "Es war ein Land, wo die Wälder stand und",
        "Kennst du das Land, wo die Zitronen blühn,\nIm dunkeln Laub die Gold-Orangen glühn,",
    )  # fmt: skip
    for path in (folder / file_names.SAMPLES).iterdir():
        path.unlink()
    for step, verse in zip((200, 1000, 2000), verses, strict=True):
        (folder / file_names.SAMPLES / f"pretrain-{step:08d}.txt").write_text(verse)
    report = read_report(home, launched(home, f"file:{store}"), tmp_path / "models")
    evals = [
        Eval("mid", 10, "held-out text", "loss", 2.71, 2.69, 2.73, 40, 51_200),
        Eval("mid", 10, "held-out text", "bits per byte", 0.942, 0.935, 0.949, 40, 51_200),
    ]
    commands = ["homing fetch moss", "homing chat moss", "homing eval moss --out evals.md", "homing export moss"]
    return dataclasses.replace(report, evals=evals, next=commands)


def _curve(phase: str, num_steps: int, began: float, low: float, drop: float) -> Iterator[Metric]:
    noise = random.Random(3)
    for step in range(5, num_steps + 1, 5):
        share = step / num_steps
        loss = low + drop * math.exp(-9 * share) + noise.uniform(-0.06, 0.06)
        checked = {"val_loss": loss + 0.1, "val_bits_per_byte": (loss + 0.1) / 2.9} if step % 200 == 0 else {}
        lr = 3e-4 * min(1.0, share * 20) * min(1.0, (1 - share) * 3 + 0.05)
        yield Metric(
            began + step * 0.6, phase, step, num_steps, 65_536 * step, loss=loss, lr=lr, step_s=0.6, mfu=0.41,
            tokens_per_s=412_000 + noise.uniform(-9_000, 9_000) - (60_000 if step % 500 == 0 else 0), **checked,
        )  # fmt: skip
