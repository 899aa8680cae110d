"""`homing quickstart`: the whole workflow on this computer, with the same commands a user would type."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from homing.api.extras import need
from homing.api.lookup.find_runs import usd
from homing.api.tools.run_quickstart import FIGURES, QuickstartDone, run_quickstart
from homing.cli import output
from homing.cli.options import Json, Yes
from homing.errors import UsageError
from homing.units import format_duration, parse_usd

__all__ = ["command"]


def command(
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Folder for the run file, data and model.")
    ] = Path("homing-quickstart"),
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the run.")] = "first",
    spend_limit: Annotated[
        str, typer.Option("--spend-limit", metavar="DOLLARS", help="Spend limit in simulated dollars; it is enforced.")
    ] = "0.10",
    steps: Annotated[
        int | None, typer.Option("--steps", min=10, help="Number of training steps; default: the preset's.")
    ] = None,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Run the whole workflow on this computer in a few minutes, without any account."""
    try:
        limit = parse_usd(spend_limit)
    except ValueError as exc:
        raise UsageError(what=str(exc), fix="homing quickstart --spend-limit 0.10") from exc
    need("lm", verb="quickstart")
    question = "Train a small model on this computer for a few minutes? Nothing is rented and no data leaves it."
    if not output.ask(question, yes=yes):
        raise typer.Exit(0)

    # With --json, stdout carries one document at the end, so the output of the verbs goes to stderr.
    shown = sys.stderr if output.is_json() else sys.stdout
    done = run_quickstart(
        folder, name=name, spend_limit_usd=limit, steps=steps, shown=shown, is_quiet=output.is_quiet()
    )
    output.emit("quickstart/1", done.to_dict())
    if done.figures["val_loss"] is not None:
        _say_what_came_of_it(done)
    if done.error is not None:
        raise done.error


def _say_what_came_of_it(done: QuickstartDone) -> None:
    folder, name, figures = done.folder, done.name, done.figures
    output.say(
        f"\nDone in {format_duration(figures['seconds'])} for {usd(figures['spend_usd'])} (simulated)."
        f" Validation loss {figures['val_loss']:.3f} nats per token, {figures['val_bits_per_byte']:.3f} bits per byte;"
        f"\na perfect bigram model reaches {figures['bigram_nats']:.3f}."
        f" The figures are in {folder / FIGURES}.\n\nNext:\n"
        f"{_to_activate()}"
        f"  cd {shlex.quote(str(folder))}\n"
        f"  homing chat {name}                          # chat with it\n"
        f"  homing generate {name} --prompt 'JULIET:'   # complete a prompt\n"
        f"  homing eval {name}                          # evaluate it\n"
        f"  homing new mine --from tiny --text YOUR_TEXT.txt && homing prep mine\n"
        f"  homing runs                                # check that nothing is left running"
    )


def _to_activate() -> str:
    """Return the line that activates the environment: after `make demo`, homing is not on the user's PATH yet."""
    activate = Path(sys.executable).parent / "activate"
    if shutil.which("homing") or not activate.is_file():
        return ""
    return f"  source {activate}\n"
