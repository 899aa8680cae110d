"""A home with runs in it for the dashboard: one trained here, one rented that lives, one that failed; and a server."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
from tests.cloud.rig import make_run

from homing.api.lookup.local_runs import STARTED
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.web.dashboard.dashboard_app import NoSuchRun, Source, make_app
from homing.web.dashboard.section_feed import Feed
from homing.web.threaded_server import Server, hosts_for, listen
from homing.wire import codec, file_names
from homing.wire.control_files import Heartbeat
from homing.wire.event_lines import Event, Metric
from homing.world import World

TOKEN = "a-token-for-tests-only"
HERE, RENTED, FAILED = "first-20260101-120000-ab12", "moss-20260101-130000-c0de", "fern-20260101-110000-1a2b"
MARK = "homing-abc123-moss-1"


class Messages:
    """A source whose feeds a test writes itself."""

    def __init__(self) -> None:
        self.all, self.one, self.is_ending = Feed(), Feed(), False
        self.num_open = 0
        self.all.is_reported.set()
        self.one.is_reported.set()

    def all_runs(self) -> AbstractContextManager[Feed]:
        return self._counted(self.all)

    def one_run(self, run_id: str) -> AbstractContextManager[Feed]:
        if run_id != HERE:
            raise NoSuchRun(run_id)
        return self._counted(self.one)

    def end(self) -> None:
        self.is_ending = True

    @contextmanager
    def _counted(self, feed: Feed) -> Iterator[Feed]:
        self.num_open += 1
        try:
            yield feed
        finally:
            self.num_open -= 1


@contextmanager
def served(source: Source, end: Any, headers: dict[str, str] | None = None) -> Iterator[httpx.Client]:
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = Server(make_app(source, token=TOKEN, hosts=hosts_for("127.0.0.1")), sock, end, "homing-dashboard")
    given = {"Authorization": f"Bearer {TOKEN}"} if headers is None else headers
    try:
        with httpx.Client(base_url=url, headers=given, timeout=60, trust_env=False) as client:
            yield client
    finally:
        server.end()


def add(folder: Path, name: str, *documents: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "a", encoding="utf-8") as file:
        file.writelines(codec.dumps(each) + "\n" for each in documents)


def step(number: int, loss: float | None = 3.0, **messages: Any) -> Metric:
    settings: dict[str, Any] = {"tokens_per_s": 6400.0, "mfu": 0.41, "memory_bytes": 2_000_000_000, **messages}
    return Metric(1000.0 + number, "pretrain", number, 20, 64 * number, loss, **settings)


def train_here(home: Path, run_id: str = HERE, *, num_steps: int = 6) -> Path:
    folder = home / "runs" / run_id
    (folder / file_names.LOGS).mkdir(parents=True)
    (folder / file_names.TRAINER_LOCK).touch()
    (folder / file_names.RUN).write_text(codec.dumps(make_run(home / "made", "first")))
    (folder / STARTED).write_text(json.dumps({"again": "homing train first"}))
    add(folder, file_names.EVENTS, Event(1000.0, "trainer", "phase_started", "Phase pretrain begins.", "pretrain", 0))
    add(folder, file_names.METRICS, *(step(number, 6.0 / number) for number in range(1, num_steps + 1)))
    add(
        folder, file_names.METRICS, step(num_steps, None, val_loss=1.25, tokens_per_s=None, mfu=None, memory_bytes=None)
    )
    (folder / file_names.SAMPLES).mkdir()
    (folder / file_names.SAMPLES / "pretrain-00000005.txt").write_text("once <b>upon</b> a time")
    (folder / file_names.LOGS / "trainer.log").write_text(
        "trainer begins\nwith hf_abcdefghijklmnopqrstuvwx in its log\n"
    )
    return folder


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    with open(folder / file_names.TRAINER_LOCK) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def rent(home: Home, *, run_id: str = RENTED, mark: str = MARK, limit: str = "12.00", began: float = 600.0) -> Path:
    """A run in the ledger that bills at a provider which cannot be asked here; returns its folder in the store."""
    now, store = home.world.now(), home.path / "store"
    row = RunRow(run_id, run_id.split("-")[0], "running", now - began, f"file:{store}", "0" * 64, limit)
    line = LedgerLine(
        mark=mark, run_id=run_id, run_name=row.name, attempt=1, provider="runpod", offer="H100 SXM",
        rate_usd_per_hour="2.50", limit_usd=limit, intent_at=now - began,
    )  # fmt: skip
    home.ledger.intend(row, line)
    home.ledger.begin_create(mark, now - began)
    home.ledger.update(mark, instance_id=f"i-{mark[-6:]}", state="ready", billing="yes")
    home.ledger.set_run(run_id, state="running")
    folder = store / "runs" / run_id
    beat = Heartbeat(
        t=now, mark=mark, attempt=1, state="training", started_at=now - began, rate_usd_per_hour="2.50",
        spend_usd="0.4", phase="pretrain", step=6, num_steps=20, loss=3.5, tokens_per_s=6400.0, eta_s=60.0,
        has_dead_man=True,
    )  # fmt: skip
    add(folder, file_names.METRICS, *(dataclasses.replace(step(n), t=now - began + n) for n in range(1, 7)))
    (folder / file_names.HEARTBEAT).write_text(codec.dumps(beat))
    return folder


def fail(home: Home) -> None:
    rent(home, run_id=FAILED, mark="homing-abc123-fern-1", began=9000.0)
    home.ledger.close("homing-abc123-fern-1", at=home.world.now() - 8000, spend_usd=Decimal("0.70"), note="destroyed")
    home.ledger.set_run(FAILED, state="failed", reason="Out of memory at step 12.", exit_code=1)


def until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """What another thread brings about; how soon is not the test's."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def make_home(path: Path) -> Home:
    return Home(path, World())
