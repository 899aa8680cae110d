"""What `homing doctor` finds: one Check per question, each fault with its fix and where to get the thing.

A provider adds its own by an optional method, `checks() -> list[Check]`: it reads and creates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

__all__ = ["Check", "Checked", "State", "fault", "ok", "skipped", "warning"]

State = Literal["ok", "warning", "fault", "skipped"]


@dataclass(frozen=True)
class Check:
    name: str  # subject.question: runpod.key, ssh.client
    state: State
    text: str  # what was found, in a sentence
    fix: str = ""  # a command to type or a key to change
    page: str = ""  # where to get the thing, or read more

    @property
    def is_finding(self) -> bool:
        return self.state in ("warning", "fault")


@runtime_checkable
class Checked(Protocol):
    """A provider that knows more to ask than whether its key is taken: rights, quota, balance."""

    def checks(self) -> list[Check]: ...


def ok(name: str, text: str) -> Check:
    return Check(name, "ok", text)


def skipped(name: str, text: str, fix: str = "", page: str = "") -> Check:
    """Nobody needs it as far as is known; how to get it is said all the same."""
    return Check(name, "skipped", text, fix, page)


def warning(name: str, text: str, fix: str, page: str = "") -> Check:
    return Check(name, "warning", text, fix, page)


def fault(name: str, text: str, fix: str, page: str = "") -> Check:
    return Check(name, "fault", text, fix, page)
