"""Builds the commands that error messages suggest. They name the run as the user did, so that they work when pasted.

The name in a run file may differ from the file's own name, and a file outside ./runs can be found only by its path.
Only the CLI knows what the user typed, so it passes that text along with the launch request.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Words"]


@dataclass(frozen=True)
class Words:
    name: str  # the run's own name
    typed: str = ""  # run file and overrides as typed on the command line; "" if the run's name is enough
    is_resume: bool = False

    def to(self, verb: str) -> str:
        """Return `homing VERB RUN`. A resumed run is launched by its own name, without overrides."""
        if verb == "launch" and self.is_resume:
            return f"homing launch {self.name} --resume"
        return f"homing {verb} {self.typed or self.name}"
