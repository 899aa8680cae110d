"""`homing image build` with a real Docker engine and a registry on loopback. The base is a few programs of here; its
python3 is a script that does as if it had installed everything, because torch is gigabytes."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cloud.rig import make_run
from tests.doubles.container import engine
from tests.doubles.registry import registry

from homing.cloud.launch.build_image import CONTAINER, build, write_context
from homing.errors import HomingError, ProviderRefused
from homing.world import World

pytestmark = [pytest.mark.machine, pytest.mark.slow]

BASE = "homing-test-base"
PROGRAMS = ("sh", "bash", "cat", "env", "mkdir", "rm", "chmod", "flock", "sleep")
PYTHON3 = """#!/bin/sh
case "$*" in
"-m pip install --require-hashes --only-binary :all: -r "*) cat "$8" > /installed.txt ;;
"-I -c "*homing.instance.bootstrap*)
    cat "$4" > /dev/null || exit 1
    mkdir -p /opt/homing/cache/env-0123/bin
    printf '#!/bin/sh\\necho torch 2.13.0 numpy 2.4.6 >&2\\n' > /opt/homing/cache/env-0123/bin/python
    chmod 755 /opt/homing/cache/env-0123/bin/python ;;
*) exit 1 ;;
esac
"""


@pytest.fixture(scope="module")
def docker() -> Iterator[list[str]]:
    with engine() as command:
        subprocess.run([*command, "import", "-", BASE], input=_base(), capture_output=True, check=True)
        yield command


@pytest.fixture
def world(docker: list[str], monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("DOCKER_HOST", docker[-1])
    return World()


@pytest.mark.acceptance(44)
def test_an_image_is_built_tried_and_pushed_and_the_registry_has_it(tmp_path: Path, world: World) -> None:
    context = write_context(make_run(tmp_path), tmp_path / "image", world, base=BASE)
    said: list[str] = []
    with registry() as server:
        name = f"{server.name}/me/train:1"
        built = build(context, name, world, is_pushed=True, notify=said.append)
        manifest = json.loads(server.manifests["me/train:1"])
        assert {layer["digest"] for layer in manifest["layers"]} <= set(server.blobs)
        assert re.fullmatch(re.escape(f"{server.name}/me/train@sha256:") + "[0-9a-f]{64}", built.pinned)
    assert built.says == "torch 2.13.0 numpy 2.4.6"
    assert any("python3 -m pip install" in line for line in said)
    installed = world.run(["docker", "run", "--rm", "--network", "none", name, "cat", "/installed.txt"], 60.0)
    assert installed.out == (tmp_path / "image/lock.txt").read_text()
    assert world.run(["docker", "ps", "-aq"], 60.0).out == ""


@pytest.mark.acceptance(44)
def test_a_registry_that_wants_a_login_stops_it_in_dockers_words(tmp_path: Path, world: World) -> None:
    context = write_context(make_run(tmp_path), tmp_path / "image", world, base=BASE)
    with registry(wants_login=True) as server:
        with pytest.raises(ProviderRefused, match="nothing was rented") as caught:
            build(context, f"{server.name}/me/train:1", world, is_pushed=True)
        assert "no basic auth credentials" in caught.value.why
        assert caught.value.fix.startswith(f"docker login {server.name} ")
        assert server.blobs == {}


@pytest.mark.acceptance(117)
def test_a_container_that_dies_keeps_its_log_under_its_name(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.cloud.launch.build_image._TRY", "echo out of memory; exit 137")
    context = write_context(make_run(tmp_path), tmp_path / "image", world, base=BASE)
    with pytest.raises(HomingError, match="failed its test") as caught:
        build(context, "homing-moss", world, is_pushed=False)
    assert "out of memory" in caught.value.why
    assert "out of memory" in world.run(["docker", "logs", CONTAINER], 60.0).out


def _base() -> bytes:
    """The programs with the libraries that they need, and scripts in the place of the rest."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        libraries: set[str] = set()
        for name in PROGRAMS:
            path = shutil.which(name)
            assert path is not None
            real = Path(path).resolve()
            archive.add(real, f"bin/{name}", recursive=False)
            linked = subprocess.run(["ldd", real], capture_output=True, text=True, check=False).stdout
            libraries |= set(re.findall(r"(/\S+) \(0x", linked))
        for library in sorted(libraries):
            archive.add(Path(library).resolve(), library.lstrip("/"), recursive=False)
        for name, text in {
            "python3": PYTHON3,
            "sshd": "#!/bin/sh\n",
            "curl": "#!/bin/sh\n",
            "gcc": "#!/bin/sh\n",
        }.items():
            info = tarfile.TarInfo(f"usr/bin/{name}")
            info.mode, info.size = 0o755, len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
        temporary = tarfile.TarInfo("tmp")
        temporary.type, temporary.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(temporary)
    return buffer.getvalue()
