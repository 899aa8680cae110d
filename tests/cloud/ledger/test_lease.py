"""Each run has one owner, also with concurrent requests from several machines."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest

from homing.cloud.ledger import run_lease
from homing.errors import IntegrityError, NotOwner, StoreError
from homing.store import FileStore
from homing.store.base import Entry
from homing.store.read_lease import Fence, lease_key
from homing.wire.run_record import Lease
from homing.world import World

RUN = "moss-20260101-000000-abcd"


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    found = FileStore(str(tmp_path / "store"), World())
    found.put_bytes("objects/x", b"x")
    return found


def take(store: FileStore, *, owner: str = "aaaaaa", mark: str = "m-1", after: int = 0, host: str = "here") -> Lease:
    return run_lease.take(store, RUN, owner=owner, host=host, mark=mark, after=after, world=World())


def test_the_first_taker_owns_it_and_the_next_number_supersedes(store: FileStore) -> None:
    assert run_lease.newest(store, RUN) is None
    first = take(store)
    assert run_lease.newest(store, RUN) == first
    run_lease.check(store, first)
    second = take(store, owner="bbbbbb", mark="m-2", after=first.number)
    assert (first.number, second.number) == (1, 2)
    assert run_lease.newest(store, RUN) == second
    run_lease.check(store, second)
    with pytest.raises(NotOwner):
        run_lease.check(store, first)


def test_a_refused_lease_names_its_owner_host_time_and_the_adopt_command(store: FileStore) -> None:
    take(store, owner="bbbbbb", host="attic")
    with pytest.raises(NotOwner) as caught:
        take(store, mark="m-9")
    error = caught.value
    assert "attic" in error.what
    assert "Z" in error.what
    assert "bbbbbb" in error.why
    assert f"homing adopt {store.url} {RUN}" in error.fix


def test_an_adoption_that_names_the_running_instance_supersedes_nothing(store: FileStore) -> None:
    first = take(store)
    take(store, owner="bbbbbb", after=1)
    run_lease.check(store, first)
    fence = Fence(store, RUN, "m-1", 1)
    assert fence.superseded_by() is None
    take(store, owner="bbbbbb", mark="m-2", after=2)
    found = fence.superseded_by()
    assert found is not None
    assert found.mark == "m-2"
    assert fence.superseded_by() == found  # and it does not change


def test_an_unreadable_store_supersedes_no_owner(store: FileStore, tmp_path: Path) -> None:
    first = take(store)
    (tmp_path / "store").rename(tmp_path / "away")
    for look in (lambda: run_lease.check(store, first), Fence(store, RUN, "m-1", 1).superseded_by):
        with pytest.raises(StoreError):
            look()


def test_a_damaged_lease_does_not_count_as_free(store: FileStore) -> None:
    store.put_bytes(lease_key(RUN, 1), b"{")
    with pytest.raises(IntegrityError):
        run_lease.newest(store, RUN)
    with pytest.raises(IntegrityError):
        take(store)


def test_a_lost_answer_is_distinguished_from_a_lost_race(store: FileStore) -> None:
    class LosesAnswers(FileStore):
        def create_if_absent(self, key: str, data: bytes) -> bool:
            super().create_if_absent(key, data)
            raise StoreError("the connection broke")

    class TriesTwice(FileStore):
        def create_if_absent(self, key: str, data: bytes) -> bool:
            super().create_if_absent(key, data)
            return super().create_if_absent(key, data)

    lost = take(LosesAnswers(store.root, World()))
    assert run_lease.newest(store, RUN) == lost
    assert take(TriesTwice(store.root, World()), after=1).number == 2

    class NeverArrives(FileStore):
        def create_if_absent(self, key: str, data: bytes) -> bool:
            raise StoreError("the connection broke")

    with pytest.raises(StoreError):
        take(NeverArrives(store.root, World()), after=2)
    assert run_lease.newest(store, RUN) is not None


def test_a_stale_list_does_not_hide_a_newer_lease(store: FileStore) -> None:
    class Late(FileStore):
        def list(self, prefix: str) -> list[Entry]:
            return super().list(prefix)[:1]

    for number in range(3):
        take(store, mark=f"m-{number}", after=number)
    found = run_lease.newest(Late(store.root, World()), RUN)
    assert found is not None
    assert found.number == 3


def test_exactly_one_of_many_threads_gets_each_lease_number(store: FileStore) -> None:
    """Callers with the same home and mark differ only by the nonce."""
    for after in range(20):
        owners: list[Lease] = []
        refused: list[NotOwner] = []
        threads = [threading.Thread(target=_ask, args=(store, after, owners, refused)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(owners) == 1
        assert len(refused) == 7
        assert run_lease.newest(store, RUN) == owners[0]


def _ask(store: FileStore, after: int, owners: list[Lease], refused: list[NotOwner]) -> None:
    try:
        owners.append(take(store, after=after))
    except NotOwner as exc:
        refused.append(exc)


def _race(root: str, owner: str, rounds: int, won: multiprocessing.Queue[tuple[int, str]]) -> None:
    store = FileStore(root, World())
    for after in range(rounds):
        try:
            taken = run_lease.take(store, RUN, owner=owner, host=owner, mark=owner, after=after, world=World())
            won.put((taken.number, owner))
        except NotOwner:
            pass
    won.put((0, owner))


def test_exactly_one_of_several_processes_gets_each_lease_number(store: FileStore) -> None:
    context = multiprocessing.get_context("fork")
    won: multiprocessing.Queue[tuple[int, str]] = context.Queue()
    owners = ["aaaaaa", "bbbbbb", "cccccc"]
    rounds = 40
    racers = [context.Process(target=_race, args=(store.root, owner, rounds, won)) for owner in owners]
    for racer in racers:
        racer.start()
    numbers: list[int] = []
    num_ended = 0
    while num_ended < len(racers):
        number, _ = won.get(timeout=60)
        num_ended += number == 0
        numbers += [number] * (number > 0)
    for racer in racers:
        racer.join(60)
    assert sorted(numbers) == list(range(1, rounds + 1))
