"""Do these weights belong to this model? Asked of names and shapes, before anything is copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from homing.errors import DataError

__all__ = ["do_not_fit", "misfits"]

Shapes = Mapping[str, tuple[int, ...]]
_MOST_TOLD = 12


def misfits(wanted: Shapes, given: Shapes) -> list[str]:
    """What is missing, what nobody wants, what has another shape; each in a sentence."""
    problems = [f"{name} is missing." for name in wanted if name not in given]
    problems += [f"{name} is no weight of this model." for name in given if name not in wanted]
    both = [name for name in wanted if name in given and wanted[name] != given[name]]
    return problems + [f"{name} is {given[name]} in the file and {wanted[name]} in the model." for name in both]


def do_not_fit(problems: Iterable[str]) -> DataError:
    listed = sorted(problems)
    more = [f"and {len(listed) - _MOST_TOLD} more."] if len(listed) > _MOST_TOLD else []
    return DataError(
        what="The weights do not fit the model.",
        why="\n".join(listed[:_MOST_TOLD] + more),
        fix="Use the run.json or config.json that lies beside these weights.",
    )
