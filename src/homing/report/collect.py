"""Builds the Report of a run from stored data: run directory, ledger, data manifest.

The run directory is read from the store, or from its local copy. For a launched run, the store is authoritative. If
the store cannot be read, or no longer contains the run, the report uses the local copy that `fetch` downloaded, and
says so. If a document is missing or damaged, its part of the report stays empty.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from homing import __version__
from homing.cloud.artifacts.checkpoints import best_step, list_checkpoints
from homing.cloud.artifacts.remove_from_store import kept_by
from homing.cloud.contact import action_log
from homing.cloud.contact.heartbeats import Tail, read_document
from homing.cloud.contact.read_metrics import MetricLog
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.config.home_and_run_files import MODELS, manifest_in
from homing.errors import HomingError, UsageError
from homing.report import run_history
from homing.report.report_data import Attempt, Data, Eval, Kept, Made, Report, Sample
from homing.store import FileStore, NotInStore, Store, run_key
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest
from homing.wire.event_lines import Event, Metric, Outcome
from homing.wire.run_json import Run
from homing.wire.shard_manifest import DataManifest, Split

__all__ = ["Subject", "add_evals", "read_report"]

T = TypeVar("T")

_MOST_FILES = 20  # maximum number of source text files listed in the report


@dataclass(frozen=True)
class Subject:
    """The run to report on, as already looked up by the caller."""

    id: str
    name: str
    state: str
    reason: str
    row: RunRow | None  # None for a run trained on this computer, which is not in the ledger


def read_report(home: Home, subject: Subject, models: Path = MODELS, metrics: Sequence[Metric] | None = None) -> Report:
    """Return the report on the run. A caller that already has the run's metrics passes them as `metrics`."""
    problems: list[str] = []
    files = _RunFiles(home, subject, problems)
    run, outcome = files.run(), files.document(file_names.OUTCOME, Outcome)
    metrics = files.metrics() if metrics is None else metrics
    actions = action_log.read(home, subject.id) if subject.row is not None else []
    events = run_history.unique([*files.lines(file_names.EVENTS, Event), *actions])
    order = [phase.kind for phase in run.phases] if run is not None else []
    kept, choices = files.checkpoints(order)
    reached = {outcome.phase: outcome.step} if outcome is not None else {}
    for each in kept:
        reached[each.phase] = max(each.step, reached.get(each.phase, 0))
    phases = [
        dataclasses.replace(phase, choices=choices.get(phase.kind, {}))
        for phase in run_history.phases(run.phases if run is not None else [], metrics, reached)
    ]
    times = [event.t for event in events] + [metric.t for metric in metrics]
    ended_at = outcome.t if outcome is not None and outcome.t else None
    report = Report(
        run=subject.id,
        name=subject.name,
        state=subject.state,
        reason=subject.reason,
        is_trained_here=subject.row is None,
        is_finished=subject.state == "done",
        made_at=home.world.now(),
        version=__version__,
        began_at=min(times, default=None),
        ended_at=ended_at,
        made=_made(run) if run is not None else None,
        run_file=files.text(file_names.RUN_FILE),
        data=list(_all_data(files, run)) if run is not None else [],
        phases=phases,
        happenings=run_history.happenings(events),
        samples=files.samples(order),
        machines=run_history.machines(events),
        kept=[*kept, *_fetched(subject.id, models)],
        problems=problems,
    )
    return report if subject.row is None else _with_money(report, home, subject.row, files)


class _RunFiles:
    """Reads the run directory from the store, or from its local copy."""

    def __init__(self, home: Home, subject: Subject, problems: list[str]) -> None:
        self.home, self.id, self.problems = home, subject.id, problems
        self.here = FileStore(str(home.path), home.world, create=False)
        self.is_stored = False  # True if `self.store` is the store of a launched run, False if it is the local copy
        self.store: Store = self.here
        if subject.row is not None:
            self.store = self._store_of(subject.row)

    def _store_of(self, row: RunRow) -> Store:
        try:
            store = self.home.store_of(row)
            if store.list(run_key(row.id) + "/"):
                self.is_stored = True
                return store
            why = "it has no data for this run"
        except (HomingError, OSError) as exc:
            why = str(exc).splitlines()[0]
        self.problems.append(
            f"{row.store} could not be read ({why}), so this report uses the local copy from the last fetch."
        )
        return self.here

    def run(self) -> Run | None:
        """Return the resolved run, preferably from the local copy, which names the local data folder."""
        at_home = self.home.run_dir(self.id) / file_names.RUN
        if self.home.world.exists(at_home):
            try:
                return codec.loads(Run, self.home.world.read(at_home))
            except codec.WireError as exc:
                self.problems.append(f"{at_home} cannot be read: {exc}")
        return self.document(file_names.RUN, Run)

    def document(self, name: str, cls: type[T]) -> T | None:
        try:
            return read_document(self.store, run_key(self.id, name), cls)
        except (HomingError, OSError) as exc:
            self._say(exc)
            return None

    def text(self, name: str) -> str:
        """Return a text file of the run, preferably the local copy; "" if there is none."""
        at_home = self.home.run_dir(self.id) / name
        try:
            found = self.home.world.read(at_home) if self.home.world.exists(at_home) else None
            return (self.store.read(run_key(self.id, name)) if found is None else found).decode("utf-8", "replace")
        except NotInStore:
            return ""
        except (HomingError, OSError) as exc:
            self._say(exc)
            return ""

    def metrics(self) -> list[Metric]:
        try:
            return MetricLog(self.store, run_key(self.id, file_names.METRICS)).fresh()
        except (HomingError, OSError) as exc:
            self._say(exc)
            return []

    def lines(self, name: str, cls: type[T]) -> list[T]:
        try:
            return Tail(self.store, run_key(self.id, name)).documents(cls)
        except (HomingError, OSError) as exc:
            self._say(exc)
            return []

    def samples(self, order: Sequence[str]) -> list[Sample]:
        try:
            return run_history.samples(self.store, self.id, order)
        except (HomingError, OSError) as exc:
            self._say(exc)
            return []

    def checkpoints(self, order: list[str]) -> tuple[list[Kept], dict[str, dict[str, Any]]]:
        """Return the run directory's complete checkpoints, newest first, and the trainer's choices for each phase."""
        try:
            found = list_checkpoints(self.store, self.id, order)
            best = {each.manifest.phase: best_step(self.store, self.id, each.manifest.phase) for each in found}
        except (HomingError, OSError) as exc:
            self._say(exc)
            return [], {}
        kept = []
        for number, each in enumerate(found):
            is_best = not each.problem and best[each.manifest.phase] == each.manifest.step
            called = ["latest"] * (number == 0) + ["best"] * is_best
            kept.append(_kept(self._place(run_key(self.id, each.folder)), each.manifest, called, each.problem))
        choices = {each.manifest.phase: each.manifest.choices for each in reversed(found) if each.manifest.choices}
        return kept, choices

    def _place(self, key: str) -> str:
        """Return where the user can find one of the run's files: an address in the store, or a local path."""
        return f"{self.store.url}/{key}" if self.is_stored else str(self.home.path / key)

    def data_manifest(self, folder: str, sha256: str) -> tuple[DataManifest | None, str]:
        """Find the data manifest by its hash, in the store or the data folder; return it, or None and the problem.

        If the hash differs, the data was prepared again later, so the run was not trained on the current data.
        """
        why = "it is neither in the store nor on this computer"
        for read in self._manifest_places(folder, sha256):
            try:
                text = read()
            except (HomingError, OSError):
                continue
            if hashlib.sha256(text).hexdigest() != sha256:
                why = "the data in its folder has been prepared again since the run"
                continue
            try:
                return codec.loads(DataManifest, text), ""
            except codec.WireError as exc:
                why = str(exc)
        return None, why

    def _manifest_places(self, folder: str, sha256: str) -> Iterator[Callable[[], bytes]]:
        if self.is_stored:
            yield lambda: self.store.read(f"{file_names.STORE_OBJECTS}/{sha256}")
        # A relative `folder` is relative to the run directory.
        yield lambda: self.home.world.read(self.home.run_dir(self.id) / folder / file_names.MANIFEST)

    def _say(self, exc: Exception) -> None:
        said = str(exc).splitlines()[0]
        if said not in self.problems:
            self.problems.append(said)


def _made(run: Run) -> Made:
    return Made(
        seed=run.seed,
        model=dataclasses.asdict(run.model),
        num_params=run.sizes.num_params,
        flops_per_token=run.sizes.flops_per_token,
        code_version=run.code_version,
        run_file_sha256=run.run_file_sha256,
        base=run.base.address if run.base is not None else "",
        base_licence=run.base.licence if run.base is not None else "",
    )


def _all_data(files: _RunFiles, run: Run) -> Iterator[Data]:
    if run.data.manifest_sha256:  # may be empty in a run without a pretrain phase
        planned = {"train": run.data.num_train_tokens, "val": run.data.num_val_tokens}
        yield _data(files, "the run", run.data.dir, run.data.manifest_sha256, planned)
    for phase in run.phases:
        if phase.data is not None and phase.data.manifest_sha256:
            planned = {"train": phase.data.num_train_tokens, "val": phase.data.num_val_tokens}
            yield _data(files, f"{phase.kind} ({phase.data.kind})", phase.data.dir, phase.data.manifest_sha256, planned)


def _data(files: _RunFiles, of: str, folder: str, sha256: str, tokens: dict[str, int]) -> Data:
    manifest, problem = files.data_manifest(folder, sha256)
    if manifest is None:
        return Data(of, sha256, splits={name: {"num_tokens": count} for name, count in tokens.items()}, problem=problem)
    return Data(
        of,
        sha256,
        manifest.vocab_size,
        manifest.tokenizer_sha256,
        {name: _split(split) for name, split in manifest.splits.items()},
        len(manifest.source),
        sum(file.num_bytes for file in manifest.source),
        [dataclasses.asdict(file) for file in manifest.source[:_MOST_FILES]],
        manifest.code_version,
    )


def _split(split: Split) -> dict[str, int]:
    return {
        "num_tokens": split.num_tokens,
        "num_documents": split.num_documents,
        "num_text_bytes": split.num_text_bytes,
    }


def _kept(where: str, manifest: CheckpointManifest, called: list[str], problem: str = "") -> Kept:
    weights = {
        file.name: file.sha256
        for file in manifest.files
        if file.name.endswith(".safetensors") and not file.name.startswith("optimizer")
    }
    size = sum(file.num_bytes for file in manifest.files)
    val_loss, bits = manifest.val_loss, manifest.val_bits_per_byte
    return Kept(where, manifest.phase, manifest.step, size, weights, called, val_loss, bits, problem)


def _fetched(run_id: str, models: Path) -> Iterator[Kept]:
    """Yield the models in the folder `models` that this run trained."""
    for folder in sorted(models.iterdir()) if models.is_dir() else []:
        manifest = manifest_in(folder)
        if manifest is not None and manifest.run_id == run_id:
            yield _kept(str(folder), manifest, ["fetched"])


def _with_money(report: Report, home: Home, row: RunRow, files: _RunFiles) -> Report:
    lines, now = home.ledger.lines(row.id), home.world.now()
    bills = home.ledger.bills(line.mark for line in lines)
    stays = kept_by(home, row) if files.is_stored and not row.is_live else None
    return dataclasses.replace(
        report,
        began_at=row.created_at,
        ended_at=row.ended_at,
        offer=_offer(files),
        attempts=[_attempt(line, now, meter.compare(line, bills, now)) for line in lines],
        spend_usd=str(meter.total_spend(lines, now)),
        spend_limit_usd=row.spend_limit_usd,
        is_at_most=any(line.is_at_most for line in lines),
        stored=f"{row.store}: {stays}" if stays is not None else "",
        kept=[*report.kept, *_pushed(files, row)],
    )


def _attempt(line: LedgerLine, now: float, bill: meter.Bill | None) -> Attempt:
    return Attempt(
        line.attempt,
        line.provider,
        line.offer,
        line.rate_usd_per_hour,
        line.created_at or line.intent_at,
        line.destroyed_at,
        line.state,
        line.billing,
        str(meter.line_spend(line, now)),
        line.is_at_most,
        str(bill.provider_usd) if bill is not None else None,
        line.note,
    )


def _offer(files: _RunFiles) -> dict[str, Any]:
    """Return the offer that the last launch used, or {} if there is no record of it."""
    try:
        found = json.loads(files.here.read(run_key(files.id, LAUNCH_NOTE)))["offer"]
    except (NotInStore, ValueError, KeyError, TypeError):
        return {}
    keys = ("provider", "name", "device", "num_gpus", "num_cores", "memory_bytes", "region", "is_spot")
    return {name: found[name] for name in keys if name in found} if isinstance(found, dict) else {}


def _pushed(files: _RunFiles, row: RunRow) -> Iterator[Kept]:
    """Yield the models in the store that this run pushed. Skip a models/NAME that belongs to another run."""
    for folder in (row.id, row.name) if files.is_stored else ():
        key = f"{file_names.STORE_MODELS}/{folder}"
        try:
            manifest = read_document(files.store, f"{key}/{file_names.MANIFEST}", CheckpointManifest)
        except (HomingError, OSError) as exc:
            files.problems.append(str(exc).splitlines()[0])
            continue
        if manifest is not None and manifest.run_id == row.id:
            yield _kept(f"{files.store.url}/{key}", manifest, ["pushed"])


_EVAL_SCHEMA = "homing.eval/1"


def add_evals(report: Report, file: Path) -> Report:
    """Return the report with the results in `file` added. Raise UsageError if none is for this run's weights."""
    document = _read_eval_file(file)
    ours = {sha256 for each in report.kept for sha256 in each.weights.values()}
    try:
        found = [
            each
            for model, sets in zip(document["models"], document["results"], strict=True)
            if ours & set(model["files"].values())
            for each in _figures(model, sets)
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise _not_an_eval(file, f"{type(exc).__name__}: {exc}") from exc
    if not found:
        raise UsageError(
            what=f"{file} has no results for {report.run}.",
            why="The evaluated weights do not match any stored checkpoint or model of this run.",
            fix=f"Evaluate this run: homing eval {report.run} --out {shlex.quote(str(file))}",
        )
    return dataclasses.replace(report, evals=[*report.evals, *found])


def _figures(model: dict[str, Any], sets: list[dict[str, Any]]) -> list[Eval]:
    return [
        Eval(
            phase=str(model["phase"] or ""),
            step=None if model["step"] is None else int(model["step"]),
            name=str(one["name"]),
            figure=str(score["name"]),
            value=_number(score["value"]),
            low=_number(score["low"]),
            high=_number(score["high"]),
            num_units=int(score["num_units"]),
            num_tokens=None if (counted := one.get("counts", {}).get("tokens")) is None else int(counted),
        )
        for one in sets
        for score in one["scores"]
    ]


def _number(value: Any) -> float | None:
    """Return the value as a float, or None if it is missing. Raise ValueError if it is not finite."""
    number = None if value is None else float(value)
    if number is not None and not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _read_eval_file(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except OSError as exc:
        raise UsageError(
            what=f"{file} cannot be read.",
            why=exc.strerror or str(exc),
            fix="Create it: homing eval RUN --out evals.md",
        ) from exc
    except ValueError as exc:
        raise _not_an_eval(file, str(exc)) from exc
    if not isinstance(document, dict) or document.get("schema") != _EVAL_SCHEMA:
        raise _not_an_eval(file, f"It is not a {_EVAL_SCHEMA} document.")
    return document


def _not_an_eval(file: Path, why: str) -> UsageError:
    return UsageError(
        what=f"{file} is not a result file from homing eval.",
        why=why,
        fix="Use evals.json, which homing eval RUN --out evals.md writes next to evals.md",
    )
