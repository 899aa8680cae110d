"""Every command block in the README and the docs runs, in the order of the page, in one empty folder per page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from homing.cli.run_verb import LazyVerbs
from homing.cli.verb_list import VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TRAINS = ("homing launch", "homing train", "homing rehearse")
# Languages that are shown, not run. A block without a language is a mistake: it does not say whether it runs.
SHOWN = {"text", "yaml", "json", "python", "toml"}


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def commands(page: Path) -> list[str]:
    """Command lines of the page, continuation lines joined."""
    lines: list[str] = []
    for language, body in blocks(page):
        if language == "bash":
            lines += [line for line in body.replace("\\\n", " ").splitlines() if line.strip()]
    return lines


def is_about_the_checkout(line: str) -> bool:
    """`make`, `git clone`, `pip install`, `.venv/bin/...`: set-up lines, checked against the tree instead."""
    return line.split()[0] in ("make", "git", "pip") or line.startswith(
        (".venv/bin/", "python3 -m venv", "source .venv/", "cd homing ")
    )


def shortened(line: str) -> str:
    """Training is cut to seconds; everything else runs as printed. A longer quickstart is a test of its own."""
    command, hash_, comment = line.partition("  #")
    if command.startswith("homing quickstart"):
        command += " --steps 10"
    elif command.startswith(TRAINS) and "--smoke" not in command and "--list" not in command:
        command += " --set phases.0.steps=5"
    return command + hash_ + comment


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_says_what_it_is(page: Path) -> None:
    for language, body in blocks(page):
        assert language == "bash" or language in SHOWN, f"{page.name}: block {language!r} starting {body[:60]!r}"


@pytest.mark.acceptance(141)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_set_up_lines_name_what_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for line in filter(is_about_the_checkout, commands(page)):
        words = line.split("#")[0].split()
        if words[0] == "make":
            assert words[1] in targets, line
        elif words[0] == "pip" or "pip install" in line:
            assert set(re.findall(r"\[(\w+)\]", line)) <= extras, line
        elif words[0].startswith(".venv/bin/pytest"):
            paths = [word for word in words if word.startswith("tests/")]
            assert all((ROOT / path).exists() for path in paths), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_only_shown_name_verbs_and_options_that_are_there(page: Path) -> None:
    """These commands need an account or a host. Without one, check that their verbs and options exist."""
    text = "".join(body for language, body in blocks(page) if language == "text").replace("\\\n", " ")
    for line in re.findall(r"^(?:\$ )?homing (\S.*)$", text, re.MULTILINE):
        verb, *words = re.split(r"  +|\s#|&&|\||\s--\s", line)[0].split()
        assert verb in VERBS, line
        command = LazyVerbs().get_command(None, verb)
        command = getattr(command, "commands", {}).get(words[0] if words else "", command)
        own = {flag for each in command.params for flag in each.opts} | {"--help", "--json", "-q", "-v"}
        assert {word.split("=")[0] for word in words if word.startswith("-")} <= own, line


@pytest.mark.acceptance(142, "P2")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name != "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_command_runs_as_printed(page: Path, tmp_path: Path) -> None:
    script = [shortened(line) for line in commands(page) if not is_about_the_checkout(line)]
    if not script:
        return
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    folder = tmp_path / "work"
    folder.mkdir()
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(script)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{page.name}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
