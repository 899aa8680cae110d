"""The startup script as the first process of a real container, word for word but for its port."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.doubles.container import engine, imported
from tests.doubles.machine import bare_boot
from tests.doubles.sshd import free_port, need_sshd

from homing.cloud.contact.ssh_access import host_key, known_hosts_line, login_key
from homing.cloud.machine_setup.startup_script import WORK_DIR, hand_over, startup_script
from homing.cloud.providers.base import Connection, InputFile, Offer, Order, Request
from homing.world import World

pytestmark = [pytest.mark.machine, pytest.mark.slow]

MARK = "homing-a1b2c3-moss-1"
AGENT = """
import os, signal, sys, time
print("agent of", os.environ["KEY"][:3], "as", os.getpid(), flush=True)
def stop(*_):
    print("the agent got the stop signal", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(0.5)  # an orphan by then: whoever is process 1 must take it
    os._exit(0)
os.wait()
time.sleep(1)
print("the orphan ended", flush=True)
time.sleep(600)
"""


class Container:
    def __init__(self, docker: list[str], folder: Path) -> None:
        self.docker, self.port, self.world = docker, free_port(), World()
        self.home, self.ended = folder / "home", folder / "shared/ended"
        self.ended.parent.mkdir()
        script = startup_script(
            mark=MARK,
            end_command=f"echo end >> {self.ended}",
            end_within_s=600.0,
            login_key=login_key(self.home, self.world).public_line,
            host_key=host_key(self.home, MARK, self.world),
            is_container=True,
        ).replace("\nPort 22\n", f"\nPort {self.port}\nListenAddress 127.0.0.1\n")
        mounts = [f"-v{path}:{path}:ro" for path in ("/usr", "/etc", sys.base_prefix)]
        mounts.append(f"-v{self.ended.parent}:{self.ended.parent}")
        path = f"{sys.base_prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        argv = ["run", "-d", "--network", "host", *mounts, "-e", f"PATH={path}", "-e", "HOME=/root"]
        self.name = self.call(*argv, imported(docker), "bash", "-c", script).strip()

    def call(self, *words: str) -> str:
        done = subprocess.run([*self.docker, *words], capture_output=True, text=True, check=True, timeout=120)
        return done.stdout + done.stderr

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.call("logs", self.name):
            assert time.monotonic() < deadline, f"{text!r} did not come:\n{self.call('logs', self.name)}"
            time.sleep(0.2)

    def hand_over(self, folder: Path) -> None:
        (folder / "agent.zip").write_text(AGENT)
        files = (InputFile("agent.zip", str(folder / "agent.zip")),)
        order = Order(MARK, "moss", bare_boot(MARK, WORK_DIR), files, {"KEY": "canary"})
        request = Request("toy", MARK, Offer("toy", "toy", "CPU", 0, 1, 1, Decimal(1)), order, (), {})
        line = known_hosts_line(host_key(self.home, MARK, self.world), "127.0.0.1", self.port)
        key = str(login_key(self.home, self.world).private_path)
        hand_over(Connection("root", "127.0.0.1", self.port, key, line), request, world=self.world, timeout_s=60.0)


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    need_sshd()
    with engine() as docker:
        made = Container(docker, tmp_path)
        yield made
        made.call("rm", "-f", made.name)


def test_it_boots_takes_what_it_is_given_saves_on_stop_and_never_trains_twice(
    container: Container, tmp_path: Path
) -> None:
    container.wait_for("waiting for the hand-over")
    container.hand_over(tmp_path)
    container.wait_for("agent of can as")
    assert "canary" not in container.call("logs", container.name)
    assert "canary" not in json.dumps(inspect(container))
    # A container without an engine sees the tests' own folder there.
    ours = {tmp_path.parts[3]} if tmp_path.is_relative_to("/dev/shm") else set()
    assert set(container.call("exec", container.name, "ls", "/dev/shm").split()) - ours == set()
    container.wait_for("the orphan ended")
    assert ") Z " not in container.call("exec", container.name, "sh", "-c", "cat /proc/[0-9]*/stat")
    # Whoever stops a container gives its first process ten seconds.
    container.call("restart", "-t", "10", container.name)
    container.wait_for("the agent got the stop signal")
    container.wait_for("the agent was started here before; this is a restart")
    deadline = time.monotonic() + 60
    while not container.ended.exists():
        assert time.monotonic() < deadline, "billing was not ended"
        time.sleep(0.2)
    assert container.call("logs", container.name).count("starting the agent") == 1


def inspect(container: Container) -> Any:
    return json.loads(container.call("inspect", container.name))
