"""homing's exceptions: every error that a user can act on, with its exit code.

    HomingError                 1   what, why, fix
    ├── RunFailed               1   training ended in failure
    ├── EndedElsewhere          1   another homing process destroyed the instance during the launch
    ├── UsageError              2   invalid flag, file or answer
    │   ├── RunFileError        2   all mistakes in a run file at once, with line numbers
    │   ├── DataError           2   unusable text, tokenizer or shards
    │   ├── NotOwner            2   another homing home directory holds the run's lease
    │   └── MissingExtra        2   a command needs `pip install 'homing[...]'`
    ├── NoOffer                 3   no provider can start such an instance now
    ├── ProviderRefused         4   key, quota or request refused
    │   ├── ProviderSilent      4   no response, or an unusable one: an instance may keep billing
    │   ├── OtherAccount        4   the API key belongs to a different account than the one that rented the instance
    │   ├── CreateFailed        4   carries instance_id if something was created
    │   └── StartTimeout        4   created, never became ready
    │       └── NeverCame       4   the instance itself did not start; none of our programs ran on it
    ├── LimitReached            5   spend, time or idle limit
    ├── StillBilling            6   something may still cost money; takes precedence over all other exit codes
    ├── IntegrityError          7   a hash does not match
    ├── StoreError              7   the store could not be read or written
    │   └── StoreRefused        7   a permanent refusal: permission, bucket, token, region
    └── Interrupted           130

The exit code is an attribute of the class. An error has three fields, printed as three lines: `what` happened, `why`,
and the `fix`, such as a command to run or a key to change. `assert` is only for bugs in homing itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from homing.pip_command import pip_install

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

_READ_THE_FILE = (
    "plan",
    "prep",
    "train",
    "verify",
)  # these commands read the run file, so they accept --set and --smoke


class NotChecked(str):
    """A sentence that says why a provider could not be queried although nothing is known to be billing there.

    People see it in `homing doctor` and `homing reconcile`. Other commands do not repeat it each time, because a person
    who used a provider once need not set its key forever.
    """

    __slots__ = ("provider",)

    def __new__(cls, text: str, provider: str) -> NotChecked:
        made = super().__new__(cls, text)
        made.provider = provider
        return made

    provider: str


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
        """Replace the placeholder RUN in `why` and `fix` with the name that the user typed.

        The code that raises an error often does not know the name of the run. `typed` is the name followed by the
        options that change the run file; the options are kept only for verbs that read the run file. If the name is
        empty, the commands shown for those verbs have no name either, and so use the newest run file.
        """
        name = typed.split(" --")[0]

        def fill(match: re.Match[str]) -> str:
            if match[2] in _READ_THE_FILE:
                return f"{match[1]} {typed.strip()}".rstrip()
            return f"{match[1]} {name}" if name else match[0]

        self.why, self.fix = (re.sub(r"(homing (\w+)) RUN\b", fill, text) for text in (self.why, self.fix))

    def to_dict(self) -> dict[str, object]:
        """Return the error in the form that --json prints."""
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
    """The instance was destroyed on purpose during the launch, so the launch must not try the next offer."""


class UsageError(HomingError):
    exit_code = 2


@dataclass(frozen=True)
class Mistake:
    """One mistake in a run file: where it is, what is wrong, and what would be valid."""

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
        what, why = f"{mistakes[0].file} has {count}.", "\n".join(str(m) for m in mistakes)
        fix = fix or "Fix the lines above. `homing explain KEY` describes a key."
        only = mistakes[0]
        if len(mistakes) == 1 and only.file.startswith("--"):
            # The file of the mistake is the option itself, so do not repeat it on each line.
            what, why = f"{only.file} is not valid.", str(only).removeprefix(f"{only.file}: ")
            fix = fix.replace("Fix the lines above", "Change the option")
        super().__init__(what=what, why=why, fix=fix)
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
            why=f"The Python package `{module}` is not installed.",
            fix=pip_install(extra),
        )


class NoOffer(HomingError):
    exit_code = 3


class ProviderRefused(HomingError):
    exit_code = 4


class ProviderSilent(ProviderRefused):
    """A provider gave no usable response.

    `doubt` says what is unknown as a result, and is appended to `why`. `reason` is `why` without the doubt.
    """

    def __init__(self, what: str, why: str = "", fix: str = "", *, doubt: str = "") -> None:
        super().__init__(what, f"{why} {doubt}".strip(), fix)
        self.reason = why


class OtherAccount(ProviderRefused):
    """This API key's account does not list the instance, but the instance may still be billing in another account."""


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
    """The store refused a request permanently (permission, bucket, expired token, region), so retrying is useless."""


class Interrupted(HomingError):
    exit_code = 130
