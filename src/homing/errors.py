"""Everything that can go wrong and that a person can act on.

    HomingError                 1   what, why, fix
    ├── RunFailed               1   training ended in failure
    ├── EndedElsewhere          1   another homing destroyed what was being launched
    ├── UsageError              2   a flag, a file or an answer was wrong
    │   ├── RunFileError        2   every mistake in a run file at once, with lines
    │   ├── DataError           2   text, tokenizer or shards cannot be used as they are
    │   ├── NotOwner            2   another home holds the run's lease
    │   └── MissingExtra        2   a verb needs `pip install 'homing[...]'`
    ├── NoOffer                 3   nobody can start such a machine now
    ├── ProviderRefused         4   key, quota or request refused
    │   ├── ProviderSilent      4   no answer, or none that says anything: what bills may bill on
    │   ├── OtherAccount        4   the key here is of another account than the one that rented it
    │   ├── CreateFailed        4   carries instance_id if something was created
    │   └── StartTimeout        4   created, never became ready
    │       └── NeverCame       4   the machine itself did not come, before any program of ours ran on it
    ├── LimitReached            5   spend, time or idle limit
    ├── StillBilling            6   something may still cost money; wins over all others
    ├── IntegrityError          7   a hash does not match
    ├── StoreError              7   the store could not be read or written
    │   └── StoreRefused        7   it says no, and will say no again: permission, bucket, token, region
    └── Interrupted           130

The exit code sits on the class. Three fields, printed as three lines: what happened, why, and what to do,
where `fix` is a command to type or a key to change. `assert` is for our own mistakes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from homing.install import pip_install

__all__ = [
    "CreateFailed",
    "DataError",
    "EndedElsewhere",
    "HomingError",
    "IntegrityError",
    "Interrupted",
    "LimitReached",
    "MissingExtra",
    "Mistake",
    "NeverCame",
    "NoOffer",
    "NotOwner",
    "OtherAccount",
    "ProviderRefused",
    "ProviderSilent",
    "RunFailed",
    "RunFileError",
    "StartTimeout",
    "StillBilling",
    "StoreError",
    "StoreRefused",
    "UsageError",
]

_READ_THE_FILE = ("plan", "prep", "train", "verify")  # verbs that take --set and --smoke


class HomingError(Exception):
    exit_code = 1

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return "\n".join(line for line in (self.what, self.why, self.fix) if line)

    def name_run(self, typed: str) -> None:
        """Whoever raises it may not know what a person calls the run, and writes RUN; whoever knows puts it there.
        `typed`: its name, and behind that what was changed of its file, for the verbs that read it. Without a name they
        take the newest file, as whoever typed none has meant."""
        name = typed.split(" --")[0]

        def fill(match: re.Match[str]) -> str:
            if match[2] in _READ_THE_FILE:
                return f"{match[1]} {typed.strip()}".rstrip()
            return f"{match[1]} {name}" if name else match[0]

        self.why, self.fix = (re.sub(r"(homing (\w+)) RUN\b", fill, text) for text in (self.why, self.fix))

    def to_dict(self) -> dict[str, object]:
        """What --json prints of an error."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "why": self.why,
            "fix": self.fix,
            "exit_code": self.exit_code,
        }


class RunFailed(HomingError):
    exit_code = 1


class EndedElsewhere(HomingError):
    """Meant so: nobody tries the next offer for it."""


class UsageError(HomingError):
    exit_code = 2


@dataclass(frozen=True)
class Mistake:
    """One thing wrong in a run file: where it is, what it is, and what would be right."""

    file: str
    line: int | None
    key: str
    problem: str
    suggestion: str = ""  # the nearest valid key, or the allowed range

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        hint = f" {self.suggestion}" if self.suggestion else ""
        return f"{where}: {self.key}: {self.problem}{hint}"


class RunFileError(UsageError):
    def __init__(self, mistakes: list[Mistake], fix: str = "") -> None:
        assert mistakes, "a RunFileError without a mistake"
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__(
            what=f"{mistakes[0].file} has {count}.",
            why="\n".join(str(m) for m in mistakes),
            fix=fix or "Mend the lines above; `homing explain KEY` tells what a key means.",
        )
        self.mistakes = mistakes

    def to_dict(self) -> dict[str, object]:
        return {**super().to_dict(), "mistakes": [vars(m) for m in self.mistakes]}


class DataError(UsageError):
    pass


class NotOwner(UsageError):
    pass


class MissingExtra(UsageError):
    def __init__(self, verb: str, extra: str, module: str) -> None:
        super().__init__(
            what=f"`homing {verb}` needs the extra `{extra}`.",
            why=f"The Python package `{module}` is not installed here.",
            fix=pip_install(extra),
        )


class NoOffer(HomingError):
    exit_code = 3


class ProviderRefused(HomingError):
    exit_code = 4


class ProviderSilent(ProviderRefused):
    """`doubt` ends the why: what nobody knows now, to whoever asked what is there. `reason` is the why without it."""

    def __init__(self, what: str, why: str = "", fix: str = "", *, doubt: str = "") -> None:
        super().__init__(what, f"{why} {doubt}".strip(), fix)
        self.reason = why


class OtherAccount(ProviderRefused):
    """What its key does not show may bill on: never "gone"."""


class CreateFailed(ProviderRefused):
    def __init__(self, what: str, why: str = "", fix: str = "", *, instance_id: str | None = None) -> None:
        super().__init__(what, why, fix)
        self.instance_id = instance_id


class StartTimeout(ProviderRefused):
    pass


class NeverCame(StartTimeout):
    pass


class LimitReached(HomingError):
    exit_code = 5


class StillBilling(HomingError):
    exit_code = 6


class IntegrityError(HomingError):
    exit_code = 7


class StoreError(HomingError):
    exit_code = 7


class StoreRefused(StoreError):
    """It says no, and trying again does not change that: no permission, no bucket, an expired token, another region."""


class Interrupted(HomingError):
    exit_code = 130
