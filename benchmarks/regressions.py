"""Does each regression test fail on the sources that had its defect, and pass now?

    python benchmarks/regressions.py --base 6e220b3 [--tests COMMIT | --tests tree] [--only DEFECT] [--quick]

    the tests of --tests + the sources of --base -> every marked test must fail there
    the tests of --tests + its own sources       -> every marked test must pass

Both sides come from git, because tests that import modules by their present names cannot run on sources from before
the modules moved. `--tests tree` takes the working tree, for a base that has the same modules.

A test says which defect of `regression_list.py` it shows: `@pytest.mark.regression("lost-ledger")`. A failure counts
only if the test ran and failed by itself: an import error, a missing attribute or an unknown parameter says no more
than that the old sources are older. Tests that need a GPU are listed and not run. Prints a table of defect and tests.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

from _result import write_proof  # noqa: E402
from regression_list import DEFECTS  # noqa: E402

BASE = "6e220b3"
TESTS = "b85b80b"  # the last commit whose tests import the modules by the names that BASE has
TREE = "tree"
QUICK = ("rope-theta-zero", "form-feed")
WORKERS = 2
TIMEOUT_S = 3600.0
# What a test sees that asks the old sources for something they did not have yet. An AttributeError of a value (None,
# an instance) may be the defect itself; of a module or a class it is a missing name.
_MISSING = re.compile(
    r"(ImportError|ModuleNotFoundError|NameError|FixtureLookupError)\b"
    r"|AttributeError: (module|type object) "
    r"|AttributeError: <module "
    r"|TypeError: .*unexpected keyword argument"
    r"|TypeError: .*takes .* positional arguments? but"
    r"|TypeError: .*missing \d+ required"
)


@dataclass(frozen=True)
class Outcome:
    """One test on one side: `passed`, `failed`, `skipped`, `error` (in its setup) or `not collected`."""

    word: str
    reason: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=BASE, help="the commit whose sources have the defects")
    parser.add_argument("--tests", default=TESTS, help=f"the commit whose tests are run, or `{TREE}` for this tree")
    parser.add_argument("--only", action="append", help="the tests of this defect; may be given several times")
    parser.add_argument("--quick", action="store_true", help=f"the tests of {' and '.join(QUICK)}; nothing is kept")
    arguments = parser.parse_args()
    chosen = list(QUICK) if arguments.quick else arguments.only or list(DEFECTS)
    unknown = [name for name in chosen if name not in DEFECTS]
    if unknown:
        parser.error(f"unknown defect: {', '.join(unknown)} (see benchmarks/regression_list.py)")
    with tempfile.TemporaryDirectory(prefix="homing-base-") as folder:
        base, fixed = Path(folder, "base"), Path(folder, "fixed")
        lay_out(fixed, arguments.tests)
        marked = collect(fixed, chosen)
        lay_out(base, arguments.tests, sources=arguments.base)
        tests = sorted({test for name in chosen for test in marked.cpu.get(name, ())})
        before = run(base, tests)
        now = run(fixed, tests)
    problems = show(chosen, marked, before, now)
    passed = not problems
    figures = {
        "base": arguments.base,
        "tests_of": arguments.tests,
        "defects": len(chosen),
        "tests": len(tests),
        "table": {name: {t: before[t].reason[:200] for t in sorted(marked.cpu.get(name, ()))} for name in chosen},
        "gpu_tests_not_run": {name: sorted(marked.gpu[name]) for name in chosen if marked.gpu.get(name)},
        "problems": problems,
    }
    if not arguments.quick and not arguments.only:
        write_proof("regressions", figures, passed=passed)
    for problem in problems:
        print(f"problem: {problem}")
    print(f"{'PASS' if passed else 'FAIL'} {len(tests)} tests of {len(chosen)} defects, {len(problems)} problems")
    return 0 if passed else 1


@dataclass(frozen=True)
class Marked:
    cpu: dict[str, set[str]]  # defect -> ids of its tests
    gpu: dict[str, set[str]]


def collect(folder: Path, chosen: list[str]) -> Marked:
    """Return the marked tests in `folder`, by defect."""
    lines = _pytest(folder, ["--collect-only", "-m", "regression"])
    cpu: dict[str, set[str]] = defaultdict(set)
    gpu: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        for name in line["defects"]:
            assert name in DEFECTS, f"{line['test']} names {name!r}, which benchmarks/regression_list.py does not have"
            if name in chosen:
                (gpu if line["is_gpu"] else cpu)[name].add(line["test"])
    return Marked(cpu, gpu)


def lay_out(folder: Path, commit: str, *, sources: str | None = None) -> None:
    """Write the files of `commit`, or of this tree, to `folder`; with `sources`, those of another commit under src."""
    folder.mkdir()
    if commit != TREE:
        _extract(folder, commit)
    else:
        listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0")
        for name in filter(None, listed):
            if (ROOT / name).is_file():
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((ROOT / name).read_bytes())
    if sources is not None:
        shutil.rmtree(folder / "src")
        _extract(folder, sources, "src")
    # The plugin is this file; the commit may have an older one.
    shutil.copy(Path(__file__), folder / "benchmarks" / "regressions.py")


def _extract(folder: Path, commit: str, *paths: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, *paths))) as archive:
        archive.extractall(folder, filter="data")


def run(folder: Path, tests: list[str]) -> dict[str, Outcome]:
    """Runs the tests in `folder` with the sources that lie there. A test without a result was not collected."""
    if not tests:
        return {}
    # With -n, a file that fails to import would end the whole run unless collection errors are carried on from.
    arguments = ["-n", str(WORKERS), "--dist", "loadfile", "--continue-on-collection-errors", "-m", "regression"]
    files = sorted({test.partition("::")[0] for test in tests})
    outcomes = dict.fromkeys(tests, Outcome("not collected", "its file cannot be imported there"))
    for line in _pytest(folder, [*arguments, *files]):
        if line["test"] in outcomes:
            outcomes[line["test"]] = settled(outcomes[line["test"]], Outcome(line["word"], line["reason"]))
    return outcomes


def settled(before: Outcome, reported: Outcome) -> Outcome:
    """Return the outcome of a test after one more report: an error in the teardown of a failed test changes nothing."""
    return before if before.word == "failed" and reported.word == "error" else reported


def show(chosen: list[str], marked: Marked, before: dict[str, Outcome], now: dict[str, Outcome]) -> list[str]:
    """Prints the table and returns what is wrong with it."""
    problems = []
    for name in chosen:
        print(f"\n{name}: {DEFECTS[name]}")
        tests = sorted(marked.cpu.get(name, ()))
        for test in tests:
            print(f"  {test}\n    base: {before[test].word}  now: {now[test].word}  {before[test].reason[:110]}")
            if why := _why_not(before[test], now[test]):
                problems.append(f"{name}: {test}: {why}")
        for test in sorted(marked.gpu.get(name, ())):
            print(f"  {test}\n    needs a GPU: not run here")
        if not tests:
            problems.append(f"{name}: no test that runs without a GPU shows it")
    print()
    return problems


def _why_not(before: Outcome, now: Outcome) -> str:
    if now.word != "passed":
        return f"{now.word} now: {now.reason[:200]}"
    if before.word != "failed":
        return f"{before.word} on the base sources, where it should fail. {before.reason[:200]}"
    if _MISSING.match(before.reason):
        return f"fails on the base sources only because a name is missing there: {before.reason[:200]}"
    return ""


def _pytest(folder: Path, arguments: list[str]) -> list[dict]:
    """One line for each test that `_outcomes` (the plugin below) reported."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as report:
        argv = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "regressions"]
        paths = [str(folder / "src"), str(folder / "benchmarks")]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "HOMING_REGRESSIONS_REPORT": report.name,
        }
        done = subprocess.run(
            [*argv, *arguments], cwd=folder, env=env, capture_output=True, text=True, errors="replace",
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode in (0, 1, 2, 5), done.stdout[-3000:] + done.stderr[-3000:]
        return [json.loads(line) for line in Path(report.name).read_text(encoding="utf-8").splitlines()]


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=True, timeout=60).stdout


# --- the pytest plugin: this very module, loaded with `-p regressions` in the runs above ---


def _report(line: dict) -> None:
    with open(os.environ["HOMING_REGRESSIONS_REPORT"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def pytest_collection_finish(session) -> None:  # type: ignore[no-untyped-def]
    if not session.config.option.collectonly:
        return
    for item in session.items:
        defects = [mark.args[0] for mark in item.iter_markers("regression")]
        is_gpu = item.get_closest_marker("gpu") is not None
        _report({"test": item.nodeid, "defects": defects, "is_gpu": is_gpu})


def pytest_runtest_logreport(report) -> None:  # type: ignore[no-untyped-def]
    """Called in the process that deals out the tests: one report of setup, one of the test, one of teardown."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when != "call" and report.passed:
        return
    word = report.outcome if report.when == "call" or report.skipped else "error"
    crash = getattr(report.longrepr, "reprcrash", None)
    reason = crash.message if crash else str(report.longrepr or "")
    _report({"test": report.nodeid, "word": word, "reason": reason[:400]})


if __name__ == "__main__":
    sys.exit(main())
