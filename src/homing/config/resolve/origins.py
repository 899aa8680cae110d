"""State of resolving a run file: which keys were given, mistakes, warnings, and the origin of each value.

Every value of run.json passes through `take` or `note`, so that `homing plan --resolved` can print for each of them
"run file, line 12", "--set", "derived from model.depth" or "default".
"""

from __future__ import annotations

from typing import Any, TypeVar

from homing.config.parse.check import Checked
from homing.config.parse.source import KeyPath, Source
from homing.config.schema.run_file import RunFile
from homing.errors import Mistake

__all__ = ["Trace"]

T = TypeVar("T")


class Trace:
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
        """Return whether the user set the key to a valid value."""
        return self.source.get(path) is not None and self.checked.is_sound(path)

    def is_sound(self, *paths: KeyPath) -> bool:
        return self.checked.is_sound(*paths)

    def value(self, path: KeyPath) -> Any:
        at: Any = self.file
        for part in path:
            at = at[part] if isinstance(part, int) else getattr(at, part)
        return at

    def take(self, wire: str, path: KeyPath, otherwise: T, why: str = "default") -> T:
        """Return the user's value, else `otherwise`; record the origin under the value's name in run.json."""
        if self.is_given(path):
            self.origin[wire] = self.source.origin(path)
            found: T = self.value(path)
            return found
        self.origin[wire] = why
        return otherwise

    def plain(self, wire: str, path: KeyPath) -> Any:
        """Take a key that has its default in the schema."""
        return self.take(wire, path, self.value(path))

    def note(self, wire: str, why: str) -> None:
        self.origin[wire] = why

    def wrong(self, path: KeyPath, problem: str, suggestion: str = "") -> None:
        self.mistakes.append(self.source.mistake(path, problem, suggestion))

    def warn(self, text: str) -> None:
        self.warnings.append(text)
