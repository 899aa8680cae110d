"""The fake cloud over real HTTP with real processes: killed, restarted, misused."""

from __future__ import annotations

import base64
import dataclasses
import json
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.owners import owner_for
from tests.contracts.providers import ProviderContract

from homing.cloud.ledger.mark import make_mark
from homing.cloud.providers.base import Provider, Request, wait_until
from homing.cloud.providers.fake.cloud import KEY_HEADER, Settings
from homing.cloud.providers.fake.faults import Faults, Strike
from homing.cloud.providers.fake.machines import HostMachines, machine_prefix
from homing.cloud.providers.fake.provider import SERVER, Fake
from homing.cloud.providers.fake.server import Server
from homing.cloud.providers.local.provider import Local
from homing.cloud.providers.simulated_machine import MACHINE_ENV
from homing.errors import UsageError
from homing.wire import file_names
from homing.world import HttpRequest, World

WORLD = World()
OWNER = owner_for(__name__)
MARK = make_mark(OWNER, "moss-20260101-000000-abcd", 1)


def eventually(check: Any, timeout_s: float = 30) -> None:
    assert wait_until(check, timeout_s=timeout_s, every_s=0.05, world=WORLD)


def ask(home: Path, method: str, path: str, body: Any = None) -> Any:
    server = json.loads((home / SERVER).read_text())
    data = b"" if body is None else json.dumps(body).encode()
    reply = WORLD.http(HttpRequest(method, server["url"] + path, {KEY_HEADER: server["api_key"]}, data))
    return json.loads(reply.body) if reply.body else reply.status


def machine_pids(home: Path) -> list[int]:
    """Processes of the machines in this home, found independently of the server."""
    found = WORLD.marked(MACHINE_ENV, machine_prefix(home / "fake" / "machines"))
    return [process.pid for process, _ in found]


@pytest.fixture
def server(homing_home: Path) -> Iterator[Server]:
    settings = Settings(settle_s=0.2, boot_s=0.0)
    made = Server(homing_home, WORLD, settings=settings, faults=Faults(), seed=0, port=0)
    thread = threading.Thread(target=made.serve, args=(600.0,), daemon=True)
    thread.start()
    yield made
    for line in made.cloud.bill():
        if line.until is None:
            ask(homing_home, "DELETE", f"/{line.kind}s/{line.id}")
    ask(homing_home, "POST", "/double/leave", {})
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert machine_pids(homing_home) == []


class TestFakeServed(ProviderContract):
    @pytest.fixture
    def provider(self, owner: str, server: Server) -> Provider:
        return Fake(home=server.home, owner=owner, world=WORLD)

    @pytest.fixture
    def stranger(self, server: Server) -> Provider:
        return Fake(home=server.home, owner="zzz999", world=WORLD)

    def test_the_machine_runs_what_it_was_sent_in_its_own_folder(
        self, provider: Provider, request_: Request, server: Server
    ) -> None:
        made = provider.create(request_)
        work_dir = server.home / "fake/machines" / made.id / "work"
        eventually(lambda: machine_pids(server.home))
        boot = json.loads((work_dir / file_names.BOOT).read_text())
        assert boot["work_dir"] == str(work_dir)
        assert (work_dir / "agent.zip").read_text()

    def test_local_does_not_take_it_for_its_own(
        self, provider: Provider, request_: Request, server: Server, owner: str
    ) -> None:
        # As the agent does to its children: the mark is in the environment.
        provider.create(dataclasses.replace(request_, env={file_names.MARK_ENV: request_.mark}))
        eventually(lambda: machine_pids(server.home))
        assert len(WORLD.marked(file_names.MARK_ENV, request_.mark)) == 1
        assert Local(home=server.home, owner=owner, world=WORLD).list_owned() == []

    def test_a_frozen_machine_lives_and_can_be_destroyed(
        self, provider: Provider, request_: Request, server: Server
    ) -> None:
        made = provider.create(request_)
        eventually(lambda: machine_pids(server.home))
        ask(server.home, "POST", "/double/hang", {"instance": made.id})
        (pid,) = machine_pids(server.home)
        eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
        provider.destroy(made.id)
        eventually(lambda: not machine_pids(server.home))

    def test_a_machine_bills_after_its_command_died_and_its_log_says_why(
        self, provider: Provider, request_: Request, server: Server, owner: str
    ) -> None:
        Path(request_.order.files[0].source).write_text("print('boom', flush=True)")
        made = provider.create(request_)
        eventually(lambda: "boom" in provider.log(made.id))
        eventually(lambda: not machine_pids(server.home))
        eventually(lambda: not Fake(home=server.home, owner=owner, world=WORLD).describe(made.id).is_running)
        assert Fake(home=server.home, owner=owner, world=WORLD).describe(made.id).billing == "yes"

    def test_a_preempted_machine_is_ended(self, provider: Provider, request_: Request, server: Server) -> None:
        made = provider.create(request_)
        eventually(lambda: machine_pids(server.home))
        ask(server.home, "POST", "/double/preempt", {"instance": made.id, "notice_s": 0.3})
        assert WORLD.http(HttpRequest("GET", request_.order.boot.notice_url)).status == 200
        eventually(lambda: not machine_pids(server.home))
        (line,) = ask(server.home, "GET", "/double/bill")["bill"]
        assert line["until"] is not None

    def test_a_line_that_is_cut_is_no_answer(self, provider: Provider, request_: Request, server: Server) -> None:
        strikes = [{"way": "lost_after", "nth": 1, "of": "create"}]
        ask(server.home, "PUT", "/double/faults", {"strikes": strikes})
        assert provider.create(request_).mark == request_.mark
        assert server.cloud.live() == {request_.mark: 1}


def test_other_users_of_this_computer_cannot_read_the_key_or_the_bill(server: Server, homing_home: Path) -> None:
    for name in ("server.json", "state.json"):
        assert stat.S_IMODE((homing_home / "fake" / name).stat().st_mode) == 0o600
    url = json.loads((homing_home / SERVER).read_text())["url"]
    for path in ("/offers", "/double/bill"):
        assert WORLD.http(HttpRequest("GET", url + path)).status == 401


def test_faults_that_do_not_exist_are_refused(server: Server, homing_home: Path) -> None:
    assert "error" in ask(homing_home, "PUT", "/double/faults", {"rates": {"explodes": 1.0}})
    assert "error" in ask(homing_home, "POST", "/double/preempt", {"instance": "i-999999"})
    assert "error" in ask(homing_home, "POST", "/double/nothing", {})


def test_a_second_server_of_one_home_is_refused(server: Server, homing_home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "homing.cloud.providers.fake.server", "--home", str(homing_home)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "already running" in done.stderr


def test_a_machine_cannot_be_sent_files_outside_its_folder(tmp_path: Path) -> None:
    machines = HostMachines(tmp_path / "machines", WORLD)
    for name in ("../escaped", "/tmp/escaped-absolute", ""):
        machines.start(f"i-{len(name)}", {name: b"x"}, ["true"], {})
        assert "is outside" in machines.log(f"i-{len(name)}")
    assert not list(tmp_path.rglob("escaped*"))


class Outside:
    """The server as a person starts it: a process of its own."""

    def __init__(self, home: Path, *argv: str) -> None:
        self.home = home
        command = [sys.executable, "-m", "homing.cloud.providers.fake.server", "--home", str(home), *argv]
        self.process = subprocess.Popen(command)
        eventually(self.answers)

    def answers(self) -> bool:
        assert self.process.poll() is None
        try:
            return json.loads((self.home / SERVER).read_text())["pid"] == self.process.pid
        except (OSError, ValueError):
            return False

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=30)

    def leave(self) -> None:
        ask(self.home, "POST", "/double/leave", {})
        assert self.process.wait(timeout=30) == 0


def create(home: Path, script: str) -> dict[str, Any]:
    files = {"agent.py": base64.b64encode(script.encode()).decode()}
    argv = [sys.executable, "/fake-machine/work/agent.py"]
    body = ask(home, "POST", "/instances", {"offer": "cpu-spot", "name": MARK, "argv": argv, "files": files})
    assert isinstance(body, dict)
    return body


def test_a_killed_server_continues_from_its_saved_state(homing_home: Path) -> None:
    first = Outside(homing_home)
    made = create(homing_home, "import time\ntime.sleep(600)\n")
    eventually(lambda: machine_pids(homing_home))
    before = json.loads((homing_home / SERVER).read_text())
    pids = machine_pids(homing_home)
    first.kill()
    assert machine_pids(homing_home) == pids  # the machines are not the server's
    second = Outside(homing_home)
    after = json.loads((homing_home / SERVER).read_text())
    assert (after["url"], after["api_key"]) == (before["url"], before["api_key"])
    assert machine_pids(homing_home) == pids  # neither ended nor started twice
    (line,) = ask(homing_home, "GET", "/double/bill")["bill"]
    assert (line["id"], line["since"], line["until"]) == (made["id"], made["created_at"], None)
    ask(homing_home, "DELETE", f"/instances/{made['id']}")
    eventually(lambda: not machine_pids(homing_home))
    second.leave()
    assert not (homing_home / SERVER).exists()


def test_a_server_killed_while_it_was_ending_a_machine_ends_it_after_its_restart(homing_home: Path) -> None:
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n"
    deaf += "time.sleep(600)\n"
    first = Outside(homing_home)
    made = create(homing_home, deaf)
    eventually(lambda: "deaf" in ask(homing_home, "GET", f"/instances/{made['id']}/log")["log"])
    ask(homing_home, "DELETE", f"/instances/{made['id']}")
    first.kill()
    second = Outside(homing_home)
    eventually(lambda: not machine_pids(homing_home))
    second.leave()


def test_the_server_exits_after_a_while_without_instances_and_requests(homing_home: Path) -> None:
    idle = Outside(homing_home, "--idle-s", "0.5")
    assert idle.process.wait(timeout=30) == 0
    assert not (homing_home / SERVER).exists()


@pytest.mark.slow
def test_it_stays_while_something_bills(homing_home: Path) -> None:
    busy = Outside(homing_home, "--idle-s", "0.5")
    made = create(homing_home, "import time\ntime.sleep(600)\n")
    eventually(lambda: machine_pids(homing_home))
    WORLD.sleep(1.5)
    assert busy.process.poll() is None
    ask(homing_home, "DELETE", f"/instances/{made['id']}")
    assert busy.process.wait(timeout=30) == 0
    assert machine_pids(homing_home) == []


def test_wrong_faults_on_its_command_line_are_said(homing_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from homing.cloud.providers.fake.server import main

    assert main(["--home", str(homing_home), "--faults", '{"rates": {"explodes": 1}}']) == 2
    assert "explodes" in capsys.readouterr().err
    assert main(["--home", str(homing_home), "--faults", "{"]) == 2


def test_a_port_that_is_taken_is_said(homing_home: Path, server: Server, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot listen"):
        Server(
            tmp_path / "other",
            WORLD,
            settings=Settings(),
            faults=Faults(strikes=(Strike("busy"),)),
            seed=0,
            port=server.port,
        )
