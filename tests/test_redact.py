"""Keys and passwords never stand in what is printed or logged."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from homing.redact import RedactedFormatter, redact, register

SECRET = "CANARY/0123+456"


@pytest.mark.parametrize(
    "name",
    ["RUNPOD_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "MODAL_TOKEN_ID",
     "MODAL_TOKEN_SECRET", "WANDB_API_KEY", "HUGGINGFACEHUB_API_TOKEN", "MLFLOW_TRACKING_PASSWORD", "HOMING_FAKE_KEY",
     "HOMING_SERVE_TOKEN", "MY_PASSWORD", "TOKEN", "GOOGLE_APPLICATION_CREDENTIALS"],
)  # fmt: skip
def test_the_value_of_a_variable_that_holds_a_secret_is_hidden(name: str) -> None:
    assert redact(f"with {SECRET}.", {name: SECRET}) == "with ***."


@pytest.mark.parametrize("name", ["PATH", "HOME", "KEYBOARD_LAYOUT", "TOKENIZERS_PARALLELISM", "PUBLIC_KEYS", "MONKEY"])
def test_ordinary_variables_are_left_alone(name: str) -> None:
    assert redact(f"with {SECRET}.", {name: SECRET}) == f"with {SECRET}."


def test_short_values_and_places_of_key_files_are_no_secrets(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("x")
    assert redact(f"true {path}", {"A_KEY": "true", "SSH_KEY": str(path)}) == f"true {path}"


def test_a_secret_inside_another_and_each_line_of_a_long_one_is_hidden() -> None:
    environment = {"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefgh-ijkl", "C_KEY": "first line of it\nsecond line of it"}
    assert redact("abcdefgh-ijkl abcdefgh second line of it", environment) == "*** *** ***"


def test_a_key_from_a_file_is_hidden_once_it_was_registered() -> None:
    assert redact(f"x {register('from-a-file-CANARY')} y", {}) == "x *** y"


def test_a_password_in_an_address_is_hidden() -> None:
    assert redact("git+https://me:CANARY@host/x http://host:80/y", {}) == "git+https://***@host/x http://host:80/y"


def test_a_log_hides_them_in_environment_and_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", SECRET)
    try:
        raise OSError(f"refused {SECRET}")
    except OSError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "got %s", (SECRET,), sys.exc_info())
    text = RedactedFormatter("%(message)s").format(record)
    assert "CANARY" not in text
    assert "OSError: refused ***" in text


def test_an_uncaught_exception_hides_secrets() -> None:
    code = f"from homing.redact import redact_crashes\nredact_crashes()\nraise ValueError('{SECRET}')"
    env = {"A_TOKEN": SECRET, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "CANARY" not in done.stderr
    assert "ValueError: ***" in done.stderr
