"""`homing` as a person types it, in this process: what it leaves with, and what it said."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from homing.cli.main import main

Homing = Callable[..., tuple[int, str, str]]  # the words, and stdin -> exit code, stdout, stderr


def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Homing:
    def call(*arguments: str, stdin: str | bytes = "") -> tuple[int, str, str]:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "argv", ["homing", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call
