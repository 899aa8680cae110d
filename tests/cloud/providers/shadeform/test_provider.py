"""The adapter of Shadeform, one misbehaviour at a time, on a virtual clock; what its documents warn of comes first."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.accounts import another_key_ends_nothing, line_of
from tests.contracts.owners import owner_for
from tests.contracts.providers import SECRET, ProviderContract
from tests.contracts.reconcile import end_what_was_forgotten
from tests.contracts.rest_faults import RestFaults
from tests.doubles.accounts import Accounts
from tests.doubles.faults import Faults, Strike
from tests.doubles.openapi import Unlike
from tests.doubles.shadeform import CATALOGUE, KEY, URL, Settings, ShadeformCloud, card, published
from tests.doubles.toy_world import CloudWorld

from homing.cloud.home import Home
from homing.cloud.ledger.mark import make_mark
from homing.cloud.providers.base import Instance, Needs, Offer, Provider, Request, Resource
from homing.cloud.providers.registry import configured
from homing.cloud.providers.shadeform.auto_delete import moment_of
from homing.cloud.providers.shadeform.offers import choose_os
from homing.cloud.providers.shadeform.provider import KEY_ENV, URL_ENV, Shadeform
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.renting_account import vouch
from homing.errors import CreateFailed, NoOffer, ProviderRefused, ProviderSilent, StartTimeout, UsageError
from homing.world import Completed, HttpRequest, HttpResponse

OWNER = owner_for(__name__)
MARK = make_mark(OWNER, "moss-20260101-000000-abcd", 1)
DAY = 1_790_000_000.0


class ToyMachines:
    def __init__(self) -> None:
        self.scripts: dict[str, str] = {}
        self.running: set[str] = set()

    def boot(self, instance_id: str, script: str) -> None:
        self.scripts[instance_id] = script
        self.running.add(instance_id)

    def end(self, instance_id: str) -> None:
        self.running.discard(instance_id)

    def freeze(self, instance_id: str) -> None: ...

    def address(self, instance_id: str) -> tuple[str, int, str]:
        return "203.0.113.7", 22, "shadeform"


class ToyWorld(CloudWorld):
    """Its network ends in the double. Disk and key generation are real."""

    def __init__(self, settings: Settings | None = None, faults: Faults | None = None, **cloud: Any) -> None:
        super().__init__(DAY)
        self.ran: list[list[str]] = []
        self.ssh_answers: dict[str, Completed] = {}
        self.machines = ToyMachines()
        self.env = {KEY_ENV: KEY, URL_ENV: URL}
        self.cloud = ShadeformCloud(
            now=lambda: self.t, machines=self.machines, settings=settings, faults=faults, **cloud
        )

    def environment(self) -> dict[str, str]:
        return self.env

    def run(
        self, argv: Sequence[str], timeout_s: float, env: dict[str, str] | None = None, stdin: str = ""
    ) -> Completed:
        if argv[0] != "ssh":
            return super().run(argv, timeout_s, env, stdin)
        self.ran.append(list(argv))
        for words, answer in self.ssh_answers.items():
            if words in argv[-1]:
                return answer
        return Completed(255, "", "ssh: connect to host 203.0.113.7 port 22: No route to host")

    def asked(self, method: str, path: str) -> list[dict[str, Any]]:
        """Bodies of the requests of a kind that reached for it."""
        found = [r for r in self.requests if r.method == method and r.url.split("?")[0].endswith(path)]
        return [json.loads(r.body or b"{}") for r in found]


class TestShadeform(ProviderContract):
    @pytest.fixture
    def world(self) -> ToyWorld:
        return ToyWorld()

    @pytest.fixture
    def provider(self, owner: str, world: ToyWorld, homing_home: Path) -> Provider:
        return Shadeform(home=homing_home, owner=owner, world=world)

    @pytest.fixture
    def stranger(self, world: ToyWorld, homing_home: Path) -> Provider:
        return Shadeform(home=homing_home, owner="zzz999", world=world)


class TestShadeformThatAddsFields(TestShadeform):
    @pytest.fixture
    def world(self) -> ToyWorld:
        return ToyWorld(Settings(adds_fields=True))


class TestShadeformThatDeletesItself(TestShadeform):
    @pytest.fixture
    def provider(self, owner: str, world: ToyWorld, homing_home: Path) -> Provider:
        made = Shadeform(home=homing_home, owner=owner, world=world)
        made.configure({"self_delete": True})
        return made


class Rig:
    """A provider on a cloud with these faults, and the request that launch would make."""

    def __init__(
        self,
        tmp_path: Path,
        *strikes: Strike,
        settings: Settings | None = None,
        run_file: dict[str, Any] | None = None,
        boot: dict[str, Any] | None = None,
        offer: Callable[[Offer], bool] = lambda offer: True,
        types: list[dict[str, Any]] | None = None,
        **faults: Any,
    ) -> None:
        self.world = ToyWorld(settings, Faults(strikes=strikes, **faults), types=types)
        self.cloud, self.home = self.world.cloud, tmp_path / "home"
        self.provider = Shadeform(home=self.home, owner=OWNER, world=self.world)
        self.provider.configure(run_file or {})
        made = ProviderContract().make_request(self.provider, MARK, tmp_path)
        chosen = next(each for each in self.provider.offers(Needs()) if offer(each))
        messages = dataclasses.replace(made.order.boot, started_at=self.world.t, **(boot or {}))
        self.request: Request = self.provider.plan(chosen, dataclasses.replace(made.order, boot=messages))
        self.world.requests.clear()

    def create(self) -> Instance:
        return self.provider.create(self.request)

    @property
    def num_living(self) -> int:
        return sum(self.cloud.live().values())

    @property
    def sent(self) -> dict[str, Any]:
        """The create call that was sent last."""
        return self.world.asked("POST", "/instances/create")[-1]


class TestFaults(RestFaults):
    Rig = Rig
    create_path, list_key = "/instances/create", "instances"
    nth_look = 2  # the first reads its guard back
    late = {"settings": Settings(list_lag_s=15.0)}  # noqa: RUF012


# --- offers ---


def names(offers: list[Offer]) -> list[str]:
    return [offer.name for offer in offers]


def test_prices_are_cents_and_those_of_spot_are_dollars_and_a_region_may_stand_there_twice(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert {offer.name: str(offer.rate_usd_per_hour) for offer in rig.provider.offers(Needs())} == {
        "massedcompute/us-central-1/A6000": "0.5",
        "hyperstack/canada-1/H100": "2.49",
        "hyperstack/norway-1/H100": "2.49",
    }
    rig.provider.configure({"spot": True})
    spot = {offer.name: offer for offer in rig.provider.offers(Needs()) if offer.is_spot}
    assert names(list(spot.values())) == ["hyperstack/canada-1/H100/spot", "hyperstack/norway-1/H100/spot"]
    assert spot["hyperstack/canada-1/H100/spot"].rate_usd_per_hour == Decimal("1.25")


def test_what_we_do_not_take_is_left_out_with_the_reason(tmp_path: Path) -> None:
    types = [
        *CATALOGUE,
        card("hotaisle", "MI300X", gpu_manufacturer="amd", vram_per_gpu_in_gb=192),
        card("runpod", "A40", deployment="container", vram_per_gpu_in_gb=48),
        card("vultr", "L4", is_available=False),
    ]
    rig = Rig(tmp_path, types=types)
    why = {offer.name: reason for offer, reason in rig.provider.left_out()}
    assert list(why) == ["lambdalabs/us-east-3/GH200", "hotaisle/canada-1/MI300X", "runpod/canada-1/A40"]
    assert "arm64" in why["lambdalabs/us-east-3/GH200"]
    assert "CUDA" in why["hotaisle/canada-1/MI300X"]
    rig.provider.configure({"clouds": ["massedcompute"], "os": "debian12"})
    assert names(rig.provider.offers(Needs())) == ["massedcompute/us-central-1/A6000"]
    rig.provider.configure({"os": "plan9"})
    assert rig.provider.offers(Needs()) == []
    assert "plan9" in dict(rig.provider.left_out())[rig.provider.left_out()[0][0]]


@pytest.mark.parametrize(
    ("gpu_type", "memory_gb", "interconnect", "device"),
    [
        ("H100", 80, "pcie", "H100-PCIe"),
        ("H100", 80, "sxm5", "H100"),
        ("A100_80G", 80, "sxm4", "A100"),
        ("A100", 40, "pcie", "A100-40GB"),
        ("B200", 192, "sxm6", "B200"),
        ("A4000", 16, "pcie", "RTXA4000"),  # holds the name of an A40
        ("A6000", 48, "pcie", "RTXA6000"),
        ("RTX PRO 6000", 96, "pcie", "RTXPRO6000"),
        ("H200", 141, "pcie", "H200-NVL"),
        ("L40", 48, "pcie", "L40"),  # and this one that of an L4
        ("RTX4090", 24, "", "RTX4090"),
    ],
)
def test_the_card_is_identified_by_name_memory_and_interconnect(
    tmp_path: Path, gpu_type: str, memory_gb: int, interconnect: str, device: str
) -> None:
    types = [card(name=gpu_type, vram_per_gpu_in_gb=memory_gb, interconnect=interconnect)]
    (found,) = Rig(tmp_path, types=types).provider.offers(Needs())
    assert (found.device, found.memory_bytes) == (device, memory_gb * 2**30)
    assert found.host_bytes == 180 * 2**30


@pytest.mark.acceptance(8)
def test_the_newest_image_with_drivers_is_taken_or_the_one_that_was_asked_for(tmp_path: Path) -> None:
    options = ["ubuntu20.04_cuda12.4_shade_os", "ubuntu22.04_cuda12.4_shade_os", "ubuntu24.04", "debian12_shade_os"]
    assert choose_os(options) == "ubuntu22.04_cuda12.4_shade_os"
    assert choose_os(["ubuntu22.04", "ubuntu24.04"]) == "ubuntu24.04"
    assert choose_os(options, "ubuntu24.04") == "ubuntu24.04"
    assert choose_os(options, "plan9") == ""
    rig = Rig(tmp_path)
    rig.create()
    assert rig.sent["os"] == "ubuntu22.04_cuda12.4_shade_os"


# --- the create call ---


def test_what_is_sent(tmp_path: Path) -> None:
    rig = Rig(tmp_path, run_file={"spot": True}, offer=lambda offer: offer.is_spot)
    made = rig.create()
    sent = rig.sent
    script = base64.b64decode(sent["launch_configuration"]["script_configuration"].pop("base64_script")).decode()
    assert script == rig.world.machines.scripts[made.id]
    assert MARK in script
    (key,) = rig.cloud.keys.values()
    assert sent.pop("ssh_key_id") == key["id"]
    sent.pop("auto_delete"), sent.pop("alert")
    assert sent == {
        "cloud": "hyperstack",
        "region": "canada-1",
        "shade_instance_type": "H100",
        "shade_cloud": True,
        "rental_type": "spot",
        "name": MARK,
        "tags": [MARK],
        "os": "ubuntu22.04_cuda12.4_shade_os",
        "launch_configuration": {"type": "script", "script_configuration": {}},
    }
    # The instance shows the on-demand price in cents next to the terms it is rented at.
    assert made.rate_usd_per_hour == Decimal("1.25")


def test_an_ordinary_machine_is_not_asked_for_with_a_rental_type(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create()
    assert "rental_type" not in rig.sent


def test_a_409_that_speaks_of_an_internal_error_is_no_clear_no(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    real_http = rig.world.http

    def http(request: HttpRequest) -> HttpResponse:
        response = real_http(request)
        if request.url.endswith("/create"):
            body = {"error_code": "INTERNAL_SERVER_ERROR", "error": "Something went wrong"}
            return HttpResponse(409, {}, json.dumps(body).encode())
        return response

    rig.world.http = http  # type: ignore[method-assign]
    made = rig.create()
    assert rig.num_living == 1
    assert made.mark == MARK
    assert len(rig.world.asked("POST", "/create")) == 1


def test_no_capacity_is_no_offer_and_no_funds_say_where_to_add_some(tmp_path: Path) -> None:
    with pytest.raises(NoOffer, match="out of stock"):
        Rig(tmp_path, Strike("no_capacity", 1, "create")).create()
    rig = Rig(tmp_path)
    poor = {"error_code": "INSUFFICIENT_FUNDS", "error": "A minimum balance of $5 is required"}
    real_http = rig.world.http
    rig.world.http = lambda request: (  # type: ignore[method-assign]
        HttpResponse(409, {}, json.dumps(poor).encode()) if request.url.endswith("/create") else real_http(request)
    )
    with pytest.raises(ProviderRefused, match="settings/billing"):
        rig.create()


def test_a_higher_rate_than_offered_is_reported(tmp_path: Path) -> None:
    made = Rig(tmp_path, Strike("dearer", 1, "create"), dearer_by=2.0).create()
    assert made.rate_usd_per_hour == Decimal("1.00")


def test_a_type_that_is_gone_from_the_catalogue_is_no_offer_and_nothing_is_made(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.provider.configure({})
    rig.cloud.types = []
    with pytest.raises(NoOffer, match="no longer offers"):
        rig.create()
    assert rig.cloud.keys == {}


# --- its own guard ---


def test_the_guard_is_in_the_create_call_and_holds_a_launch_that_died(tmp_path: Path) -> None:
    """Until the machine is handed over it may cost as much as a start takes, and no more."""
    rig = Rig(tmp_path, settings=Settings(boot_s=300))
    rig.create()
    assert rig.sent["auto_delete"].keys() == rig.sent["alert"].keys() == {"spend_threshold", "date_threshold"}
    assert all(isinstance(value, str) for value in rig.sent["auto_delete"].values())
    rig.world.pass_time(1979)
    assert rig.num_living == 1
    rig.world.pass_time(2)
    assert rig.num_living == 0


def test_the_guard_of_a_handed_over_machine_fires_last_and_inside_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.cloud.machine_setup.startup_script.hand_over", lambda *args, **kwargs: None)
    rig = Rig(tmp_path)
    made = rig.create()
    rig.provider.hand_over(rig.request, made.id)
    # $1.00 at $0.50 an hour are 7200 s; the reserve is 240 s, and its last 5% are the provider's.
    rig.world.pass_time(7200 - 0.12 * 240)
    assert rig.num_living == 1, "the guard at home has its turn before"
    rig.world.pass_time(0.12 * 240)
    (line,) = rig.cloud.bill()
    assert line.until is not None
    assert Decimal("0.99") <= line.usd < Decimal("1.00")


@pytest.mark.acceptance(122)
def test_spend_alone_ends_it_where_the_date_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of Shadeform's two mechanisms fails, the other one holds the limit."""
    for lost in ("spend_threshold", "date_threshold"):
        rig = Rig(tmp_path)
        made = rig.create()
        monkeypatch.setattr("homing.cloud.machine_setup.startup_script.hand_over", lambda *args, **kwargs: None)
        rig.provider.hand_over(rig.request, made.id)
        del rig.cloud.rented[made.id].auto_delete[lost]
        rig.world.pass_time(86400)
        (line,) = rig.cloud.bill()
        assert Decimal("0.99") <= line.usd <= Decimal("1.00")


def test_a_time_limit_and_what_was_spent_before_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.cloud.machine_setup.startup_script.hand_over", lambda *args, **kwargs: None)
    rig = Rig(tmp_path, boot={"time_limit_s": 3600.0, "spent_before_usd": "0.20"})
    made = rig.create()
    rig.provider.hand_over(rig.request, made.id)
    assert rig.cloud.rented[made.id].auto_delete["spend_threshold"] == "0.80"
    assert moment_of(rig.cloud.rented[made.id].auto_delete["date_threshold"]) == DAY + 3600 - 0.05 * 240


@pytest.mark.acceptance(122)
def test_an_alert_goes_out_at_sixty_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.cloud.machine_setup.startup_script.hand_over", lambda *args, **kwargs: None)
    rig = Rig(tmp_path, boot={"spend_limit_usd": "100.00", "time_limit_s": 36000.0})
    made = rig.create()
    rig.provider.hand_over(rig.request, made.id)
    alert = rig.cloud.rented[made.id].alert
    assert alert["spend_threshold"] == "60.00"
    assert moment_of(alert["date_threshold"]) == DAY + int(0.6 * (36000 - 12))


@pytest.mark.parametrize("skew_s", [-5000.0, 5000.0])
def test_the_guard_goes_by_their_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew_s: float) -> None:
    monkeypatch.setattr("homing.cloud.machine_setup.startup_script.hand_over", lambda *args, **kwargs: None)
    rig = Rig(tmp_path, boot={"time_limit_s": 3600.0}, clock_skew_s=skew_s)
    made = rig.create()
    assert made.created_at == pytest.approx(DAY, abs=2)
    rig.provider.hand_over(rig.request, made.id)
    rig.world.pass_time(3600 - 20)
    assert rig.num_living == 1
    rig.world.pass_time(20)
    assert rig.num_living == 0
    gone = rig.provider.describe(made.id)
    assert gone.ended_at == pytest.approx(rig.world.t, abs=20)
    rig = Rig(tmp_path, clock_skew_s=skew_s)
    made = rig.create()
    rig.provider.set_guard(made.id, Decimal("9"), rig.world.t + 60)
    rig.world.pass_time(57)
    assert rig.num_living == 1
    rig.world.pass_time(4)
    assert rig.num_living == 0


@pytest.mark.acceptance(122)
def test_an_instance_is_destroyed_if_its_guard_differs_from_the_one_sent(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(drops_guard="create"))
    with pytest.raises(CreateFailed, match="without the requested auto_delete") as caught:
        rig.create()
    assert caught.value.instance_id in rig.cloud.rented
    assert rig.num_living == 0


def test_a_guard_that_comes_back_written_otherwise_is_the_same_guard(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    real_http = rig.world.http

    def http(request: HttpRequest) -> HttpResponse:
        response = real_http(request)
        if not request.url.endswith("/info"):
            return response
        body = json.loads(response.body)
        body["auto_delete"]["spend_threshold"] += "00"
        body["auto_delete"]["date_threshold"] = body["auto_delete"]["date_threshold"].replace("Z", ".000000000+00:00")
        return HttpResponse(200, response.headers, json.dumps(body).encode())

    rig.world.http = http  # type: ignore[method-assign]
    rig.create()
    assert rig.num_living == 1


def test_set_guard_reports_a_guard_that_was_not_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, settings=Settings(drops_guard="update"))
    made = rig.create()
    with pytest.raises(ProviderRefused, match="did not apply the new auto_delete"):
        rig.provider.set_guard(made.id, Decimal("5.00"), None)
    # A launch is undone if its machine would be deleted too early or too late.
    monkeypatch.setattr("homing.cloud.machine_setup.startup_script.hand_over", lambda *args, **kwargs: None)
    with pytest.raises(ProviderRefused, match="did not apply the new auto_delete"):
        rig.provider.hand_over(rig.request, made.id)


def test_a_limit_under_a_cent_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    rig = Rig(tmp_path, boot={"spend_limit_usd": "0.009"})
    with pytest.raises(UsageError, match="too small"):
        rig.create()
    assert rig.cloud.rented == {}


# --- states ---


def test_states_on_the_way_to_active_and_after(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(boot_s=100, delete_s=50))
    made = rig.create()
    seen = [(made.state, made.detail)]
    for _ in range(4):
        rig.world.pass_time(26)
        now = rig.provider.describe(made.id)
        seen.append((now.state, now.detail))
        assert (rig.provider.connection(made.id) is None) == (now.state != "ready")
    assert seen == [
        ("requested", "creating"),
        ("requested", "pending_provider"),
        ("booting", "pending"),
        ("booting", "pending"),
        ("ready", "active"),
    ]
    rig.provider.destroy(made.id)
    # It is still listed, and bills no more.
    over = rig.provider.describe(made.id)
    assert (over.state, over.billing, over.detail) == ("gone", "no", "deleting; no longer billing")
    assert rig.provider.list_owned() == []
    rig.world.pass_time(60)
    assert rig.provider.describe(made.id).detail == "deleted"
    rig.world.pass_time(30 * 86400)
    assert rig.provider.describe(made.id).state == "gone"


def test_an_error_after_create_bills_runs_nothing_and_ends_the_start(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("boot_dies", 1, "create"), settings=Settings(boot_s=30))
    made = rig.create()
    with pytest.raises(StartTimeout, match="could not provision"):
        rig.provider.hand_over(rig.request, made.id)
    failed = rig.provider.describe(made.id)
    assert (failed.state, failed.billing, failed.is_running) == ("unknown", "yes", False)
    rig.provider.destroy(made.id)
    assert rig.num_living == 0


def test_a_machine_that_never_comes_is_waited_for_as_long_as_the_run_file_says(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("boot_never", 1, "create"), run_file={"start_limit": 120.0})
    made = rig.create()
    with pytest.raises(StartTimeout, match="start_limit"):
        rig.provider.hand_over(rig.request, made.id)
    assert rig.world.t - DAY < 180


def test_a_machine_that_never_comes_is_waited_for_no_longer_than_the_limit_leaves(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("boot_never", 1, "create"))
    made, began = rig.create(), rig.world.t
    late = dataclasses.replace(rig.request, order=dataclasses.replace(rig.request.order, start_within_s=75.0))
    with pytest.raises(StartTimeout, match="limit leaves no more time"):
        rig.provider.hand_over(late, made.id)
    assert rig.world.t - began < 90


def test_a_reclaimed_spot_machine_says_so(tmp_path: Path) -> None:
    rig = Rig(tmp_path, run_file={"spot": True}, offer=lambda offer: offer.is_spot, settings=Settings(delete_s=30))
    made = rig.create()
    rig.cloud.preempt(made.id, notice_s=60)
    noticed = rig.provider.list_owned()[0]
    assert noticed.state == "ready"
    assert "the provider ends it at" in noticed.detail
    rig.world.pass_time(60)
    gone = rig.provider.describe(made.id)
    assert (gone.state, gone.billing, gone.detail) == ("gone", "no", "preempted by the provider")


def test_an_instance_renamed_in_the_console_is_still_found(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    rig.cloud.rented[made.id].asked["name"] = "my favourite machine"
    assert [instance.mark for instance in rig.provider.list_owned()] == [MARK]


def test_a_port_that_is_null_is_22_and_the_host_key_is_pinned(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(is_port_null=True))
    made = rig.create()
    connection = rig.provider.connection(made.id)
    assert connection is not None
    assert (connection.user, connection.host, connection.port) == ("shadeform", "203.0.113.7", 22)
    public = (rig.home / "keys/hosts" / MARK / "key.pub").read_text().split()[:2]
    assert connection.known_hosts == f"203.0.113.7 {' '.join(public)}"
    assert Path(connection.key_path).stat().st_mode & 0o777 == 0o600
    other_home = Shadeform(home=tmp_path / "other", owner=OWNER, world=rig.world)
    assert other_home.connection(made.id) is None, "it did not make this machine's key and cannot vouch for it"


def test_who_waits_asks_about_one_instance_at_most_eight_times_a_minute(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    rig.world.requests.clear()
    for _ in range(200):
        rig.provider.describe(made.id)
        rig.world.pass_time(0.3)
    assert 1 <= len(rig.world.asked("GET", "/info")) <= 8


# --- destroy ---


def test_a_destroy_that_gets_no_answer_or_is_refused_raises(tmp_path: Path) -> None:
    rig = Rig(tmp_path, rates={"destroy.lost_before": 1.0})
    made = rig.create()
    with pytest.raises(ProviderSilent):
        rig.provider.destroy(made.id)
    assert rig.num_living == 1
    rig = Rig(tmp_path, settings=Settings(boot_s=60, deletes_only_active=True))
    made = rig.create()
    with pytest.raises(ProviderRefused, match="current state"):
        rig.provider.destroy(made.id)
    rig.world.pass_time(61)
    rig.provider.destroy(made.id)
    assert rig.num_living == 0


# --- SSH keys ---


def test_the_key_is_ours_alone_and_goes_with_its_instance(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    (key,) = rig.provider.list_resources()
    assert (key.kind, key.mark, key.rate_usd_per_hour) == ("key", MARK, 0)
    public = next(iter(rig.cloud.keys.values()))["public_key"]
    assert public == (rig.home / "keys/login/key.pub").read_text().strip()
    rig.provider.destroy(made.id)
    rig.provider.destroy_resource(key)
    rig.provider.destroy_resource(key)
    assert rig.cloud.keys == {}
    with pytest.raises(ProviderRefused, match="does not belong to this homing home directory"):
        rig.provider.destroy_resource(Resource("key", "1", "another laptop", "shadeform"))


@pytest.mark.acceptance(140)
def test_what_a_lost_ledger_knew_is_found_by_reconcile_and_ended(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    found = end_what_was_forgotten(rig.create(), rig.home, OWNER, rig.world)
    assert sorted(each.thing for each in found) == ["instance", "key"]
    assert (rig.num_living, rig.cloud.keys) == (0, {})


def test_a_key_that_was_added_before_is_used_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("lost_after", 1, "keys"))
    made = rig.create()
    assert len(rig.cloud.keys) == 1
    rig.provider.destroy(made.id)
    rig.create()
    assert len(rig.cloud.keys) == 1


def test_a_key_that_shadeform_still_holds_does_not_delay_destroy(tmp_path: Path) -> None:
    """A key costs nothing; a destroy that waited for it would be reported as one that may still bill."""
    rig = Rig(tmp_path, settings=Settings(delete_s=300, holds_keys=True))
    made = rig.create()
    rig.provider.destroy(made.id)
    (key,) = rig.provider.list_resources()
    rig.provider.destroy_resource(key)
    assert rig.provider.list_resources() == []
    rig.world.pass_time(301)
    later = Shadeform(home=rig.home, owner=OWNER, world=rig.world)
    (key,) = later.list_resources()
    later.destroy_resource(key)
    assert rig.cloud.keys == {}


def test_what_may_hold_a_private_key_is_never_asked_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    rig.provider.log(made.id)
    for key in rig.provider.list_resources():
        rig.provider.destroy(made.id)
        rig.provider.destroy_resource(key)
    assert [r.url for r in rig.world.requests if "/sshkeys/" in r.url and r.url.endswith("/info")] == []


# --- who can end it ---


def test_without_the_account_key_the_machine_cannot_end_itself_and_holds_no_key(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    assert "end_itself" in rig.provider.cannot
    seen = json.dumps([rig.cloud.rented[made.id].asked, rig.request.to_dict()]) + rig.world.machines.scripts[made.id]
    assert KEY not in seen
    assert set(rig.request.order.secrets) == {"MOSS_API_KEY"}
    assert SECRET not in seen


def test_with_self_delete_the_key_travels_by_ssh_only_and_ends_exactly_this_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[Request] = []
    monkeypatch.setattr(
        "homing.cloud.machine_setup.startup_script.hand_over",
        lambda connection, request, **kwargs: handed.append(request),
    )
    rig = Rig(tmp_path, run_file={"self_delete": True})
    made = rig.create()
    assert "end_itself" not in rig.provider.cannot
    rig.provider.hand_over(rig.request, made.id)
    seen = json.dumps([rig.cloud.rented[made.id].asked, rig.request.to_dict()]) + rig.world.machines.scripts[made.id]
    assert KEY not in seen
    assert KEY not in repr(rig.request)
    (messages,) = handed
    assert messages.order.secrets[KEY_ENV] == KEY
    end = messages.order.boot.end_billing
    assert end.url == f"{URL}/instances/{made.id}/delete"
    headers = {name: messages.order.secrets[variable] for name, variable in end.header_env.items()}
    assert rig.cloud.handle(HttpRequest(end.method, end.url, headers)).status == 200
    assert rig.num_living == 0


def test_an_agent_that_gave_up_is_seen_by_the_launch_although_the_machine_is_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.cloud.machine_setup.startup_script.hand_over", lambda *args, **kwargs: None)
    rig = Rig(tmp_path, run_file={"start_limit": 600.0})
    made = rig.create()
    rig.provider.hand_over(rig.request, made.id)
    rig.world.pass_time(10)
    assert rig.provider.describe(made.id).is_running, "a failed login says nothing about the agent"
    rig.world.ssh_answers["billing-ended"] = Completed(0, "1790000000.0", "")
    rig.world.pass_time(10)
    ended = rig.provider.describe(made.id)
    assert (ended.state, ended.billing, ended.is_running) == ("ready", "yes", False)
    assert Shadeform(home=rig.home, owner=OWNER, world=rig.world).describe(made.id).is_running, (
        "only who launched looks"
    )
    rig.world.pass_time(700)
    assert rig.provider.describe(made.id).is_running, "and not for ever"


# --- the published document ---


@pytest.mark.skipif(published() is None, reason="HOMING_OPENAPI_DIR is not set")
def test_a_field_outside_the_published_document_is_refused_in_requests_and_responses(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    document = rig.cloud.document
    assert document is not None
    before = document.num_checked
    made = rig.create()
    assert document.num_checked > before
    url, headers = f"{URL}/instances/{made.id}/update", {"X-API-KEY": KEY}
    with pytest.raises(Unlike, match="delete_at"):
        rig.cloud.handle(HttpRequest("POST", url, headers, b'{"auto_delete": {"delete_at": "tomorrow"}}'))
    with pytest.raises(Unlike, match="no query parameter"):
        rig.cloud.handle(HttpRequest("GET", f"{URL}/instances/types?limit=3", headers))
    rig.cloud.types = [{**CATALOGUE[0], "colour": "red"}]
    with pytest.raises(Unlike, match="colour"):
        rig.provider.offers(Needs())


# --- log, keys, set-up ---


def test_its_log_is_read_by_ssh_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, settings=Settings(boot_s=60))
    made = rig.create()
    assert "is not possible: it is creating" in rig.provider.log(made.id)
    rig.world.pass_time(61)
    assert "No route to host" in rig.provider.log(made.id)
    assert "boot.log" in rig.world.ran[-1][-1]
    monkeypatch.setattr(ToyWorld, "run", lambda *args, **kwargs: Completed(0, "ready; waiting\n", ""))
    assert rig.provider.log(made.id) == "ready; waiting\n"
    rig.provider.destroy(made.id)
    assert rig.provider.log(made.id) == ""


def test_a_wrong_key_is_refused_with_where_to_find_the_right_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.cloud.api_key = "changed"
    with pytest.raises(ProviderRefused, match="Invalid API key") as caught:
        rig.provider.list_owned()
    assert not isinstance(caught.value, ProviderSilent)
    assert KEY_ENV in caught.value.fix
    assert KEY not in str(caught.value)


def test_it_is_asked_only_where_there_is_a_key(homing_home: Path) -> None:
    world = ToyWorld()
    assert Shadeform.is_configured(homing_home, world)
    assert "shadeform" in configured(homing_home, world)
    world.env = {}
    assert not Shadeform.is_configured(homing_home, world)
    with pytest.raises(UsageError, match=KEY_ENV):
        Shadeform(home=homing_home, owner=OWNER, world=world).offers(Needs())


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-11-16T08:30:00Z", 1794817800.0),
        ("2026-11-16T08:30:00.123456789Z", 1794817800.123456),
        ("2026-11-16T09:30:00+01:00", 1794817800.0),
        ("0001-01-01T00:00:00Z", None),
        ("soon", None),
        (None, None),
    ],
)
def test_times_as_shadeform_writes_them(text: str | None, moment: float | None) -> None:
    assert moment_of(text) == moment


# --- doctor ---


def findings(rig: Rig) -> dict[str, str]:
    return {check.name: check.text for check in rig.provider.checks() if check.is_finding}


def test_doctor_finds_nothing_wrong_and_says_what_cannot_be_asked(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create()
    rig.world.requests.clear()
    assert findings(rig) == {}
    assert {check.name for check in rig.provider.checks() if check.state == "skipped"} == {"shadeform.balance"}
    assert {request.method for request in rig.world.requests} == {"GET"}, "looking changes nothing"


def test_doctor_finds_names_that_shadeform_does_not_have(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.provider.configure({"clouds": ["hyperstak"], "os": "ubuntu7_shade_os"})
    found = findings(rig)
    assert "hyperstak" in found["shadeform.clouds"]
    assert "ubuntu7_shade_os" in found["shadeform.os"]


def test_doctor_finds_a_machine_without_its_guard(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    rig.cloud.rented[made.id].auto_delete.clear()
    assert made.id in findings(rig)["shadeform.guard"]
    rig.provider.destroy(made.id)
    assert findings(rig) == {}, "what is gone needs none"


# --- the account ---

OTHER_KEY, NEW_KEY = "key-of-another-account", "second-key-of-the-account"


def with_accounts(rig: Rig) -> Rig:
    """Two accounts behind one address, the first with two keys."""
    clouds = {KEY: (rig.cloud, KEY), NEW_KEY: (rig.cloud, KEY), OTHER_KEY: (ToyWorld().cloud, KEY)}
    rig.world.cloud = Accounts("x-api-key", clouds)  # type: ignore[assignment]
    return rig


def test_what_the_key_of_another_account_does_not_show_is_not_gone(tmp_path: Path) -> None:
    rig = with_accounts(Rig(tmp_path))
    line = another_key_ends_nothing(
        rig.create(),
        rig.home,
        OWNER,
        rig.world,
        use=lambda: rig.world.env.update({KEY_ENV: OTHER_KEY}),
        use_first=lambda: rig.world.env.update({KEY_ENV: KEY}),
    )
    assert KEY not in str(line)


def test_a_new_key_that_shows_the_machine_is_of_its_account(tmp_path: Path) -> None:
    rig = with_accounts(Rig(tmp_path))
    made = rig.create()
    rented = line_of(made, rig.home, OWNER, rig.world).ledger.lines()[0].account
    rig.world.env[KEY_ENV] = NEW_KEY
    home = Home(rig.home, rig.world)
    assert home.provider("shadeform").account() != rented, "Shadeform does not report the account"
    assert refresh(home) == []
    assert home.ledger.lines()[0].account == home.provider("shadeform").account()
    rig.cloud.preempt(made.id)
    rig.world.pass_time(600.0)
    assert refresh(home) == []
    assert home.ledger.lines()[0].state == "gone"


def test_after_a_new_key_and_the_end_a_person_can_say_that_it_is_the_same_account(tmp_path: Path) -> None:
    rig = with_accounts(Rig(tmp_path))
    made = rig.create()
    line_of(made, rig.home, OWNER, rig.world)
    rig.cloud.preempt(made.id)
    rig.world.pass_time(30 * 86400.0)  # so long that Shadeform has forgotten it
    rig.world.env[KEY_ENV] = NEW_KEY
    home = Home(rig.home, rig.world)
    (problem,) = refresh(home)
    assert "does not report whether both belong to the same account" in problem
    (messages,) = vouch(home, home.ledger.lines())
    assert messages.startswith(f"{made.mark} was rented by ")
    assert refresh(home) == []
    (line,) = home.ledger.lines()
    assert (line.state, line.account) == ("gone", home.provider("shadeform").account())
