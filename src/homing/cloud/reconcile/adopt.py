"""Adopts a run from another computer by taking over its lease, attempts, spend and run documents.

    stored_runs -> propose (the run, spend, instances) -> adopt: lease, then ledger, documents, record, refresh

The lease comes first, because once it is taken, the other computer stops writing. If the command is killed after that,
running it again continues where it left off. The spend of an open attempt is recomputed, because a record is only as
current as its last write.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import shlex
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from homing.cloud.contact.heartbeats import read_document
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger import meter, run_lease
from homing.cloud.ledger.ledger import ADOPTED, RESTORED, Adopted, LedgerLine, RunRow
from homing.cloud.ledger.mark import owner_in
from homing.cloud.ledger.run_lease import stored_runs, write_record
from homing.cloud.reconcile.receipt import counted
from homing.cloud.reconcile.reconcile import refresh
from homing.errors import IntegrityError, UsageError
from homing.store import NotInStore, Store, run_key
from homing.wire import codec, file_names
from homing.wire.control_files import Heartbeat
from homing.wire.run_json import Run
from homing.wire.run_record import Attempt, Lease, RunRecord
from homing.wire.shard_manifest import DataManifest

__all__ = ["Proposal", "adopt", "lines_of", "propose"]

_DATA = "data"  # subfolder of the run's local folder for data that a resume needs; the shards stay in the store


@dataclass(frozen=True)
class Proposal:
    """What an adoption would take over; nothing has been changed yet."""

    record: RunRecord
    lease: Lease | None  # the current one
    lines: list[LedgerLine]  # the run's attempts as ledger lines
    spend_usd: Decimal
    is_ours: bool  # True if this $HOMING_HOME already owns the run and has it in its ledger

    @property
    def live(self) -> list[LedgerLine]:
        return [line for line in self.lines if line.destroyed_at is None]

    @property
    def owner(self) -> str:
        return self.lease.owner if self.lease is not None else self.record.owner

    @property
    def host(self) -> str:
        return (self.lease.host if self.lease is not None else self.record.host) or self.owner


def propose(store: Store, wanted: str, home: Home) -> Proposal:
    """Return the proposal for a run id or name.

    If several runs have that name, choose one with an open attempt, or else the newest.
    """
    records = stored_runs(store)
    found = [each for each in records if wanted in (each.run_id, each.run_name)]
    # The sort is stable, so the newest run stays first. If clocks differ, only ended runs can be misordered.
    found.sort(key=lambda each: (each.run_id != wanted, all(one.ended_at is not None for one in each.attempts)))
    record = next(iter(found), None)
    if record is None:
        known = [name for each in records for name in (each.run_id, each.run_name)]
        near = difflib.get_close_matches(wanted, known, n=1)
        raise UsageError(
            what=f"There is no run {wanted!r} in {store.url}.",
            why=f"Did you mean {near[0]}?" if near else f"The store has records of {len(records)} runs.",
            fix=f"List the runs: homing adopt {shlex.quote(store.url)}",
        )
    return _proposal(record, run_lease.newest(store, record.run_id), home)


def adopt(proposal: Proposal, store: Store, home: Home) -> tuple[RunRow, list[str]]:
    """Adopt the run. Return its ledger row, and a sentence for each provider or file that could not be read."""
    run_id = proposal.record.run_id
    if proposal.is_ours:
        return _settled(home, run_id, [])
    if proposal.lease is None or proposal.lease.owner != home.owner:
        after = proposal.lease.number if proposal.lease is not None else 0
        who = {"owner": home.owner, "host": home.world.host(), "mark": _mark_to_keep(proposal)}
        run_lease.take(store, run_id, **who, after=after, world=home.world)
    # Read the record again under our lease, because the previous owner may have written it while the user was being
    # asked.
    record = read_document(store, run_key(run_id, file_names.RECORD), RunRecord) or proposal.record
    lines = [_restored(home, line) for line in _by_our_clock(lines_of(record), _last_word(store, run_id), home)]
    home.ledger.adopt_run(_row(record, store), lines, _foreign(record, home))
    problems = _fetch_documents(store, record, home)
    write_record(home, run_id, store)
    return _settled(home, run_id, problems)


def _settled(home: Home, run_id: str, problems: list[str]) -> tuple[RunRow, list[str]]:
    """Update the run from every provider and store that can be reached from here, and return the run."""
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
    """Return the mark of the instance that may keep writing: the one in the lease, unless that instance has ended."""
    open_marks = [line.mark for line in proposal.live]
    known = [line.mark for line in proposal.lines]
    held = proposal.lease.mark if proposal.lease is not None else ""
    if held in open_marks or held not in known:
        return held or (open_marks[-1] if open_marks else "")
    return open_marks[-1] if open_marks else ""


def _restored(home: Home, line: LedgerLine) -> LedgerLine:
    """Mark an open line as restored if this $HOMING_HOME created its instance but its ledger has lost the line."""
    is_lost = line.destroyed_at is None and home.is_ours(line.mark)
    return dataclasses.replace(line, note=RESTORED + line.note) if is_lost else line


def lines_of(record: RunRecord) -> list[LedgerLine]:
    return [_line(record, attempt) for attempt in record.attempts]


def _line(record: RunRecord, attempt: Attempt) -> LedgerLine:
    """Convert an attempt to a ledger line.

    An open attempt counts as created, because the computer that launched it may have crashed after the create call.
    """
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
    """Return the last heartbeat. If it is missing or damaged, return None, so that the adoption can still proceed."""
    try:
        return read_document(store, run_key(run_id, file_names.HEARTBEAT), Heartbeat)
    except IntegrityError:
        return None


def _by_our_clock(lines: list[LedgerLine], beat: Heartbeat | None, home: Home) -> list[LedgerLine]:
    """Set the start of an open attempt to an earlier time if its agent has counted more time than our clock shows.

    The start was recorded by the clock of the computer that launched the attempt. If our clock is behind
    that computer's clock, the attempt seems to have run for less time than it has. Then both its receipt and the spend
    that counts toward the limit would be too low.
    """
    now, found = home.world.now(), []
    for line in lines:
        last = beat if beat is not None and beat.mark == line.mark and line.destroyed_at is None else None
        usd, rate = counted(line, last, lines, now), Decimal(line.rate_usd_per_hour)
        if usd > 0 and rate > 0 and line.created_at is not None:
            line = dataclasses.replace(line, created_at=min(line.created_at, now - float(usd / rate * 3600)))
        found.append(line)
    return found


def _foreign(record: RunRecord, home: Home) -> list[Adopted]:
    """Return the record's instances with other owners, so that the caller can record them as adopted by this one."""
    found = [Adopted(each.mark, owner_in(each.mark), each.host, each.home) for each in record.attempts]
    return [each for each in found if each.owner and each.owner != home.owner]


def _row(record: RunRecord, store: Store) -> RunRow:
    return RunRow(
        id=record.run_id,
        name=record.run_name,
        state=record.state,
        created_at=record.created_at,
        store=store.url,  # the address by which this computer accesses the store
        run_file_sha256=record.run_file_sha256,
        spend_limit_usd=record.spend_limit_usd,
        reason=record.reason,
        exit_code=record.exit_code,
        ended_at=record.ended_at,
    )


def _fetch_documents(store: Store, record: RunRecord, home: Home) -> list[str]:
    """Fetch run.json, run.yaml and the data files that a resume needs, but not the shards, which stay in the store."""
    run_id, folder = record.run_id, home.run_dir(record.run_id)
    home.world.mkdir(folder)
    run = read_document(store, run_key(run_id, file_names.RUN), Run)
    if run is None:
        return [f"{run_id} has no {file_names.RUN} in its store: you can watch and end it here, but not resume it."]
    limits = dataclasses.replace(run.limits, spend_usd=record.spend_limit_usd, time_s=record.time_limit_s)
    data = dataclasses.replace(run.data, dir=_data_dir(home, folder))
    here = dataclasses.replace(run, store=store.url, data=data, limits=limits)
    home.world.write(folder / file_names.RUN, codec.dumps(here, indent=1).encode())
    try:
        for name in (file_names.RUN_FILE, LAUNCH_NOTE):
            home.world.write(folder / name, store.read(run_key(run_id, name)))
        return _bring_data(store, run, home) if data.dir == str(folder / _DATA) else []
    except NotInStore as exc:
        return [f"You can watch and end {run_id} here, but not resume it: {exc.what}"]


def _data_dir(home: Home, folder: Path) -> str:
    """Return the folder of the prepared data if it is on this computer, otherwise a subfolder of the run's folder."""
    try:
        known = codec.loads(Run, home.world.read(folder / file_names.RUN)).data.dir
    except (OSError, codec.WireError):
        return str(folder / _DATA)
    return known if home.world.exists(Path(known) / file_names.MANIFEST) else str(folder / _DATA)


def _bring_data(store: Store, run: Run, home: Home) -> list[str]:
    folder = home.run_dir(run.id) / _DATA
    home.world.mkdir(folder)
    if not run.data.manifest_sha256:  # no shared text; each phase has its own data, listed by hash in run.json
        digest = run.data.tokenizer_sha256
        store.get(f"{file_names.STORE_OBJECTS}/{digest}", str(folder / file_names.TOKENIZER), digest)
        return []
    text = store.read(f"{file_names.STORE_OBJECTS}/{run.data.manifest_sha256}")
    if hashlib.sha256(text).hexdigest() != run.data.manifest_sha256:
        return [f"The data manifest of {run.id} is damaged in the store: you cannot resume it here."]
    manifest = codec.loads(DataManifest, text)
    home.world.write(folder / file_names.MANIFEST, text)
    digest = manifest.tokenizer_sha256
    store.get(f"{file_names.STORE_OBJECTS}/{digest}", str(folder / file_names.TOKENIZER), digest)
    return []
