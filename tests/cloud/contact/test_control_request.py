"""Several commands of one home send control requests to the same instance, some concurrently: none is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from homing.cloud.contact.control_request import ask, last_asked
from homing.cloud.home import Home
from homing.errors import StoreError
from homing.store import FileStore, run_key
from homing.wire import codec, file_names
from homing.wire.control_files import Request
from homing.world import World

RUN_ID = "moss-1"
KEY = run_key(RUN_ID, file_names.REQUEST)


class Slow(FileStore):
    """A store that runs `meanwhile` between the read and the write of the first request."""

    def __init__(self, url: str, world: World) -> None:
        super().__init__(url, world)
        self.meanwhile: Any = None

    def put_bytes(self, key: str, data: bytes) -> None:
        act, self.meanwhile = self.meanwhile, None
        if act is not None:
            act()
        super().put_bytes(key, data)


@pytest.fixture
def store(tmp_path: Path) -> Slow:
    made = Slow(str(tmp_path / "store"), World())
    made.put_bytes("objects/x", b"x")
    return made


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home", World())


def asked(store: FileStore) -> Request:
    return codec.loads(Request, store.read(KEY))


def test_a_new_request_keeps_earlier_ones_and_increments_the_serial(home: Home, store: Slow) -> None:
    assert last_asked(home, RUN_ID, store) is None
    assert ask(home, RUN_ID, store, spend_limit_usd="2").serial == 1
    request = ask(home, RUN_ID, store, stop=True, reason="enough")
    assert (request.serial, request.stop, request.spend_limit_usd) == (2, True, "2")
    assert asked(store) == request == last_asked(home, RUN_ID, store)


def test_a_stop_requested_while_another_request_is_written_is_kept(home: Home, store: Slow) -> None:
    store.meanwhile = lambda: ask(home, RUN_ID, store, stop=True, reason="enough")
    ask(home, RUN_ID, store, age_s=60.0)
    request = asked(store)
    assert (request.stop, request.reason, request.age_s, request.serial) == (True, "enough", 60.0, 2)


def test_no_request_is_lost_when_many_are_made_at_once(home: Home, store: Slow) -> None:
    wanted = [{"stop": True}, {"spend_limit_usd": "3"}, {"time_limit_s": 60.0}, {"age_s": 5.0}, {"reason": "r"}]
    threads = [threading.Thread(target=ask, args=(home, RUN_ID, store), kwargs=each) for each in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    request = asked(store)
    assert (request.stop, request.spend_limit_usd, request.time_limit_s, request.age_s) == (True, "3", 60.0, 5.0)
    assert (request.serial, request.reason) == (5, "r")


def test_a_request_builds_on_the_newer_request_of_another_home(home: Home, store: Slow) -> None:
    ask(home, RUN_ID, store, spend_limit_usd="2")
    reference = Request(serial=7, stop=True, reason="enough", spend_limit_usd="5")
    store.put_bytes(KEY, codec.dumps(reference).encode())
    request = ask(home, RUN_ID, store, age_s=1.0)
    assert (request.serial, request.stop, request.spend_limit_usd) == (8, True, "5")


def test_a_request_that_could_not_be_delivered_is_delivered_with_the_next_one(
    home: Home, store: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "put_bytes", lambda *_: (_ for _ in ()).throw(StoreError("The store is away.")))
        with pytest.raises(StoreError):
            ask(home, RUN_ID, store, stop=True, reason="enough")
    assert ask(home, RUN_ID, store, age_s=1.0).stop
    assert asked(store).stop


def test_a_damaged_request_file_at_home_does_not_hide_the_others(home: Home, store: Slow) -> None:
    ask(home, RUN_ID, store, spend_limit_usd="2")
    (home.run_dir(RUN_ID) / "wishes" / "00000002.json").write_bytes(b"{")
    request = ask(home, RUN_ID, store, stop=True)
    assert (request.serial, request.spend_limit_usd, request.stop) == (3, "2", True)


def test_a_request_is_delivered_to_a_live_instance_that_cannot_see_store_changes(
    home: Home, store: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    class Blind:
        def deliver(self, instance_id: str) -> None:
            assert asked(store).stop, "after it is in the store"
            shown.append(instance_id)

    rows = [(None, "sb-1", "modal"), (1.0, "sb-0", "modal"), (None, None, "modal"), (None, "here", "local")]
    lines = [SimpleNamespace(destroyed_at=ended, instance_id=made, provider=name) for ended, made, name in rows]
    monkeypatch.setattr(home.ledger, "lines", lambda run_id: lines)
    monkeypatch.setattr(home, "provider_of", lambda line: Blind())
    ask(home, RUN_ID, store, stop=True, reason="enough")
    assert shown == ["sb-1"]
