"""`homing train`: trains on this machine, with the same trainer that runs on a rented one.

    run file -> run.json in a run directory under the home -> `python -m homing.lm.train DIR` as a child -> next verbs

The trainer is a process of its own here too: Ctrl-C reaches it as one signal, it saves, and this verb says how to go
on. The same command goes on with the newest unfinished run of that name; --fresh begins another. --extend takes more
steps with a model that is finished or was stopped.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from homing.cli import talk, terminal
from homing.cli.extend import extending_sets, tell_schedule
from homing.cli.extras import need
from homing.cli.find_model import Chosen, choose_in_run
from homing.cli.keep_log import printing
from homing.cli.options import Json, Phases, RunName, Sets, TrackerName, Trackers, Wandb, as_typed, with_phases
from homing.cli.stale_shards import refuse_stale
from homing.cli.tracking import begin, following, wanted
from homing.cli.trained_here import ENDING_S, hold, is_limit
from homing.cloud.home import Home
from homing.cloud.mark import new_run_id
from homing.config import Loaded, home, load_run, mark_smoke, newest_run
from homing.config.memory import training_memory
from homing.config.open_weights import bring
from homing.config.projects import PROJECT_NOTE, begun_elsewhere, is_still_theirs, project_note, refuse_shared
from homing.errors import DataError, HomingError, Interrupted, LimitReached, RunFailed, UsageError
from homing.units import format_bytes, format_usd
from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest
from homing.wire.event import Metric, Outcome
from homing.wire.run import Run
from homing.world import World

__all__ = ["command"]

_RUNS = "runs"
_SPARE_BYTES = 4 * 2**20  # beside the tensors: what the trainer wants free for a save, and logs
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command(
    run: RunName = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The same file, shrunk to minutes.")] = False,
    sets: Sets = None,
    phase: Phases = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an unfinished run; an error if none is.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin a new run, whatever is unfinished.")] = False,
    extend: Annotated[
        int | None,
        typer.Option(
            "--extend", metavar="STEPS", min=1, help="More steps from the newest weights, with a new warm-up."
        ),
    ] = None,
    tracker: Trackers = None,
    wandb: Wandb = False,
    run_name: TrackerName = None,
    json_: Json = False,
) -> None:
    """Train on this machine, with the same trainer that runs on a rented one."""
    again = as_typed(sets, is_smoke=smoke) + (f" --phase {shlex.quote(phase)}" if phase else "")
    again += f" --extend {extend}" if extend else ""
    sets = with_phases(sets, phase)
    if resume and fresh:
        raise UsageError(what="--resume and --fresh contradict each other.", fix="Use one of them, or neither.")
    trackers = wanted(tracker, wandb=wandb, verb="train")
    name = run or newest_run()
    loaded = load_run(name, sets, is_smoke=smoke)
    refuse_shared(loaded.file, loaded.run.name)
    typed = sets
    if extend:
        unfinished = None if fresh else _newest_unfinished(home() / _RUNS, loaded.run.name)
        more, is_begun = extending_sets(loaded, extend, unfinished)
        sets, fresh = [*sets, *more], fresh or not is_begun
        loaded = load_run(name, sets, is_smoke=smoke)
    for warning in [*loaded.warnings, *_launched(loaded.run.name)]:
        talk.say(f"warning: {warning}")
    if not loaded.is_prepared:
        raise DataError(
            what=f"The data of {loaded.run.name} is not prepared.",
            why=f"{_missing(loaded)} is not there.",
            fix=f"homing prep {name}{as_typed(typed, is_smoke=smoke)}",
        )
    refuse_stale(loaded, f"{name}{as_typed(typed, is_smoke=smoke)}")
    need("lm", verb="train")
    loaded = _with_weights(loaded, lambda: load_run(name, sets, is_smoke=smoke))
    run_dir = _run_dir(loaded, name, again, must_exist=resume, is_fresh=fresh)
    if extend:
        tell_schedule(loaded.run)
    for each in trackers:
        told = following(each, home(), run_dir.name, run_name, run=loaded.run, run_dir=str(run_dir))
        begin(told, World())
    code, caught = _run_trainer(run_dir, f"{shlex.quote(name)}{as_typed(typed, is_smoke=smoke)}")
    outcome = _read_outcome(run_dir, code)
    if smoke and outcome.state in ("done", "failed") and not caught:
        mark_smoke(loaded.file, is_passed=outcome.state == "done", figures={"run": run_dir.name})
    _tell(run_dir, name, outcome, again, caught=caught, is_smoke=smoke)


def _launched(name: str) -> list[str]:
    """Runs of this name on rented machines, a sentence each: they bill while another is trained here."""
    at_home = Home(home(), World())
    if not at_home.has_ledger:
        return []
    try:
        billing = {line.run_id: line for line in at_home.ledger.open_lines()}
        rows = [
            row for row in at_home.ledger.unfinished_runs() if row.name == name and (row.is_live or row.id in billing)
        ]
    except HomingError as exc:  # nothing here needs it
        return [f"Whether {name} is at work on a rented machine is not known: {exc.what}"]
    told = []
    for row in [row for row in rows if begun_elsewhere(row.id) is None]:
        line = billing.get(row.id)
        at = f"at {format_usd(Decimal(line.rate_usd_per_hour))}/h" if line is not None else ""
        if line is not None and not row.is_live:
            told.append(
                f"{row.id} was launched and is {row.state}, and its machine on {line.provider} may still bill, {at}."
                f" End it: homing destroy {row.id}"
            )
            continue
        rate = f" on {line.provider} {at}" if line is not None else ""
        told.append(
            f"{row.id} was launched, is {row.state}{rate}, and goes on; this trains another run beside it."
            f" See it: homing watch {row.id}   End it: homing stop {row.id}"
        )
    return told


def _missing(loaded: Loaded) -> Path:
    """What prep has not made: a phase's own data may be absent where the text of the run is there."""
    own = [phase.data for phase in loaded.run.phases if phase.data is not None]
    folders = [data.dir for data in own if not data.manifest_sha256]
    return Path(next(iter(folders), loaded.run.data.dir)) / names.MANIFEST


def _with_weights(loaded: Loaded, again: Callable[[], Loaded]) -> Loaded:
    """prep leaves public weights to the machine that trains, where that is a rented one. Here it is this computer."""
    source = loaded.source
    if source is None or all((source.papers_dir / file.name).is_file() for file in source.files):
        return loaded
    talk.say(f"Open weights: {source.address}, {format_bytes(source.num_weight_bytes)}, from the Hub.")
    bring(source)
    return again()


def _run_dir(loaded: Loaded, name: str, again: str, *, must_exist: bool, is_fresh: bool) -> Path:
    """The directory to train in, with run.json and run.yaml as the run file says now."""
    runs = home() / _RUNS
    unfinished = None if is_fresh else _newest_unfinished(runs, loaded.run.name)
    if unfinished is None and must_exist:
        raise UsageError(
            what=f"There is no unfinished run of {loaded.run.name} to go on with.",
            why=f"Looked in {runs}.",
            fix=f"homing train {name}",
        )
    run_dir = unfinished or runs / new_run_id(loaded.run.name, World())
    _refuse_if_busy(run_dir)
    _refuse_if_changed(loaded.run, run_dir, f"homing train {name}{again} --fresh")
    _check_space(loaded.run, run_dir)
    talk.say(f"{'Going on in' if unfinished else 'Training in'} {run_dir}")
    talk.say(f"See it from another terminal: homing watch {run_dir.name}")
    try:
        world = World()
        world.keep_private(home())
        world.mkdir(run_dir)
        if not hold(run_dir, f"homing train {name}{again}", World()):
            raise _busy(run_dir)
        (run_dir / names.RUN_FILE).write_text(loaded.text, encoding="utf-8")
        if not unfinished:
            (run_dir / PROJECT_NOTE).write_bytes(project_note(str(Path.cwd())))
        document = codec.dumps(dataclasses.replace(loaded.run, id=run_dir.name), indent=1)
        aside = run_dir / f".{names.RUN}.aside"
        aside.write_text(document, encoding="utf-8")
        os.replace(aside, run_dir / names.RUN)
    except OSError as exc:
        raise UsageError(
            what=f"Cannot write to {run_dir}.", why=str(exc), fix="Set HOMING_HOME to a folder that can be written."
        ) from exc
    return run_dir


def _check_space(run: Run, run_dir: Path) -> None:
    """Before the first step, for the last hangs on it: what the phases will keep, beside what lies there already."""
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    needed, free = _bytes_to_come(run, run_dir), World().free_bytes(there)
    if free >= needed + _SPARE_BYTES:
        return
    sizes = " and ".join(f"{format_bytes(training_memory(run, p).checkpoint)} ({p.kind})" for p in run.phases)
    raise UsageError(
        what=f"There is no room for the checkpoints of {run.name}.",
        why=f"They may take {format_bytes(needed)}, one is {sizes}, and {format_bytes(free)} are free at {there}.",
        fix="Free some space, keep fewer (--set checkpoint.keep_last=1), or move the home:"
        " export HOMING_HOME=/elsewhere",
    )


def _bytes_to_come(run: Run, run_dir: Path) -> int:
    """Of each phase those that are kept, the best, and the one being written; of one that is over nothing more."""
    there = [len(list((run_dir / names.CHECKPOINTS / phase.kind).glob("step-*"))) for phase in run.phases]
    first = max((number for number, count in enumerate(there) if count), default=0)
    total = 0
    for phase, count in list(zip(run.phases, there, strict=True))[first:]:
        num_saves = -(-phase.num_steps // phase.save_every) if phase.save_every else 1
        most = phase.keep_last + 2 if phase.save_every_s else min(num_saves, phase.keep_last + 2)
        total += max(1, most - count) * training_memory(run, phase).checkpoint
    return total


def _refuse_if_busy(run_dir: Path) -> None:
    """Before run.json is written: a trainer at work there must not find another run's under its feet."""
    deadline = time.monotonic() + ENDING_S * (run_dir / names.OUTCOME).exists()
    while True:
        try:
            with open(run_dir / names.TRAINER_LOCK) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as exc:
            if time.monotonic() >= deadline:
                raise _busy(run_dir) from exc
            time.sleep(0.1)
        except OSError:
            return  # no lock: no trainer was ever there


def _busy(run_dir: Path) -> UsageError:
    return UsageError(
        what=f"Another trainer is at work in {run_dir}.",
        why="The same command goes on with an unfinished run, and this one is not finished.",
        fix=f"See it: homing watch {run_dir.name}   Stop it, with a checkpoint: homing stop {run_dir.name}"
        "   Or begin another: --fresh",
    )


def _refuse_if_changed(run: Run, run_dir: Path, anew: str) -> None:
    """Before run.json is written: the trainer would refuse its own checkpoint, and what is there must stay as it is."""
    from homing.lm.train.resume import check_same

    for phase in reversed(run.phases):
        steps = sorted((run_dir / names.CHECKPOINTS / phase.kind).glob("step-*"))
        if not steps:
            continue
        try:
            found = codec.loads(CheckpointManifest, (steps[-1] / names.MANIFEST).read_bytes())
            check_same(steps[-1], found.config_sha256, run, phase)
        except (OSError, ValueError):
            return  # the trainer says what is wrong with it, and takes the one before
        except UsageError as exc:
            raise UsageError(
                what=f"{run_dir.name} is not finished, and was begun with other settings.",
                why=exc.why.replace(" in run.json", " now"),
                fix=exc.fix.replace("homing train RUN --fresh", anew),
            ) from exc
        return


def _newest_unfinished(runs: Path, name: str) -> Path | None:
    """The newest run of this name that a trainer began here, unless it is done. Launched runs lie there too, and those
    of another folder's run file of that name."""
    pattern = re.compile(re.escape(name) + r"-\d{8}-\d{6}-\w+")
    found = sorted((path for path in runs.glob(f"{name}-*") if pattern.fullmatch(path.name)), reverse=True)
    for run_dir in found:
        is_theirs = begun_elsewhere(run_dir.name) is not None or is_still_theirs(run_dir.name)
        if is_theirs or not (run_dir / names.TRAINER_LOCK).exists():
            continue
        try:
            state = codec.loads(Outcome, (run_dir / names.OUTCOME).read_bytes()).state
        except (OSError, ValueError):
            state = "unknown"  # killed before it could say
        return run_dir if state != "done" else None
    return None


def _run_trainer(run_dir: Path, typed: str) -> tuple[int, int]:
    """(the trainer's exit code, the signal that was passed on to it or 0). `typed`: the run, in what it says to do."""
    caught = 0
    argv = [sys.executable, "-m", "homing.lm.train", str(run_dir)]
    # Under --json stdout is for the document at the end; the trainer's lines are talk then.
    out = None if talk.is_quiet() else sys.stderr if talk.is_json() else sys.stdout
    # In a session of its own: Ctrl-C at the terminal reaches this process alone and is passed on once. Two of them
    # would mean "now, without a checkpoint".
    pipe = subprocess.PIPE
    # The writing end stays here and is never used: it closes when this process is gone, also by kill -9, and then the
    # trainer stops too. Nobody would know of it otherwise.
    given_end, kept_end = os.pipe()
    env = {**os.environ, names.TYPED_ENV: typed, names.STARTER_FD_ENV: str(given_end)}
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal caught
        caught = number
        if child is not None:
            child.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    # A hang-up that was ignored when we were started stays so: `nohup homing train`.
    heard = [each for each in _PASSED_ON if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in heard}  # first: nobody else would end the trainer
    try:
        child = subprocess.Popen(argv, stdout=pipe, stderr=pipe, env=env, start_new_session=True, pass_fds=[given_end])
        if caught:
            pass_on(caught, None)
        with printing(child, run_dir, out=out, err=sys.stderr):
            code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for end in (given_end, kept_end):
            os.close(end)
    return code, caught


def _read_outcome(run_dir: Path, code: int) -> Outcome:
    try:
        outcome = codec.loads(Outcome, (run_dir / names.OUTCOME).read_bytes())
    except (OSError, ValueError):
        reason = f"The trainer ended with {f'signal {-code}' if code < 0 else f'exit code {code}'} and left no word."
        return Outcome("failed", reason, names.EXIT_FAILED, t=time.time())
    return outcome


def _tell(run_dir: Path, name: str, outcome: Outcome, changes: str, *, caught: int, is_smoke: bool) -> None:
    checkpoint = run_dir / names.CHECKPOINTS / outcome.phase / names.step_dir(outcome.step)
    last, opened = _last_metric(run_dir), _opened(run_dir) if outcome.state == "done" else None
    error = _as_error(run_dir, outcome, f"homing train {name}{changes}", is_interrupted=caught != 0)
    talk.emit(
        "train/1",
        {
            "run_id": run_dir.name,
            "run_dir": str(run_dir),
            "state": outcome.state,
            "reason": outcome.reason,
            "phase": outcome.phase,
            "step": outcome.step,
            "checkpoint": str(checkpoint) if checkpoint.is_dir() else None,
            "opens": str(opened.folder) if opened else None,
            "val_loss": last.val_loss if last else None,
            "val_bits_per_byte": last.val_bits_per_byte if last else None,
            "fix": error.fix if error else None,
        },
    )
    if error and talk.is_json():
        raise typer.Exit(error.exit_code)  # the one document has said it all
    if error:
        raise error
    talk.say(f"\nThe model is in {checkpoint}")
    if opened and opened.why:
        talk.say(f"chat, generate, eval and export open {opened.folder}\n  {opened.why}")
    if sample := _last_sample(run_dir, outcome.phase):
        talk.say(f"\nA sample:\n{textwrap.indent(terminal.safe(sample), '  ')}")
    talk.say("\nNext:")
    ways = [
        f"  homing generate {run_dir.name} --prompt 'Once'   # let it go on from a prompt",
        f"  homing chat {run_dir.name}                       # talk to it",
    ]
    for way in reversed(ways) if outcome.phase in ("sft", "rl") else ways:  # what it was taught comes first
        talk.say(way)
    if is_smoke:
        talk.say(f"  homing plan {name}   # the smoke profile of {name} has passed")
        return
    talk.say(f"  homing eval {run_dir.name}                       # how good it is")
    talk.say(f"  homing export {run_dir.name}                     # for transformers and llama.cpp")
    if outcome.phase in ("pretrain", "mid"):
        talk.say(f"  homing train {name} --phase sft   # fine-tune it, with a phase of kind sft in its run file")
    talk.say(f"  homing train {name} --extend {max(1, outcome.step // 2)}   # train it further")
    talk.say(f"  homing plan {name}   # the same on a rented machine")


def _last_sample(run_dir: Path, phase: str) -> str:
    """What the model wrote last while it learned; "" where it was never asked to."""
    written = sorted((run_dir / names.SAMPLES).glob(f"{phase}-*.txt"))
    return written[-1].read_text(encoding="utf-8", errors="replace").rstrip() if written else ""


def _opened(run_dir: Path) -> Chosen | None:
    """What the next verbs will open: of a run that is done, not always what was saved last."""
    try:
        return choose_in_run(run_dir)
    except HomingError:  # said by the verb that needs it
        return None


def _as_error(run_dir: Path, outcome: Outcome, again: str, *, is_interrupted: bool) -> HomingError | None:
    run_id = run_dir.name
    if outcome.state == "done":
        return None
    if outcome.state == "failed":
        kind: type[HomingError] = Interrupted if is_interrupted else RunFailed
        at = f"at step {outcome.step:,}" if outcome.step else "before its first step"
        what = f"Training of {run_id} failed {at}."
        is_told = (run_dir / names.OUTCOME).exists()  # then the trainer has said why, in the lines above
        is_saved = any((run_dir / names.CHECKPOINTS).glob("*/step-*"))
        after = "go on from the last checkpoint" if is_saved else "begin anew, for no checkpoint was saved"
        return kind(what, why="" if is_told else outcome.reason, fix=f"Mend that, then {after}: {again}")
    kind = LimitReached if is_limit(outcome) and not is_interrupted else Interrupted
    what = f"Training of {run_id} stopped at step {outcome.step:,}, with a checkpoint."
    return kind(what, why=outcome.reason, fix=f"Go on: {again}")


def _last_metric(run_dir: Path) -> Metric | None:
    try:
        lines = (run_dir / names.METRICS).read_text(encoding="utf-8").splitlines()
        return codec.loads(Metric, lines[-1])
    except (OSError, ValueError, IndexError):
        return None
