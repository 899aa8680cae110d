"""The commands that an error ends with: they name the run as its person typed it, and so work as they stand.

The name inside a run file may be another than the file's, and a file outside ./runs is found by its path alone. Only
the command line knows those words; it hands them in with the order, and whoever refuses something asks here.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Words"]


@dataclass(frozen=True)
class Words:
    name: str  # the run's own
    typed: str = ""  # its run file and the changes to it, as on the command line; "": its name means the same
    is_resume: bool = False

    def to(self, verb: str) -> str:
        """`homing VERB RUN`. A run that goes on is launched by its own name, as it was: no change is taken."""
        if verb == "launch" and self.is_resume:
            return f"homing launch {self.name} --resume"
        return f"homing {verb} {self.typed or self.name}"
