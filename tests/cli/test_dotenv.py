"""`.env` in the folder of the run files: keys that are not exported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from homing import hub_token
from homing.api import dotenv
from homing.cli.run_verb import call
from homing.cli.verb_list import VERBS
from homing.cloud.api_key_table import ACCOUNTS, CREDENTIALS
from homing.errors import UsageError
from homing.world import Retries


def write(folder: Path, text: str, mode: int = 0o600) -> None:
    path = folder / dotenv.FILE
    path.write_text(text)
    path.chmod(mode)


@pytest.mark.acceptance("X2")
def test_exported_wins_over_the_file_and_the_file_over_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "exported")
    for name in ("SHADEFORM_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "")  # so that it is taken back after the test
        monkeypatch.delenv(name)
    write(tmp_path, "# keys\nRUNPOD_API_KEY=file\nexport SHADEFORM_API_KEY='a$b#c'\nHF_TOKEN\n")
    dotenv.load(tmp_path)
    assert os.environ["RUNPOD_API_KEY"] == "exported"
    assert os.environ["SHADEFORM_API_KEY"] == "a$b#c"
    assert "HF_TOKEN" not in os.environ
    said = capsys.readouterr().err
    assert said == "From .env: SHADEFORM_API_KEY\n"


def test_the_keys_of_every_account_may_be_in_the_file() -> None:
    assert {name for account in ACCOUNTS.values() for name in account.keys} <= set(CREDENTIALS)
    assert set(hub_token.NAMES) <= set(CREDENTIALS)


DANGEROUS = (
    "RUNPOD_API_URL", "HOMING_SHADEFORM_URL", "HOMING_FAKE_URL", "HF_ENDPOINT", "MODAL_SERVER_URL", "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI", "HTTPS_PROXY", "https_proxy", "ALL_PROXY",
    "PYTHONPATH", "PYTHONSTARTUP", "LD_PRELOAD", "LD_LIBRARY_PATH", "PATH_OF_MINE", "HOMING_HOME", "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE", "AWS_PROFILE", "AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE",
    "MODAL_CONFIG_PATH", "HOMING_SERVE_TOKEN", "HOMING_DASHBOARD_TOKEN", "UV_INDEX_URL", "PIP_INDEX_URL",
    "GIT_SSH_COMMAND", "CC", "EDITOR",
)  # fmt: skip


@pytest.mark.acceptance("X2")
@pytest.mark.regression("dotenv")
@pytest.mark.parametrize("name", DANGEROUS)
def test_a_file_that_came_with_the_folder_sets_credentials_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    write(tmp_path, f"{name}=http://203.0.113.9/steal\n")
    dotenv.load(tmp_path)
    assert name not in os.environ
    said = capsys.readouterr().err
    assert name in said
    assert "steal" not in said


@pytest.mark.regression("dotenv")
def test_a_file_cannot_send_an_exported_key_elsewhere_or_move_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command, in a folder that a stranger prepared."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNPOD_API_KEY", "rpa_canary")
    monkeypatch.setattr("homing.cloud.providers.rest.RETRIES", Retries(tries=4, first_s=0.01, longest_s=60.0))
    for name in ("RUNPOD_API_URL", "PYTHONPATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    home = os.environ["HOMING_HOME"]
    monkeypatch.delenv("HOMING_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "person"))
    write(tmp_path, f"RUNPOD_API_URL=http://127.0.0.1:9\nPYTHONPATH={tmp_path}\nHOMING_HOME={tmp_path / 'upstream'}\n")
    call(["runs"])
    assert "RUNPOD_API_URL" not in os.environ
    assert "PYTHONPATH" not in os.environ
    assert not (tmp_path / "upstream").exists()
    monkeypatch.setenv("HOMING_HOME", home)


def test_many_ignored_names_are_counted_and_values_are_never_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "".join(f"NAME_{number}=value-canary\n" for number in range(20)))
    dotenv.load(tmp_path)
    said = capsys.readouterr().err
    assert "NAME_0" in said
    assert "and 12 more" in said
    assert "canary" not in said


def test_a_key_of_several_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    write(tmp_path, 'RUNPOD_API_KEY="a\\nb"\n')
    with pytest.raises(UsageError, match="RUNPOD_API_KEY"):
        dotenv.load(tmp_path)
    assert "RUNPOD_API_KEY" not in os.environ


def test_where_there_is_none_nothing_happens(tmp_path: Path) -> None:
    before = dict(os.environ)
    dotenv.load(tmp_path)
    assert dict(os.environ) == before


def test_a_file_that_others_can_read_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "", mode=0o644)
    dotenv.load(tmp_path)
    assert "chmod 600" in capsys.readouterr().err
    write(tmp_path, "", mode=0o600)
    dotenv.load(tmp_path)
    assert capsys.readouterr().err == ""


def test_one_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / dotenv.FILE).write_bytes(b"KEY=\xff\xfe\n")
    with pytest.raises(UsageError, match=r"Cannot read .*\.env"):
        dotenv.load(tmp_path)


@pytest.mark.acceptance("X2")
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_reads_it_from_the_folder_it_is_called_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """`.env` is read before anything else; here it is unreadable."""
    (tmp_path / dotenv.FILE).write_bytes(b"KEY=\xff\xfe\n")
    monkeypatch.chdir(tmp_path)
    assert call([verb]) == 2
    said = capsys.readouterr().err
    assert "Cannot read" in said
    assert "/.env." in said
