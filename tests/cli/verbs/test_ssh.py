"""`homing ssh` and `homing forward`, and a host that is met for the first time."""

from __future__ import annotations

import getpass
import http.server
import io
import shlex
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, clear, lay_out, typing
from tests.doubles.sshd import Sshd, running_sshd


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    yield from running_sshd(tmp_path_factory.mktemp("ssh") / "sshd")


@pytest.fixture
def folder(tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield lay_out(tmp_path, monkeypatch, steps=100000, step_s=0.02)
    clear(homing_home)
    clear(homing_home, "ssh")


@pytest.fixture
def cli(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Homing:
    return typing(capsys, monkeypatch)


def use_ssh(folder: Path, sshd: Sshd, *, host_key: str) -> None:
    run_file = folder / "runs/moss.yaml"
    there = {
        "host": "127.0.0.1",
        "user": getpass.getuser(),
        "port": sshd.port,
        "key_file": str(sshd.key),
        "known_hosts": str(folder / "none"),
        "work_dir": str(folder / "there"),
        "rate": "$0.80/h",
        "python": sys.executable,
        **({"host_key": host_key} if host_key else {}),
    }
    lines = "".join(f"    {key}: {value}\n" for key, value in there.items())
    run_file.write_text(run_file.read_text() + f"cloud:\n  providers: [ssh]\n  ssh:\n{lines}")


@pytest.mark.acceptance(55)
def test_a_run_that_is_not_reached_by_ssh_says_why(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    for verb in (("ssh", "moss"), ("forward", "moss", "6006")):
        said = cli(*verb)
        assert said.code == 2
        assert "needs no SSH: its folder is on this computer" in said.err
    assert cli("status", "--json").json["ssh"] == ""
    cli("destroy", "moss", "--yes")
    assert "no instance to log in to" in cli("ssh", "moss").err


@pytest.mark.parametrize("ports", ["0", "x", "6006:", "1:70000", "-1"])
def test_ports_that_are_none_are_refused(cli: Homing, ports: str) -> None:
    said = cli("forward", "moss", "--", ports)
    assert said.code == 2
    assert "Invalid port" in said.err


@pytest.mark.machine
def test_without_a_terminal_a_host_never_met_is_refused_with_the_line_to_write(
    cli: Homing, folder: Path, sshd: Sshd
) -> None:
    use_ssh(folder, sshd, host_key="")
    said = cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert said.code == 2
    assert f"cloud.ssh.host_key: {sshd.public_host_key}" in said.err
    assert cli("runs", "--json").json["runs"] == []


@pytest.mark.machine
def test_at_a_terminal_the_fingerprint_is_shown_once_and_then_pinned(
    cli: Homing, folder: Path, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ssh(folder, sshd, host_key="")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert cli("plan", "moss").code == 2
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    said = cli("plan", "moss")
    assert said.code == 0
    assert "SHA256:" in said.err
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    again = cli("plan", "moss")
    assert again.code == 0
    assert "SHA256:" not in again.err
    assert "$0.80" in again.out


@pytest.mark.acceptance(55, 79, 111, 115)
@pytest.mark.machine
@pytest.mark.slow
def test_the_line_that_is_printed_opens_the_instance_and_a_port_of_it(cli: Homing, folder: Path, sshd: Sshd) -> None:
    use_ssh(folder, sshd, host_key=sshd.public_host_key)
    said = cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert said.code == 0, said.err
    printed = cli("ssh", "moss", "--print").out.strip()
    assert "StrictHostKeyChecking=yes" in printed
    assert cli("status", "moss", "--json").json["ssh"] == printed
    words = [word for word in shlex.split(printed) if word != "-t"]
    done = subprocess.run([*words, "echo $((6*7))"], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "42"
    assert cli("ssh", "moss", "--", "sh", "-c", "exit 7").code == 7

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        tunnel_info = cli("forward", "moss", f"{busy}:{server.server_port}", "--json").json
    assert tunnel_info["here"] != busy, "a port that is taken here is another one"
    tunnel = subprocess.Popen(tunnel_info["argv"])
    try:
        assert _answers(tunnel_info["here"])
    finally:
        tunnel.terminate()
        tunnel.wait(20)
        server.shutdown()
        server.server_close()
    assert cli("destroy", "moss", "--yes").code == 0


def _answers(port: int) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            time.sleep(0.2)
    return False
