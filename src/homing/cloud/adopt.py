"""A run of another home becomes ours: its lease, its attempts, its dollars and its papers.

    stored_runs -> propose (what it is, what it costs, what lives) -> adopt: lease, then ledger, papers, record, look

The lease comes first: from then on the other home writes nothing more. Killed after it, the same command goes on where
it was. Dollars of an open attempt are counted anew, because a record tells only what was known when it was written.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import shlex
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from homing.cloud import lease as leases
from homing.cloud import meter
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger import ADOPTED, RESTORED, Adopted, LedgerLine, RunRow
from homing.cloud.mark import owner_in
from homing.cloud.receipt import counted
from homing.cloud.reconcile import refresh
from homing.cloud.record import write_record
from homing.cloud.signs import read_document
from homing.errors import IntegrityError, UsageError
from homing.store import NotInStore, Store, run_key
from homing.wire import codec, names
from homing.wire.control import Heartbeat
from homing.wire.data import DataManifest
from homing.wire.record import Attempt, Lease, RunRecord
from homing.wire.run import Run

__all__ = ["Proposal", "adopt", "lines_of", "propose", "stored_runs"]

_DATA = "data"  # in the run's folder at home: what resuming must know of the shards, which stay in the store


@dataclass(frozen=True)
class Proposal:
    """What adopting would take over; nothing has been touched yet."""

    record: RunRecord
    lease: Lease | None  # that counts now
    lines: list[LedgerLine]  # its attempts as they would stand in the ledger
    spend_usd: Decimal
    is_ours: bool  # this home owns it and its ledger knows it

    @property
    def live(self) -> list[LedgerLine]:
        return [line for line in self.lines if line.destroyed_at is None]

    @property
    def owner(self) -> str:
        return self.lease.owner if self.lease is not None else self.record.owner

    @property
    def host(self) -> str:
        return (self.lease.host if self.lease is not None else self.record.host) or self.owner


def stored_runs(store: Store) -> list[RunRecord]:
    """Every run with a record in the store, newest first."""
    found = []
    for entry in store.list(names.STORE_RUNS + "/"):
        parts = entry.key.split("/")
        if len(parts) == 3 and parts[2] == names.RECORD:
            record = read_document(store, entry.key, RunRecord)
            found += [record] if record is not None else []
    return sorted(found, key=lambda record: (record.created_at, record.run_id), reverse=True)


def propose(store: Store, wanted: str, home: Home) -> Proposal:
    """`wanted` is an id, or a name: that means its run that has an open attempt, else its newest one."""
    records = stored_runs(store)
    found = [each for each in records if wanted in (each.run_id, each.run_name)]
    # Stable: the newest stays first. The clocks of the homes that wrote them decide only among those that have ended.
    found.sort(key=lambda each: (each.run_id != wanted, all(one.ended_at is not None for one in each.attempts)))
    record = next(iter(found), None)
    if record is None:
        known = [name for each in records for name in (each.run_id, each.run_name)]
        near = difflib.get_close_matches(wanted, known, n=1)
        raise UsageError(
            what=f"There is no run {wanted!r} in {store.url}.",
            why=f"Did you mean {near[0]}?" if near else f"It holds the records of {len(records)} runs.",
            fix=f"homing adopt {shlex.quote(store.url)}   lists them",
        )
    return _proposal(record, leases.newest(store, record.run_id), home)


def adopt(proposal: Proposal, store: Store, home: Home) -> tuple[RunRow, list[str]]:
    """The run as it stands here now, and what could not be asked or brought, one sentence each."""
    run_id = proposal.record.run_id
    if proposal.is_ours:
        return _settled(home, run_id, [])
    if proposal.lease is None or proposal.lease.owner != home.owner:
        after = proposal.lease.number if proposal.lease is not None else 0
        who = {"owner": home.owner, "host": home.world.host(), "mark": _mark_to_keep(proposal)}
        leases.take(store, run_id, **who, after=after, world=home.world)
    # Read again under our lease: its last owner may have written it while the question was open.
    record = read_document(store, run_key(run_id, names.RECORD), RunRecord) or proposal.record
    lines = [_restored(home, line) for line in _by_our_clock(lines_of(record), _last_word(store, run_id), home)]
    home.ledger.adopt_run(_row(record, store), lines, _foreign(record, home))
    problems = _bring_papers(store, record, home)
    write_record(home, run_id, store)
    return _settled(home, run_id, problems)


def _settled(home: Home, run_id: str, problems: list[str]) -> tuple[RunRow, list[str]]:
    """After a look at the providers and the store, where they can be asked from here."""
    problems = problems + refresh(home)
    row = home.ledger.run(run_id)
    assert row is not None, run_id
    return row, problems


def _proposal(record: RunRecord, lease: Lease | None, home: Home) -> Proposal:
    known = home.ledger.run(record.run_id)
    is_ours = lease is not None and lease.owner == home.owner and known is not None and known.state != ADOPTED
    lines = home.ledger.lines(record.run_id) if is_ours else lines_of(record)
    return Proposal(record, lease, lines, meter.total_spend(lines, home.world.now()), is_ours)


def _mark_to_keep(proposal: Proposal) -> str:
    """The instance that may go on writing: the lease's, unless the record says that it ended."""
    open_marks = [line.mark for line in proposal.live]
    known = [line.mark for line in proposal.lines]
    held = proposal.lease.mark if proposal.lease is not None else ""
    if held in open_marks or held not in known:
        return held or (open_marks[-1] if open_marks else "")
    return open_marks[-1] if open_marks else ""


def _restored(home: Home, line: LedgerLine) -> LedgerLine:
    """An open line of this home itself, which its ledger has lost: what it had seen of the instance is lost too."""
    is_lost = line.destroyed_at is None and home.is_ours(line.mark)
    return dataclasses.replace(line, note=RESTORED + line.note) if is_lost else line


def lines_of(record: RunRecord) -> list[LedgerLine]:
    return [_line(record, attempt) for attempt in record.attempts]


def _line(record: RunRecord, attempt: Attempt) -> LedgerLine:
    """An attempt that is open in the record counts as created: its home may have died just after that call."""
    is_over = attempt.ended_at is not None
    return LedgerLine(
        mark=attempt.mark,
        run_id=record.run_id,
        run_name=record.run_name,
        attempt=attempt.number,
        provider=attempt.provider,
        offer=attempt.offer,
        rate_usd_per_hour=attempt.rate_usd_per_hour,
        limit_usd=attempt.limit_usd,
        intent_at=attempt.requested_at,
        instance_id=attempt.instance_id,
        created_at=attempt.requested_at,
        destroyed_at=attempt.ended_at,
        state="gone" if is_over else attempt.state,
        billing="no" if is_over else "maybe",
        spend_usd=attempt.spend_usd,
        note=attempt.note,
        account=attempt.account,
    )


def _last_word(store: Store, run_id: str) -> Heartbeat | None:
    """A damaged one says nothing, and must keep nobody from taking over what bills."""
    try:
        return read_document(store, run_key(run_id, names.HEARTBEAT), Heartbeat)
    except IntegrityError:
        return None


def _by_our_clock(lines: list[LedgerLine], beat: Heartbeat | None, home: Home) -> list[LedgerLine]:
    """Another home's clock has timed the create calls. If ours is behind it, a machine that bills would be younger here
    than its own agent knows, and its limit and its receipt too small."""
    now, found = home.world.now(), []
    for line in lines:
        heard = beat if beat is not None and beat.mark == line.mark and line.destroyed_at is None else None
        usd, rate = counted(line, heard, lines, now), Decimal(line.rate_usd_per_hour)
        if usd > 0 and rate > 0 and line.created_at is not None:
            line = dataclasses.replace(line, created_at=min(line.created_at, now - float(usd / rate * 3600)))
        found.append(line)
    return found


def _foreign(record: RunRecord, home: Home) -> list[Adopted]:
    """The marks of other homes that this one may touch from now on: exactly those in the record."""
    found = [Adopted(each.mark, owner_in(each.mark), each.host, each.home) for each in record.attempts]
    return [each for each in found if each.owner and each.owner != home.owner]


def _row(record: RunRecord, store: Store) -> RunRow:
    return RunRow(
        id=record.run_id,
        name=record.run_name,
        state=record.state,
        created_at=record.created_at,
        store=store.url,  # as it is called from here
        run_file_sha256=record.run_file_sha256,
        spend_limit_usd=record.spend_limit_usd,
        reason=record.reason,
        exit_code=record.exit_code,
        ended_at=record.ended_at,
    )


def _bring_papers(store: Store, record: RunRecord, home: Home) -> list[str]:
    """run.json and run.yaml, and what a resume must know of the data; the shards themselves stay where they are."""
    run_id, folder = record.run_id, home.run_dir(record.run_id)
    home.world.mkdir(folder)
    run = read_document(store, run_key(run_id, names.RUN), Run)
    if run is None:
        return [f"{run_id} has no {names.RUN} in its store: it can be watched and ended here, but not resumed."]
    limits = dataclasses.replace(run.limits, spend_usd=record.spend_limit_usd, time_s=record.time_limit_s)
    data = dataclasses.replace(run.data, dir=_data_dir(home, folder))
    here = dataclasses.replace(run, store=store.url, data=data, limits=limits)
    home.world.write(folder / names.RUN, codec.dumps(here, indent=1).encode())
    try:
        for name in (names.RUN_FILE, LAUNCH_NOTE):
            home.world.write(folder / name, store.read(run_key(run_id, name)))
        return _bring_data(store, run, home) if data.dir == str(folder / _DATA) else []
    except NotInStore as exc:
        return [f"{run_id} can be watched and ended here, but not resumed: {exc.what}"]


def _data_dir(home: Home, folder: Path) -> str:
    """Where the prepared data was when this home launched it itself, else a place in the run's folder."""
    try:
        known = codec.loads(Run, home.world.read(folder / names.RUN)).data.dir
    except (OSError, codec.WireError):
        return str(folder / _DATA)
    return known if home.world.exists(Path(known) / names.MANIFEST) else str(folder / _DATA)


def _bring_data(store: Store, run: Run, home: Home) -> list[str]:
    folder = home.run_dir(run.id) / _DATA
    home.world.mkdir(folder)
    if not run.data.manifest_sha256:  # each phase has data of its own, which run.json names by hash
        digest = run.data.tokenizer_sha256
        store.get(f"{names.STORE_OBJECTS}/{digest}", str(folder / names.TOKENIZER), digest)
        return []
    text = store.read(f"{names.STORE_OBJECTS}/{run.data.manifest_sha256}")
    if hashlib.sha256(text).hexdigest() != run.data.manifest_sha256:
        return [f"The data manifest of {run.id} is damaged in the store: it cannot be resumed here."]
    manifest = codec.loads(DataManifest, text)
    home.world.write(folder / names.MANIFEST, text)
    digest = manifest.tokenizer_sha256
    store.get(f"{names.STORE_OBJECTS}/{digest}", str(folder / names.TOKENIZER), digest)
    return []
