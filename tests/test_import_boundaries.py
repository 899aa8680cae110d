"""What importing and asking for help may load."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import homing

HEAVY = ["torch", "transformers", "boto3", "modal", "starlette", "numpy", "tokenizers", "pydantic", "rich.table"]


@pytest.mark.parametrize("statement", ["import homing", "import homing.cli.main"])
def test_importing_loads_nothing_heavy(statement: str) -> None:
    code = f"{statement}; import sys; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_looked_up_when_it_is_first_asked_for() -> None:
    code = (
        "import sys, homing\n"
        "print('importlib.metadata' in sys.modules, '__version__' in vars(homing), hasattr(homing, 'nothing'))\n"
        "from homing import __version__\n"
        "print('importlib.metadata' in sys.modules, homing.__version__ == __version__ == vars(homing)['__version__'])\n"
        "print(__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False False False", "True True", version("homing")]


def test_from_source_alone_the_version_says_so() -> None:
    """On a machine where nothing can be installed."""
    source = str(Path(homing.__file__).parents[1])
    code = f"import sys; sys.path[:] = [{source!r}, *(p for p in sys.path if 'site-packages' not in p)]; import homing"
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", f"{code}; print(homing.__version__)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "0+source"


def test_help_lists_every_verb_and_loads_none_of_them() -> None:
    code = (
        "import sys; sys.argv = ['homing', '--help']\n"
        "from homing.cli import main as m\n"
        "try: m.main()\n"
        "except SystemExit as e: assert not e.code\n"
        f"print('LOADED', [x for x in {HEAVY} if x in sys.modules],"
        " [v for v in m.VERBS if 'homing.cli.' + v in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "LOADED [] []" in done.stdout
    assert "quickstart" in done.stdout
    assert "destroy" in done.stdout


def test_help_takes_at_most_three_tenths_of_a_second_of_cpu() -> None:
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'homing.cli', '--help'], check=True, stdout=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime)"
    )
    argv = [sys.executable, "-c", code]
    spent = [float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout) for _ in range(3)]
    assert min(spent) <= 0.3, spent


@pytest.mark.parametrize("group", [[], ["store"], ["data"], ["image"]])
def test_without_a_verb_the_help_is_printed_and_nothing_is_called_an_error(group: list[str]) -> None:
    argv = [sys.executable, "-m", "homing.cli", *group]
    bare = subprocess.run(argv, capture_output=True, text=True, check=False)
    asked = subprocess.run([*argv, "--help"], capture_output=True, text=True, check=True)
    assert (bare.returncode, bare.stderr) == (0, "")
    assert bare.stdout.strip() == asked.stdout.strip()


@pytest.mark.parametrize("arguments", ["", "store", "--help"])
def test_a_reader_of_the_help_that_leaves_early_is_no_accident(arguments: str) -> None:
    # Unbuffered, and read by nobody: the first write finds the pipe closed.
    line = f"{sys.executable} -u -m homing.cli {arguments} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "1")


def test_a_verb_that_does_not_exist_is_answered_with_the_nearest() -> None:
    done = subprocess.run([sys.executable, "-m", "homing.cli", "lunch"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Did you mean launch?" in done.stderr
