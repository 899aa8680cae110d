"""A real container with an OpenSSH server in it: its own processes and its own disk, this machine's programs.

The image is empty; /usr, /etc and the interpreter come from here, read-only. Needs `dockerd` and root, and takes some
seconds. If dockerd is not installed, the tests that need it are skipped with a message, and fail if CI is set. If it is
installed and cannot start, they are always skipped: a container cannot always run inside a container.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.doubles.sshd import Sshd

_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_FOLDERS = ("usr", "etc", "tmp", "run/sshd", "proc", "dev", "sys", "root", "var/empty")


@contextmanager
def engine() -> Iterator[list[str]]:
    """The docker command of an engine of our own, on a socket of its own."""
    if not shutil.which("dockerd") or not shutil.which("docker"):
        if os.environ.get("CI"):
            pytest.fail("dockerd is not installed, and CI is set: .ci/run installs docker.io")
        pytest.skip("dockerd is not installed (docker.io), so nothing is tried in a container")
    if os.getuid() != 0:
        pytest.skip("this is not root, so no Docker engine is started and nothing is tried in a container")
    folder = Path(tempfile.mkdtemp(prefix="hd"))  # short: a socket's path may have 108 characters
    socket, log = f"unix://{folder}/sock", folder / "dockerd.log"
    argv = ["dockerd", "-H", socket, "--data-root", folder / "data", "--exec-root", folder / "exec"]
    argv += ["--pidfile", folder / "pid", "--bridge", "none", "--iptables=false"]
    with open(log, "wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out)
    docker = ["docker", "-H", socket]
    try:
        deadline = time.monotonic() + 60
        while subprocess.run([*docker, "version"], capture_output=True, check=False).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                last = log.read_text(errors="replace").splitlines()[-1:]
                pytest.skip(f"dockerd does not start here, so nothing is tried in a container: {last}")
            time.sleep(0.5)
        yield docker
    finally:
        process.terminate()
        process.wait(60)
        # What it leaves mounted would keep its folder, and whoever cleans up after the tests, from going.
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]
        for path in reversed(mounted):
            subprocess.run(["umount", path], check=False)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def sshd_inside(docker: list[str], server: Sshd, shared: list[Path]) -> Iterator[str]:
    """`server` in a container that sees this machine's programs and `shared`, and nothing else of its disk."""
    image = imported(docker)
    programs = [Path("/usr"), Path("/etc"), Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parents[2] / "src"]
    mounts = [f"-v{path}:{path}:ro" for path in programs] + [f"-v{path}:{path}" for path in (server.folder, *shared)]
    server.write_config()
    inside = ["/usr/sbin/sshd", "-D", "-f", f"{server.folder}/sshd_config", "-E", f"{server.folder}/log"]
    argv = [*docker, "run", "-d", "--network", "host", *mounts, image, *inside]
    name = subprocess.run(argv, capture_output=True, check=True).stdout.decode().strip()
    try:
        server.wait_until_it_answers()
        yield name
    finally:
        subprocess.run([*docker, "rm", "-f", name], capture_output=True, check=False)


def imported(docker: list[str]) -> str:
    """The name of an image with nothing in it but folders and links into /usr."""
    done = subprocess.run([*docker, "import", "-"], input=_image(), capture_output=True, check=True)
    return done.stdout.decode().strip()


def _image() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in _FOLDERS:
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(info)
        for name, target in _LINKS.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
    return buffer.getvalue()
