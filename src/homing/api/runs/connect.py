"""Build the ssh commands that `homing ssh` and `homing forward` run: for a shell, and for a forwarded port."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from homing.api.lookup.find_runs import find_run, name_here, open_home
from homing.api.token_and_port import any_free, is_free
from homing.cloud.contact.ssh_access import Login, find_login
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import RunRow

__all__ = ["Forward", "Shell", "forward_port", "open_shell"]


@dataclass(frozen=True)
class Shell:
    """The ssh command that opens a shell; the host key is pinned."""

    run: RunRow
    login: Login
    argv: list[str]

    def to_dict(self) -> dict[str, object]:
        return {"run": self.run.id, "instance": self.login.instance_id, "argv": self.argv}


@dataclass(frozen=True)
class Forward:
    """The ssh command that forwards port `here` on this computer to port `there` on the instance."""

    run: RunRow
    typed: str  # the name or id that selects the run in this folder
    login: Login
    here: int
    there: int
    argv: list[str]

    def to_dict(self) -> dict[str, object]:
        return {"run": self.run.id, "here": self.here, "there": self.there, "argv": self.argv}


def open_shell(run: str | None = None, *, command: Sequence[str] = (), home: Home | None = None) -> Shell:
    """Return the ssh command that opens a shell on the run's instance, or that runs `command` there."""
    with open_home(home) as opened:
        row = find_run(opened, run)
        login = find_login(opened, row)
    return Shell(row, login, login.shell([shlex.join(command)] if command else []))


def forward_port(run: str, *, here: int, there: int | None = None, home: Home | None = None) -> Forward:
    """Return the ssh command that forwards a port. If the local port is taken, another one is used."""
    with open_home(home) as opened:
        row = find_run(opened, run)
        login = find_login(opened, row)
    free, there = here if is_free(here) else any_free(), there or here
    return Forward(row, name_here(row), login, free, there, login.forward(free, there))
