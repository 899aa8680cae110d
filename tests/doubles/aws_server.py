"""The double of AWS as a process: its API on a loopback port, its instances as machines that run user data for real.

with aws_cloud(folder) as cloud:    cloud.url   cloud.lives()   cloud.preempt(id)   cloud.strike(...)

/...              every service, as AWS_ENDPOINT_URL has it
/imds/ID/latest   the metadata service of one instance (on the machine it looks like /imds/latest)
/double/...       what a test says to it, and what a machine says when it shuts down
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.doubles.aws import AwsDouble, Life, Settings, Strike
from tests.doubles.drivers import driver_name
from tests.doubles.machine import Machine

from homing.cloud.machine_setup.startup_script import ROOT
from homing.world import HttpRequest, HttpResponse, NetworkError

IMDS = "/imds"
_CARDS = {"g4dn": "T4", "g5": "A10G", "g6": "L4", "g7e": "RTX PRO Server 6000", "p5": "H100"}  # as EC2 names them
_START_S = 180.0
_DISK_BYTES = 64 << 20


class RealMachines:
    """Each instance is a folder and processes; its disks are files, its `shutdown` tells the cloud."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        self._machines: dict[str, Machine] = {}

    def start(self, instance_id: str, script: str, env: dict[str, str]) -> int:
        folder = self._folder / "machines" / instance_id
        disks = folder / "dev/by-id"
        disks.mkdir(parents=True)
        there = {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"{self._url}{IMDS}/{instance_id}/",
            "OMP_NUM_THREADS": "1",
        }
        script = script.replace("/dev/disk/by-id/", f"{disks}/")
        machine = Machine(folder, script, env=there, kind="vm")
        for name, text in self._programs(instance_id, machine, env.get("type", "")).items():
            machine._program(name, text)
        self._machines[instance_id] = machine
        machine.start()
        return machine.port

    def end(self, instance_id: str) -> None:
        self._machines[instance_id].close()

    def log(self, instance_id: str) -> str:
        return self._machines[instance_id].log()

    def attach(self, instance_id: str, volume_id: str) -> None:
        """A disk that comes again with what is on it."""
        disk = self._folder / "volumes" / f"{volume_id}.img"
        if not disk.exists():
            disk.parent.mkdir(exist_ok=True)
            with disk.open("wb") as file:
                file.truncate(_DISK_BYTES)
        name = f"nvme-Amazon_Elastic_Block_Store_{volume_id.replace('-', '')}"
        link = self._folder / "machines" / instance_id / "dev/by-id" / name
        if not link.exists():
            link.symlink_to(disk)

    def close(self) -> None:
        for machine in self._machines.values():
            machine.close()

    def _programs(self, instance_id: str, machine: Machine, kind: str) -> dict[str, str]:
        here = f"s#{ROOT}#{machine.root}#g; s#{IMDS}/latest#{IMDS}/{instance_id}/latest#g"
        notify = f'exec /usr/bin/curl -fsS -X POST "{self._url}/double/$what/{instance_id}"\n'
        family = kind.partition(".")[0]
        card = driver_name(_CARDS[family]) if family in _CARDS else ""
        return {
            "shutdown": f'case "$2" in now) what=shutdown ;; +*) what="timer/${{2#+}}" ;; *) exit 1 ;; esac\n{notify}',
            # After the check of its hash: the place of its folders is this double's, not a part of what travelled.
            "mv": '/bin/mv "$@" || exit $?\nfor file; do :; done\n'
            f'case "$file" in *boot.json) sed -i "{here}" "$file" ;; esac\n',
            "as-there": f"export PATH={machine._env['PATH']}\n"
            f'command=$(printf %s "$SSH_ORIGINAL_COMMAND" | sed "{here}")\nsed "{here}" | sh -c "$command"\n',
            # A folder next to the disk's file holds its content; what was under the mount point is copied to it.
            "mount": 'mkdir -p "$1.d" && cp -an "$2/." "$1.d/" && rm -rf "$2" && ln -s "$1.d" "$2"\n',
            "nvidia-smi": f'[ -n "{card}" ] || exit 1\n'
            f'case "$*" in *utilization*) echo "50, 1000, 24000" ;; *) echo "{card}, 580.95" ;; esac\n',
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    double: AwsDouble

    def handle_error(self, *_: object) -> None:
        """A client that was killed, or a machine that went: part of the day here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        try:
            reply = self._answer(body)
        except NetworkError:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            if name not in ("content-length", "connection", "transfer-encoding", "server", "date"):
                self.send_header(name, value)
        length = reply.headers.get("content-length") if self.command == "HEAD" else None
        self.send_header("content-length", length or str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _answer(self, body: bytes) -> HttpResponse:
        double, path = self.server.double, self.path
        headers = dict(self.headers.items())
        if path.startswith(f"{IMDS}/"):
            instance_id, _, rest = path.removeprefix(f"{IMDS}/").partition("/")
            return double.metadata(instance_id, self.command, f"/{rest.lstrip('/')}", headers)
        if path.startswith("/double/"):
            return _command(double, path.split("/")[2:], json.loads(body or b"null"))
        url = f"http://{self.headers['host']}{path}"
        return double.handle(HttpRequest(self.command, url, headers, body))


def _command(double: AwsDouble, words: list[str], body: Any) -> HttpResponse:
    found: Any = None
    if words[0] == "shutdown":  # the system says goodbye before it goes
        threading.Timer(0.3, double.shut_down, [words[1]]).start()
    elif words[0] == "timer":
        double.set_timer(words[2], int(words[1]))
    elif words[0] == "preempt":
        double.preempt(words[1], float(body))
    elif words[0] == "lose":
        with double._lock:
            double._end(double.lives[words[1]], "Server.InternalError")
    elif words[0] == "strike":
        double.strike(*(Strike(**each) for each in body))
    elif words[0] == "settings":
        double.settings = Settings(**{name: set(v) if isinstance(v, list) else v for name, v in body.items()})
    elif words[0] == "seen":
        found = double.seen
    else:
        found = [{**dataclasses.asdict(life), "tokens": []} for life in double.lives.values()]
    return HttpResponse(200, {"content-type": "application/json"}, json.dumps(found).encode())


class Cloud:
    """The server as a test sees it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder

    @property
    def metadata_url(self) -> str:
        return f"{self.url}{IMDS}"

    def lives(self) -> list[Life]:
        return [Life(**{**each, "tokens": set()}) for each in self._say("lives")]

    def living(self) -> list[Life]:
        return [life for life in self.lives() if life.ended is None]

    def preempt(self, instance_id: str, notice_s: float = 120.0) -> None:
        self._say(f"preempt/{instance_id.rpartition('/')[2]}", notice_s)

    def lose(self, instance_id: str) -> None:
        self._say(f"lose/{instance_id.rpartition('/')[2]}")

    def strike(self, *strikes: Strike) -> None:
        self._say("strike", [dataclasses.asdict(strike) for strike in strikes])

    def seen(self) -> list[tuple[str, str]]:
        return [(service, action) for service, action in self._say("seen")]

    def machine(self, instance_id: str) -> Path:
        return self.folder / "machines" / instance_id.rpartition("/")[2]

    def _say(self, what: str, body: Any = None) -> Any:
        request = urllib.request.Request(f"{self.url}/double/{what}", json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())


@contextlib.contextmanager
def aws_cloud(folder: Path, **settings: float) -> Iterator[Cloud]:
    server, cloud = start(folder, **settings)
    try:
        yield cloud
    finally:
        server.terminate()
        server.wait(timeout=_START_S)


def start(folder: Path, **settings: float) -> tuple[subprocess.Popen[bytes], Cloud]:
    """As a process of its own, which is there for whoever is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    argv = [sys.executable, "-m", "tests.doubles.aws_server", "--folder", str(folder), *words]
    with (folder / "server.log").open("wb") as out:
        server = subprocess.Popen(argv, stdout=out, stderr=out, cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + _START_S
    while not (folder / "server.json").exists():
        assert server.poll() is None, (folder / "server.log").read_text()
        assert time.monotonic() < deadline, "the double of AWS did not start"
        time.sleep(0.1)
    return server, Cloud(json.loads((folder / "server.json").read_text())["url"], folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--late-s", type=float, default=0.0)
    parser.add_argument("--pending-s", type=float, default=0.0)
    parser.add_argument("--profile-s", type=float, default=0.0)
    args = parser.parse_args()
    server = _Server(("127.0.0.1", 0), _Handler)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    machines = RealMachines(args.folder, url)
    settings = Settings(late_s=args.late_s, pending_s=args.pending_s, profile_s=args.profile_s)
    server.double = AwsDouble(time.time, machines, settings)
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    whole = args.folder / "server.json.tmp"
    whole.write_text(json.dumps({"url": url}))
    whole.rename(args.folder / "server.json")
    while not over.wait(0.2):
        server.double.tick()
    server.shutdown()
    machines.close()


if __name__ == "__main__":
    main()
