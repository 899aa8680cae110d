"""A home with thousands of ledger lines and a run with very many lines of numbers, made without renting anything.

fill_ledger(home, num_lines, num_open, url)   closed receipts, and open runs that a fake cloud really shows
fill_metrics(folder, num_lines)               a run directory as a trainer leaves it
FakeCloudServer()                             the fake cloud on a loopback port
cpu_of(argv, env)                             CPU seconds and peak memory of one verb in a fresh process
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from tests.cloud.fake_world import KEY, OFFERS, ToyMachines

from homing.cloud.home import LEDGER, Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.mark import make_mark
from homing.cloud.providers.fake.cloud import KEY_HEADER, FakeCloud
from homing.cloud.providers.fake.provider import KEY_ENV, URL_ENV
from homing.wire import codec, file_names
from homing.wire.control_files import Heartbeat
from homing.wire.event_lines import Event, Metric, Outcome
from homing.world import HttpRequest, World

HERE = "big-20260101-120000-ab12"  # the run with many lines of numbers, trained on this computer


class FakeCloudServer:
    """`with FakeCloudServer() as server`: `server.env` leads to it, `server.rent(mark)` makes an instance."""

    def __init__(self) -> None:
        self.cloud = FakeCloud(now=time.time, machines=ToyMachines(), offers=OFFERS, api_key=KEY)
        lock, cloud = threading.Lock(), self.cloud

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                with lock:
                    reply = cloud.handle(HttpRequest(self.command, self.path, headers, body))
                self.send_response(reply.status)
                self.send_header("content-length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)

            do_GET = do_POST = do_PUT = do_DELETE = _answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.env = {URL_ENV: f"http://127.0.0.1:{self._http.server_address[1]}", KEY_ENV: KEY}

    def rent(self, mark: str) -> str:
        body = {"offer": OFFERS[0].name, "name": mark, "argv": [], "env": {}, "files": {}}
        request = HttpRequest("POST", "/instances", {KEY_HEADER: KEY}, json.dumps(body).encode())
        return str(json.loads(self.cloud.handle(request).body)["id"])

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def fill_ledger(path: Path, num_lines: int, num_open: int, server: FakeCloudServer, store: Path) -> list[str]:
    """Returns the ids of the open runs, which are spread over the whole ledger."""
    home, now = Home(path, World()), time.time()
    home.ledger.runs()  # makes the tables
    every, rows, lines, open_ = num_lines // num_open, list[RunRow](), list[LedgerLine](), list[str]()
    for number in range(num_lines):
        run_id = f"moss-{number:06d}"
        mark, at = make_mark(home.owner, run_id, 1), now - 600.0 * (num_lines - number)
        is_open = number % every == every // 2 and len(open_) < num_open
        row = RunRow(run_id, f"moss{number % 100}", "done", at, f"file:{store}", "f" * 64, "100", ended_at=at + 3000)
        line = LedgerLine(mark, run_id, row.name, 1, "fake", "cpu-small", "0.36", "100", at)
        if is_open:
            row = dataclasses.replace(row, state="running", name=f"live{number}", ended_at=None)
            line = dataclasses.replace(
                line, run_name=row.name, intent_at=now - 60, created_at=now - 60, state="ready", billing="yes",
                instance_id=server.rent(mark),
            )  # fmt: skip
            beat = Heartbeat(now, mark, 1, "training", now - 60, "0.36", "0.01", "100", "pretrain", 5, 100, now)
            beat_path = store / file_names.STORE_RUNS / run_id / file_names.HEARTBEAT
            beat_path.parent.mkdir(parents=True)
            beat_path.write_text(codec.dumps(beat))
            open_.append(run_id)
        else:
            line = dataclasses.replace(
                line, created_at=at, destroyed_at=at + 3000, state="gone", billing="no", instance_id=f"i-{number}",
                spend_usd=f"{0.3 + number / 1e6:.6f}", note="ended by itself",
            )  # fmt: skip
        rows.append(row)
        lines.append(line)
    with sqlite3.connect(path / LEDGER) as connection:
        for table, made in (("runs", rows), ("lines", lines)):
            known = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            columns = [field.name for field in dataclasses.fields(made[0]) if field.name in known]
            sql = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
            connection.executemany(sql, [[getattr(each, name) for name in columns] for each in made])
        bills = [(line.mark, line.spend_usd, now) for line in lines]
        connection.executemany("INSERT INTO bills (mark, usd, at) VALUES (?, ?, ?)", bills)
    connection.close()
    return open_


def fill_metrics(path: Path, num_lines: int) -> Path:
    """The directory of a run that was trained here and is done, under the home `path`."""
    folder = path / file_names.STORE_RUNS / HERE
    folder.mkdir(parents=True)
    chance, now = random.Random(0).random, time.time()
    # The trainer's own line with places for what differs: to make a million of them by the codec takes minutes.
    figures = {"lr": 1e-3, "mfu": 0.3, "step_s": 0.3, "memory_bytes": 12345678901, "eta_s": 1234.5}
    body = codec.dumps(Metric(-1.25, "pretrain", -2, num_lines, -3, loss=-4.25, grad_norm=-5.25, **figures))  # type: ignore[arg-type]
    line = body.replace("%", "%%").replace("-1.25", "%.3f").replace(": -2,", ": %d,").replace(": -3,", ": %d,")
    line = line.replace("-4.25", "%.9f").replace("-5.25", "%.9f").replace('"val_loss": null', '"val_loss": %s') + "\n"
    with open(folder / file_names.METRICS, "w", encoding="utf-8") as file:
        for step in range(1, num_lines + 1):
            val_loss = f"{3.0 + 1000.0 / (1000.0 + step):.9f}" if step % 2000 == 0 else "null"
            loss = 3.0 + 5.0 / (1 + step / 1000) + chance() / 10
            file.write(line % (now - 0.3 * (num_lines - step), step, 4096 * step, loss, chance(), val_loss))
    event = Event(now, "trainer", "run_started", "homing on cpu, for tests.")
    (folder / file_names.EVENTS).write_text(codec.dumps(event) + "\n")
    outcome = Outcome("done", "All phases are trained.", 0, "pretrain", num_lines, now)
    (folder / file_names.OUTCOME).write_text(codec.dumps(outcome))
    (folder / file_names.TRAINER_LOCK).touch()
    return folder


@dataclasses.dataclass(frozen=True)
class Used:
    code: int
    cpu_s: float
    peak_bytes: int
    out: str
    err: str


def cpu_of(argv: Sequence[str], env: Mapping[str, str], timeout_s: float = 600.0) -> Used:
    """One Python program to its end, with the interpreter's start; the modules it loads were compiled before."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([sys.executable, *argv], env={**env}, stdout=out, stderr=err)
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        # Not psutil and not our own children's total: the usage of this one process, from the kernel.
        _, status, used = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        return Used(process.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, out.read(), err.read())
