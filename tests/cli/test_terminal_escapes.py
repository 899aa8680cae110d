"""Whatever others wrote (logs, events, samples, reasons, names), no verb lets it move the cursor of a terminal."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with

from homing.wire import file_names

cli = cli_with(steps=6)
EVIL = "\x1b]0;evil title\x07\x1b[2J\x1b[31mred\x9b5m\x08\x7f\u202egnp\r"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def poison(store: Path) -> None:
    """Every text in the run's record, changed by an attacker who can write to its store; still valid JSON."""
    (run,) = (store / "runs").iterdir()
    (run / "logs/trainer.log").write_text(f"{EVIL} trainer begins\n{EVIL}\n")
    (run / "logs/agent.log").write_text(f"{EVIL}\n")
    for name in (file_names.EVENTS, file_names.OUTCOME, file_names.HEARTBEAT):
        lines = []
        for line in (run / name).read_text().splitlines():
            body = json.loads(line)
            for key in ("text", "reason", "problem", "log_tail"):
                if isinstance(body.get(key), str):
                    body[key] = f"{EVIL}{body[key]}{EVIL}"
            lines.append(json.dumps(body))
        (run / name).write_text("\n".join(lines) + "\n")


@pytest.mark.regression("terminal-escapes")
@pytest.mark.slow
def test_no_verb_passes_on_what_a_store_says_to_a_terminal(cli: Homing, homing_home: Path) -> None:
    assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    cli("watch", "moss", "--every", "1")
    poison(homing_home / "store")
    seen = ""
    for words in (
        *(("logs", "moss"), ("logs", "moss", "agent"), ("watch", "moss"), ("status", "moss"), ("runs",), ("ledger",)),
        *(("report", "moss"), ("reconcile",), ("fetch", "moss"), ("store", "ls"), ("destroy", "moss", "--yes")),
    ):
        said = cli(*words)
        assert not CONTROL.search(said.out), f"{words}: {said.out!r}"
        assert not CONTROL.search(said.err), f"{words}: {said.err!r}"
        seen += said.out + said.err
    assert "trainer begins" in seen, "the text itself is shown"
    exact = [json.loads(line)["line"] for line in cli("logs", "moss", "--json").out.splitlines()]
    assert exact[0].startswith(EVIL[:8]), "--json is exact"


@pytest.mark.regression("terminal-escapes")
def test_an_error_of_a_provider_is_shown_without_its_control_characters(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    from homing.errors import ProviderRefused

    def refuse(*_: object, **__: object) -> None:
        raise ProviderRefused(what=f"no {EVIL}", why=f"{EVIL}\nsecond line", fix=f"try {EVIL}")

    monkeypatch.setattr("homing.api.dotenv.load", refuse)
    said = cli("runs")
    assert said.code == 4
    assert not CONTROL.search(said.err)
    assert "second line" in said.err


@pytest.mark.regression("crash-secrets")
def test_a_crash_shows_no_key(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug reports are pasted: what a mistake of ours prints may hold whatever was in its hands."""
    keys = {
        "RUNPOD_API_KEY": "rpa_CANARY0123456789",
        "AWS_SECRET_ACCESS_KEY": "wJalr/CANARY+bPxRfi",
        "HF_TOKEN": "hf_CANARYabc",
    }
    for name, value in keys.items():
        monkeypatch.setenv(name, value)

    def crash(*_: object, **__: object) -> None:
        secrets = " ".join(os.environ[name] for name in keys)
        raise RuntimeError(f"asked https://me:CANARYpassword@host/x with {secrets}")

    monkeypatch.setattr("homing.api.dotenv.load", crash)
    said = cli("runs")
    assert "RuntimeError" in said.err
    assert "https://***@host/x" in said.err
    assert "CANARY" not in said.err + said.out
