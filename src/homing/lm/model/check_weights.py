"""Checks that weights fit a model, by names and shapes, before anything is copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from homing.errors import DataError

__all__ = ["do_not_fit", "misfits"]

Shapes = Mapping[str, tuple[int, ...]]
_MAX_LISTED = 12


def misfits(wanted: Shapes, given: Shapes) -> list[str]:
    """Return a sentence for each missing, unknown or misshapen tensor."""
    problems = [f"{name} is missing." for name in wanted if name not in given]
    problems += [f"{name} is not a weight of this model." for name in given if name not in wanted]
    both = [name for name in wanted if name in given and wanted[name] != given[name]]
    return problems + [f"{name} is {given[name]} in the file and {wanted[name]} in the model." for name in both]


def do_not_fit(problems: Iterable[str]) -> DataError:
    listed = sorted(problems)
    more = [f"and {len(listed) - _MAX_LISTED} more."] if len(listed) > _MAX_LISTED else []
    return DataError(
        what="The weights do not fit the model.",
        why="\n".join(listed[:_MAX_LISTED] + more),
        fix="Use the run.json or config.json that is stored with these weights.",
    )
