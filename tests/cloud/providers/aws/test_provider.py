"""The adapter of AWS: real boto3 on World, before moto with the manners of the real one, on a virtual clock."""

from __future__ import annotations

import dataclasses
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.accounts import another_key_ends_nothing
from tests.contracts.figures import Spoiled, check_absurd_figures
from tests.contracts.owners import owner_for
from tests.contracts.providers import ProviderContract
from tests.contracts.reconcile import end_what_was_forgotten
from tests.doubles.absurd import figures_of, spoil
from tests.doubles.aws import ACCOUNT, AwsDouble, NoMachines, Settings, Strike, _xml

from homing.cloud.ledger.mark import make_mark
from homing.cloud.providers.aws.api import AwsRefused
from homing.cloud.providers.aws.create_request import ends_in_s
from homing.cloud.providers.aws.provider import Aws, _ended_at
from homing.cloud.providers.base import Instance, Needs, Provider, Request
from homing.cloud.providers.rest import Unwelcome
from homing.errors import CreateFailed, NoOffer, ProviderRefused, ProviderSilent, StartTimeout, UsageError
from homing.gpus import find_gpu
from homing.world import Completed, HttpRequest, HttpResponse, World

OWNER = owner_for(__name__)
MARK = make_mark(OWNER, "moss-20260101-000000-abcd", 1)
SECRET_KEY = "canary/of+the/account"
SETTINGS: dict[str, Any] = {"ssh_from": "203.0.113.7", "instance_types": ["g5.xlarge", "g6.xlarge"]}


class AwsWorld(World):
    """A clock that is a number, and a network that ends in the double."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.t = 1_790_000_000.0  # true, and EC2's
        self.skew_s = 0.0  # of the clock at home
        self.slept: list[float] = []
        self.machines = NoMachines()
        self.double = AwsDouble(lambda: self.t, self.machines, settings)

    def now(self) -> float:
        return self.t + self.skew_s

    def monotonic(self) -> float:
        return self.t

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.t += seconds

    def http(self, request: HttpRequest) -> HttpResponse:
        return self.double.handle(request)


@pytest.fixture(autouse=True)
def _account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIACANARY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def open_aws(home: Path, world: World, owner: str = OWNER, **settings: Any) -> Aws:
    aws = Aws(home=home, owner=owner, world=world)
    aws.configure({**SETTINGS, **settings})
    return aws


class TestAws(ProviderContract):
    @pytest.fixture
    def world(self) -> AwsWorld:
        return AwsWorld()

    @pytest.fixture
    def provider(self, owner: str, world: AwsWorld, homing_home: Path) -> Provider:
        return open_aws(homing_home, world, owner)

    @pytest.fixture
    def stranger(self, world: AwsWorld, homing_home: Path) -> Provider:
        return open_aws(homing_home, world, "zzz999")


class Rig:
    """A provider before a double with these manners, and the request that launch would make."""

    def __init__(self, tmp_path: Path, *strikes: Strike, settings: Settings | None = None, **keys: Any) -> None:
        self.world = AwsWorld(settings)
        self.double, self.machines = self.world.double, self.world.machines
        self.home = tmp_path / "home"
        tmp_path.mkdir(exist_ok=True)
        self.provider = open_aws(self.home, self.world, **keys)
        self.request: Request = self.make_request(tmp_path)
        self.double.seen.clear()
        self.double.strike(*strikes)

    def make_request(self, tmp_path: Path) -> Request:
        request = ProviderContract().make_request(self.provider, MARK, tmp_path)
        boot = dataclasses.replace(request.order.boot, rate_usd_per_hour=str(request.offer.rate_usd_per_hour))
        return dataclasses.replace(request, order=dataclasses.replace(request.order, boot=boot))

    def create(self) -> Instance:
        return self.provider.create(self.request)

    def offered(self, name: str) -> Rig:
        offer = next(offer for offer in self.provider.offers(Needs()) if offer.name == name)
        self.request = dataclasses.replace(self.request, offer=offer)
        self.double.seen.clear()
        return self

    def form(self, action: str) -> dict[str, str]:
        return [form for name, form in self.double.asked if name == action][-1]


# --- absurd figures ---


@pytest.mark.regression("provider-figures")
@pytest.mark.slow
def test_absurd_figures_are_no_bill_and_keep_nothing_from_being_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    values, seen, number = dict[str, Any](), set[str](), [0]

    def http(request: HttpRequest) -> HttpResponse:
        reply = rig.double.handle(request)
        seen.update(figures_of(reply))
        return spoil(reply, values)

    def create() -> Instance:
        number[0] += 1
        mark = make_mark(OWNER, "moss-20260101-000000-abcd", number[0])
        order = dataclasses.replace(rig.request.order, mark=mark)
        return open_aws(rig.home, rig.world).create(dataclasses.replace(rig.request, mark=mark, order=order))

    def names(provider: Provider) -> set[str]:
        seen.clear()
        (made,) = provider.list_owned()
        provider.describe(made.id)
        provider.destroy(made.id)
        return set(seen)

    def put(messages: dict[str, Any]) -> None:
        values.clear()
        values.update(messages)

    monkeypatch.setattr(rig.world, "http", http)
    cloud = Spoiled(
        lambda: open_aws(rig.home, rig.world),
        create,
        names,
        put,
        lambda: len(rig.double.living()),
        lambda: rig.world.t,
        may_be_illegible=True,  # botocore reads the numbers and times of an answer as it parses it
    )
    check_absurd_figures(cloud, ["NaN", "1e999999999"])


@pytest.mark.regression("absurd-bills")
@pytest.mark.parametrize("text", ["NaN", "abc", "-1", "1e26", "Infinity"])
def test_an_invalid_rate_tag_is_reported_and_the_instance_is_still_listed(tmp_path: Path, text: str) -> None:
    rig = Rig(tmp_path)
    made, real = rig.create(), rig.double.handle
    rate = str(rig.request.offer.rate_usd_per_hour).encode()
    rig.world.http = lambda request: dataclasses.replace(  # type: ignore[method-assign]
        reply := real(request), body=reply.body.replace(b"<value>" + rate + b"<", f"<value>{text}<".encode())
    )
    (found,) = open_aws(rig.home, rig.world).list_owned()
    assert found.id == made.id
    assert found.rate_usd_per_hour == 0, "the ledger keeps the rate that it has"
    assert ["homing-rate" in problem for problem in found.problems] == [True]


# --- offers ---


@pytest.mark.acceptance(58, 129)
def test_spot_is_offered_by_its_cheapest_zone_and_by_region_and_the_rate_is_the_most_an_hour_can_cost(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, instance_types=["g5.xlarge"], spot_headroom=0.1)
    offers = {offer.name: offer for offer in rig.provider.offers(Needs())}
    assert list(offers) == ["us-east-1b/g5.xlarge/spot", "us-east-1/g5.xlarge/spot", "us-east-1/g5.xlarge/on-demand"]
    assert {offer.host_bytes for offer in offers.values()} == {16 * 2**30}, "memory of the machine, not of the card"
    neighbor = Decimal("0.0214")  # 100 GB of gp3 and an address, rounded down
    cheap, all_zones, listed = offers.values()
    assert Decimal("1.006") * Decimal("0.35") * Decimal("1.1") + neighbor <= cheap.rate_usd_per_hour < Decimal("0.41")
    assert (
        Decimal("1.006") * Decimal("0.55") * Decimal("1.1") + neighbor <= all_zones.rate_usd_per_hour < Decimal("0.64")
    )
    assert Decimal("1.006") + neighbor <= listed.rate_usd_per_hour < Decimal("1.03")
    assert cheap.is_spot
    assert not listed.is_spot
    assert (listed.device, listed.num_gpus, listed.as_of) == ("A10G", 1, None)


@pytest.mark.acceptance(60)
def test_without_spot_only_what_cannot_be_taken_away_is_offered(tmp_path: Path) -> None:
    rig = Rig(tmp_path, spot=False)
    assert {offer.is_spot for offer in rig.provider.offers(Needs())} == {False}


def test_two_cards_of_the_same_name_are_distinguished_by_their_memory(tmp_path: Path) -> None:
    rig = Rig(tmp_path, instance_types=["p4d.24xlarge", "p3dn.24xlarge", "p5.48xlarge"])
    cards = {offer.instance_type: (offer.device, offer.num_gpus) for offer in rig.provider.offers(Needs())}
    assert cards == {"p4d.24xlarge": ("A100-40GB", 8), "p3dn.24xlarge": ("V100-32GB", 8), "p5.48xlarge": ("H100", 8)}


@pytest.mark.acceptance(58)
@pytest.mark.regression("old-gpus-offered")
def test_every_family_that_is_offered_has_gpus_that_we_know_and_our_torch_supports(tmp_path: Path) -> None:
    found = Rig(tmp_path, spot=False, instance_types=[]).provider.offers(Needs())
    families = {offer.instance_type.partition(".")[0]: find_gpu(offer.device) for offer in found}
    assert "p3dn" not in families
    assert families["g7e"] is not None
    assert families["g7e"].name == "RTXPRO6000"
    assert all(gpu is not None and gpu.compute_capability >= (7, 5) for gpu in families.values())


def test_without_access_to_the_price_list_the_offer_uses_a_dated_rate_and_says_so(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(has_price_list=False), instance_types=["g5.xlarge", "g5.12xlarge"])
    listed = [offer for offer in rig.provider.offers(Needs()) if not offer.is_spot]
    assert [offer.instance_type for offer in listed] == ["g5.xlarge"]  # the table has no other
    assert listed[0].as_of is not None
    assert "2026-08-22" in listed[0].rate_source
    assert "pricing:GetProducts" in listed[0].rate_source


def test_a_dated_rate_is_not_used_for_a_region_with_other_prices(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(has_price_list=False))
    rig.provider.configure({**SETTINGS, "regions": ["eu-central-1"]})
    assert all(offer.is_spot for offer in rig.provider.offers(Needs()))


def test_what_is_over_the_quota_is_not_offered(tmp_path: Path) -> None:
    quotas = {"L-DB2E81BA": 0.0, "L-3819A6DF": 64.0}
    rig = Rig(tmp_path, settings=Settings(quotas=quotas))
    assert {offer.is_spot for offer in rig.provider.offers(Needs())} == {True}


def test_the_error_of_an_account_without_quota_names_the_quota_and_its_page(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.double.settings.quotas = {"L-DB2E81BA": 0.0, "L-3819A6DF": 0.0}
    fresh = open_aws(rig.home, rig.world)
    with pytest.raises(ProviderRefused) as caught:
        fresh.offers(Needs())
    assert "L-3819A6DF" in caught.value.why
    assert "4 vCPUs" in caught.value.why
    page = "https://us-east-1.console.aws.amazon.com/servicequotas/home/services/ec2/quotas/L-3819A6DF"
    assert page in caught.value.fix


def test_a_quota_that_may_not_be_seen_hides_no_offer(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(may_see_quotas=False))
    assert len(rig.provider.offers(Needs())) == 6


def test_a_machine_without_a_card_is_offered_only_by_its_very_name(tmp_path: Path) -> None:
    rig = Rig(tmp_path, instance_types=["m5.large"])
    assert {(offer.device, offer.num_gpus) for offer in rig.provider.offers(Needs())} == {("CPU", 0)}
    rig.provider.configure({**SETTINGS, "instance_types": ["m5.*"]})
    assert rig.provider.offers(Needs()) == []


def test_a_larger_disk_is_in_the_rate(tmp_path: Path) -> None:
    rig = Rig(tmp_path, instance_types=["g5.xlarge"], spot=False)
    small = rig.provider.offers(Needs())[0]
    large = rig.provider.offers(Needs(disk_bytes=900 * 10**9))[0]
    assert large.disk_bytes >= 900 * 10**9
    assert large.rate_usd_per_hour - small.rate_usd_per_hour >= Decimal("0.13")


@pytest.mark.acceptance(59)
def test_offers_fail_without_a_configured_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="No AWS region is configured"):
        open_aws(tmp_path, AwsWorld()).offers(Needs())


# --- what is asked for ---


def test_the_call_asks_for_all_that_ends_billing_and_guards_the_machine(tmp_path: Path) -> None:
    rig = Rig(tmp_path).offered("us-east-1b/g5.xlarge/spot")
    rig.create()
    form = rig.form("RunInstances")
    assert form["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert form["MetadataOptions.HttpTokens"] == "required"
    assert form["MetadataOptions.HttpPutResponseHopLimit"] == "2"
    assert (form["MinCount"], form["MaxCount"]) == ("1", "1")
    assert form["ImageId"] == "ami-20260905"  # the newest by its date
    assert int(form["BlockDeviceMapping.1.Ebs.VolumeSize"]) == 100
    assert form["BlockDeviceMapping.1.Ebs.DeleteOnTermination"] == "true"
    assert form["InstanceMarketOptions.SpotOptions.SpotInstanceType"] == "one-time"
    most = Decimal(form["InstanceMarketOptions.SpotOptions.MaxPrice"])
    assert Decimal("1.006") * Decimal("0.35") < most < rig.request.offer.rate_usd_per_hour
    kinds = {value for name, value in form.items() if name.endswith(".ResourceType")}
    assert kinds == {"instance", "volume", "network-interface", "spot-instances-request"}
    assert sum(value == MARK for value in form.values()) == 8  # its name and its mark, on each of them
    assert 32 <= len(form["ClientToken"]) <= 64


def test_on_demand_names_no_market(tmp_path: Path) -> None:
    rig = Rig(tmp_path).offered("us-east-1/g5.xlarge/on-demand")
    rig.create()
    assert not any(name.startswith("InstanceMarketOptions") for name in rig.form("RunInstances"))


def test_the_first_script_sets_the_systems_own_timer_inside_the_limit(tmp_path: Path) -> None:
    rig = Rig(tmp_path).offered("us-east-1b/g5.xlarge/spot")
    rate = rig.request.offer.rate_usd_per_hour
    boot = dataclasses.replace(rig.request.order.boot, rate_usd_per_hour=str(rate), started_at=rig.world.t)
    rig.request = dataclasses.replace(rig.request, order=dataclasses.replace(rig.request.order, boot=boot))
    made = rig.create()
    script = rig.machines.scripts[made.id.rpartition("/")[2]]
    (minutes,) = (int(line.partition("=")[2]) for line in script.splitlines() if line.startswith("SYSTEM_TIMER_MAX_M="))
    assert 0 < Decimal(minutes) / 60 * rate <= Decimal(boot.spend_limit_usd or 0)
    assert Decimal(minutes + 5) / 60 * rate > Decimal(boot.spend_limit_usd or 0)  # and not much too early
    assert "shutdown -h now" in script


def test_the_keys_of_the_account_are_nowhere_on_the_machine_or_in_what_is_shown(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    order = dataclasses.replace(
        rig.request.order,
        secrets={"AWS_ACCESS_KEY_ID": "AKIACANARY", "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": "us-east-1"},
        boot=dataclasses.replace(
            rig.request.order.boot,
            store="s3://bucket/homing",
            secret_names=["AWS_ACCESS_KEY_ID", "AWS_REGION", "AWS_SECRET_ACCESS_KEY"],
        ),
    )
    rig.request = rig.provider.plan(rig.request.offer, order)
    assert rig.request.order.secrets == {}
    assert rig.request.order.boot.secret_names == []
    assert rig.request.order.boot.env["AWS_DEFAULT_REGION"] == "us-east-1"
    made = rig.create()
    script = rig.machines.scripts[made.id.rpartition("/")[2]]
    shown = json.dumps(rig.request.to_dict()) + repr(rig.request) + script
    assert SECRET_KEY not in shown
    assert "AKIACANARY" not in shown


def test_its_role_opens_one_prefix_of_one_bucket_and_nothing_else(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    boot = dataclasses.replace(rig.request.order.boot, store="s3://bucket/some/prefix")
    rig.request = rig.provider.plan(rig.request.offer, dataclasses.replace(rig.request.order, boot=boot))
    rig.create()
    from moto.iam.models import iam_backends

    role = iam_backends["123456789012"]["aws"].get_role(MARK)
    rules = json.loads(role.policies["one-prefix"])["Statement"]
    assert {rule["Effect"] for rule in rules} == {"Allow"}
    assert rules[0]["Resource"] == "arn:aws:s3:::bucket"
    assert rules[0]["Condition"] == {"StringLikeIfExists": {"s3:prefix": ["some/prefix/*"]}}
    assert rules[1]["Resource"] == "arn:aws:s3:::bucket/some/prefix/*"
    assert all(action.startswith("s3:") for rule in rules for action in rule["Action"])
    assert role.path == f"/homing/{OWNER}/"


def test_a_store_that_no_role_opens_gets_no_role(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create()
    assert "IamInstanceProfile.Name" not in rig.form("RunInstances")
    assert rig.double.count("CreateRole") == 0


@pytest.mark.parametrize("store", ["hf:me/models", "s3://bucket/x?endpoint=https://r2.example.org"])
def test_secrets_for_a_store_elsewhere_need_ssh_and_without_it_nothing_is_started(tmp_path: Path, store: str) -> None:
    rig = Rig(tmp_path)
    rig.provider.configure({**SETTINGS, "ssh_from": ""})
    boot = dataclasses.replace(rig.request.order.boot, store=store)
    order = dataclasses.replace(rig.request.order, boot=boot, secrets={"HF_TOKEN": "hf_canary"})
    with pytest.raises(UsageError) as caught:
        rig.provider.plan(rig.request.offer, order)
    assert "HF_TOKEN" in caught.value.why
    assert "hf_canary" not in str(caught.value)
    assert "cloud.aws.ssh_from" in caught.value.fix
    assert rig.double.lives == {}


def test_ssh_is_open_to_the_configured_address_only_and_closed_without_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create()
    rule = rig.form("AuthorizeSecurityGroupIngress")
    assert rule["IpPermissions.1.IpRanges.1.CidrIp"] == "203.0.113.7/32"
    assert (rule["IpPermissions.1.FromPort"], rule["IpPermissions.1.ToPort"]) == ("22", "22")
    connection = rig.provider.connection(rig.provider.list_owned()[0].id)
    assert connection is not None
    assert connection.known_hosts.startswith("127.0.0.1 ssh-ed25519 ")


@pytest.mark.acceptance(59)
def test_a_key_pair_that_is_not_there_is_named_and_none_is_made(tmp_path: Path) -> None:
    rig = Rig(tmp_path, key_name="lost")
    with pytest.raises(ProviderRefused, match="no key pair 'lost'") as caught:
        rig.create()
    assert "cloud.aws.key_name" in caught.value.fix
    assert rig.double.count("ImportKeyPair") + rig.double.count("CreateKeyPair") == 0
    rig = Rig(tmp_path / "two", key_name="my-laptop")
    rig.create()
    assert rig.form("RunInstances")["KeyName"] == "my-laptop"


def test_the_notice_is_looked_for_with_a_token_and_only_on_spot(tmp_path: Path) -> None:
    rig = Rig(tmp_path, metadata_url="http://127.0.0.1:9/imds/")
    spot = rig.offered("us-east-1b/g5.xlarge/spot").request
    boot = rig.provider.plan(spot.offer, spot.order).order.boot
    assert boot.notice_url == "http://127.0.0.1:9/imds/latest/meta-data/spot/instance-action"
    assert boot.notice_token_url == "http://127.0.0.1:9/imds/latest/api/token"
    listed = rig.offered("us-east-1/g5.xlarge/on-demand").request
    assert rig.provider.plan(listed.offer, listed.order).order.boot.notice_url == ""


# --- zones, quota, rate ---


@pytest.mark.acceptance(60)
def test_without_room_the_next_zone_is_tried_and_never_a_dearer_one_than_was_offered(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(no_room={"us-east-1b", "us-east-1d"})).offered("us-east-1/g5.xlarge/spot")
    made = rig.create()
    assert [life.zone for life in rig.double.living()] == ["us-east-1a"]
    assert rig.double.count("RunInstances") == 3
    assert made.rate_usd_per_hour == rig.request.offer.rate_usd_per_hour
    tokens = [form["ClientToken"] for action, form in rig.double.asked if action == "RunInstances"]
    assert len(set(tokens)) == 3


def test_the_cheapest_zones_offer_goes_to_no_other_zone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(no_room={"us-east-1b"})).offered("us-east-1b/g5.xlarge/spot")
    with pytest.raises(NoOffer) as caught:
        rig.create()
    assert "sufficient g5.xlarge capacity" in caught.value.why
    assert "--no-spot" in caught.value.fix
    assert rig.double.lives == {}


@pytest.mark.acceptance(58)
def test_the_error_names_every_zone_if_none_has_capacity(tmp_path: Path) -> None:
    zones = {f"us-east-1{letter}" for letter in "abcd"}
    rig = Rig(tmp_path, settings=Settings(no_room=zones)).offered("us-east-1/g5.xlarge/on-demand")
    with pytest.raises(NoOffer) as caught:
        rig.create()
    assert all(zone in caught.value.why for zone in zones)
    assert rig.double.living() == []


def test_a_price_that_rose_since_the_offer_is_not_paid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path).offered("us-east-1b/g5.xlarge/spot")
    monkeypatch.setattr(rig.double, "spot_price", lambda kind, letter: 0.9)
    with pytest.raises(NoOffer, match="cannot start"):
        rig.create()
    assert rig.double.count("RunInstances") == 0


@pytest.mark.acceptance(58)
@pytest.mark.parametrize(
    ("name", "code"), [("us-east-1/g5.xlarge/on-demand", "L-DB2E81BA"), ("us-east-1b/g5.xlarge/spot", "L-3819A6DF")]
)
def test_a_quota_that_is_used_up_is_explained_with_its_code_and_its_page(tmp_path: Path, name: str, code: str) -> None:
    rig = Rig(tmp_path).offered(name)
    rig.double.settings.quotas[code] = 2.0
    with pytest.raises(AwsRefused) as caught:
        rig.create()
    assert code in caught.value.why
    assert "LimitExceeded" in caught.value.why or "CountExceeded" in caught.value.why
    assert f"/servicequotas/home/services/ec2/quotas/{code}" in caught.value.fix
    assert rig.double.lives == {}


@pytest.mark.parametrize(
    ("action", "nothing"), [("DescribeImages", "<imagesSet/>"), ("DescribeSubnets", "<subnetSet/>")]
)
def test_a_region_without_an_image_or_a_network_is_a_refusal_before_anything_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, nothing: str
) -> None:
    """`Unwelcome` tells the launch that no instance can appear, so that its undo neither waits nor alarms."""
    rig = Rig(tmp_path)
    monkeypatch.setattr(rig.double, f"_ec2_{action}", lambda form, request: _xml(action, nothing), raising=False)
    with pytest.raises(Unwelcome):
        rig.create()
    assert rig.double.count("RunInstances") == 0


@pytest.mark.parametrize("is_error", [True, False], ids=["error", "nothing"])
def test_named_subnets_that_are_not_in_the_region_are_named_with_the_key_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_error: bool
) -> None:
    rig = Rig(tmp_path, subnets=["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"])

    def answer(form: object, request: object) -> HttpResponse:
        if is_error:
            raise AwsRefused("AWS refused it.", code="InvalidSubnetID.NotFound")
        return _xml("DescribeSubnets", "<subnetSet/>")

    monkeypatch.setattr(rig.double, "_ec2_DescribeSubnets", answer, raising=False)
    with pytest.raises(Unwelcome) as caught:
        rig.create()
    assert caught.value.what == "cloud.aws.subnets names a subnet that does not exist in us-east-1."
    assert "subnet-0123456789abcdef0, subnet-0123456789abcdef1" in caught.value.why
    assert "aws ec2 describe-subnets --region us-east-1" in caught.value.fix
    assert rig.double.count("RunInstances") == 0


def test_throttling_is_waited_out(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("throttle", "RunInstances", 1, 2))
    rig.create()
    assert len(rig.double.living()) == 1
    assert len(rig.world.slept) >= 2


# --- create, when the answer is not clear ---


@pytest.mark.parametrize("way", ["lost_before", "lost_after", "error_before", "error_after"])
def test_a_create_without_a_clear_answer_is_repeated_with_its_token_and_makes_one(tmp_path: Path, way: str) -> None:
    rig = Rig(tmp_path, Strike(way, "RunInstances"))
    made = rig.create()
    assert made.mark == MARK
    assert len(rig.double.lives) == 1
    tokens = {form["ClientToken"] for action, form in rig.double.asked if action == "RunInstances"}
    assert len(tokens) == 1


def test_the_double_would_show_a_second_instance_if_the_token_were_another(tmp_path: Path) -> None:
    """The check of the checks above: without the token a repetition doubles, as it would at AWS."""
    rig = Rig(tmp_path, Strike("lost_after", "RunInstances"))
    real, seen = rig.world.double.handle, []

    def without_token(request: HttpRequest) -> HttpResponse:
        body = request.body.replace(b"ClientToken=", b"ClientToken=%d" % len(seen))
        seen.append(1)
        return real(dataclasses.replace(request, body=body))

    rig.world.double.handle = without_token  # type: ignore[method-assign]
    rig.create()
    assert len(rig.double.lives) == 2


@pytest.mark.parametrize("way", ["lost_after", "error_after"])
def test_an_answer_that_never_comes_is_found_by_its_mark(tmp_path: Path, way: str) -> None:
    rig = Rig(tmp_path, Strike(way, "RunInstances", 1, 99))
    rig.create()
    assert len(rig.double.lives) == 1


def test_a_create_that_stays_unclear_is_given_up_and_carries_no_invented_id(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("lost_before", "RunInstances", 1, 99))
    with pytest.raises(CreateFailed, match="no clear answer") as caught:
        rig.create()
    assert caught.value.instance_id is None
    assert rig.double.lives == {}


def test_after_an_unclear_answer_no_other_zone_is_tried(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("lost_before", "RunInstances")).offered("us-east-1/g5.xlarge/on-demand")
    rig.double.settings.no_room = {"us-east-1a"}
    with pytest.raises(CreateFailed, match="no clear answer"):
        rig.create()
    assert rig.double.count("RunInstances") == 2


def test_a_token_that_was_used_with_other_parameters_means_that_something_is_there(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(late_s=5.0))
    first = rig.create()
    again = open_aws(rig.home, rig.world)  # a process that knows nothing of it, before the list shows it
    changed = dataclasses.replace(rig.request.order.boot, started_at=1.0, spend_limit_usd="0.5")
    request = dataclasses.replace(rig.request, order=dataclasses.replace(rig.request.order, boot=changed))
    assert again.create(request).id == first.id
    assert len(rig.double.lives) == 1


def test_the_error_says_so_if_it_is_unknown_whether_an_instance_was_created(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("lost_after", "RunInstances", 1, 99), Strike("lost_before", "DescribeInstances", 2, 99))
    with pytest.raises(CreateFailed, match="may have started"):
        rig.create()
    assert len(rig.double.living()) == 1  # and launch ends it by its mark


def test_a_new_profile_that_ec2_does_not_know_yet_is_waited_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(profile_s=12.0))
    boot = dataclasses.replace(rig.request.order.boot, store="s3://bucket/x")
    rig.request = rig.provider.plan(rig.request.offer, dataclasses.replace(rig.request.order, boot=boot))
    rig.create()
    assert len(rig.double.living()) == 1
    assert rig.world.t - rig.double.living()[0].began >= 0


# --- describe, list, destroy ---


def test_a_new_id_that_is_not_shown_yet_is_not_gone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(late_s=8.0))
    made = rig.create()
    assert rig.provider.describe(made.id).state == "requested"
    assert rig.provider.describe(made.id).billing == "yes"
    rig.world.sleep(9.0)
    assert rig.provider.describe(made.id).state == "ready"


def test_one_that_another_process_made_a_moment_ago_and_is_not_shown_yet_is_ended_all_the_same(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(late_s=60.0))
    made = rig.create()
    open_aws(rig.home, rig.world).destroy(made.id)
    rig.world.t += 120
    assert rig.double.living() == []


def test_pending_is_requested_and_what_ec2_took_back_is_gone_and_says_so(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(pending_s=20.0)).offered("us-east-1b/g5.xlarge/spot")
    made = rig.create()
    assert rig.provider.describe(made.id).state == "requested"
    rig.world.sleep(21.0)
    assert rig.provider.describe(made.id).state == "ready"
    rig.double.preempt(made.id.rpartition("/")[2], notice_s=120)
    rig.world.sleep(60.0)
    assert rig.provider.describe(made.id).state == "ready"  # it lives until it is taken
    rig.world.sleep(61.0)
    gone = rig.provider.describe(made.id)
    assert (gone.state, gone.billing) == ("gone", "no")
    assert "preempted" in gone.detail


def test_one_that_was_stopped_in_the_console_runs_no_more_and_bills_its_disk(tmp_path: Path) -> None:
    rig = Rig(tmp_path).offered("us-east-1/g5.xlarge/on-demand")
    made = rig.create()
    life = rig.double.lives[made.id.rpartition("/")[2]]
    rig.double._instance(life).stop()
    now = rig.provider.describe(made.id)
    assert (now.state, now.billing, now.is_running) == ("unknown", "yes", False)
    assert [each.id for each in rig.provider.list_owned()] == [made.id]


def test_a_shut_down_machine_is_terminated_and_tells_when_it_ended(tmp_path: Path) -> None:
    rig = Rig(tmp_path).offered("us-east-1/g5.xlarge/on-demand")
    made = rig.create()
    rig.double.shut_down(made.id.rpartition("/")[2])
    gone = rig.provider.describe(made.id)
    assert (gone.state, gone.detail) == ("gone", "shut itself down")
    assert gone.ended_at is not None
    assert rig.provider.list_owned() == []


@pytest.mark.parametrize("skew_s", [-7200.0, 0.0, 7200.0])
def test_start_and_end_times_are_converted_to_the_clock_at_home(tmp_path: Path, skew_s: float) -> None:
    rig = Rig(tmp_path).offered("us-east-1/g5.xlarge/on-demand")
    rig.world.skew_s = skew_s
    began = rig.world.now()
    made = rig.create()
    assert made.created_at == pytest.approx(began, abs=2)
    rig.world.t += 3600.0
    assert [each.created_at for each in rig.provider.list_owned()] == [pytest.approx(began, abs=2)]
    rig.double.shut_down(made.id.rpartition("/")[2])
    rig.world.t += 1800.0
    gone = rig.provider.describe(made.id)
    assert (gone.created_at, gone.ended_at) == (pytest.approx(began, abs=2), pytest.approx(began + 3600, abs=2))


def test_a_clock_at_home_that_was_set_in_between_shifts_no_life_against_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path).offered("us-east-1/g5.xlarge/on-demand")
    made = rig.create()
    rig.world.t += 600.0
    rig.provider.destroy(made.id)
    rig.world.skew_s = -90_000.0
    gone = open_aws(rig.home, rig.world).describe(made.id)
    assert gone.ended_at == pytest.approx(rig.world.now(), abs=2)
    assert gone.created_at == pytest.approx(rig.world.now() - 600, abs=2)


def test_an_answer_without_a_date_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    monkeypatch.setattr(rig.double, "dated", lambda reply: HttpResponse(reply.status, {}, reply.body))
    rig.provider = open_aws(rig.home, rig.world)
    rig.world.skew_s = 50.0
    assert rig.create().created_at == pytest.approx(rig.world.t, abs=2)


@pytest.mark.parametrize("skew_s", [-250.0, 250.0])
def test_the_systems_own_timer_goes_by_the_clock_of_aws(tmp_path: Path, skew_s: float) -> None:
    rig = Rig(tmp_path)
    rig.world.skew_s = skew_s
    boot = dataclasses.replace(rig.request.order.boot, started_at=rig.world.now())
    rig.request = dataclasses.replace(rig.request, order=dataclasses.replace(rig.request.order, boot=boot))
    made = rig.create()
    script = rig.machines.scripts[made.id.rpartition("/")[2]]
    (at,) = (int(line.partition("=")[2]) for line in script.splitlines() if line.startswith("SYSTEM_TIMER_AT="))
    assert at == pytest.approx(rig.world.t + ends_in_s(boot), abs=3)


def test_a_machine_that_cannot_be_reached_is_waited_for_no_longer_than_the_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, settings=Settings(pending_s=20.0))
    made, began = rig.create(), rig.world.t
    monkeypatch.setattr(rig.world, "run", lambda argv, timeout_s, **messages: Completed(255, "", "timed out"))
    late = dataclasses.replace(rig.request, order=dataclasses.replace(rig.request.order, start_within_s=75.0))
    with pytest.raises(StartTimeout, match="over SSH within 55s"):
        rig.provider.hand_over(late, made.id)
    assert rig.world.t - began <= 80.0


@pytest.mark.slow
def test_a_machine_that_never_runs_is_waited_for_no_longer_than_the_limit_leaves(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(pending_s=1e9))
    late = dataclasses.replace(rig.request, order=dataclasses.replace(rig.request.order, start_within_s=75.0))
    with pytest.raises(StartTimeout, match="did not start within 75 s"):
        rig.provider.hand_over(late, rig.create().id)


def test_a_list_that_cannot_be_had_is_not_empty(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create()
    rig.double.strike(Strike("error_before", "DescribeInstances", 1, 99))
    with pytest.raises(ProviderSilent, match="may still be billing"):
        rig.provider.list_owned()


def test_a_page_of_a_proxy_is_no_list(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create()
    rig.world.http = lambda request: HttpResponse(200, {}, b"<html>sign in</html>")  # type: ignore[method-assign]
    with pytest.raises(ProviderSilent):
        rig.provider.list_owned()


def test_destroy_is_repeated_if_the_answer_is_lost(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    rig.double.strike(Strike("lost_before", "TerminateInstances"), Strike("error_after", "TerminateInstances", 2))
    rig.provider.destroy(made.id)
    assert rig.double.living() == []


def test_another_process_without_the_run_file_sees_and_ends_what_was_made(tmp_path: Path) -> None:
    rig = Rig(tmp_path, regions=["us-east-2"])
    rig.offered("us-east-2/g5.xlarge/on-demand")
    made = rig.create()
    bare = Aws(home=rig.home, owner=OWNER, world=rig.world)
    assert [each.id for each in bare.list_owned()] == [made.id]
    assert bare.connection(made.id) is not None
    assert bare.log(made.id).startswith("console of")
    bare.destroy(made.id)
    assert rig.double.living() == []


def test_a_home_that_does_not_know_the_region_asks_them_all(tmp_path: Path) -> None:
    rig = Rig(tmp_path, regions=["us-east-2"])
    rig.offered("us-east-2/g5.xlarge/on-demand")
    made = rig.create()
    other = Aws(home=tmp_path / "elsewhere", owner=OWNER, world=rig.world)
    assert [each.id for each in other.list_owned()] == [made.id]


def test_the_region_is_written_down_before_anything_is_made_there(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert not Aws.is_configured(rig.home, rig.world)
    real = rig.world.double.handle

    def handle(request: HttpRequest) -> HttpResponse:
        if b"Action=Create" in request.body or b"Action=RunInstances" in request.body:
            assert Aws.is_configured(rig.home, rig.world)
        return real(request)

    rig.world.double.handle = handle  # type: ignore[method-assign]
    rig.create()


def test_refused_and_missing_credentials_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    rig.create()
    refusal = b"<Response><Errors><Error><Code>AuthFailure</Code><Message>no</Message></Error></Errors></Response>"
    rig.world.http = lambda request: HttpResponse(401, {}, refusal)  # type: ignore[method-assign]
    with pytest.raises(ProviderRefused, match="rejected the credentials"):
        rig.provider.list_owned()
    rig.world.http = lambda request: rig.double.dated(HttpResponse(401, {}, refusal))  # type: ignore[method-assign]
    rig.world.skew_s = 900.0  # then they may be as good as they were: what is signed is too old or too young
    with pytest.raises(ProviderRefused, match="clock is 15m00s ahead of AWS time"):
        rig.provider.list_owned()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="No AWS credentials"):
        Aws(home=rig.home, owner=OWNER, world=rig.world).list_owned()


# --- other resources ---


@pytest.mark.acceptance(136)
def test_what_was_made_for_an_attempt_is_listed_under_its_mark_and_goes_with_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    boot = dataclasses.replace(rig.request.order.boot, store="s3://bucket/x")
    rig.request = rig.provider.plan(rig.request.offer, dataclasses.replace(rig.request.order, boot=boot))
    made = rig.create()
    found = rig.provider.list_resources()
    assert sorted((each.kind, each.mark, each.is_kept) for each in found) == [
        ("group", MARK, False),
        ("role", MARK, False),
    ]
    group = next(each for each in found if each.kind == "group")
    with pytest.raises(ProviderRefused, match="dependent object"):
        rig.provider.destroy_resource(group)
    rig.provider.destroy(made.id)
    for each in found:
        rig.provider.destroy_resource(each)
        rig.provider.destroy_resource(each)  # gone already is success
    assert rig.provider.list_resources() == []


@pytest.mark.acceptance(140)
def test_what_a_lost_ledger_knew_is_found_by_reconcile_and_ended(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    boot = dataclasses.replace(rig.request.order.boot, store="s3://bucket/x")
    rig.request = rig.provider.plan(rig.request.offer, dataclasses.replace(rig.request.order, boot=boot))
    found = end_what_was_forgotten(rig.create(), rig.home, OWNER, rig.world)
    assert sorted(each.thing for each in found) == ["group", "instance", "role"]
    assert rig.double.living() == []
    assert rig.provider.list_resources() == []


@pytest.mark.acceptance(69)
def test_a_role_that_was_left_half_made_is_still_listed_and_destroyed(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("lost_before", "CreateInstanceProfile", 1, 99))
    boot = dataclasses.replace(rig.request.order.boot, store="s3://bucket/x")
    rig.request = rig.provider.plan(rig.request.offer, dataclasses.replace(rig.request.order, boot=boot))
    with pytest.raises(ProviderSilent):
        rig.create()
    rig.double.strike()
    for each in rig.provider.list_resources():
        rig.provider.destroy_resource(each)
    assert rig.provider.list_resources() == []


def test_what_is_not_ours_is_neither_listed_nor_destroyed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create()
    stranger = open_aws(rig.home, rig.world, "zzz999")
    assert stranger.list_resources() == []
    with pytest.raises(ProviderRefused, match="does not belong to this homing home directory"):
        stranger.destroy_resource(rig.provider.list_resources()[0])


@pytest.mark.acceptance(106, 139)
def test_a_volume_is_made_once_attached_and_found_again_by_the_next_attempt_in_its_zone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, volume=10**11, settings=Settings(pending_s=5.0))
    rig.offered("us-east-1/g5.xlarge/spot")
    attach(rig, first := rig.create())
    kept = [each for each in rig.provider.list_resources() if each.kind == "volume"]
    assert [(each.is_kept, each.mark) for each in kept] == [(True, f"{MARK.rpartition('-')[0]}-volume")]
    assert kept[0].rate_usd_per_hour > Decimal("0.01")
    attach(rig, first)  # repeated, it changes nothing
    zone = rig.double.living()[0].zone
    rig.double.preempt(first.id.rpartition("/")[2], notice_s=0)
    rig.world.sleep(1.0)
    mark = f"{MARK.rpartition('-')[0]}-2"
    rig.request = dataclasses.replace(rig.request, mark=mark)
    rig.double.settings.no_room = {f"us-east-1{letter}" for letter in "abcd"} - {zone}
    attach(rig, second := rig.create())
    assert [life.zone for life in rig.double.living()] == [zone]
    assert rig.double.count("CreateVolume") == 1
    rig.provider.destroy(second.id)
    volumes = [each for each in rig.provider.list_resources() if each.kind == "volume"]
    assert [each.id for each in volumes] == [kept[0].id]
    rig.provider.destroy_resource(volumes[0])
    assert not [each for each in rig.provider.list_resources() if each.kind == "volume"]


def attach(rig: Rig, made: Instance) -> None:
    region, _, name = made.id.rpartition("/")
    rig.world.sleep(6.0)
    life = rig.double.lives[name]
    rig.provider.things.attach_volume(region, rig.request.mark, name, life.zone, 100, 60.0, math.inf)


def test_a_volume_is_in_the_rate_while_it_is_attached(tmp_path: Path) -> None:
    bare = Rig(tmp_path, spot=False).provider.offers(Needs())[0]
    rig = Rig(tmp_path / "two", spot=False, volume=10**12)
    assert rig.provider.offers(Needs())[0].rate_usd_per_hour - bare.rate_usd_per_hour > Decimal("0.1")


@pytest.mark.acceptance(128)
def test_a_budget_alert_is_made_once_and_kept(tmp_path: Path) -> None:
    rig = Rig(tmp_path, monthly_budget="50", budget_email="me@example.org")
    made = rig.create()
    rig.provider.destroy(made.id)
    rig.request = dataclasses.replace(rig.request, mark=f"{MARK.rpartition('-')[0]}-2")
    rig.create()
    found = [each for each in rig.provider.list_resources() if each.kind == "budget"]
    assert [(each.mark, each.is_kept) for each in found] == [(f"homing-{OWNER}-budget", True)]
    rig.provider.destroy_resource(found[0])
    assert not [each for each in rig.provider.list_resources() if each.kind == "budget"]


# --- doctor and setup ---


def test_doctor_shows_the_account_and_what_its_key_may_do(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.double.settings.quotas.update({"L-DB2E81BA": 0.0, "L-3819A6DF": 0.0})
    found = open_aws(rig.home, rig.world).checks()
    states = {check.name: check.state for check in found}
    assert (states["aws.identity"], states["aws.region"], states["aws.rights"]) == ("ok", "ok", "ok")
    (none,) = [check for check in found if check.is_finding]
    assert "quota for G instances in us-east-1 is 0" in none.text
    assert none.page.endswith("/quotas/L-3819A6DF")
    assert rig.double.lives == {}


def test_setting_up_lets_every_verb_look_at_aws(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    (step,) = rig.provider.setup_steps()
    assert not step.is_done
    step.do()
    assert Aws.is_configured(rig.home, rig.world)
    assert rig.provider.setup_steps()[0].is_done


# --- the account ---


def test_what_the_key_of_another_account_does_not_show_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    rig.double.accounts["AKIAOTHER"] = "210987654321"
    line = another_key_ends_nothing(
        rig.create(),
        rig.home,
        OWNER,
        rig.world,
        use=lambda: monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOTHER"),
        use_first=lambda: monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIACANARY"),
    )
    assert line.account == ACCOUNT


def test_another_profile_of_the_credentials_file_is_another_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    rig.double.accounts["AKIAOTHER"] = "210987654321"
    path = tmp_path / "credentials"
    path.write_text(
        "[mine]\naws_access_key_id = AKIACANARY\naws_secret_access_key = a\n"
        "[team]\naws_access_key_id = AKIAOTHER\naws_secret_access_key = b\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "mine")
    another_key_ends_nothing(
        rig.create(),
        rig.home,
        OWNER,
        rig.world,
        use=lambda: monkeypatch.setenv("AWS_PROFILE", "team"),
        use_first=lambda: monkeypatch.setenv("AWS_PROFILE", "mine"),
    )


def test_the_account_is_asked_for_once_and_a_new_key_of_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    assert [rig.provider.account() for _ in range(3)] == [ACCOUNT] * 3
    assert rig.double.count("GetCallerIdentity") == 1
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANEW")
    assert open_aws(rig.home, rig.world).account() == ACCOUNT


def test_a_credentials_file_that_changes_under_a_process_changes_nothing_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    rig.double.accounts["AKIAOTHER"] = "210987654321"
    path, text = tmp_path / "credentials", "[default]\naws_access_key_id = {}\naws_secret_access_key = a\n"
    path.write_text(text.format("AKIACANARY"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    made = rig.create()
    aws = open_aws(rig.home, rig.world)
    assert aws.account() == ACCOUNT
    path.write_text(text.format("AKIAOTHER"))
    assert [each.id for each in aws.list_owned()] == [made.id], "one account in every region and service"


def test_an_account_that_cannot_be_asked_for_is_silence(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("lost_before", "GetCallerIdentity", times=99))
    with pytest.raises(ProviderSilent):
        rig.provider.account()


def test_an_end_time_in_whole_seconds_counts_as_the_end_of_that_second() -> None:
    # Taken as its beginning, receipts were up to a second below what EC2 bills.
    at = _ended_at({"StateTransitionReason": "User initiated (2026-11-16 08:22:00 GMT)"})
    assert at is not None
    assert at.isoformat() == "2026-11-16T08:22:01+00:00"
