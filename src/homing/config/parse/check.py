"""Validate the values of a run file against the schema: report all mistakes together, each with its line.

Source -> no secrets -> no empty keys -> pydantic -> mistakes + the valid rest of the file

Invalid values are removed and the rest is validated again, so that later checks, which need a whole RunFile, can still
run on the valid parts. `bad` lists the keys that those checks must not trust.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from homing.config.parse.key_suggestions import meant_keys, nearest, suggest_key, tidy_name
from homing.config.parse.source import KeyPath, Source
from homing.config.schema.keys import key_at, sections
from homing.config.schema.run_file import RunFile
from homing.errors import Mistake
from homing.gpus import nearest_gpus
from homing.redact import looks_like_secret_key, looks_like_secret_value

__all__ = ["Checked", "Trace", "check"]

T = TypeVar("T")


@dataclass
class Checked:
    file: RunFile  # contains only valid values; defaults replace invalid ones
    mistakes: list[Mistake]
    bad: set[KeyPath]  # keys that hold a default because the user's value was invalid

    def is_sound(self, *paths: KeyPath) -> bool:
        """Return True if neither these keys nor their enclosing sections were removed as invalid."""
        return not any(path[:end] in self.bad for path in paths for end in range(1, len(path) + 1))


class Trace:
    """The run file being resolved: the keys set by the user, mistakes, warnings, and the origin of each value.

    Every value of run.json passes through `take` or `note`, so that `homing plan --resolved` can print where it came
    from: "run file, line 12", "--set", "derived from model.depth" or "default".
    """

    def __init__(self, source: Source, checked: Checked) -> None:
        self.source = source
        self.checked = checked
        self.mistakes: list[Mistake] = list(checked.mistakes)
        self.warnings: list[str] = []
        self.origin: dict[str, str] = {}

    @property
    def file(self) -> RunFile:
        return self.checked.file

    def is_given(self, path: KeyPath) -> bool:
        """Return True if the user set the key to a valid value."""
        return self.source.get(path) is not None and self.checked.is_sound(path)

    def is_sound(self, *paths: KeyPath) -> bool:
        return self.checked.is_sound(*paths)

    def value(self, path: KeyPath) -> Any:
        at: Any = self.file
        for part in path:
            at = at[part] if isinstance(part, int) else getattr(at, part)
        return at

    def take(self, wire: str, path: KeyPath, otherwise: T, why: str = "default") -> T:
        """Return the user's value, else `otherwise`, and record its origin under `wire`, its name in run.json."""
        if self.is_given(path):
            self.origin[wire] = self.source.origin(path)
            found: T = self.value(path)
            return found
        self.origin[wire] = why
        return otherwise

    def plain(self, wire: str, path: KeyPath) -> Any:
        """Return the value of a key that has its default in the schema, and record its origin."""
        return self.take(wire, path, self.value(path))

    def note(self, wire: str, why: str) -> None:
        self.origin[wire] = why

    def wrong(self, path: KeyPath, problem: str, suggestion: str = "") -> None:
        self.mistakes.append(self.source.mistake(path, problem, suggestion))

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def check(source: Source) -> Checked:
    """Return the valid part of the file, and all its mistakes."""
    data = copy.deepcopy(source.data)
    mistakes = list(source.mistakes)
    bad: set[KeyPath] = set()
    _refuse_secrets(source, data, mistakes, bad)
    _refuse_empty(source, data, mistakes, bad)
    while True:
        try:
            return Checked(RunFile.model_validate(data), mistakes, bad)
        except ValidationError as exc:
            removed = False
            for error in exc.errors():
                path: KeyPath = error["loc"]
                mistakes.append(_mistake(source, path, dict(error)))
                bad.add(path)
                if error["type"] == "extra_forbidden":
                    bad.update(_missed(source, path))
                removed = _remove(data, path) or removed
            assert removed, "an invalid value could not be removed"


def _refuse_secrets(source: Source, data: Any, mistakes: list[Mistake], bad: set[KeyPath]) -> None:
    for path, value in list(_leaves(data)):
        name = str(next((part for part in reversed(path) if isinstance(part, str)), ""))
        is_secret = looks_like_secret_value(value) or (looks_like_secret_key(name) and key_at(path) is None)
        if is_secret:
            found = source.mistake(
                path,
                "looks like a secret; never put secrets in the file.",
                "Put it in the environment or .env; the file may only name an environment variable.",
            )
            if source.setting(path) is not None:  # do not print the option, because it contains the secret
                found = Mistake("--set", None, found.key, found.problem, found.suggestion)
            mistakes.append(found)
            bad.add(path)
            _remove(data, path)


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    elif isinstance(value, list):
        # Start at the end, so that removing one entry does not shift the indices of the entries before it.
        for number in reversed(range(len(value))):
            yield from _leaves(value[number], (*path, number))
    else:
        yield path, value


def _refuse_empty(source: Source, data: Any, mistakes: list[Mistake], bad: set[KeyPath]) -> None:
    """Report keys without a value.

    `limits:` with only comments under it is an empty section, which is fine; `spend:` alone is a mistake.
    """
    for path in [path for path, value in _leaves(data) if value is None]:
        as_section = ".".join("N" if isinstance(part, int) else part for part in path)
        is_section = as_section in sections() or f"{as_section}.N" in sections()
        _remove(data, path)
        if not is_section and key_at(path) is not None:
            found = key_at(path)
            example = f"For example: {found.name}: {found.example}" if found else ""
            mistakes.append(source.mistake(path, "has no value.", f"Delete the line, or set a value. {example}"))
            bad.add(path)
        elif not is_section:
            mistakes.append(source.mistake(path, "unknown key.", suggest_key(path)))
            bad.update([path, *_missed(source, path)])


def _missed(source: Source, path: KeyPath) -> list[KeyPath]:
    """Return the missing keys that the user probably meant, so that later checks do not report them as missing."""
    return [meant for meant in meant_keys(path) if source.get(meant) is None]


def _mistake(source: Source, path: KeyPath, error: dict[str, Any]) -> Mistake:
    kind, given, context = error["type"], error.get("input"), error.get("ctx") or {}
    found = key_at(path) or key_at(path[:-1])
    shape = f"Expected {found.kind}." if found else ""
    if found and found.allowed:
        shape = f"Allowed: {found.allowed}."
    if kind == "extra_forbidden":
        return source.mistake(path, "unknown key.", suggest_key(path))
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return source.mistake(path, f"expected a section of `key: value` lines, got {_name_of(given)}.", _inside(path))
    if kind == "list_type":
        return source.mistake(path, f"expected a list, got {_name_of(given)}.", _list_example(path))
    if kind == "literal_error":
        return source.mistake(path, f"{given!r} is not a valid value.", _choices(path, given, shape))
    if path == ("cloud", "gpu") and (near := nearest_gpus(str(given))):
        return source.mistake(path, f"{str(given)!r} is not a known GPU.", f"Did you mean {' or '.join(near)}?")
    if kind in ("string_type", "bool_type"):
        quotes = " Put quotes around it." if kind == "string_type" and not isinstance(given, (list, dict)) else ""
        wanted = "a string" if kind == "string_type" else "true or false"
        return source.mistake(path, f"expected {wanted}, got {_name_of(given)}.", quotes.strip())
    if kind == "string_pattern_mismatch":
        return source.mistake(path, f"{given!r} is not valid.", _pattern_words(path, str(given)))
    if kind in ("too_short", "too_long"):
        return source.mistake(path, f"has {context.get('actual_length', 0)} entries.", "Use 1 to 20 phases.")
    if kind == "value_error":
        allowed = f"Allowed: {found.allowed}." if found and found.allowed else ""
        return source.mistake(path, f"{context.get('error', error['msg'])}.", allowed)
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return source.mistake(path, f"{given} is out of range.", shape)
    return source.mistake(path, f"{error['msg']}.", shape)


def _name_of(value: Any) -> str:
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    return f"{value!r}"[:60]


def _inside(path: KeyPath) -> str:
    at = ".".join("N" if isinstance(part, int) else part for part in path)
    return f"`homing explain {at.removesuffix('.N')}` lists its keys."


def _list_example(path: KeyPath) -> str:
    if path == ("phases",):
        return "Each phase starts with a dash:  - kind: pretrain"
    found = key_at(path)
    return f"For example: {found.example}" if found else ""


def _choices(path: KeyPath, given: Any, shape: str) -> str:
    found = key_at(path)
    choices = found.kind.removeprefix("one of ").split(", ") if found else []
    near = nearest(str(given).lower(), choices)
    return f"{shape}{f' Did you mean {near}?' if near else ''}"


def _pattern_words(path: KeyPath, given: str) -> str:
    if path == ("name",):
        return f"Allowed: a-z, 0-9 and -, at most 32 characters. For example: {tidy_name(given) or 'first'}"
    return "Allowed: file:/folder, s3://bucket/prefix (also with ?endpoint=URL&region=NAME) or hf:OWNER/NAME"


def _remove(data: Any, path: KeyPath) -> bool:
    """Remove the value at `path`; a list entry becomes an empty value, so that the other indices stay valid."""
    at: Any = data
    for part in path[:-1]:
        try:
            at = at[part]
        except (KeyError, IndexError, TypeError):
            return False
    last = path[-1]
    if isinstance(at, dict) and last in at:
        del at[last]
        return True
    if isinstance(at, list) and isinstance(last, int) and last < len(at):
        at[last] = {} if path[-2] in ("phases", "tasks", "chat") else ""
        return True
    return False
