"""`--set a.b=c`: one key of the run file changed from the command line.

    phases.0.lr=3e-4   phases[0].lr=3e-4   data.text=[a.txt, b.txt]   limits.spend=$12

The value is read as YAML would read it. What was given on the command line is newer than the file, so a length
(`steps`) replaces the file's other length (`epochs`) and a warm-up that is no shorter, and the dial replaces the file's
shape; each is said aloud.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ruamel.yaml.error import YAMLError

from homing.config.names import looks_like_secret_value
from homing.config.source import KeyPath, Source, dotted, yaml_value
from homing.errors import HomingError, Mistake
from homing.units import parse_count

__all__ = ["LENGTHS", "SHAPE", "apply_sets", "safe"]

LENGTHS = ("tokens", "epochs", "steps")
SHAPE = ("layers", "width", "heads", "kv_heads", "head_size", "ffn_width")


def apply_sets(source: Source, sets: Sequence[str]) -> list[str]:
    """Changes `source`; what is wrong goes to its mistakes. Returns what a person should be told."""
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
        # Of an entry that it has added to a list, such as a phase, every fault is its own and not the file's.
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
    """ "" when done, else what stands in the way."""
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
            said += _set_aside(source, given, path, [(*path[:2], other) for other in LENGTHS if other != path[2]])
        if len(path) == 3 and path[0] == "phases" and path[2] == "steps":
            warmup = (*path[:2], "warmup_steps")
            if _count(source.get(warmup)) >= _count(source.get(path)) > 0:  # a first try of a long schedule
                said += _set_aside(source, given, path, [warmup])
        if path == ("model", "depth"):
            said += _set_aside(source, given, path, [("model", other) for other in SHAPE])
    return said


def _count(value: Any) -> int:
    """0 for what is no count: the check that follows will say so."""
    try:
        return parse_count(value)
    except ValueError:
        return 0


def _set_aside(source: Source, given: set[KeyPath], winner: KeyPath, losers: Sequence[KeyPath]) -> list[str]:
    gone = [path for path in losers if path not in given and source.get(path) is not None]
    for path in gone:
        del source.get(path[:-1])[path[-1]]
    names = ", ".join(dotted(path) for path in gone)
    return [f"--set {dotted(winner)} sets aside {names} of the run file."] if gone else []


def _shown(text: str) -> str:
    """As a person types it: `--phase` is short for one of the keys, and what is asked for by it nearly always."""
    name, _, value = safe(text).partition("=")
    return f"--phase {value}" if name == "train.only" else f"--set {safe(text)}"


def safe(text: str) -> str:
    """Never print a secret that somebody put on a command line."""
    name, equals, value = text.partition("=")
    return f"{name}{equals}***" if looks_like_secret_value(value) else text[:120]
