"""What to type for more of homing, however it was installed."""

from __future__ import annotations

import importlib.metadata
import json
from types import SimpleNamespace
from typing import Any

import pytest

from homing.errors import MissingExtra
from homing.pip_command import pip_install, pip_upgrade


def installed(monkeypatch: pytest.MonkeyPatch, written: Any) -> None:
    text = written if written is None or isinstance(written, str) else json.dumps(written)
    there = SimpleNamespace(read_text=lambda name: text if name == "direct_url.json" else None)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: there)


@pytest.mark.parametrize(
    ("written", "command"),
    [
        (None, "pip install 'homing[aws]'"),
        ({"url": "file:///home/ada/homing", "dir_info": {"editable": True}}, "pip install -e '/home/ada/homing[aws]'"),
        ({"url": "file:///home/ada/my%20tree", "dir_info": {}}, "pip install '/home/ada/my tree[aws]'"),
        ({"url": "file:///tmp/homing-1.whl", "archive_info": {}}, "pip install 'homing[aws]'"),
        ({"url": "https://host.invalid/homing", "vcs_info": {}}, "pip install 'homing[aws]'"),
        ("no json", "pip install 'homing[aws]'"),
    ],
)
def test_an_extra_comes_from_where_homing_came_from(
    monkeypatch: pytest.MonkeyPatch, written: Any, command: str
) -> None:
    installed(monkeypatch, written)
    assert pip_install("aws") == command
    assert MissingExtra("launch", "aws", "boto3").fix == command


def test_options_come_before_and_a_folder_is_not_made_newer_by_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    assert pip_install("lm", "--upgrade") == "pip install --upgrade 'homing[lm]'"
    assert pip_upgrade() == "pip install --upgrade homing"
    installed(monkeypatch, {"url": "file:///home/ada/homing", "dir_info": {"editable": True}})
    assert pip_install("lm", "--upgrade") == "pip install --upgrade -e '/home/ada/homing[lm]'"
    assert pip_upgrade() == "Update /home/ada/homing, then: pip install -e /home/ada/homing"
