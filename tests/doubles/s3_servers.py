"""Two S3 servers on loopback, each unlike AWS in its own way.

moto     honours If-None-Match, checks no signature and no checksum
rclone   checks signatures and Content-MD5 for real, keeps objects as plain files, ignores If-None-Match
"""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.doubles.aws_models import share_models

share_models()
ACCESS_KEY, SECRET_KEY = "AKIDHOMINGTEST", "homing-test-secret-key"


@dataclass(frozen=True)
class Server:
    endpoint: str
    folder: Path | None = None  # where rclone keeps its buckets

    @property
    def port(self) -> int:
        return int(self.endpoint.rsplit(":", 1)[1])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def program(name: str) -> str:
    """From the environment that runs the tests, else from the path."""
    neighbor = Path(sys.executable).parent / name
    found = str(neighbor) if neighbor.exists() else shutil.which(name)
    assert found, f"{name} is not installed: pip install -e '.[test]'"
    return found


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    port = free_port()
    with _running([program("moto_server"), "-H", "127.0.0.1", "-p", str(port)], port):
        yield Server(f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def rclone(folder: Path) -> Iterator[Server]:
    port = free_port()
    keys = f"{ACCESS_KEY},{SECRET_KEY}"
    argv = [program("rclone"), "serve", "s3", "--config", "/dev/null", "--addr", f"127.0.0.1:{port}"]
    with _running([*argv, "--auth-key", keys, "--vfs-cache-mode", "off", str(folder)], port):
        yield Server(f"http://127.0.0.1:{port}", folder)


@contextlib.contextmanager
def _running(argv: list[str], port: int) -> Iterator[None]:
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(argv, **quiet)  # type: ignore[call-overload]
    try:
        _wait_for(port, process)
        yield
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/")
            connection.getresponse().read()
            return
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < deadline, "the server did not answer in a minute"
        time.sleep(0.05)
