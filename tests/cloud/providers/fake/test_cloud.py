"""The fake cloud itself: it bills like a cloud, forgets like a cloud, and replays a day from its seed."""

from __future__ import annotations

import base64
import json
from decimal import Decimal
from typing import Any

import pytest
from tests.cloud.fake_world import KEY, OFFERS, FakeWorld

from homing.cloud.providers.fake.cloud import INSTANCE_KEY_ENV, KEY_HEADER, FakeCloud, Settings
from homing.cloud.providers.fake.faults import REQUEST_WAYS, Dice, Faults, Strike
from homing.errors import UsageError
from homing.world import HttpRequest, NetworkError

RATE = Decimal("0.362")  # of cpu-small with its disk


def call(cloud: FakeCloud, method: str, path: str, body: Any = None, key: str = KEY) -> tuple[int, Any]:
    data = b"" if body is None else json.dumps(body).encode()
    response = cloud.handle(HttpRequest(method, f"http://cloud.test{path}", {KEY_HEADER: key}, data))
    return response.status, json.loads(response.body) if response.body else None


def create(cloud: FakeCloud, mark: str = "homing-abc123-moss-1", **more: Any) -> dict[str, Any]:
    status, body = call(cloud, "POST", "/instances", {"offer": "cpu-small", "name": mark, "argv": ["true"], **more})
    assert status == 201
    assert isinstance(body, dict)
    return body


def listed(cloud: FakeCloud) -> list[str]:
    return [body["id"] for body in call(cloud, "GET", "/instances")[1]["instances"]]


def test_an_instance_bills_from_create_to_absence_with_its_disk() -> None:
    world = FakeWorld()
    made = create(world.cloud)
    assert Decimal(made["rate_usd_per_hour"]) == RATE
    world.pass_time(3600)
    assert call(world.cloud, "DELETE", f"/instances/{made['id']}")[0] == 204
    world.pass_time(3600)
    (line,) = world.cloud.bill()
    assert (line.mark, line.usd, line.until) == ("homing-abc123-moss-1", RATE, line.since + 3600)
    assert world.cloud.live() == {}
    assert call(world.cloud, "GET", f"/instances/{made['id']}")[1]["spend_usd"] == str(line.usd)


def test_time_brings_the_states_and_the_machine_starts_once() -> None:
    world = FakeWorld(settings=Settings(boot_s=10))
    made = create(world.cloud, files={"a.txt": base64.b64encode(b"hello").decode()}, env={"X": "1"})
    assert made["state"] == "requested"
    world.pass_time(5)
    assert call(world.cloud, "GET", f"/instances/{made['id']}")[1]["state"] == "booting"
    world.pass_time(5)
    world.pass_time(5)
    assert call(world.cloud, "GET", f"/instances/{made['id']}")[1]["state"] == "ready"
    assert world.machines.calls == [("start", made["id"], ["a.txt"], ["true"])]
    assert world.machines.env[made["id"]]["X"] == "1"


def test_two_creates_under_one_name_are_two_instances_unless_it_deduplicates() -> None:
    world = FakeWorld()
    assert create(world.cloud)["id"] != create(world.cloud)["id"]
    assert world.cloud.live() == {"homing-abc123-moss-1": 2}
    tidy = FakeWorld(settings=Settings(deduplicates=True))
    first = create(tidy.cloud)
    status, second = call(tidy.cloud, "POST", "/instances", {"offer": "cpu-small", "name": first["name"]})
    assert (status, second["id"]) == (200, first["id"])


def test_a_wrong_key_is_refused_and_an_instances_key_ends_only_that_instance() -> None:
    world = FakeWorld(settings=Settings(boot_s=0))
    made, other = create(world.cloud), create(world.cloud, "homing-abc123-moss-2")
    world.pass_time(1)
    assert call(world.cloud, "GET", "/instances", key="wrong")[0] == 401
    key = world.machines.env[made["id"]][INSTANCE_KEY_ENV]
    assert call(world.cloud, "GET", "/instances", key=key)[0] == 403
    assert call(world.cloud, "DELETE", f"/instances/{other['id']}", key=key)[0] == 403
    assert call(world.cloud, "DELETE", "/instances/self", key=key[:-1])[0] == 401
    assert call(world.cloud, "DELETE", "/instances/self", key=key)[0] == 204
    assert world.cloud.live() == {"homing-abc123-moss-2": 1}


def test_what_has_ended_is_described_for_a_while_and_then_unknown() -> None:
    world = FakeWorld(settings=Settings(retention_s=100))
    made = create(world.cloud)
    call(world.cloud, "DELETE", f"/instances/{made['id']}")
    assert call(world.cloud, "GET", f"/instances/{made['id']}")[1]["state"] == "deleted"
    world.pass_time(101)
    assert call(world.cloud, "GET", f"/instances/{made['id']}")[0] == 404
    assert call(world.cloud, "DELETE", f"/instances/{made['id']}")[0] == 404


@pytest.mark.parametrize(
    ("guard", "seconds"), [({"spend_limit_usd": "0.181"}, 1800.0), ({"end_by": 1_000_060.0}, 60.0)]
)
def test_its_own_guard_ends_an_instance_at_the_sum_or_the_date(guard: dict[str, Any], seconds: float) -> None:
    world = FakeWorld()
    made = create(world.cloud)
    assert call(world.cloud, "PUT", f"/instances/{made['id']}/guard", guard)[0] == 200
    assert world.cloud.next_due() is not None
    world.pass_time(50_000)  # however late anybody looks, billing ended when the guard struck
    (line,) = world.cloud.bill()
    assert line.until == pytest.approx(line.since + seconds)
    assert call(world.cloud, "GET", f"/instances/{made['id']}")[1]["ended_by"] == "guard"
    assert ("end", made["id"]) in world.machines.calls


def test_without_a_guard_it_says_so_and_bills_on() -> None:
    world = FakeWorld(settings=Settings(has_guard=False))
    made = create(world.cloud)
    assert call(world.cloud, "PUT", f"/instances/{made['id']}/guard", {"spend_limit_usd": "0.01"})[0] == 404
    body = {"offer": "cpu-small", "name": "x", "guard": {"spend_limit_usd": "1"}}
    assert call(world.cloud, "POST", "/instances", body)[0] == 400
    world.pass_time(100_000)
    assert world.cloud.live() == {"homing-abc123-moss-1": 1}


@pytest.mark.parametrize(
    "guard", [{"spend_limit_usd": "much"}, {"spend_limit_usd": "NaN"}, {"spend_limit_usd": "-1"}, {"end_by": "soon"}]
)
def test_a_guard_that_cannot_be_read_is_refused_and_not_taken_for_none(guard: dict[str, Any]) -> None:
    world = FakeWorld()
    made = create(world.cloud)
    assert call(world.cloud, "PUT", f"/instances/{made['id']}/guard", guard)[0] == 400


def test_a_request_lost_before_it_arrived_did_nothing_and_one_lost_after_did_it() -> None:
    for way, count in (("lost_before", 0), ("lost_after", 1), ("error_before", 0), ("error_after", 1), ("busy", 0)):
        world = FakeWorld(Faults(strikes=(Strike(way, 1, "create"),)))
        body = {"offer": "cpu-small", "name": "m", "argv": []}
        if way.startswith("lost"):
            with pytest.raises(NetworkError):
                call(world.cloud, "POST", "/instances", body)
        else:
            assert call(world.cloud, "POST", "/instances", body)[0] in (429, 500, 503)
        assert sum(world.cloud.live().values()) == count, way


def test_a_late_list_shows_what_was() -> None:
    world = FakeWorld(Faults(rates={"list_late": 1.0}, list_lag_s=10), seed=3)
    made = create(world.cloud)
    assert listed(world.cloud) == []
    world.pass_time(11)
    assert listed(world.cloud) == [made["id"]]
    call(world.cloud, "DELETE", f"/instances/{made['id']}")
    world.pass_time(0.01)
    assert listed(world.cloud) == [made["id"]]
    world.pass_time(11)
    assert listed(world.cloud) == []


def test_after_a_false_destroy_the_instance_disappears_comes_back_and_bills_all_the_time() -> None:
    world = FakeWorld(Faults(strikes=(Strike("destroy_lies", 1, "destroy"),), lie_s=5))
    made = create(world.cloud)
    assert call(world.cloud, "DELETE", f"/instances/{made['id']}")[0] == 204
    assert listed(world.cloud) == []
    assert call(world.cloud, "GET", f"/instances/{made['id']}")[1]["state"] == "deleted"
    world.pass_time(6)
    assert listed(world.cloud) == [made["id"]]
    (line,) = world.cloud.bill()
    assert line.until is None
    assert line.usd == RATE * 6 / 3600
    assert call(world.cloud, "DELETE", f"/instances/{made['id']}")[0] == 204
    assert listed(world.cloud) == []


def test_a_stubborn_destroy_works_at_the_last_try() -> None:
    world = FakeWorld(Faults(strikes=(Strike("destroy_stubborn", 1, "destroy"),), stubborn_tries=3))
    made = create(world.cloud)
    statuses = [call(world.cloud, "DELETE", f"/instances/{made['id']}")[0] for _ in range(4)]
    assert statuses == [202, 202, 204, 404]


def test_a_preemption_with_notice_is_announced_then_done() -> None:
    world = FakeWorld(Faults(strikes=(Strike("notice_preempt", 1, "create"),), take_after_s=(20, 20), notice_s=10))
    made = create(world.cloud)
    world.pass_time(19)
    assert call(world.cloud, "GET", f"/notices/{made['name']}", key="")[0] == 404
    world.pass_time(1)
    assert call(world.cloud, "GET", f"/notices/{made['name']}", key="")[0] == 200
    assert call(world.cloud, "GET", f"/instances/{made['id']}/notice")[0] == 200
    assert ("notice", made["id"], 10.0) in world.machines.calls
    assert call(world.cloud, "GET", f"/instances/{made['id']}")[1]["state"] == "preempting"
    world.pass_time(10)
    assert call(world.cloud, "GET", f"/instances/{made['id']}")[1]["ended_by"] == "preempted"
    (line,) = world.cloud.bill()
    assert line.until == line.since + 30


def test_a_test_can_preempt_an_instance_without_notice() -> None:
    world = FakeWorld(settings=Settings(boot_s=0))
    made = create(world.cloud)
    world.pass_time(1)
    world.cloud.preempt(made["id"])
    assert world.cloud.live() == {}
    assert world.machines.running == []


def test_a_hung_instance_is_frozen_looks_ready_and_bills() -> None:
    world = FakeWorld(Faults(strikes=(Strike("hang", 1, "create"),), take_after_s=(20, 20)))
    made = create(world.cloud)
    world.pass_time(21)
    assert ("freeze", made["id"]) in world.machines.calls
    assert call(world.cloud, "GET", f"/instances/{made['id']}")[1]["state"] == "ready"
    assert world.cloud.live() == {made["name"]: 1}


def test_boots_may_be_slow_never_come_or_die_and_all_of_them_bill() -> None:
    for way, state in (("boot_slow", "booting"), ("boot_never", "booting"), ("boot_dies", "failed")):
        world = FakeWorld(Faults(strikes=(Strike(way, 1, "create"),), slow_boot_s=100))
        made = create(world.cloud)
        world.pass_time(50)
        assert call(world.cloud, "GET", f"/instances/{made['id']}")[1]["state"] == state
        assert world.machines.running == []
        assert world.cloud.live() == {made["name"]: 1}
        world.pass_time(60)
        assert (made["id"] in world.machines.running) == (way == "boot_slow")


def test_a_disk_left_behind_bills_until_it_is_destroyed_too() -> None:
    world = FakeWorld(Faults(strikes=(Strike("leaves_volume", 1, "create"),)))
    made = create(world.cloud)
    call(world.cloud, "DELETE", f"/instances/{made['id']}")
    (volume,) = call(world.cloud, "GET", "/volumes?prefix=homing-abc123-")[1]["volumes"]
    world.pass_time(3600)
    bill = {line.kind: line for line in world.cloud.bill()}
    assert bill["volume"].until is None
    assert bill["volume"].usd == Decimal("0.002")
    assert call(world.cloud, "DELETE", f"/volumes/{volume['id']}")[0] == 204
    assert call(world.cloud, "DELETE", f"/volumes/{volume['id']}")[0] == 404
    assert all(line.until is not None for line in world.cloud.bill())


def test_keys_are_made_listed_and_deleted() -> None:
    world = FakeWorld()
    made = call(world.cloud, "POST", "/keys", {"name": "homing-abc123-key"})[1]
    assert [body["id"] for body in call(world.cloud, "GET", "/keys")[1]["keys"]] == [made["id"]]
    assert call(world.cloud, "GET", "/keys?prefix=other")[1]["keys"] == []
    assert call(world.cloud, "DELETE", f"/keys/{made['id']}")[0] == 204
    assert call(world.cloud, "GET", "/keys")[1]["keys"] == []


def test_paths_that_are_not_there_and_bodies_that_cannot_be_read_are_refused() -> None:
    cloud = FakeWorld().cloud
    for method, path in (("GET", "/"), ("POST", "/offers"), ("PATCH", "/volumes"), ("GET", "/instances/i-1/what")):
        assert call(cloud, method, path)[0] == 404, path
    assert call(cloud, "POST", "/instances", ["a list"])[0] == 400
    assert call(cloud, "POST", "/instances", {"offer": "none", "name": "x"})[0] == 400


def busy_day(seed: int, restart_at: int = -1) -> list[Any]:
    """What one seed brings; with a restart the memory goes through JSON once."""
    rates = dict.fromkeys((*REQUEST_WAYS, "no_capacity", "destroy_lies", "list_late", "preempt", "boot_dies"), 0.1)
    world = FakeWorld(Faults(rates=rates), seed=seed)
    seen: list[Any] = []
    for number in range(60):
        if number == restart_at:
            state = json.loads(json.dumps(world.cloud.dump()))
            fresh = FakeCloud(now=lambda: world.t, machines=world.machines, offers=OFFERS, api_key=KEY, seed=99)
            fresh.load(state)
            world.cloud = fresh
        try:
            if number % 3 == 0:
                seen.append(call(world.cloud, "POST", "/instances", {"offer": "cpu-small", "name": f"m-{number}"}))
            elif number % 3 == 1:
                seen.append(call(world.cloud, "GET", "/instances"))
            else:
                seen.append(call(world.cloud, "DELETE", f"/instances/i-{number // 3 + 1:06d}"))
        except NetworkError as exc:
            seen.append(str(exc))
        world.pass_time(7)
    return [*seen, world.cloud.bill()]


@pytest.mark.acceptance("X26")
def test_one_seed_is_one_day_and_another_is_another() -> None:
    assert busy_day(1) == busy_day(1)
    assert busy_day(1) != busy_day(2)


def test_a_restart_in_the_middle_changes_nothing() -> None:
    assert busy_day(5, restart_at=30) == busy_day(5)


def test_after_a_restart_what_had_ended_is_ended_and_what_should_run_is_started() -> None:
    world = FakeWorld(settings=Settings(boot_s=10))
    ended, booting = create(world.cloud), create(world.cloud, "homing-abc123-moss-2")
    call(world.cloud, "DELETE", f"/instances/{ended['id']}")
    state = json.loads(json.dumps(world.cloud.dump()))
    world.machines.calls.clear()
    world.t += 20
    fresh = FakeCloud(now=lambda: world.t, machines=world.machines, offers=OFFERS, api_key=KEY)
    fresh.load(state)
    assert ("end", ended["id"]) in world.machines.calls
    assert ("start", booting["id"], [], ["true"]) in world.machines.calls


def test_secrets_are_forgotten_once_the_machine_has_them() -> None:
    world = FakeWorld(settings=Settings(boot_s=0))
    create(world.cloud, env={"TOKEN": "hunter2"})
    world.pass_time(1)
    assert "hunter2" not in json.dumps(world.cloud.dump())


def test_everything_is_saved_before_it_is_answered() -> None:
    saved: list[int] = []
    world = FakeWorld()
    cloud = FakeCloud(
        now=lambda: world.t, machines=world.machines, offers=OFFERS, api_key=KEY,
        faults=Faults(strikes=(Strike("lost_after", 1, "create"),)), on_change=lambda: saved.append(len(cloud.bill())),
    )  # fmt: skip
    with pytest.raises(NetworkError):
        create(cloud)
    assert saved == [1]
    listed(cloud)
    assert saved == [1]


def test_a_strike_hits_the_nth_request_and_no_other() -> None:
    for nth in (1, 2, 5):
        world = FakeWorld(Faults(strikes=(Strike("error_before", nth),)))
        statuses = [call(world.cloud, "GET", "/offers")[0] for _ in range(6)]
        assert [number for number, status in enumerate(statuses, 1) if status != 200] == [nth]


def test_faults_survive_json_and_unknown_ones_are_refused() -> None:
    faults = Faults(rates={"list.busy": 0.5}, strikes=(Strike("hang", 2, "create"),), take_after_s=(1, 2))
    assert Faults.from_dict(json.loads(json.dumps(faults.to_dict()))) == faults
    for body in ({"rates": {"explodes": 1}}, {"rates": {"list.hang": 1}}, {"strikes": [{"way": "busy", "of": "moon"}]}):
        with pytest.raises(UsageError):
            Faults.from_dict(body)
    with pytest.raises(UsageError):
        Faults.from_dict({"colour": 1})


def test_each_request_throws_the_same_number_of_dice() -> None:
    class Counting:
        num = 0

        def random(self) -> float:
            self.num += 1
            return 0.0 if self.num % 2 else 1.0

    counting = Counting()
    dice = Dice(Faults(rates={"busy": 0.5, "lost_after": 0.5}), counting)  # type: ignore[arg-type]
    for number in range(1, 5):
        dice.throw("list")
        assert counting.num == 2 * number
