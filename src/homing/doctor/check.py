"""Results of `homing doctor`: one Check per question; each fault names its fix and a page with more.

A provider adds its own checks with an optional method, `checks() -> list[Check]`, which only reads.
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
    text: str  # the finding, as a sentence
    fix: str = ""  # a command to type or a key to change
    page: str = ""  # where to get it, or read more

    @property
    def is_finding(self) -> bool:
        return self.state in ("warning", "fault")


@runtime_checkable
class Checked(Protocol):
    """A provider with checks beyond whether its key works: permissions, quota, balance."""

    def checks(self) -> list[Check]: ...


def ok(name: str, text: str) -> Check:
    return Check(name, "ok", text)


def skipped(name: str, text: str, fix: str = "", page: str = "") -> Check:
    """Return a check for something that is not needed as far as we know, with how to get it."""
    return Check(name, "skipped", text, fix, page)


def warning(name: str, text: str, fix: str, page: str = "") -> Check:
    return Check(name, "warning", text, fix, page)


def fault(name: str, text: str, fix: str, page: str = "") -> Check:
    return Check(name, "fault", text, fix, page)
