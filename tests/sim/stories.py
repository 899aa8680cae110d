"""The five stories of a run in which every point is struck: launch, watch, recovery, landing, destroy.

    points(story)            who lives in it, and at which of its calls something could have changed
    strike(story, at)        the same story with one process killed, or one call failed, there; then a person recovers

A call that only looks at a clock or at the caller's own memory is no point of its own: to die there is to die at the
next one. Afterwards whatever bills is shown, destroy ends it, and the run still comes home.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults
from tests.sim.kernel import Broken
from tests.sim.schedule import destroy_all
from tests.sim.stage import Client, Stage
from tests.sim.world import CANNOT_FAIL, Proc

from homing.cloud.destroy import destroy_run
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.watch.follow import watch
from homing.errors import HomingError

__all__ = ["SAME_EVERYWHERE", "STORIES", "Point", "Struck", "points", "strike", "strikes"]

RATE_USD_PER_HOUR = "3.6"
SHORT = {"steps": 6.0, "step_s": 2.0, "save_every": 2.0, "save_s": 0.2}
LONG = {"steps": 400.0, "step_s": 5.0, "save_every": 20.0, "save_s": 0.5}
_SETTLE_S = 2.0


@dataclass(frozen=True)
class Point:
    """The n-th call of the n-th process of a role, in a story."""

    story: str
    role: str
    which: int
    call: int
    name: str  # of the call, for people


@dataclass
class Struck:
    point: Point
    kind: str  # kill | fail
    was_hit: bool
    broken: str = ""
    where: str = ""


class Rig:
    def __init__(
        self,
        point: Point | None = None,
        kind: str = "",
        trace: Callable[[str], None] | None = None,
        provider: str = "fake",
    ) -> None:
        self.stage = Stage(7, trace=trace, provider=provider)
        self.cloud = self.stage.rent(
            Settings(has_guard=False, settle_s=_SETTLE_S, boot_s=2.0), Faults(), RATE_USD_PER_HOUR
        )
        self.point, self.kind = point, kind
        self.procs: dict[tuple[str, int], Proc] = {}
        self.calls: dict[tuple[str, int], list[str]] = {}
        self.since: dict[tuple[str, int], int] = {}  # calls before this one belong to another story
        self._counts: dict[str, int] = {}
        self.limit = Decimal("2")
        self.stage.programs.on_start.append(self._look)

    def _look(self, proc: Proc) -> None:
        which = self._counts[proc.role] = self._counts.get(proc.role, 0) + 1
        self.procs[(proc.role, which)] = proc
        if self.point is None:
            proc.names = self.calls[(proc.role, which)] = []
        elif (self.point.role, self.point.which) == (proc.role, which):
            if self.kind == "kill":
                proc.kill_at = self.point.call
            else:
                proc.fail_at = self.point.call

    def begin(self) -> None:
        """What came before is known to be sound: points are counted from here."""
        self.since = {key: proc.calls for key, proc in self.procs.items()}

    # --- verbs ---

    def do(self, role: str, verb: Callable[[Home], Any]) -> Client:
        return self.stage.finish(self.stage.client(role, verb))

    def launch(self, role: str = "launch", trainer: dict[str, float] = SHORT, is_resume: bool = False) -> Client:
        self.stage.programs.trainer = trainer

        def verb(home: Home) -> Any:
            messages = {"provider": self.stage.provider, "limit": str(self.limit), "resume": is_resume}
            ready = self.stage.draft(home, **messages)
            self.stage.truth.limits_usd[ready.run.id] = self.limit
            return launch(ready, home)

        return self.do(role, verb)

    def watch(self) -> Client:
        return self.do("watch", lambda home: [report.text for report in watch(home, home.ledger.find("moss"))][-1:])

    def destroy(self) -> Client:
        return self.do("destroy", lambda home: destroy_run(home, home.ledger.find("moss")))

    def live_id(self) -> str | None:
        return next((t.id for t in self.cloud.cloud._live.values() if t.kind == "instance"), None)


# --- the stories ---


def _launch(rig: Rig) -> None:
    rig.begin()
    rig.launch()
    rig.stage.advance(30.0)


def _watch(rig: Rig) -> None:
    rig.launch()
    rig.begin()
    rig.watch()


def _recovery(rig: Rig) -> None:
    """Taken away in mid-training, with a notice too short for everything; then launched again."""
    rig.launch()
    rig.stage.advance(6.0)
    instance_id = rig.live_id()
    if instance_id is not None:
        rig.begin()
        rig.cloud.cloud.preempt(instance_id, notice_s=3.0)
        rig.cloud.plan()
    rig.stage.advance(5.0)
    rig.do("runs", refresh)
    rig.launch("resume", is_resume=True)
    rig.stage.advance(30.0)


def _landing(rig: Rig) -> None:
    """The money ends before the steps do."""
    rig.limit = Decimal("0.37")
    rig.launch(trainer=LONG)
    rig.stage.advance(max(0.0, 318.0 - rig.stage.t))
    rig.begin()
    rig.stage.advance(70.0)
    rig.limit = Decimal("2")


def _destroy(rig: Rig) -> None:
    rig.launch(trainer=LONG)
    rig.stage.advance(8.0)
    rig.begin()
    rig.destroy()


# What runs on a machine: its first program, where that is not the agent itself, and ours.
_THERE = ("startup", "entry", "lookout", "agent", "dead-man", "trainer", "sync--fetch", "sync--watch", "sync--once")
STORIES: dict[str, tuple[Callable[[Rig], None], tuple[str, ...]]] = {
    "launch": (_launch, ("launch", *_THERE)),
    "watch": (_watch, ("watch",)),
    "recovery": (_recovery, ("runs", "resume", *_THERE)),
    "landing": (_landing, ("agent", "dead-man", "trainer", "sync--watch", "sync--once")),
    "destroy": (_destroy, ("destroy", "agent", "dead-man")),
}


SAME_EVERYWHERE = ("trainer", "sync--fetch", "sync--watch", "sync--once")  # they know of no provider
_STAND_INS = ("startup", "entry")  # for shell scripts: they may die anywhere; how their calls fail is not here


def strikes(provider: str = "fake") -> list[tuple[Point, str]]:
    """Every point of every story, and what may happen to it there."""
    found = [point for story in STORIES for point in points(story, provider)]
    return [
        (point, kind) for kind in ("kill", "fail") for point in found if kind == "kill" or point.role not in _STAND_INS
    ]


def points(story: str, provider: str = "fake") -> list[Point]:
    play, roles = STORIES[story]
    rig = Rig(provider=provider)
    try:
        play(rig)
        return [
            Point(story, role, which, number, name)
            for (role, which), names in rig.calls.items()
            if role in roles
            for number, name in enumerate(names, start=1)
            if number > rig.since.get((role, which), 0) and name not in CANNOT_FAIL
        ]
    finally:
        rig.stage.close()


def strike(point: Point, kind: str, trace: Callable[[str], None] | None = None, provider: str = "fake") -> Struck:
    rig = Rig(point, kind, trace, provider)
    struck = Struck(point, kind, was_hit=False)
    try:
        STORIES[point.story][0](rig)
        victim = rig.procs.get((point.role, point.which))
        struck.was_hit = victim is not None and victim.calls >= point.call
        _recover(rig)
    except BaseException as exc:
        struck.broken = f"{type(exc).__name__}: {exc}"
        struck.where = traceback.format_exc()
    finally:
        rig.stage.close()
    return struck


def _recover(rig: Rig) -> None:
    """Whatever bills is shown; destroy ends it; the run, or a new one of its name, still comes home."""
    stage, cloud = rig.stage, rig.cloud.cloud
    stage.say("=== the person recovers")
    stage.advance(1.0)
    shown = rig.do("runs", lambda home: (refresh(home), {line.mark for line in billing_lines(home.ledger.lines())})[1])
    hidden = set(cloud.live()) - (shown.answer or set())
    if hidden:
        raise Broken(f"hidden: {hidden} bills, and the ledger shows {shown.answer}")
    _until(rig, "tidy", destroy_all)
    if cloud.live():
        raise Broken(f"leaked: {cloud.live()}")
    stage.truth.check_receipts()
    state = rig.do("runs", lambda home: home.ledger.runs()[:1]).answer
    if not state or state[0].state != "done":
        is_resume = bool(state) and rig.do("runs", _is_begun).answer
        client = rig.launch("again", is_resume=is_resume)
        if client.error is not None:
            raise Broken(f"not recoverable: {client.error}")
        ended = rig.do("watch again", lambda home: [r.text for r in watch(home, home.ledger.find("moss"))][-1])
        if ended.error is not None or not str(ended.answer).startswith("done"):
            raise Broken(f"the recovered run ended with {ended.error or ended.answer}")
    if cloud.live():
        raise Broken(f"leaked after it came home: {cloud.live()}")
    _until(rig, "tidy", destroy_all)
    stage.truth.check_receipts()


def _until(rig: Rig, role: str, verb: Callable[[Home], Any]) -> None:
    for _ in range(40):
        client = rig.do(role, verb)
        if client.error is None and not client.answer:
            return
        rig.stage.advance(30.0)
    raise Broken(f"{role} does not succeed: {client.error or client.answer}")


def _is_begun(home: Home) -> bool:
    """Whether there is something to resume: its run documents are in the store."""
    run = home.ledger.find("moss")
    with contextlib.suppress(HomingError, OSError):
        return home.store_of(run).exists(f"runs/{run.id}/run.json")
    return False
