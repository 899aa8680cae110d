"""What every script here leaves behind: figures with the commit and the machine.

    figures -> write_result(name, figures, passed=...) -> results/NAME.json    how fast, how much
    figures -> write_proof(name, figures, passed=...)  -> proofs/NAME.json     that a promise holds

A figure without the commit and the machine it was measured on cannot be compared with the next one. So run these from
a clean commit: a file that was written from changed sources says `is_clean: false` and which files had changed, the
script prints a warning, and a test refuses such a file in the repository. Results and pages may differ, because the
scripts write them. `stale.py` lists which figures are older than the code they are about.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["PROOFS", "RESULTS", "machine", "origin", "write_proof", "write_result"]

RESULTS = Path(__file__).resolve().parent / "results"
PROOFS = RESULTS.parent / "proofs"
MOST_CHANGED = 10  # files that are named
# Their versions move figures; absent ones are left out.
_PACKAGES = ("torch", "numpy", "tokenizers", "rustbpe", "gigatoken", "tiktoken", "pydantic", "ruamel.yaml")


def write_result(name: str, figures: dict[str, Any], *, passed: bool) -> None:
    """Writes the file whole or not at all; `name` is the script's, such as "bad_input"."""
    _write(RESULTS, name, figures, passed)


def write_proof(name: str, figures: dict[str, Any], *, passed: bool) -> None:
    _write(PROOFS, name, figures, passed)


def _write(folder: Path, name: str, figures: dict[str, Any], passed: bool) -> None:
    document = {
        "schema": "homing.result/1",
        "name": name,
        "passed": passed,
        "figures": figures,
        "arguments": [os.path.basename(word) if os.path.isabs(word) else word for word in sys.argv[1:]],
        **origin(),
        "machine": machine(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}.{os.getpid()}.json"
    temporary.write_text(json.dumps(document, indent=2, default=str, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(folder / f"{name}.json")
    if not document["is_clean"]:
        what = ", ".join(document["changed"]) or "no git repository"
        print(f"NOT FROM A CLEAN COMMIT: {folder.name}/{name}.json ({what}). Commit first, then run it again.")


def origin() -> dict[str, Any]:
    """Which code, and when. The commit is that of the start: what changed since was not what ran."""
    began, now = _at_start, _state()
    changed = sorted({*began.changed, *now.changed, *([] if began.commit == now.commit else ["HEAD moved meanwhile"])})
    is_clean = began.commit is not None and not changed
    return {
        "commit": began.commit,
        "is_clean": is_clean,
        **({} if is_clean else {"changed": changed[:MOST_CHANGED]}),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


class State(NamedTuple):
    """Of the checkout."""

    commit: str | None
    changed: tuple[str, ...]  # files that are not as committed, without results and pages


def _state() -> State:
    root = _git("rev-parse", "--show-toplevel")
    lines = (_git("status", "--porcelain", "--untracked-files=all") or "").splitlines()
    paths = [line.strip().split(maxsplit=1)[1].rpartition(" -> ")[2].strip('"') for line in lines]
    changed = [path for path in paths if root and not _is_written(Path(root) / path)]
    return State(_git("rev-parse", "HEAD"), tuple(changed))


def machine() -> dict[str, Any]:
    """What may explain a figure; never the host's name."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "packages": {package: version for package in _PACKAGES if (version := _version(package))},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """None outside a repository, so that a figure never claims a commit it does not know."""
    try:
        done = subprocess.run(
            ["git", "-C", str(RESULTS.parent), *arguments], capture_output=True, text=True, check=False, timeout=30
        )
    except OSError:  # a machine without git
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _is_written(path: Path) -> bool:
    """By these scripts: a result that the one before has left must not make the next one's unclean."""
    return path.parent in (RESULTS, PROOFS) or path.suffix in (".md", ".svg")


_at_start = _state()
