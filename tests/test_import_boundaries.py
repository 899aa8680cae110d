"""What importing and asking for help may load."""

from __future__ import annotations

import json
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import grimp
import pytest

import homing
from homing.cli.verb_list import VERBS

SDKS = ["boto3", "botocore", "modal", "huggingface_hub", "httpx", "aiohttp", "grpclib"]
HEAVY = ["torch", "transformers", "starlette", "numpy", "tokenizers", "pydantic", "pydantic_core", "ruamel.yaml",
         "rich.table", *SDKS]  # fmt: skip

# What the help of a verb may not load either. Run files are read by pydantic, and most verbs read one.
BEHIND_A_VERB = [*(set(HEAVY) - {"pydantic", "pydantic_core", "ruamel.yaml"}), "datasets", "ray", "safetensors",
                 "wandb", "mlflow", "trackio", "tensorboard", "uvicorn", "gigatoken", "rustbpe",
                 "pyarrow"]  # fmt: skip


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
        f" [v for v in {list(VERBS)} if 'homing.cli.verbs.' + v in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "LOADED [] []" in done.stdout
    assert "quickstart" in done.stdout
    assert "destroy" in done.stdout


def test_the_help_of_every_verb_loads_neither_torch_nor_the_sdk_of_a_cloud() -> None:
    """One after the other in one process: a module that is there after one of them was loaded by that one."""
    code = (
        "import contextlib, io, json, sys\n"
        "from homing.cli import main as m\n"
        "def ask(*words):\n"
        "    sys.argv, said = ['homing', *words, '--help'], io.StringIO()\n"
        "    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):\n"
        "        m.main()\n"
        f"    found = [name for name in {BEHIND_A_VERB} if name in sys.modules]\n"
        "    print(json.dumps({'words': words, 'is_help': 'Usage: homing ' in said.getvalue(), 'loaded': found}))\n"
        f"for verb in {list(VERBS)}:\n"
        "    ask(verb)\n"
        "    app = getattr(sys.modules[f'homing.cli.verbs.{verb}'], 'app', None)\n"
        "    for each in app.registered_commands if app else []:\n"
        "        ask(verb, each.name or each.callback.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    asked = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each["words"][0] for each in asked} == set(VERBS)
    assert ["store", "ls"] in [each["words"] for each in asked]
    assert [each for each in asked if each["loaded"] or not each["is_help"]] == []


def test_the_help_is_printed_without_the_parser() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['homing', '--help']\n"
        "from homing.cli.main import main\n"
        "main()\n"
        "sys.exit('typer' in sys.modules or 'pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "homing VERB [RUN]" in done.stdout


def test_the_help_on_a_full_disk_is_an_error_of_three_lines() -> None:
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-m", "homing.cli", "--help"]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: The operating system reported an error: No space left on device.")


@pytest.mark.parametrize("arguments", [["-c", "import homing"], ["-m", "homing.cli", "--help"]], ids=["import", "help"])
def test_importing_and_help_take_at_most_three_tenths_of_a_second_of_cpu(arguments: list[str]) -> None:
    """User and system time of the process, the best of three. The first one also compiles what is not compiled yet."""
    code = (
        "import resource, subprocess, sys\n"
        f"subprocess.run([sys.executable, *{arguments}], check=True, stdout=subprocess.DEVNULL)\n"
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


def test_json_may_stand_before_the_verb_as_quiet_may() -> None:
    argv = [sys.executable, "-m", "homing.cli"]
    before = subprocess.run([*argv, "--json", "-q", "explain", "seed"], capture_output=True, text=True, check=True)
    behind = subprocess.run([*argv, "explain", "seed", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(before.stdout) == json.loads(behind.stdout)
    alone = subprocess.run([*argv, "--json"], capture_output=True, text=True, check=False)
    assert (alone.returncode, alone.stderr) == (0, "")
    assert json.loads(alone.stdout)["schema"] == "homing.verbs/1"


@pytest.mark.parametrize("arguments", ["", "store", "--help", "plan --help", "explain", "new --list --json"])
def test_a_reader_that_leaves_early_is_no_accident(arguments: str) -> None:
    # Unbuffered and without a reader: the first write finds the pipe closed.
    line = f"{sys.executable} -u -m homing.cli {arguments} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.strip() == "0", "1 would say that a run failed"


def test_a_verb_that_does_not_exist_is_answered_with_the_nearest() -> None:
    done = subprocess.run([sys.executable, "-m", "homing.cli", "lunch"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Did you mean launch?" in done.stderr


def test_no_modules_import_each_other_not_even_inside_functions() -> None:
    graph = grimp.build_graph("homing", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules
