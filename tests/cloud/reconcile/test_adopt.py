"""Another home adopts a run: the instance keeps running, its cost still counts, and only one home may act."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.rig import clear, make_draft, marked_now

from homing.cloud.destroy import destroy_run
from homing.cloud.guard.change_limit_or_stop import ask_to_stop
from homing.cloud.home import Home
from homing.cloud.launch.launch import Launched, LaunchOrder, draft, launch
from homing.cloud.ledger import run_lease
from homing.cloud.ledger.ledger import ADOPTED
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.ledger.run_lease import stored_runs, write_record
from homing.cloud.providers.base import Needs, wait_until
from homing.cloud.reconcile.adopt import adopt, propose
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.run_status import look
from homing.config.load import load_run
from homing.errors import HomingError, NotOwner, ProviderRefused, UsageError
from homing.store import Store, open_store, run_key
from homing.wire import codec, file_names
from homing.wire.run_json import Run
from homing.wire.run_record import Lease, RunRecord
from homing.world import World

ENDLESS = 100_000


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Home]:
    """A second home, as on a second machine that sees the same store."""
    found = Home(tmp_path / "other-home", World())
    yield found
    clear(found.path)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file:{tmp_path}/store", World())


def take_over(store: Store, name: str, home: Home) -> list[str]:
    return adopt(propose(store, name, home), store, home)[1]


def wait_for_state(home: Home, state: str) -> None:
    def is_so() -> bool:
        refresh(home)
        return home.ledger.find("moss").state == state

    assert wait_until(is_so, timeout_s=60, every_s=0.2, world=World()), home.ledger.find("moss")


@pytest.mark.slow
def test_a_live_run_is_adopted_with_its_instance_and_can_be_stopped_here(
    home: Home, other: Home, store: Store, tmp_path: Path
) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    assert [record.run_id for record in stored_runs(store)] == [done.run.id]
    proposal = propose(store, "moss", other)
    assert [line.instance_id for line in proposal.live] == [done.instance.id]
    assert proposal.spend_usd > 0
    assert take_over(store, "moss", other) == []
    row = other.ledger.find("moss")
    assert (row.id, row.state, row.spend_limit_usd) == (done.run.id, "running", "1.00")
    (line,) = billing_lines(other.ledger.lines())
    assert (line.mark, line.billing) == (done.instance.mark, "yes")
    ask_to_stop(other, row)
    wait_for_state(other, "stopped")
    assert wait_until(lambda: not marked_now(home), timeout_s=60, every_s=0.2, world=World())
    refresh(other)
    assert billing_lines(other.ledger.lines()) == []


@pytest.mark.slow
def test_the_previous_home_of_an_adopted_run_may_only_destroy_it(
    home: Home, other: Home, store: Store, tmp_path: Path
) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    take_over(store, "moss", other)
    with pytest.raises(NotOwner) as caught:
        ask_to_stop(home, home.ledger.find("moss"))
    assert "homing adopt" in caught.value.fix
    assert refresh(home) == []
    row = home.ledger.find("moss")
    assert (row.state, row.is_live) == (ADOPTED, False)
    assert "adopted by" in row.reason
    assert look(home, row).is_billing  # the instance still bills, and the old home still shows it
    with pytest.raises(NotOwner):
        make_draft(home, tmp_path, resume=True)
    assert [line.billing for line in destroy_run(home, row).lines] == ["no"]
    assert marked_now(home) == []
    refresh(other)
    assert billing_lines(other.ledger.lines()) == []
    assert done.run.id == row.id


@pytest.mark.slow
def test_only_the_owner_writes_the_record(home: Home, other: Home, store: Store, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    take_over(store, "moss", other)
    written = store.read(run_key(done.run.id, file_names.RECORD))
    write_record(home, done.run.id, store)
    assert store.read(run_key(done.run.id, file_names.RECORD)) == written
    record = codec.loads(RunRecord, written)
    assert record.owner == other.owner
    assert record.attempts[0].home == str(home.path)  # the home that launched it stays recorded


@pytest.mark.slow
def test_the_record_follows_every_change_even_after_a_failed_write(home: Home, store: Store, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    key = run_key(done.run.id, file_names.RECORD)

    def recorded() -> RunRecord:
        return codec.loads(RunRecord, store.read(key))

    assert (recorded().state, recorded().attempts[0].instance_id) == ("running", done.instance.id)
    home.ledger.set_run(done.run.id, spend_limit_usd="7")
    (tmp_path / "store").rename(tmp_path / "away")
    assert any(done.run.id in problem for problem in refresh(home))
    (tmp_path / "away").rename(tmp_path / "store")
    assert recorded().spend_limit_usd == "1.00"
    refresh(home)
    assert recorded().spend_limit_usd == "7"
    written = store.read(key)
    refresh(home)
    assert store.read(key) == written  # without a change nothing is written
    destroy_run(home, home.ledger.find("moss"))
    refresh(home)
    assert (recorded().state, recorded().attempts[0].ended_at is not None) == ("stopped", True)


@pytest.mark.slow
def test_adopting_your_own_run_changes_nothing(home: Home, store: Store, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    documents = (home.run_dir(done.run.id) / file_names.RUN).read_bytes()
    proposal = propose(store, done.run.id, home)
    assert proposal.is_ours
    assert adopt(proposal, store, home) == (home.ledger.find("moss"), [])
    lease = run_lease.newest(store, done.run.id)
    assert lease is not None
    assert (lease.number, lease.owner, lease.mark) == (1, home.owner, done.instance.mark)
    assert (home.run_dir(done.run.id) / file_names.RUN).read_bytes() == documents
    assert len(home.ledger.lines()) == 1


@pytest.mark.slow
def test_a_lost_ledger_is_filled_again_from_the_store(home: Home, store: Store, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    for path in home.path.glob("ledger.sqlite*"):
        path.unlink()
    fresh = Home(home.path, World())
    assert take_over(store, "moss", fresh) == []
    (line,) = fresh.ledger.lines()
    assert (line.run_id, line.instance_id) == (done.run.id, done.instance.id)
    lease = run_lease.newest(store, done.run.id)
    assert lease is not None
    assert lease.number == 1
    destroy_run(fresh, fresh.ledger.find("moss"))


def test_only_one_of_two_homes_that_adopt_at_once_succeeds(
    home: Home, other: Home, store: Store, tmp_path: Path
) -> None:
    launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    third = Home(tmp_path / "third-home", World())
    first, second = propose(store, "moss", other), propose(store, "moss", third)
    adopt(first, store, other)
    with pytest.raises(NotOwner):
        adopt(second, store, third)
    assert third.ledger.runs() == []


@pytest.mark.slow
def test_an_adoption_killed_after_taking_the_lease_can_be_repeated(
    home: Home, other: Home, store: Store, tmp_path: Path
) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    proposal = propose(store, "moss", other)
    who = {"owner": other.owner, "host": "here", "mark": done.instance.mark}
    run_lease.take(store, done.run.id, **who, after=1, world=World())
    assert other.ledger.runs() == []
    assert not propose(store, "moss", other).is_ours
    take_over(store, "moss", other)
    assert [line.mark for line in other.ledger.lines()] == [done.instance.mark]
    with pytest.raises(NotOwner):  # the lease number of the proposal is taken by now
        adopt(proposal, store, other)


@pytest.mark.slow
def test_an_adopted_run_can_be_resumed_and_its_earlier_cost_counts(
    home: Home, other: Home, store: Store, tmp_path: Path
) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS, step_s=0.05), home)
    assert wait_until(
        lambda: bool(store.list(run_key(done.run.id, file_names.CHECKPOINTS) + "/")),
        timeout_s=60,
        every_s=0.2,
        world=World(),
    )
    take_over(store, "moss", other)
    destroy_run(other, other.ledger.find("moss"))
    spent = other.ledger.lines()[0].spend_usd
    assert Decimal(spent) > 0
    # Like `homing launch RUN --resume`; the shards are in the store and not in this home.
    loaded = load_run(str(other.run_dir(done.run.id) / file_names.RUN))
    assert not (other.run_dir(done.run.id) / "data/train-00000.bin").exists()
    order = LaunchOrder(
        run=dataclasses.replace(loaded.run, id=done.run.id),
        run_file_text=loaded.text,
        is_prepared=loaded.is_prepared,
        offer=other.provider("local").offers(Needs())[0],
        spend_limit_usd=Decimal(2),
        resume=True,
    )
    ready = draft(order, other)
    assert ready.attempt == 2
    assert ready.spent_before_usd == Decimal(spent)
    template = make_draft(other, tmp_path, name="template")
    argv = [part.replace(template.mark, ready.mark) for part in template.order.trainer_argv or ()]
    ready = dataclasses.replace(
        ready, order=dataclasses.replace(ready.order, trainer_argv=tuple(argv), heartbeat_s=0.2)
    )
    again: Launched = launch(ready, other)
    assert again.instance.mark.startswith(f"homing-{other.owner}-")
    wait_for_state(other, "done")
    refresh(home)
    assert home.ledger.find("moss").state == ADOPTED


@pytest.mark.slow
def test_the_launching_home_can_adopt_its_run_back(home: Home, other: Home, store: Store, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    take_over(store, "moss", other)
    refresh(home)
    assert take_over(store, "moss", home) == []
    row = home.ledger.find("moss")
    assert row.state == "running"
    assert codec.loads(Run, (home.run_dir(done.run.id) / file_names.RUN).read_bytes()).data.dir == str(
        tmp_path / "data"
    )
    assert len(home.ledger.lines(done.run.id)) == 1
    refresh(other)
    assert other.ledger.find("moss").state == ADOPTED
    destroy_run(home, row)


@pytest.mark.slow
def test_adopting_from_a_stale_record_still_counts_the_cost(
    home: Home, other: Home, store: Store, tmp_path: Path
) -> None:
    """The home died just after the create call: the record has the intent, but no instance id and no cost."""
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    key = run_key(done.run.id, file_names.RECORD)
    record = codec.loads(RunRecord, store.read(key))
    attempt = dataclasses.replace(
        record.attempts[0],
        instance_id=None,
        spend_usd="0",
        state="requested",
        requested_at=record.attempts[0].requested_at - 3600,
    )
    stale = dataclasses.replace(record, state="launching", attempts=[attempt])
    store.put_bytes(key, codec.dumps(stale).encode())
    proposal = propose(store, "moss", other)
    assert proposal.spend_usd >= Decimal(attempt.rate_usd_per_hour)
    take_over(store, "moss", other)
    (line,) = other.ledger.lines()
    assert line.instance_id == done.instance.id  # found by its mark
    destroy_run(other, other.ledger.find("moss"))
    assert marked_now(home) == []


@pytest.mark.slow
def test_adoption_gives_no_access_to_other_instances_of_the_previous_home(
    home: Home, other: Home, store: Store, tmp_path: Path
) -> None:
    launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    private = launch(make_draft(home, tmp_path, name="private", steps=ENDLESS), home)
    take_over(store, "moss", other)
    (line,) = other.ledger.lines()
    provider = other.provider_of(line)
    assert [instance.mark for instance in provider.list_owned()] == [line.mark]
    for touch in (provider.describe, provider.destroy, provider.log):
        with pytest.raises(ProviderRefused, match="was not adopted"):
            touch(private.instance.id)
    refresh(other)
    assert [each.mark for each in other.ledger.lines()] == [line.mark]
    stranger = dataclasses.replace(line, mark=private.instance.mark)
    with pytest.raises(ProviderRefused, match="has not been adopted"):
        other.provider_of(stranger)


@pytest.mark.slow
def test_an_instance_that_only_the_other_computer_can_query_stays_unknown(
    home: Home, store: Store, tmp_path: Path
) -> None:
    class Elsewhere(World):
        def host(self) -> str:
            return "elsewhere"

    launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    far = Home(tmp_path / "far-home", Elsewhere())
    problems = take_over(store, "moss", far)
    assert any("only that computer can query" in problem for problem in problems)
    (line,) = billing_lines(far.ledger.lines())
    assert (line.state, line.billing) == ("unknown", "maybe")
    ask_to_stop(far, far.ledger.find("moss"))  # the request travels through the store
    assert wait_until(lambda: not marked_now(home), timeout_s=60, every_s=0.2, world=World())


@pytest.mark.slow
def test_an_instance_superseded_by_another_home_ends_itself_without_pushing(
    home: Home, other: Home, store: Store, tmp_path: Path
) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    who = {"owner": other.owner, "host": "attic", "mark": "homing-someone-else-2"}
    run_lease.take(store, done.run.id, **who, after=1, world=World())
    assert wait_until(lambda: not marked_now(home), timeout_s=60, every_s=0.2, world=World())
    heartbeat = store.read(run_key(done.run.id, file_names.HEARTBEAT))
    assert b'"ended"' not in heartbeat
    assert not store.exists(run_key(done.run.id, file_names.OUTCOME))
    work = Path(home.provider("local").place(done.instance.mark).work_dir)
    assert "superseded" in (work / "run" / file_names.EVENTS).read_text()
    assert home.provider("local").describe(done.instance.id).state == "gone"


@pytest.mark.slow
def test_a_launch_superseded_during_create_destroys_its_instance(
    home: Home, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = make_draft(home, tmp_path, steps=ENDLESS)
    provider = home.provider("local")
    create = provider.create

    def slow(request: object) -> object:
        made = create(request)  # type: ignore[arg-type]
        who = {"owner": "bbbbbb", "host": "attic", "mark": ""}
        run_lease.take(store, ready.run.id, **who, after=1, world=World())
        return made

    monkeypatch.setattr(provider, "create", slow)
    with pytest.raises(NotOwner, match="attic"):
        launch(ready, home)
    assert marked_now(home) == []
    assert billing_lines(home.ledger.lines()) == []
    assert home.ledger.find("moss").state == ADOPTED


def test_a_launch_superseded_before_create_creates_nothing(
    home: Home, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = make_draft(home, tmp_path)
    taken: list[Lease] = []

    def adopted_meanwhile(*args: object) -> None:
        who = {"owner": "bbbbbb", "host": "attic", "mark": ""}
        taken.append(run_lease.take(store, ready.run.id, **who, after=1, world=World()))

    monkeypatch.setattr("homing.cloud.launch.launch.push_documents", adopted_meanwhile)
    monkeypatch.setattr(home.provider("local"), "create", lambda request: pytest.fail("created"))
    with pytest.raises(NotOwner):
        launch(ready, home)
    assert taken
    (line,) = home.ledger.lines()
    assert (line.created_at, line.billing) == (None, "no")


@pytest.mark.slow
def test_an_unknown_run_name_gets_a_suggestion(home: Home, store: Store, tmp_path: Path) -> None:
    launch(make_draft(home, tmp_path, steps=3), home)
    with pytest.raises(UsageError, match="no run 'mos'") as caught:
        propose(store, "mos", home)
    assert "moss" in caught.value.why
    with pytest.raises(HomingError):
        stored_runs(open_store(f"file:{tmp_path}/nowhere", World(), create=False))
