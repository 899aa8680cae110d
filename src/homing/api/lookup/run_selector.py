"""NAME@RUN: one run of a name, by its id or the end of it.

goethe@goethe-20260301-080000-0a1b, goethe@20260301-080000-0a1b and goethe@0a1b mean the same run.
"""

from __future__ import annotations

from collections.abc import Sequence

from homing.errors import UsageError

__all__ = ["pick_run", "split_run"]

_SHOWN = 5


def split_run(typed: str) -> tuple[str, str]:
    """Split NAME@RUN into NAME and RUN; RUN is "" for a plain name. A path or an address is a plain name."""
    name, _, run = typed.partition("@")
    return (name, run) if name and "/" not in typed and ":" not in typed else (typed, "")


def pick_run(name: str, run: str, ids: Sequence[str], *, fix: str) -> str:
    """Return the id that NAME@RUN means among `ids`, newest first. Raises UsageError if it is none or several."""
    found = [each for each in ids if each == run] or [each for each in ids if each.endswith(f"-{run}")]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(ids[:_SHOWN]) + (", ..." if len(ids) > _SHOWN else "")
    if found:
        raise UsageError(
            what=f"{name}@{run} matches several runs of {name}.",
            why=f"Matching runs: {', '.join(found[:_SHOWN])}.",
            fix=f"{name}@{found[0]}",
        )
    raise UsageError(
        what=f"{name} has no local run {run}.",
        why=f"Its local runs, newest first: {shown or 'none'}.",
        fix=f"{name}@{ids[0]}   {fix}" if ids else fix,
    )
