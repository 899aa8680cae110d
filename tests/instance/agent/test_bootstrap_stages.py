"""Furnishing a machine, with the agent around it: a machine that is not right goes back."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator

import pytest
from tests.instance.agent.conftest import Instance

from homing.wire import file_names
from homing.wire.boot_json import Bootstrap


def bring(instance: Instance, **messages: object) -> None:
    argv = [sys.executable, "-m", "homing.instance.bootstrap", str(instance.root / "work" / file_names.BOOT)]
    instance.change(bootstrap=Bootstrap(**messages), bootstrap_argv=argv)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_agent_trains_after_the_last_stage(instance: Instance) -> None:
    bring(instance)
    assert instance.run() == 0
    kinds = instance.kinds()
    assert kinds.count("stage_done") == 7
    assert kinds.index("stage_done") < kinds.index("phase_started")
    assert instance.has_ended_billing()


def test_a_failing_stage_is_a_failed_outcome_that_comes_home_and_ends_billing(instance: Instance) -> None:
    bring(instance, disk_bytes=10**18)
    assert instance.run() == 1
    assert instance.has_ended_billing()
    assert "Stage disk failed" in instance.outcome().reason
    assert instance.in_store(type(instance.outcome()), file_names.OUTCOME).state == "failed"
    assert "phase_started" not in instance.kinds()
    assert "Stage disk failed" in (instance.root / "agent.out").read_text(), "where a provider's own log looks"


class Mailbox(http.server.BaseHTTPRequestHandler):
    letters: list[bytes] = []  # noqa: RUF012

    def do_PUT(self) -> None:
        Mailbox.letters.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mailbox() -> Iterator[str]:
    Mailbox.letters = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mailbox)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/log"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_a_boot_that_dies_before_anything_can_push_leaves_its_reason_in_the_mailbox_and_ends(
    instance: Instance, mailbox: str
) -> None:
    bring(instance, disk_bytes=10**18)
    instance.shorten(BROKEN_PUSH_S=3.0)
    instance.change(mailbox=mailbox, sync_argv=["/nowhere/python", "-m", "homing.store.sync"])
    assert instance.run(timeout_s=150) == 1
    assert instance.has_ended_billing()
    assert b"Stage disk failed" in b"".join(Mailbox.letters)


@pytest.mark.slow
def test_a_bootstrap_that_cannot_be_started_is_a_failed_run_that_ends_billing(instance: Instance) -> None:
    instance.change(bootstrap_argv=["/nowhere/python", "-m", "homing.instance.bootstrap"])
    assert instance.run() == 1
    assert instance.has_ended_billing()
    assert instance.outcome().state == "failed"
