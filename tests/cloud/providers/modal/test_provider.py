"""Modal as a provider: the contract on both kinds of sandbox, and what is particular to Modal."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from grpclib import Status
from tests.cloud.rig import make_run
from tests.contracts.accounts import another_key_ends_nothing, line_of
from tests.contracts.figures import Spoiled, check_absurd_figures
from tests.contracts.owners import owner_for
from tests.contracts.providers import SECRET, ProviderContract
from tests.contracts.reconcile import end_what_was_forgotten
from tests.doubles import modal as modal_double
from tests.doubles.absurd import figures_of_tags
from tests.doubles.modal import TOKEN_ID, TOKEN_SECRET, Fault
from tests.doubles.modal import Modal as Cloud

from homing.cloud.destroy import destroy_lines
from homing.cloud.home import Home
from homing.cloud.launch.launch import LaunchOrder, draft
from homing.cloud.ledger.mark import make_mark
from homing.cloud.providers.base import Delivering, Instance, Needs, Offer, Preparing, Provider, Request
from homing.cloud.providers.modal import create_request
from homing.cloud.providers.modal.api import ModalApi
from homing.cloud.providers.modal.offers import LIFETIME_S, gpu_string, rate_key
from homing.cloud.providers.modal.provider import Modal
from homing.cloud.providers.rest import Unwelcome
from homing.cloud.reconcile.reconcile import refresh
from homing.errors import CreateFailed, HomingError, NoOffer, ProviderRefused, ProviderSilent, StoreError, UsageError
from homing.store import open_store
from homing.store.modal import client
from homing.wire.guard_timing import LAND, allowed_s, reserve_s
from homing.world import World

REPLACE = {"/opt/homing": "{box}/root"}
OWNER = owner_for(__name__)
MARK = make_mark(OWNER, "moss-20260101-000000-abcd", 1)


class Skipping(World):
    """Waiting moves the cloud's clock and takes no time."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__()
        self._cloud, self.slept_s = cloud, 0.0

    def sleep(self, seconds: float) -> None:
        self._cloud.clock_s += seconds
        self.slept_s += seconds

    def monotonic(self) -> float:
        return super().monotonic() + self.slept_s


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with modal_double.running(tmp_path_factory.mktemp("modal"), REPLACE) as cloud:
        yield cloud


@pytest.fixture
def cloud(server: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """Its sandboxes run nothing, unless a test says so: what they would run is tried in tests/e2e."""
    modal_double.shorten_the_waits_of_the_sdk(monkeypatch)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.runs_commands = False
    yield server
    server.reset()


@pytest.fixture
def modal(cloud: Cloud, tmp_path: Path) -> Modal:
    return Modal(home=tmp_path / "home", owner=OWNER, world=Skipping(cloud))


def order_of(modal: Modal, tmp_path: Path, *, gpu: str = "T4", mark: str = MARK, **boot: object) -> Request:
    made = ProviderContract().make_request(modal, mark, tmp_path)
    offer = modal.offers(Needs(gpu=gpu))[0] if gpu else _without_card(modal)
    messages = dataclasses.replace(made.order.boot, rate_usd_per_hour=str(offer.rate_usd_per_hour), **boot)
    return modal.plan(offer, dataclasses.replace(made.order, boot=messages))


def _without_card(modal: Modal) -> Offer:
    return next(offer for offer in modal.offers(Needs()) if not offer.num_gpus)


class TestModal(ProviderContract):
    @pytest.fixture
    def provider(self, owner: str, tmp_path: Path, cloud: Cloud) -> Provider:
        return Modal(home=tmp_path / "home", owner=owner, world=World())

    @pytest.fixture
    def stranger(self, tmp_path: Path, cloud: Cloud) -> Provider:
        return Modal(home=tmp_path / "other", owner="zzzzzz", world=World())


class WithoutCard(Modal):
    def offers(self, needs: Needs) -> list[Offer]:
        return [offer for offer in super().offers(needs) if not offer.num_gpus]


class TestModalWithoutACard(TestModal):
    """The SDK makes such a sandbox in another way, under other names of the same calls."""

    @pytest.fixture
    def provider(self, owner: str, tmp_path: Path, cloud: Cloud) -> Provider:
        return WithoutCard(home=tmp_path / "home", owner=owner, world=World())


# --- absurd figures ---


@pytest.mark.regression("provider-figures")
def test_absurd_figures_are_no_bill_and_keep_nothing_from_being_ended(
    cloud: Cloud, modal: Modal, tmp_path: Path
) -> None:
    request, kept = order_of(modal, tmp_path), dict[str, str]()

    def living() -> list[dict[str, str]]:
        return [one.tags for one in cloud.sandboxes.values() if one.result is None]

    def create() -> Instance:
        made = modal.create(request)
        kept.update(living()[0])
        return made

    def names(provider: Provider) -> set[str]:
        found = figures_of_tags(living()[0])
        provider.destroy(provider.list_owned()[0].id)
        return found

    def put(messages: dict[str, str]) -> None:
        for tags in living():
            tags.update(messages or kept)

    now = modal._world.now
    open_ = lambda: Modal(home=tmp_path / "home", owner=OWNER, world=Skipping(cloud))  # noqa: E731
    check_absurd_figures(
        Spoiled(open_, create, names, put, lambda: len(living()), now), ["NaN", "abc", "Infinity", "1e308", "-5", ""]
    )


# --- offers ---


@pytest.mark.acceptance(57)
def test_every_card_from_a10g_to_b200_is_offered_with_the_rate_that_modal_tells(cloud: Cloud, modal: Modal) -> None:
    offers = {offer.name: offer for offer in modal.offers(Needs(num_gpus=0))}
    for name in ("T4", "L4", "A10", "A10G", "L40S", "A100-40GB", "A100-80GB", "H100", "H200", "B200", "H100:8", "cpu"):
        assert name in offers
    assert "A10G:8" not in offers, "four are the most in one machine"
    h100 = offers["H100"]
    assert h100.rate_usd_per_hour == Decimal("3.95") + 2 * Decimal("0.1419") + 16 * Decimal("0.0242")
    assert h100.as_of is None
    assert offers["H100:8"].rate_usd_per_hour == 8 * h100.rate_usd_per_hour
    assert h100.lifetime_s == 86400


def test_a_rate_that_modal_does_not_report_comes_from_the_dated_table_and_says_so(cloud: Cloud, modal: Modal) -> None:
    cloud.has_rates = False
    (offer,) = [offer for offer in modal.offers(Needs(gpu="H100")) if offer.num_gpus == 1]
    assert offer.as_of is not None
    assert "copied from" in offer.rate_source
    assert "20" in offer.rate_source


@pytest.mark.acceptance(57)
def test_modal_may_not_give_another_card_than_the_one_that_was_planned_with(modal: Modal) -> None:
    asked = {offer.name: gpu_string(offer) for offer in modal.offers(Needs(num_gpus=0))}
    assert asked["H100"] == "H100!:1", "the plain name may bring an H200"
    assert asked["A100-80GB:8"] == "A100-80GB:8", "the plain A100 has 40 GB"
    assert asked["cpu"] is None
    assert rate_key("A100-80GB") == "gpu_hour_cost_a100_80gb"


def test_more_cores_and_memory_are_in_the_rate_and_capped(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    cheap = modal.offers(Needs(gpu="T4"))[0].rate_usd_per_hour
    modal.configure({"cores": 4.0, "memory": 64 * 2**30})
    request = order_of(modal, tmp_path)
    assert request.offer.rate_usd_per_hour - cheap == 2 * Decimal("0.1419") + 48 * Decimal("0.0242")
    made = cloud.sandboxes[modal.create(request).id]
    resources = made.definition.resources
    assert (resources.milli_cpu, resources.milli_cpu_max) == (4000, 4000)
    assert (resources.memory_mb, resources.memory_mb_max) == (65536, 65536)
    assert made.rate_usd == pytest.approx(float(request.offer.rate_usd_per_hour)), "as it would be on the bill"


# --- Modal's own guard ---


def test_the_timeout_is_set_from_the_limit_and_never_left_to_its_default(
    cloud: Cloud, modal: Modal, tmp_path: Path
) -> None:
    made = cloud.sandboxes[modal.create(order_of(modal, tmp_path, spend_limit_usd="2.00")).id]
    timeout_s = made.definition.timeout_secs
    assert timeout_s != modal_double.DEFAULT_TIMEOUT_S
    cost = timeout_s * made.rate_usd / 3600
    assert 1.9 < cost <= 2.0, "inside the limit, and not far from it"


@pytest.mark.parametrize(
    ("limits", "least", "most"),
    [
        ({"spend_limit_usd": None}, 86400, 86400),
        ({"spend_limit_usd": "500.00"}, 86400, 86400),
        ({"spend_limit_usd": None, "time_limit_s": 7200.0}, 7100, 7200),
        ({"spend_limit_usd": "5.00", "spent_before_usd": "4.50"}, 60, 1800),
    ],
)
def test_no_limit_makes_it_longer_than_modal_allows(
    modal: Modal, tmp_path: Path, limits: dict[str, object], least: int, most: int
) -> None:
    boot = order_of(modal, tmp_path, **limits).order.boot
    assert least <= create_request.timeout_s(boot) <= most


def test_the_run_leaves_in_time_before_the_day_is_over(modal: Modal, tmp_path: Path) -> None:
    boot = order_of(modal, tmp_path, spend_limit_usd="500.00", push_s=300.0, home_s=20.0).order.boot
    assert LIFETIME_S - 900 < boot.leave_s < LIFETIME_S - 2 * 300


def test_an_end_by_the_limit_comes_before_the_run_would_leave(modal: Modal, tmp_path: Path) -> None:
    """What lands at its limit is over; what leaves is launched again."""
    for limit in ("0.20", "2.00", "20.00"):
        boot = order_of(modal, tmp_path, spend_limit_usd=limit).order.boot
        allowed = allowed_s(Decimal(boot.rate_usd_per_hour), Decimal(limit), Decimal(0), 0.0)
        assert allowed - reserve_s(LAND, allowed) < boot.leave_s < create_request.timeout_s(boot)


def test_modal_ends_a_sandbox_at_its_timeout_and_describe_says_so(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    made = modal.create(order_of(modal, tmp_path, spend_limit_usd="1.00"))
    cloud.clock_s += 86400
    cloud.tick()
    modal._looked.clear()
    gone = modal.describe(made.id)
    assert (gone.state, gone.billing) == ("gone", "no")
    assert "timeout" in gone.detail
    assert modal.list_owned() == []


# --- create, once ---


def test_a_lost_reply_makes_no_second_one(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    for gpu, method in (("T4", "SandboxCreate"), ("", "SandboxCreateV2")):
        mark = make_mark(OWNER, f"lost-{method.lower()}", 1)
        cloud.faults.append(Fault(method, is_after=True))
        made = modal.create(order_of(modal, tmp_path, gpu=gpu, mark=mark))
        assert [one.definition.name for one in cloud.billing()].count(mark) == 1
        assert made.mark == mark


def test_a_call_that_never_took_effect_is_made_again(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    cloud.faults.append(Fault("SandboxCreate", times=4))  # as often as the SDK tries by itself
    made = modal.create(order_of(modal, tmp_path))
    assert [one.id for one in cloud.billing()] == [made.id]


def test_a_name_that_is_shown_late_is_waited_for(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    cloud.list_delay_s = 8.0
    cloud.faults.append(Fault("SandboxCreate", is_after=True))
    made = modal.create(order_of(modal, tmp_path))
    assert [one.id for one in cloud.billing()] == [made.id]


def test_silence_after_create_is_not_taken_for_nothing(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    request = order_of(modal, tmp_path)
    cloud.faults += [Fault("SandboxCreate", is_after=True, times=9)]
    cloud.faults += [Fault("SandboxGetFromNameV2", times=10**6), Fault("SandboxGetFromName", times=10**6)]
    with pytest.raises((CreateFailed, ProviderSilent)):
        modal.create(request)
    cloud.faults.clear()
    for instance in modal.list_owned():
        assert instance.mark == MARK, "the mark finds whatever exists"


@pytest.mark.acceptance(57)
def test_a_full_workspace_is_no_offer_and_leaves_nothing(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    cloud.max_sandboxes = 0
    with pytest.raises(NoOffer, match="cannot start T4") as caught:
        modal.create(order_of(modal, tmp_path))
    assert "limit" in caught.value.why
    assert cloud.sandboxes == {}


@pytest.mark.acceptance(57)
def test_the_queue_has_an_end_and_what_waited_is_taken_back(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    cloud.capacity["T4"] = 0
    modal.configure({"queue": 1.5})
    with pytest.raises(NoOffer, match="had no free T4 within"):
        modal.create(order_of(modal, tmp_path))
    assert [one.is_running for one in cloud.sandboxes.values()] == [False]
    cloud.capacity["T4"] = 8
    cloud.tick()
    assert cloud.billing() == [], "it does not start when a card comes free after all"


def test_create_stops_waiting_in_the_queue_when_the_limit_leaves_no_time_to_train(
    cloud: Cloud, modal: Modal, tmp_path: Path
) -> None:
    """The agent counts from the create call on: a sandbox that begins later would boot, bill for that, and end."""
    cloud.capacity["T4"] = 0
    modal.configure({"queue": 30})
    wanted = order_of(modal, tmp_path, time_limit_s=2.0, started_at=modal._world.now())
    began = time.monotonic()
    with pytest.raises(NoOffer, match="had no free T4 within") as caught:
        modal.create(wanted)
    assert time.monotonic() - began < 15
    assert "--spend-limit" in caught.value.fix
    assert "cloud.modal.queue" not in caught.value.fix
    assert [one.is_running for one in cloud.sandboxes.values()] == [False]


def test_what_waits_in_the_queue_is_ours_to_see_and_to_end(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    """The launching process was killed while it waited: its mark is all that is known."""
    cloud.capacity["T4"] = 0
    wanted = modal._wanted(order_of(modal, tmp_path), tmp_path / "parcel")
    definition = modal_double.api_pb2.Sandbox(name=MARK, timeout_secs=900)
    definition.resources.gpu_config.gpu_type, definition.resources.gpu_config.count = "T4", 1
    tags = [modal_double.api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in wanted["tags"].items()]
    cloud.create(cloud.apps["homing"], definition, tags, {}, False)
    (found,) = modal.list_owned()
    assert (found.mark, found.billing) == (MARK, "yes"), "not known to be free is billing"
    modal.destroy(found.id)
    cloud.capacity["T4"] = 8
    cloud.tick()
    assert cloud.billing() == []


@pytest.mark.acceptance(140)
def test_what_a_lost_ledger_knew_is_found_by_reconcile_and_ended(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    made = modal.create(order_of(modal, tmp_path))
    found = end_what_was_forgotten(made, tmp_path / "home", OWNER, Skipping(cloud))
    assert [each.thing for each in found] == ["instance"]
    assert cloud.billing() == []


def test_a_failed_image_build_is_reported_before_anything_bills(cloud: Cloud, modal: Modal) -> None:
    assert isinstance(modal, Preparing)
    cloud.build_problem = "No solution found when resolving dependencies: torch==99"
    with pytest.raises(Unwelcome, match="Image") as caught:
        modal.prepare("modal:runs")
    assert cloud.sandboxes == {}
    assert caught.value.fix


def test_the_image_is_made_of_the_versions_here_and_of_no_sdk_where_the_store_is_mounted(
    cloud: Cloud, modal: Modal
) -> None:
    modal.prepare("modal:runs")
    messages = "\n".join(line for commands in cloud.images.values() for line in commands)
    assert "torch==" in messages
    assert "numpy==" in messages
    assert "modal==" not in messages
    assert "--require-hashes" in messages
    assert "nvidia-cudnn-cu13==" in messages, "what torch needs has its hashes too"
    cloud.images.clear()
    modal.prepare("s3://bucket")
    assert "boto3==" in "\n".join(line for commands in cloud.images.values() for line in commands)


def test_a_persons_own_image_is_a_machine_with_python_where_the_environment_is_found_or_made(
    cloud: Cloud, modal: Modal
) -> None:
    assert modal.place(MARK).python == modal.place(MARK).base_python
    modal.configure({"image": "ghcr.io/me/training:1"})
    place = modal.place(MARK)
    assert place.python.endswith("/env/bin/python")
    assert place.base_python == "python3"
    modal.prepare("s3://bucket")
    messages = "\n".join(line for commands in cloud.images.values() for line in commands)
    assert "FROM ghcr.io/me/training:1" in messages
    assert "torch" not in messages


# --- what it cannot know is not gone ---


def test_a_list_that_fails_raises_and_is_never_empty(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    modal.create(order_of(modal, tmp_path))
    for method in ("SandboxListV2", "AppGetOrCreate", "SandboxTagsGet"):
        modal._tags.clear()
        cloud.faults.append(Fault(method, times=10**6))
        with pytest.raises(ProviderSilent):
            modal.list_owned()
        cloud.faults.clear()
    assert len(modal.list_owned()) == 1


def test_one_that_ends_between_the_list_and_the_look_is_no_machine_without_a_mark(
    cloud: Cloud, modal: Modal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a mark its ledger line would belong to no home, and no command would ever show it again.
    modal.create(order_of(modal, tmp_path))
    modal._tags.clear()
    monkeypatch.setattr(ModalApi, "tags", lambda api, sandbox: {})
    assert modal.list_owned() == []


def test_an_sdk_that_speaks_otherwise_than_this_homing_knows_is_silent_and_not_empty(
    cloud: Cloud, modal: Modal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modal.create(order_of(modal, tmp_path))
    monkeypatch.setattr(ModalApi, "list", lambda api, app, tags: [object()])
    with pytest.raises(ProviderSilent, match="may still be billing"):
        modal.list_owned()


def test_a_burst_of_errors_is_waited_out(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    made = modal.create(order_of(modal, tmp_path))
    modal._looked.clear()
    cloud.faults.append(Fault("SandboxWait", Status.RESOURCE_EXHAUSTED, times=2))
    assert modal.describe(made.id).state == "ready"
    cloud.faults.append(Fault("SandboxTerminate", times=5))
    modal.destroy(made.id)
    assert cloud.billing() == []


def test_more_than_a_page_is_listed(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    marks = [make_mark(OWNER, f"many-{number}", 1) for number in range(5)]
    for mark in marks:
        modal.create(order_of(modal, tmp_path, mark=mark))
    assert sorted(instance.mark for instance in modal.list_owned()) == marks


def test_a_refused_token_says_where_to_get_one_and_hides_it(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODAL_TOKEN_ID", "ak-wrong0token")
    provider = Modal(home=tmp_path, owner=OWNER, world=Skipping(cloud))
    for call in (provider.list_owned, lambda: provider.offers(Needs())):
        with pytest.raises(ProviderRefused, match="rejected the token") as caught:
            call()
        assert "modal setup" in caught.value.fix
        assert "ak-wrong0token" not in str(caught.value)


def test_an_unreachable_modal_raises_provider_silent_instead_of_listing_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODAL_SERVER_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("MODAL_TOKEN_ID", "ak-unknown")
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-unknown")
    monkeypatch.setattr(client, "_OPEN_S", 0.5)
    with pytest.raises(ProviderSilent, match=r"could not connect\.") as caught:
        Modal(home=tmp_path, owner=OWNER, world=World()).list_owned()
    assert "may still be billing" in caught.value.why
    with pytest.raises(StoreError, match="modal:runs cannot be reached"):
        open_store("modal:runs", World()).list("")


def test_without_an_account_it_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "none.toml"))
    assert not Modal.is_configured(tmp_path, World())
    with pytest.raises(UsageError, match="No Modal account") as caught:
        Modal(home=tmp_path, owner=OWNER, world=World()).offers(Needs())
    assert "modal setup" in caught.value.fix
    (tmp_path / "none.toml").write_text("[default]\n")
    assert Modal.is_configured(tmp_path, World())


def test_the_adapter_is_imported_without_the_sdk() -> None:
    code = "import sys, homing.cloud.providers.modal.provider, homing.store.modal.store; print('modal' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- secrets ---


def test_the_accounts_token_is_nowhere_near_the_sandbox(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    cloud.add_volume("runs")
    made = order_of(modal, tmp_path, store="modal:runs/here")
    keys = {"MODAL_TOKEN_ID": TOKEN_ID, "MODAL_TOKEN_SECRET": TOKEN_SECRET, "MOSS_API_KEY": SECRET}
    order = dataclasses.replace(made.order, secrets=keys)
    order = dataclasses.replace(order, boot=dataclasses.replace(order.boot, secret_names=sorted(keys)))
    request = modal.plan(made.offer, order)
    one = cloud.sandboxes[modal.create(request).id]
    everything = [one.definition.SerializeToString(), json.dumps([one.tags, one.env, request.to_dict()]).encode()]
    everything += list(cloud.data.values())
    for canary in (TOKEN_ID, TOKEN_SECRET):
        assert [data for data in everything if canary.encode() in data] == []
    assert one.env["MOSS_API_KEY"] == SECRET, "the store's own keys come as a Secret"
    assert SECRET.encode() not in one.definition.SerializeToString()
    assert request.order.boot.store == f"modal:runs/here?mount={create_request.MOUNT}"
    assert [mount.mount_path for mount in one.definition.volume_mounts] == [create_request.MOUNT]


def test_a_request_that_would_carry_the_token_is_never_sent(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    made = order_of(modal, tmp_path)
    order = dataclasses.replace(made.order, secrets={"MODAL_TOKEN_SECRET": TOKEN_SECRET})
    with pytest.raises(AssertionError, match="token would leave this computer"):
        modal.create(dataclasses.replace(made, order=order))
    assert cloud.sandboxes == {}


def test_another_cloud_gets_no_token_for_a_volume_either(
    homing_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rented machine that is not Modal's could reach a Volume only with the account's token."""
    home = Home(homing_home, World())
    offer = home.provider("local").offers(Needs())[0]
    run = dataclasses.replace(make_run(tmp_path), store="modal:runs")
    order = LaunchOrder(run, "name: moss\n", is_prepared=True, offer=offer, spend_limit_usd=Decimal("1.00"))
    draft(order, home)  # this computer is where the token is
    monkeypatch.setattr(home.provider("local"), "cannot", {"file_store": "It is far away."}, raising=False)
    with pytest.raises(UsageError, match="cannot reach modal:runs") as caught:
        draft(order, home)
    assert "token" in caught.value.why


def test_what_was_written_down_for_the_create_call_is_gone_after_it(modal: Modal, tmp_path: Path) -> None:
    modal.create(order_of(modal, tmp_path))
    assert list((tmp_path / "home").rglob("*.json")) == []


# --- the first time ---


def test_doctor_checks_whether_modal_reports_rates_and_changes_nothing(cloud: Cloud, modal: Modal) -> None:
    assert [check.state for check in modal.checks()] == ["ok"]
    cloud.has_rates = False
    (check,) = modal.checks()
    assert check.state == "warning"
    assert check.fix
    assert cloud.apps == {}


def test_setup_makes_app_and_image_and_may_be_repeated(cloud: Cloud, modal: Modal) -> None:
    assert [step.is_done for step in modal.setup_steps()] == [False, False]
    for _ in range(2):
        for step in modal.setup_steps():
            step.do()
    assert list(cloud.apps) == ["homing"]
    assert [step.is_done for step in modal.setup_steps()] == [True, False], "Modal itself finds an image again"
    images = len(cloud.images)
    modal.setup_steps()[1].do()
    assert len(cloud.images) == images
    assert cloud.sandboxes == {}


# --- its life ---


@pytest.fixture
def living(cloud: Cloud, modal: Modal, tmp_path: Path) -> str:
    """A sandbox that runs its command for real, with a Volume."""
    cloud.runs_commands = True
    cloud.add_volume("runs").write("seen", b"1")
    return modal.create(order_of(modal, tmp_path, store="modal:runs")).id


def test_its_first_command_starts_the_agent_and_lives_as_long_as_it(
    cloud: Cloud, modal: Modal, living: str, tmp_path: Path
) -> None:
    box = cloud.sandboxes[living].box
    assert box is not None
    work = box.folder / "root" / "work"
    _until(lambda: (work / "entry.pid").exists())
    assert json.loads((work / "boot.json").read_text())["work_dir"] == str(work), (
        "boot.json has the paths of the sandbox"
    )
    # As the agent ends billing: by the very command that boot.json holds.
    end = json.loads((work / "boot.json").read_text())["end_billing"]["argv"]
    subprocess.run(end, check=True)
    _until(lambda: not cloud.billing())
    modal._looked.clear()
    assert "exited with code 0" in modal.describe(living).detail
    assert box.processes() == 0


@pytest.mark.slow
def test_it_is_over_when_neither_agent_nor_dead_man_is_left(cloud: Cloud, living: str) -> None:
    box = cloud.sandboxes[living].box
    assert box is not None
    _until(lambda: box.processes() >= 2)
    time.sleep(2.5)
    assert cloud.billing(), "it lives as long as the agent does"
    box.kill("agent.zip")
    _until(lambda: not cloud.billing())
    assert "SUCCESS" in str(cloud.sandboxes[living].result), "its command has found out, and ended"


@pytest.mark.acceptance(112)
def test_its_log_is_read_while_it_lives_and_when_it_died(cloud: Cloud, modal: Modal, living: str) -> None:
    box = cloud.sandboxes[living].box
    assert box is not None
    with (box.folder / "log").open("a") as log:
        log.write("CUDA out of memory\n")
    assert "CUDA out of memory" in modal.log(living)
    modal.destroy(living)
    assert "CUDA out of memory" in modal.log(living)
    cloud.faults.append(Fault("AppFetchLogs", times=10**6))
    assert "could not read" in modal.log(living)


def test_what_home_writes_later_is_shown_to_it(cloud: Cloud, modal: Modal, living: str) -> None:
    assert isinstance(modal, Delivering)
    box, volume = cloud.sandboxes[living].box, cloud.volume("runs")
    assert box is not None
    mount = box.folder / "root" / "store"
    assert (mount / "seen").read_bytes() == b"1"
    volume.write("request.json", b"stop")
    time.sleep(0.3)
    assert not (mount / "request.json").exists(), "a sandbox sees its Volume as it was"
    (mount / "own").write_bytes(b"not committed yet")
    modal.deliver(living)
    assert (mount / "request.json").read_bytes() == b"stop"
    assert (mount / "own").exists()


def test_a_commit_waits_for_an_open_file_and_then_reports_it(
    cloud: Cloud, modal: Modal, living: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.cloud.providers.modal.provider._DELIVER_S", 6.0)
    box = cloud.sandboxes[living].box
    assert box is not None
    with (
        (box.folder / "root" / "store" / "seen").open("rb"),
        pytest.raises(ProviderSilent, match="was not delivered") as e,
    ):
        modal.deliver(living)
    assert "open files" in e.value.why
    modal.deliver(living)


def test_no_control_request_is_sent_to_a_sandbox_that_is_gone_or_has_no_volume(
    cloud: Cloud, modal: Modal, tmp_path: Path
) -> None:
    plain = modal.create(order_of(modal, tmp_path))
    modal.deliver(plain.id)
    modal.destroy(plain.id)
    modal.deliver(plain.id)
    modal.deliver("sb-never")
    assert "TaskReloadVolumes" not in cloud.calls


def test_an_error_of_any_kind_has_a_fix(cloud: Cloud, modal: Modal, tmp_path: Path) -> None:
    request = order_of(modal, tmp_path)
    for status in (Status.INVALID_ARGUMENT, Status.PERMISSION_DENIED, Status.RESOURCE_EXHAUSTED, Status.UNAVAILABLE):
        cloud.faults = [Fault("SandboxCreate", status, times=10**6)]
        with pytest.raises(HomingError) as caught:
            modal.create(request)
        assert caught.value.why
        assert caught.value.fix
    cloud.faults = []
    assert cloud.sandboxes == {}


def _until(check: object, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)


# --- the account ---

OTHER_TOKEN, NEW_TOKEN = "ak-other000token", "ak-second00token"


def test_what_the_token_of_another_workspace_does_not_show_is_not_gone(
    cloud: Cloud, modal: Modal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.workspaces[OTHER_TOKEN] = Cloud(cloud.folder, name="team")
    made = modal.create(order_of(modal, tmp_path))
    line = another_key_ends_nothing(
        made,
        tmp_path / "home",
        OWNER,
        Skipping(cloud),
        use=lambda: monkeypatch.setenv("MODAL_TOKEN_ID", OTHER_TOKEN),
        use_first=lambda: monkeypatch.setenv("MODAL_TOKEN_ID", TOKEN_ID),
    )
    assert line.account == "double"


def test_a_new_token_of_the_same_workspace_is_the_same_account_and_is_asked_for_once(
    cloud: Cloud, modal: Modal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [modal.account() for _ in range(3)] == ["double"] * 3
    assert cloud.calls.count("WorkspaceNameLookup") == 1
    cloud.workspaces[NEW_TOKEN] = cloud
    monkeypatch.setenv("MODAL_TOKEN_ID", NEW_TOKEN)
    assert Modal(home=tmp_path / "home", owner=OWNER, world=Skipping(cloud)).account() == "double"


def test_another_environment_of_the_workspace_is_another_account_and_yet_ends_what_it_sees_by_its_id(
    cloud: Cloud, modal: Modal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an app is looked up by its name, in another environment, nothing is listed."""
    made = modal.create(order_of(modal, tmp_path))
    home = line_of(made, tmp_path / "home", OWNER, Skipping(cloud))
    monkeypatch.setenv("MODAL_ENVIRONMENT", "dev")
    cloud.apps.clear()
    elsewhere = Home(tmp_path / "home", Skipping(cloud))
    assert elsewhere.provider("modal").account() == "double/dev"
    assert refresh(elsewhere) == []
    assert home.ledger.lines()[0].destroyed_at is None
    destroy_lines(elsewhere, elsewhere.ledger.lines())
    assert cloud.billing() == []
    assert home.ledger.lines()[0].state == "gone"


def test_a_workspace_that_cannot_be_asked_for_is_silence(cloud: Cloud, modal: Modal) -> None:
    cloud.faults.append(Fault("WorkspaceNameLookup", times=99))
    with pytest.raises(ProviderSilent):
        modal.account()
