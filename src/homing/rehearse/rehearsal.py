"""Rehearses a whole run for free: plan, launch, train, fetch and destroy on the fake cloud, with injected faults.

    create a separate home directory -> start the fake cloud -> plan -> launch -> [acts] -> watch
                    -> resume if interrupted -> fetch -> destroy -> check for leftovers
                    -> compare the cloud's bill with our ledger

All files are below $HOMING_HOME/rehearsals/<id>, so the real ledger, store and providers are not touched. A rehearsal
runs the same code as a real run. Only the cloud is simulated, and its machines are processes on this computer.

The verdict compares the bill with the ledger. The bill is authoritative, because the fake cloud knows exactly when each
machine was billed. The ledger must list every instance on the bill. The cost in the ledger must not be below the billed
cost, and may exceed it only by the margin.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from homing.cloud.artifacts.checkpoints import Fetched, fetch
from homing.cloud.destroy import destroy_run, end_finding
from homing.cloud.home import Home
from homing.cloud.launch.launch import LaunchOrder, draft, guards, launch
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.mark import new_run_id, shown_mark
from homing.cloud.plan.plan import make_plan
from homing.cloud.reconcile.inventory import survey
from homing.cloud.watch.follow import watch
from homing.errors import HomingError, StillBilling
from homing.rehearse.scenes import Acts, ServedCloud, faults_of, find_scenes
from homing.units import format_duration
from homing.wire import file_names
from homing.wire.run_json import Run
from homing.world import World

__all__ = ["DEFAULT_LIMIT_USD", "OnOutput", "Rehearsal", "RehearsalOrder", "Row", "Verdict", "compare", "rehearse"]

DEFAULT_LIMIT_USD = Decimal("0.25")
_WATCH_S = 3600.0  # maximum duration of the rehearsed run
_LOOK_S = 1.0  # seconds between progress reports; short, because acts are played only between reports
_LINE_S = 10.0  # seconds between the progress reports that are shown to the user
_MAX_ATTEMPTS = 6

OnOutput = Callable[[str, str], None]  # called with the kind of output (step | line | fault) and its text


@dataclass(frozen=True)
class RehearsalOrder:
    run: Run  # the run with the smoke profile applied and its data prepared
    run_file_text: str
    faults: Sequence[str] = ()
    seed: int = 0
    has_guard: bool = True
    limit_usd: Decimal = DEFAULT_LIMIT_USD


@dataclass
class Rehearsal:
    """The result of a rehearsal."""

    folder: Path
    verdict: Verdict
    run: RunRow | None = None
    fetched: Fetched | None = None
    failed_launches: list[str] = field(default_factory=list)
    num_machines: int = 0  # machines requested by the rehearsal, or by the guard inside watch

    @property
    def problems(self) -> list[str]:
        return self.verdict.problems


def rehearse(order: RehearsalOrder, home_path: Path, world: World, notify: OnOutput) -> Rehearsal:
    """Run the rehearsal and leave nothing running. Problems with the rehearsed run are returned, not raised."""
    scenes = find_scenes(order.faults)
    folder = home_path / "rehearsals" / new_run_id(order.run.name, world)
    home = Home(folder, world)
    world.mkdir(folder)
    cloud = ServedCloud(folder, world, seed=order.seed, has_guard=order.has_guard)
    notify("step", f"Start the fake cloud in {folder}")
    cloud.serve()
    acts = Acts([scene.act for scene in scenes.values() if scene.act], home, cloud, notify)
    walk = _Walk(order, home, acts, notify)
    try:
        cloud.set_faults(faults_of(scenes).to_dict())
        for name, scene in scenes.items():
            notify("fault", f"{name}: {scene.text}")
        walk.there()
        walk.back()
        if len(walk.failed_launches) > sum(scene.fails_launches for scene in scenes.values()):
            walk.problems.append(f"A launch failed unexpectedly: {walk.failed_launches[-1]}")
    except HomingError as exc:
        walk.problems.append(str(exc).replace("\n", " "))
    finally:
        bill, now, left = cloud.close()
    verdict = compare(bill, now, home.ledger.lines(), order.limit_usd)
    problems = [
        *verdict.problems,
        *([f"Processes of the fake instances are still running: {left}."] if left else []),
    ]
    if walk.fetched is None:
        problems.append("No model was fetched.")
    verdict = dataclasses.replace(verdict, problems=[*walk.problems, *problems])
    return Rehearsal(folder, verdict, walk.run, walk.fetched, walk.failed_launches, len(home.ledger.lines()))


class _Walk:
    """Performs every step of the run, as a user would."""

    def __init__(self, order: RehearsalOrder, home: Home, acts: Acts, notify: OnOutput) -> None:
        self.order, self.home, self.acts, self.notify = order, home, acts, notify
        self.problems: list[str] = []
        self.failed_launches: list[str] = []
        self.num_attempts = 0
        self.run: RunRow | None = None
        self.fetched: Fetched | None = None

    def there(self) -> None:
        """Launch and watch until the run is done, using as many machines as necessary.

        `watch` includes the guard, which resumes a preempted run. If an act ended the run, launch it again, as a user
        would.
        """
        while self.num_attempts < _MAX_ATTEMPTS:
            self.num_attempts += 1
            if not self._launch():
                continue
            self.acts.await_first(self._row())
            self._watch()
            if self._row().state == "done":
                break
            self.notify("step", f"The run was interrupted: {self._row().reason}")
        if self.acts.left:
            self.problems.append(f"The run ended before these faults could be injected: {', '.join(self.acts.left)}.")
        if self.run is None or self._row().state != "done":
            self.problems.append(f"The run did not finish in {self.num_attempts} launches.")

    def back(self) -> None:
        assert self.run is not None, "nothing was launched"
        self.notify("step", "Fetch the model and verify its hashes")
        model_dir = self.home.path / file_names.STORE_MODELS / self.run.name
        self.fetched = fetch(self.home, self._row(), model_dir)
        self.notify("line", f"the model from step {self.fetched.manifest.step:,} is in {model_dir}")
        self.notify("step", "Destroy the instance, and wait for the provider to confirm it")
        destroy_run(self.home, self._row())
        for finding in survey(self.home).to_answer:
            self.notify("line", f"destroying a leftover {finding.thing}: {finding.id}")
            end_finding(self.home, finding)

    def _row(self) -> RunRow:
        assert self.run is not None
        return self.home.ledger.run(self.run.id) or self.run

    def _launch(self) -> bool:
        is_resumed = self.run is not None
        self.notify("step", f"Launch {self.order.run.name}" + (" --resume" if is_resumed else ""))
        try:
            run = _on_fake(self.order.run, self.home, self.order.limit_usd, self.run.id if self.run else "")
            offer = make_plan(run, self.home).offers[0].offer
            ready = draft(
                LaunchOrder(
                    run=run,
                    run_file_text=self.order.run_file_text,
                    is_prepared=True,
                    offer=offer,
                    spend_limit_usd=self.order.limit_usd,
                    resume=is_resumed,
                    is_smoke=True,
                ),
                self.home,
            )
            for sentence in guards(ready, self.home):
                self.notify("line", sentence)
            self.run = launch(ready, self.home, notify=lambda text: self.notify("line", text)).run
        except StillBilling:
            raise
        except HomingError as exc:
            self.failed_launches.append(exc.what)
            self.notify("line", f"the launch failed and was rolled back: {exc.what}")
            return False
        return True

    def _watch(self) -> None:
        self.notify("step", f"Watch {self.order.run.name}")
        assert self.run is not None
        deadline = self.home.world.monotonic() + _WATCH_S
        line_due = 0.0
        for report in watch(self.home, self._row(), every_s=_LOOK_S):
            now = self.home.world.monotonic()
            if report.kind not in ("line", "sample") or (report.kind == "line" and now >= line_due):
                line_due = now + _LINE_S if report.kind == "line" else line_due
                self.notify("line", report.text)
            self.acts.play_if_due(self._row())
            if self.home.world.monotonic() > deadline:
                raise HomingError(
                    what=f"The run did not end within {format_duration(_WATCH_S)}.",
                    why=report.text,
                    fix=f"Look for the cause in the files in {self.home.path}",
                )


def _on_fake(run: Run, home: Home, limit_usd: Decimal, run_id: str) -> Run:
    """Return the run adapted to the fake cloud. It requests no GPU: the machines are processes on this computer."""
    return dataclasses.replace(
        run,
        id=run_id,
        cloud=dataclasses.replace(run.cloud, providers=["fake"], gpu="", num_gpus=1),
        train=dataclasses.replace(run.train, needs_gpu=False),
        limits=dataclasses.replace(run.limits, spend_usd=str(limit_usd), rate_usd_per_hour=None),
        store=f"file:{home.path / 'store'}",
    )


_ROUNDING_USD = Decimal("0.000001")


@dataclass(frozen=True)
class Row:
    """The cost of all instances that have the same mark (name), according to the cloud's bill and to our ledger."""

    mark: str
    instances: int  # number of instances on the bill that have this mark
    billed_s: float
    bill_usd: Decimal
    ledger_usd: Decimal


@dataclass(frozen=True)
class Verdict:
    rows: list[Row]
    problems: list[str]  # empty if the rehearsal succeeded

    @property
    def bill_usd(self) -> Decimal:
        return sum((row.bill_usd for row in self.rows), Decimal(0))

    @property
    def ledger_usd(self) -> Decimal:
        return sum((row.ledger_usd for row in self.rows), Decimal(0))


def compare(bill: list[dict[str, Any]], now: float, lines: list[LedgerLine], limit_usd: Decimal) -> Verdict:
    """Compare the fake cloud's bill (/double/bill) with the ledger. `now` is the time on the cloud's clock."""
    problems = [
        f"{each['kind']} {each['id']} ({each['mark']}) is still billing." for each in bill if each["until"] is None
    ]
    problems += [f"The ledger has not closed {line.mark}: {line.state}." for line in lines if line.destroyed_at is None]
    machines = [each for each in bill if each["kind"] == "instance"]
    rows = []
    for mark in dict.fromkeys([*(shown_mark(line.mark) for line in lines), *(each["mark"] for each in machines)]):
        ours = [each for each in machines if each["mark"] == mark]
        of_mark = [line for line in lines if shown_mark(line.mark) == mark]
        spend = sum((Decimal(line.spend_usd) for line in of_mark), Decimal(0))
        seconds = sum((now if each["until"] is None else each["until"]) - each["since"] for each in ours)
        row = Row(mark, len(ours), seconds, sum((Decimal(each["usd"]) for each in ours), Decimal(0)), spend)
        rows.append(row)
        problems += _disagreement(row, of_mark)
    problems += _overlaps(machines, now)
    total = sum((Decimal(each["usd"]) for each in bill), Decimal(0))
    if total > limit_usd:
        cost, limit = meter.show_usd(total), meter.show_usd(limit_usd)
        problems.append(f"The run cost {cost}, which is more than the limit of {limit}.")
    return Verdict(rows, problems)


def _disagreement(row: Row, lines: list[LedgerLine]) -> list[str]:
    if not lines:
        return [f"{row.mark} was billed {meter.show_usd(row.bill_usd)} but is not in the ledger."]
    margin = sum((meter.cost(Decimal(line.rate_usd_per_hour), meter.MARGIN_S) for line in lines), Decimal(0))
    if row.ledger_usd < row.bill_usd - _ROUNDING_USD:
        return [f"The ledger has {row.ledger_usd} for {row.mark}, less than the billed {row.bill_usd}."]
    if row.ledger_usd > row.bill_usd + margin and not any(line.is_at_most for line in lines):
        return [f"The ledger has {row.ledger_usd} for {row.mark}, far more than the billed {row.bill_usd}."]
    return []


def _overlaps(machines: list[dict[str, Any]], now: float) -> list[str]:
    """Report machines that were billed at the same time. A run must have only one machine at a time."""
    in_order = sorted(machines, key=lambda each: each["since"])
    found = []
    for earlier, later in itertools.pairwise(in_order):
        if (now if earlier["until"] is None else earlier["until"]) > later["since"]:
            found.append(f"{earlier['id']} and {later['id']} were billed at the same time.")
    return found
