"""The desk on which a run file becomes a run: what was given, what was not, and where each value came from.

Every value of run.json passes through `take` or `note`, so `homing plan --resolved` can say for each of them "run file,
line 12", "--set", "derived from model.depth" or "default".
"""

from __future__ import annotations

from typing import Any, TypeVar

from homing.config.check import Checked
from homing.config.schema import RunFile
from homing.config.source import KeyPath, Source
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
        """Typed by the person, and usable."""
        return self.source.get(path) is not None and self.checked.is_sound(path)

    def is_sound(self, *paths: KeyPath) -> bool:
        return self.checked.is_sound(*paths)

    def value(self, path: KeyPath) -> Any:
        at: Any = self.file
        for part in path:
            at = at[part] if isinstance(part, int) else getattr(at, part)
        return at

    def take(self, wire: str, path: KeyPath, otherwise: T, why: str = "default") -> T:
        """The person's value, else `otherwise` with its reason; noted under its name in run.json."""
        if self.is_given(path):
            self.origin[wire] = self.source.origin(path)
            found: T = self.value(path)
            return found
        self.origin[wire] = why
        return otherwise

    def plain(self, wire: str, path: KeyPath) -> Any:
        """A key whose default stands in the schema."""
        return self.take(wire, path, self.value(path))

    def note(self, wire: str, why: str) -> None:
        self.origin[wire] = why

    def wrong(self, path: KeyPath, problem: str, suggestion: str = "") -> None:
        self.mistakes.append(self.source.mistake(path, problem, suggestion))

    def warn(self, text: str) -> None:
        self.warnings.append(text)
