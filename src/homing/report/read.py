"""A run to its Report, from what is stored: run directory (in the store, or its copy at home), ledger, data manifest.

The store tells the truth of a launched run; where it cannot be read, or has nothing of the run any more, what `fetch`
brought home is told instead, and that is said. A paper that is missing or damaged leaves its place empty.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from homing import __version__
from homing.cloud import diary, meter
from homing.cloud.checkpoints import best_step, list_checkpoints
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger import LedgerLine, RunRow
from homing.cloud.metric_log import MetricLog
from homing.cloud.signs import Tail, read_document
from homing.cloud.stored import kept_by
from homing.config.models import MODELS, manifest_in
from homing.errors import HomingError
from homing.report import journal
from homing.report.facts import Attempt, Data, Kept, Made, Report, Sample
from homing.store import FileStore, NotInStore, Store, run_key
from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest
from homing.wire.data import DataManifest, Split
from homing.wire.event import Event, Metric, Outcome
from homing.wire.run import Run

__all__ = ["Subject", "read_report"]

T = TypeVar("T")

_MOST_FILES = 20  # of the sources


@dataclass(frozen=True)
class Subject:
    """The run that is meant, as whoever found it knows it."""

    id: str
    name: str
    state: str
    reason: str
    row: RunRow | None  # None: trained on this computer, and not in the ledger


def read_report(home: Home, subject: Subject, models: Path = MODELS, metrics: Sequence[Metric] | None = None) -> Report:
    """`metrics`: for a caller that follows the run and has them already."""
    problems: list[str] = []
    papers = _Papers(home, subject, problems)
    run, outcome = papers.run(), papers.document(names.OUTCOME, Outcome)
    metrics = papers.metrics() if metrics is None else metrics
    told = diary.read(home, subject.id) if subject.row is not None else []
    events = journal.unique([*papers.lines(names.EVENTS, Event), *told])
    order = [phase.kind for phase in run.phases] if run is not None else []
    kept, choices = papers.checkpoints(order)
    reached = {outcome.phase: outcome.step} if outcome is not None else {}
    for each in kept:
        reached[each.phase] = max(each.step, reached.get(each.phase, 0))
    phases = [
        dataclasses.replace(phase, choices=choices.get(phase.kind, {}))
        for phase in journal.phases(run.phases if run is not None else [], metrics, reached)
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
        data=list(_all_data(papers, run)) if run is not None else [],
        phases=phases,
        happenings=journal.happenings(events),
        samples=papers.samples(order),
        machines=journal.machines(events),
        kept=[*kept, *_fetched(subject.id, models)],
        problems=problems,
    )
    return report if subject.row is None else _with_money(report, home, subject.row, papers)


class _Papers:
    """The run directory, wherever it can be read."""

    def __init__(self, home: Home, subject: Subject, problems: list[str]) -> None:
        self.home, self.id, self.problems = home, subject.id, problems
        self.here = FileStore(str(home.path), home.world, create=False)
        self.is_stored = False  # whether `store` is that of a launched run
        self.store: Store = self.here
        if subject.row is not None:
            self.store = self._store_of(subject.row)

    def _store_of(self, row: RunRow) -> Store:
        try:
            store = self.home.store_of(row)
            if store.list(run_key(row.id) + "/"):
                self.is_stored = True
                return store
            why = "it has nothing of this run"
        except (HomingError, OSError) as exc:
            why = str(exc).splitlines()[0]
        self.problems.append(
            f"{row.store} was not read ({why}): this is what was at home of the run, as of its last fetch."
        )
        return self.here

    def run(self) -> Run | None:
        """Home's own names the data folder here, which that of the instance does not."""
        at_home = self.home.run_dir(self.id) / names.RUN
        if self.home.world.exists(at_home):
            try:
                return codec.loads(Run, self.home.world.read(at_home))
            except codec.WireError as exc:
                self.problems.append(f"{at_home} cannot be read: {exc}")
        return self.document(names.RUN, Run)

    def document(self, name: str, cls: type[T]) -> T | None:
        try:
            return read_document(self.store, run_key(self.id, name), cls)
        except (HomingError, OSError) as exc:
            self._say(exc)
            return None

    def metrics(self) -> list[Metric]:
        try:
            return MetricLog(self.store, run_key(self.id, names.METRICS)).fresh()
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
            return journal.samples(self.store, self.id, order)
        except (HomingError, OSError) as exc:
            self._say(exc)
            return []

    def checkpoints(self, order: list[str]) -> tuple[list[Kept], dict[str, dict[str, Any]]]:
        """All that are whole where the run directory lies, newest first; and what the machine chose, by phase."""
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
        """As a person finds it: an address, or at home a path."""
        return f"{self.store.url}/{key}" if self.is_stored else str(self.home.path / key)

    def data_manifest(self, folder: str, sha256: str) -> tuple[DataManifest | None, str]:
        """By its hash, from the store or the data folder; what was prepared anew since is not what it learned from."""
        why = "it lies neither in the store nor at home"
        for read in self._manifest_places(folder, sha256):
            try:
                text = read()
            except (HomingError, OSError):
                continue
            if hashlib.sha256(text).hexdigest() != sha256:
                why = "what lies in its folder was prepared anew since"
                continue
            try:
                return codec.loads(DataManifest, text), ""
            except codec.WireError as exc:
                why = str(exc)
        return None, why

    def _manifest_places(self, folder: str, sha256: str) -> Iterator[Callable[[], bytes]]:
        if self.is_stored:
            yield lambda: self.store.read(f"{names.STORE_OBJECTS}/{sha256}")
        # A relative path starts at the run directory.
        yield lambda: self.home.world.read(self.home.run_dir(self.id) / folder / names.MANIFEST)

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


def _all_data(papers: _Papers, run: Run) -> Iterator[Data]:
    if run.data.manifest_sha256:  # a run of later phases alone may have no text of its own
        planned = {"train": run.data.num_train_tokens, "val": run.data.num_val_tokens}
        yield _data(papers, "the run", run.data.dir, run.data.manifest_sha256, planned)
    for phase in run.phases:
        if phase.data is not None and phase.data.manifest_sha256:
            planned = {"train": phase.data.num_train_tokens, "val": phase.data.num_val_tokens}
            yield _data(
                papers, f"{phase.kind} ({phase.data.kind})", phase.data.dir, phase.data.manifest_sha256, planned
            )


def _data(papers: _Papers, of: str, folder: str, sha256: str, tokens: dict[str, int]) -> Data:
    manifest, problem = papers.data_manifest(folder, sha256)
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
    """What lies in ./models of this run."""
    for folder in sorted(models.iterdir()) if models.is_dir() else []:
        manifest = manifest_in(folder)
        if manifest is not None and manifest.run_id == run_id:
            yield _kept(str(folder), manifest, ["fetched"])


def _with_money(report: Report, home: Home, row: RunRow, papers: _Papers) -> Report:
    lines, now = home.ledger.lines(row.id), home.world.now()
    bills = home.ledger.bills(line.mark for line in lines)
    stays = kept_by(home, row) if papers.is_stored and not row.is_live else None
    return dataclasses.replace(
        report,
        began_at=row.created_at,
        ended_at=row.ended_at,
        offer=_offer(papers),
        attempts=[_attempt(line, now, meter.compare(line, bills, now)) for line in lines],
        spend_usd=str(meter.total_spend(lines, now)),
        spend_limit_usd=row.spend_limit_usd,
        is_at_most=any(line.is_at_most for line in lines),
        stored=f"{row.store}: {stays}" if stays is not None else "",
        kept=[*report.kept, *_pushed(papers, row)],
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
        str(bill.theirs_usd) if bill is not None else None,
        line.note,
    )


def _offer(papers: _Papers) -> dict[str, Any]:
    """That the last launch took; {} where no note of it is left."""
    try:
        found = json.loads(papers.here.read(run_key(papers.id, LAUNCH_NOTE)))["offer"]
    except (NotInStore, ValueError, KeyError, TypeError):
        return {}
    told = ("provider", "name", "device", "num_gpus", "num_cores", "memory_bytes", "region", "is_spot")
    return {name: found[name] for name in told if name in found} if isinstance(found, dict) else {}


def _pushed(papers: _Papers, row: RunRow) -> Iterator[Kept]:
    """The models in the store that this run pushed; models/NAME may be another's."""
    for folder in (row.id, row.name) if papers.is_stored else ():
        key = f"{names.STORE_MODELS}/{folder}"
        try:
            manifest = read_document(papers.store, f"{key}/{names.MANIFEST}", CheckpointManifest)
        except (HomingError, OSError) as exc:
            papers.problems.append(str(exc).splitlines()[0])
            continue
        if manifest is not None and manifest.run_id == row.id:
            yield _kept(f"{papers.store.url}/{key}", manifest, ["pushed"])
