"""The ledger: an SQLite database of every instance ever requested. Rows are never deleted.

Each instance has a line, from the intent to create it until the receipt, which records its end and its cost.

    intend        writes the run and its line to disk before any request to a provider; one live run per name
    begin_create  records that from now on an instance may exist and bill; refused if the line has been closed
    update        records the instance id, before anything is waited for
    close         writes the receipt (end time and dollars) when the provider no longer lists the instance

Several processes may write at the same time, because each step is one transaction that checks its preconditions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from homing.cloud.ledger.ledger_file import LedgerFile, read_line, read_run, seconds_in, usd_in
from homing.cloud.ledger.mark import shown_mark
from homing.errors import EndedElsewhere, HomingError, IntegrityError, UsageError
from homing.pip_command import pip_upgrade
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
# A run's `reason` begins with one of these if its machine was lost before the work was done.
SILENT, PREEMPTED, LOST = "its instance ended without reporting why", "preempted: ", "lost: "
CUT_SHORT = "its launch was interrupted"
UNDONE = "launch: "  # a run's `reason` begins with this, followed by the cause, if its launch failed and was undone
REFUSED = "refused"  # a line's state if the provider refused the create call, which means that no instance exists
# A receipt's note begins with this if its amount is an upper bound, because it is unknown when the machine ended or
# whether it ever existed.
AT_MOST = "at most: "
# An open line's note begins with this if the line was restored from the run's record in the store. Until the provider
# lists the instance, it is not known here how long the instance lived.
RESTORED = "restored: "
ADOPTED = "adopted"  # a run's state if another computer owns the run now, so that here it is neither live nor ended
SCHEMA_VERSION = 1


@record("ledger-line", 1)
@dataclass(frozen=True)
class LedgerLine:
    """The ledger row of one instance, from the intent to the receipt. It is never deleted."""

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
    destroyed_at: float | None = None  # when the instance ended; None while it may be billing
    state: str = "requested"
    billing: str = "maybe"
    spend_usd: str = "0"
    note: str = ""
    # account that rented the instance; None if unknown, in which case any key for the provider is accepted
    account: str | None = None
    damaged: tuple[str, ...] = ()  # names of columns that could not be read; those fields have safe default values

    @property
    def is_at_most(self) -> bool:
        """Return True if this receipt is an upper bound."""
        return self.destroyed_at is not None and self.note.startswith(AT_MOST)

    @property
    def is_duplicate(self) -> bool:
        """Return True if this is a second instance of its attempt, with the same mark at the provider."""
        return shown_mark(self.mark) != self.mark


# A change to only these columns does not update the backup, because every status check recomputes them.
_NOT_KEPT = {"billing", "spend_usd", "note", "reason", "exit_code", "ended_at", "fetched_step"}
_LINE_COLUMNS = [field.name for field in dataclasses.fields(LedgerLine) if field.name != "damaged"]
# A line whose end time is not a number counts as open, because its instance may be billing. In SQLite, text and blobs
# compare as greater than any number.
_IS_OPEN = "(destroyed_at IS NULL OR destroyed_at >= 1e12)"
_LINES = f"SELECT {', '.join(_LINE_COLUMNS)} FROM lines"
_OLDEST_FIRST = "ORDER BY intent_at, rowid"
# Lines are sorted by attempt number, not by time. If the clock was set back, sorting by time would put the running
# attempt before ended ones. A duplicate comes before the instance it duplicates, so that the last line is the run's
# current instance.
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
    # Instances adopted from other computers. Of all instances started elsewhere, only these may be changed from here.
    """CREATE TABLE IF NOT EXISTS adopted (
        mark TEXT PRIMARY KEY, owner TEXT NOT NULL, host TEXT NOT NULL, home TEXT NOT NULL)""",
    # The cost of each instance as reported by its provider, if it reports one. It is shown next to our own figure.
    "CREATE TABLE IF NOT EXISTS bills (mark TEXT PRIMARY KEY, usd TEXT NOT NULL, at REAL NOT NULL)",
    # Indexes, because every status check must find the few open lines and live runs among thousands of receipts.
    "CREATE INDEX IF NOT EXISTS lines_of_run ON lines (run_id)",
    # SQLite uses this index only if its condition is the same as in the query
    f"CREATE INDEX IF NOT EXISTS lines_open ON lines (mark) WHERE {_IS_OPEN}",
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
    """The origin of an adopted instance: the owner, host and path of the $HOMING_HOME from which it was started."""

    mark: str
    owner: str
    host: str
    home: str


@dataclass(frozen=True)
class RunRow:
    """A run as recorded in this ledger. Another record of the run, for all computers, is in its store."""

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
    damaged: tuple[str, ...] = ()  # names of columns that could not be read

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_STATES

    @property
    def is_interrupted(self) -> bool:
        """Return True if the run lost its machine before its work was done, so that it can resume on another one."""
        return not self.is_live and self.reason.startswith((SILENT, PREEMPTED, LOST))

    @property
    def may_go_on(self) -> bool:
        """Return True if the run has ended but a guard may still rent another machine for it."""
        return self.is_interrupted or (not self.is_live and self.reason == CUT_SHORT)


_RUN_COLUMNS = [field.name for field in dataclasses.fields(RunRow) if field.name != "damaged"]
_IS_LIVE = f"state IN ({', '.join(repr(state) for state in LIVE_STATES)})"
_NEWEST_FIRST = "ORDER BY rowid DESC"
# If a run's reason starts with one of these, a guard or a live launch may resume the run (see Home.may_go_on).
_MAY_GO_ON = (SILENT, PREEMPTED, LOST, CUT_SHORT, UNDONE)
_GIVEN = "SELECT value FROM json_each(?)"


@dataclass(frozen=True)
class Receipts:
    """The costs of closed lines. `amounts` maps each cost, as stored, to the number of lines with that cost."""

    amounts: Mapping[str, int]
    is_at_most: bool  # True if at least one amount is an upper bound

    @property
    def number(self) -> int:
        return sum(self.amounts.values())

    @functools.cached_property
    def total_usd(self) -> Decimal:
        return sum((Decimal(amount) * number for amount, number in self.amounts.items()), Decimal(0))


@dataclass(frozen=True)
class _Named:
    """Selects the lines of a run name, or all lines. The runs in `without` have that name but are not meant."""

    name: str | None = None
    without: Collection[str] = ()

    @property
    def sql(self) -> tuple[str, list[Any]]:
        if self.name is None:
            return "1", []
        return f"run_name = ? AND run_id NOT IN ({_GIVEN})", [self.name, json.dumps(list(self.without))]


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
        """Collect the writes made inside the block and commit them in one transaction on exit, even after an exception.

        This needs only one disk sync, even to record fifty instances. Reads inside the block do not see the writes.
        """
        assert self._gathered is None, "at_once cannot be nested"
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
        """Return the open lines, but only the columns whose changes must be backed up."""
        names = [name for name in _LINE_COLUMNS if name not in _NOT_KEPT]
        return self._execute((f"SELECT {', '.join(names)} FROM lines WHERE {_IS_OPEN} ORDER BY rowid", []))

    def intend(self, run: RunRow, line: LedgerLine, last: RunRow | None = None) -> None:
        """Insert the run and its line in one transaction.

        A resumed run must have ended; a new one must not have the name of a live run.

        `last` is the run row on which a guard based its decision. Raises EndedElsewhere if the user has destroyed or
        launched the run since then, or has changed its limit.
        """
        insert = f"INSERT INTO lines ({', '.join(_LINE_COLUMNS)}) SELECT {', '.join('?' * len(_LINE_COLUMNS))}"
        values = [getattr(line, name) for name in _LINE_COLUMNS]
        names = _RUN_COLUMNS
        live = ", ".join(f"'{state}'" for state in LIVE_STATES)
        judged = [] if last is None else [last.id, last.state, last.reason, last.spend_limit_usd]
        same = _UNCHANGED if judged else ""
        if any(known.mark == line.mark for known in self.lines(run.id)):
            raise UsageError(
                what=f"Another process launched {run.id} in the meantime.",
                why=f"Its attempt {line.attempt} is already in the ledger.",
                fix=f"Check it: homing status {run.name}   then launch again",
            )
        rows = self._execute(
            # A run may be launched if no run with its name is live. This also lets an ended run resume.
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
                    f"{now.id} was not relaunched: its limit is now {limit}.",
                    fix=f"homing launch {now.id} --resume --spend-limit {now.spend_limit_usd}",
                )
            raise EndedElsewhere(f"{now.id} was not relaunched: it is now {now.state}.", now.reason)
        raise self._name_taken(run.name)

    def begin_create(self, mark: str, at: float) -> None:
        """Record on disk that the create call is about to be sent. From now on, an instance may exist.

        Raises HomingError if the line was closed.
        """
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
                why="A `homing destroy` in another process canceled this launch.",
                fix="To run it after all, launch it again.",
            )

    def update(self, mark: str, **columns: Any) -> None:
        """Set columns of an open line. A closed line is a receipt and does not change."""
        self._set("lines", columns, f"mark = ? AND {_IS_OPEN}", mark)

    def close(self, mark: str, *, at: float, spend_usd: Decimal, note: str) -> None:
        """Write the receipt. Raises an error if that fails. A second call does not change the receipt."""
        columns = {"destroyed_at": at, "spend_usd": str(spend_usd), "state": "gone", "billing": "no", "note": note}
        self._set("lines", columns, f"mark = ? AND {_IS_OPEN}", mark, must_last=True)

    def reopen(self, mark: str, *, instance_id: str, note: str, now: float) -> None:
        """Reopen a closed line if the provider still lists its instance, because the instance is still billing.

        If the line has no creation time, set it to `now`. A ledger restored from an older copy may lack the time.
        """
        sql = (
            "UPDATE lines SET destroyed_at = NULL, state = 'unknown', billing = 'maybe', instance_id = ?, note = ?,"
            " created_at = COALESCE(created_at, ?) WHERE mark = ?"
        )
        self._write(sql, [instance_id, note, now, mark], is_kept=True)

    def adopt(self, line: LedgerLine) -> None:
        """Insert a line for an instance that carries our mark and has no line."""
        names = ", ".join(_LINE_COLUMNS)
        sql = f"INSERT OR IGNORE INTO lines ({names}) VALUES ({', '.join('?' * len(_LINE_COLUMNS))})"
        self._write(sql, [getattr(line, name) for name in _LINE_COLUMNS], is_kept=True)

    def adopt_run(
        self, run: RunRow, lines: Sequence[LedgerLine], adopted: Sequence[Adopted], *, must_last: bool = True
    ) -> None:
        """Insert a run and all its attempts in one transaction.

        Used for a run that belonged to another computer or is missing from this ledger. Existing lines stay unchanged.
        """
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
        """Record the cost that the provider reports. A later call replaces it, even after the line was closed."""
        self._write("INSERT OR REPLACE INTO bills (mark, usd, at) VALUES (?, ?, ?)", [mark, str(usd), at])

    def close_unborn(self, mark: str, at: float) -> None:
        """Close the line of a launch that died before its create call. No request was sent, so no instance exists."""
        columns = {
            "destroyed_at": at,
            "state": "gone",
            "billing": "no",
            "note": "its launch died before the create call",
        }
        self._set("lines", columns, f"mark = ? AND created_at IS NULL AND {_IS_OPEN}", mark)

    def set_run(self, run_id: str, *, only_live: bool = False, unless_stopped: bool = False, **columns: Any) -> None:
        """Set columns of a run.

        With `only_live`, a run that has ended in the meantime stays unchanged, because another process may have
        destroyed it. With `unless_stopped`, only a stopped run stays unchanged, so that a run can still be updated
        after a status check has marked it as failed.
        """
        live = ", ".join(f"'{state}'" for state in LIVE_STATES)
        where = "id = ?" + (f" AND state IN ({live})" if only_live else "")
        where += " AND state != 'stopped'" if unless_stopped else ""
        self._set("runs", columns, where, run_id)

    def set_clock(self, before: str, now: str, step_s: float, *, until: float) -> None:
        """Store a new clock anchor (see meter.py), and add `step_s` to the times of open lines created before `until`.

        Both happen in one transaction, and only if `before` is still the anchor. If two processes notice the same clock
        change, only one of them shifts the lines.
        """
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
        """Return the anchor stored by `set_clock`, or "" if there is none."""
        rows = self._execute(("SELECT value FROM meta WHERE key = 'clock'", []))
        return str(rows[0]["value"]) if rows else ""

    def runs(self) -> list[RunRow]:
        """Return all runs, newest first.

        The order is that of insertion, because sorting by time would be wrong if the clock was set back.
        """
        return self._runs("")

    def run(self, run_id: str) -> RunRow | None:
        return next(iter(self._runs("WHERE id = ?", [run_id])), None)

    def run_ids(self) -> set[str]:
        return {row["id"] for row in self._execute(("SELECT id FROM runs", []))}

    def live_runs(self) -> list[RunRow]:
        """Return the live runs, newest first."""
        return self._runs(f"WHERE {_IS_LIVE}")

    def recorded_runs(self, since: float) -> list[RunRow]:
        """Return the runs that are live or ended after `since`, newest first."""
        return self._runs(f"WHERE {_IS_LIVE} OR ended_at > ?", [since])

    def unfinished_runs(self, last: int = 0) -> list[RunRow]:
        """Return every run that is live, has an open line or may resume, plus the `last` newest runs, newest first.

        The result includes every run that may be billing, however small `last` is.
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
        """Return the runs with this id or name, newest first."""
        return self._runs("WHERE id = ? OR name = ?", [word, word])

    def called(self, word: str) -> list[RunRow]:
        """Return the runs with this id or name: first the one with this id, then live or possibly billing runs.

        All other runs follow. Within each group, the newest run comes first.
        """
        found = self.runs_called(word)
        billing = self.billing_runs() if len(found) > 1 else set()
        return sorted(found, key=lambda run: (run.id != word, not run.is_live and run.id not in billing))

    def billing_runs(self) -> set[str]:
        """Return the ids of runs with an instance that may be billing."""
        sql = f"SELECT run_id FROM lines WHERE created_at IS NOT NULL AND {_IS_OPEN}"
        return {row["run_id"] for row in self._execute((sql, []))}

    def find(self, name: str | None) -> RunRow:
        """Return the run with this id or name (see `called`), or the newest run if `name` is None.

        Raises UsageError if there is none.
        """
        runs = self.runs()
        found = runs if name is None else self.called(name)
        if found:
            return found[0]
        names = list(dict.fromkeys(run.name for run in runs))
        near = difflib.get_close_matches(name or "", names, n=1)
        known = f"{', '.join(names[:20])}." + (f" Did you mean {near[0]}?" if near else "")
        if not runs:
            fix = f"See what one costs and how to start: homing plan {name or ''}"
            raise UsageError(what="No runs yet.", fix=fix.rstrip())
        raise UsageError(what=f"Unknown run: {name!r}.", why=f"Known: {known}", fix="List the runs: homing runs")

    def lines(self, run_id: str | None = None) -> list[LedgerLine]:
        """Return all lines, oldest first, or, with a run id, the lines of that run's attempts in order."""
        if run_id is not None:
            return self._lines(f"WHERE run_id = ? {_BY_ATTEMPT}", [run_id])
        return self._lines(_OLDEST_FIRST)

    def lines_of(self, run_ids: Iterable[str]) -> dict[str, list[LedgerLine]]:
        """Return the lines of each run's attempts in order, by run id. The list is empty for a run without attempts."""
        found: dict[str, list[LedgerLine]] = {run_id: [] for run_id in run_ids}
        for line in self._lines(f"WHERE run_id IN ({_GIVEN}) {_BY_ATTEMPT}", [json.dumps(list(found))]):
            found[line.run_id].append(line)
        return found

    def open_lines(self) -> list[LedgerLine]:
        """Return the lines that are not closed, oldest first. Their instance may be billing or may not exist yet."""
        return self._lines(f"WHERE {_IS_OPEN} {_OLDEST_FIRST}")

    def num_lines(self) -> int:
        """Return the number of lines written so far, to be passed to `lines_marked` as `of_first`."""
        return int(self._execute(("SELECT COALESCE(MAX(rowid), 0) AS number FROM lines", []))[0]["number"])

    def lines_marked(self, marks: Iterable[str], *, of_first: int | None = None) -> dict[str, LedgerLine]:
        """Return the lines with these marks, open or closed, as a dict by mark. Unknown marks are left out.

        `of_first` restricts the search to the lines that existed when `num_lines` returned that number.
        """
        params: list[str | int] = [json.dumps(sorted(set(marks)))]
        how = f"WHERE mark IN ({_GIVEN})"
        if of_first is not None:
            how, params = f"{how} AND rowid <= ?", [*params, of_first]
        return {line.mark: line for line in self._lines(f"{how} {_OLDEST_FIRST}", params)}

    def lines_of_others(self, prefix: str) -> list[LedgerLine]:
        """Return the adopted lines: those with a mark that does not start with `prefix`, the local owner's prefix."""
        return self._lines(f"WHERE substr(mark, 1, ?) != ? {_OLDEST_FIRST}", [len(prefix), prefix])

    def last_lines(self, last: int, run_name: str | None = None, without: Collection[str] = ()) -> list[LedgerLine]:
        """Return every open line plus the `last` newest lines, oldest first.

        `run_name`: only lines of runs with this name, except the runs whose ids are in `without`.
        """
        where, params = _Named(run_name, without).sql
        newest = f"SELECT rowid FROM lines WHERE {where} ORDER BY intent_at DESC, rowid DESC LIMIT ?"
        shown = f"WHERE {where} AND ({_IS_OPEN} OR rowid IN ({newest})) {_OLDEST_FIRST}"
        return self._lines(shown, [*params, *params, max(0, last)])

    def providers(self, prefix: str) -> set[str]:
        """Return the names of all providers that appear in lines whose mark starts with `prefix`."""
        sql = "SELECT DISTINCT provider FROM lines WHERE substr(mark, 1, ?) = ?"
        return {row["provider"] for row in self._execute((sql, [len(prefix), prefix]))}

    def receipts(self, run_name: str | None = None, without: Collection[str] = ()) -> dict[str, Receipts]:
        """Return the costs of all closed lines, by provider, without reading the lines one by one.

        `run_name`: only lines of runs with this name, except the runs whose ids are in `without`.
        """
        where, params = _Named(run_name, without).sql
        at_most = f"MAX(NOT {_IS_OPEN} AND substr(note, 1, ?) = ?)"
        sql = (
            f"SELECT provider, spend_usd, COUNT(*) AS number, {at_most} AS is_at_most FROM lines"
            f" WHERE {where} AND (NOT {_IS_OPEN} OR created_at IS NULL) GROUP BY provider, spend_usd"
        )
        amounts: dict[str, Counter[str]] = {}
        bounds: set[str] = set()
        for row in self._execute((sql, [len(AT_MOST), AT_MOST, *params])):
            provider = str(row["provider"])
            # an unreadable amount counts as zero, and `_lines` reports its row
            amounts.setdefault(provider, Counter())[usd_in(row["spend_usd"]) or "0"] += row["number"]
            if row["is_at_most"]:
                bounds.add(provider)
        return {provider: Receipts(found, provider in bounds) for provider, found in amounts.items()}

    def _lines(self, how: str, params: Sequence[Any] = ()) -> list[LedgerLine]:
        found = [LedgerLine(**read_line(row, self._world.now())) for row in self._execute((f"{_LINES} {how}", params))]
        for line in found:
            self._note_damage(f"instance {line.mark or line.instance_id or '?'}", line.damaged)
        return found

    def damage(self) -> list[str]:
        """Return a sentence for each row that was found damaged since the last call to this method."""
        found, self._damage = list(self._damage.values()), {}
        return found

    def _note_damage(self, owner: str, columns: tuple[str, ...]) -> None:
        if columns:
            named = ", ".join(columns)
            self._damage[owner] = f"The ledger's row for {owner} is damaged ({named}), so its cost may not be counted."

    def adopted(self) -> dict[str, Adopted]:
        rows = self._execute(("SELECT mark, owner, host, home FROM adopted", []))
        return {str(row["mark"]): Adopted(**{name: str(value) for name, value in row.items()}) for row in rows}

    def bills(self, marks: Iterable[str] | None = None) -> dict[str, Decimal]:
        """Return the cost that the provider reported for each instance, by mark, or only for `marks` if given."""
        where, params = ("", []) if marks is None else (f" WHERE mark IN ({_GIVEN})", [json.dumps(list(marks))])
        rows = self._execute((f"SELECT mark, usd FROM bills{where}", params))
        return {str(row["mark"]): Decimal(usd) for row in rows if (usd := usd_in(row["usd"])) is not None}

    def ask_destroy(self, mark: str, now: float) -> None:
        """Record a destroy request. If there are several, keep the earliest time, even if the clock was set back."""
        since = "MIN(COALESCE(destroy_asked_at, ?), ?)"
        sql = f"UPDATE lines SET destroy_asked_at = {since} WHERE mark = ? AND {_IS_OPEN}"
        self._execute((sql, [now, now, mark]))

    def destroy_asked_at(self, mark: str) -> float | None:
        rows = self._execute(("SELECT destroy_asked_at FROM lines WHERE mark = ?", [mark]))
        return seconds_in(rows[0]["destroy_asked_at"], self._world.now()) if rows else None

    def is_destroy_asked(self, mark: str) -> bool:
        """Return True if the ledger records a request to destroy the instance."""
        return self.destroy_asked_at(mark) is not None

    def account(self, mark: str) -> str | None:
        """Return a line's current account. The user may have confirmed a new key since the line was read."""
        rows = self._execute(("SELECT account FROM lines WHERE mark = ?", [mark]))
        return rows[0]["account"] if rows else None

    def unconfirmed(self) -> list[LedgerLine]:
        """Return the lines of instances that were to be destroyed but that no provider has confirmed as gone yet."""
        return self._lines(f"WHERE destroy_asked_at IS NOT NULL AND {_IS_OPEN} ORDER BY intent_at")

    # --- helpers ---

    def _name_taken(self, name: str) -> UsageError:
        live = next((run for run in self.live_runs() if run.name == name), None)
        which = live.id if live else name
        return UsageError(
            what=f"A run named {name} is already live: {which}.",
            why="Two runs with the same name would overwrite each other's model.",
            fix=f"Watch it: homing watch {which}   or end it: homing stop {which}, homing destroy {which}"
            "   or use another name: --name OTHER",
        )

    def _set(self, table: str, columns: dict[str, Any], where: str, key: str, *, must_last: bool = False) -> None:
        """Write the columns only if some differ, so that a status check without changes does not write to the disk."""
        assert columns, "nothing to set"
        sets = ", ".join(f"{name} = ?" for name in columns)
        statement = (f"UPDATE {table} SET {sets} WHERE {where}", [*columns.values(), key])
        if self._gathered is not None and not must_last:  # the row itself may be among the pending writes
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
                what=f"Cannot use the ledger {self._path}.",
                why=f"{type(exc).__name__}: {exc}",
                fix="Check disk space and permissions. These commands work without it:"
                " homing runs, homing destroy --all",
            ) from exc

    def _run_on(
        self, database: Database, statements: Sequence[tuple[str, Sequence[Any]]], is_new: bool
    ) -> list[dict[str, Any]]:
        """Run statements on the ledger file or on a copy in memory, after creating any missing tables.

        `is_new` means that the file may be created.
        """
        is_copy = isinstance(database, MemoryDatabase)
        if is_new or not self._is_ready:
            if is_new and not is_copy:
                self._world.mkdir(self._path.parent)
            rows = self._schema(database, is_new)
            if int(rows[0]["value"]) > SCHEMA_VERSION:
                raise UsageError(
                    what=f"{self._path} was written by a newer version of homing.",
                    why=f"Its schema version is {rows[0]['value']}; this version supports {SCHEMA_VERSION}.",
                    fix=pip_upgrade(),
                )
            self._is_ready = not is_copy
        return database.execute(*statements)

    def _schema(self, database: Database, is_new: bool) -> list[dict[str, Any]]:
        """Return the row with the schema version, after creating any missing tables."""
        try:
            rows = database.execute((_SCHEMA, ()))
            if rows and rows[0]["num_tables"] == len(_TABLES):
                return rows
        except FileNotFoundError:
            if not is_new:
                raise  # the file has just been removed, and creating an empty one would hide the backup
        except OSError:
            pass  # probably there is no such table; any other problem would make the write below fail
        made = ("INSERT OR IGNORE INTO meta VALUES ('schema_version', ?)", [str(SCHEMA_VERSION)])
        return database.execute(*((sql, ()) for sql in _TABLES), made, (_SCHEMA, ()))
