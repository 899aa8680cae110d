"""`homing train`: train on this computer, with the same trainer as on a rented instance.

The same command resumes the newest unfinished run of that name; --fresh starts a new one. --extend trains a finished or
stopped model for more steps. On Ctrl-C, the trainer saves a checkpoint, and this verb prints how to resume.
"""

from __future__ import annotations

import sys
import textwrap
from typing import Annotated

import typer

from homing.api.extend_run import run_to_extend
from homing.api.tracking import wanted
from homing.api.train_here import TrainedHere, last_sample, train_here
from homing.cli import output
from homing.cli.options import Json, Phases, RunName, Sets, TrackerName, Trackers, Wandb
from homing.config.home_and_run_files import newest_run

__all__ = ["command"]


def command(
    run: RunName = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run a scaled-down version of the run that finishes in minutes.")
    ] = False,
    sets: Sets = None,
    phase: Phases = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an unfinished run; fail if there is none.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new run even if one is unfinished.")] = False,
    extend: Annotated[
        int | None,
        typer.Option(
            "--extend",
            metavar="STEPS",
            min=1,
            help="Train this many more steps from the newest weights, with a new warm-up.",
        ),
    ] = None,
    tracker: Trackers = None,
    wandb: Wandb = False,
    run_name: TrackerName = None,
    json_: Json = False,
) -> None:
    """Train on this machine, with the same trainer that runs on a rented one.

    The same command resumes an unfinished run.
    """
    trackers = wanted(tracker, wandb=wandb, verb="train")
    name = run or newest_run()
    # With --json, stdout is for the final document, so the trainer's output goes to stderr.
    out = None if output.is_quiet() else sys.stderr if output.is_json() else sys.stdout
    done = train_here(
        name,
        sets,
        phase=phase,
        smoke=smoke,
        resume=resume,
        fresh=fresh,
        extend=extend,
        trackers=trackers,
        tracker_name=run_name,
        out=output.line_writer(out),
        err=output.line_writer(sys.stderr),
    )
    _print_outcome(done, run_to_extend(name)[0] if extend else name, is_smoke=smoke)


def _print_outcome(done: TrainedHere, name: str, *, is_smoke: bool) -> None:
    run_dir, outcome, error, opened = done.run_dir, done.outcome, done.error, done.opened
    output.emit("train/1", done.to_dict())
    if error and output.is_json():
        raise typer.Exit(error.exit_code)  # the JSON document already contains the error
    if error:
        raise error
    if outcome.state == "stopped":  # by `homing stop`, so this is no error
        output.say(f"\n{run_dir.name} stopped at step {outcome.step:,}: {outcome.reason}")
        output.say(f"Resume: {done.again}" if done.checkpoint.is_dir() else f"Start over: {done.again}")
        return
    output.say(f"\nModel saved in {done.checkpoint}")
    if opened and opened.why:
        output.say(f"chat, generate, eval and export open {opened.folder}\n  {opened.why}")
    if sample := last_sample(run_dir, outcome.phase):
        output.say(f"\nA sample:\n{textwrap.indent(output.safe(sample), '  ')}")
    output.say("\nNext:")
    ways = [
        f"  homing generate {run_dir.name} --prompt 'Once'   # complete a prompt",
        f"  homing chat {run_dir.name}                       # chat with it",
    ]
    for way in reversed(ways) if outcome.phase in ("sft", "rl") else ways:  # the more suitable command comes first
        output.say(way)
    if is_smoke:
        output.say(f"  homing plan {name}   # the smoke run passed; plan the full run")
        return
    output.say(f"  homing eval {run_dir.name}                       # evaluate it")
    output.say(f"  homing export {run_dir.name}                     # use it in transformers and llama.cpp")
    if outcome.phase in ("pretrain", "mid"):
        output.say(f"  homing train {name} --phase sft   # fine-tune it (needs a phase of kind sft in its run file)")
    output.say(f"  homing train {name} --extend {max(1, outcome.step // 2)}   # train it further")
    output.say(
        f"  homing plan {name} --set cloud.providers=runpod   # plan the same run on a rented GPU; needs no account"
    )
