"""How many files of homing one command runs through: what a reader who follows that command has to open."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import pytest

# Runs a command, then writes the files in which a function was called. Modules and class bodies, which run on import,
# do not count, nor do other threads.
WALK = """
import inspect, json, os, sys
import homing
from homing.cli.main import main

package, walked = os.path.dirname(homing.__file__) + os.sep, set()

def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(package):
        walked.add(code.co_filename[len(package):])

report, *sys.argv = sys.argv[1:]
sys.setprofile(note)
try:
    main()
finally:
    sys.setprofile(None)
    with open(report, "w") as file:
        json.dump(sorted(walked), file)
"""
_TRAINED_WITHIN_S = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def homing(folder: Path, *argv: str) -> str:
    return run(folder, sys.executable, "-m", "homing.cli", *argv)


def walked(folder: Path, *argv: str) -> list[str]:
    """Run a command that must succeed, and return the files that it runs through."""
    report = folder / "walked.json"
    run(folder, sys.executable, "-c", WALK, str(report), "homing", *argv)
    return list(json.loads(report.read_text()))


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, env={**os.environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[-3:]}: {done.stdout[-2000:]} {done.stderr[-3000:]}"
    return done.stdout


def wait_until_done(folder: Path) -> None:
    deadline = time.monotonic() + _TRAINED_WITHIN_S
    while json.loads(homing(folder, "runs", "--json"))["runs"][0]["state"] != "done":
        assert time.monotonic() < deadline
        time.sleep(1.0)


def test_no_command_on_the_way_to_a_model_runs_through_more_files_than_a_reader_can_follow(tmp_path: Path) -> None:
    """These numbers only go down: before a file is added to a command's way, look for a detour to remove."""
    text = tmp_path / "books/shakespeare.txt"
    text.parent.mkdir()
    whole = lzma.decompress((files("homing.presets") / "texts/shakespeare.txt.xz").read_bytes())
    text.write_bytes(whole[:400_000])
    homing(tmp_path, "new", "bot", "--from", "tiny", "--text", "books")
    steps = ("--set", "phases.0.steps=20")
    prep = walked(tmp_path, "prep", "bot")
    train = walked(tmp_path, "train", "bot", *steps)
    launch = walked(tmp_path, "launch", "bot", *steps, "--cloud", "local", "--spend-limit", "1", "--yes")
    wait_until_done(tmp_path)
    fetch = walked(tmp_path, "fetch", "bot")
    homing(tmp_path, "destroy", "bot", "--yes")
    counts = {"prep": len(prep), "train": len(train), "launch": len(launch), "fetch": len(fetch)}
    most = {"prep": 52, "train": 40, "launch": 80, "fetch": 45}
    assert {name: count for name, count in counts.items() if count > most[name]} == {}, (prep, train, launch, fetch)
