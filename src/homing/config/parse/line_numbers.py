"""Line numbers of keys in JSON and TOML: their parsers do not report them.

Both scans run on text that the real parser has already accepted, so they only locate keys and never validate. A key
that they miss (inside an inline table, for example) is reported with the line of its section.
"""

from __future__ import annotations

import json
import re

__all__ = ["json_lines", "toml_lines"]

KeyPath = tuple[str | int, ...]

_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def json_lines(text: str) -> tuple[dict[KeyPath, int], list[tuple[KeyPath, int, int]]]:
    """Map each path to its line, and list every duplicate key as (path, first line, second line)."""
    lines: dict[KeyPath, int] = {(): 1}
    twice: list[tuple[KeyPath, int, int]] = []
    stack: list[list[str | int | None]] = []  # one slot per open { (its key, None before one is read) or [ (its index)
    line, seen = 1, 0
    for token in _JSON_TOKEN.finditer(text):
        line += text.count("\n", seen, token.start())
        seen = token.start()
        char = token[0][0]
        wants_key = bool(stack) and stack[-1][0] is None
        if char == '"' and wants_key:
            stack[-1][0] = str(json.loads(token[0]))
            path = _path(stack)
            if path in lines:
                twice.append((path, lines[path], line))
            lines.setdefault(path, line)
        elif char in "{[":
            lines.setdefault(_path(stack), line)
            stack.append([None if char == "{" else 0])
        elif char in "}]":
            stack.pop()
        elif char == "," and stack:
            slot = stack[-1]
            slot[0] = slot[0] + 1 if isinstance(slot[0], int) else None
        elif char != ":":
            lines.setdefault(_path(stack), line)
    return lines, twice


def _path(stack: list[list[str | int | None]]) -> KeyPath:
    return tuple(slot[0] for slot in stack if slot[0] is not None)


_BARE = r"(?:[A-Za-z0-9_-]+|\"(?:[^\"\\]|\\.)*\"|'[^']*')"
_DOTTED = rf"{_BARE}(?:\s*\.\s*{_BARE})*"
_HEADER = re.compile(rf"^\s*(\[\[?)\s*({_DOTTED})\s*\]\]?\s*(?:#.*)?$")
_PAIR = re.compile(rf"^\s*({_DOTTED})\s*=")
_MULTILINE = re.compile(r"\"\"\"|'''")


def toml_lines(text: str) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {(): 1}
    counts: dict[KeyPath, int] = {}  # number of [[...]] of each name so far
    here: KeyPath = ()
    inside: str | None = None  # the quotes of a multi-line string
    for number, line in enumerate(text.splitlines(), start=1):
        if inside is None:
            if header := _HEADER.match(line):
                here = _table(_parts(header[2]), counts, is_array=header[1] == "[[")
                lines.setdefault(here, number)
            elif pair := _PAIR.match(line):
                path = here
                for part in _parts(pair[1]):
                    path = (*path, part)
                    lines.setdefault(path, number)
        for quotes in _MULTILINE.findall(line):
            inside = None if inside == quotes else inside or quotes
    return lines


def _table(parts: list[str], counts: dict[KeyPath, int], *, is_array: bool) -> KeyPath:
    path: KeyPath = ()
    for part in parts[:-1]:
        path = (*path, part)
        if path in counts:
            path = (*path, counts[path] - 1)  # [phases.eval] belongs to the [[phases]] above it
    path = (*path, parts[-1])
    if is_array:
        counts[path] = counts.get(path, 0) + 1
        return (*path, counts[path] - 1)
    return path


def _parts(dotted: str) -> list[str]:
    return [part.strip("\"'") for part in re.findall(_BARE, dotted)]
