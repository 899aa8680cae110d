"""Shell completion: verbs, options, run names and keys of the run file.

TAB -> _HOMING_COMPLETE in the environment -> typer -> the functions here, which read ./runs and $HOMING_HOME/runs
homing --install-completion [bash|zsh|fish] -> lists the files to write -> asks for confirmation -> writes them
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from homing.cli import output
from homing.errors import UsageError

__all__ = ["INSTALL", "change_words", "install", "key_words", "run_words"]

INSTALL = "--install-completion"
_RUN_ID = re.compile(r"(?P<name>.+)-\d{8}-\d{6}-\w+")
_FILES = {
    "bash": ("~/.bash_completions/homing.sh", "~/.bashrc"),
    "fish": ("~/.config/fish/completions/homing.fish",),
    "zsh": ("~/.zfunc/_homing", "~/.zshrc"),
}


def run_words(incomplete: str) -> list[str]:
    """Return the matching names of runs and run files; after NAME@, or if no name matches, the matching run ids."""
    from homing.config.home_and_run_files import home, run_files

    folder = home() / "runs"
    ids = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    names = {found["name"] for each in ids if (found := _RUN_ID.fullmatch(each))} | set(run_files())
    name, at, _ = incomplete.partition("@")
    if at:
        ids = [f"{name}@{each}" for each in ids if (found := _RUN_ID.fullmatch(each)) and found["name"] == name]
    called = [word for word in sorted(names) if word.startswith(incomplete)]
    return called or [word for word in ids if word.startswith(incomplete)]


def key_words(incomplete: str) -> list[str]:
    """Complete run file keys in the form that `homing explain` accepts."""
    from homing.config.schema.keys import all_keys

    return [key for path in all_keys() if (key := path.replace(".N", ".0")).startswith(incomplete)]


def change_words(incomplete: str) -> list[str]:
    """Complete KEY= for --set, but nothing after the `=`, where the user enters the value."""
    return [] if "=" in incomplete else [f"{key}=" for key in key_words(incomplete)]


def install(arguments: list[str]) -> int:
    """Install shell completion. Ask before editing the user's files, unless --yes is given."""
    words = [word for word in arguments if word not in (INSTALL, "--yes", "-y", "--json")]
    shell = words[0] if words else os.path.basename(os.environ.get("SHELL", ""))
    if shell not in _FILES or len(words) > 1:
        raise UsageError(
            what=f"No shell completion for {' '.join(words) or shell or 'an unknown shell'}.",
            why=f"Supported shells: {', '.join(sorted(_FILES))}.",
            fix=f"homing {INSTALL} bash",
        )
    script, *edited = (str(Path(each).expanduser()) for each in _FILES[shell])
    changes = f"writes {script}" + "".join(f" and adds lines to {each}" for each in edited)
    agrees = not {"--yes", "-y"}.isdisjoint(arguments)
    if not output.ask(f"Completion for {shell} {changes}. Continue?", yes=agrees):
        output.say(f"Nothing was changed. To see the completion script: homing --show-completion {shell}")
        return 0
    from typer._completion_shared import install as write

    write(shell=shell, prog_name="homing", complete_var="_HOMING_COMPLETE")
    output.say(f"Wrote {' and '.join([script, *edited])}. Open a new terminal to use shell completion.")
    return 0
