"""`homing image build`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, lay_out, typing
from tests.doubles.docker import Docker

from homing import __version__

DIGEST = "sha256:" + "7" * 64


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    made = Docker(tmp_path / "docker")
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    monkeypatch.setattr("homing.cloud.launch.build_image._POLL_S", 0.02)
    return made


@pytest.fixture
def cli(tmp_path: Path, docker: Docker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Homing:
    lay_out(tmp_path, monkeypatch, steps=1, step_s=0.0)
    return typing(capsys, monkeypatch)


def nothing_was_rented(home: Path) -> bool:
    return not (home / "ledger.sqlite").exists()


def test_it_is_built_tried_and_pushed_and_the_next_verb_names_what_was_pushed(cli: Homing, docker: Docker) -> None:
    done = cli("image", "build", "moss", "--push", "me/train:1")
    assert done.code == 0, done.err
    assert "Successfully tagged me/train:1" in done.err
    assert "works: torch 2.13.0" in done.err
    assert f"homing launch moss --set cloud.image=me/train@{DIGEST}" in done.err
    assert docker.state["pushed"] == ["me/train:1"]
    assert docker.state["containers"] == {}
    (ran,) = docker.calls("run")
    assert ran[ran.index("--name") + 1] == "training"


def test_the_document_names_folder_versions_and_digest(cli: Homing, docker: Docker) -> None:
    pushed = cli("image", "build", "moss", "--push", "127.0.0.1:5000/me/train", "--json").json
    assert pushed["schema"] == "homing.image/1"
    assert pushed["pushed"] == f"127.0.0.1:5000/me/train@{DIGEST}"
    assert pushed["id"].startswith("sha256:")
    built = cli("image", "build", "moss", "--json").json
    assert (built["image"], built["pushed"]) == ("homing-moss", None)
    assert built["lock_sha256"] == pushed["lock_sha256"]


@pytest.mark.acceptance(44)
def test_without_docker_only_the_folder_is_written(cli: Homing, docker: Docker) -> None:
    done = cli("image", "build", "moss", "--no-docker", "--push", "me/train:1", "--folder", "there")
    assert done.code == 0
    assert docker.state["calls"] == []
    assert sorted(os.listdir("there")) == [
        "Dockerfile",
        "boot.json",
        f"homing-{__version__}-py3-none-any.whl",
        "lock.txt",
    ]
    assert "docker build -t me/train:1 there && docker push me/train:1" in done.err


@pytest.mark.parametrize(
    ("verb", "words", "code", "fix"),
    [
        ("push", "denied: requested access to the resource is denied", 4, "docker login"),
        ("push", "no basic auth credentials", 4, "docker login"),
        ("build", "E: Unable to locate package openssh-server", 1, "docker build"),
        ("version", "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", 2, "--no-docker"),
    ],
)
def test_an_error_of_docker_is_quoted_and_nothing_is_rented(
    cli: Homing, docker: Docker, homing_home: Path, verb: str, words: str, code: int, fix: str
) -> None:
    docker.fail(verb, words)
    done = cli("image", "build", "moss", "--push", "ghcr.io/me/train:1")
    assert done.code == code
    assert words in done.err
    assert fix in done.err
    assert docker.state["pushed"] == []
    assert nothing_was_rented(homing_home)


def test_no_docker_at_all_says_how_to_get_it_or_do_without(
    cli: Homing, docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docker.bin / "docker").unlink()
    monkeypatch.setenv("PATH", str(docker.bin))
    done = cli("image", "build", "moss")
    assert done.code == 2
    assert "Docker is not installed" in done.err
    assert "--no-docker" in done.err


@pytest.mark.acceptance(117, 147)
def test_a_container_that_dies_is_not_pushed_and_its_log_can_still_be_read(cli: Homing, docker: Docker) -> None:
    docker.fail("run", "ModuleNotFoundError: No module named 'torch'")
    done = cli("image", "build", "moss", "--push", "me/train:1")
    assert done.code == 1
    assert "No module named 'torch'" in done.err
    assert "docker logs training" in done.err
    assert docker.state["containers"]["training"]["log"].startswith("ModuleNotFoundError")
    assert docker.state["pushed"] == []
    docker.heal()
    assert cli("image", "build", "moss", "--push", "me/train:1").code == 0


def test_a_foreign_container_of_that_name_is_left_alone(cli: Homing, docker: Docker) -> None:
    docker.hold("training", "upstream")
    done = cli("image", "build", "moss")
    assert done.code == 1
    assert "is already in use" in done.err
    assert docker.state["containers"]["training"]["labels"] == ["upstream"]


@pytest.mark.parametrize(
    "name", ["yourusername/llm-finetuning:latest", "Me/Train", "me/train@sha256:12", "--tls", "a b"]
)
def test_a_name_that_cannot_be_pushed_to_is_refused_before_anything_is_done(
    cli: Homing, docker: Docker, name: str
) -> None:
    done = cli("image", "build", "moss", f"--push={name}")
    assert done.code == 2
    assert docker.state["calls"] == []
    assert not Path("image").exists()
