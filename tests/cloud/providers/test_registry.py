"""Which providers are used if none is named, without loading those that have no account here."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from homing.cloud.providers.registry import PROVIDERS, configured
from homing.world import World

NEED_NONE = ["local", "ssh"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a person without any account."""
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "MODAL_CONFIG_PATH", "RUNPOD_API_KEY", "SHADEFORM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HOMING_FAKE_URL", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "person"))
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("name", "account"),
    [
        ("aws", {"home": "aws"}),
        ("fake", {"HOMING_FAKE_URL": "http://127.0.0.1:1"}),
        ("modal", {"MODAL_TOKEN_ID": "ak-1", "MODAL_TOKEN_SECRET": "as-1"}),
        ("modal", {"MODAL_CONFIG_PATH": "~/elsewhere.toml", "person": "elsewhere.toml"}),
        ("modal", {"person": ".modal.toml"}),
        ("runpod", {"RUNPOD_API_KEY": "rpa_1"}),
        ("runpod", {"person": ".runpod/config.toml"}),
        ("shadeform", {"SHADEFORM_API_KEY": "1"}),
    ],
)
def test_every_kind_of_account_is_seen(
    name: str, account: dict[str, str], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert configured(home, World()) == NEED_NONE
    for key, value in account.items():
        if key in ("home", "person"):
            path = tmp_path / key / value
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text('apikey = "rpa_1"')
        else:
            monkeypatch.setenv(key, value)
    assert configured(home, World()) == [each for each in PROVIDERS if each in [*NEED_NONE, name]]
    module, kind = PROVIDERS[name][0].split(":")
    assert getattr(importlib.import_module(module), kind).is_configured(home, World()), "the adapter says so too"


def test_a_provider_without_an_account_is_not_loaded(home: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from homing.cloud.providers.registry import configured\n"
        "from homing.world import World\n"
        f"configured(Path({str(home)!r}), World())\n"
        "print([name for name in ('aws', 'fake', 'modal', 'runpod', 'shadeform')"
        " if f'homing.cloud.providers.{name}' in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.strip() == "[]"
