"""The adapter of the fake cloud: what every adapter must bear, one misbehaviour at a time, on a virtual clock."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.fake_world import KEY, FakeWorld
from tests.contracts.accounts import another_key_ends_nothing, line_of
from tests.contracts.owners import owner_for
from tests.contracts.providers import SECRET, ProviderContract
from tests.contracts.rest_faults import RestFaults
from tests.doubles.accounts import Accounts

from homing.cloud.home import Home
from homing.cloud.ledger.mark import make_mark
from homing.cloud.providers.base import Instance, Needs, Provider, Request, Resource
from homing.cloud.providers.fake.cloud import INSTANCE_KEY_ENV, KEY_HEADER, Settings
from homing.cloud.providers.fake.faults import Faults, Strike
from homing.cloud.providers.fake.provider import KEY_ENV, SERVER, URL_ENV, Fake
from homing.cloud.providers.registry import configured, open_provider
from homing.cloud.reconcile.reconcile import refresh
from homing.errors import HomingError, NoOffer, ProviderRefused, ProviderSilent, UsageError
from homing.wire.boot_json import EndBilling
from homing.world import HttpRequest, World

OWNER = owner_for(__name__)
MARK = make_mark(OWNER, "moss-20260101-000000-abcd", 1)


class TestFake(ProviderContract):
    @pytest.fixture
    def world(self) -> FakeWorld:
        return FakeWorld()

    @pytest.fixture
    def provider(self, owner: str, world: FakeWorld, homing_home: Path) -> Provider:
        return Fake(home=homing_home, owner=owner, world=world)

    @pytest.fixture
    def stranger(self, world: FakeWorld, homing_home: Path) -> Provider:
        return Fake(home=homing_home, owner="zzz999", world=world)

    def test_volumes_and_keys_of_ours_are_listed_and_destroyed_and_others_are_left_alone(
        self, provider: Provider, stranger: Provider, owner: str, world: FakeWorld
    ) -> None:
        mark = make_mark(owner, "moss-20260101-000000-abcd", 1)
        for kind in ("volumes", "keys"):
            send(world, "POST", f"/{kind}", {"name": mark, "size_gb": 100})
            send(world, "POST", f"/{kind}", {"name": "of-another-owner"})
        found = provider.list_resources()
        assert [(each.kind, each.mark) for each in found] == [("volume", mark), ("key", mark)]
        assert found[0].rate_usd_per_hour == Decimal("0.01")
        with pytest.raises(ProviderRefused, match="does not belong to this homing home directory"):
            stranger.destroy_resource(found[0])
        with pytest.raises(ProviderRefused, match="does not belong to this homing home directory"):
            provider.destroy_resource(Resource("volume", "v-000002", "of-another-owner", "fake"))
        for each in found:
            provider.destroy_resource(each)
            provider.destroy_resource(each)  # gone already is success
        assert provider.list_resources() == []
        assert [line.mark for line in world.cloud.bill() if line.until is None] == ["of-another-owner"]


class TestFakeWithoutAGuard(TestFake):
    @pytest.fixture
    def world(self) -> FakeWorld:
        return FakeWorld(settings=Settings(has_guard=False))


def send(world: FakeWorld, method: str, path: str, body: Any) -> Any:
    data = json.dumps(body).encode()
    return json.loads(world.cloud.handle(HttpRequest(method, f"http://x{path}", {KEY_HEADER: KEY}, data)).body)


class Rig:
    """A provider on a cloud with these faults, and the request that launch would make."""

    def __init__(self, tmp_path: Path, *strikes: Strike, settings: Settings | None = None, **faults: Any) -> None:
        self.world = FakeWorld(Faults(strikes=strikes, **faults), settings)
        self.cloud = self.world.cloud
        self.provider = Fake(home=tmp_path / "home", owner=OWNER, world=self.world)
        self.request: Request = ProviderContract().make_request(self.provider, MARK, tmp_path)
        self.world.requests.clear()

    def create(self) -> Instance:
        return self.provider.create(self.request)

    @property
    def num_living(self) -> int:
        return sum(self.cloud.live().values())


class TestFaults(RestFaults):
    Rig = Rig
    create_path, list_key = "/instances", "instances"


# --- create ---


def test_no_capacity_is_no_offer_and_another_refusal_is_the_providers_own_words(tmp_path: Path) -> None:
    with pytest.raises(NoOffer, match="no longer any instances available"):
        Rig(tmp_path, Strike("no_capacity", 1, "create")).create()
    rig = Rig(tmp_path)
    rig.cloud.offers = []
    with pytest.raises(ProviderRefused, match="there is no offer"):
        rig.create()


def test_a_higher_rate_than_offered_is_reported(tmp_path: Path) -> None:
    made = Rig(tmp_path, Strike("dearer", 1, "create")).create()
    assert made.rate_usd_per_hour == Decimal("0.362") * Decimal("1.5")


def test_the_guard_is_armed_by_the_create_call_itself(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create()
    rig.world.pass_time(86400)
    (line,) = rig.cloud.bill()
    # Ten seconds before the limit, as wire/guard_timing.py says: what stays behind, a disk, still fits inside.
    assert Decimal("0.998") < line.usd < Decimal("1.00")


def test_a_new_limit_reaches_the_providers_guard_by_its_own_clock(tmp_path: Path) -> None:
    for skew_s in (-5000.0, 0.0, 5000.0):
        rig = Rig(tmp_path, clock_skew_s=skew_s)
        made = rig.create()
        rig.provider.set_guard(made.id, Decimal("9"), rig.world.t + 60)
        rig.world.pass_time(59)
        assert rig.num_living == 1
        rig.world.pass_time(2)
        assert rig.num_living == 0


# --- describe and list ---


def test_times_are_converted_to_our_clock_if_the_clock_of_the_provider_is_wrong(tmp_path: Path) -> None:
    rig = Rig(tmp_path, clock_skew_s=-7200.0)
    began = rig.world.t
    made = rig.create()
    assert made.created_at == pytest.approx(began, abs=5)
    rig.world.pass_time(100)
    rig.provider.destroy(made.id)
    gone = rig.provider.describe(made.id)
    assert gone.ended_at == pytest.approx(rig.world.t, abs=1)
    assert gone.spend_usd is not None
    assert gone.spend_usd >= made.rate_usd_per_hour * 100 / 3600


def test_a_failed_boot_is_reported_and_bills(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("boot_dies", 1, "create"))
    made = rig.create()
    rig.world.pass_time(60)
    dead = rig.provider.describe(made.id)
    assert (dead.state, dead.billing, dead.is_running) == ("unknown", "yes", False)


def test_a_wrong_key_is_refused_with_where_to_find_the_right_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.cloud._api_key = "changed"
    with pytest.raises(ProviderRefused, match=KEY_ENV) as caught:
        rig.provider.list_owned()
    assert not isinstance(caught.value, ProviderSilent)
    assert KEY not in str(caught.value)


def test_who_waits_asks_about_one_instance_at_most_eight_times_a_minute(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    rig.world.requests.clear()
    for _ in range(200):
        rig.provider.describe(made.id)
        rig.world.pass_time(0.3)
    assert 1 <= rig.world.asked("GET", f"/instances/{made.id}") <= 8


def test_a_preempted_instance_says_so_before_and_after(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    rig.world.pass_time(60)
    rig.cloud.preempt(made.id, notice_s=10)
    noticed = rig.provider.describe(made.id)
    # Not yet "preempted": the guard would destroy it during its last push.
    assert (noticed.state, noticed.billing, noticed.detail) == ("ready", "yes", "preempting")
    rig.world.pass_time(10)
    gone = rig.provider.describe(made.id)
    assert (gone.state, gone.detail) == ("gone", "preempted by the provider")


# --- destroy ---


def test_a_destroy_that_lied_shows_the_instance_again_within_the_settle_time(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("destroy_lies", 1, "destroy"), lie_s=1.0)
    made = rig.create()
    rig.provider.destroy(made.id)
    rig.world.pass_time(rig.provider.settle_s)
    assert [instance.id for instance in rig.provider.list_owned()] == [made.id]


# --- what the machine gets ---


def test_the_machine_ends_itself_with_its_own_key_and_boot_holds_no_key(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    rig.world.pass_time(5)
    env = rig.world.machines.env[made.id]
    assert env["MOSS_API_KEY"] == SECRET
    end: EndBilling = rig.request.order.boot.end_billing
    assert KEY not in json.dumps(rig.request.to_dict())
    assert env[INSTANCE_KEY_ENV] != KEY
    headers = {name: env[variable] for name, variable in end.header_env.items()}
    assert rig.cloud.handle(HttpRequest(end.method, end.url, headers)).status == 204
    assert rig.num_living == 0


def test_the_notice_can_be_read_on_the_machine_without_a_key(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    url = rig.request.order.boot.notice_url
    assert rig.cloud.handle(HttpRequest("GET", url)).status == 404
    rig.cloud.preempt(made.id, notice_s=30)
    assert rig.cloud.handle(HttpRequest("GET", url)).status == 200


# --- whether it is asked at all ---


class Plain(World):
    def __init__(self, env: dict[str, str]) -> None:
        self.env = env

    def environment(self) -> dict[str, str]:
        return self.env


def test_the_fake_cloud_is_queried_only_if_it_is_configured(homing_home: Path) -> None:
    assert "fake" not in configured(homing_home, Plain({}))
    assert "fake" in configured(homing_home, Plain({URL_ENV: "http://127.0.0.1:1"}))
    provider = open_provider("fake", home=homing_home, owner=OWNER, world=Plain({}))
    with pytest.raises(UsageError, match="No fake cloud is running"):
        provider.offers(Needs())
    (homing_home / SERVER).parent.mkdir(parents=True)
    (homing_home / SERVER).write_text('{"url": "http://127.0.0.1:1", "api_key": "k"}')
    assert "fake" in configured(homing_home, Plain({}))


def test_a_server_that_is_down_is_no_answer_and_not_an_empty_cloud(homing_home: Path) -> None:
    world = Plain({URL_ENV: "http://127.0.0.1:1"})
    world.sleep = lambda seconds: None  # type: ignore[method-assign]
    with pytest.raises(HomingError, match="is not responding"):
        Fake(home=homing_home, owner=OWNER, world=world).list_owned()


# --- the account ---

OTHER_KEY, NEW_KEY = "key-of-another-account", "second-key-of-the-account"


def with_accounts(rig: Rig) -> Rig:
    """Two accounts behind one address, the first with two keys."""
    other = FakeWorld()
    other.cloud.account = "account-other"
    clouds = {KEY: (rig.cloud, KEY), NEW_KEY: (rig.cloud, KEY), OTHER_KEY: (other.cloud, KEY)}
    rig.world.cloud = Accounts(KEY_HEADER, clouds)  # type: ignore[assignment]
    return rig


def test_what_the_key_of_another_account_does_not_show_is_not_gone(tmp_path: Path) -> None:
    rig = with_accounts(Rig(tmp_path))

    def use(key: str) -> None:
        rig.world.key = key

    made = rig.create()
    another_key_ends_nothing(
        made, tmp_path / "home", OWNER, rig.world, use=lambda: use(OTHER_KEY), use_first=lambda: use(KEY)
    )


def test_a_new_key_of_the_same_account_shows_and_ends_what_the_old_one_rented(tmp_path: Path) -> None:
    rig = with_accounts(Rig(tmp_path))
    rented = line_of(rig.create(), tmp_path / "home", OWNER, rig.world).ledger.lines()[0]
    rig.world.key = NEW_KEY
    home = Home(tmp_path / "home", rig.world)
    assert home.provider("fake").account() == rented.account
    rig.cloud.preempt(str(rented.instance_id))
    assert refresh(home) == []
    assert home.ledger.lines()[0].state == "gone"
