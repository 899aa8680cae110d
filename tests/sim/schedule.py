"""One bad day from one seed: which faults, when, and what the person does; then the person comes back and tidies up.

    play(seed) -> Verdict     the same seed, the same day, to the last call

The day is drawn first (tests/sim/day.py); what then happens depends on the code under test, which is the point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.doubles.faults import Faults
from tests.sim.day import RATE_USD_PER_HOUR, Day
from tests.sim.host import HOME, Host
from tests.sim.kernel import Broken
from tests.sim.stage import Client, Stage
from tests.sim.truth import ROUNDING_USD
from tests.sim.world import STORE, Proc
from tests.sim.writer import HostileWriter

from homing.cloud.artifacts.checkpoints import fetch
from homing.cloud.destroy import destroy_lines, destroy_run, open_lines
from homing.cloud.guard.change_limit_or_stop import ask_to_stop, change_limit
from homing.cloud.guard.change_limit_or_stop import propose as propose_limit
from homing.cloud.guard.guard_pass import guard_pass, wait_for_next
from homing.cloud.home import Home
from homing.cloud.launch.armed_guards import guards
from homing.cloud.launch.launch import launch
from homing.cloud.reconcile.adopt import adopt, propose
from homing.cloud.reconcile.lost_ledger import unknown_runs
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.watch.follow import watch
from homing.errors import UsageError
from homing.store import open_store
from homing.wire.run_json import Limits

__all__ = ["Verdict", "destroy_all", "play"]

SECOND_GUARD_S = 30.0
TIDY_S = 1200.0  # for so long the person tries, with everything working again


@dataclass
class Verdict:
    seed: int
    kinds: list[str]
    broken: str = ""  # what does not hold; "" where all does
    where: str = ""  # the traceback of it
    outcome: str = ""
    seconds: float = 0.0  # virtual
    num_calls: int = 0
    digest: int = 0
    billed_usd: Decimal = Decimal(0)
    limit_usd: Decimal = Decimal(0)
    is_unguarded: bool = False  # every guard died, and it cost more than the limit
    is_announced: bool = False  # launch had said that this may happen
    counts: dict[str, int] = field(default_factory=dict)


def play(seed: int, *, trace: Callable[[str], None] | None = None, provider: str = "fake") -> Verdict:
    day = Day(seed)
    verdict = Verdict(seed, day.kinds, limit_usd=day.limit_usd)
    stage = Stage(seed, trace=trace, provider=provider)
    try:
        _Play(stage, day, verdict).play()
    except Broken as exc:
        verdict.broken = str(exc)
        verdict.where = traceback.format_exc()
    except BaseException as exc:
        verdict.broken = f"{type(exc).__name__}: {exc}"
        verdict.where = traceback.format_exc()
    finally:
        verdict.seconds, verdict.num_calls, verdict.digest = stage.t, stage.num_calls, stage.digest
        stage.close()
    return verdict


class _Play:
    def __init__(self, stage: Stage, day: Day, verdict: Verdict) -> None:
        self.stage, self.day, self.verdict = stage, day, verdict
        self.random = day.random
        self._started: dict[str, int] = {}
        self._is_fair = False  # the weather has cleared up for good
        stage.home.skew_s = day.home_skew_s
        self.cloud = stage.rent(day.settings, day.faults, RATE_USD_PER_HOUR)
        self.cloud.machine_skew_s = day.machine_skew_s
        self.cloud.absurd_rate = day.absurd_rate
        stage.programs.on_start.append(self._give_fate)
        stage.programs.trainer = day.trainer
        if day.hostile_writes:
            writer = HostileWriter(stage.store, day.seed)
            stage.truth.has_hostile_writer = True
            stage.programs.on_start.append(writer.check)
            for at in day.hostile_writes:
                stage.at(at, lambda: self._weather("another writer of the store", lambda: writer.strike(stage.t)))
        self._plan_weather()

    # --- faults ---

    def _give_fate(self, proc: Proc) -> None:
        number = self._started[proc.role] = self._started.get(proc.role, 0) + 1
        for kind, role, which, at in self.day.strikes:
            if (role, which) == (proc.role, number):
                proc.kill_at, proc.fail_at = (at, proc.fail_at) if kind == "kill" else (proc.kill_at, at)

    def _plan_weather(self) -> None:
        """Cuts, full disks, ill stores, clock jumps: each with a beginning and an end."""
        kinds = self.day.kinds
        # Of their own dice: the days from before a home could be broken stay what they were.
        broken = random.Random(f"home {self.verdict.seed}")
        planned = [(self.random, each) for each in self._weathers()] + [(broken, each) for each in self._broken_homes()]
        for r, (kind, chance, begin, end) in planned:
            at, seconds = r.uniform(0, self.day.limit_s), r.choice((5.0, 40.0, 200.0))
            if r.random() < chance:
                kinds.append(kind)
                self.stage.at(at, lambda kind=kind, begin=begin: self._weather(kind, begin))
                self.stage.at(at + seconds, lambda kind=kind, end=end: self._weather(f"end of {kind}", end))

        if self.day.store_refuses_at is not None:
            self.stage.at(self.day.store_refuses_at, lambda: self._weather("store refuses for good", self._refuse))
        for owner, at, step_s in self.day.clock_steps:
            stage_at = functools.partial(self._set_clocks, owner, step_s)
            self.stage.at(at, lambda owner=owner, change=stage_at: self._weather(f"{owner} clock set by hours", change))

    def _refuse(self) -> None:
        self.stage.store.is_refusing = True

    def _set_clocks(self, owner: str, step_s: float) -> None:
        for host in [self.stage.home] if owner == "home" else self._machines():
            host.skew_s += step_s

    def _weather(self, kind: str, change: Callable[[], None]) -> None:
        if self._is_fair:
            return
        self.stage.say(f"--- {kind}")
        change()

    def _weathers(self) -> list[tuple[str, float, Callable[[], None], Callable[[], None]]]:
        stage, r = self.stage, self.random
        jump_s = r.choice((-1, 1)) * r.choice((5.0, 100.0, 4000.0))
        which = r.random()

        def each(change: Callable[[Host], None]) -> Callable[[], None]:
            return lambda: [change(host) for host in self._machines()] and None  # type: ignore[func-returns-value]

        def jump(host: Host) -> None:
            host.skew_s += jump_s

        def fill(host: Host) -> None:
            host.disk.num_bytes = host.disk.used

        def empty(host: Host) -> None:
            host.disk.num_bytes = 1 << 40

        def nothing() -> None:
            pass

        return [
            ("home cut from cloud", 0.12, lambda: stage.home.cut.add("cloud"), lambda: stage.home.cut.discard("cloud")),
            ("home cut from store", 0.12, lambda: stage.home.cut.add("store"), lambda: stage.home.cut.discard("store")),
            (
                "machine cut from cloud",
                0.12,
                each(lambda h: h.cut.add("cloud")),
                each(lambda h: h.cut.discard("cloud")),
            ),
            (
                "machine cut from store",
                0.15,
                each(lambda h: h.cut.add("store")),
                each(lambda h: h.cut.discard("store")),
            ),
            ("store ill", 0.12, lambda: _set_ill(stage.store, 0.02 + 0.3 * which), lambda: _set_ill(stage.store, 0.0)),
            ("store down", 0.08, lambda: _set_up(stage.store, False), lambda: _set_up(stage.store, True)),
            ("home disk full", 0.06, lambda: fill(stage.home), lambda: empty(stage.home)),
            ("machine disk full", 0.08, each(fill), each(empty)),
            ("home clock jumps", 0.08, lambda: jump(stage.home), nothing),
            ("machine clock jumps", 0.1, each(jump), nothing),
            ("laptop sleeps", 0.12, stage.home.freeze, stage.home.thaw),
            ("home loses power", 0.05, stage.home.crash, nothing),
            ("all programs of a machine die", 0.06, each(lambda h: [p.kill() for p in h.living()] and None), nothing),
        ]

    def _broken_homes(self) -> list[tuple[str, float, Callable[[], None], Callable[[], None]]]:
        home, ledger = self.stage.home, f"{HOME}/ledger.sqlite"

        def lose_backup_too() -> None:
            """Not if a receipt would be lost with it: no command can restore that."""
            base = home.databases.get(ledger)
            closed = "SELECT 1 FROM lines WHERE destroyed_at IS NOT NULL AND created_at IS NOT NULL"
            if base is not None and base.execute(closed).fetchone() is None:
                home.lose_database(ledger)
                if f"{HOME}/backup/ledger.sqlite" in home.disk.files:
                    home.disk.drop(f"{HOME}/backup/ledger.sqlite")

        def damage() -> None:
            if ledger in home.databases:
                home.damaged.add(ledger)

        def set_back() -> None:
            home.skew_s -= 3 * 3600.0

        def set_read_only(is_so: bool) -> None:
            home.is_read_only = is_so

        def nothing() -> None:
            pass

        return [
            ("ledger lost", 0.06, lambda: home.lose_database(ledger), nothing),
            ("ledger and backup lost", 0.06, lose_backup_too, nothing),
            ("ledger damaged", 0.06, damage, nothing),
            ("home read-only", 0.06, lambda: set_read_only(True), lambda: set_read_only(False)),
            ("home clock set back", 0.04, set_back, nothing),
        ]

    def _machines(self) -> list[Host]:
        return [host for host in self.cloud.machines.values() if host.is_up]

    # --- the person ---

    def play(self) -> None:
        day, stage = self.day, self.stage
        if day.guard_s:
            stage.client("guard", lambda home: _guard(home, day.guard_s), is_keyless=day.is_guard_keyless)
        if day.person == "does two things at once":
            self._two_things()
        else:
            self._launch()
        {
            "watches": lambda: self._try("watch", self._watch),
            "leaves": lambda: None,
            "stops": lambda: self._later("stop", lambda home: ask_to_stop(home, home.ledger.find("moss"))),
            "destroys": lambda: self._later("destroy", _destroy),
            "never comes back": stage.home.freeze,
            "resumes": self._resume,
            "does two things at once": self._two_things,
            "adopts elsewhere": self._adopt,
            "raises the limit": lambda: self._later("limit", self._raise_limit),
        }[day.person]()
        stage.advance(self.random.choice((0.0, self.random.uniform(0.0, day.limit_s), day.limit_s + 120.0)))
        self._tidy_up()

    def _later(self, role: str, verb: Callable[[Home], Any]) -> None:
        self.stage.advance(self.random.uniform(1.0, self.day.limit_s))
        self._try(role, verb)

    def _resume(self) -> None:
        """Watches or waits, and launches again with --resume as long as the run is not done."""
        for _ in range(3):
            if self.random.random() < 0.5:
                self._try("watch", self._watch)
            else:
                self.stage.advance(self.random.uniform(10.0, self.day.limit_s))
                self._try("runs", refresh)
            if self.random.random() < 0.4:
                self._try("destroy", _destroy)
            self._launch(resume=True)

    def _two_things(self) -> None:
        """Two processes of one home at the same time, each as if it were alone."""
        verbs: dict[str, Callable[[Home], Any]] = {
            "launch": lambda home: self._do_launch(home, is_resume=False),
            "resume": lambda home: self._do_launch(home, is_resume=True),
            "destroy": _destroy,
            "runs": refresh,
            "stop": lambda home: ask_to_stop(home, home.ledger.find("moss")),
        }
        first, second = self.random.choice(list(verbs)), self.random.choice(list(verbs))
        one = self.stage.client(first, verbs[first])
        self.stage.advance(self.random.choice((0.0, 0.05, 0.5, 5.0)))
        two = self.stage.client(second, verbs[second])
        self._note(first, self.stage.finish(one))
        self._note(second, self.stage.finish(two))

    def _raise_limit(self, home: Home) -> Any:
        run = home.ledger.find("moss")
        limit = (self.day.limit_usd * Decimal("1.2")).quantize(Decimal("0.001"))
        change = propose_limit(home, run, limit, None)
        self.stage.truth.raise_limit(run.id, limit)
        return change_limit(home, change)

    def _adopt(self) -> None:
        """Another computer takes the run over while the first may still work on it; then both continue."""
        stage = self.stage
        stage.advance(self.random.uniform(0.0, self.day.limit_s / 2))
        other = stage.add_home("home2")
        other.skew_s = self.random.choice((0.0, 30.0, -30.0))

        def take_over(home: Home) -> Any:
            store = open_store(f"file:{STORE}/mine", home.world, create=False)
            return adopt(propose(store, "moss", home), store, home)

        self._note("adopt", stage.finish(stage.client("adopt", take_over, other)))
        if self.day.has_second_guard:  # in addition to the first home's, if there is one: both enforce the limit
            stage.client("guard", lambda home: _guard(home, SECOND_GUARD_S), other)
        if self.random.random() < 0.5:
            self._note("destroy", stage.finish(stage.client("destroy", _destroy, other)))
        if self.random.random() < 0.6:
            resumed = stage.client("resume", lambda home: self._do_launch(home, is_resume=True), other)
            if self.random.random() < 0.5:
                self._launch(resume=True)
            self._note("resume", stage.finish(resumed))

    def _launch(self, resume: bool = False) -> None:
        self._try("resume" if resume else "launch", lambda home: self._do_launch(home, is_resume=resume))

    def _do_launch(self, home: Home, *, is_resume: bool) -> Any:
        # Each resume may cost as much again: `launch --resume --spend-limit MORE`.
        more = sum(run.startswith("resume") for run in self.verdict.counts) if is_resume else 0
        limit = self.day.limit_usd * (1 + more)
        limits = dataclasses.replace(Limits(), unsaved_s=self.day.unsaved_s)
        messages = {"provider": self.stage.provider, "limit": str(limit), "resume": is_resume, "limits": limits}
        ready = self.stage.draft(home, **messages)
        self.stage.truth.limits_usd[ready.run.id] = limit
        self.verdict.is_announced = any("keeps billing at" in said for said in guards(ready, home))
        return launch(ready, home)

    def _watch(self, home: Home) -> str:
        last = ""
        for report in watch(home, home.ledger.find("moss")):
            last = report.text
        return last

    def _try(self, role: str, verb: Callable[[Home], Any]) -> Client:
        return self._note(role, self.stage.finish(self.stage.client(role, verb)))

    def _note(self, role: str, client: Client) -> Client:
        end = type(client.error).__name__ if client.error is not None else f"exit {client.proc.task.code}"
        self.verdict.counts[f"{role}: {end}"] = self.verdict.counts.get(f"{role}: {end}", 0) + 1
        return client

    # --- the end ---

    def _tidy_up(self) -> None:
        """Everything works again, and the person runs what the docs say: runs, then destroy --all."""
        stage = self.stage
        stage.say("=== everything works again, and the person tidies up")
        self._check_limit()
        self.day.strikes.clear()
        self._is_fair = True
        stage.home.thaw()
        stage.home.is_up = stage.store.is_up = True
        stage.store.is_refusing = False
        stage.store.ill_rate = 0.0
        for host in stage.hosts.values():
            host.cut.clear()
            host.disk.num_bytes = 1 << 40
            host.is_read_only = False
        self.cloud.absurd_rate = 0.0
        kept = self.day.faults
        self.cloud.cloud.change_faults(Faults(clock_skew_s=kept.clock_skew_s))
        for client in [proc for proc in stage.clients if proc.role == "guard"]:
            client.kill()  # Ctrl-C, so that it does not resume the run while we tidy up
        stage.advance(1.0)
        for home in [host for host in (stage.home, stage.hosts.get("home2")) if host is not None]:
            stage.finish(stage.client("runs", refresh, home))
            self._check_stops(home)
            self._tidy(home)
        self._check_end()

    def _check_stops(self, host: Host) -> None:
        """A run that a ledger calls stopped on request was stopped by a person; a preempted run may be resumed."""
        asked = """SELECT id, reason FROM runs WHERE state = 'stopped' AND exit_code = 0
            AND reason NOT LIKE 'preempted: %'
            AND NOT EXISTS (SELECT 1 FROM lines WHERE run_id = runs.id AND destroy_asked_at IS NOT NULL)"""
        found = [row for base in host.databases.values() for row in base.execute(asked).fetchall()]
        if found and not any(count.startswith("stop: ") for count in self.verdict.counts):
            raise Broken(f"interrupted, and the ledger of {host.name} says that a person stopped it: {found}")

    def _tidy(self, host: Host) -> None:
        deadline = self.stage.t + TIDY_S
        while True:
            client = self.stage.finish(self.stage.client("tidy", destroy_all, host))
            if client.error is None and not client.answer and client.proc.task.code == 0:
                return
            if self.stage.t > deadline:
                raise Broken(f"cannot be tidied up: {client.error or client.answer}")
            self.stage.advance(30.0)

    def _check_limit(self) -> None:
        truth = self.stage.truth
        for run_id, limit in truth.limits_usd.items():
            billed = truth.billed(run_id)
            self.verdict.billed_usd = max(self.verdict.billed_usd, billed)
            if billed > limit + ROUNDING_USD:
                lives = [life for life in truth.lives.values() if life.run_id == run_id]
                if any(life.was_guarded for life in lives):
                    able = [sorted(set.intersection(*life.seen)) for life in lives if life.was_guarded]
                    raise Broken(f"${billed:.4f} billed, the limit is ${limit}, and a guard lived: {able}")
                self.verdict.is_unguarded = True

    def _check_end(self) -> None:
        left = [line for line in self.cloud.cloud.bill() if line.until is None]
        if left:
            raise Broken(f"leaked: {[f'{line.kind} {line.id} {line.mark}' for line in left]}")
        self.stage.truth.check_receipts()
        self.verdict.outcome = self._state()
        self._check_fetch()

    def _check_fetch(self) -> None:
        """Where a whole checkpoint is in the store, the model comes home, whatever has happened."""
        if not self.stage.truth.has_checkpoint():
            return

        def verb(home: Home) -> Any:
            return fetch(home, home.ledger.find("moss"), Path("/home/me/models/moss"), or_older=True)

        self.stage.home.disk.make("/home/me/models")
        client = self._try("fetch", verb)
        if client.error is not None:
            raise Broken(f"work lost: a whole checkpoint is in the store, and fetch says: {client.error}")

    def _state(self) -> str:
        rows = [
            row for c in self.stage.home.databases.values() for row in c.execute("SELECT state FROM runs").fetchall()
        ]
        return ",".join(row["state"] for row in rows) or "none"


def _guard(home: Home, every_s: float) -> None:
    """`homing guard`, until it is ended."""
    while True:
        wait_for_next(home, guard_pass(home, every_s=every_s), every_s)


def _destroy(home: Home) -> Any:
    return destroy_run(home, home.ledger.find("moss"))


def destroy_all(home: Home) -> list[str]:
    """`homing runs`, the `homing adopt` that it prints for runs the ledger has lost, then `homing destroy --all`:
    what is left open, one sentence each."""
    problems = refresh(home)
    for run_id, url in unknown_runs(home).items():
        with contextlib.suppress(UsageError):  # lost before it had a record: nothing was rented for it
            store = open_store(url, home.world, create=False)
            adopt(propose(store, run_id, home), store, home)
    for run in home.ledger.runs():
        with contextlib.suppress(UsageError):
            destroy_run(home, run)
    destroy_lines(home, open_lines(home, None))
    return problems + [line.mark for line in open_lines(home, None)]


def _set_ill(host: Host, rate: float) -> None:
    host.ill_rate = rate


def _set_up(host: Host, is_up: bool) -> None:
    host.is_up = is_up
