"""`homing logs`."""

from __future__ import annotations

import json

import pytest
from tests.cli.control_rig import Homing, cli_with

cli = cli_with(steps=6)


@pytest.mark.acceptance(112, 134)
def test_the_trainers_log_is_followed_to_the_end_and_the_others_can_be_read(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    followed = cli("logs", "moss", "-f")
    assert followed.code == 0
    assert followed.out.splitlines() == ["trainer begins at step 1", *(f"step {n}" for n in range(1, 7))]
    assert cli("logs").out == followed.out
    assert "All steps are done" in cli("logs", "moss", "agent").out
    lines = [json.loads(line) for line in cli("logs", "moss", "--json").out.splitlines()]
    assert lines[0] == {"schema": "homing.log/1", "line": "trainer begins at step 1"}
    wrong = cli("logs", "moss", "kernel")
    assert wrong.code == 2
    assert "trainer, agent, sync" in wrong.err
