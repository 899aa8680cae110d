"""`homing forward`: what it prints about a closed port. The tunnel itself is in test_ssh."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from homing.api.token_and_port import any_free, is_free
from homing.cli.verbs import forward


class Here:
    """A login that runs its shell on this computer."""

    instance_id = "i-1"

    def shell(self, command: Sequence[str]) -> list[str]:
        return ["bash", "-c", command[0]]


@pytest.mark.acceptance(116)
def test_a_closed_port_is_explained_and_an_open_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        forward._explain_if_closed(Here(), server.getsockname()[1], "moss")  # type: ignore[arg-type]
        assert capsys.readouterr().err == ""
        assert not is_free(server.getsockname()[1])
    forward._explain_if_closed(Here(), any_free(), "moss")  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert "nothing listens on port" in said
    assert "homing tensorboard" in said
