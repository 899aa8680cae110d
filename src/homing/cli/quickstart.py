"""`homing quickstart`: the whole trip on this computer, as the commands a person would type.

    new -> prep -> verify -> plan -> launch on local -> watch -> fetch -> generate -> destroy -> ledger

Each step is the real verb in a process of its own, printed before it runs, so that what works here works typed by hand.
Nothing is rented: the `local` provider runs the instance as processes on this computer and charges a made-up rate,
which makes the limit, the ledger and the receipt real arithmetic.
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

from homing.cli import talk
from homing.cli.control import usd
from homing.cli.extras import need
from homing.cli.options import Json, Yes
from homing.errors import HomingError, RunFailed, UsageError
from homing.units import format_duration, parse_usd
from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest

__all__ = ["command"]

TEXT = "shakespeare.txt.xz"
PROMPT = "ROMEO:"
FIGURES = "quickstart.json"


def command(
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where run file, data and model go.")] = Path(
        "homing-quickstart"
    ),
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the run.")] = "first",
    spend_limit: Annotated[
        str, typer.Option("--spend-limit", metavar="DOLLARS", help="Made-up dollars; the limit is real.")
    ] = "0.10",
    steps: Annotated[int | None, typer.Option("--steps", min=10, help="Train less, or more, than the preset.")] = None,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """The whole trip on this computer, in minutes, with no account anywhere."""
    try:
        limit = parse_usd(spend_limit)
    except ValueError as exc:
        raise UsageError(what=str(exc), fix="homing quickstart --spend-limit 0.10") from exc
    need("lm", verb="quickstart")
    question = "Train a small model on this computer for a few minutes? Nothing is rented and nothing leaves it."
    if not talk.ask(question, yes=yes):
        raise typer.Exit(0)

    name = _free_name(folder, name)
    shorter = ["--set", f"phases.0.steps={steps}"] if steps else []
    begun = time.monotonic()
    trip = _Trip(folder, name)
    trip.lay_out()
    trip.step("A run file from the smallest preset", "new", name, "--from", "tiny", "--text", TEXT, "--force")
    trip.step("Text to tokenizer to token shards", "prep", name)
    trip.step("Does the model build, learn and fit?", "verify", name)
    trip.step("What will it take?", "plan", name, *shorter)
    try:
        trip.step("Rent, boot, train", "launch", name, "--spend-limit", f"{limit}", "--yes", *shorter)
        trip.step("Watch it learn", "watch", name)
        trip.step("Bring the model home, verified by hash", "fetch", name)
        speak = ("generate", name, "--prompt", PROMPT, "--tokens", "160", "--seed", "1")
        sample = trip.step("Let it speak", *speak, keeps=True)
    except BaseException:
        # Whatever went wrong, nothing may be left running; a second failure must not hide the first.
        with contextlib.suppress(HomingError):
            trip.step("Leave nothing running", "destroy", name, "--yes")
        raise
    trip.step("End billing, confirmed", "destroy", name, "--yes")
    trip.step("The receipt", "ledger", name)

    figures = _figures(trip, sample) | {"seconds": round(time.monotonic() - begun, 1), "step_seconds": trip.seconds}
    (folder / FIGURES).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    talk.emit("quickstart/1", figures)
    if figures["val_loss"] is None:
        raise RunFailed(
            what=f"The run ended at step {figures['steps']}, before its validation loss was first measured.",
            why="It was stopped, or reached its limit.",
            fix=f"To begin afresh: homing quickstart   What it says by now: homing chat {name}",
        )
    _say_what_came_of_it(figures, folder, name)
    if not steps and not figures["val_loss"] < figures["bigram_nats"]:
        raise RunFailed(
            what="The model learned no more than which token follows which.",
            why=f"Its loss {figures['val_loss']:.3f} is not under the bigram entropy {figures['bigram_nats']:.3f}.",
            fix=f"Read {folder}/runs/{name}.yaml and the log above; `homing quickstart` again starts afresh.",
        )


def _free_name(folder: Path, name: str) -> str:
    """Another name where a model of that name lies already: a second quickstart takes nothing away."""
    if not (folder / "models" / name).exists():
        return name
    number = next(n for n in range(2, 10_000) if not (folder / "models" / f"{name}-{n}").exists())
    talk.say(f"{folder / 'models' / name} is there already, so this run is called {name}-{number}.")
    return f"{name}-{number}"


class _Trip:
    """The folder, and one verb after another inside it."""

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
        """Runs `homing ARGV` in the folder. Its stdout is its own, so that talk and data stay in order; where it is
        kept, it is shown as it comes and returned."""
        talk.say(f"\n== {what}\n$ homing {shlex.join(argv)}")
        begun = time.monotonic()
        command_line = [sys.executable, "-m", "homing.cli", *argv, *(["-q"] if talk.is_quiet() else [])]
        lines = []
        # Under --json stdout carries one document at the end; what the verbs print is talk then.
        shown = sys.stderr if talk.is_json() else sys.stdout
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
                why="Its own words stand above.",
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
    # numpy, through lm: only this verb pays for it, and only at the end.
    from homing.lm.evals.bigram import bigram_entropy

    model_dir = trip.folder / "models" / trip.name
    manifest = codec.loads(CheckpointManifest, (model_dir / names.MANIFEST).read_bytes())
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
    talk.say(
        f"\nDone in {format_duration(figures['seconds'])} for {usd(figures['spend_usd'])} (made up)."
        f" Validation loss {figures['val_loss']:.3f} nats per token, {figures['val_bits_per_byte']:.3f} bits per byte;"
        f"\nknowing only the token before, the best is {figures['bigram_nats']:.3f}."
        f" The figures are in {folder / FIGURES}.\n\nNext:\n"
        f"{_to_activate()}"
        f"  cd {shlex.quote(str(folder))}\n"
        f"  homing chat {name}                          # talk to it\n"
        f"  homing generate {name} --prompt 'JULIET:'   # or let it go on from a prompt\n"
        f"  homing eval {name}                          # measure it, with intervals\n"
        f"  homing new mine --from tiny --text YOUR_TEXT.txt && homing prep mine\n"
        f"  homing runs                                # nothing is left running"
    )


def _to_activate() -> str:
    """After `make demo` the verbs below are not on the person's path yet."""
    activate = Path(sys.executable).parent / "activate"
    if shutil.which("homing") or not activate.is_file():
        return ""
    return f"  source {activate}\n"
