"""Train on this computer, with the same trainer as on a rented instance. Implements `homing train`.

run file -> run.json in a run directory under $HOMING_HOME -> `python -m homing.lm.train DIR` as a child -> its outcome

The trainer is a separate process here too: on Ctrl-C it gets one signal and saves a checkpoint. The same call resumes
the newest unfinished run of that name; `fresh` starts a new one. `extend` trains a finished or stopped model for more
steps.

Its output goes to the caller and to the run's logs/trainer.log, as on a rented instance, through one thread per stream.
Its pipes are always drained, so neither a closed terminal nor a full disk can block the trainer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import FrameType
from typing import IO, Any

from homing.api import notices
from homing.api.data.stale_shards import refuse_stale
from homing.api.extend_run import extending_sets, print_schedule, run_to_extend
from homing.api.extras import need
from homing.api.lookup.find_models import Chosen, choose_in_run
from homing.api.lookup.local_runs import ENDING_S, STOP_REASON, hold, is_limit
from homing.api.tracking import begin, following
from homing.cloud.home import Home
from homing.cloud.ledger.mark import new_run_id
from homing.config.estimate.memory import training_memory
from homing.config.home_and_run_files import (
    PROJECT_NOTE,
    begun_elsewhere,
    belongs_to_other_folder,
    home,
    newest_run,
    project_note,
    refuse_shared,
)
from homing.config.load import Loaded, as_typed, load_run, with_phases
from homing.config.resolve.smoke_profile import mark_smoke
from homing.config.weights.open_weights import bring
from homing.errors import DataError, HomingError, Interrupted, LimitReached, RunFailed, UsageError
from homing.redact import redact
from homing.units import format_bytes, format_usd
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest
from homing.wire.event_lines import Metric, Outcome
from homing.wire.run_json import Run
from homing.world import World

__all__ = ["TrainedHere", "Write", "ended_as", "last_sample", "log_path", "newest_unfinished", "printing", "train_here"]

Write = Callable[[bytes], bool]  # shows one line; returns False once its reader is gone, and is then not called again

_RUNS = "runs"
_SPARE_BYTES = 4 * 2**20  # disk space needed besides the tensors, for the rest of a checkpoint and for logs
# Time to read what is still in the pipes after the trainer has ended. A process that it left behind may hold the
# pipes open forever.
_LAST_LINES_S = 5.0
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class TrainedHere:
    """The result of training on this computer."""

    run_dir: Path
    outcome: Outcome
    error: HomingError | None  # None if the run is done, or ended because a person ran `homing stop`
    opened: Chosen | None  # the checkpoint that generate, chat and export open
    checkpoint: Path
    again: str  # the command that resumes it

    def to_dict(self) -> dict[str, Any]:
        last = _last_metric(self.run_dir)
        return {
            "run_id": self.run_dir.name,
            "run_dir": str(self.run_dir),
            "state": self.outcome.state,
            "reason": self.outcome.reason,
            "phase": self.outcome.phase,
            "step": self.outcome.step,
            "checkpoint": str(self.checkpoint) if self.checkpoint.is_dir() else None,
            "opens": str(self.opened.folder) if self.opened else None,
            "val_loss": last.val_loss if last else None,
            "val_bits_per_byte": last.val_bits_per_byte if last else None,
            "fix": self.error.fix if self.error else None,
            "again": self.again,
        }


def train_here(
    name: str | None = None,
    sets: Sequence[str] | None = None,
    *,
    phase: str | None = None,
    smoke: bool = False,
    resume: bool = False,
    fresh: bool = False,
    extend: int | None = None,
    trackers: Sequence[str] = (),
    tracker_name: str | None = None,
    out: Write | None = None,
    err: Write | None = None,
) -> TrainedHere:
    """Train, and return the result when training ends. `out`, `err`: functions that show the trainer's lines.

    `name`: a run file; None: the newest.
    """
    if resume and fresh:
        raise UsageError(what="--resume and --fresh cannot be combined.", fix="Use only one of them.")
    name = name or newest_run()
    again = as_typed(sets, is_smoke=smoke) + (f" --phase {shlex.quote(phase)}" if phase else "")
    again += f" --extend {extend}" if extend else ""
    sets = with_phases(sets, phase)
    typed_run, run_id = name, ""
    if extend:
        name, run_id = run_to_extend(name)
    loaded = load_run(name, sets, is_smoke=smoke)
    refuse_shared(loaded.file, loaded.run.name)
    typed = sets
    if extend:
        unfinished = None if fresh else newest_unfinished(home() / _RUNS, loaded.run.name)
        more, is_begun = extending_sets(loaded, extend, unfinished, run_id)
        sets, fresh = [*sets, *more], fresh or not is_begun
        loaded = load_run(name, sets, is_smoke=smoke)
    for warning in [*loaded.warnings, *_launched(loaded.run.name)]:
        notices.say(f"warning: {warning}")
    if not loaded.is_prepared:
        raise DataError(
            what=f"The data of {loaded.run.name} is not prepared.",
            why=f"{_missing(loaded)} does not exist.",
            fix=f"homing prep {name}{as_typed(typed, is_smoke=smoke)}",
        )
    refuse_stale(loaded, f"{name}{as_typed(typed, is_smoke=smoke)}")
    need("lm", verb="train")
    loaded = _with_weights(loaded, lambda: load_run(name, sets, is_smoke=smoke))
    run_dir = _run_dir(loaded, typed_run, again, must_exist=resume, is_fresh=fresh)
    if extend:
        print_schedule(loaded.run)
    for each in trackers:
        follower = following(each, home(), run_dir.name, tracker_name, run=loaded.run, run_dir=str(run_dir))
        begin(follower, World())
    code, caught = _run_trainer(run_dir, f"{shlex.quote(name)}{as_typed(typed, is_smoke=smoke)}", out, err)
    outcome = _read_outcome(run_dir, code)
    if smoke and outcome.state in ("done", "failed") and not caught:
        mark_smoke(loaded.file, is_passed=outcome.state == "done", figures={"run": run_dir.name})
    return ended_as(run_dir, outcome, f"homing train {typed_run}{again}", is_interrupted=caught != 0)


def ended_as(run_dir: Path, outcome: Outcome, again: str, *, is_interrupted: bool) -> TrainedHere:
    """Return how the training ended. `again`: the command that resumes it."""
    checkpoint = run_dir / file_names.CHECKPOINTS / outcome.phase / file_names.step_dir(outcome.step)
    opened = _opened(run_dir) if outcome.state == "done" else None
    error = _as_error(run_dir, outcome, again, is_interrupted=is_interrupted)
    return TrainedHere(run_dir, outcome, error, opened, checkpoint, again)


def _launched(name: str) -> list[str]:
    """Return a warning for each run of this name on a rented instance, which is billing while a run trains here."""
    at_home = Home(home(), World())
    if not at_home.has_ledger:
        return []
    try:
        billing = {line.run_id: line for line in at_home.ledger.open_lines()}
        rows = [
            row for row in at_home.ledger.unfinished_runs() if row.name == name and (row.is_live or row.id in billing)
        ]
    except HomingError as exc:  # training here does not need the ledger
        return [f"Cannot tell whether {name} is running on a rented instance: {exc.what}"]
    messages = []
    for row in [row for row in rows if begun_elsewhere(row.id) is None]:
        line = billing.get(row.id)
        at = f"at {format_usd(Decimal(line.rate_usd_per_hour))}/h" if line is not None else ""
        if line is not None and not row.is_live:
            messages.append(
                f"{row.id} was launched and is {row.state}; its instance on {line.provider} may still be billing, {at}."
                f" End it: homing destroy {row.id}"
            )
            continue
        rate = f" on {line.provider} {at}" if line is not None else ""
        messages.append(
            f"{row.id} was launched and is still {row.state}{rate}; this command trains a separate run."
            f" See it: homing watch {row.id}   End it: homing stop {row.id}"
        )
    return messages


def _missing(loaded: Loaded) -> Path:
    """Return the first missing manifest: a phase's own data may be absent even if the run's text is prepared."""
    own = [phase.data for phase in loaded.run.phases if phase.data is not None]
    folders = [data.dir for data in own if not data.manifest_sha256]
    return Path(next(iter(folders), loaded.run.data.dir)) / file_names.MANIFEST


def _with_weights(loaded: Loaded, again: Callable[[], Loaded]) -> Loaded:
    """Download public open weights, because prep leaves their download to the computer that trains."""
    source = loaded.source
    if source is None or all((source.metadata_dir / file.name).is_file() for file in source.files):
        return loaded
    notices.say(f"Downloading open weights from the Hub: {source.address}, {format_bytes(source.num_weight_bytes)}.")
    bring(source)
    return again()


def _run_dir(loaded: Loaded, name: str, again: str, *, must_exist: bool, is_fresh: bool) -> Path:
    """Return the directory to train in, with run.json and run.yaml from the current run file."""
    runs = home() / _RUNS
    unfinished = None if is_fresh else newest_unfinished(runs, loaded.run.name)
    if unfinished is None and must_exist:
        raise UsageError(
            what=f"{loaded.run.name} has no unfinished run to resume.",
            why=f"Looked in {runs}.",
            fix=f"homing train {name}",
        )
    run_dir = unfinished or runs / new_run_id(loaded.run.name, World())
    _refuse_if_busy(run_dir)
    _refuse_if_changed(loaded.run, run_dir, f"homing train {name}{again} --fresh")
    _check_space(loaded.run, run_dir)
    notices.say(f"{'Resuming in' if unfinished else 'Training in'} {run_dir}")
    notices.say(f"Watch it from another terminal: homing watch {run_dir.name}")
    try:
        world = World()
        world.keep_private(home())
        world.mkdir(run_dir)
        if not hold(run_dir, f"homing train {name}{again}", World()):
            raise _busy(run_dir)
        (run_dir / file_names.RUN_FILE).write_text(loaded.text, encoding="utf-8")
        if not unfinished:
            (run_dir / PROJECT_NOTE).write_bytes(project_note(str(Path.cwd())))
        document = codec.dumps(dataclasses.replace(loaded.run, id=run_dir.name), indent=1)
        temporary = run_dir / f".{file_names.RUN}.partial"
        temporary.write_text(document, encoding="utf-8")
        os.replace(temporary, run_dir / file_names.RUN)
    except OSError as exc:
        raise UsageError(
            what=f"Cannot write to {run_dir}.", why=str(exc), fix="Set HOMING_HOME to a writable folder."
        ) from exc
    return run_dir


def _check_space(run: Run, run_dir: Path) -> None:
    """Before the first step, check that the disk has room for all checkpoints that will be kept."""
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    needed, free = _bytes_to_come(run, run_dir), World().free_bytes(there)
    if free >= needed + _SPARE_BYTES:
        return
    sizes = " and ".join(f"{format_bytes(training_memory(run, p).checkpoint)} ({p.kind})" for p in run.phases)
    raise UsageError(
        what=f"Not enough disk space for the checkpoints of {run.name}.",
        why=f"They may take {format_bytes(needed)} (one takes {sizes}); {there} has {format_bytes(free)} free.",
        fix="Free some space, keep fewer checkpoints (--set checkpoint.keep_last=1), or use another homing home"
        " directory: export HOMING_HOME=/elsewhere",
    )


def _bytes_to_come(run: Run, run_dir: Path) -> int:
    """Return the number of bytes still to be written.

    Each phase needs room for the checkpoints it keeps, its best checkpoint, and the one being written. Phases that have
    finished need no more room.
    """
    there = [len(list((run_dir / file_names.CHECKPOINTS / phase.kind).glob("step-*"))) for phase in run.phases]
    first = max((number for number, count in enumerate(there) if count), default=0)
    total = 0
    for phase, count in list(zip(run.phases, there, strict=True))[first:]:
        num_saves = -(-phase.num_steps // phase.save_every) if phase.save_every else 1
        most = phase.keep_last + 2 if phase.save_every_s else min(num_saves, phase.keep_last + 2)
        total += max(1, most - count) * training_memory(run, phase).checkpoint
    return total


def _refuse_if_busy(run_dir: Path) -> None:
    """Raise UsageError if a trainer is running in the directory, before run.json is overwritten."""
    deadline = time.monotonic() + ENDING_S * (run_dir / file_names.OUTCOME).exists()
    while True:
        try:
            with open(run_dir / file_names.TRAINER_LOCK) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as exc:
            if time.monotonic() >= deadline:
                raise _busy(run_dir) from exc
            time.sleep(0.1)
        except OSError:
            return  # without a lock file, no trainer has ever run here


def _busy(run_dir: Path) -> UsageError:
    return UsageError(
        what=f"Another trainer is running in {run_dir}.",
        why="This command would resume that run, but it is still being trained.",
        fix=f"Watch it: homing watch {run_dir.name}   Save and stop it: homing stop {run_dir.name}"
        "   Or start another run: --fresh",
    )


def _refuse_if_changed(run: Run, run_dir: Path, anew: str) -> None:
    """Refuse changed settings before run.json is overwritten, because the trainer would reject the old checkpoint."""
    from homing.lm.train.checkpoints.compatibility import check_same

    for phase in reversed(run.phases):
        steps = sorted((run_dir / file_names.CHECKPOINTS / phase.kind).glob("step-*"))
        if not steps:
            continue
        try:
            found = codec.loads(CheckpointManifest, (steps[-1] / file_names.MANIFEST).read_bytes())
            check_same(steps[-1], found.config_sha256, run, phase)
        except (OSError, ValueError):
            return  # the trainer reports the problem and uses the previous checkpoint
        except UsageError as exc:
            raise UsageError(
                what=f"{run_dir.name} is not finished and was started with other settings.",
                why=exc.why.replace(" in run.json", " now"),
                fix=exc.fix.replace("homing train RUN --fresh", anew),
            ) from exc
        return


def newest_unfinished(runs: Path, name: str) -> Path | None:
    """Return the newest run of this name that was trained here; None if that run is done.

    Skips launched runs, and runs of the same name that were started in another folder: `runs` contains them, too.
    """
    pattern = re.compile(re.escape(name) + r"-\d{8}-\d{6}-\w+")
    found = sorted((path for path in runs.glob(f"{name}-*") if pattern.fullmatch(path.name)), reverse=True)
    for run_dir in found:
        is_elsewhere = begun_elsewhere(run_dir.name) is not None or belongs_to_other_folder(run_dir.name)
        if is_elsewhere or not (run_dir / file_names.TRAINER_LOCK).exists():
            continue
        try:
            state = codec.loads(Outcome, (run_dir / file_names.OUTCOME).read_bytes()).state
        except (OSError, ValueError):
            state = "unknown"  # killed before it could write an outcome
        return run_dir if state != "done" else None
    return None


def _run_trainer(run_dir: Path, typed: str, out: Write | None, err: Write | None) -> tuple[int, int]:
    """Run the trainer. Return its exit code, and the signal that was passed on to it (0 if none was).

    `typed`: the run as the user typed it, for the commands in the trainer's messages.
    """
    caught = 0
    argv = [sys.executable, "-m", "homing.lm.train", str(run_dir)]
    # The trainer runs in its own session, so that Ctrl-C at the terminal reaches only this process, which passes it on
    # once. Two signals would mean "stop now, without a checkpoint".
    pipe = subprocess.PIPE
    # This process holds the write end of the pipe open, but never writes to it. When this process dies, even by
    # kill -9, the pipe closes and the trainer stops too; otherwise, the trainer would continue unnoticed.
    given_end, kept_end = os.pipe()
    env = {**os.environ, file_names.TYPED_ENV: typed, file_names.STARTER_FD_ENV: str(given_end)}
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal caught
        caught = number
        if child is not None:
            child.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    # A SIGHUP that was ignored at the start stays ignored, as with `nohup homing train`.
    numbers = _PASSED_ON if threading.current_thread() is threading.main_thread() else ()  # only that thread can
    forwarded = [each for each in numbers if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
    # set the handlers before the trainer starts, because signals to this process reach it only through them
    before = {number: signal.signal(number, pass_on) for number in forwarded}
    try:
        child = subprocess.Popen(argv, stdout=pipe, stderr=pipe, env=env, start_new_session=True, pass_fds=[given_end])
        if caught:
            pass_on(caught, None)
        with printing(child, run_dir, out=out, err=err):
            code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for end in (given_end, kept_end):
            os.close(end)
    return code, caught


def _read_outcome(run_dir: Path, code: int) -> Outcome:
    try:
        outcome = codec.loads(Outcome, (run_dir / file_names.OUTCOME).read_bytes())
    except (OSError, ValueError):
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        reason = f"The trainer ended with {ending} and left no error message."
        return Outcome("failed", reason, file_names.EXIT_FAILED, t=time.time())
    return outcome


def last_sample(run_dir: Path, phase: str) -> str:
    """Return the last sample written during training; "" if there is none."""
    written = sorted((run_dir / file_names.SAMPLES).glob(f"{phase}-*.txt"))
    return written[-1].read_text(encoding="utf-8", errors="replace").rstrip() if written else ""


def _opened(run_dir: Path) -> Chosen | None:
    """Return the checkpoint that the next verbs will open; for a finished run that is not always the last one saved."""
    try:
        return choose_in_run(run_dir)
    except HomingError:  # a verb that needs the checkpoint reports why it cannot be opened
        return None


def _as_error(run_dir: Path, outcome: Outcome, again: str, *, is_interrupted: bool) -> HomingError | None:
    run_id = run_dir.name
    if outcome.state == "done":
        return None
    if outcome.state == "failed":
        kind: type[HomingError] = Interrupted if is_interrupted else RunFailed
        at = f"at step {outcome.step:,}" if outcome.step else "before its first step"
        what = f"Training of {run_id} failed {at}."
        is_printed = (run_dir / file_names.OUTCOME).exists()  # the trainer has already printed the reason
        is_saved = any((run_dir / file_names.CHECKPOINTS).glob("*/step-*"))
        after = "resume from the last checkpoint" if is_saved else "start over, because no checkpoint was saved"
        return kind(what, why="" if is_printed else outcome.reason, fix=f"Fix that, then {after}: {again}")
    if outcome.reason == STOP_REASON and not is_interrupted:
        return None
    kind = LimitReached if is_limit(outcome) and not is_interrupted else Interrupted
    is_saved = any((run_dir / file_names.CHECKPOINTS).glob(f"*/step-*/{file_names.MANIFEST}"))
    what = f"Training of {run_id} stopped at step {outcome.step:,}, {'with a' if is_saved else 'without a'} checkpoint."
    return kind(what, why=outcome.reason, fix=f"{'Resume' if is_saved else 'Start over'}: {again}")


def _last_metric(run_dir: Path) -> Metric | None:
    try:
        lines = (run_dir / file_names.METRICS).read_text(encoding="utf-8").splitlines()
        return codec.loads(Metric, lines[-1])
    except (OSError, ValueError, IndexError):
        return None


# --- the trainer's output ---


def log_path(run_dir: Path) -> Path:
    return run_dir / file_names.LOGS / "trainer.log"


@contextlib.contextmanager
def printing(child: subprocess.Popen[bytes], run_dir: Path, *, out: Write | None, err: Write | None) -> Iterator[None]:
    """Copy the trainer's output until it ends. `out`, `err`: functions that show its lines; None: only log them."""
    assert child.stdout is not None, "it must be opened with pipes"
    assert child.stderr is not None, "it must be opened with pipes"
    keeper = _Keeper(log_path(run_dir))
    pairs = ((child.stdout, out), (child.stderr, err))
    threads = [threading.Thread(target=keeper.pass_on, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(_LAST_LINES_S)
        keeper.close()


class _Keeper:
    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()  # keeps lines of the two streams from mixing
        self._file: IO[bytes] | None = None
        with contextlib.suppress(OSError):  # a log is optional: the terminal shows it, metrics.jsonl has the figures
            path.parent.mkdir(exist_ok=True)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close()

    def pass_on(self, source: IO[bytes], write: Write | None) -> None:
        with source:
            for line in source:
                with self._lock:
                    if self._file is not None:
                        with contextlib.suppress(OSError):
                            self._file.write(_redacted(line))
                    if write is not None and not write(line):
                        write = None

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def _redacted(line: bytes) -> bytes:
    """Mask keys. A line without a key is unchanged, byte for byte."""
    text = line.decode("utf-8", "surrogateescape")
    return redact(text).encode("utf-8", "surrogateescape")
