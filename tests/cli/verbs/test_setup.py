"""`homing setup`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, typing
from tests.doubles.s3_servers import ACCESS_KEY, SECRET_KEY, moto

from homing.cloud.home import Home
from homing.cloud.setup import write_key
from homing.world import Retries, World


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Homing:
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "RUNPOD_API_KEY", "SHADEFORM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return typing(capsys, monkeypatch)


def test_without_a_key_it_says_where_to_get_one_and_which_line_to_write(cli: Homing) -> None:
    said = cli("setup", "shadeform")
    assert said.code == 2
    assert "https://platform.shadeform.ai/settings/api" in said.err
    assert "SHADEFORM_API_KEY=..." in said.err


@pytest.mark.acceptance(80)
def test_a_store_is_made_after_asking_and_a_second_time_is_left_as_it_is(cli: Homing, tmp_path: Path) -> None:
    url = f"file:{tmp_path}/kept"
    dry = cli("setup", "local", "--store", url, "--dry-run")
    assert f"to create: the store {url}" in dry.err
    assert not (tmp_path / "kept").exists()
    assert cli("setup", "local", "--store", url).code == 2  # no terminal to answer on
    assert not (tmp_path / "kept").exists()
    done = cli("setup", "local", "--store", url, "--yes", "--json")
    assert done.code == 0, done.err
    assert done.json["steps"] == [{"text": f"the store {url}", "is_done": True}]
    (tmp_path / "kept/mine").write_text("kept")
    again = cli("setup", "local", "--store", url)
    assert again.code == 0
    assert f"exists: the store {url}" in again.err
    assert (tmp_path / "kept/mine").read_text() == "kept"
    assert "Next: homing offers --provider local" in again.err


def test_an_unknown_provider_lists_the_known_ones(cli: Homing) -> None:
    said = cli("setup", "nimbus")
    assert said.code == 2
    assert "local" in said.err


def test_setup_writes_the_key_to_a_private_file_and_replaces_the_old_one(tmp_path: Path, homing_home: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("OTHER=1\nexport RUNPOD_API_KEY=old\n")
    write_key(path, "RUNPOD_API_KEY", "new", Home(homing_home, World()))
    assert path.read_text() == "OTHER=1\nRUNPOD_API_KEY=new\n"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.acceptance(80)
def test_a_person_is_asked_for_the_key_which_is_then_used(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("getpass.getpass", lambda prompt: "sf-canary")
    monkeypatch.setenv("HOMING_SHADEFORM_URL", "http://127.0.0.1:9")  # a closed port
    monkeypatch.setattr("homing.cloud.providers.rest.RETRIES", Retries(tries=4, first_s=0.01, longest_s=60.0))
    said = cli("setup", "shadeform", "--dry-run")
    assert said.code == 2  # a dry run asks for nothing
    monkeypatch.setattr("homing.cli.output.ask", lambda question, yes: False)
    said = cli("setup", "shadeform")
    assert said.code == 4
    assert Path(".env").read_text() == "SHADEFORM_API_KEY=sf-canary\n"
    assert "sf-canary" not in said.out + said.err
    monkeypatch.delenv("SHADEFORM_API_KEY", raising=False)


@pytest.mark.acceptance(80)
@pytest.mark.slow
def test_a_bucket_is_made_after_asking_and_tried_out(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    with moto() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        url = "s3://moss-bucket/runs?region=eu-west-1"
        assert "to create: the store" in cli("setup", "local", "--store", url, "--dry-run").err
        done = cli("setup", "local", "--store", url, "--yes")
        assert done.code == 0, done.err
        again = cli("setup", "local", "--store", url)
        assert again.code == 0
        assert f"exists: the store {url}" in again.err


def test_without_a_provider_it_lists_them(cli: Homing) -> None:
    said = cli("setup")
    assert said.code == 2
    assert "runpod" in said.err
    assert "fix homing setup runpod" in said.err
