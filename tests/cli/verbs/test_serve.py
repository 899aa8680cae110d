"""`homing serve`: what it prints works, and Ctrl-C and SIGTERM end it with 0."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.cli.trained import make_checkpoint
from tests.cli.typed import Homing

# SIGINT as a terminal gives it: whoever runs these tests may ignore it, and children inherit that.
LAUNCHER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
from homing.cli.main import main
sys.argv = ["homing", *sys.argv[1:]]
main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_checkpoint(tmp_path / "models" / "base", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOMING_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HOMING_SERVE_TOKEN", raising=False)
    return tmp_path


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", LAUNCHER, "serve", *arguments, "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_what_it_prints_works_until_it_is_ended(folder: Path, ending: signal.Signals) -> None:
    with started("base") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(6)]
        assert [line for line in lines if not line.startswith("  ")] == [
            "Open in a browser:\n", "For OpenAI API clients:\n", "Example request:\n",
        ]  # fmt: skip
        page, export, curl = (line.strip() for line in lines[1::2])
        url, token = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/#token=([\w-]{20,})", page).groups()  # type: ignore[union-attr]
        assert export == f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={token}"
        assert httpx.get(url, trust_env=False).status_code == 200
        if shutil.which("curl"):
            environment = {**os.environ, "no_proxy": "*"}
            said = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True, env=environment)
            assert json.loads(said.stdout)["object"] == "text_completion"
        process.send_signal(ending)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert err.endswith("Server stopped.\n")
    assert "base model" in err
    assert "Traceback" not in err
    assert token not in err


@pytest.mark.slow
def test_a_given_token_is_not_repeated_and_json_tells_the_address(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOMING_SERVE_TOKEN", "only-i-know-this-one")
    with started("base", "--json") as process:
        assert process.stdout is not None
        document = json.loads(process.stdout.readline())
        assert (document["schema"], document["token"], document["mode"]) == ("homing.serve/1", None, "completion")
        url = f"{document['base_url']}/models"
        given = {"Authorization": "Bearer only-i-know-this-one"}
        assert httpx.get(url, headers=given, trust_env=False).json()["data"][0]["id"] == document["model"]
        assert httpx.get(url, trust_env=False).status_code == 401
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert "only-i-know" not in err


def test_with_a_given_token_the_page_asks_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    from homing.cli.verbs.serve import _print_addresses

    server: Any = SimpleNamespace(
        session=SimpleNamespace(name="mine", is_chat=False), mode="completion", url="http://127.0.0.1:8000",
        token="only-i-know-this-one", is_token_given=True, is_open=False,
    )  # fmt: skip
    _print_addresses(server)
    page, address, *_, curl = capsys.readouterr().out.splitlines()
    assert page == "Open in a browser and enter the token from HOMING_SERVE_TOKEN:"
    assert address == "  http://127.0.0.1:8000/"
    assert '"Authorization: Bearer $HOMING_SERVE_TOKEN"' in curl


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_serve_listens_beyond_loopback_only_on_request(homing: Homing, folder: Path, host: str) -> None:
    code, out, err = homing("serve", "base", "--host", host)
    assert (code, out) == (2, "")
    assert "not a loopback address" in err
    assert f"--host {host} --network" in err


@pytest.mark.parametrize("token", ["short", "with spaces in the token", "ümlaute-in-the-token"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(
    homing: Homing, folder: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HOMING_SERVE_TOKEN", token)
    code, _, err = homing("serve", "base")
    assert code == 2
    assert "Invalid access token in HOMING_SERVE_TOKEN" in err
    assert token not in err


def test_without_its_extra_it_says_what_to_install(
    homing: Homing, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from homing.api import extras

    real = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "uvicorn" else real(name))
    code, _, err = homing("serve", "base")
    assert code == 2
    assert "needs the extra `web`" in err


def test_names_and_addresses() -> None:
    from homing.api.models.serve_model import _is_open, _url
    from homing.web.threaded_server import hosts_for, listen

    assert _url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert _url("::1", 80) == "http://[::1]:80"
    assert [_is_open(host, is_allowed=True) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0")] == [
        False, False, False, True,
    ]  # fmt: skip
    assert hosts_for("0.0.0.0") == ["*"]
    assert hosts_for("192.168.1.5")[-1] == "192.168.1.5"
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", first.getsockname()[1]) as second:
        assert first.getsockname()[1] != second.getsockname()[1] != 0, "another one where it is taken"


def test_a_template_that_cannot_be_used_is_said_without_a_traceback(homing: Homing, folder: Path) -> None:
    tuned = make_checkpoint(folder / "models" / "tuned", folder / "data", phase="sft")
    (tuned / "chat_template.jinja").write_text("{{ raise_exception('not allowed') }}")
    code, out, err = homing("serve", "tuned", "--device", "cpu")
    assert (code, out) == (2, "")
    assert "not allowed" in err
    assert "Traceback" not in err
