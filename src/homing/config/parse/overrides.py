"""`--set a.b=c`: change one key of the run file from the command line.

  phases.0.lr=3e-4   phases[0].lr=3e-4   data.text=[a.txt, b.txt]   limits.spend=$12

The value is parsed as YAML. The command line overrides the file: a length (`steps`) replaces the file's other length
(`epochs`) and a warm-up that is no shorter, and `model.depth` replaces the file's shape. Each replacement is reported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ruamel.yaml.error import YAMLError

from homing.config.parse.key_suggestions import looks_like_secret_value
from homing.config.parse.source import KeyPath, Source, dotted, yaml_value
from homing.errors import HomingError, Mistake
from homing.units import parse_count

__all__ = ["LENGTHS", "SHAPE", "apply_sets", "safe"]

LENGTHS = ("tokens", "epochs", "steps")
SHAPE = ("layers", "width", "heads", "kv_heads", "head_size", "ffn_width")


def apply_sets(source: Source, sets: Sequence[str]) -> list[str]:
    """Apply the settings to `source`, and record mistakes in it. Return the notices for the user."""
    given: set[KeyPath] = set()
    for text in sets:
        parsed = _parse(text)
        if isinstance(parsed, Mistake):
            source.mistakes.append(parsed)
            continue
        path, value = parsed
        new = [path[: number + 1] for number, part in enumerate(path) if isinstance(part, int)
               and source.get(path[: number + 1]) is None]  # fmt: skip
        problem = _put(source.data, path, value)
        if problem:
            source.mistakes.append(Mistake(_shown(text), None, dotted(path), problem))
            continue
        given.add(path)
        # If a --set adds a list entry, such as a phase, mistakes in that entry refer to the --set, not to the file.
        source.sets |= {each: _shown(text) for each in (*new, path)}
    return _make_room(source, given)


def _parse(text: str) -> tuple[KeyPath, Any] | Mistake:
    name, equals, typed = text.partition("=")
    name = name.strip()
    file = _shown(text)
    if not equals:
        return Mistake(file, None, name or "?", "has no `=`.", "Write --set key=value, such as --set phases.0.lr=3e-4")
    parts = [part for part in re.split(r"[.\[\]]+", name) if part]
    if not parts or not re.fullmatch(r"[\w-]+(\.[\w-]+|\[\d+\])*", name):
        return Mistake(file, None, name or "?", "is not a key.", "Such as: phases.0.lr or phases[0].lr")
    path: KeyPath = tuple(int(part) if part.isdigit() and number else part for number, part in enumerate(parts))
    try:
        return path, yaml_value(typed)
    except (YAMLError, ValueError, HomingError) as exc:
        problem = getattr(exc, "problem", None) or str(exc).splitlines()[0]
        return Mistake(file, None, name, f"the value cannot be read: {problem}.", "Put quotes around it.")


def _put(data: dict[str, Any], path: KeyPath, value: Any) -> str:
    """Set the value. Return the problem, or "" on success."""
    at: Any = data
    for number, part in enumerate(path):
        is_last = number == len(path) - 1
        if isinstance(part, int):
            if not isinstance(at, list):
                return f"{dotted(path[:number])} is not a list."
            if part > len(at):
                return f"there is no {dotted(path[: number + 1])}; {dotted(path[:number])} has {len(at)} entries."
            if part == len(at):
                at.append({})
        elif not isinstance(at, dict):
            hint = " Write its number, such as phases.0.lr." if isinstance(at, list) else ""
            return f"{dotted(path[:number])} is not a section.{hint}"
        if is_last:
            at[part] = value
        else:
            empty: Any = [] if isinstance(path[number + 1], int) else {}
            if isinstance(at, dict) and at.get(part) is None:
                at[part] = empty
            at = at[part]
    return ""


def _make_room(source: Source, given: set[KeyPath]) -> list[str]:
    said = []
    for path in sorted(given, key=dotted):
        if len(path) == 3 and path[0] == "phases" and path[2] in LENGTHS:
            said += _drop_overridden(source, given, path, [(*path[:2], other) for other in LENGTHS if other != path[2]])
        if len(path) == 3 and path[0] == "phases" and path[2] == "steps":
            warmup = (*path[:2], "warmup_steps")
            # for example a short trial of a long schedule
            if _count(source.get(warmup)) >= _count(source.get(path)) > 0:
                said += _drop_overridden(source, given, path, [warmup])
        if path == ("model", "depth"):
            said += _drop_overridden(source, given, path, [("model", other) for other in SHAPE])
    return said


def _count(value: Any) -> int:
    """Parse a count; 0 if it is invalid, which the later check reports."""
    try:
        return parse_count(value)
    except ValueError:
        return 0


def _drop_overridden(source: Source, given: set[KeyPath], winner: KeyPath, losers: Sequence[KeyPath]) -> list[str]:
    gone = [path for path in losers if path not in given and source.get(path) is not None]
    for path in gone:
        del source.get(path[:-1])[path[-1]]
    names = ", ".join(dotted(path) for path in gone)
    return [f"--set {dotted(winner)} replaces {names} of the run file."] if gone else []


def _shown(text: str) -> str:
    """Return the setting as the user typed it: `train.only` is almost always given as `--phase`."""
    name, _, value = safe(text).partition("=")
    return f"--phase {value}" if name == "train.only" else f"--set {safe(text)}"


def safe(text: str) -> str:
    """Return the text of a --set without a secret value, so that it can be printed."""
    name, equals, value = text.partition("=")
    return f"{name}{equals}***" if looks_like_secret_value(value) else text[:120]
