"""`homing quickstart`: the whole workflow on this computer, with the same commands a user would type.

new -> prep -> verify -> plan -> launch on local -> watch -> fetch -> generate -> destroy -> ledger

Each step is the real verb in its own process, printed before it runs, so what works here also works when typed. Nothing
is rented: the `local` provider runs the instance as processes on this computer and charges a made-up rate, so that
limit, ledger and receipt do real arithmetic.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from homing.api.extras import need
from homing.api.lookup.find_runs import usd
from homing.cli import output
from homing.cli.options import Json, Yes
from homing.errors import HomingError, RunFailed, UsageError
from homing.units import format_duration, parse_usd
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest

__all__ = ["command"]

TEXT = "shakespeare.txt.xz"
PROMPT = "ROMEO:"
FIGURES = "quickstart.json"


def command(
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Folder for run file, data and model.")] = Path(
        "homing-quickstart"
    ),
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the run.")] = "first",
    spend_limit: Annotated[
        str, typer.Option("--spend-limit", metavar="DOLLARS", help="Simulated dollars; the limit is enforced.")
    ] = "0.10",
    steps: Annotated[
        int | None, typer.Option("--steps", min=10, help="Number of training steps instead of the preset's.")
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

    name = _free_name(folder, name)
    shorter = ["--set", f"phases.0.steps={steps}"] if steps else []
    begun = time.monotonic()
    trip = _Trip(folder, name)
    trip.lay_out()
    trip.step("Write a run file from the smallest preset", "new", name, "--from", "tiny", "--text", TEXT, "--force")
    trip.step("Train a tokenizer and write token shards", "prep", name)
    trip.step("Check that the model builds, learns and fits", "verify", name)
    trip.step("Plan time and cost", "plan", name, *shorter)
    try:
        trip.step("Start an instance and train", "launch", name, "--spend-limit", f"{limit}", "--yes", *shorter)
        trip.step("Watch the training", "watch", name)
        trip.step("Fetch the model and verify its hashes", "fetch", name)
        speak = ("generate", name, "--prompt", PROMPT, "--tokens", "160", "--seed", "1")
        sample = trip.step("Generate a sample", *speak, keeps=True)
    except BaseException:
        # Whatever went wrong, nothing may be left running; a second failure must not hide the first.
        with contextlib.suppress(HomingError):
            trip.step("Make sure nothing is left running", "destroy", name, "--yes")
        raise
    trip.step("End billing", "destroy", name, "--yes")
    trip.step("Show the receipt", "ledger", name)

    figures = _figures(trip, sample) | {"seconds": round(time.monotonic() - begun, 1), "step_seconds": trip.seconds}
    (folder / FIGURES).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    output.emit("quickstart/1", figures)
    if figures["val_loss"] is None:
        raise RunFailed(
            what=f"The run ended at step {figures['steps']}, before its validation loss was first measured.",
            why="It was stopped, or reached its limit.",
            fix=f"Start over: homing quickstart   Try the model: homing chat {name}",
        )
    _say_what_came_of_it(figures, folder, name)
    if not steps and not figures["val_loss"] < figures["bigram_nats"]:
        raise RunFailed(
            what="The model learned no more than bigram statistics.",
            why=f"Its loss {figures['val_loss']:.3f} is not under the bigram entropy {figures['bigram_nats']:.3f}.",
            fix=f"Read {folder}/runs/{name}.yaml and the log above; run `homing quickstart` again to start over.",
        )


def _free_name(folder: Path, name: str) -> str:
    """Choose another name if a model of that name exists, so that a second quickstart overwrites nothing."""
    if not (folder / "models" / name).exists():
        return name
    number = next(n for n in range(2, 10_000) if not (folder / "models" / f"{name}-{n}").exists())
    output.say(f"{folder / 'models' / name} already exists, so this run is called {name}-{number}.")
    return f"{name}-{number}"


class _Trip:
    """The folder, and the verbs that run in it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.seconds: dict[str, float] = {}

    def lay_out(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = files("homing.presets") / "texts" / TEXT
            (self.folder / TEXT).write_bytes(text.read_bytes())
        except OSError as exc:
            raise UsageError(
                what=f"Cannot write to {self.folder}.", why=str(exc), fix="homing quickstart --dir SOMEWHERE_ELSE"
            ) from exc

    def step(self, what: str, *argv: str, keeps: bool = False) -> str:
        """Run `homing ARGV` in the folder.

        It writes to our stdout directly, so that messages and data stay in order; with `keeps`, its output is shown
        line by line and returned.
        """
        output.say(f"\n== {what}\n$ homing {shlex.join(argv)}")
        begun = time.monotonic()
        command_line = [sys.executable, "-m", "homing.cli", *argv, *(["-q"] if output.is_quiet() else [])]
        lines = []
        # With --json, stdout carries one document at the end, so the output of the verbs goes to stderr.
        shown = sys.stderr if output.is_json() else sys.stdout
        shown.flush()
        out = subprocess.PIPE if keeps else shown.fileno()
        with subprocess.Popen(command_line, cwd=self.folder, stdout=out, text=True) as child:
            for line in child.stdout or ():
                lines.append(line)
                print(line, end="", file=shown, flush=True)
        self.seconds[argv[0]] = round(time.monotonic() - begun, 1)
        if child.returncode:
            error = HomingError(
                what=f"`homing {shlex.join(argv)}` failed with exit code {child.returncode}.",
                why="See its output above.",
                fix=f"cd {shlex.quote(str(self.folder))} && homing {shlex.join(argv)}",
            )
            error.exit_code = child.returncode
            raise error
        return "".join(lines)

    def json(self, *argv: str) -> dict[str, Any]:
        command_line = [sys.executable, "-m", "homing.cli", *argv, "--json"]
        done = subprocess.run(command_line, cwd=self.folder, capture_output=True, text=True, check=True)
        document: dict[str, Any] = json.loads(done.stdout)
        return document


def _figures(trip: _Trip, sample: str) -> dict[str, Any]:
    # Imports numpy through lm: only this verb pays for it, and only at the end.
    from homing.lm.evals.bits_per_byte import bigram_entropy

    model_dir = trip.folder / "models" / trip.name
    manifest = codec.loads(CheckpointManifest, (model_dir / file_names.MANIFEST).read_bytes())
    bigram = bigram_entropy(trip.folder / "data" / trip.name)
    ledger = trip.json("ledger", manifest.run_id)
    return {
        "run": manifest.run_id,
        "steps": manifest.step,
        "tokens": manifest.num_tokens,
        "val_loss": manifest.val_loss,
        "val_bits_per_byte": manifest.val_bits_per_byte,
        "bigram_nats": bigram.nats,
        "bigram_bits_per_byte": bigram.bits_per_byte,
        "spend_usd": ledger["total_usd"],
        "sample": sample,
    }


def _say_what_came_of_it(figures: dict[str, Any], folder: Path, name: str) -> None:
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
