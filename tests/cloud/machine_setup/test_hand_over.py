"""How a hand-over handles the answers of ssh, on a simulated clock. For real connections see test_startup_script.py."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.doubles.machine import bare_boot

from homing.cloud.machine_setup import receive_hand_over
from homing.cloud.machine_setup.startup_script import hand_over
from homing.cloud.providers.base import Connection, InputFile, Offer, Order, Request
from homing.errors import CreateFailed, HomingError, StartTimeout, UsageError
from homing.world import Completed, World

REFUSED = Completed(255, "", "ssh: connect to host 10.0.0.1 port 22: Connection refused")
CHANGED = Completed(255, "", "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.")
DENIED = Completed(255, "", "root@10.0.0.1: Permission denied (publickey).")


class Answering(World):
    """ssh gives these answers in turn and repeats the last one; each takes a second."""

    def __init__(self, *answers: Completed) -> None:
        self.answers, self.t, self.sent = list(answers), 0.0, []  # type: ignore[var-annotated]

    def run(self, argv: Any, timeout_s: float, env: Any = None, stdin: str = "") -> Completed:
        self.t += min(1.0, timeout_s)
        self.sent.append(json.loads(stdin)["order"])
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def monotonic(self) -> float:
        return self.t

    def sleep(self, seconds: float) -> None:
        self.t += seconds


def said(state: str, why: str = "") -> Completed:
    return Completed(0, f"Welcome!\n{receive_hand_over.SIGN}{json.dumps({'state': state, 'why': why})}\n", "")


def give(world: World, folder: Path, timeout_s: float = 60.0) -> None:
    (folder / "agent.zip").write_text("agent")
    files = (InputFile("agent.zip", str(folder / "agent.zip")),)
    order = Order("homing-a-1", "moss", bare_boot("homing-a-1", "/opt/homing/work"), files, {"KEY": "canary"})
    request = Request("toy", "homing-a-1", Offer("toy", "toy", "CPU", 0, 1, 1, Decimal(1)), order, (), {})
    connection = Connection("root", "10.0.0.1", 22, "/key", "10.0.0.1 ssh-ed25519 AAAA")
    hand_over(connection, request, world=world, timeout_s=timeout_s)


def test_refusals_are_retried_while_a_machine_boots(tmp_path: Path) -> None:
    world = Answering(REFUSED, CHANGED, DENIED, Completed(124, "", "timed out"), said("early", "x"), said("done"))
    give(world, tmp_path)
    assert len(world.sent) == 6
    assert (tmp_path / "known_hosts").read_text() == "10.0.0.1 ssh-ed25519 AAAA\n"


@pytest.mark.parametrize(
    ("last", "word"),
    [(REFUSED, "Connection refused"), (CHANGED, "host key differs"), (DENIED, "Permission denied"),
     (said("early", "its startup script is not ready"), "not ready")],
)  # fmt: skip
def test_the_last_refusal_is_reported_at_the_deadline(tmp_path: Path, last: Completed, word: str) -> None:
    world = Answering(last)
    with pytest.raises(StartTimeout) as caught:
        give(world, tmp_path, timeout_s=30.0)
    assert world.t == pytest.approx(30.0, abs=1.0)
    assert word in caught.value.why
    assert caught.value.fix == "Try again: homing launch moss"


def test_a_timed_out_last_attempt_does_not_hide_the_reason(tmp_path: Path) -> None:
    with pytest.raises(StartTimeout) as caught:
        give(Answering(DENIED, Completed(124, "", "timed out after 0.1 s")), tmp_path, timeout_s=5.0)
    assert "Permission denied" in caught.value.why


@pytest.mark.parametrize(
    ("answer", "kind", "word"),
    [
        (Completed(127, "", "[Errno 2] No such file or directory: 'ssh'"), UsageError, "openssh-client"),
        (Completed(127, "", "bash: line 1: exec: python3: not found"), CreateFailed, "homing image build"),
        (said("ended", "this is a restart"), CreateFailed, "homing launch moss"),
        (said("failed", "OSError: no space left"), CreateFailed, "homing launch moss"),
    ],
)
def test_a_permanent_failure_is_reported_at_once(
    tmp_path: Path, answer: Completed, kind: type[HomingError], word: str
) -> None:
    world = Answering(answer)
    with pytest.raises(kind) as caught:
        give(world, tmp_path)
    assert len(world.sent) == 1
    assert word in caught.value.fix


def test_files_boot_and_secrets_are_sent_through_stdin(tmp_path: Path) -> None:
    world = Answering(said("done"))
    give(world, tmp_path)
    (order,) = world.sent
    assert list(order["files"]) == ["agent.zip"]
    assert json.loads(order["boot"])["mark"] == "homing-a-1"
    assert order["secrets"] == {"KEY": "canary"}
