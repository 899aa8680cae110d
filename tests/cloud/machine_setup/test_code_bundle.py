"""The exact source tree as a wheel, and the versions it depends on."""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import homing
from homing.cloud.machine_setup import code_bundle
from homing.errors import UsageError
from homing.world import Completed, World

ROOT = Path(__file__).parents[3]


@pytest.mark.acceptance(34)
def test_the_same_tree_gives_the_same_bytes() -> None:
    first, second = code_bundle.wheel_bytes(World()), code_bundle.wheel_bytes(World())
    assert hashlib.sha256(first).hexdigest() == hashlib.sha256(second).hexdigest()


@pytest.mark.acceptance(34)
def test_every_file_of_the_package_is_in_it_and_nothing_else() -> None:
    package = Path(homing.__file__).parent
    with zipfile.ZipFile(io.BytesIO(code_bundle.wheel_bytes(World()))) as archive:
        inside = {name for name in archive.namelist() if name.startswith("homing/")}
        for name in inside:
            assert archive.read(name) == (package.parent / name).read_bytes()
        record = archive.read(f"homing-{homing.__version__}.dist-info/RECORD").decode()
    here = {str(path.relative_to(package.parent)) for path in package.rglob("*") if path.is_file()}
    assert inside == {name for name in here if "__pycache__" not in name}
    assert {line.split(",")[0] for line in record.splitlines()} >= inside


PLANTED = (
    *(".env", "cloud/.env", ".git/config", "id_ed25519", "cloud/id_rsa.pem", "ledger.sqlite", "notes.txt", "core"),
    *("presets/mine.yaml", "presets/.private.yaml", "lm/train.py.bak", "lm/.secret.py", "run-1/settings.py", "x.pyc"),
    *("web/dashboard/page.html~", "cloud/measured.json.swp", ".ssh/config.py", "lm/model.safetensors", "lib.so"),
)


@pytest.mark.regression("wheel-contents")
def test_other_files_in_the_package_folder_are_not_sent() -> None:
    class Planted(World):
        def walk(self, path):  # type: ignore[no-untyped-def]
            return sorted([*super().walk(path), *PLANTED])

        def read(self, path, *messages):  # type: ignore[no-untyped-def]
            name = str(path).partition("/homing/")[2]
            return b"canary" if name.endswith(PLANTED) and not Path(path).exists() else super().read(path, *messages)

    with zipfile.ZipFile(io.BytesIO(code_bundle.wheel_bytes(Planted()))) as archive:
        sent = {name.removeprefix("homing/") for name in archive.namelist()}
        assert not sent & set(PLANTED)
        assert not [name for name in archive.namelist() if b"canary" in archive.read(name) and "test" not in name]


def test_every_data_file_of_the_repository_is_sent_and_every_name_on_the_list_is_there() -> None:
    """A new data file must be added to DATA_FILES, or instances would lack it."""
    package = Path(homing.__file__).parent
    tracked = subprocess.run(["git", "-C", package, "ls-files", "."], capture_output=True, text=True, check=False)
    if tracked.returncode or not tracked.stdout:
        pytest.skip("not in a repository")
    assert {name for name in tracked.stdout.splitlines() if not name.endswith(".py")} == code_bundle.DATA_FILES


@pytest.mark.slow
def test_pip_installs_it_and_its_program_starts(tmp_path: Path) -> None:
    wheel = tmp_path / code_bundle.WHEEL
    wheel.write_bytes(code_bundle.wheel_bytes(World()))
    target = tmp_path / "site"
    argv = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(argv, check=True, capture_output=True, timeout=240)
    code = "import homing, sys; print(homing.__file__)"
    env = {"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip().startswith(str(target))
    assert (target / "bin" / "homing").exists()


@pytest.mark.acceptance(76)
def test_the_lock_pins_what_was_tested_by_hash_and_keeps_torch_apart() -> None:
    found = code_bundle.lock("file:/store")
    pinned = dict(line.split()[0].split("==") for line in found.lines)
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name in ("numpy", "tokenizers", "safetensors", "httpx"):
        assert pinned[name] == tested[name]
    assert "torch" not in pinned
    assert "pytest" not in pinned, "only what training needs"
    assert "pyarrow" not in pinned, "text is read at home"
    assert not [name for name in pinned if name.startswith("nvidia")]
    assert found.torch_version == f"torch=={tested['torch']}"
    assert [line for line in found.torch if line.startswith("nvidia-cudnn")], "CUDA's packages come with it"
    assert found.uv.startswith("uv==")


def test_the_lock_has_what_the_store_needs() -> None:
    assert any(line.startswith("boto3==") for line in code_bundle.lock("s3://bucket/x").lines)
    assert not any(line.startswith("boto3==") for line in code_bundle.lock("file:/x").lines)
    assert any(line.startswith("modal==") for line in code_bundle.lock("modal:volume").lines)
    assert any(line.startswith("huggingface-hub==") for line in code_bundle.lock("hf:me/x").lines)


@pytest.mark.regression("instance-hashes")
@pytest.mark.parametrize("store", ["file:/x", "s3://bucket/x", "hf:me/x", "modal:volume"])
def test_every_package_that_an_instance_installs_has_a_hash(store: str) -> None:
    for line in code_bundle.lock(store).lines:
        assert re.fullmatch(r"[a-z0-9._-]+==[\w.+!]+( --hash=sha256:[0-9a-f]{64})+", line), line


def test_torch_with_all_of_cuda_and_uv_have_hashes() -> None:
    found = code_bundle.lock("file:/x")
    for line in (*found.torch, found.uv):
        assert re.fullmatch(r"[a-z0-9._-]+==[\w.+!]+( --hash=sha256:[0-9a-f]{64})+", line), line


def test_the_generated_file_fits_the_package_and_names_no_index() -> None:
    """After a change of pyproject.toml or constraints.txt: python tools/make_requirements.py"""
    text = (ROOT / "src/homing" / code_bundle.REQUIREMENTS).read_text()
    assert "://" not in text
    pinned = dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", text, re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for wanted in (*project["dependencies"], *extras["lm"], *extras["aws"], *extras["hub"], *extras["modal"]):
        requirement = Requirement(wanted)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), wanted
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {name for name, version in pinned.items() if tested.get(name, version) != version} == set()


def test_the_range_of_torch_is_the_one_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    least, below = code_bundle.TORCH_RANGE
    assert f"torch>={least},<{below}" in extras["lm"]


class Git(World):
    def __init__(self, status: str, *, is_known: bool = True) -> None:
        self.status, self.is_known = status, is_known

    def run(self, argv, timeout_s, env=None, stdin=""):  # type: ignore[no-untyped-def]
        if "ls-files" in argv:
            return Completed(0 if self.is_known else 1, "", "")
        return Completed(0, self.status if "status" in argv else "c0ffee\n", "")


@pytest.mark.acceptance(46)
def test_a_tree_with_changes_is_refused_only_when_asked_for() -> None:
    assert code_bundle.tree_state(Git(" M src/homing/world.py\n?? new.py\n")) == (
        "c0ffee",
        ["src/homing/world.py", "new.py"],
    )
    with pytest.raises(UsageError, match="2 uncommitted changes") as refused:
        code_bundle.check_committed(Git(" M src/homing/world.py\n?? new.py\n"))
    assert "new.py" in refused.value.why
    code_bundle.check_committed(Git(""))


def test_a_package_installed_inside_another_repository_has_no_commit() -> None:
    assert code_bundle.tree_state(Git(" M other.py\n", is_known=False)) == ("", [])


def test_packages_vendored_by_setuptools_are_not_in_the_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vendored = tmp_path / "setuptools/_vendor"
    (vendored / "tomli-2.4.0.dist-info").mkdir(parents=True)
    (vendored / "tomli-2.4.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: tomli\nVersion: 2.4.0\n")
    monkeypatch.syspath_prepend(str(vendored))
    assert not any(line.startswith("tomli==") for line in code_bundle.lock("hf:me/x").lines)
