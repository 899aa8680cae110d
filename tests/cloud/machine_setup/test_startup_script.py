"""The startup script, run for real: what ends billing without a hand-over, and what a hand-over leaves behind."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import make_run, trainer_argv
from tests.doubles.machine import Machine, bare_boot
from tests.doubles.sshd import need_sshd

from homing.cloud.contact.ssh_access import host_key, known_hosts_line, login_key
from homing.cloud.launch.run_documents import make_bootstrap_spec
from homing.cloud.machine_setup import boot_files as booting
from homing.cloud.machine_setup import startup_script as startup
from homing.cloud.machine_setup.startup_script import ROOT, WORK_DIR, Fetch, hand_over, place, startup_script
from homing.cloud.providers.base import Connection, InputFile, Offer, Order, Request
from homing.errors import CreateFailed, StartTimeout
from homing.store import open_store
from homing.wire.boot_json import EndBilling
from homing.world import Completed, World

pytestmark = pytest.mark.machine

MARK = "homing-a1b2c3-moss-1"
SECRETS = {"HF_TOKEN": "hf_canary-'with quotes' $HOME and\nlines", "AWS_SECRET_ACCESS_KEY": "canary/second+"}
LONG_S = 600.0
# Stands in for the agent: it records what it received, and can hold the dead-man's lock.
AGENT = """
import fcntl, json, os, sys, time
work = os.path.dirname(sys.argv[1])
lock = open(os.path.join(work, "dead-man.lock"), "w")
if os.path.exists(os.path.join(work, "guarded")):
    fcntl.flock(lock, fcntl.LOCK_EX)
names = [name for name in os.environ if "CANARY" in os.environ[name].upper()]
with open(os.path.join(work, "seen.tmp"), "w") as file:
    json.dump({"argv": sys.argv, "secrets": {n: os.environ[n] for n in names}, "mark": os.environ["HOMING_MARK"]}, file)
os.rename(os.path.join(work, "seen.tmp"), os.path.join(work, "seen.json"))
print("the stand-in agent lives", flush=True)
import signal
signal.signal(signal.SIGTERM, lambda *_: (print("the agent received SIGTERM", flush=True), sys.exit(75)))
while True:
    time.sleep(0.1)
"""


class Rig:
    """One machine at a time, and the keys of the home that rents it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.world = folder, World()
        self.login, self.host_key = login_key(folder / "home", self.world), host_key(folder / "home", MARK, self.world)
        self.ended = folder / "billing-ended"
        self.machines: list[Machine] = []

    def script(self, **other: Any) -> str:
        messages: dict[str, Any] = {
            "mark": MARK,
            "end_command": f"echo end >> {shlex.quote(str(self.ended))}",
            "end_within_s": LONG_S,
            "login_key": self.login.public_line,
            "host_key": self.host_key,
            "is_container": True,
        }
        return startup_script(**{**messages, **other})

    def machine(
        self,
        *,
        kind: str = "container",
        env: dict[str, str] | None = None,
        has_environment: bool = False,
        **other: Any,
    ) -> Machine:
        script = self.script(is_container=kind == "container", **other)
        folder = self.folder / f"machine-{len(self.machines)}"
        made = Machine(folder, script, kind=kind, env=env, has_environment=has_environment)
        self.machines.append(made)
        made.start()
        return made

    def connection(self, machine: Machine, **other: Any) -> Connection:
        line = known_hosts_line(self.host_key, "127.0.0.1", machine.port)
        found = Connection(machine.user, "127.0.0.1", machine.port, str(self.login.private_path), line)
        return dataclasses.replace(found, **other)

    def request(self, agent: str = AGENT, **files: str) -> Request:
        source = self.folder / "run"
        source.mkdir(exist_ok=True)
        texts = {"agent.zip": agent, **files}
        for name, text in texts.items():
            (source / name).write_text(text)
        order = Order(
            MARK, "moss", bare_boot(MARK, WORK_DIR), tuple(InputFile(n, str(source / n)) for n in texts), dict(SECRETS)
        )
        offer = Offer("toy", "toy", "CPU", 0, 1, 10**9, Decimal("1.00"))
        return Request("toy", MARK, offer, order, ("python3",), {})

    def hand_over(self, machine: Machine, request: Request | None = None, timeout_s: float = 60.0) -> None:
        hand_over(self.connection(machine), request or self.request(), world=self.world, timeout_s=timeout_s)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    need_sshd()
    made = Rig(tmp_path)
    yield made
    for machine in made.machines:
        machine.close()


def wait(check: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.1)


def seen(machine: Machine) -> dict[str, Any]:
    path = machine.root / "work/seen.json"
    wait(path.exists, f"the agent's start ({machine.log()})")
    return dict(json.loads(path.read_text()))


# --- the script as text ---


def test_the_script_fits_into_user_data_with_room_to_spare(rig: Rig) -> None:
    fetch = tuple(
        Fetch("https://bucket.s3.amazonaws.com/" + "x" * 900, f"file-{number}", "0" * 64) for number in range(4)
    )
    assert len(rig.script(is_container=False, fetch=fetch)) < 12_000
    assert len(rig.script()) < 9_000


def test_the_place_is_where_the_script_starts_the_agent() -> None:
    made = place(EndBilling(kind="command", argv=["true"]))
    assert (made.work_dir, made.cache_dir, made.base_python) == (WORK_DIR, f"{ROOT}/cache", "python3")
    assert made.python == f"{WORK_DIR}/env/bin/python"
    assert startup.hand_over is hand_over


# --- hand-over ---


@pytest.mark.parametrize("kind", ["container", "vm"])
def test_files_and_secrets_arrive_and_the_agent_starts(rig: Rig, kind: str) -> None:
    machine = rig.machine(kind=kind)
    rig.hand_over(machine, rig.request(guarded="yes"))
    messages = seen(machine)
    assert messages["secrets"] == SECRETS
    assert messages["mark"] == MARK
    assert messages["argv"][1] == f"{machine.root}/work/boot.json"
    assert json.loads((machine.root / "work/boot.json").read_text())["run_id"] == "moss-1"
    machine.wait_for("the stand-in agent lives")


def test_secrets_are_in_the_agents_environment_and_nowhere_else(rig: Rig) -> None:
    machine = rig.machine()
    rig.hand_over(machine, rig.request(guarded="yes"))
    seen(machine)
    with_secrets = [line for line, env in machine.processes().values() if "canary" in json.dumps(env)]
    assert len(with_secrets) == 1
    assert "agent.zip" in with_secrets[0]
    assert not [line for line, _ in machine.processes().values() if "canary" in line]
    left = [
        path
        for folder in (machine.folder, machine.memory, rig.folder / "home")
        for path in folder.rglob("*")
        if path.is_file() and path.name != "seen.json" and b"canary" in path.read_bytes()
    ]
    assert left == []
    assert not machine.memory.exists()
    assert "canary" not in machine.log()
    assert "canary" not in rig.script()


def test_secrets_wait_for_the_agent_in_memory_readable_by_their_owner_only(rig: Rig) -> None:
    machine = rig.machine()
    machine.wait_for("waiting for the hand-over")
    for pid, (line, _) in machine.processes().items():
        if "startup.sh" in line:
            os.kill(pid, 19)  # SIGSTOP: the script does not pass them on
    rig.hand_over(machine)
    path = machine.memory / "secrets"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_home_puts_no_secret_into_an_argument_list(rig: Rig) -> None:
    class Watching(World):
        argv: list[str] = []  # noqa: RUF012

        def run(self, argv: Any, timeout_s: float, env: Any = None, stdin: str = "") -> Completed:
            self.argv += argv
            assert env is None
            return super().run(argv, timeout_s, env, stdin)

    machine, world = rig.machine(), Watching()
    hand_over(rig.connection(machine), rig.request(), world=world, timeout_s=60.0)
    assert "StrictHostKeyChecking=yes" in world.argv
    assert "canary" not in " ".join(world.argv)


def test_a_repeated_hand_over_changes_nothing(rig: Rig) -> None:
    machine = rig.machine()
    rig.hand_over(machine, rig.request(guarded="yes"))
    seen(machine)
    rig.hand_over(machine, rig.request(guarded="another"))
    assert (machine.root / "work/guarded").read_text() == "yes"
    assert not machine.memory.exists()
    assert sum("agent.zip" in line for line, _ in machine.processes().values()) == 1
    assert machine.log().count("starting the agent") == 1


@pytest.mark.slow
def test_nothing_is_sent_to_a_machine_with_another_host_key(rig: Rig) -> None:
    machine = rig.machine()
    machine.wait_for("waiting for the hand-over")
    other = known_hosts_line(host_key(rig.folder / "home", "homing-other", rig.world), "127.0.0.1", machine.port)
    connection = rig.connection(machine, known_hosts=other)
    with pytest.raises(StartTimeout, match="Could not send files to") as caught:
        hand_over(connection, rig.request(), world=rig.world, timeout_s=3.0)
    assert "its host key differs" in caught.value.why
    assert not (machine.root / "work/agent.zip").exists()
    assert not (machine.root / "work/go").exists()


@pytest.mark.slow
def test_a_hand_over_without_an_answer_fails_at_the_deadline(rig: Rig) -> None:
    machine = rig.machine()
    connection = rig.connection(machine)
    machine.kill()
    began = time.monotonic()
    with pytest.raises(StartTimeout) as caught:
        hand_over(connection, rig.request(), world=rig.world, timeout_s=3.0)
    assert 3.0 <= time.monotonic() - began < 20.0
    assert "refused" in caught.value.why
    assert caught.value.fix == "Try again: homing launch moss"


def test_a_machine_that_has_ended_rejects_the_files(rig: Rig) -> None:
    machine = rig.machine()
    machine.wait_for("waiting for the hand-over")
    (machine.root / "ended").touch()
    with pytest.raises(CreateFailed, match="rejected the files"):
        rig.hand_over(machine)
    assert not (machine.root / "work/agent.zip").exists()


# --- who ends billing ---


@pytest.mark.slow
def test_without_a_hand_over_the_timer_ends_billing_and_keeps_retrying(rig: Rig) -> None:
    machine = rig.machine(end_within_s=1.0)
    wait(rig.ended.exists, "the end of billing")
    machine.wait_for("the request to end billing was accepted")
    wait(lambda: rig.ended.read_text().count("end") >= 2, "a second try: it is still there")


def test_a_machine_that_cannot_write_its_disk_ends_billing(rig: Rig) -> None:
    (rig.folder / "machine-0").mkdir()
    (rig.folder / "machine-0/opt").write_text("a file where the folder should be")
    machine = rig.machine(end_within_s=1.0)
    wait(rig.ended.exists, "the end of billing")
    assert "ending billing" in machine.log()


@pytest.mark.slow
def test_a_failed_end_of_billing_is_logged_and_retried(rig: Rig) -> None:
    command = f"[ -e {rig.ended} ] && exit 0; touch {rig.ended}; echo no network; exit 7"
    machine = rig.machine(end_within_s=1.0, end_command=command)
    machine.wait_for("STILL BILLING: the command to end billing failed with exit code 7. no network")
    machine.wait_for("the request to end billing was accepted")


def test_the_end_command_can_use_the_machines_environment(rig: Rig) -> None:
    machine = rig.machine(end_within_s=1.0, end_command=f'echo "$POD_ID" > {rig.ended}', env={"POD_ID": "pod-7"})
    wait(lambda: rig.ended.exists() and rig.ended.read_text(), "the end of billing")
    assert rig.ended.read_text() == "pod-7\n"
    assert machine.is_running


@pytest.mark.slow
def test_the_timer_ends_billing_only_without_a_running_dead_man(rig: Rig) -> None:
    lock = rig.folder / "machine-0/opt/homing/work/dead-man.lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        rig.machine(end_within_s=1.0)
        time.sleep(3.0)
        assert not rig.ended.exists()
    wait(rig.ended.exists, "the end of billing")


@pytest.mark.slow
def test_a_killed_timer_is_restarted(rig: Rig) -> None:
    machine = rig.machine(end_within_s=3.0)
    machine.wait_for("waiting for the hand-over")
    scripts = sorted(pid for pid, (line, _) in machine.processes().items() if line.endswith("startup.sh"))
    os.kill(scripts[1], 9)  # the timer is the script's first child
    machine.wait_for("the timer had died and was restarted")
    wait(rig.ended.exists, "the end of billing")


@pytest.mark.slow
def test_a_virtual_machine_that_reboots_ends_itself(rig: Rig) -> None:
    machine = rig.machine(kind="vm")
    machine.wait_for("waiting for the hand-over")
    machine.kill()
    with subprocess.Popen([machine.folder / "per-boot/homing"]) as hook:
        wait(rig.ended.exists, "the end of billing")
        hook.kill()


def test_a_restart_after_the_hand_over_ends_billing_at_once(rig: Rig) -> None:
    machine = rig.machine()
    rig.hand_over(machine, rig.request(guarded="yes"))
    seen(machine)
    machine.restart()
    wait(rig.ended.exists, "the end of billing")
    machine.wait_for("this is a restart")
    assert machine.log().count("starting the agent") == 1


def test_a_restart_after_the_end_ends_billing_again_at_once(rig: Rig) -> None:
    machine = rig.machine(end_within_s=1.0)
    wait(rig.ended.exists, "the end of billing")
    machine.kill()
    rig.ended.unlink()
    machine.restart()
    machine.wait_for("billing was ended before")
    wait(rig.ended.exists, "the end of billing")


@pytest.mark.slow
def test_a_restart_with_an_empty_disk_is_detected_by_the_time(rig: Rig) -> None:
    machine = rig.machine(begin_by=time.time() + 3600)
    machine.wait_for("waiting for the hand-over")
    assert not rig.ended.exists()
    later = rig.machine(begin_by=time.time() - 10)
    later.wait_for("long after the launch")
    wait(rig.ended.exists, "the end of billing")


@pytest.mark.slow
def test_a_restart_before_the_hand_over_continues_with_the_same_deadline(rig: Rig) -> None:
    machine = rig.machine()
    machine.wait_for("waiting for the hand-over")
    machine.restart()
    rig.hand_over(machine, rig.request(guarded="yes"))
    assert seen(machine)["secrets"] == SECRETS
    another = rig.machine()
    another.wait_for("waiting for the hand-over")
    another.kill()
    (another.root / "began").write_text(f"{int(time.time() - LONG_S) - 1}\n")
    another.restart()
    wait(rig.ended.exists, "the end of billing")


def test_a_sigterm_to_the_container_reaches_the_agent(rig: Rig) -> None:
    machine = rig.machine()
    rig.hand_over(machine, rig.request(guarded="yes"))
    seen(machine)
    machine.wait_for("the stand-in agent lives")
    first = min(pid for pid, (line, _) in machine.processes().items() if line.startswith("bash") and "startup" in line)
    os.kill(first, 15)
    machine.wait_for("the agent received SIGTERM")
    machine.wait_for("the agent ended with exit code 75")
    assert machine.is_running  # if the first process exited, the container would restart and bill


# --- with the real agent ---


@pytest.mark.slow
def test_the_real_agent_boots_trains_pushes_and_ends_the_machine(rig: Rig, tmp_path: Path) -> None:
    run = dataclasses.replace(make_run(tmp_path), id="moss-1")
    store = open_store(run.store, rig.world)
    end = EndBilling(kind="command", argv=["sh", "-c", f"echo agent >> {rig.ended}"])
    made = booting.make_boot(
        run,
        mark=MARK,
        attempt=1,
        work_dir=WORK_DIR,
        inputs=booting.prepare_inputs(run, run.data.dir, store, rig.world),
        python=place(end).python,
        end_billing=end,
        started_at=time.time(),
        rate_usd_per_hour=Decimal("1.00"),
        spend_limit_usd=Decimal("5.00"),
        heartbeat_s=0.2,
    )
    made = dataclasses.replace(made, trainer_argv=trainer_argv(tmp_path, WORK_DIR))
    offer = Offer("toy", "toy", "CPU", 0, 1, 10**9, Decimal("1.00"))
    made, brought = make_bootstrap_spec(made, place(end), run, offer, rig.world, is_stand_in=True)
    source = tmp_path / "run"
    source.mkdir()
    booting.build_agent_zip(source / "agent.zip", rig.world)
    for name, data in brought.items():
        (source / name).write_bytes(data)
    files = tuple(InputFile(name, str(source / name)) for name in ("agent.zip", *brought))
    machine = rig.machine(has_environment=True)
    rig.hand_over(machine, Request("toy", MARK, offer, Order(MARK, "moss", made, files), (), {}))
    wait(rig.ended.exists, "the end of billing", timeout_s=120.0)
    events = (machine.root / "work/run/events.jsonl").read_text()
    assert "already created" in events
    assert json.loads(store.read("runs/moss-1/outcome.json"))["state"] == "done"
    assert "homing: ending billing" not in machine.log()  # the agent ended it, not the timer


# --- without SSH ---


FILES = {"agent": AGENT.encode(), "boot": b"{}", "guarded": b"yes"}


class Files(BaseHTTPRequestHandler):
    num_refusals = 1

    def do_GET(self) -> None:
        if Files.num_refusals:
            Files.num_refusals -= 1
            self.send_error(503)
            return
        data = FILES[self.path[1:]]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    made = HTTPServer(("127.0.0.1", 0), Files)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_machine_without_ssh_downloads_its_files(rig: Rig, server: HTTPServer) -> None:
    Files.num_refusals = 1
    url = f"http://127.0.0.1:{server.server_port}"
    names = {"agent": "agent.zip", "boot": "boot.json", "guarded": "guarded"}
    machine = rig.machine(
        fetch=tuple(Fetch(f"{url}/{key}", path, sha256_of(FILES[key])) for key, path in names.items())
    )
    assert seen(machine)["secrets"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("has_sha256sum", [True, False])
def test_a_download_with_a_wrong_hash_is_not_used_and_the_timer_ends_billing(
    rig: Rig, server: HTTPServer, has_sha256sum: bool, tmp_path: Path
) -> None:
    Files.num_refusals = 0
    url = f"http://127.0.0.1:{server.server_port}"
    env = {} if has_sha256sum else {"PATH": str(without("sha256sum", tmp_path / "programs"))}
    machine = rig.machine(fetch=(Fetch(f"{url}/agent", "agent.zip", "0" * 64),), end_within_s=4.5, env=env)
    machine.wait_for("agent.zip in the store was replaced")
    assert sha256_of(FILES["agent"]) in machine.log()
    assert not (machine.root / "work/agent.zip").exists()
    assert not (machine.root / "work/agent.zip.part").exists()
    wait(rig.ended.exists, "the end of billing")
    assert not (machine.root / "work/seen.json").exists()


def without(program: str, folder: Path) -> Path:
    """A folder of links to every program here but this one."""
    folder.mkdir()
    for there in os.environ["PATH"].split(os.pathsep):
        for path in Path(there).glob("*") if Path(there).is_dir() else ():
            link = folder / path.name
            if path.name != program and not link.is_symlink():
                link.symlink_to(path)
    return folder


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
