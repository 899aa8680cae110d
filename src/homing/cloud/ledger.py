"""The ledger: every instance ever asked for, from the intent to the receipt. SQLite; rows are never deleted.

    intend        run + line, durable before anything is asked of a provider; one live run per name
    begin_create  from here on something may exist and bill; refused if the line was closed meanwhile
    record        the id, before any wait
    close         the provider showed it absent: end and dollars; the receipt

Two clients may write at once: each step is one transaction that checks what it relies on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from homing.cloud.ledger_file import LedgerFile
from homing.cloud.ledger_rows import read_line, read_run, seconds_in, usd_in
from homing.cloud.mark import shown_mark
from homing.errors import EndedElsewhere, HomingError, IntegrityError, UsageError
from homing.install import pip_upgrade
from homing.units import format_usd
from homing.wire.codec import record
from homing.world import Database, MemoryDatabase, World

__all__ = [
    "ADOPTED",
    "AT_MOST",
    "CUT_SHORT",
    "LIVE_STATES",
    "LOST",
    "PREEMPTED",
    "REFUSED",
    "RESTORED",
    "SILENT",
    "UNDONE",
    "Adopted",
    "Ledger",
    "LedgerLine",
    "Receipts",
    "RunRow",
]

LIVE_STATES = ("launching", "running", "landing")
# How the reason of a run begins whose machine went before its work was done.
SILENT, PREEMPTED, LOST = "its instance ended without saying how", "preempted: ", "lost: "
CUT_SHORT = "its launch was cut short"
UNDONE = "launch: "  # and why it failed: what it had begun was undone
REFUSED = "refused"  # state of a line whose create call the provider answered with no: nothing was made
# How the note of a receipt begins that is the most a machine can have cost: nobody knows when it ended, or that it was.
AT_MOST = "at most: "
# How the note of an open line begins that was written again from the store's record: until the provider shows its
# instance, this home does not know how long it lived.
RESTORED = "restored: "
ADOPTED = "adopted"  # another home owns it by now; neither live nor ended here
SCHEMA_VERSION = 1


@record("ledger-line", 1)
@dataclass(frozen=True)
class LedgerLine:
    """One instance: from the intent to the receipt. Never deleted."""

    mark: str
    run_id: str
    run_name: str
    attempt: int
    provider: str
    offer: str
    rate_usd_per_hour: str
    limit_usd: str | None
    intent_at: float
    instance_id: str | None = None
    created_at: float | None = None
    destroyed_at: float | None = None  # when the provider showed it absent
    state: str = "requested"
    billing: str = "maybe"
    spend_usd: str = "0"
    note: str = ""
    account: str | None = None  # of the key that rented it; None: not known, so any key of its provider speaks for it
    damaged: tuple[str, ...] = ()  # columns of its row that could not be read; they have values that are safe to act on

    @property
    def is_at_most(self) -> bool:
        """A receipt that is an upper bound."""
        return self.destroyed_at is not None and self.note.startswith(AT_MOST)

    @property
    def is_twin(self) -> bool:
        """A second machine of its attempt, under the same mark at the provider."""
        return shown_mark(self.mark) != self.mark


# What each look finds anew; a change of anything else is brought into the backup.
_NOT_KEPT = {"billing", "spend_usd", "note", "reason", "exit_code", "ended_at", "fetched_step"}
_LINE_COLUMNS = [field.name for field in dataclasses.fields(LedgerLine) if field.name != "damaged"]
# Also where no time stands in its place: it may bill. To SQLite text and blobs are larger than every number.
_IS_OPEN = "(destroyed_at IS NULL OR destroyed_at >= 1e12)"
_LINES = f"SELECT {', '.join(_LINE_COLUMNS)} FROM lines"
_OLDEST_FIRST = "ORDER BY intent_at, rowid"
# By number, not by time: after a clock was set back the attempt that runs would stand before ended ones. A twin comes
# before the machine that it was made beside: the last is the one that the run is on.
_BY_ATTEMPT = "ORDER BY attempt, instr(mark, '+') = 0, rowid"
_UNCHANGED = " AND EXISTS (SELECT 1 FROM runs WHERE id = ? AND state = ? AND reason = ? AND spend_limit_usd IS ?)"
_TABLES = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS runs (
        id TEXT PRIMARY KEY, name TEXT NOT NULL, state TEXT NOT NULL, created_at REAL NOT NULL, store TEXT NOT NULL,
        run_file_sha256 TEXT NOT NULL, spend_limit_usd TEXT, reason TEXT NOT NULL DEFAULT '', exit_code INTEGER,
        ended_at REAL, fetched_step INTEGER)""",
    """CREATE TABLE IF NOT EXISTS lines (
        mark TEXT PRIMARY KEY, run_id TEXT NOT NULL REFERENCES runs(id), run_name TEXT NOT NULL,
        attempt INTEGER NOT NULL, provider TEXT NOT NULL, offer TEXT NOT NULL, rate_usd_per_hour TEXT NOT NULL,
        limit_usd TEXT, intent_at REAL NOT NULL, instance_id TEXT, created_at REAL, destroyed_at REAL,
        state TEXT NOT NULL, billing TEXT NOT NULL, spend_usd TEXT NOT NULL, note TEXT NOT NULL,
        destroy_asked_at REAL, account TEXT)""",
    # Instances that another home started: the only ones of another owner's that this home may touch.
    """CREATE TABLE IF NOT EXISTS adopted (
        mark TEXT PRIMARY KEY, owner TEXT NOT NULL, host TEXT NOT NULL, home TEXT NOT NULL)""",
    # What the provider itself says an instance has cost, where it says so: beside our figure, never instead of it.
    "CREATE TABLE IF NOT EXISTS bills (mark TEXT PRIMARY KEY, usd TEXT NOT NULL, at REAL NOT NULL)",
    # Every look needs the few open lines and live runs among thousands of receipts.
    "CREATE INDEX IF NOT EXISTS lines_of_run ON lines (run_id)",
    f"CREATE INDEX IF NOT EXISTS lines_open ON lines (mark) WHERE {_IS_OPEN}",  # the very words that ask for them
    "CREATE INDEX IF NOT EXISTS runs_by_state ON runs (state)",
    """CREATE TRIGGER IF NOT EXISTS lines_stay BEFORE DELETE ON lines
        BEGIN SELECT RAISE(ABORT, 'ledger lines are never deleted'); END""",
    """CREATE TRIGGER IF NOT EXISTS runs_stay BEFORE DELETE ON runs
        BEGIN SELECT RAISE(ABORT, 'runs are never deleted'); END""",
)
_SCHEMA = (
    "SELECT value, (SELECT COUNT(*) FROM sqlite_master WHERE name NOT LIKE 'sqlite!_%' ESCAPE '!') AS num_tables"
    " FROM meta WHERE key = 'schema_version'"
)


@dataclass(frozen=True)
class Adopted:
    """An instance that another home started and this one took over: whose mark it carries, and where that home is."""

    mark: str
    owner: str
    host: str
    home: str


@dataclass(frozen=True)
class RunRow:
    """A run as home knows it. Its own record lies in the store."""

    id: str
    name: str
    state: str
    created_at: float
    store: str
    run_file_sha256: str
    spend_limit_usd: str | None = None
    reason: str = ""
    exit_code: int | None = None
    ended_at: float | None = None
    fetched_step: int | None = None
    damaged: tuple[str, ...] = ()  # columns of its row that could not be read

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_STATES

    @property
    def is_interrupted(self) -> bool:
        """Its machine was taken away or lost, not its work: it can go on elsewhere."""
        return not self.is_live and self.reason.startswith((SILENT, PREEMPTED, LOST))

    @property
    def may_go_on(self) -> bool:
        """Ended, and perhaps not for good: a guard may rent the next machine for it."""
        return self.is_interrupted or (not self.is_live and self.reason == CUT_SHORT)


_RUN_COLUMNS = [field.name for field in dataclasses.fields(RunRow) if field.name != "damaged"]
_IS_LIVE = f"state IN ({', '.join(repr(state) for state in LIVE_STATES)})"
_NEWEST_FIRST = "ORDER BY rowid DESC"
# How a run's reason begins that a guard, or a launch that still lives, may continue; see Home.may_go_on.
_MAY_GO_ON = (SILENT, PREEMPTED, LOST, CUT_SHORT, UNDONE)
_GIVEN = "SELECT value FROM json_each(?)"


@dataclass(frozen=True)
class Receipts:
    """Dollars of closed lines: each amount as it is written, and how many lines have it."""

    amounts: Mapping[str, int]
    is_at_most: bool  # one of them is an upper bound

    @property
    def number(self) -> int:
        return sum(self.amounts.values())

    @functools.cached_property
    def total_usd(self) -> Decimal:
        return sum((Decimal(amount) * number for amount, number in self.amounts.items()), Decimal(0))


class Ledger:
    def __init__(self, path: Path, world: World) -> None:
        self._path = path
        self._world = world
        self._is_ready = False
        self._damage: dict[str, str] = {}
        self._gathered: list[tuple[str, Sequence[Any]]] | None = None
        self.file = LedgerFile(path, world, self._run_on)

    # --- writing ---

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Writes that are made inside become one transaction at its end, however it ends: fifty instances that a
        provider shows need one wait for the disk, not a hundred. What is read inside does not show them yet."""
        assert self._gathered is None, "one at a time"
        self._gathered = []
        try:
            yield
        finally:
            gathered, self._gathered = self._gathered, None
            if gathered:
                before = self._kept()
                self._execute(*gathered)
                if self._kept() != before:
                    self.file.back_up()

    def _kept(self) -> list[dict[str, Any]]:
        """What the backup must have of the open lines."""
        names = [name for name in _LINE_COLUMNS if name not in _NOT_KEPT]
        return self._execute((f"SELECT {', '.join(names)} FROM lines WHERE {_IS_OPEN} ORDER BY rowid", []))

    def intend(self, run: RunRow, line: LedgerLine, last: RunRow | None = None) -> None:
        """Run and line in one transaction. A resumed run must have ended, a new one may not share a live name.

        `last` is the run as a guard has judged it: one that a person has destroyed or launched since stays so, and one
        that has got another limit is not launched under the old one.
        """
        insert = f"INSERT INTO lines ({', '.join(_LINE_COLUMNS)}) SELECT {', '.join('?' * len(_LINE_COLUMNS))}"
        values = [getattr(line, name) for name in _LINE_COLUMNS]
        names = _RUN_COLUMNS
        live = ", ".join(f"'{state}'" for state in LIVE_STATES)
        judged = [] if last is None else [last.id, last.state, last.reason, last.spend_limit_usd]
        same = _UNCHANGED if judged else ""
        if any(known.mark == line.mark for known in self.lines(run.id)):
            raise UsageError(
                what=f"{run.id} was launched from elsewhere while you were asked.",
                why=f"Its attempt {line.attempt} is in the ledger already.",
                fix=f"homing status {run.name}   then launch again",
            )
        rows = self._execute(
            # A name is free when no run of that name lives; a run under its own id goes on when it has ended.
            (
                f"{insert} WHERE NOT EXISTS (SELECT 1 FROM runs WHERE name = ? AND state IN ({live})){same}",
                [*values, run.name, *judged],
            ),
            (
                f"INSERT INTO runs ({', '.join(names)}) SELECT {', '.join('?' * len(names))}"
                " WHERE EXISTS (SELECT 1 FROM lines WHERE mark = ?)"
                " ON CONFLICT (id) DO UPDATE SET state = excluded.state, reason = '', exit_code = NULL,"
                " ended_at = NULL, spend_limit_usd = excluded.spend_limit_usd",
                [*(getattr(run, name) for name in names), line.mark],
            ),
            ("SELECT mark FROM lines WHERE mark = ?", [line.mark]),
            must_last=True,
            is_kept=True,
        )
        if rows:
            return
        now = self.run(last.id) if last is not None else None
        if now is not None and not now.is_live:
            if last is not None and (now.state, now.reason) == (last.state, last.reason):
                limit = format_usd(Decimal(now.spend_limit_usd or 0))
                raise EndedElsewhere(
                    f"{now.id} is not launched again: its limit is {limit} by now.",
                    fix=f"homing launch {now.id} --resume --spend-limit {now.spend_limit_usd}",
                )
            raise EndedElsewhere(f"{now.id} is not launched again: it is {now.state} by now.", now.reason)
        raise self._name_taken(run.name)

    def begin_create(self, mark: str, at: float) -> None:
        """The last durable word before the create call: from now on an instance may exist."""
        rows = self._execute(
            (
                f"UPDATE lines SET created_at = ?, state = 'booting' WHERE mark = ? AND {_IS_OPEN}"
                " AND created_at IS NULL AND destroy_asked_at IS NULL",
                [at, mark],
            ),
            ("SELECT created_at FROM lines WHERE mark = ?", [mark]),
            must_last=True,
            is_kept=True,
        )
        if not rows or rows[0]["created_at"] != at:
            raise HomingError(
                what=f"{mark} was destroyed before it was created.",
                why="Another `homing destroy` closed this launch.",
                fix="Launch again if you still want it.",
            )

    def update(self, mark: str, **columns: Any) -> None:
        """Sets columns of a line that is still open; a closed line is a receipt and stays as it is."""
        self._set("lines", columns, f"mark = ? AND {_IS_OPEN}", mark)

    def close(self, mark: str, *, at: float, spend_usd: Decimal, note: str) -> None:
        """The receipt. Said once: whoever closes first is right. One that cannot be kept fails."""
        columns = {"destroyed_at": at, "spend_usd": str(spend_usd), "state": "gone", "billing": "no", "note": note}
        self._set("lines", columns, f"mark = ? AND {_IS_OPEN}", mark, must_last=True)

    def reopen(self, mark: str, *, instance_id: str, note: str, now: float) -> None:
        """The provider shows what we had closed: the truth is theirs, and it bills. So it was asked for, also where
        that is not written here (a ledger that was put back)."""
        sql = (
            "UPDATE lines SET destroyed_at = NULL, state = 'unknown', billing = 'maybe', instance_id = ?, note = ?,"
            " created_at = COALESCE(created_at, ?) WHERE mark = ?"
        )
        self._write(sql, [instance_id, note, now, mark], is_kept=True)

    def adopt(self, line: LedgerLine) -> None:
        """A line for an instance that carries our mark and that no line knows."""
        names = ", ".join(_LINE_COLUMNS)
        sql = f"INSERT OR IGNORE INTO lines ({names}) VALUES ({', '.join('?' * len(_LINE_COLUMNS))})"
        self._write(sql, [getattr(line, name) for name in _LINE_COLUMNS], is_kept=True)

    def adopt_run(
        self, run: RunRow, lines: Sequence[LedgerLine], adopted: Sequence[Adopted], *, must_last: bool = True
    ) -> None:
        """A run of another home, or one that this ledger had lost, with all its attempts, in one transaction. What is
        known here already stays."""
        names = _RUN_COLUMNS
        changed = ("state", "store", "spend_limit_usd", "reason", "exit_code", "ended_at")
        insert_run = (
            f"INSERT INTO runs ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) ON CONFLICT (id) DO UPDATE"
            f" SET {', '.join(f'{name} = excluded.{name}' for name in changed)}"
        )
        insert_line = (
            f"INSERT OR IGNORE INTO lines ({', '.join(_LINE_COLUMNS)}) VALUES ({', '.join('?' * len(_LINE_COLUMNS))})"
        )
        insert_mark = "INSERT OR REPLACE INTO adopted (mark, owner, host, home) VALUES (?, ?, ?, ?)"
        self._execute(
            (insert_run, [getattr(run, name) for name in names]),
            *((insert_line, [getattr(line, name) for name in _LINE_COLUMNS]) for line in lines),
            *((insert_mark, [each.mark, each.owner, each.host, each.home]) for each in adopted),
            must_last=must_last,
            is_kept=True,
        )

    def note_bill(self, mark: str, usd: Decimal, at: float) -> None:
        """The provider's own figure; a later one replaces it, also after the receipt."""
        self._write("INSERT OR REPLACE INTO bills (mark, usd, at) VALUES (?, ?, ?)", [mark, str(usd), at])

    def close_unborn(self, mark: str, at: float) -> None:
        """A launch whose process died before its create call: nothing was asked of a provider, so nothing exists."""
        columns = {"destroyed_at": at, "state": "gone", "billing": "no", "note": "its launch died before the create"}
        self._set("lines", columns, f"mark = ? AND created_at IS NULL AND {_IS_OPEN}", mark)

    def set_run(self, run_id: str, *, only_live: bool = False, unless_stopped: bool = False, **columns: Any) -> None:
        """With `only_live` a run that ended meanwhile stays ended: another client may have destroyed it. With
        `unless_stopped` only one that was stopped does, and not one that a look took for failed."""
        live = ", ".join(f"'{state}'" for state in LIVE_STATES)
        where = "id = ?" + (f" AND state IN ({live})" if only_live else "")
        where += " AND state != 'stopped'" if unless_stopped else ""
        self._set("runs", columns, where, run_id)

    def set_clock(self, before: str, now: str, step_s: float, *, until: float) -> None:
        """A new anchor (clock.py), and the open lines that began before `until` moved by `step_s`. One transaction, and
        only if `before` is still the anchor: of two that notice a step, one moves the lines."""
        is_last = "COALESCE((SELECT value FROM meta WHERE key = 'clock'), '') = ?"
        self._execute(
            (
                "UPDATE lines SET created_at = created_at + ?, destroy_asked_at = destroy_asked_at + ?"
                f" WHERE destroyed_at IS NULL AND created_at <= ? AND {is_last}",
                [step_s, step_s, until, before],
            ),
            (f"INSERT OR REPLACE INTO meta (key, value) SELECT 'clock', ? WHERE {is_last}", [now, before]),
        )

    # --- reading ---

    def clock(self) -> str:
        """The anchor that `set_clock` left; "" where there is none."""
        rows = self._execute(("SELECT value FROM meta WHERE key = 'clock'", []))
        return str(rows[0]["value"]) if rows else ""

    def runs(self) -> list[RunRow]:
        """Newest first: the last one that was written down, because a clock that was set back would sort the runs
        launched since behind older ones."""
        return self._runs("")

    def run(self, run_id: str) -> RunRow | None:
        return next(iter(self._runs("WHERE id = ?", [run_id])), None)

    def run_ids(self) -> set[str]:
        return {row["id"] for row in self._execute(("SELECT id FROM runs", []))}

    def live_runs(self) -> list[RunRow]:
        """Newest first."""
        return self._runs(f"WHERE {_IS_LIVE}")

    def recorded_runs(self, since: float) -> list[RunRow]:
        """Runs that are live or ended after `since`, newest first."""
        return self._runs(f"WHERE {_IS_LIVE} OR ended_at > ?", [since])

    def unfinished_runs(self, last: int = 0) -> list[RunRow]:
        """Every run that is live, has an open line or may be continued, and the `last` newest of all; newest first.

        Whatever may be billing is among them, however small `last` is.
        """
        newest = f"SELECT rowid FROM runs {_NEWEST_FIRST} LIMIT ?"
        reasons = " OR ".join(["substr(reason, 1, ?) = ?"] * len(_MAY_GO_ON))
        params = [value for reason in _MAY_GO_ON for value in (len(reason), reason)]
        open_ = f"SELECT run_id FROM lines WHERE {_IS_OPEN}"
        where = f"WHERE {_IS_LIVE} OR id IN ({open_}) OR {reasons} OR rowid IN ({newest})"
        return self._runs(where, [*params, max(0, last)])

    def _runs(self, where: str, params: Sequence[Any] = ()) -> list[RunRow]:
        names = _RUN_COLUMNS
        rows = self._execute((f"SELECT {', '.join(names)} FROM runs {where} {_NEWEST_FIRST}", params))
        found = [RunRow(**read_run(row, self._world.now())) for row in rows]
        for run in found:
            self._note_damage(f"run {run.id or '?'}", run.damaged)
        return found

    def runs_called(self, word: str) -> list[RunRow]:
        """The runs with this id or name, newest first."""
        return self._runs("WHERE id = ? OR name = ?", [word, word])

    def called(self, word: str) -> list[RunRow]:
        """The runs with this id or name: first those that are live or may be billing, then the newest first. An id
        comes before a run that has it as its name."""
        found = self.runs_called(word)
        billing = self.billing_runs() if len(found) > 1 else set()
        return sorted(found, key=lambda run: (run.id != word, not run.is_live and run.id not in billing))

    def billing_runs(self) -> set[str]:
        """Ids of the runs with an instance that may be billing."""
        sql = f"SELECT run_id FROM lines WHERE created_at IS NOT NULL AND {_IS_OPEN}"
        return {row["run_id"] for row in self._execute((sql, []))}

    def find(self, name: str | None) -> RunRow:
        """By id, by name (see `called`), or the newest of all where no name is given."""
        runs = self.runs()
        found = runs if name is None else self.called(name)
        if found:
            return found[0]
        names = list(dict.fromkeys(run.name for run in runs))
        near = difflib.get_close_matches(name or "", names, n=1)
        known = f"{', '.join(names[:20])}." + (f" Did you mean {near[0]}?" if near else "")
        if not runs:
            fix = f"What one costs, and how to begin: homing plan {name or ''}"
            raise UsageError(what="There is no run yet.", fix=fix.rstrip())
        raise UsageError(what=f"There is no run {name!r}.", why=f"Known: {known}", fix="homing runs")

    def lines(self, run_id: str | None = None) -> list[LedgerLine]:
        """Oldest first; with a run, its attempts in order."""
        if run_id is not None:
            return self._lines(f"WHERE run_id = ? {_BY_ATTEMPT}", [run_id])
        return self._lines(_OLDEST_FIRST)

    def lines_of(self, run_ids: Iterable[str]) -> dict[str, list[LedgerLine]]:
        """Each run's attempts in order, in one query; an empty list for a run that has none."""
        found: dict[str, list[LedgerLine]] = {run_id: [] for run_id in run_ids}
        for line in self._lines(f"WHERE run_id IN ({_GIVEN}) {_BY_ATTEMPT}", [json.dumps(list(found))]):
            found[line.run_id].append(line)
        return found

    def open_lines(self) -> list[LedgerLine]:
        """Lines that no provider has shown gone, oldest first: whatever may bill, and launches before their create."""
        return self._lines(f"WHERE {_IS_OPEN} {_OLDEST_FIRST}")

    def num_lines(self) -> int:
        """How many lines were ever written, for `lines_marked`."""
        return int(self._execute(("SELECT COALESCE(MAX(rowid), 0) AS number FROM lines", []))[0]["number"])

    def lines_marked(self, marks: Iterable[str], *, of_first: int | None = None) -> dict[str, LedgerLine]:
        """By mark, open or closed; marks without a line are left out. `of_first`: only among the lines that were there
        when `num_lines` said so."""
        params: list[str | int] = [json.dumps(sorted(set(marks)))]
        how = f"WHERE mark IN ({_GIVEN})"
        if of_first is not None:
            how, params = f"{how} AND rowid <= ?", [*params, of_first]
        return {line.mark: line for line in self._lines(f"{how} {_OLDEST_FIRST}", params)}

    def lines_of_others(self, prefix: str) -> list[LedgerLine]:
        """Lines whose mark does not begin with `prefix`, which is this home's: those that were adopted."""
        return self._lines(f"WHERE substr(mark, 1, ?) != ? {_OLDEST_FIRST}", [len(prefix), prefix])

    def last_lines(self, last: int, run_name: str | None = None) -> list[LedgerLine]:
        """Every open line and the `last` newest of all, oldest first; with a name, of the runs of that name."""
        where, params = ("1", []) if run_name is None else ("run_name = ?", [run_name])
        newest = f"SELECT rowid FROM lines WHERE {where} ORDER BY intent_at DESC, rowid DESC LIMIT ?"
        shown = f"WHERE {where} AND ({_IS_OPEN} OR rowid IN ({newest})) {_OLDEST_FIRST}"
        return self._lines(shown, [*params, *params, max(0, last)])

    def providers(self, prefix: str) -> set[str]:
        """Providers of the lines whose mark begins with `prefix`."""
        sql = "SELECT DISTINCT provider FROM lines WHERE substr(mark, 1, ?) = ?"
        return {row["provider"] for row in self._execute((sql, [len(prefix), prefix]))}

    def receipts(self, run_name: str | None = None) -> Receipts:
        """What all closed lines cost, without reading them one by one."""
        where, params = ("1", []) if run_name is None else ("run_name = ?", [run_name])
        where += f" AND (NOT {_IS_OPEN} OR created_at IS NULL)"
        amounts = self._execute(
            (f"SELECT spend_usd, COUNT(*) AS number FROM lines WHERE {where} GROUP BY spend_usd", params)
        )
        at_most = f"SELECT 1 FROM lines WHERE {where} AND NOT {_IS_OPEN} AND substr(note, 1, ?) = ? LIMIT 1"
        is_at_most = bool(self._execute((at_most, [*params, len(AT_MOST), AT_MOST])))
        found: dict[str, int] = {}
        for row in amounts:  # one that cannot be read counts as nothing; `_lines` tells which row it is
            usd = usd_in(row["spend_usd"]) or "0"
            found[usd] = found.get(usd, 0) + row["number"]
        return Receipts(found, is_at_most)

    def _lines(self, how: str, params: Sequence[Any] = ()) -> list[LedgerLine]:
        found = [LedgerLine(**read_line(row, self._world.now())) for row in self._execute((f"{_LINES} {how}", params))]
        for line in found:
            self._note_damage(f"instance {line.mark or line.instance_id or '?'}", line.damaged)
        return found

    def damage(self) -> list[str]:
        """Rows that were met since the last call and could not be read in full, one sentence each."""
        found, self._damage = list(self._damage.values()), {}
        return found

    def _note_damage(self, whose: str, columns: tuple[str, ...]) -> None:
        if columns:
            named = ", ".join(columns)
            self._damage[whose] = f"The ledger's row of {whose} is damaged ({named}): what it costs may not be counted."

    def adopted(self) -> dict[str, Adopted]:
        rows = self._execute(("SELECT mark, owner, host, home FROM adopted", []))
        return {str(row["mark"]): Adopted(**{name: str(value) for name, value in row.items()}) for row in rows}

    def bills(self, marks: Iterable[str] | None = None) -> dict[str, Decimal]:
        """Mark to dollars, for those whose provider told them; with `marks`, of those alone."""
        where, params = ("", []) if marks is None else (f" WHERE mark IN ({_GIVEN})", [json.dumps(list(marks))])
        rows = self._execute((f"SELECT mark, usd FROM bills{where}", params))
        return {str(row["mark"]): Decimal(usd) for row in rows if (usd := usd_in(row["usd"])) is not None}

    def ask_destroy(self, mark: str, now: float) -> None:
        """Notes that its end is wanted, since the first time or, where the clock was set back, since that."""
        since = "MIN(COALESCE(destroy_asked_at, ?), ?)"
        sql = f"UPDATE lines SET destroy_asked_at = {since} WHERE mark = ? AND {_IS_OPEN}"
        self._execute((sql, [now, now, mark]))

    def destroy_asked_at(self, mark: str) -> float | None:
        rows = self._execute(("SELECT destroy_asked_at FROM lines WHERE mark = ?", [mark]))
        return seconds_in(rows[0]["destroy_asked_at"], self._world.now()) if rows else None

    def is_destroy_asked(self, mark: str) -> bool:
        """Whether home wanted this end, and not the machine's owner."""
        return self.destroy_asked_at(mark) is not None

    def account(self, mark: str) -> str | None:
        """Whose it is by now: a person may have vouched for another key since a line was read."""
        rows = self._execute(("SELECT account FROM lines WHERE mark = ?", [mark]))
        return rows[0]["account"] if rows else None

    def unconfirmed(self) -> list[LedgerLine]:
        """Lines whose destroy was asked for and which no provider has shown gone yet."""
        return self._lines(f"WHERE destroy_asked_at IS NOT NULL AND {_IS_OPEN} ORDER BY intent_at")

    # --- helpers ---

    def _name_taken(self, name: str) -> UsageError:
        live = next((run for run in self.live_runs() if run.name == name), None)
        which = live.id if live else name
        return UsageError(
            what=f"A run named {name} is already live: {which}.",
            why="Two runs of one name would write over each other's model.",
            fix=f"homing watch {which}   or end it: homing stop {which}, homing destroy {which}"
            "   or launch under another name: --name OTHER",
        )

    def _set(self, table: str, columns: dict[str, Any], where: str, key: str, *, must_last: bool = False) -> None:
        """Writes only what differs: who looks again and finds the same changes nothing on the disk."""
        assert columns, "nothing to set"
        sets = ", ".join(f"{name} = ?" for name in columns)
        statement = (f"UPDATE {table} SET {sets} WHERE {where}", [*columns.values(), key])
        if self._gathered is not None and not must_last:  # the row itself may be one of those that are gathered
            self._gathered.append(statement)
            return
        rows = self._execute((f"SELECT {', '.join(columns)} FROM {table} WHERE {where}", [key]))
        changed = {name for row in rows for name, value in columns.items() if row[name] != value}
        if changed:
            self._execute(statement, must_last=must_last, is_kept=not changed <= _NOT_KEPT)

    def _write(self, sql: str, params: Sequence[Any], *, is_kept: bool = False) -> None:
        if self._gathered is None:
            self._execute((sql, params), is_kept=is_kept)
        else:
            self._gathered.append((sql, params))

    def _execute(
        self, *statements: tuple[str, Sequence[Any]], must_last: bool = False, is_kept: bool = False
    ) -> list[dict[str, Any]]:
        try:
            return self.file.execute(statements, must_last=must_last, is_kept=is_kept)
        except OSError as exc:
            raise IntegrityError(
                what=f"The ledger {self._path} cannot be used.",
                why=f"{type(exc).__name__}: {exc}",
                fix="Check the disk's space and who may write that folder. What bills is shown and ended without it:"
                " homing runs, homing destroy --all",
            ) from exc

    def _run_on(
        self, database: Database, statements: Sequence[tuple[str, Sequence[Any]]], is_new: bool
    ) -> list[dict[str, Any]]:
        """On the file, or on a copy in memory: the same tables. `is_new`: there is no file, and it may be made."""
        is_copy = isinstance(database, MemoryDatabase)
        if is_new or not self._is_ready:
            if is_new and not is_copy:
                self._world.mkdir(self._path.parent)
            rows = self._schema(database, is_new)
            if int(rows[0]["value"]) > SCHEMA_VERSION:
                raise UsageError(
                    what=f"{self._path} was written by a newer homing.",
                    why=f"Its schema is {rows[0]['value']}, this homing knows {SCHEMA_VERSION}.",
                    fix=pip_upgrade(),
                )
            self._is_ready = not is_copy
        return database.execute(*statements)

    def _schema(self, database: Database, is_new: bool) -> list[dict[str, Any]]:
        """Its version. What is there is only read; what is not is made."""
        try:
            rows = database.execute((_SCHEMA, ()))
            if rows and rows[0]["num_tables"] == len(_TABLES):
                return rows
        except FileNotFoundError:
            if not is_new:
                raise  # removed a moment ago: an empty one in its place would hide its backup
        except OSError:
            pass  # no such table, or worse, which the write tells
        made = ("INSERT OR IGNORE INTO meta VALUES ('schema_version', ?)", [str(SCHEMA_VERSION)])
        return database.execute(*((sql, ()) for sql in _TABLES), made, (_SCHEMA, ()))
