"""A home where all is well, and more than twenty things that can be wrong with it, seeded one at a time."""

from __future__ import annotations

import dataclasses
import email.utils
import json
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.fake_world import KEY, FakeWorld
from tests.cloud.rig import make_run

from homing.cloud.api_key_table import ACCOUNTS
from homing.cloud.contact.home_guard import sign_in
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.plan.plan import needs_of
from homing.cloud.plan.timing import checkpoint_bytes
from homing.cloud.providers.fake.provider import KEY_ENV, URL_ENV, Fake
from homing.cloud.providers.registry import PROVIDERS
from homing.doctor.check import Balance, Check, fault
from homing.doctor.computer import check_disk
from homing.doctor.run_checks import CHECKS, check_store, examine
from homing.doctor.subject import Examined
from homing.errors import UsageError
from homing.store.preflight import TO_BE_CREATED
from homing.units import format_bytes
from homing.wire.run_json import Cloud
from homing.world import Completed, HttpRequest, HttpResponse, NetworkError

PACKAGES = [
    {"name": "httpx", "bounds": ">=0.28", "extra": "", "version": "0.28.1"},
    {"name": "torch", "bounds": "<2.14,>=2.11", "extra": "lm", "version": "2.13.0+cpu"},
    {"name": "boto3", "bounds": ">=1.40", "extra": "aws", "version": "1.44.0"},
    {"name": "huggingface_hub", "bounds": ">=1.0", "extra": "hub", "version": "2.4.0"},
]


@dataclass
class Clinic(FakeWorld):
    """A computer of which every fact can be changed; the disk is real, the cloud is in the same process."""

    python_version: tuple[int, ...] = (3, 11, 7)
    packages: list[dict[str, str]] = field(default_factory=lambda: [dict(each) for each in PACKAGES])
    torch: str = '{"version": "2.13.0+cpu", "cuda": null, "cards": 0}'
    cards: str = ""
    container: str = "Up 2 minutes"
    ssh: Completed = field(default_factory=lambda: Completed(0, "", "OpenSSH_9.2p1 Debian"))
    keygen: Completed = field(default_factory=lambda: Completed(255, "", "No such file"))
    env: dict[str, str] = field(default_factory=dict)
    free: int = 50 * 10**9
    read_only: tuple[str, ...] = ()
    date_s: float = 0.0  # how far the provider's clock is from ours
    role: str = "write"
    hub_status: int = 200
    is_down: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def run(self, argv: Any, timeout_s: float, env: Any = None, stdin: str = "") -> Completed:
        words = list(argv)
        if words[1:2] == ["-c"]:
            facts = {"python": list(self.python_version), "packages": self.packages}
            return Completed(0, self.torch if "torch" in words[2] else json.dumps(facts), "boom")
        if words[0] == "nvidia-smi":
            return Completed(0, self.cards, "") if self.cards else Completed(127, "", "not found")
        if words[:2] == ["docker", "ps"]:
            return Completed(0, self.container, "")
        by_name = {"ssh": self.ssh, "ssh-keygen": self.keygen}
        return by_name.get(words[0], Completed(0, f"{words[0]} 1.0", ""))

    def environment(self) -> dict[str, str]:
        return {URL_ENV: "https://cloud.test", KEY_ENV: KEY, "HF_TOKEN": "hf_x", **self.env}

    def http(self, request: HttpRequest) -> HttpResponse:
        if self.is_down:
            raise NetworkError("refused")
        if "whoami" in request.url:
            self.requests.append(request)
            body = {"auth": {"accessToken": {"role": self.role}}}
            return HttpResponse(self.hub_status, {}, json.dumps(body).encode())
        reply = super().http(request)
        date = email.utils.formatdate(self.t + self.date_s, usegmt=True)
        return HttpResponse(reply.status, {**reply.headers, "date": date}, reply.body)

    def free_bytes(self, path: Any) -> int:
        return self.free

    def may_write(self, path: Any) -> bool:
        return str(path) not in self.read_only


@dataclass
class Case:
    world: Clinic
    examined: Examined
    monkeypatch: pytest.MonkeyPatch

    @property
    def home(self) -> Home:
        return self.examined.home

    def findings(self) -> dict[str, Check]:
        return {check.name: check for check in examine(self.examined) if check.is_finding}


@pytest.fixture
def case(homing_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    world = Clinic()
    home = Home(homing_home, world)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / ".env").write_text("RUNPOD_API_KEY=rpa_1\n")
    (folder / ".env").chmod(0o600)
    store = tmp_path / "store"
    store.mkdir()
    keys = homing_home / "keys/login"
    keys.mkdir(parents=True)
    homing_home.chmod(0o700)
    for name, mode in (("key", 0o600), ("key.pub", 0o644)):
        (keys / name).write_text("k")
        (keys / name).chmod(mode)
    assert len(home.owner) == 6
    line = LedgerLine("homing-x-moss-1", "moss-1", "moss", 1, "fake", "cpu", "0.36", "1.00", 0.0, "i-1", 0.0, 9.0)
    home.ledger.adopt_run(RunRow("moss-1", "moss", "done", 0.0, f"file:{store}", "f" * 64), [line], [])
    run = dataclasses.replace(make_run(tmp_path), cloud=Cloud(providers=["fake"]), store=f"file:{store}")
    run = dataclasses.replace(run, limits=dataclasses.replace(run.limits, spend_usd="1.00"))
    return Case(world, Examined(home, folder, run, run_text="name: moss  # YOUR_NAME is a comment\n"), monkeypatch)


@pytest.mark.acceptance(11)
def test_a_healthy_home_has_no_finding_and_every_question_was_asked(case: Case) -> None:
    checks = list(examine(case.examined))
    assert [check for check in checks if check.is_finding] == []
    assert sum(check.state == "ok" for check in checks) >= 20
    assert len(CHECKS) >= 20


Seed = Callable[[Case], None]
SEEDS: dict[str, list[Seed]] = {}


def seeds(name: str) -> Callable[[Seed], Seed]:
    """A fault, and the name of the check that must find it."""

    def keep(seed: Seed) -> Seed:
        SEEDS.setdefault(name, []).append(seed)
        return seed

    return keep


@seeds("python.version")
def old_python(case: Case) -> None:
    case.world.python_version = (3, 10, 4)


@seeds("packages.core")
def a_core_package_is_gone(case: Case) -> None:
    case.world.packages[0]["version"] = ""


@seeds("packages.core")
def a_core_package_is_old(case: Case) -> None:
    case.world.packages[0]["version"] = "0.27.9"


@seeds("packages.lm")
def torch_is_too_new(case: Case) -> None:
    case.world.packages[1]["version"] = "2.14.1"


@seeds("packages.hub")
def the_extra_of_the_store_is_not_installed(case: Case) -> None:
    case.world.packages[3]["version"] = ""
    case.examined.extras.add("hub")


@seeds("torch.loads")
def torch_does_not_load(case: Case) -> None:
    case.world.torch = ""


@seeds("torch.cuda")
def torch_does_not_see_the_card(case: Case) -> None:
    case.world.cards = "NVIDIA H100\n"


@seeds("ssh.client")
def there_is_no_ssh(case: Case) -> None:
    case.world.ssh = Completed(127, "", "not found")


@seeds("ssh.client")
def ssh_is_from_another_age(case: Case) -> None:
    case.world.ssh = Completed(0, "", "OpenSSH_6.6")


@seeds("ssh.keygen")
def there_is_no_ssh_keygen(case: Case) -> None:
    case.world.keygen = Completed(127, "", "not found")


@seeds("container.training")
def the_last_container_died(case: Case) -> None:
    case.world.container = "Exited (137) 2 hours ago"


@seeds("ssh.keys")
def others_can_read_the_private_key(case: Case) -> None:
    (case.home.path / "keys/login/key").chmod(0o644)


@seeds("ssh.keys")
def the_public_half_is_lost(case: Case) -> None:
    (case.home.path / "keys/login/key.pub").unlink()


@seeds("home.writable")
def the_home_cannot_be_written(case: Case) -> None:
    case.world.read_only = (str(case.home.path),)


@seeds("disk.free")
def the_disk_is_full(case: Case) -> None:
    case.world.free = 10**4


@seeds("env.file")
def others_can_read_the_keys(case: Case) -> None:
    (case.examined.folder / ".env").chmod(0o644)


@seeds("runpod.placeholder")
def a_key_is_a_placeholder(case: Case) -> None:
    case.world.env["RUNPOD_API_KEY"] = "YOUR_API_KEY"


@seeds("shadeform.placeholder")
def a_key_was_copied_with_its_quotes(case: Case) -> None:
    case.world.env["SHADEFORM_API_KEY"] = '"abc"'


@seeds("home.owner")
def the_owner_is_damaged(case: Case) -> None:
    case.examined.facts  # noqa: B018
    (case.home.path / "owner").write_text("??")


@seeds("home.private")
def others_can_read_the_home(case: Case) -> None:
    case.home.path.chmod(0o755)


@seeds("ledger.sound")
def the_ledger_is_damaged(case: Case) -> None:
    path = case.home.path / "ledger.sqlite"
    data = bytearray(path.read_bytes())
    data[:200] = b"\xff" * 200
    path.write_bytes(data)


@seeds("ledger.sound")
def a_newer_homing_wrote_the_ledger(case: Case) -> None:
    with sqlite3.connect(case.home.path / "ledger.sqlite") as database:
        database.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    database.close()
    case.examined.home = Home(case.home.path, case.world)


@seeds("ledger.ends")
def an_end_was_never_confirmed(case: Case) -> None:
    case.home.ledger.reopen("homing-x-moss-1", instance_id="i-1", note="", now=0.0)
    case.home.ledger.update("homing-x-moss-1", destroy_asked_at=1.0)
    sign_in(case.home, 60.0, reached=["local", "fake"])  # a guard is on duty, so this one thing is wrong


@seeds("guard.duty")
def something_bills_and_no_guard_is_on_duty(case: Case) -> None:
    case.home.ledger.reopen("homing-x-moss-1", instance_id="i-1", note="", now=0.0)


@seeds("run.file")
def the_run_file_does_not_resolve(case: Case) -> None:
    case.examined.run_error = UsageError("runs/moss.yaml has 1 mistake.", "runs/moss.yaml:3: modle", "model")


@seeds("run.placeholders")
def the_run_file_has_a_placeholder(case: Case) -> None:
    case.examined.run_text = "name: moss\nstore: s3://YOUR_BUCKET/moss\n"


@seeds("run.data")
def the_text_is_not_prepared(case: Case) -> None:
    case.examined.is_prepared = False


def _store(case: Case, url: str) -> None:
    assert case.examined.run is not None
    case.examined.run = dataclasses.replace(case.examined.run, store=url)


@seeds("store.reached")
def the_store_could_not_be_made(case: Case) -> None:
    _store(case, f"file:{case.examined.folder}/none/store")
    case.world.read_only = (str(case.examined.folder),)


@seeds("store.probe")
def the_store_lets_an_exclusive_write_replace(case: Case) -> None:
    case.monkeypatch.setattr("homing.store.file.FileStore.create_if_absent", lambda *args: True)


@seeds("store.probe")
def the_store_keeps_what_is_deleted(case: Case) -> None:
    case.monkeypatch.setattr("homing.store.file.FileStore.delete_many", lambda *args: None)


@seeds("hub.token")
def the_hub_refuses_the_token(case: Case) -> None:
    case.world.hub_status = 401


@seeds("hub.token")
def the_token_may_only_read(case: Case) -> None:
    case.world.role = "read"


@seeds("clock.skew")
def the_clock_is_off(case: Case) -> None:
    case.world.date_s = 600.0


@seeds("fake.key")
def the_key_is_refused(case: Case) -> None:
    case.world.env[KEY_ENV] = "another"


@seeds("fake.key")
def the_provider_is_down(case: Case) -> None:
    case.world.is_down = True
    case.world.env["HF_TOKEN"] = ""


@seeds("fake.quota")
def the_quota_is_nothing(case: Case) -> None:
    short = [fault("fake.quota", "The quota for G instances is 0.", "Ask for more at the provider.")]
    case.monkeypatch.setattr(Fake, "checks", lambda self: short, raising=False)


def _left(case: Case, usd: str) -> None:
    balance = Balance(Decimal(usd), Decimal("0.36"))
    case.monkeypatch.setattr(Fake, "balance", lambda self: balance, raising=False)


@seeds("fake.balance")
def the_balance_will_not_last_for_the_run(case: Case) -> None:
    _left(case, "0.99")  # its limit is $1.00


@seeds("fake.balance")
def nothing_is_left_of_the_balance(case: Case) -> None:
    _left(case, "-0.05")


@seeds("fake.offers")
def nothing_fits(case: Case) -> None:
    assert case.examined.run is not None
    cloud = dataclasses.replace(case.examined.run.cloud, gpu="B200")
    case.examined.run = dataclasses.replace(case.examined.run, cloud=cloud)


@seeds("shadeform.key")
def a_named_provider_has_no_key(case: Case) -> None:
    case.examined.named = ("shadeform",)


@seeds("nimbus.known")
def a_named_provider_does_not_exist(case: Case) -> None:
    case.examined.named = ("nimbus",)


@seeds("packages.hub")
def the_client_of_a_named_provider_is_not_installed(case: Case) -> None:
    case.monkeypatch.setitem(PROVIDERS, "sdk", ("homing.cloud.providers.fake.provider:Fake", "hub"))
    case.examined.named = ("sdk",)
    case.world.packages[3]["version"] = ""


SEEDED = [(name, seed) for name, found in SEEDS.items() for seed in found]


@pytest.mark.acceptance(10, 11, 78, 147)
@pytest.mark.parametrize(("name", "seed"), SEEDED, ids=[seed.__name__ for _, seed in SEEDED])
def test_a_seeded_fault_is_found_with_its_fix_and_nothing_else_is(case: Case, name: str, seed: Seed) -> None:
    seed(case)
    found = case.findings()
    assert list(found) == [name]
    assert found[name].text
    assert found[name].fix


@pytest.mark.acceptance("X20")
def test_a_balance_that_lasts_is_well(case: Case) -> None:
    _left(case, "1.00")
    (found,) = [check for check in examine(case.examined) if check.name == "fake.balance"]
    assert (found.state, found.text) == ("ok", "$1.00 left at fake, spending $0.36/h.")


@pytest.mark.acceptance("X22")
def test_what_has_billed_longest_is_named_with_its_age_and_dollars(case: Case) -> None:
    something_bills_and_no_guard_is_on_duty(case)
    case.world.t = 26 * 3600.0  # at $0.36 an hour since 0
    text = case.findings()["guard.duty"].text
    assert "1 instance may be billing, the oldest (moss) for 1d02h, $9.36 so far" in text


def test_more_than_twenty_faults_are_seeded() -> None:
    assert len(SEEDED) >= 30


@pytest.mark.acceptance(31)
def test_of_two_hub_tokens_the_one_in_use_is_reported(case: Case) -> None:
    case.world.env["HUGGINGFACEHUB_API_TOKEN"] = "hf_y"
    case.world.requests.clear()
    (found,) = [check for check in examine(case.examined) if check.name == "hub.token"]
    assert found.text == "HUGGINGFACEHUB_API_TOKEN is valid; its role is write."
    (asked,) = [request for request in case.world.requests if "whoami" in request.url]
    assert asked.headers["authorization"] == "Bearer hf_y"


@pytest.mark.acceptance(10)
def test_doctor_creates_and_changes_nothing_and_only_reads_from_the_cloud(case: Case, tmp_path: Path) -> None:
    def tree() -> dict[str, bytes]:
        paths = [Path(base) / name for base, _, names in os.walk(tmp_path) for name in names]
        return {str(path): path.read_bytes() for path in paths if not path.name.endswith(("-wal", "-shm"))}

    before = tree()
    case.world.requests.clear()
    list(examine(case.examined))
    assert tree() == before
    assert {request.method for request in case.world.requests} == {"GET"}
    fresh = Home(tmp_path / "fresh", case.world)
    list(examine(Examined(fresh, tmp_path / "project")))
    assert not (tmp_path / "fresh").exists()


def test_a_provider_that_hangs_is_a_finding_and_not_the_end(case: Case) -> None:
    case.monkeypatch.setattr(case.world, "together", lambda calls, timeout_s: [TimeoutError() for _ in calls])
    assert "No answer" in case.findings()["fake.key"].text


@pytest.mark.acceptance(113)
@pytest.mark.parametrize("name", ["aws", "modal", "runpod", "shadeform"])
def test_every_fault_of_an_account_links_to_its_page(case: Case, name: str) -> None:
    account = ACCOUNTS[name]
    case.examined.named = (name,)
    case.world.env |= {"HOME": "/nowhere", **dict.fromkeys(account.keys, "")}
    found = {which: check for which, check in case.findings().items() if which.startswith(f"{name}.")}
    assert f"{name}.key" in found
    assert {check.page for check in found.values()} <= {account.key_page, account.usage_page}


def test_the_disk_is_measured_against_the_run_that_is_named(case: Case) -> None:
    run = case.examined.run
    assert run is not None
    case.world.free = checkpoint_bytes(run)
    (found,) = check_disk(case.examined)
    assert found.state == "ok", "it is small, and so is what it needs"
    case.examined.named = ("local",)
    del case.examined.providers
    (found,) = check_disk(case.examined)
    assert found.text.endswith(f"training moss needs {format_bytes(needs_of(run).disk_bytes)}.")
    case.examined.run = None
    (found,) = check_disk(case.examined)
    assert found.text.endswith("a fetched model may need 2.00 GB.")


def test_a_store_that_a_launch_would_create_is_not_created_by_doctor(case: Case) -> None:
    note = f"hf:me/fresh does not exist; {TO_BE_CREATED}"
    _store(case, "hf:me/fresh")
    case.monkeypatch.setattr("homing.doctor.run_checks.preflight", lambda *args, **kwargs: [note])
    case.monkeypatch.setattr("homing.doctor.run_checks.try_out", lambda *args: pytest.fail("the probe was written"))
    reached, probe = check_store(case.examined)
    assert (reached.state, reached.text) == ("ok", note)
    assert (probe.state, probe.text) == ("skipped", "The store does not exist yet, and doctor does not create it.")
