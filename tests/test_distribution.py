"""The wheel and the sdist: what they contain, and that the wheel runs in a fresh environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from homing.cloud.machine_setup.code_bundle import DATA_FILES

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Distributions:
    wheel: Path
    sdist: Path


def build(source: Path, out: Path, *targets: str) -> None:
    """Builds with the hatchling of this environment, because an isolated build would need a package index."""
    argv = [sys.executable, "-m", "hatchling", "build", "--directory", str(out), *targets]
    done = subprocess.run(argv, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    pytest.importorskip("hatchling", reason="hatchling is not installed: make setup")
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out)
    return Distributions(out / f"homing-{VERSION}-py3-none-any.whl", out / f"homing-{VERSION}.tar.gz")


@pytest.fixture(scope="module")
def homing(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installs the wheel into an empty virtual environment and returns its `homing` program.

    The dependencies come from the environment of the tests, by a .pth file, so no package index is needed. Python does
    not read the .pth files in that folder, so the editable install there does not hide the wheel.
    """
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", distributions.wheel], check=True, capture_output=True)
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    Path(site, "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    found = subprocess.run(
        [python, "-c", "import homing; print(homing.__file__)"], capture_output=True, text=True, check=True, env=clean()
    )
    assert Path(found.stdout.strip()).is_relative_to(folder), "the wheel, not the source tree"
    return folder / "bin/homing"


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def call(program: Path, *words: str, cwd: Path) -> str:
    done = subprocess.run([program, *words], cwd=cwd, env=clean(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def test_the_wheel_contains_every_module_and_data_file(distributions: Distributions) -> None:
    package = ROOT / "src/homing"
    modules = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    names = set(zipfile.ZipFile(distributions.wheel).namelist())
    assert {f"homing/{name}" for name in modules | DATA_FILES} - names == set()
    assert {name for name in names if not name.startswith(("homing/", f"homing-{VERSION}.dist-info/"))} == set()


def test_the_sdist_builds_the_same_wheel(distributions: Distributions, tmp_path: Path) -> None:
    with tarfile.open(distributions.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"homing-{VERSION}"
    assert {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "tests", "docs"} <= set(os.listdir(source))
    build(source, tmp_path / "dist", "--target", "wheel")
    again = zipfile.ZipFile(tmp_path / "dist" / distributions.wheel.name)
    assert sorted(again.namelist()) == sorted(zipfile.ZipFile(distributions.wheel).namelist())


def test_an_installed_wheel_prints_its_version(homing: Path, tmp_path: Path) -> None:
    assert call(homing, "--version", cwd=tmp_path).split()[-1] == VERSION


@pytest.mark.acceptance(141, "P6", "P7")
def test_an_installed_wheel_runs_quickstart(homing: Path, tmp_path: Path) -> None:
    """Trains, fetches, generates and leaves nothing billing. 260 steps beat a bigram model by the margin that the
    preset's 600 must reach in benchmarks/quickstart.py."""
    figures = json.loads(call(homing, "quickstart", "--yes", "--json", "--steps", "260", cwd=tmp_path))
    assert figures["val_loss"] < 0.95 * figures["bigram_nats"]
    assert figures["sample"].strip()
    assert float(figures["spend_usd"]) > 0
    assert json.loads((tmp_path / "homing-quickstart" / "quickstart.json").read_text())["run"] == figures["run"]

    runs = json.loads(call(homing, "runs", "--json", cwd=tmp_path))
    assert [run["state"] for run in runs["runs"]] == ["done"]
    assert runs["billing"] == []
