"""Bad run files, flags and inputs against the real command line: no traceback, exit 2, file and line, the right hint.

    bad_input_cases -> `homing ...` in this process (a sample also as processes of their own) -> what it said -> figures

Passes when every case ends with exit code 2 and no traceback, every case that is about a file names the file and, where
a line is at fault, that line, and at least 95% of one-letter typing errors are answered with the key that was meant.
Files mutilated at random may by luck still be valid; they only must never end in a traceback or a third exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import homing.cli.main as cli
from _result import write_result
from bad_input_cases import Case, all_cases, good_cases

SEED = 20_260_101
LEAST_CASES = 300
LEAST_RIGHT = 0.95
CASE_DEADLINE_S = 20.0


@dataclass
class Outcome:
    code: int
    out: str
    err: str
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, under a minute")
    options = parser.parse_args()
    random_ = random.Random(SEED)
    cases = list(all_cases(random_, is_quick=options.quick))
    begun = time.monotonic()
    faults: list[str] = []
    by_kind: Counter[str] = Counter()
    hints: Counter[bool] = Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as place:
        os.environ["HOMING_HOME"] = str(Path(place) / "home")
        os.environ["NO_COLOR"] = "1"
        # Were the files that each case spoils refused as they stand, every case would pass for the wrong reason.
        for number, (argv, files) in enumerate(good_cases()):
            outcome = run_here(Case("good", argv, files), Path(place) / f"good-{number}")
            if outcome.code != 0:
                faults.append(f"good: exit {outcome.code}: homing {' '.join(argv)}: {outcome.err[-300:]}")
        for number, case in enumerate(cases):
            outcome = run_here(case, Path(place) / f"case-{number}")
            slowest = max(slowest, outcome.seconds)
            by_kind[case.kind] += 1
            faults += [f"{case.kind}: {fault}: homing {' '.join(case.argv)}" for fault in faults_of(case, outcome)]
            if case.kind == "typo":
                hints[is_right(case, outcome)] += 1
        outside = random_.sample(cases, 6 if options.quick else 40)
        for number, case in enumerate(outside):
            outcome = run_outside(case, Path(place) / f"outside-{number}")
            faults += [f"process, {case.kind}: {f}: homing {' '.join(case.argv)}" for f in faults_of(case, outcome)]
    share = hints[True] / max(1, sum(hints.values()))
    num_bad = sum(not case.is_fuzz for case in cases)
    figures = {
        "cases": len(cases),
        "bad": num_bad,
        "by_kind": dict(by_kind),
        "also_as_processes": len(outside),
        "faults": len(faults),
        "typos": sum(hints.values()),
        "typos_right_share": round(share, 4),
        "slowest_s": round(slowest, 2),
        "seconds": round(time.monotonic() - begun, 1),
        "seed": SEED,
        "is_quick": options.quick,
    }
    for fault in faults[:20]:
        print(fault)
    for name, figure in figures.items():
        print(f"{name}: {figure}")
    passed = not faults and share >= LEAST_RIGHT and num_bad >= LEAST_CASES
    if not options.quick:
        write_result("bad_input", figures, passed=passed)
    words = f"{num_bad} bad inputs, {len(faults)} faults, {share:.1%} of {sum(hints.values())} typos answered right"
    print(f"{'PASS' if passed else 'FAIL'} {words}")
    return 0 if passed else 1


# --- running ---------------------------------------------------------------------------------------------------------


def lay_out(case: Case, place: Path) -> None:
    place.mkdir(parents=True)
    for name, content in case.files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(content)


def run_here(case: Case, place: Path) -> Outcome:
    lay_out(case, place)
    out, err, code = io.StringIO(), io.StringIO(), 99
    before, sys.argv = (os.getcwd(), sys.argv), ["homing", *case.argv]
    os.chdir(place)
    begun = time.monotonic()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
            except BaseException as exc:  # anything that gets past main is a fault of its own
                err.write(f"Traceback (most recent call last): {exc!r}")
    finally:
        os.chdir(before[0])
        sys.argv = before[1]
    return Outcome(code, out.getvalue(), err.getvalue(), time.monotonic() - begun)


def run_outside(case: Case, place: Path) -> Outcome:
    lay_out(case, place)
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "homing.cli", *case.argv], cwd=place, capture_output=True, timeout=60, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return Outcome(done.returncode, out, err, time.monotonic() - begun)


def faults_of(case: Case, outcome: Outcome) -> Iterator[str]:
    said = outcome.out + outcome.err
    if "Traceback (most recent call last)" in said:
        yield "a traceback"
    if outcome.seconds > CASE_DEADLINE_S:
        yield f"took {outcome.seconds:.0f} s"
    if case.never and case.never in said:
        yield "said what must not be said"
    if case.is_fuzz:
        if outcome.code not in (0, 2):
            yield f"exit {outcome.code}"
        return
    if outcome.code != 2:
        yield f"exit {outcome.code}"
    if case.file and case.file not in said:
        yield f"did not name {case.file}"
    if case.line and f"{case.file}:{case.line}:" not in said and f'"line": {case.line}' not in said:
        yield f"did not name line {case.line}"
    if case.hint and case.kind != "typo" and case.hint not in said:
        yield f"did not say {case.hint!r}"
    if "--json" in case.argv:
        try:
            json.loads(outcome.out)
        except ValueError:
            yield "stdout is not one JSON document"


def is_right(case: Case, outcome: Outcome) -> bool:
    """The key that was meant."""
    return case.hint in outcome.out + outcome.err


if __name__ == "__main__":
    sys.exit(main())
