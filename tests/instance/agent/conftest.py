"""An instance for agent tests: a work folder, a store, a double trainer and a command that ends billing."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from homing.cloud.machine_setup import boot_files as boot_module
from homing.instance.agent import supervise
from homing.store import FileStore
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot, EndBilling
from homing.wire.control_files import Heartbeat, Request
from homing.wire.event_lines import Event, Outcome
from homing.world import World

TRAINER = Path(__file__).parents[2] / "doubles/trainer.py"
T = TypeVar("T")


def wait_until(is_true: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.03)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@dataclasses.dataclass
class Instance:
    root: Path
    boot: Boot
    store: FileStore
    agents: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.root / "work/run"

    def change(self, **changes: object) -> None:
        self.boot = dataclasses.replace(self.boot, **changes)  # type: ignore[arg-type]

    def train_with(self, **messages: float) -> None:
        words = [f"{name}={value}" for name, value in messages.items()]
        self.change(trainer_argv=[sys.executable, str(TRAINER), str(self.run_dir), *words])

    def shorten(self, **constants: float) -> None:
        """The agent waits as it always does, but only this many seconds: constants of its supervise module."""
        zip_path, module = self.root / "work/agent.zip", "homing/instance/agent/supervise.py"
        boot_module.build_agent_zip(zip_path, World())
        with zipfile.ZipFile(zip_path) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        for name, value in constants.items():
            assert hasattr(supervise, name), f"the agent knows no {name}"
            files[module] += f"\n{name} = {value}\n".encode()
        with zipfile.ZipFile(zip_path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)

    def start(self, python: str = sys.executable) -> subprocess.Popen[bytes]:
        self.change(agent_argv=boot_module.agent_argv(python, self.root / "work"))
        (self.root / "work" / file_names.BOOT).write_text(codec.dumps(self.boot))
        zip_path = self.root / "work/agent.zip"
        if not zip_path.exists():
            boot_module.build_agent_zip(zip_path, World())
        env = {**os.environ, file_names.MARK_ENV: self.boot.mark}
        with open(self.root / "agent.out", "ab") as out:
            agent = subprocess.Popen(self.boot.agent_argv, env=env, stdout=out, stderr=out, start_new_session=True)
        self.agents.append(agent)
        return agent

    def run(self, timeout_s: float = 60.0) -> int:
        return self.start().wait(timeout_s)

    def ask(self, **control_request: object) -> None:
        request = Request(**control_request)  # type: ignore[arg-type]
        self.store.put_bytes(f"runs/{self.boot.run_id}/request.json", codec.dumps(request).encode())

    def has_ended_billing(self) -> bool:
        return (self.root / "billing-ended").exists()

    def outcome(self) -> Outcome:
        return codec.loads(Outcome, (self.run_dir / file_names.OUTCOME).read_bytes())

    def heartbeat(self) -> Heartbeat:
        return codec.loads(Heartbeat, (self.run_dir / file_names.HEARTBEAT).read_bytes())

    def in_store(self, cls: type[T], name: str) -> T:
        return codec.loads(cls, self.store.read(f"runs/{self.boot.run_id}/{name}"))

    def events(self) -> list[Event]:
        path = self.run_dir / file_names.EVENTS
        return [codec.loads(Event, line) for line in path.read_text().splitlines()] if path.exists() else []

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events()]

    def steps_in_store(self) -> list[int]:
        keys = [entry.key.split("/") for entry in self.store.list(f"runs/{self.boot.run_id}/checkpoints/")]
        return sorted(file_names.parse_step(key[4]) or 0 for key in keys if key[-1] == file_names.MANIFEST)

    def processes(self) -> list[int]:
        """All but the dead-man: here nothing ends the machine, and he is who stays until its end."""
        return [pid for pid in self.everything() if pid not in self.dead_men()]

    def dead_men(self) -> list[int]:
        return [pid for pid in self.everything() if b"--dead-man" in command_line(pid)]

    def everything(self) -> list[int]:
        return [process.pid for process, value in World().marked(file_names.MARK_ENV, self.boot.mark)]

    def trainer_pid(self) -> int:
        wait_until(lambda: (self.run_dir / file_names.HEARTBEAT).exists() and self.heartbeat().trainer_pid)
        pid = self.heartbeat().trainer_pid
        assert pid
        return pid


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    (tmp_path / "work").mkdir()
    store = FileStore(str(tmp_path / "store"), World())
    store.put_bytes("objects/marker", b"")
    end = [sys.executable, "-c", f"import pathlib; pathlib.Path({str(tmp_path / 'billing-ended')!r}).touch()"]
    boot = Boot(
        run_id="amber-1", run_name="amber", mark=f"homing-test-{World().random_hex(10)}", attempt=1,
        work_dir=str(tmp_path / "work"), store=store.url, inputs=[],
        trainer_argv=[], sync_argv=boot_module.sync_argv(sys.executable, tmp_path / "work"),
        lookout_argv=[sys.executable, "-m", "homing.instance.alerts", str(tmp_path / "work" / file_names.BOOT)],
        end_billing=EndBilling(kind="command", argv=end), started_at=time.time(), rate_usd_per_hour="1",
        spent_before_usd="0", spend_limit_usd="100", time_limit_s=0.0, idle_limit_s=0.0, stall_factor=10.0,
        heartbeat_s=0.1, stop_grace_s=8.0, env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    made = Instance(tmp_path, boot, store)
    made.train_with()
    yield made
    for pid in [*made.dead_men(), *made.everything()]:  # the one who would start others first
        World().signal(pid, signal.SIGKILL)
    for agent in made.agents:
        agent.kill()
        agent.wait()
