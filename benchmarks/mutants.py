"""Would the suite notice? Each line that keeps money or work safe is broken on purpose, and a test must fail.

    a copy of src and tests -> one line changed -> that module's tests, then the whole control plane -> caught or not

The text that a mutant replaces must occur exactly once in its file; the script reports a mutant for which that is no
longer true. The unchanged copy must pass first, or a failure would prove nothing.

    python benchmarks/mutants.py [--quick] [--only NAME]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

from _result import write_proof  # noqa: E402
from mutant_list import MUTANTS, Mutant  # noqa: E402

CAUGHT_SHARE = 1.0
WIDER = ("tests/cloud", "tests/agent", "tests/store", "tests/sim")  # what a change of the control plane answers to
TESTS_TIMEOUT_S = 600.0
WIDER_TIMEOUT_S = 1500.0
QUICK = 2
_HEALTHY: dict[tuple[str, ...], str] = {}  # tests -> how they fail on the unchanged copy; "" where they pass
_ASKING: dict[tuple[str, ...], threading.Lock] = {}


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    is_caught: bool
    by: str  # the first test that failed, or why there is none
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description="Break each safety line in turn; the tests must notice.")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} mutants, and that every one of them applies")
    parser.add_argument("--only", help="the mutant of this name")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if arguments.only in (None, m.name)]
    missing = [problem for m in chosen if (problem := why_not(m))]
    for problem in missing:
        print(f"problem: {problem}")
    if missing:
        print(f"FAIL {len(missing)} mutants no longer fit the code")
        return 1
    chosen = [m for m in chosen if m.is_quick][:QUICK] if arguments.quick else chosen
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1 if arguments.quick else 2) as pool:
        verdicts = list(pool.map(_try, chosen))
    caught = [v for v in verdicts if v.is_caught]
    share = len(caught) / len(verdicts)
    passed = share >= CAUGHT_SHARE
    if not arguments.quick and not arguments.only:
        figures = {
            "mutants": len(verdicts),
            "caught": len(caught),
            "survivors": [f"{v.mutant.name}: {v.by}" for v in verdicts if not v.is_caught],
            "caught_by": {v.mutant.name: v.by for v in caught},
            "seconds": round(time.monotonic() - begun, 1),
        }
        write_proof("mutants", figures, passed=passed)
    print(f"{'PASS' if passed else 'FAIL'} {len(caught)} of {len(verdicts)} mutants caught")
    return 0 if passed else 1


def why_not(mutant: Mutant) -> str:
    """Why it cannot be planted; "" when it can."""
    path = ROOT / mutant.file
    found = path.read_text(encoding="utf-8").count(mutant.old) if path.exists() else 0
    return "" if found == 1 else f"{mutant.name}: its text occurs {found} times in {mutant.file}"


def _try(mutant: Mutant) -> Verdict:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="homing-mutant-") as folder:
        copy = Path(folder)
        for name in ("src", "tests", "benchmarks", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "constraints.txt"):
            shutil.copy(ROOT / name, copy / name)
        healthy = _healthy(copy, mutant.tests)
        if healthy:
            return _notify(Verdict(mutant, False, f"its tests fail without it: {healthy}", time.monotonic() - begun))
        target = copy / mutant.file
        sound = target.read_text(encoding="utf-8")
        target.write_text(sound.replace(mutant.old, mutant.new), encoding="utf-8")
        failed = _failure(copy, mutant.tests, TESTS_TIMEOUT_S)
        if not failed:
            there = [path for path in WIDER if (copy / path).exists()]
            failed = _failure(copy, there, WIDER_TIMEOUT_S)
            target.write_text(sound, encoding="utf-8")
            node = failed.split(" ")[0]
            if node.startswith("tests/") and _failure(copy, [node], TESTS_TIMEOUT_S):  # it always fails
                return _notify(Verdict(mutant, False, f"fails without it too: {failed}", time.monotonic() - begun))
    return _notify(Verdict(mutant, bool(failed), failed or "no test failed", time.monotonic() - begun))


def _healthy(copy: Path, tests: tuple[str, ...]) -> str:
    """The same for all mutants of these tests: asked once, while the copy is still as it was."""
    with _ASKING.setdefault(tests, threading.Lock()):
        if tests not in _HEALTHY:
            _HEALTHY[tests] = _failure(copy, tests, TESTS_TIMEOUT_S)
        return _HEALTHY[tests]


def _failure(copy: Path, tests: list[str] | tuple[str, ...], timeout_s: float) -> str:
    """The first test that failed, in a few words; "" when all passed. A suite that hangs has noticed, too."""
    argv = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-n", "0", *tests]
    env = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            argv, cwd=copy, env=env, capture_output=True, text=True, timeout=timeout_s, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"no end within {timeout_s:.0f} s"
    if done.returncode == 0:
        return ""
    assert done.returncode in (1, 2), done.stdout[-2000:] + done.stderr[-2000:]  # 4, 5: our own mistake, not a catch
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].removeprefix("FAILED ").removeprefix("ERROR ")[:160] if lines else "pytest failed"


def _notify(verdict: Verdict) -> Verdict:
    word = "caught" if verdict.is_caught else "SURVIVED"
    print(f"{word:8} {verdict.mutant.name:28} {verdict.seconds:5.0f} s  {verdict.by}", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
