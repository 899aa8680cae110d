"""The planted mistakes of benchmarks/mutants.py still fit the code, and the quick ones are noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mutant_list import MUTANTS, Mutant  # noqa: E402
from mutants import why_not  # noqa: E402


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_planted_and_names_tests_that_exist(mutant: Mutant) -> None:
    assert why_not(mutant) == ""
    assert mutant.old != mutant.new
    for path, _, name in (test.partition("::") for test in mutant.tests):
        assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_quick_form_passes() -> None:
    argv = [sys.executable, str(ROOT / "benchmarks/mutants.py"), "--quick"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=280)
    assert done.stdout.splitlines()[-1].startswith("PASS"), done.stdout + done.stderr
