"""What goes into an image: the versions of here, the environment a launch looks for, and nothing private."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import make_run
from tests.doubles.machine import fingerprints

from homing.cloud.launch.build_image import Context, build, write_context
from homing.cloud.machine_setup import code_bundle
from homing.errors import HomingError
from homing.wire import codec
from homing.wire.boot_json import Boot
from homing.world import Completed, World


def test_the_dockerfile_installs_just_the_versions_that_a_launch_would_send(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    context = write_context(run, tmp_path / "image", World(), base="python:3.11-slim-bookworm")
    lock = code_bundle.lock(run.store)
    assert (tmp_path / "image/lock.txt").read_text().splitlines() == [*lock.lines, *lock.torch]
    assert context.num_packages == len(lock.lines) + len(lock.torch)
    assert "pip install --require-hashes --only-binary :all: -r" in (tmp_path / "image/Dockerfile").read_text()
    text = (tmp_path / "image/Dockerfile").read_text()
    assert text.splitlines()[1] == "FROM python:3.11-slim-bookworm"
    assert f"LABEL homing.lock={context.lock_sha256}" in text
    assert "command -v gcc" in text, (
        "Triton builds a little C before its first kernel, and slim images have no compiler"
    )
    assert " gcc libc6-dev " in text


@pytest.mark.acceptance("X22")
def test_the_environment_is_made_by_the_bootstrap_where_a_launch_looks_for_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_context(run, tmp_path / "image", World(), base="python:3.11")
    boot = codec.loads(Boot, (tmp_path / "image/boot.json").read_bytes())
    messages = boot.bootstrap
    assert messages is not None
    assert (messages.python, messages.env_dir) == ("python3", "/opt/homing/cache/env-")
    assert (messages.disk_bytes, messages.num_gpus, messages.probe_argv) == (0, 0, [])
    assert shlex.join(boot.bootstrap_argv) in (tmp_path / "image/Dockerfile").read_text()


def test_nothing_private_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    run = make_run(tmp_path)
    run = dataclasses.replace(run, store="hf:canary/private", cloud=dataclasses.replace(run.cloud, volume="/canary"))
    write_context(run, tmp_path / "image", World(), base="python:3.11")
    found = b"".join(path.read_bytes() for path in (tmp_path / "image").iterdir() if path.suffix != ".whl")
    assert b"canary" not in found
    assert str(tmp_path).encode() not in found


@pytest.mark.slow
def test_with_its_packages_installed_the_rest_needs_no_network_and_is_what_a_launch_looks_for(tmp_path: Path) -> None:
    """The steps after `pip install`, run here: this interpreter is the image's python3, and has everything."""
    write_context(make_run(tmp_path), tmp_path / "opt/homing/image", World(), base="python:3.11")
    boot_path, here = tmp_path / "opt/homing/image/boot.json", str(tmp_path / "opt/homing")
    boot_path.write_text(boot_path.read_text().replace("/opt/homing", here))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin/python3").chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PIP_NO_INDEX": "1", "HOME": str(tmp_path)}
    done = World().run(codec.loads(Boot, boot_path.read_bytes()).bootstrap_argv, 300.0, env)
    assert done.code == 0, (boot_path.parent / "run/outcome.json").read_text()
    (made,) = (tmp_path / "opt/homing/cache").glob("env-*/.whole")
    assert made.parent.name in fingerprints()
    tried = World().run([str(made.parent / "bin/python"), "-c", "import numpy, safetensors, tokenizers, torch"], 300.0)
    assert tried.code == 0, tried.err


class Slow(World):
    """Docker that never ends, on a clock that does."""

    def __init__(self) -> None:
        self.t, self.signals = 0.0, []  # type: ignore[var-annotated]

    def run(self, argv: Any, timeout_s: float, env: Any = None, stdin: str = "") -> Completed:
        return Completed(0, "28.2", "")

    def spawn(self, argv: Any, env: Any, cwd: Any, log: Any) -> int:
        Path(log).write_text("Step 1/7\n")
        return 7

    def poll(self, pid: int) -> int | None:
        return None

    def signal(self, pid: int, number: int, is_group: bool = False) -> bool:
        self.signals.append((pid, number, is_group))
        return True

    def monotonic(self) -> float:
        return self.t

    def sleep(self, seconds: float) -> None:
        self.t += 600.0


def test_a_build_that_never_ends_is_ended(tmp_path: Path) -> None:
    began, world = time.monotonic(), Slow()
    with pytest.raises(HomingError, match="Could not build") as caught:
        build(Context(tmp_path, "base", "", 1), "me/train", world, is_pushed=True)
    assert "Timed out after 7200 s" in caught.value.why
    assert world.signals == [(7, 15, True)]
    assert time.monotonic() - began < 10


def test_ctrl_c_ends_the_docker_that_was_started(tmp_path: Path) -> None:
    class Interrupted(Slow):
        def sleep(self, seconds: float) -> None:
            raise KeyboardInterrupt

    world = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        build(Context(tmp_path, "base", "", 1), "me/train", world, is_pushed=True)
    assert world.signals == [(7, 15, True)]
