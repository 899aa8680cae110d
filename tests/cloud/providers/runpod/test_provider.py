"""The adapter of RunPod, on a double of its API and a virtual clock: every gotcha of that API, one at a time."""

from __future__ import annotations

import base64
import dataclasses
import email.utils
import gzip
import http.server
import json
import os
import re
import subprocess
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import make_run
from tests.contracts.accounts import another_key_ends_nothing, line_of
from tests.contracts.owners import owner_for
from tests.contracts.providers import SECRET, ProviderContract
from tests.contracts.reconcile import end_what_was_forgotten
from tests.contracts.rest_faults import RestFaults
from tests.doubles.accounts import Accounts
from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults, Strike
from tests.doubles.openapi import FOLDER_ENV, OpenApi, Unlike
from tests.doubles.runpod import GPUS, NO_CAPACITY, NO_DISK, Gpu
from tests.doubles.runpod_world import KEY, URL, RunpodWorld

from homing.cloud.destroy import destroy_lines, end_finding
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import Adopted, LedgerLine, RunRow
from homing.cloud.ledger.mark import make_mark
from homing.cloud.machine_setup.code_bundle import TORCH_RANGE
from homing.cloud.providers.base import Instance, Needs, Provider, Request, Resource
from homing.cloud.providers.registry import configured, open_provider
from homing.cloud.providers.runpod.create_request import MAY_END, end_command, probe_command
from homing.cloud.providers.runpod.offers import dollars, storage_rate
from homing.cloud.providers.runpod.provider import KEY_ENV, Runpod
from homing.cloud.reconcile.inventory import survey
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.renting_account import check_account, check_own, is_elsewhere
from homing.config.schema.provider_settings import RUNPOD_IMAGE, RunpodCloud
from homing.doctor.check import Balance, check_balance
from homing.errors import (
    CreateFailed,
    NoOffer,
    ProviderRefused,
    ProviderSilent,
    StartTimeout,
    StillBilling,
    UsageError,
)
from homing.wire import codec
from homing.wire import file_names as names
from homing.world import HttpRequest, HttpResponse, NetworkError

OWNER = owner_for(__name__)
MARK = make_mark(OWNER, "moss-20260101-000000-abcd", 1)


class TestRunpod(ProviderContract):
    @pytest.fixture
    def world(self) -> RunpodWorld:
        return RunpodWorld()

    @pytest.fixture
    def provider(self, owner: str, world: RunpodWorld, homing_home: Path) -> Provider:
        return Runpod(home=homing_home, owner=owner, world=world)

    @pytest.fixture
    def stranger(self, world: RunpodWorld, homing_home: Path) -> Provider:
        return Runpod(home=homing_home, owner="zzz999", world=world)


class Rig:
    """The provider on a RunPod with these faults, and the request that launch would make."""

    def __init__(self, tmp_path: Path, *strikes: Strike, settings: Settings | None = None, **messages: Any) -> None:
        faults = {name: messages.pop(name) for name in list(messages) if name in Faults.__dataclass_fields__}
        self.world = RunpodWorld(Faults(strikes=strikes, **faults), settings)
        self.cloud = self.world.cloud
        self.home = tmp_path / "home"
        self.provider = Runpod(home=self.home, owner=OWNER, world=self.world)
        if messages:
            self.provider.configure(settings_of(**messages))
        self.tmp_path = tmp_path

    @property
    def request(self) -> Request:
        request = ProviderContract().make_request(self.provider, MARK, self.tmp_path)
        self.world.requests.clear()
        return request

    def create(self) -> Instance:
        return self.provider.create(self.request)

    def body(self) -> dict[str, Any]:
        """Of the one pod that was asked for."""
        sent = [json.loads(each.body) for each in self.world.requests if each.method == "POST"]
        assert len(sent) == 1
        return dict(sent[0])

    @property
    def num_living(self) -> int:
        return sum(self.cloud.live().values())


class TestFaults(RestFaults):
    Rig = Rig
    create_path, list_key = "/pods", "pods"


def settings_of(**messages: Any) -> dict[str, Any]:
    """As the run file's section reaches the adapter."""
    return RunpodCloud(**messages).model_dump()


def script_of(args: str) -> str:
    """What a pod's first command unpacks."""
    packed = args.split("echo ")[1].split(" |")[0]
    return gzip.decompress(base64.b64decode(packed)).decode()


# --- offers ---


def test_offers_are_the_live_catalogue_with_stock_rate_and_place_of_both_clouds(tmp_path: Path) -> None:
    offers = {offer.name: offer for offer in Rig(tmp_path).provider.offers(Needs())}
    h100 = offers["NVIDIA H100 80GB HBM3 x1 secure"]
    assert (h100.device, h100.num_gpus, h100.memory_bytes, h100.cloud) == ("H100", 1, 80 << 30, "secure")
    assert (h100.region, h100.stock) == ("any", "low in 2 data centers")
    assert h100.rate_usd_per_hour == Decimal("3.29") + storage_rate(20)
    assert offers["NVIDIA H100 80GB HBM3 x1 community"].rate_usd_per_hour < h100.rate_usd_per_hour


def test_what_is_sold_out_or_could_not_run_our_torch_is_no_offer(tmp_path: Path) -> None:
    names = " ".join(offer.name for offer in Rig(tmp_path).provider.offers(Needs()))
    assert "L40" not in names  # no stock
    assert "MI300X" not in names  # AMD
    assert "A40 " not in names  # the driver of its hosts is too old for the image
    assert "A4000" in names


@pytest.mark.acceptance(8)
@pytest.mark.regression("runpod-hosts-by-cuda")
def test_the_catalogue_is_asked_for_hosts_on_which_the_image_starts_and_older_drivers_are_among_them(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    names = [offer.name for offer in rig.provider.offers(Needs())]
    assert "NVIDIA RTX A5000 x1 secure" in names, "its driver knows CUDA 12.8, and gets a torch for that"
    assert all("minCudaVersion=12.8" in each.url for each in rig.world.requests)
    rig = Rig(tmp_path, image="pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel")
    rig.provider.offers(Needs())
    assert all("minCudaVersion=13.0" in each.url for each in rig.world.requests)
    rig = Rig(tmp_path, min_cuda="12.4")
    assert any("A40 " in offer.name for offer in rig.provider.offers(Needs()))


def test_a_card_is_not_confused_with_one_of_a_similar_name(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.cloud.gpus = (Gpu("NVIDIA A40-12Q", "A40 slice", 12, 0.2),)
    (offer, *_) = rig.provider.offers(Needs())
    assert offer.device == "A40 slice"
    assert offer.memory_bytes == 12 << 30


def test_a_run_takes_other_peoples_machines_only_where_it_says_so(tmp_path: Path) -> None:
    def clouds(**messages: Any) -> set[str]:
        return {offer.cloud for offer in Rig(tmp_path, **messages).provider.offers(Needs())}

    assert clouds() == {"secure", "community"}  # without a run file: all there is
    assert clouds(image="x") == {"secure"}
    assert clouds(cloud="any") == {"secure", "community"}
    assert clouds(cloud="community") == {"community"}


def test_several_cards_are_asked_for_as_such_and_any_number_where_it_does_not_matter(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    eight = rig.provider.offers(Needs(gpu="H100", num_gpus=8))
    assert {offer.num_gpus for offer in eight} == {8}
    assert eight[0].rate_usd_per_hour == Decimal("26.32") + storage_rate(20)
    assert {offer.num_gpus for offer in rig.provider.offers(Needs(num_gpus=0))} == {1, 2, 4, 8}


def test_each_data_center_that_the_run_file_names_is_an_offer_and_the_pod_is_placed_there(tmp_path: Path) -> None:
    rig = Rig(tmp_path, data_centers=["EUR-IS-1", "US-KS-2"])
    found = {(offer.device, offer.region) for offer in rig.provider.offers(Needs())}
    assert found == {("RTX4090", "EUR-IS-1"), ("A100", "US-KS-2"), ("H100", "US-KS-2"), ("RTXA4000", "US-KS-2")}
    rig.create()
    assert rig.body()["dataCenterIds"] == ["EUR-IS-1"]
    rig = Rig(tmp_path)
    rig.create()
    assert "dataCenterIds" not in rig.body()  # a list that is too narrow is read as no capacity


def test_rates_that_are_short_floats_are_the_same_on_both_sides(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.cloud.gpus = (Gpu("NVIDIA GeForce RTX 4090", "RTX 4090", 24, 0.7400000095367432),)
    made = rig.create()
    assert made.rate_usd_per_hour == Decimal("0.7400") + storage_rate(20)


# --- the disk ---


@pytest.mark.acceptance(53)
def test_the_disk_is_predicted_from_data_checkpoints_and_environment(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    (offer, *_) = rig.provider.offers(Needs(disk_bytes=100 * 10**9))
    assert 100 * 10**9 <= offer.disk_bytes < 130 * 10**9
    rig.create()
    assert rig.body()["disk"] == 20
    assert offer.rate_usd_per_hour > rig.provider.offers(Needs())[0].rate_usd_per_hour


@pytest.mark.acceptance(53)
def test_a_disk_that_is_too_small_is_refused_with_the_size_that_is_not(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk=30 * 10**9)
    with pytest.raises(UsageError, match="too small") as caught:
        rig.provider.offers(Needs(disk_bytes=40 * 10**9))
    assert "cloud.runpod.disk: 61GB" in caught.value.fix
    assert rig.provider.offers(Needs(disk_bytes=10 * 10**9))
    rig.create()
    assert rig.body()["disk"] == 30


# --- the create call ---


@pytest.mark.acceptance(56)
def test_the_body_is_what_the_run_file_says_and_our_key_is_in_the_pods_own_environment(tmp_path: Path) -> None:
    rig = Rig(
        tmp_path, registry="cred1", env=["NCCL_DEBUG=WARN"], ports=["6006/tcp"], global_networking=True, image="me/it:1"
    )
    rig.create()
    body = rig.body()
    assert body["name"] == MARK
    assert body["cloud"] == "SECURE"
    assert body["image"] == "me/it:1"
    assert body["registry"] == "cred1"
    assert body["ports"] == ["22/tcp", "6006/tcp"]
    assert body["globalNetworking"] is True
    assert body["gpu"]["minCudaVersion"] == "12.8"
    assert body["env"]["NCCL_DEBUG"] == "WARN"
    assert body["env"]["PUBLIC_KEY"].startswith("ssh-ed25519 ")
    assert "startSsh" not in body  # it would bring the account's keys
    assert rig.cloud.ssh_keys_put == 0


@pytest.mark.acceptance(53)
def test_a_template_brings_its_own_image_and_without_one_there_is_a_default(tmp_path: Path) -> None:
    rig = Rig(tmp_path, template="runpod-torch-v280")
    rig.create()
    assert rig.body()["templateId"] == "runpod-torch-v280"
    assert "image" not in rig.body()
    rig = Rig(tmp_path)
    rig.create()
    assert rig.body()["image"] == RUNPOD_IMAGE


@pytest.mark.regression("runpod-image-torch")
def test_the_torch_in_the_default_image_is_one_that_we_use(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create()
    found = re.search(r"-torch(\d)(\d+)(\d)-", rig.body()["image"])
    assert found is not None
    assert TORCH_RANGE[0] <= f"{found[1]}.{found[2]}" < TORCH_RANGE[1], "else a boot installs a second one"


def test_neither_the_accounts_key_nor_a_secret_of_the_run_is_in_what_is_sent_to_create(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create()
    body = rig.body()
    sent = json.dumps(body) + script_of(body["args"])
    assert KEY not in sent
    assert SECRET not in sent
    assert KEY not in repr(rig.provider._api)
    assert KEY not in json.dumps(rig.request.to_dict())


def test_too_many_variables_are_refused_before_anything_is_asked(tmp_path: Path) -> None:
    rig = Rig(tmp_path, env=[f"V{number}=1" for number in range(50)])
    with pytest.raises(UsageError, match="50 variables"):
        rig.create()


def test_no_capacity_is_no_offer_by_its_text_alone_also_after_the_catalogue_said_high(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    request = rig.request
    rig.cloud.full.add(GPUS[0].id)
    with pytest.raises(NoOffer, match="no longer any instances available") as caught:
        rig.provider.create(request)
    assert caught.value.why == NO_CAPACITY
    rig = Rig(tmp_path, disk=20_000 * 10**9)
    with pytest.raises(NoOffer, match="enough disk space") as caught:
        rig.create()
    assert caught.value.why == NO_DISK


def test_another_400_is_a_bad_request_and_not_a_lack_of_machines(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    request = rig.request
    rig.cloud.gpus = ()
    with pytest.raises(ProviderRefused, match="could not be processed"):
        rig.provider.create(request)


@pytest.mark.acceptance(150)
def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.cloud.balance_usd = Decimal(0)
    with pytest.raises(ProviderRefused, match="balance is too low") as caught:
        rig.create()
    assert "billing" in caught.value.fix
    rig = Rig(tmp_path, template="gone")
    with pytest.raises(ProviderRefused, match="template") as caught:
        rig.create()
    assert "cloud.runpod.template" in caught.value.fix
    rig = Rig(tmp_path)
    request = rig.request
    body = {"title": "Forbidden", "status": 403, "detail": "access denied"}
    real_http = rig.world.http

    def http(each: HttpRequest) -> HttpResponse:
        return HttpResponse(403, {}, json.dumps(body).encode()) if each.method == "POST" else real_http(each)

    rig.world.http = http  # type: ignore[method-assign]
    with pytest.raises(ProviderRefused, match="access denied") as caught:
        rig.provider.create(request)
    assert KEY_ENV in caught.value.fix


def test_the_error_names_a_field_that_runpod_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_ENV, raising=False)
    rig = Rig(tmp_path)
    monkeypatch.setattr(
        "homing.cloud.providers.runpod.provider.create_request.body_of", lambda *a, **k: {"name": MARK, "spot": True}
    )
    with pytest.raises(ProviderRefused, match="spot") as caught:
        rig.create()
    assert "homing explain cloud.runpod" in caught.value.fix
    assert rig.world.asked("POST") == 1


def test_a_higher_rate_than_offered_is_reported_as_soon_as_it_is_known(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("dearer", 1, "create"))
    made = rig.create()
    assert made.rate_usd_per_hour == Decimal("0.74") * Decimal("1.5") + storage_rate(20)
    rig = Rig(tmp_path, Strike("dearer", 1, "create"))
    rig.cloud.hides_cost = True
    request = rig.request
    made = rig.provider.create(request)
    assert made.rate_usd_per_hour == request.offer.rate_usd_per_hour
    with pytest.raises(CreateFailed, match="the offer was") as caught:
        rig.provider.hand_over(request, made.id)
    assert caught.value.instance_id == made.id


# --- what the pod gets ---


def test_the_first_command_starts_the_timer_and_asks_what_the_pods_own_key_may_do(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create()
    args = rig.body()["args"]
    assert len(args) < 8000
    script = script_of(args)
    settings = dict(line.split("=", 1) for line in script.splitlines() if "=" in line)
    assert settings["END_WITHIN_S"] == "1200"
    assert int(settings["BEGIN_BY"]) - rig.request.order.boot.started_at == pytest.approx(1020, abs=30)
    probe = script.index(f"mv {MAY_END}.new {MAY_END}; }} &\n")
    assert (
        script.index("\ntimer ") < probe < script.index("; then own_sshd")
    )  # the timer first, and nothing waits for this
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    unpacked = subprocess.run(
        ["bash", "-c", args.replace("exec bash $f", "cat $f; rm $f").split("'")[1]],
        capture_output=True,
        text=True,
        check=True,
    )
    assert unpacked.stdout == script


def test_a_pod_restarted_with_an_empty_disk_ends_before_the_limit_however_late_it_restarts(tmp_path: Path) -> None:
    for rate, allowed_s in ((0.72, 5000), (7.2, 500), (72.0, 50)):
        rig = Rig(tmp_path)
        rig.cloud.gpus = (Gpu("NVIDIA H100 80GB HBM3", "H100 SXM", 80, rate),)  # the limit is one dollar
        request = rig.request
        rig.provider.create(request)
        script = script_of(rig.body()["args"])
        settings = dict(line.split("=", 1) for line in script.splitlines() if "=" in line)
        latest = int(settings["BEGIN_BY"]) - request.order.boot.started_at
        assert latest > 0.3 * min(900, allowed_s)
        assert latest + int(settings["END_WITHIN_S"]) < allowed_s + 2  # whole seconds


@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0])
def test_a_clock_at_home_that_is_wrong_neither_ends_a_new_pod_nor_lets_a_restarted_one_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """The pod uses its own clock, which is RunPod's; the latest start time was set by ours."""
    rig = Rig(tmp_path)
    real = rig.world.http

    def http(each: HttpRequest) -> HttpResponse:
        answer = real(each)
        date = email.utils.formatdate(rig.world.now() + ahead_s, usegmt=True)
        return dataclasses.replace(answer, headers={**answer.headers, "date": date})

    monkeypatch.setattr(rig.world, "http", http)
    rig.create()
    settings = dict(line.split("=", 1) for line in script_of(rig.body()["args"]).splitlines() if "=" in line)
    latest = int(settings["BEGIN_BY"]) - rig.request.order.boot.started_at
    assert latest == pytest.approx(1020 + ahead_s, abs=30)


def test_the_pod_ends_itself_with_its_own_key_and_no_other_pod(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    rig.world.pass_time(10)
    env = rig.world.pods.env[made.id]
    end = rig.request.order.boot.end_billing
    assert end.kind == "command"
    assert end.argv == ["bash", "-c", end_command(URL)]
    assert end.header_env == {"authorization": KEY_ENV}  # so that the trainer does not see it
    assert env[KEY_ENV] != KEY
    head = {"authorization": f"Bearer {env[KEY_ENV]}"}
    assert rig.cloud.handle(HttpRequest("GET", f"{URL}/pods", head)).status == 403
    assert rig.cloud.handle(HttpRequest("DELETE", f"{URL}/pods/{made.id}", head)).status == 204
    assert rig.num_living == 0


@pytest.mark.parametrize(
    ("refused", "asked", "code"),
    [
        ((), ["DELETE /v2/pods/p1"], 0),
        (("DELETE",), ["DELETE /v2/pods/p1", "podTerminate"], 0),
        (("DELETE", "podTerminate"), ["DELETE /v2/pods/p1", "podTerminate", "podStop"], 0),
        (
            ("DELETE", "podTerminate", "podStop"),
            ["DELETE /v2/pods/p1", "podTerminate", "podStop", "ctl pod delete p1"],
            0,
        ),
        (
            ("DELETE", "podTerminate", "podStop", "ctl"),
            [
                "DELETE /v2/pods/p1",
                "podTerminate",
                "podStop",
                "ctl pod delete p1",
                "ctl remove pod p1",
                "ctl stop pod p1",
            ],
            1,
        ),
    ],
)
def test_a_pod_tries_every_way_to_end_itself_and_says_when_none_was_taken(
    tmp_path: Path, refused: tuple[str, ...], asked: list[str], code: int
) -> None:
    """The real command, by a real shell: GraphQL says no with 200 and `errors`, and runpodctl by its exit code."""
    received: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            received.append(f"DELETE {self.path}")
            self.answer(403 if "DELETE" in refused else 204, b"")

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["content-length"])).decode()
            verb = next(word for word in ("podTerminate", "podStop") if word in text)
            received.append(verb)
            self.answer(200, b'{"errors": [{"message": "no"}]}' if verb in refused else b'{"data": {}}')

        def answer(self, status: int, body: bytes) -> None:
            assert self.headers["authorization"] == "Bearer pod-key"
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    ctl = tmp_path / "runpodctl"
    ctl.write_text(f"#!/bin/sh\necho ctl $@ >> {tmp_path}/ctl\nexit {int('ctl' in refused)}\n")
    ctl.chmod(0o755)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", KEY_ENV: "pod-key", "RUNPOD_POD_ID": "p1"}
        command = end_command(f"http://127.0.0.1:{server.server_port}/v2")
        done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False)
        server.shutdown()
        thread.join()
    by_ctl = (tmp_path / "ctl").read_text().splitlines() if (tmp_path / "ctl").exists() else []
    assert received + by_ctl == asked, done.stderr
    assert bool(done.returncode) == bool(code)
    assert "pod-key" not in done.stdout + done.stderr


# --- the hand-over ---


def test_files_and_secrets_come_by_ssh_to_the_address_that_the_pod_shows(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.cloud.address_late_s = 30.0
    request = rig.request
    made = rig.provider.create(request)
    rig.provider.hand_over(request, made.id)
    (order,) = rig.world.handed
    assert order["secrets"] == {"MOSS_API_KEY": SECRET}
    assert "agent.zip" in order["files"]
    command = rig.world.commands[0]
    assert command[command.index("-p") + 1] == "34446"
    assert "root@203.0.113.7" in command
    assert "StrictHostKeyChecking=yes" in command
    assert all(SECRET not in word and KEY not in word for argv in rig.world.commands for word in argv)


def test_a_pod_that_may_not_end_itself_is_refused_or_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for said in ("no: REST v2: 403 access denied; GraphQL: refused", ""):
        rig = Rig(tmp_path)
        rig.world.may_end = said
        request = rig.request
        made = rig.provider.create(request)
        with pytest.raises(CreateFailed, match="cannot terminate itself") as caught:
            rig.provider.hand_over(request, made.id)
        assert caught.value.instance_id == made.id
        assert "must_end_itself: false" in caught.value.fix
    rig = Rig(tmp_path, must_end_itself=False)
    rig.world.may_end = "no: 403 access denied"
    request = rig.request
    rig.provider.hand_over(request, rig.provider.create(request).id)
    assert "cannot terminate itself; only the local guard can" in caplog.text


@pytest.mark.regression("runpod-probe")
@pytest.mark.parametrize(
    ("works", "said"),
    [
        ("rest", "yes: REST v2"),
        ("graphql", "yes: GraphQL"),
        ("tool", "yes: runpodctl"),
        ("", "no: REST v2: 403 access denied; GraphQL: refused; runpodctl: refused"),
    ],
)
def test_the_probe_takes_any_api_by_which_the_pod_sees_itself_and_says_which(
    tmp_path: Path, works: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The real command, by a real shell. GraphQL shows a pod that the key may not see as null."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200 if works == "rest" else 403, b"{}" if works == "rest" else b"access denied")

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["content-length"])).decode()
            assert "podId" in text
            assert "mutation" not in text, "looking must not end it"
            self.answer(200, b'{"data": {"pod": {"id": "p1"}}}' if works == "graphql" else b'{"data": {"pod": null}}')

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    tool = tmp_path / "runpodctl"
    tool.write_text(f'#!/bin/sh\ncase "$*" in "get pod p1") exit {int(works != "tool")} ;; esac\nexit 1\n')
    tool.chmod(0o755)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", KEY_ENV: "pod-key", "RUNPOD_POD_ID": "p1"}
        command = probe_command(f"http://127.0.0.1:{server.server_port}/v2").replace(MAY_END, str(tmp_path / "may_end"))
        subprocess.run(["bash", "-c", f"{command} wait"], env=env, capture_output=True, text=True, check=True)
        server.shutdown()
        thread.join()
    assert (tmp_path / "may_end").read_text().strip() == said
    if said.startswith("yes"):
        rig = Rig(tmp_path)
        rig.world.may_end = said
        rig.provider.hand_over(rig.request, rig.provider.create(rig.request).id)
        assert ("only via" in caplog.text) is (works != "rest")


def test_whether_a_pod_may_end_itself_is_waited_for_no_longer_than_the_limit_leaves(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.world.may_end = ""
    made, began = rig.provider.create(rig.request), rig.world.t
    late = dataclasses.replace(rig.request, order=dataclasses.replace(rig.request.order, start_within_s=30.0))
    with pytest.raises(CreateFailed, match="cannot terminate itself"):
        rig.provider.hand_over(late, made.id)
    assert rig.world.t - began < 40


@pytest.mark.acceptance(55, 70)
def test_a_bad_host_is_given_up_at_the_start_limit_with_what_the_pod_was_doing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("boot_never", 1, "create"))
    request = rig.request
    made, began = rig.provider.create(request), rig.world.t
    with pytest.raises(StartTimeout, match="STARTING"):
        rig.provider.hand_over(request, made.id)
    assert 900 <= rig.world.t - began < 930


def test_a_bad_host_is_given_up_sooner_where_the_limit_leaves_less_and_the_limit_is_named(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("boot_never", 1, "create"))
    made, began = rig.provider.create(rig.request), rig.world.t
    late = dataclasses.replace(rig.request, order=dataclasses.replace(rig.request.order, start_within_s=75.0))
    with pytest.raises(StartTimeout, match="within 1m15s") as caught:
        rig.provider.hand_over(late, made.id)
    assert rig.world.t - began < 90
    assert "raise --spend-limit" in caught.value.fix


def test_a_machine_without_a_public_address_is_said_to_be_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path, cloud="community", start_limit="2m")
    rig.world.pods.has_address = False
    request = rig.request
    made = rig.provider.create(request)
    with pytest.raises(StartTimeout, match="community hosts") as caught:
        rig.provider.hand_over(request, made.id)
    assert "cloud.runpod.cloud: secure" in caught.value.fix


@pytest.mark.parametrize(("how", "said"), [("gone", "disappeared"), ("EXITED", "EXITED"), ("ERROR", "ERROR")])
def test_a_pod_lost_before_ssh_came_up_fails_the_launch_at_once(tmp_path: Path, how: str, said: str) -> None:
    strikes = [Strike("boot_dies", 1, "create")] if how == "ERROR" else []
    rig = Rig(tmp_path, *strikes)
    request = rig.request
    made, began = rig.provider.create(request), rig.world.t
    if how != "ERROR":
        rig.cloud.lose(made.id, how)
    with pytest.raises(StartTimeout, match=said):
        rig.provider.hand_over(request, made.id)
    assert rig.world.t - began < 30


# --- describe, list, destroy ---


def test_the_life_of_a_pod_in_our_words(tmp_path: Path) -> None:
    rig = Rig(tmp_path, settings=Settings(has_guard=False, boot_s=20.0))
    made = rig.create()
    assert (made.state, made.billing) == ("requested", "yes")
    rig.world.pass_time(10)
    assert rig.provider.describe(made.id).state == "booting"
    rig.world.pass_time(15)
    now = rig.provider.describe(made.id)
    assert (now.state, now.billing, now.page) == ("ready", "yes", rig.provider.page)
    rig.cloud.lose(made.id)
    rig.world.pass_time(10)
    lost = rig.provider.describe(made.id)
    # Its card is gone; what is left is a disk that bills until it is deleted.
    assert (lost.state, lost.billing, lost.is_running) == ("preempted", "yes", False)
    assert lost.rate_usd_per_hour == storage_rate(20)
    rig.provider.destroy(made.id)
    assert rig.provider.describe(made.id).state == "gone"


def test_running_without_a_runtime_is_not_ready(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    rig.world.pass_time(60)
    real = rig.cloud._show_pod
    rig.cloud._show_pod = lambda thing: {**real(thing), "runtime": None}  # type: ignore[method-assign]
    assert rig.provider.describe(made.id).state == "booting"


def test_a_failed_boot_is_reported_and_bills(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Strike("boot_dies", 1, "create"))
    made = rig.create()
    rig.world.pass_time(60)
    dead = rig.provider.describe(made.id)
    assert (dead.state, dead.billing, dead.is_running) == ("unknown", "yes", False)


def test_what_was_made_a_moment_ago_and_is_not_shown_yet_is_not_gone(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    real_http = rig.world.http
    not_yet = HttpResponse(404, {}, b'{"title": "Not Found", "status": 404, "detail": "resource not found"}')
    rig.world.http = lambda request: not_yet if "/pods/" in request.url else real_http(request)  # type: ignore[method-assign]
    rig.world.pass_time(10)
    assert rig.provider.describe(made.id).state == "requested"
    rig.world.pass_time(20)
    assert rig.provider.describe(made.id).state == "gone"


def test_a_409_is_reported_and_does_not_count_as_the_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    real_http = rig.world.http
    body = b'{"title": "Conflict", "status": 409, "detail": "Pod belongs to a cluster"}'
    rig.world.http = lambda r: HttpResponse(409, {}, body) if r.method == "DELETE" else real_http(r)  # type: ignore[method-assign]
    with pytest.raises(ProviderRefused, match="belongs to a cluster"):
        rig.provider.destroy(made.id)


def test_who_waits_stays_far_below_the_accounts_rate_limit(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    rig.world.requests.clear()
    for _ in range(200):
        rig.provider.describe(made.id)
        rig.world.pass_time(0.3)
    assert 1 <= len(rig.world.requests) <= 10


# --- the bill, the log, the way in ---


@pytest.mark.acceptance(128)
def test_the_spend_comes_from_the_bill_of_runpod_and_a_late_or_hidden_bill_changes_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.cloud.bill_late_s = 1000.0
    made = rig.create()
    rig.world.pass_time(600)
    assert rig.provider.describe(made.id).spend_usd is None
    rig.world.pass_time(600)
    messages = rig.provider.describe(made.id).spend_usd
    assert messages == pytest.approx(Decimal("0.2467") + storage_rate(20) / 3, rel=Decimal("0.01"))
    rig.world.pass_time(600)
    rig.provider.destroy(made.id)
    gone = rig.provider.describe(made.id)
    assert gone.state == "gone"
    assert gone.spend_usd is not None
    assert gone.spend_usd > messages
    rig = Rig(tmp_path, rates={"account.error_before": 1.0})
    assert rig.create().spend_usd is None


@pytest.mark.parametrize("record", [{"amount": 1.0}, {"totalAmount": None}, {"totalAmount": "some"}, None])
def test_a_bill_in_an_unknown_format_hides_no_pod(tmp_path: Path, record: object) -> None:
    rig = Rig(tmp_path)
    real, odd = rig.world.http, json.dumps({"records": [record]}).encode()
    rig.world.http = lambda r: HttpResponse(200, {}, odd) if "billing" in r.url else real(r)  # type: ignore[method-assign]
    made = rig.create()
    assert [(each.id, each.spend_usd) for each in rig.provider.list_owned()] == [(made.id, None)]
    rig.provider.destroy(made.id)
    assert rig.provider.describe(made.id).state == "gone"


def test_the_doctor_hears_what_the_key_may_not_read_and_of_a_volume_that_is_not_there(tmp_path: Path) -> None:
    assert [(each.name, each.state) for each in Rig(tmp_path).provider.checks()] == [("runpod.bill", "ok")]
    rig = Rig(tmp_path, volume="corpus")
    real_http, denied = rig.world.http, b'{"title": "Forbidden", "status": 403, "detail": "access denied"}'
    rig.world.http = lambda r: HttpResponse(403, {}, denied) if "billing" in r.url else real_http(r)  # type: ignore[method-assign]
    bill, volume = rig.provider.checks()
    assert (bill.state, volume.state) == ("warning", "fault")
    assert "access denied" in bill.text
    assert "volume_size" in volume.fix


@pytest.mark.acceptance("X20")
def test_the_balance_comes_with_its_hourly_spend_and_reading_it_changes_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert rig.provider.balance() == Balance(Decimal(250), Decimal(0))
    rig.create()
    rig.cloud.balance_usd = Decimal("3.25")
    rig.world.requests.clear()
    messages = rig.provider.balance()
    assert messages is not None
    assert messages.left_usd == Decimal("3.25")
    assert messages.rate_usd_per_hour > 0
    (asked,) = rig.world.requests
    assert asked.url == "https://runpod.test/graphql"
    assert b"mutation" not in asked.body
    assert KEY.encode() not in asked.body


@pytest.mark.acceptance("X20")
@pytest.mark.parametrize(
    "answer",
    [
        HttpResponse(200, {}, b'{"errors": [{"message": "not authorized"}], "data": null}'),
        HttpResponse(200, {}, b'{"data": {"myself": {"clientBalance": "much", "currentSpendPerHr": 0}}}'),
        HttpResponse(200, {}, b"<html>"),
        HttpResponse(403, {}, b'{"detail": "access denied"}'),
        HttpResponse(500, {}, b""),
        NetworkError("the line was cut"),
    ],
)
def test_a_missing_balance_is_unknown_and_never_guessed(tmp_path: Path, answer: HttpResponse | NetworkError) -> None:
    rig = Rig(tmp_path)

    def http(request: HttpRequest) -> HttpResponse:
        if isinstance(answer, NetworkError):
            raise answer
        return answer

    rig.world.http = http  # type: ignore[method-assign]
    assert rig.provider.balance() is None
    check = check_balance(rig.provider, Decimal(12))
    assert (check.name, check.state) == ("runpod.balance", "skipped")
    assert "billing" in check.page


@pytest.mark.acceptance(112)
def test_the_log_is_read_out_of_events_and_a_broken_stream_is_taken_up_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    rig.world.pods.lines = [f"line {number}: with a colon" for number in range(7)]
    assert rig.provider.log(made.id).splitlines() == rig.world.pods.lines
    rig.cloud.breaks_log_after = 3
    assert rig.provider.log(made.id).splitlines() == rig.world.pods.lines
    assert rig.provider.log("no-such-pod") == ""


def test_a_log_that_cannot_be_had_is_said_and_is_not_empty(tmp_path: Path) -> None:
    rig = Rig(tmp_path, rates={"log.lost_before": 1.0})
    made = rig.create()
    with pytest.raises(ProviderSilent, match="log"):
        rig.provider.log(made.id)


@pytest.mark.acceptance(55)
def test_one_logs_in_where_the_pod_is_now_and_only_to_the_key_it_was_given(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    found = rig.provider.connection(made.id)
    assert found is not None
    assert (found.user, found.host, found.port) == ("root", "203.0.113.7", 34446)
    assert found.known_hosts.startswith("[203.0.113.7]:34446 ssh-ed25519 ")
    elsewhere = Runpod(home=tmp_path / "another", owner=OWNER, world=rig.world)
    assert elsewhere.connection(made.id) is None  # that home has no host key to verify the machine
    rig.provider.destroy(made.id)
    assert rig.provider.connection(made.id) is None


def test_two_pods_of_one_mark_both_count_although_no_list_ever_showed_them(tmp_path: Path) -> None:
    # Both answers were lost, both pods came up late and ended themselves while the laptop was closed.
    rig = Rig(tmp_path, Strike("lost_after", 1, "create"), Strike("lost_after", 2, "create"))
    home, request = Home(rig.home, rig.world), rig.request
    rig.home.mkdir(exist_ok=True)
    (rig.home / "owner").write_text(OWNER)
    (tmp_path / "store").mkdir()
    now, rate = rig.world.now(), request.offer.rate_usd_per_hour
    line = LedgerLine(MARK, "moss-1", "moss", 1, "runpod", "x", str(rate), "12", now)
    home.ledger.intend(RunRow("moss-1", "moss", "launching", now, f"file:{tmp_path}/store", "f" * 64, "12"), line)
    home.ledger.begin_create(MARK, now)
    real_http = rig.world.http

    def http(asked: HttpRequest) -> HttpResponse:
        is_list = asked.method == "GET" and asked.url.endswith("/pods")
        return HttpResponse(200, {}, b'{"pods": []}') if is_list else real_http(asked)

    rig.world.http = http  # type: ignore[method-assign]
    with pytest.raises(CreateFailed, match="no clear answer"):
        rig.provider.create(request)
    rig.world.http = real_http  # type: ignore[method-assign]
    assert rig.num_living == 2
    rig.world.pass_time(1500)
    for pod_id in list(rig.cloud.pods):
        rig.cloud.lose(pod_id, "gone")
    refresh(home)
    (line,) = home.ledger.lines()
    assert line.is_at_most
    assert Decimal(line.spend_usd) >= sum(each.usd for each in rig.cloud.bill() if each.kind == "instance")


# --- network volumes ---


@pytest.mark.acceptance(54, 104, 139, "X22")
def test_a_volume_is_made_once_mounted_listed_with_its_price_and_outlives_the_pod(tmp_path: Path) -> None:
    messages = {"volume": "transformer-shared", "volume_size": "1TB", "data_centers": ["EU-RO-1"]}
    rig = Rig(tmp_path, **messages)
    made = rig.create()
    (volume,) = rig.cloud.volumes.values()
    assert (volume["name"], volume["size"], volume["type"]) == (f"homing-{OWNER}-transformer-shared", 1000, "STANDARD")
    pod = next(json.loads(r.body) for r in rig.world.requests if r.method == "POST" and r.url.endswith("/pods"))
    assert pod["mounts"] == {"network": [{"volumeId": volume["id"], "path": "/workspace"}]}
    assert pod["dataCenterIds"] == ["EU-RO-1"]
    rig.provider.destroy(made.id)
    (found,) = rig.provider.list_resources()
    assert (found.kind, found.id, found.is_kept) == ("volume", volume["id"], True)
    assert "1000 GB in EU-RO-1, $70.00 a month" in found.detail
    assert found.rate_usd_per_hour == pytest.approx(Decimal("0.0959"), rel=Decimal("0.001"))
    rig.create()
    assert len(rig.cloud.volumes) == 1
    assert rig.provider.place(MARK).cache_dir == "/workspace/cache/homing"
    rig.provider.destroy_resource(found)
    rig.provider.destroy_resource(found)  # gone already is success
    assert rig.provider.list_resources() == []


@pytest.mark.acceptance(139)
def test_cautions_name_costs_outside_the_limit_and_community_machines_before_anything_is_rented(tmp_path: Path) -> None:
    assert Rig(tmp_path).provider.cautions() == []
    assert Rig(tmp_path, image="x").provider.cautions() == []
    messages = {"volume": "v", "volume_size": "2TB", "data_centers": ["EU-RO-1"], "must_end_itself": False}
    rig = Rig(tmp_path, **messages)
    price, guard = rig.provider.cautions()
    assert "creates the network volume v of 2000 GB: $120.00 a month" in price
    assert "only the local guard can" in guard
    rig.create()
    assert "uses the network volume" in rig.provider.cautions()[0]
    (owner,) = Rig(tmp_path, cloud="any").provider.cautions()
    assert "community hosts" in owner


def test_a_volume_is_found_and_not_created_twice_if_the_answer_was_lost(tmp_path: Path) -> None:
    messages = {"volume": "v", "volume_size": "2TB", "data_centers": ["EU-RO-1"]}
    rig = Rig(tmp_path, **messages)
    request, real_http = rig.request, rig.world.http

    def http(each: HttpRequest) -> HttpResponse:
        reply = real_http(each)
        return HttpResponse(502, {}, b"") if each.method == "POST" and "volumes" in each.url else reply

    rig.world.http = http  # type: ignore[method-assign]
    rig.provider.create(request)
    assert len(rig.cloud.volumes) == 1
    (found,) = rig.provider.list_resources()
    assert "$120.00 a month" in found.detail  # above one TB a GB costs less


@pytest.mark.acceptance(140)
def test_what_a_lost_ledger_knew_is_found_by_reconcile_and_ended(tmp_path: Path) -> None:
    rig = Rig(tmp_path, volume="corpus", volume_size="1TB", data_centers=["EU-RO-1"])
    found = end_what_was_forgotten(rig.create(), rig.home, OWNER, rig.world)
    assert sorted(each.thing for each in found) == ["instance", "volume"]
    (volume,) = rig.provider.list_resources()
    assert volume.is_kept, "data that is meant to last is listed with its price and deleted only on request"
    assert rig.num_living == 0


def test_the_volume_of_a_home_that_is_lost_comes_back_with_its_adopted_run(tmp_path: Path) -> None:
    # It has the old home's mark and no run's, so no command listed it, and it billed forever.
    rig = Rig(tmp_path, volume="corpus", volume_size="1TB", data_centers=["EU-RO-1"])
    rig.create()
    other = Runpod(home=rig.home, owner=OWNER, world=rig.world)
    other.configure(settings_of(volume="anothers", volume_size="1TB", data_centers=["EU-RO-1"]))
    other.create(ProviderContract().make_request(other, make_mark(OWNER, "heather", 1), tmp_path))
    home, now = Home(tmp_path / "new", rig.world), rig.world.now()
    run = make_run(tmp_path)
    run = dataclasses.replace(run, cloud=dataclasses.replace(run.cloud, settings={"runpod": {"volume": "corpus"}}))
    home.world.mkdir(home.run_dir("moss-1"))
    home.world.write(home.run_dir("moss-1") / names.RUN, codec.dumps(run).encode())
    line = LedgerLine(MARK, "moss-1", "moss", 1, "runpod", "x", "2.49", "12", now, "p-1", now, now, "gone", "no")
    row = RunRow("moss-1", "moss", "done", now, "file:/nowhere", "f" * 64, "12")
    assert survey(home).findings == []
    home.ledger.adopt_run(row, [line], [Adopted(MARK, OWNER, "", "")])
    (volume,) = [each for each in survey(home).findings if each.thing == "volume"]
    assert (volume.kind, volume.mark) == ("kept", f"homing-{OWNER}-corpus")
    assert end_finding(home, volume) == ""
    assert [each["name"] for each in rig.cloud.volumes.values()] == [f"homing-{OWNER}-anothers"]


def test_other_peoples_volumes_are_mounted_by_id_and_never_ours_to_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path, volume="v-000001")
    head = {"authorization": f"Bearer {KEY}"}
    body = json.dumps({"name": "corpus", "size": 500, "dataCenter": "US-KS-2"}).encode()
    assert rig.cloud.handle(HttpRequest("POST", f"{URL}/network-volumes", head, body)).status == 201
    assert {offer.device for offer in rig.provider.offers(Needs())} == {"A100", "H100", "RTXA4000"}  # where it is
    rig.create()
    assert rig.provider.list_resources() == []
    with pytest.raises(ProviderRefused, match="does not belong to this homing home directory"):
        rig.provider.destroy_resource(Resource("volume", "v-000001", "corpus", "runpod"))


def test_a_volume_that_cannot_be_is_refused_before_anything_is_rented(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no network volume") as caught:
        Rig(tmp_path, volume="shared").provider.offers(Needs())
    assert "volume_size: 1TB" in caught.value.fix
    rig = Rig(tmp_path, volume="corpus", data_centers=["EU-RO-1"])
    head = {"authorization": f"Bearer {KEY}"}
    for _ in range(2):
        body = json.dumps({"name": "corpus", "size": 500, "dataCenter": "US-KS-2"}).encode()
        rig.cloud.handle(HttpRequest("POST", f"{URL}/network-volumes", head, body))
    with pytest.raises(UsageError, match="More than one"):
        rig.provider.offers(Needs())
    rig = Rig(tmp_path, volume="v-000001", data_centers=["EU-RO-1"])
    rig.cloud.handle(HttpRequest("POST", f"{URL}/network-volumes", head, body))
    with pytest.raises(UsageError, match="is in US-KS-2"):
        rig.provider.offers(Needs())


# --- whether it is asked at all ---


def test_it_is_asked_where_there_is_a_key_in_the_environment_or_runpodctls_own(
    homing_home: Path, tmp_path: Path
) -> None:
    world = RunpodWorld()
    assert "runpod" in configured(homing_home, world)
    world.env.pop(KEY_ENV)
    assert "runpod" not in configured(homing_home, world)
    with pytest.raises(UsageError, match="No RunPod API key") as caught:
        open_provider("runpod", home=homing_home, owner=OWNER, world=world).offers(Needs())
    assert KEY_ENV in caught.value.fix
    world.env["HOME"] = str(tmp_path)
    (tmp_path / ".runpod").mkdir()
    (tmp_path / ".runpod/config.toml").write_text(f'apikey = "{KEY}"\n')
    assert open_provider("runpod", home=homing_home, owner=OWNER, world=world).offers(Needs())


def test_a_wrong_key_is_refused_with_where_to_find_the_right_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.world.env[KEY_ENV] = "wrong"
    with pytest.raises(ProviderRefused, match="rejected the API key") as caught:
        rig.provider.list_owned()
    assert not isinstance(caught.value, ProviderSilent)
    assert "wrong" not in str(caught.value)


# --- the judge itself ---


def test_the_published_document_is_what_judges(tmp_path: Path) -> None:
    """Where it is here: a field, a parameter or a reply that it does not know is found."""
    judge = OpenApi.here("runpod-v2.json")
    if judge is None:
        pytest.skip(f"{FOLDER_ENV} is not set, so nothing is held against the published document")
    rig = Rig(tmp_path)
    made = rig.create()
    assert rig.cloud.openapi is not None
    assert rig.cloud.openapi.num_checked > 3
    body = rig.body()
    for wrong in ({**body, "spot": True}, {**body, "gpu": {**body["gpu"], "bid": 1}}, {"image": "x"}):
        with pytest.raises(Unlike):
            judge.check(HttpRequest("POST", f"{URL}/pods", {}, json.dumps(wrong).encode()))
    with pytest.raises(Unlike, match="ignored in silence"):
        judge.check(HttpRequest("GET", f"{URL}/pods?name=x"))
    shown = json.loads(
        rig.cloud.handle(HttpRequest("GET", f"{URL}/pods/{made.id}", {"authorization": f"Bearer {KEY}"})).body
    )
    for wrong in (
        {**shown, "spot": True},
        {**shown, "status": "MIGRATING"},
        {**shown, "ssh": {**shown["ssh"], "x": 1}},
    ):
        reply = HttpResponse(200, {"content-type": "application/json"}, json.dumps(wrong).encode())
        with pytest.raises(Unlike):
            judge.check(HttpRequest("GET", f"{URL}/pods/{made.id}"), reply)


# --- the account ---

OTHER_KEY, NEW_KEY = "rpa_key-of-another-account", "rpa_second-key-of-the-account"


def with_accounts(rig: Rig) -> Rig:
    """Two accounts behind one address, the first with two keys."""
    other = RunpodWorld()
    other.cloud.account = "user_other"
    clouds = {KEY: (rig.cloud, KEY), NEW_KEY: (rig.cloud, KEY), OTHER_KEY: (other.cloud, KEY)}
    rig.world.cloud = Accounts("authorization", clouds)  # type: ignore[assignment]
    return rig


@pytest.mark.parametrize("may_ask", [True, False], ids=["by its id", "by its key"])
def test_what_the_key_of_another_account_does_not_show_is_not_gone(tmp_path: Path, may_ask: bool) -> None:
    rig = with_accounts(Rig(tmp_path))
    if not may_ask:
        rig.cloud.balance_usd = None  # a key without the right to ask GraphQL
    made = rig.create()
    another_key_ends_nothing(
        made,
        rig.home,
        OWNER,
        rig.world,
        use=lambda: rig.world.env.update({KEY_ENV: OTHER_KEY}),
        use_first=lambda: rig.world.env.update({KEY_ENV: KEY}),
    )
    assert rig.num_living == 0


def test_a_new_key_of_the_same_account_is_known_by_the_id_that_graphql_tells_once(tmp_path: Path) -> None:
    rig = with_accounts(Rig(tmp_path))
    before = rig.provider.account()
    assert (rig.provider.account(), rig.world.asked("POST", "/graphql")) == (before, 1)
    assert KEY not in before
    rig.world.env[KEY_ENV] = NEW_KEY
    assert Runpod(home=rig.home, owner=OWNER, world=rig.world).account() == before


def test_a_key_without_access_to_the_account_id_is_identified_by_its_hash(tmp_path: Path) -> None:
    rig = with_accounts(Rig(tmp_path))
    rig.cloud.balance_usd = None
    messages = rig.provider.account()
    assert messages.startswith("key:")
    assert len(messages) == len("key:") + 16
    assert rig.provider.account() == messages
    assert rig.world.asked("POST", "/graphql") == 1, "once for a while"
    rig.cloud.balance_usd = Decimal(1)
    rig.world.pass_time(300.0)
    assert rig.provider.account() == rig.cloud.account, "it was a bad moment"


@pytest.mark.parametrize("answer", [HttpResponse(502, {}, b""), NetworkError("cut"), HttpResponse(200, {}, b"<html>")])
def test_no_answer_about_the_account_does_not_mean_another_account(
    tmp_path: Path, answer: HttpResponse | NetworkError
) -> None:
    rig = Rig(tmp_path)
    home = line_of(rig.create(), rig.home, OWNER, rig.world)
    real_http = rig.world.http

    def http(request: HttpRequest) -> HttpResponse:
        if not request.url.endswith("/graphql"):
            return real_http(request)
        if isinstance(answer, NetworkError):
            raise answer
        return answer

    rig.world.http = http  # type: ignore[method-assign]
    (pod_id,) = rig.cloud.pods
    rig.cloud.lose(pod_id, "gone")
    home = Home(rig.home, rig.world)
    with pytest.raises(ProviderSilent, match="identify this key's account"):
        home.provider("runpod").account()
    (problem,) = refresh(home)
    assert "Could not check" in problem
    assert "--same-account" not in problem
    assert home.ledger.lines()[0].destroyed_at is None
    rig.world.http = real_http  # type: ignore[method-assign]
    assert refresh(home) == []
    assert home.ledger.lines()[0].state == "gone"


def rented_now(rig: Rig, made: Instance) -> Home:
    """As a launch writes it down, with what the key is called at that moment."""
    home = Home(rig.home, rig.world)
    rig.home.mkdir(exist_ok=True)
    (rig.home / "owner").write_text(OWNER)
    now, account = home.world.now(), home.provider("runpod").account()
    line = LedgerLine(made.mark, "moss-20260101-000000-abcd", "moss", 1, "runpod", "x", "2.49", "12", now)
    line = dataclasses.replace(line, account=account)
    home.ledger.intend(RunRow(line.run_id, "moss", "running", now, "file:/nowhere", "f" * 64, "12"), line)
    home.ledger.begin_create(line.mark, now)
    home.ledger.update(line.mark, instance_id=made.id)
    return home


def test_a_key_that_graphql_did_not_name_at_the_launch_is_the_same_key_later(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    rig.cloud.balance_usd = None  # GraphQL answers 200 with `errors`, for a moment
    home = rented_now(rig, made)
    (line,) = home.ledger.lines()
    assert str(line.account).startswith("key:")
    rig.cloud.balance_usd = Decimal(1)
    rig.world.pass_time(4000)
    rig.cloud.lose(made.id, "gone")  # it ended itself while no command was running
    home = Home(rig.home, rig.world)
    check_own(home, "runpod", [line])
    refresh(home)
    assert home.ledger.lines()[0].state == "gone"


def test_an_answer_of_errors_alone_is_no_other_account_for_a_line_with_an_id(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = rig.create()
    home = rented_now(rig, made)
    (line,) = home.ledger.lines()
    assert line.account == rig.cloud.account
    rig.cloud.balance_usd = None
    rig.world.pass_time(4000)
    home = Home(rig.home, rig.world)
    refresh(home)
    assert home.ledger.account(line.mark) == rig.cloud.account, "shown, and its id is not forgotten"
    rig.cloud.lose(made.id, "gone")
    rig.world.pass_time(60)
    for ask in (
        lambda: check_account(home, home.provider("runpod"), line),
        lambda: check_own(home, "runpod", [line]),
    ):
        with pytest.raises(ProviderSilent, match="currently does not report which account this key belongs to"):
            ask()
    assert any("currently does not report which account this key belongs to" in problem for problem in refresh(home))
    assert home.ledger.lines()[0].destroyed_at is None
    assert not is_elsewhere(home, line)
    rig.cloud.balance_usd = Decimal(1)
    rig.world.pass_time(301)
    refresh(home)
    assert home.ledger.lines()[0].state == "gone"


def test_destroy_works_while_the_account_cannot_be_identified(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    home = line_of(rig.create(), rig.home, OWNER, rig.world)
    real_http, seen = rig.world.http, Home(rig.home, rig.world)
    lists = HttpResponse(200, {}, b'{"pods": []}')  # late, as a list may be

    def http(request: HttpRequest) -> HttpResponse:
        if request.url.endswith("/graphql"):
            raise NetworkError("cut")
        return lists if request.method == "GET" and request.url.endswith("/pods") else real_http(request)

    rig.world.http = http  # type: ignore[method-assign]
    with pytest.raises(StillBilling, match="has not confirmed the destroy"):
        destroy_lines(seen, home.ledger.lines())
    assert rig.num_living == 0, "it was asked to end all the same"
    assert home.ledger.lines()[0].destroyed_at is None


def test_a_rate_is_rounded_up_and_the_noise_of_a_32_bit_float_is_not() -> None:
    assert dollars(Decimal("0.12345")) == Decimal("0.1235"), "never below the bill"
    assert dollars(Decimal("3.2899999618530273")) == Decimal("3.29")
    assert dollars(Decimal("0.7400000095367432")) == Decimal("0.74")


def test_the_disk_rate_is_rounded_up() -> None:
    assert storage_rate(20) == Decimal("0.0028")  # 0.10 * 20 / 730 = 0.00274
    assert storage_rate(73) == Decimal("0.0100")
