"""The whole workflow on this computer, with the same commands a user would type. Implements `homing quickstart`.

new -> prep -> verify -> plan -> launch on local -> watch -> fetch -> generate -> destroy -> ledger

Each step is the real verb in its own process, announced before it runs, so what works here also works when typed.
Nothing is rented: the `local` provider runs the instance as processes on this computer and charges a simulated
rate, so that limit, ledger and receipt have real figures to work with.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any, TextIO

from homing.api import notices
from homing.api.extras import need
from homing.errors import HomingError, RunFailed, UsageError
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest

__all__ = ["FIGURES", "QuickstartDone", "run_quickstart"]

TEXT = "shakespeare.txt.xz"
PROMPT = "ROMEO:"
FIGURES = "quickstart.json"


@dataclass(frozen=True)
class QuickstartDone:
    """The figures of a finished quickstart. `error` is set if the model did not learn enough."""

    folder: Path
    name: str  # of the run
    figures: dict[str, Any]
    error: RunFailed | None = None

    def to_dict(self) -> dict[str, Any]:
        return self.figures


def run_quickstart(
    folder: Path = Path("homing-quickstart"),
    *,
    name: str = "first",
    spend_limit_usd: Decimal = Decimal("0.10"),
    steps: int | None = None,
    shown: TextIO | None = None,
    is_quiet: bool = False,
) -> QuickstartDone:
    """Run every step from text to model in `folder`, without any account. Nothing is rented; it takes minutes.

    `shown`: a file for the verbs' output; their messages go to stderr. Without it, both become notices. If a verb
    fails, the run is destroyed, and HomingError is raised with the exit code of the verb.
    """
    need("lm", verb="quickstart")
    name = _free_name(folder, name)
    shorter = ["--set", f"phases.0.steps={steps}"] if steps else []
    begun = time.monotonic()
    trip = _Trip(folder, name, shown, is_quiet=is_quiet)
    trip.lay_out()
    trip.step("Write a run file from the smallest preset", "new", name, "--from", "tiny", "--text", TEXT, "--force")
    trip.step("Train a tokenizer and write token shards", "prep", name)
    trip.step("Check that the model builds, learns and fits", "verify", name)
    trip.step("Plan time and cost", "plan", name, *shorter)
    try:
        trip.step(
            "Start an instance and train", "launch", name, "--spend-limit", f"{spend_limit_usd}", "--yes", *shorter
        )
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
    return QuickstartDone(folder, name, figures, _fault(figures, folder, name, is_short=bool(steps)))


def _free_name(folder: Path, name: str) -> str:
    """Choose another name if a model of that name exists, so that a second quickstart overwrites nothing."""
    if not (folder / "models" / name).exists():
        return name
    number = next(n for n in range(2, 10_000) if not (folder / "models" / f"{name}-{n}").exists())
    notices.say(f"{folder / 'models' / name} already exists, so this run is called {name}-{number}.")
    return f"{name}-{number}"


def _fault(figures: dict[str, Any], folder: Path, name: str, *, is_short: bool) -> RunFailed | None:
    if figures["val_loss"] is None:
        return RunFailed(
            what=f"The run ended at step {figures['steps']}, before its validation loss was first measured.",
            why="It was stopped, or reached its limit.",
            fix=f"Start over: homing quickstart   Try the model: homing chat {name}",
        )
    if not is_short and not figures["val_loss"] < figures["bigram_nats"]:
        return RunFailed(
            what="The model learned no more than bigram statistics.",
            why=f"Its loss {figures['val_loss']:.3f} is not below the bigram entropy {figures['bigram_nats']:.3f}.",
            fix=f"Read {folder}/runs/{name}.yaml and the log above; run `homing quickstart` again to start over.",
        )
    return None


class _Trip:
    """Runs verbs in the quickstart's folder."""

    def __init__(self, folder: Path, name: str, shown: TextIO | None, *, is_quiet: bool) -> None:
        self.folder, self.name = folder, name
        self.seconds: dict[str, float] = {}
        self._shown, self._is_quiet = shown, is_quiet

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
        """Run `homing ARGV` in the folder. If `keeps` is set, return what it printed."""
        notices.say(f"\n== {what}\n$ homing {shlex.join(argv)}")
        begun = time.monotonic()
        command_line = [sys.executable, "-m", "homing.cli", *argv, *(["-q"] if self._is_quiet else [])]
        if self._shown is None:
            code, printed = self._noted(command_line)
        else:
            code, printed = self._passed_on(command_line, self._shown, keeps=keeps)
        self.seconds[argv[0]] = round(time.monotonic() - begun, 1)
        if code:
            error = HomingError(
                what=f"`homing {shlex.join(argv)}` failed with exit code {code}.",
                why="See its output above.",
                fix=f"cd {shlex.quote(str(self.folder))} && homing {shlex.join(argv)}",
            )
            error.exit_code = code
            raise error
        return printed

    def _passed_on(self, command_line: list[str], shown: TextIO, *, keeps: bool) -> tuple[int, str]:
        """Let the verb write directly to `shown`, so that its messages and data stay in order.

        If `keeps` is set, copy the verb's output to `shown` line by line instead, and return it.
        """
        lines = []
        shown.flush()
        out = subprocess.PIPE if keeps else shown.fileno()
        with subprocess.Popen(command_line, cwd=self.folder, stdout=out, text=True) as child:
            for line in child.stdout or ():
                lines.append(line)
                print(line, end="", file=shown, flush=True)
        return child.returncode, "".join(lines)

    def _noted(self, command_line: list[str]) -> tuple[int, str]:
        """Run the verb, turn its output and messages into notices, and return the output."""
        pipe = subprocess.PIPE
        with subprocess.Popen(command_line, cwd=self.folder, stdout=pipe, stderr=pipe, text=True) as child:
            printed, messages = child.communicate()
        for line in [*printed.splitlines(), *messages.splitlines()]:
            notices.say(line)
        return child.returncode, printed

    def json(self, *argv: str) -> dict[str, Any]:
        command_line = [sys.executable, "-m", "homing.cli", *argv, "--json"]
        done = subprocess.run(command_line, cwd=self.folder, capture_output=True, text=True, check=True)
        document: dict[str, Any] = json.loads(done.stdout)
        return document


def _figures(trip: _Trip, sample: str) -> dict[str, Any]:
    # Imported here because it imports numpy, which only this function needs.
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
        "spend_usd": ledger["made_up_usd"],
        "sample": sample,
    }
