"""The content of the dashboard, in sections that are replaced or extended. Threads write it, and event streams read it.

    feed.put("head", {...})               replaces the value of a section, if it differs
    feed.add("points", [...])             appends items to a section; beyond `most` items, drops the oldest
    feed.renew("points", [...])           replaces all items of a section, after a rollback to a checkpoint
    feed.since(place) -> place, parts     returns what a reader has not seen yet: new values, and new items

Each reader keeps its own position and the feed does not track its readers, so a reader that leaves needs no clean-up.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Feed", "Place"]

Place = dict[str, tuple[int, int]]  # section -> the version and the number of items that the reader has seen


@dataclass
class _Section:
    edition: int = 0
    value: Any = None
    items: list[Any] | None = None  # None if the section has a single value instead of a list of items
    num_dropped: int = 0  # number of the oldest items that have been dropped

    @property
    def end(self) -> int:
        return self.num_dropped + len(self.items or ())


@dataclass
class Feed:
    _sections: dict[str, _Section] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    is_reported: threading.Event = field(default_factory=threading.Event)  # set after the feed's first data

    def put(self, name: str, value: Any) -> None:
        with self._lock:
            section = self._sections.setdefault(name, _Section())
            if section.edition == 0 or section.value != value:
                section.value, section.edition = value, section.edition + 1

    def add(self, name: str, items: Sequence[Any], *, most: int | None = None) -> None:
        with self._lock:
            self._grow(name, items, most)

    def renew(self, name: str, items: Sequence[Any]) -> None:
        with self._lock:
            before = self._sections.get(name, _Section())
            self._sections[name] = _Section(edition=before.edition + 1, items=list(items))

    def _grow(self, name: str, items: Sequence[Any], most: int | None) -> None:
        section = self._sections.setdefault(name, _Section(edition=1, items=[]))
        assert section.items is not None, f"{name} is a section that is replaced"
        section.items.extend(items)
        if most is not None and len(section.items) > most:
            section.num_dropped += len(section.items) - most
            del section.items[:-most]

    def since(self, place: Place) -> tuple[Place, list[dict[str, Any]]]:
        """Return the reader's new position and the parts that it has not seen yet.

        If `is_new` is set in a part, its items replace all earlier items of the section.
        """
        with self._lock:
            parts = []
            for name, section in self._sections.items():
                edition, seen = place.get(name, (0, 0))
                is_new = edition != section.edition
                if section.items is None:
                    if is_new:
                        parts.append({"section": name, "value": section.value})
                elif is_new or seen < section.end:
                    items = section.items if is_new else section.items[max(0, seen - section.num_dropped) :]
                    parts.append({"section": name, "is_new": is_new, "items": list(items)})
            return {name: (each.edition, each.end) for name, each in self._sections.items()}, parts

    def whole(self) -> dict[str, Any]:
        """Return the content of every section, for readers that read only once."""
        _, parts = self.since({})
        return {part["section"]: part.get("value", part.get("items")) for part in parts}
