"""`homing serve`: what it prints works, and Ctrl-C and SIGTERM end it with 0."""

from __future__ import annotations

import contextlib
import dataclasses
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
from tests.cli.trained import make_checkpoint, make_trained_run
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

    session = SimpleNamespace(name="mine", is_chat=False)
    server: Any = SimpleNamespace(
        session=session, sessions=[session], mode="completion", url="http://127.0.0.1:8000",
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


# --- several models ---


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("first", ("first", None, None)),
        ("first:step-400", ("first", None, "400")),
        ("first:400", ("first", None, "400")),
        ("first:sft", ("first", "sft", None)),
        ("first@20260101-abc:sft:best", ("first@20260101-abc", "sft", "best")),
        ("./models/mine:latest", ("./models/mine", None, "latest")),
    ],
)
def test_a_model_may_be_named_with_phase_and_checkpoint(word: str, parts: tuple[str, str | None, str | None]) -> None:
    from homing.api.models.open_model import ModelWord, read_model_word

    assert read_model_word(word) == ModelWord(*parts)


@pytest.mark.parametrize("word", ["first:", "first:step-", "first:400:sft", ":best"])
def test_a_name_that_cannot_be_read_is_refused_with_examples(homing: Homing, folder: Path, word: str) -> None:
    code, _, err = homing("serve", "base", "--also", word)
    assert code == 2
    assert f"Invalid model: {word!r}" in err
    assert "first:sft:latest" in err


def test_checkpoints_of_one_run_have_readable_names(folder: Path) -> None:
    from homing.api.models.serve_model import model_names
    from homing.lm.generate import read_card

    def card(run_id: str, phase: str, step: int | None) -> Any:
        return dataclasses.replace(base, run=dataclasses.replace(base.run, id=run_id), phase=phase, step=step)

    base: Any = read_card(folder / "models" / "base")
    cards = [
        card("tiny-1", "sft", 800), card("tiny-1", "sft", 400), card("tiny-1", "pretrain", 400),
        card("tiny-2", "sft", 400), card("tiny-2", "sft", 800), card("tiny-1", "sft", 400),
    ]  # fmt: skip
    assert model_names(cards) == [
        "tiny", "tiny:step-400", "tiny:pretrain:step-400", "tiny-2", "tiny-2:step-800", "tiny:step-400-2",
    ]  # fmt: skip


def test_a_model_that_is_named_twice_is_refused(homing: Homing, folder: Path) -> None:
    code, _, err = homing("serve", "base", "--also", "./models/base")
    assert code == 2
    assert "The model ./models/base is served already" in err


def test_a_checkpoint_in_the_name_and_in_an_option_is_refused(homing: Homing, folder: Path) -> None:
    code, _, err = homing("serve", "base:best", "--checkpoint", "latest")
    assert code == 2
    assert "given twice" in err


@pytest.mark.parametrize("duration", ["0", "soon"])
def test_a_time_limit_that_allows_nothing_is_refused(homing: Homing, folder: Path, duration: str) -> None:
    code, _, err = homing("serve", "base", "--request-timeout", duration)
    assert code == 2
    assert "--request-timeout" in err


def test_two_checkpoints_of_one_run_are_served_from_one_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from homing.api.models.serve_model import serve_model

    make_trained_run(folder / "home" / "runs" / "tiny-20260101-000000-abcd", folder / "data")
    with serve_model("tiny", also=["tiny:step-12", "tiny:8", "./models/base"], port=0, device="cpu") as server:
        assert [session.name for session in server.sessions] == [
            "tiny",
            "tiny:step-12",
            "tiny:step-8",
            "tiny:step-12-2",
        ]
        with httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}, trust_env=False
        ) as client:
            cards = client.get("/v1/models").json()["data"]
            vectors = [
                client.post("/v1/embeddings", json={"input": "the cat", "model": card["id"]}).json()["data"][0]
                for card in cards
            ]
    assert [card["step"] for card in cards] == [4, 12, 8, 12]
    assert len({tuple(vector["embedding"]) for vector in vectors}) == 4
