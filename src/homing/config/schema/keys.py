"""All keys of the run file, read from the schema: path, type, default, range, example and description.

`homing explain` prints these keys, and `parse.key_suggestions` chooses from them. They are not listed anywhere else.
"""

from __future__ import annotations

import functools
import types
import typing
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from homing.config.schema import value_types
from homing.config.schema.run_file import RunFile, Section

__all__ = ["Key", "all_keys", "find_keys", "key_at", "sections"]


@dataclass(frozen=True)
class Key:
    path: str  # phases.N.lr
    section: str  # phases.N
    name: str  # lr
    kind: str
    default: str
    allowed: str
    example: str
    about: str


@functools.cache
def all_keys() -> dict[str, Key]:
    return {found.path: found for found in _walk(RunFile, "")}


@functools.cache
def sections() -> dict[str, str]:
    """Return the description of each section by its path; the path "" is the file itself."""
    found: dict[str, str] = {}

    def walk(model: type[Section], at: str) -> None:
        found[at] = (model.__doc__ or "").strip()
        for name, field in model.model_fields.items():
            inner, step = _inner_section(field)
            if inner is not None:
                walk(inner, _join(at, name) + step)

    walk(RunFile, "")
    return found


def key_at(path: tuple[str | int, ...]) -> Key | None:
    """Return the schema's key for the path of a value, in which every list index counts as N."""
    return all_keys().get(".".join("N" if isinstance(part, int) else part for part in path))


def find_keys(name: str) -> list[Key]:
    """Find keys by full path (phases.0.lr, phases[0].lr, phases.lr, phases.N.lr) or by the last part (lr)."""
    parts = [part for part in name.replace("[", ".").replace("]", "").split(".") if part]
    wanted = ".".join("N" if part.isdigit() else part for part in parts)
    if wanted in all_keys():
        return [all_keys()[wanted]]
    loose = ".".join(part for part in wanted.split(".") if part != "N")
    same = [found for found in all_keys().values() if found.path.replace(".N", "") == loose]
    return same or [found for found in all_keys().values() if found.path.replace(".N", "").endswith("." + loose)]


def _walk(model: type[Section], at: str) -> typing.Iterator[Key]:
    for name, field in model.model_fields.items():
        inner, step = _inner_section(field)
        if inner is not None:
            yield from _walk(inner, _join(at, name) + step)
            continue
        yield Key(
            path=_join(at, name),
            section=at,
            name=name,
            kind=_kind(field),
            default=_default(field),
            allowed=_allowed(field),
            example=str((field.examples or [""])[0]),
            about=field.description or "",
        )


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _inner_section(field: FieldInfo) -> tuple[type[Section] | None, str]:
    hint = field.annotation
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) and issubclass(hint, Section):
        return hint, ""
    arguments = typing.get_args(hint)
    is_list = typing.get_origin(hint) is list
    if is_list and isinstance(arguments[0], type) and issubclass(arguments[0], Section):
        return arguments[0], ".N"
    return None, ""


def _hints(field: FieldInfo) -> list[Any]:
    """Return the annotation, its parts and all metadata, because pydantic may put the validator in any of them."""
    found: list[Any] = [field.annotation, *field.metadata]
    for hint in found:
        found += [part for part in typing.get_args(hint) if part is not type(None)]
        found += getattr(hint, "__metadata__", ())
    return found


def _kind(field: FieldInfo) -> str:
    hints = _hints(field)
    for hint in hints:
        if typing.get_origin(hint) is typing.Literal:
            return "one of " + ", ".join(str(choice) for choice in typing.get_args(hint))
    for hint in hints:
        if (parser := getattr(hint, "func", None)) in value_types.KINDS:
            return value_types.KINDS[parser]
    return "true or false" if bool in hints else "a string"


def _default(field: FieldInfo) -> str:
    derived = (field.json_schema_extra or {}).get("derived", "") if isinstance(field.json_schema_extra, dict) else ""
    default = field.get_default(call_default_factory=True)
    if derived:
        return f"{default}, {derived}" if default not in (None, "") else str(derived)
    if default is None:
        return "none"
    return value_types.written(default, _kind(field))


def _allowed(field: FieldInfo) -> str:
    low = high = ""
    for rule in field.metadata:
        for name, words in (("ge", "at least {}"), ("gt", "more than {}")):
            if getattr(rule, name, None) is not None:
                low = words.format(value_types.written(getattr(rule, name), _kind(field)))
        for name, words in (("le", "at most {}"), ("lt", "less than {}")):
            if getattr(rule, name, None) is not None:
                high = words.format(value_types.written(getattr(rule, name), _kind(field)))
    return ", ".join(part for part in (low, high) if part)
