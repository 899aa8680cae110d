"""A host that one can log in to, as a provider: against a real OpenSSH server on loopback."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contracts.providers import SECRET, RememberingContract
from tests.doubles.sshd import Sshd, running_sshd

from homing.cloud.ledger.mark import make_mark
from homing.cloud.providers.base import Needs, Provider, Request, wait_until
from homing.cloud.providers.local.provider import Local
from homing.cloud.providers.ssh.connection import HostKeyChanged, HostKeyUnknown, fingerprint
from homing.cloud.providers.ssh.provider import Ssh
from homing.errors import CreateFailed, ProviderRefused, UsageError
from homing.wire import file_names
from homing.wire.boot_json import Input
from homing.world import Completed, World

pytestmark = pytest.mark.machine
WORLD = World()
OWNER = WORLD.random_hex(6)  # the host at the other end is this computer, where other tests may run


def marked(mark: str) -> list[int]:
    return [process.pid for process, value in WORLD.marked(file_names.MARK_ENV, mark) if value == mark]


def eventually(check: object, timeout_s: float = 30) -> None:
    assert callable(check)
    assert wait_until(check, timeout_s=timeout_s, every_s=0.1, world=WORLD)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    yield from running_sshd(tmp_path_factory.mktemp("ssh") / "sshd")


@pytest.fixture
def homing_home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def opened(home: Path, sshd: Sshd | None, *, owner: str = OWNER, world: World = WORLD, **settings: object) -> Ssh:
    provider = Ssh(home=home, owner=owner, world=world)
    if sshd is not None:
        provider.configure(sshd.settings(**settings))
    return provider


@pytest.mark.slow  # every call is a login
class TestSsh(RememberingContract):
    @pytest.fixture
    def owner(self) -> str:
        return OWNER

    @pytest.fixture
    def provider(self, homing_home: Path, sshd: Sshd, tmp_path: Path) -> Provider:
        return opened(homing_home, sshd, work_dir=str(tmp_path / "there"))

    @pytest.fixture
    def stranger(self, homing_home: Path, sshd: Sshd, tmp_path: Path) -> Provider:
        return opened(homing_home, sshd, owner="zzz999", work_dir=str(tmp_path / "there"))

    @pytest.mark.acceptance(48)
    def test_the_id_alone_finds_the_host_without_the_run_file(
        self, provider: Provider, request_: Request, homing_home: Path
    ) -> None:
        made = provider.create(request_)
        later = opened(homing_home, None)
        assert later.describe(made.id).state == "ready"
        assert [instance.id for instance in later.list_owned()] == [made.id]
        later.destroy(made.id)
        assert later.describe(made.id).state == "gone"
        assert marked(request_.mark) == []

    def test_on_a_host_that_is_this_computer_it_is_not_taken_for_an_instance_of_local(
        self, provider: Provider, request_: Request, owner: str, homing_home: Path
    ) -> None:
        provider.create(request_)
        assert Local(home=homing_home, owner=owner, world=World()).list_owned() == []

    def test_a_home_that_does_not_know_the_host_never_calls_its_instance_gone(
        self, provider: Provider, request_: Request, tmp_path: Path
    ) -> None:
        made = provider.create(request_)
        elsewhere = opened(tmp_path / "other-home", None)
        for call in (elsewhere.describe, elsewhere.destroy):
            with pytest.raises(ProviderRefused, match="has no record of the SSH host"):
                call(made.id)

    def test_it_runs_in_a_session_of_its_own_and_outlives_the_connection(
        self, provider: Provider, request_: Request
    ) -> None:
        provider.create(request_)
        (pid,) = marked(request_.mark)
        assert os.getsid(pid) == pid
        assert provider.describe(request_.mark).is_running

    def test_a_secret_reaches_the_first_process_and_nothing_else(
        self, provider: Provider, request_: Request, tmp_path: Path, homing_home: Path
    ) -> None:
        seen: list[list[str]] = []

        class Watching(World):
            def run(self, argv, timeout_s, env=None, stdin=""):  # type: ignore[no-untyped-def]
                seen.append(list(argv))
                return super().run(argv, timeout_s, env, stdin)

        provider._host._world = Watching()  # type: ignore[attr-defined]
        provider.create(request_)
        (pid,) = marked(request_.mark)
        assert SECRET.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        assert SECRET not in str(seen)
        for folder in (tmp_path / "there", homing_home):
            files = [path for path in folder.rglob("*") if path.is_file()]
            assert files
            assert [path for path in files if SECRET.encode() in path.read_bytes()] == []

    def test_what_died_by_itself_bills_until_it_is_destroyed(self, provider: Provider, request_: Request) -> None:
        made = provider.create(request_)
        for pid in marked(request_.mark):
            os.kill(pid, 9)
        eventually(lambda: not provider.describe(made.id).is_running)
        assert provider.describe(made.id).billing == "yes"
        assert [instance.id for instance in provider.list_owned()] == [made.id]

    def test_the_command_that_ends_billing_fells_the_whole_tree(self, provider: Provider, request_: Request) -> None:
        made = provider.create(request_)
        env = {**os.environ, file_names.MARK_ENV: request_.mark}
        assert subprocess.run(request_.order.boot.end_billing.argv, env=env, timeout=60, check=False).returncode == 0
        gone = self.gone(provider, made.id)
        assert gone.ended_at is not None
        assert "ended by agent" in gone.detail
        assert marked(request_.mark) == []

    def test_a_create_that_comes_after_the_destroy_starts_nothing(self, provider: Provider, request_: Request) -> None:
        provider.destroy(request_.mark)
        with pytest.raises(CreateFailed) as failed:
            provider.create(request_)
        assert failed.value.instance_id is not None
        assert marked(request_.mark) == []
        assert provider.list_owned() == []

    def test_two_creates_at_once_make_one_process(self, provider: Provider, request_: Request) -> None:
        threads = [threading.Thread(target=provider.create, args=(request_,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(marked(request_.mark)) == 1

    @pytest.mark.acceptance(36)
    def test_a_connection_cut_in_the_middle_is_tried_again_and_makes_one_instance(
        self, provider: Provider, request_: Request, sshd: Sshd
    ) -> None:
        num_cut = 0

        class Cutting(World):
            def run(self, argv, timeout_s, env=None, stdin=""):  # type: ignore[no-untyped-def]
                nonlocal num_cut
                if num_cut or '"create"' not in stdin:
                    return super().run(argv, timeout_s, env, stdin)
                # The order arrives whole and is carried out; the way back is cut.
                with subprocess.Popen(list(argv), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
                    assert child.stdin is not None
                    child.stdin.write(stdin.encode())
                    child.stdin.close()
                    eventually(lambda: marked(request_.mark))
                    num_cut = sshd.cut_connections() or 1
                return Completed(255, "", "Connection to 127.0.0.1 closed by remote host.")

        provider._host._world = Cutting()  # type: ignore[attr-defined]
        provider.create(request_)
        assert num_cut
        assert len(marked(request_.mark)) == 1
        assert len(provider.list_owned()) == 1

    def test_a_file_store_that_the_host_does_not_see_is_refused_before_anything_starts(
        self, provider: Provider, request_: Request, tmp_path: Path
    ) -> None:
        missing = Input("objects/" + "0" * 64, "run/run.json", 3, "0" * 64)
        boot = dataclasses.replace(request_.order.boot, inputs=[missing])
        blind = dataclasses.replace(request_, order=dataclasses.replace(request_.order, boot=boot))
        with pytest.raises(UsageError, match="cannot access the store") as refused:
            provider.create(blind)
        assert "s3:" in refused.value.fix
        assert marked(request_.mark) == []
        assert provider.list_owned() == []
        assert not (tmp_path / "there" / request_.mark).exists()

    def test_what_an_instance_left_behind_goes_days_after_its_end_and_nothing_else_does(
        self, provider: Provider, request_: Request, owner: str, tmp_path: Path
    ) -> None:
        def left(name: str, age_days: float) -> Path:
            folder = tmp_path / "there" / name
            (folder / "work").mkdir(parents=True)
            (folder / "ended.json").write_text('{"ended_at": 1}')
            then = WORLD.now() - age_days * 86400
            os.utime(folder / "ended.json", (then, then))
            return folder / "work"

        old, young = left(f"homing-{owner}-old-1", 4), left(f"homing-{owner}-young-1", 2)
        running, foreign = left(f"homing-{owner}-live-1", 4), left("homing-zzz999-old-1", 4)
        (running.parent / "ended.json").unlink()
        provider.create(request_)
        assert [path.exists() for path in (old, young, running, foreign)] == [False, True, True, True]

    def test_the_connection_is_ready_to_use_and_pinned(self, provider: Provider, request_: Request, sshd: Sshd) -> None:
        made = provider.create(request_)
        connection = provider.connection(made.id)
        assert connection is not None
        assert (connection.port, connection.key_path) == (sshd.port, str(sshd.key))
        assert connection.known_hosts == f"[127.0.0.1]:{sshd.port} {sshd.public_host_key}"

    def test_the_offer_tells_what_the_host_has(self, provider: Provider, sshd: Sshd) -> None:
        (offer,) = provider.offers(Needs())
        assert offer.num_cores == os.cpu_count()
        assert offer.memory_bytes > 0
        assert offer.host_bytes == offer.memory_bytes, "it has no card here"
        assert offer.disk_bytes > 0
        assert offer.name.endswith(f"@127.0.0.1:{sshd.port}")


def test_a_card_is_known_by_its_name_and_driver(sshd: Sshd, homing_home: Path, tmp_path: Path) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    row = "NVIDIA H100 80GB HBM3, 81559, 570.86.15"
    smi.write_text(f'#!/bin/sh\n[ "$1" ] && printf "{row}\\n{row}\\n" || echo "CUDA Version: 12.8"\n')
    smi.chmod(0o755)
    (offer,) = opened(homing_home, sshd, python=_python_with_path(tmp_path, smi.parent)).offers(Needs(gpu="H100"))
    assert (offer.device, offer.num_gpus) == ("H100", 2)


def _python_with_path(tmp_path: Path, folder: Path) -> str:
    script = tmp_path / "python-there"
    script.write_text(f'#!/bin/sh\nPATH="{folder}:$PATH" exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


# --- the key ---


def test_a_host_that_was_never_met_is_shown_by_its_fingerprint_and_nothing_is_sent(
    sshd: Sshd, homing_home: Path
) -> None:
    provider = opened(homing_home, sshd, host_key="")
    with pytest.raises(HostKeyUnknown) as unknown:
        provider.offers(Needs())
    assert unknown.value.line == f"[127.0.0.1]:{sshd.port} {sshd.public_host_key}"
    said = subprocess.run(["ssh-keygen", "-lf", sshd.host_key], capture_output=True, text=True, check=True).stdout
    assert fingerprint(unknown.value.line) == said.split()[1]
    assert said.split()[1] in unknown.value.why
    unknown.value.host.trust(unknown.value.line)
    assert opened(homing_home, sshd, host_key="").offers(Needs())


def test_a_key_in_known_hosts_is_taken_also_when_its_name_is_hashed(
    sshd: Sshd, homing_home: Path, tmp_path: Path
) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{sshd.port} {sshd.public_host_key}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    assert "127.0.0.1" not in known.read_text()
    assert opened(homing_home, sshd, host_key="", known_hosts=str(known)).offers(Needs())


@pytest.mark.acceptance(36)
def test_a_changed_host_key_is_refused_loudly_and_no_order_is_sent(
    sshd: Sshd, homing_home: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    provider = opened(homing_home, sshd, host_key=" ".join(other.with_suffix(".pub").read_text().split()[:2]))
    for call in (lambda: provider.offers(Needs()), provider.list_owned):
        with pytest.raises(HostKeyChanged) as changed:
            call()
        assert "DIFFERS FROM THE PINNED ONE" in changed.value.what
        assert changed.value.exit_code == 4


def test_a_pinned_key_counts_more_than_known_hosts(sshd: Sshd, homing_home: Path, tmp_path: Path) -> None:
    assert opened(homing_home, sshd).offers(Needs())
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{sshd.port} {other.with_suffix('.pub').read_text()}\n")
    assert opened(homing_home, sshd, host_key="", known_hosts=str(known)).offers(Needs())


@pytest.mark.parametrize("key", ["ssh-ed25519", "ssh-ed25519 ===", "nonsense"])
def test_a_host_key_that_is_none_is_refused(sshd: Sshd, homing_home: Path, key: str) -> None:
    with pytest.raises(UsageError, match="not a public key"):
        opened(homing_home, sshd, host_key=key).offers(Needs())


# --- what can go wrong on the way ---


@pytest.mark.acceptance(111)
def test_a_private_key_that_others_can_read_is_refused_with_the_command_that_mends_it(
    sshd: Sshd, homing_home: Path, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_bytes(sshd.key.read_bytes())
    key.chmod(0o644)
    with pytest.raises(UsageError) as refused:
        opened(homing_home, sshd, key_file=str(key)).offers(Needs())
    assert refused.value.fix == f"Run: chmod 600 {key}"


@pytest.mark.acceptance(36)
def test_a_key_that_is_not_there_or_not_let_in_is_said(sshd: Sshd, homing_home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        opened(homing_home, sshd, key_file=str(tmp_path / "absent")).offers(Needs())
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    with pytest.raises(ProviderRefused, match="rejected the login"):
        opened(homing_home, sshd, key_file=str(other)).offers(Needs())


@pytest.mark.acceptance(36)
@pytest.mark.slow
def test_a_host_that_cannot_be_reached_raises_and_is_never_gone(
    sshd: Sshd, homing_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = opened(homing_home, sshd, work_dir=str(tmp_path / "there"))
    suite = TestSsh()
    request = suite.make_request(provider, make_mark(OWNER, "moss-20260101-000000-abcd", 1), tmp_path)
    made = provider.create(request)
    sshd.stop()
    try:
        later = opened(homing_home, None, world=_Hasty())
        for call in (lambda: later.describe(made.id), lambda: later.destroy(made.id), later.list_owned):
            with pytest.raises(ProviderRefused, match="is unreachable"):
                call()
        assert marked(request.mark)
    finally:
        sshd.start()
    later.destroy(made.id)
    assert later.describe(made.id).state == "gone"


@pytest.mark.slow
def test_of_two_hosts_the_one_that_answers_is_listed_and_the_other_is_unknown(
    sshd: Sshd, homing_home: Path, tmp_path: Path
) -> None:
    other = Sshd(tmp_path / "second")
    other.start()
    suite, made = TestSsh(), []
    for number, server in enumerate((sshd, other), 1):
        provider = opened(homing_home, server, work_dir=str(tmp_path / f"there-{number}"))
        mark = make_mark(OWNER, f"moss-20260101-000000-abc{number}", 1)
        made.append(provider.create(suite.make_request(provider, mark, tmp_path)))
    other.stop()
    later = opened(homing_home, None, world=_Hasty())
    listed = later.list_owned()
    assert {instance.mark: instance.state for instance in listed} == {made[0].mark: "ready", made[1].mark: "unknown"}
    assert all(instance.billing != "no" for instance in listed)
    other.start()
    for instance in made:
        later.destroy(instance.id)
    assert later.list_owned() == []
    other.stop()


class _Hasty(World):
    def sleep(self, seconds: float) -> None:
        super().sleep(min(seconds, 0.05))


def test_login_shell_output_is_distinguished_from_a_missing_python(
    sshd: Sshd, homing_home: Path, tmp_path: Path
) -> None:
    loud = tmp_path / "loud"
    loud.write_text(f'#!/bin/sh\necho "Welcome! homing-answer is not this"\nexec {sys.executable} "$@"\n')
    loud.chmod(0o755)
    assert opened(homing_home, sshd, python=str(loud)).offers(Needs())
    with pytest.raises(ProviderRefused, match="has no interpreter /nowhere/python3"):
        opened(homing_home, sshd, python="/nowhere/python3").offers(Needs())


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "a b", "", "host;ls"])
def test_a_host_that_would_be_an_option_or_a_command_is_refused(homing_home: Path, sshd: Sshd, host: str) -> None:
    with pytest.raises(UsageError, match="is not a valid host"):
        opened(homing_home, sshd, host=host)
