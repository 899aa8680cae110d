"""This computer as a provider."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from decimal import Decimal
from pathlib import Path

import pytest
from tests.contracts.providers import RememberingContract

from homing.cloud.ledger.mark import make_mark
from homing.cloud.providers.base import Needs, Provider, Request, wait_until
from homing.cloud.providers.local import end_billing
from homing.cloud.providers.local.provider import Local
from homing.cloud.providers.simulated_machine import MACHINE_ENV
from homing.errors import CreateFailed, ProviderRefused, UsageError
from homing.wire import file_names
from homing.world import Process, World

WORLD = World()


def marked(mark: str) -> list[int]:
    return [process.pid for process, value in WORLD.marked(file_names.MARK_ENV, mark) if value == mark]


def eventually(check: object, timeout_s: float = 20) -> None:
    assert callable(check)
    assert wait_until(check, timeout_s=timeout_s, every_s=0.05, world=WORLD)


class TestLocal(RememberingContract):
    @pytest.fixture
    def provider(self, owner: str, homing_home: Path) -> Provider:
        return Local(home=homing_home, owner=owner, world=WORLD)

    @pytest.fixture
    def stranger(self, homing_home: Path) -> Provider:
        return Local(home=homing_home, owner="zzz999", world=WORLD)

    def run_script(self, request: Request, script: str) -> None:
        Path(request.order.files[0].source).write_text(script)

    @pytest.mark.acceptance(48)
    def test_it_outlives_the_process_that_made_it(
        self, provider: Provider, request_: Request, owner: str, homing_home: Path, tmp_path: Path
    ) -> None:
        root = Path(__file__).parents[4]
        code = (
            f"import sys; from pathlib import Path; sys.path.insert(0, {str(root)!r})\n"
            "from tests.cloud.providers.local.test_provider import TestLocal, Local, WORLD\n"
            f"p = Local(home=Path({str(homing_home)!r}), owner={owner!r}, world=WORLD)\n"
            f"p.create(TestLocal().make_request(p, {request_.mark!r}, Path({str(tmp_path)!r})))\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        assert provider.describe(request_.mark).state == "ready"
        assert marked(request_.mark)

    def test_destroy_ends_grandchildren_that_ignore_sigterm_in_sessions_of_their_own(
        self, provider: Provider, request_: Request
    ) -> None:
        self.run_script(
            request_,
            "import signal, subprocess, sys, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "if len(sys.argv) > 1 and sys.argv[1].isdigit() and int(sys.argv[1]) < 3:\n"
            "    subprocess.Popen([sys.executable, __file__, str(int(sys.argv[1]) + 1)], start_new_session=True)\n"
            "elif not sys.argv[1].isdigit():\n"
            "    subprocess.Popen([sys.executable, __file__, '1'], start_new_session=True)\n"
            "time.sleep(600)\n",
        )
        made = provider.create(request_)
        eventually(lambda: len(marked(made.mark)) == 4)
        provider.destroy(made.id)
        assert marked(made.mark) == []
        assert provider.describe(made.id).state == "gone"

    def test_the_command_for_the_agent_ends_billing_and_the_whole_tree(
        self, provider: Provider, request_: Request
    ) -> None:
        # The stand-in agent runs the command it was given, as its own child, then would sleep for ever.
        self.run_script(
            request_,
            "import json, subprocess, sys, time\n"
            "boot = json.load(open(sys.argv[1]))\n"
            "time.sleep(0.5)\n"
            "subprocess.run(boot['end_billing']['argv'], check=True)\n"
            "time.sleep(600)\n",
        )
        made = provider.create(request_)
        gone = self.gone(provider, made.id)
        assert marked(made.mark) == []
        assert gone.detail == "ended by agent"
        assert gone.ended_at is not None
        assert gone.spend_usd is not None
        provider.destroy(made.id)
        assert provider.describe(made.id).ended_at == gone.ended_at

    def test_when_its_processes_died_by_themselves_it_still_bills_and_says_so(
        self, provider: Provider, request_: Request
    ) -> None:
        made = provider.create(request_)
        for pid in marked(made.mark):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not marked(made.mark))
        seen = provider.describe(made.id)
        assert (seen.state, seen.billing, seen.is_running) == ("ready", "yes", False)
        assert "exited" in seen.detail
        assert [instance.id for instance in provider.list_owned()] == [made.id]
        provider.destroy(made.id)
        assert provider.list_owned() == []

    def test_it_charges_its_rate_from_creation_to_the_end(
        self, request_: Request, owner: str, homing_home: Path
    ) -> None:
        class Clock(World):
            t = 1_000_000.0

            def now(self) -> float:
                return self.t

            def boottime(self) -> float:
                return self.t

        clock = Clock()
        provider = Local(home=homing_home, owner=owner, world=clock)
        made = provider.create(request_)
        clock.t += 1000
        assert provider.describe(made.id).spend_usd == Decimal("0.1")
        clock.t += 1000
        provider.destroy(made.id)
        clock.t += 5000
        assert provider.describe(made.id).spend_usd == Decimal("0.2")

    def test_the_rate_comes_from_the_environment_and_a_wrong_one_is_refused(
        self, provider: Provider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOMING_LOCAL_RATE", "$7.20")
        assert provider.offers(Needs())[0].rate_usd_per_hour == Decimal("7.20")
        monkeypatch.setenv("HOMING_LOCAL_RATE", "cheap")
        with pytest.raises(UsageError):
            provider.offers(Needs())

    def test_a_create_cut_off_before_the_process_is_shown_and_can_be_finished_or_ended(
        self, provider: Provider, request_: Request, owner: str, homing_home: Path
    ) -> None:
        class Cut(World):
            def spawn(self, *args: object, **kwargs: object) -> int:
                raise KeyboardInterrupt

        cut = Local(home=homing_home, owner=owner, world=Cut())
        with pytest.raises(KeyboardInterrupt):
            cut.create(request_)
        assert [instance.state for instance in provider.list_owned()] == ["booting"]
        assert provider.create(request_).state == "ready"

    def test_nothing_starts_where_the_end_was_asked_for(self, provider: Provider, request_: Request) -> None:
        provider.create(request_)
        provider.destroy(request_.mark)
        with pytest.raises(CreateFailed) as caught:
            provider.create(request_)
        assert caught.value.instance_id == request_.mark
        assert marked(request_.mark) == []

    def test_marks_that_begin_alike_are_not_confused(
        self, provider: Provider, owner: str, request_: Request, tmp_path: Path
    ) -> None:
        provider.create(request_)
        tenth = self.make_request(provider, request_.mark + "0", tmp_path)
        provider.create(tenth)
        provider.destroy(request_.mark)
        assert provider.describe(tenth.mark).state == "ready"
        assert marked(tenth.mark)

    def test_processes_without_their_folder_have_an_unknown_state_and_can_be_destroyed(
        self, provider: Provider, request_: Request, homing_home: Path, tmp_path: Path
    ) -> None:
        ready = tmp_path / "ready"
        self.run_script(request_, f"import time\nopen({str(ready)!r}, 'w').close()\ntime.sleep(600)\n")
        provider.create(request_)
        eventually(ready.exists)
        WORLD.rmtree(homing_home / "local")
        (lost,) = provider.list_owned()
        assert (lost.state, lost.billing) == ("unknown", "yes")
        provider.destroy(lost.id)
        assert marked(request_.mark) == []

    def test_keys_of_other_services_do_not_reach_the_instance(
        self, provider: Provider, owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RUNPOD_API_KEY", "secret-of-the-person")
        request = self.make_request(provider, make_mark(owner, "env", 1), tmp_path)
        assert "RUNPOD_API_KEY" not in request.env
        assert "PATH" in request.env

    def test_a_foreign_id_is_refused(self, provider: Provider) -> None:
        with pytest.raises(ProviderRefused):
            provider.destroy("homing-zzz999-other-1")
        with pytest.raises(ProviderRefused):
            provider.destroy("../../etc")

    def test_a_damaged_record_is_unknown_and_billing_and_can_still_be_destroyed(
        self, provider: Provider, request_: Request, homing_home: Path
    ) -> None:
        provider.create(request_)
        record = homing_home / "local" / request_.mark / "instance.json"
        record.write_bytes(record.read_bytes()[:10])
        (seen,) = provider.list_owned()
        assert (seen.state, seen.billing) == ("unknown", "yes")
        assert "damaged" in seen.detail
        provider.destroy(request_.mark)
        assert provider.list_owned() == []

    def test_a_damaged_end_is_not_believed_and_hides_no_other(
        self, provider: Provider, request_: Request, homing_home: Path
    ) -> None:
        provider.create(request_)
        other = homing_home / "local" / f"{request_.mark[:-1]}9"
        other.mkdir()
        for name in ("instance.json", "ended.json"):
            (other / name).write_text("{")
        assert {instance.state for instance in provider.list_owned()} == {"ready"}
        (other / "instance.json").write_text('{"rate_usd_per_hour": "1", "created_at": 1}')
        assert {instance.state for instance in provider.list_owned()} == {"ready", "unknown"}
        provider.destroy(request_.mark)
        assert [instance.state for instance in provider.list_owned()] == ["unknown"]


class Flickering(World):
    """A process table in which what another provider's machine started begins and ends between two looks."""

    def __init__(self, owner: str) -> None:
        self.inside = [[5], [6]]  # in the first look and in the second
        self.reference, self.ours = make_mark(owner, "fern", 1), make_mark(owner, "moss", 1)

    def marked(self, variable: str, prefix: str) -> list[tuple[Process, str]]:
        if variable == MACHINE_ENV:
            return [(Process(pid, ""), "machine") for pid in (self.inside.pop(0) if self.inside else [])]
        found = [(Process(pid, ""), self.reference) for pid in (4, 5, 6)] + [(Process(9, ""), self.ours)]
        return [(process, mark) for process, mark in found if mark.startswith(prefix)]


def test_what_runs_inside_another_providers_machine_here_is_never_taken_for_an_instance_of_this_one(
    homing_home: Path,
) -> None:
    world = Flickering("abc123")
    provider = Local(home=homing_home, owner="abc123", world=world)
    assert [instance.mark for instance in provider.list_owned()] == [world.ours]


def test_what_ends_an_instance_ends_its_processes_also_on_a_full_disk(tmp_path: Path) -> None:
    # As agent and dead-man run it, here and on an ssh host: its note came first, and without room nothing was ended.
    mark = make_mark(uuid.uuid4().hex[:6], "moss", 1)
    sleeper = subprocess.Popen(["sleep", "600"], env={**os.environ, file_names.MARK_ENV: mark})
    full = tmp_path / "full"
    full.write_text("no folder, so nothing can be written in it")
    try:
        end = subprocess.run([sys.executable, "-I", end_billing.__file__, str(full), mark], stderr=subprocess.DEVNULL)
        assert sleeper.wait(20) == -signal.SIGTERM
    finally:
        sleeper.kill()
        sleeper.wait()
    assert end.returncode == 1, "that it ended is noted nowhere"
