"""Result files: from which commit, whether it was clean, and which are older than the code they are about."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
# Written from changed sources before that was refused. A script that runs again takes its file off this list: it may
# only become shorter.
FROM_CHANGED_SOURCES = {
    "proofs/chat_faults", "proofs/kill_points", "proofs/preempt", "proofs/simulate",
    "proofs/store_faults",
    "results/bad_input", "results/decode", "results/engine", "results/going_on", "results/gpu-first-run",
    "results/graphs", "results/hours", "results/lora", "results/persona", "results/prep", "results/quality",
    "results/rl", "results/save_stall", "results/sweep",
}  # fmt: skip


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stale() -> ModuleType:
    return load(BENCHMARKS / "stale.py", "stale")


Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path) -> Git:
    """A repository with the scripts, one area and nothing measured yet."""

    def run(*arguments: str) -> str:
        who = {
            f"GIT_{role}_{what}": "someone@example.org"
            for role in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *arguments],
            env={**os.environ, **who},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    for folder in ("src/area", "benchmarks/results", "benchmarks/proofs"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("_result.py", "stale.py"):
        shutil.copyfile(BENCHMARKS / name, tmp_path / "benchmarks" / name)
    (tmp_path / "src/area/code.py").write_text("first\n")
    (tmp_path / "README.md").write_text("page\n")
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    run("init", "-q")
    run("add", "-A")
    run("commit", "-qm", "first")
    return run


def result_of(root: Path) -> ModuleType:
    return load(root / "benchmarks" / "_result.py", "_result_of_a_test")


def written(root: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "benchmarks/results" / f"{name}.json").read_text())
    return found


def test_a_result_of_a_clean_commit_says_so_also_after_others_were_written(
    git: Git, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result_of(tmp_path).write_result("one", {"x": 1}, passed=True)
    (tmp_path / "README.md").write_text("the page with the new figure\n")
    result_of(tmp_path).write_result("two", {"x": 2}, passed=True)
    for name in ("one", "two"):
        assert (written(tmp_path, name)["is_clean"], written(tmp_path, name)["commit"]) == (
            True,
            git("rev-parse", "HEAD"),
        )
        assert "changed" not in written(tmp_path, name)
    assert capsys.readouterr().out == ""


def test_a_result_of_changed_sources_is_marked_with_what_had_changed(
    git: Git, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src/area/code.py").write_text("changed\n")
    (tmp_path / "src/area/new.py").write_text("new\n")
    result_of(tmp_path).write_result("one", {"x": 1}, passed=True)
    assert written(tmp_path, "one")["is_clean"] is False
    assert written(tmp_path, "one")["changed"] == ["src/area/code.py", "src/area/new.py"]
    said = capsys.readouterr().out
    assert "NOT FROM A CLEAN COMMIT: results/one.json (src/area/code.py, src/area/new.py)" in said


def test_sources_that_change_during_a_benchmark_are_not_clean(git: Git, tmp_path: Path) -> None:
    began = git("rev-parse", "HEAD")
    script = result_of(tmp_path)
    (tmp_path / "src/area/code.py").write_text("later\n")
    git("commit", "-qam", "second")
    script.write_result("one", {"x": 1}, passed=True)
    document = written(tmp_path, "one")
    assert (document["commit"], document["is_clean"], document["changed"]) == (began, False, ["HEAD moved meanwhile"])


def test_outside_a_repository_no_result_claims_a_commit(tmp_path: Path) -> None:
    for name in ("results", "proofs"):
        (tmp_path / "benchmarks" / name).mkdir(parents=True)
    shutil.copyfile(BENCHMARKS / "_result.py", tmp_path / "benchmarks" / "_result.py")
    result_of(tmp_path).write_result("one", {"x": 1}, passed=True)
    assert (written(tmp_path, "one")["commit"], written(tmp_path, "one")["is_clean"]) == (None, False)


def test_what_is_older_than_its_area_is_listed_and_nothing_else(
    git: Git, tmp_path: Path, stale: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        stale, "AREAS", {"results/old": ("src/area",), "results/new": ("src/area",), "results/other": ("README.md",)}
    )
    result = result_of(tmp_path)
    for name in ("old", "other"):
        result.write_result(name, {}, passed=True)
    assert list(stale.stale(tmp_path)) == []
    for number in range(2):
        (tmp_path / "src/area/code.py").write_text(f"changed {number}\n")
        git("commit", "-qam", "a change in the area")
    result_of(tmp_path).write_result("new", {}, passed=True)
    assert list(stale.stale(tmp_path)) == ["results/old.json: 2 commits behind"]


def test_changed_comments_docstrings_and_messages_make_no_result_stale(
    git: Git, tmp_path: Path, stale: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stale, "AREAS", {"results/old": ("src/area",)})
    code = (
        'def double(x):\n    """Return twice x."""\n    notify(f"warning: {x} is small")\n    return 2 * x  # x + x\n'
        'class Bad(Exception):\n    def __init__(self, what, why): ...\nraise Bad(what=f"{1} left", why="too few")\n'
    )
    (tmp_path / "src/area/code.py").write_text(code)
    git("commit", "-qam", "code")
    result_of(tmp_path).write_result("old", {}, passed=True)
    reworded = code.replace("Return twice x", "Double x").replace("  # x + x", "").replace("is small", "is too small")
    (tmp_path / "src/area/code.py").write_text(reworded.replace("left", "remaining").replace("too few", "few"))
    git("commit", "-qam", "words")
    assert list(stale.stale(tmp_path)) == []
    (tmp_path / "src/area/code.py").write_text(code.replace("2 * x", "3 * x"))
    git("commit", "-qam", "code again")
    assert list(stale.stale(tmp_path)) == ["results/old.json: 2 commits behind"]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"figures": {}}, "names no commit"),
        ({"commit": "0" * 40}, "commit 0000000 is not in the history of this checkout"),
        ({"commit": "HEAD", "is_clean": False}, "written from changed sources"),
        ({"commit": "HEAD", "figures": {"part": {"commit": "FIRST", "is_clean": True}}}, "1 commit behind"),
        (
            {"commit": "HEAD", "figures": {"part": {"commit": "HEAD", "is_clean": False}}},
            "written from changed sources",
        ),
    ],
)
def test_stale_lists_files_of_unknown_origin_with_the_reason(
    document: dict[str, Any], said: str, git: Git, tmp_path: Path, stale: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = git("rev-parse", "HEAD")
    (tmp_path / "src/area/code.py").write_text("second\n")
    git("commit", "-qam", "second")
    text = json.dumps(document).replace('"HEAD"', json.dumps(git("rev-parse", "HEAD"))).replace("FIRST", first)
    (tmp_path / "benchmarks/results/one.json").write_text(text)
    monkeypatch.setattr(stale, "AREAS", {"results/one": ("src/area",)})
    assert list(stale.stale(tmp_path)) == [f"results/one.json: {said}"]


def test_every_result_has_an_area_and_every_area_exists(stale: ModuleType) -> None:
    names = {path.relative_to(BENCHMARKS).with_suffix("").as_posix() for path in stale._files(ROOT)}
    assert names - set(stale.AREAS) == set()
    assert [path for area in stale.AREAS.values() for path in area if not (ROOT / path).exists()] == []


def test_no_result_is_taken_in_that_was_written_from_changed_sources(stale: ModuleType) -> None:
    found = set()
    for path in stale._files(ROOT):
        document = json.loads(path.read_text(encoding="utf-8"))
        if not document.get("commit") or not stale._is_clean(document):
            found.add(path.relative_to(BENCHMARKS).with_suffix("").as_posix())
    assert found - FROM_CHANGED_SOURCES == set(), "commit first, then run the script again"
    assert FROM_CHANGED_SOURCES - found == set(), "these are clean now: take them off the list"


def test_make_check_lists_them(stale: ModuleType) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "$(BIN)/python benchmarks/stale.py" in makefile.split("\ncheck:")[1].split("\nprove:")[0]


# -- make prove --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "goes_on"), [(0, True), (77, True), (1, False)])
def test_make_prove_skips_missing_programs_and_lists_them_at_the_end(code: int, goes_on: bool, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    for name in ("first", "gguf_in_llama_cpp", "simulate"):
        (tmp_path / f"benchmarks/{name}.py").touch()
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ncase "$*" in *gguf*) exit {code};; esac\n')
    python.chmod(0o755)
    (tmp_path / ".venv/.ready-test").touch()
    shutil.copyfile(ROOT / "Makefile", tmp_path / "Makefile")
    done = subprocess.run(["make", "prove"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == goes_on, done.stdout + done.stderr
    assert ("== simulate.py on modal" in done.stdout) == goes_on
    assert ("SKIPPED, see above for what is missing: benchmarks/gguf_in_llama_cpp.py" in done.stdout) == (code == 77)


@pytest.mark.slow
def test_without_llama_cpp_its_proof_is_skipped_by_the_code_that_make_knows() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gguf_in_llama_cpp.py")],
        env={**os.environ, "LLAMA_PYTHON": "/bin/false"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 77, done.stderr
    assert "pip install llama-cpp-python" in done.stdout
