"""`homing dashboard`: what it prints works, it needs no torch, and signals end it with 0 while a page is open."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.cli.typed import Homing

# SIGINT as a terminal gives it: whoever runs these tests may ignore it, and children inherit that.
LAUNCHER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
sys.modules["torch"] = None
from homing.cli.main import main
sys.argv = ["homing", *sys.argv[1:]]
main()
"""


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "dashboard", "--port", "0", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_what_it_prints_works_until_it_is_ended(
    homing_home: Path, monkeypatch: pytest.MonkeyPatch, ending: signal.Signals
) -> None:
    monkeypatch.delenv("HOMING_DASHBOARD_TOKEN", raising=False)
    with started() as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "Open in a browser:\n"
        page = process.stdout.readline().strip()
        found = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/#token=([\w-]{20,})", page)
        assert found is not None, page
        url, token = found.groups()
        given = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=url, headers=given, trust_env=False, timeout=60) as client:
            assert client.get("/").status_code == 200
            assert client.get("/api/runs").json()["money"]["home"] == str(homing_home)
            with client.stream("GET", "/api/runs/live") as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(ending)
                for _ in lines:  # to its proper end
                    pass
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert err.endswith("Dashboard stopped; all runs continue.\n")
    assert "enforces no limits and destroys no instances" in err
    assert "Traceback" not in err
    assert token not in err


@pytest.mark.slow
def test_a_given_token_is_not_repeated_and_json_tells_the_address(
    homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOMING_DASHBOARD_TOKEN", "only-i-know-this-one")
    with started("--json") as process:
        assert process.stdout is not None
        document = json.loads(process.stdout.readline())
        assert (document["schema"], document["token"]) == ("homing.dashboard/1", None)
        given = {"Authorization": "Bearer only-i-know-this-one"}
        assert httpx.get(f"{document['url']}/api/runs", headers=given, trust_env=False).status_code == 200
        assert httpx.get(f"{document['url']}/api/runs", trust_env=False).status_code == 401
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert "only-i-know" not in err


def test_a_token_that_no_header_can_carry_is_refused(homing: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOMING_DASHBOARD_TOKEN", "with spaces in the token")
    code, _, err = homing("dashboard")
    assert code == 2
    assert "Invalid access token in HOMING_DASHBOARD_TOKEN" in err
    assert "with spaces" not in err


def test_without_its_extra_it_says_what_to_install(homing: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    from homing.api import extras

    real = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "uvicorn" else real(name))
    code, _, err = homing("dashboard")
    assert code == 2
    assert "needs the extra `web`" in err
