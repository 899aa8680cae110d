"""Parse a run file into values with the line of every key.

bytes -> text -> YAML 1.2 | TOML | JSON -> Source(data, lines); --set a.b=c changes the same Source

This module does not know which keys are valid. Every syntax error (tabs, duplicate keys, unterminated strings, bytes
that are not UTF-8) becomes a Mistake with its line. The JSON and TOML parsers do not report lines, so `json_lines` and
`toml_lines` find them. They scan text that the parser has already accepted, and do not validate it. A key that they
miss, for example in an inline table, is reported with the line of its section.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from homing.errors import Mistake, RunFileError, UsageError

__all__ = ["KeyPath", "Source", "dotted", "json_lines", "read_source", "toml_lines", "yaml_value"]

KeyPath = tuple[str | int, ...]

# Run files are written by people, so a larger file was probably passed by mistake.
_MAX_BYTES = 1_000_000
_MAX_NODES = 20_000
_MAX_DEPTH = 20


@dataclass
class Source:
    file: str  # the path, as a user would type it
    text: str
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    sets: dict[KeyPath, str] = field(default_factory=dict)  # key -> the --set option (or the profile) that set it
    mistakes: list[Mistake] = field(default_factory=list)
    is_preset: bool = False

    def line(self, path: KeyPath) -> int | None:
        """Return the line of the key, or of the nearest enclosing section."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)

    def setting(self, path: KeyPath) -> str | None:
        """Return the --set option (or the profile) that set this value, if any."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.sets:
                return self.sets[path[:end]]
        return None

    def origin(self, path: KeyPath) -> str:
        setting = self.setting(path)
        if setting is not None:
            return "--set" if setting.startswith("--set") else setting
        return f"{'preset ' + Path(self.file).stem if self.is_preset else 'run file'}, line {self.line(path)}"

    def mistake(self, path: KeyPath, problem: str, suggestion: str = "") -> Mistake:
        setting = self.setting(path)
        if setting is not None:
            return Mistake(setting, None, dotted(path), problem, suggestion)
        return Mistake(self.file, self.line(path), dotted(path), problem, suggestion)

    def get(self, path: KeyPath) -> Any:
        """Return the value as typed, or None if the key is absent."""
        at: Any = self.data
        for part in path:
            if isinstance(at, dict) and isinstance(part, str):
                at = at.get(part)
            elif isinstance(at, list) and isinstance(part, int) and part < len(at):
                at = at[part]
            else:
                return None
        return at


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def read_source(path: Path) -> Source:
    """Parse the file. Raise RunFileError if it has a syntax error."""
    shown = _shown(path)
    text = _read_text(path, shown)
    parse = {".toml": _parse_toml, ".json": _parse_json}.get(path.suffix, _parse_yaml)
    source = parse(shown, text)
    if not source.data and not source.mistakes:
        why = "it is empty" if not text.strip() else "it has no keys, only comments or an empty section"
        raise _broken(shown, 1, f"{why}.", "Start from a preset: homing new NAME --from tiny")
    return source


def yaml_value(text: str) -> Any:
    """Parse text as a YAML value: `3e-4` -> float, `true` -> bool, `[a, b]` -> list, `$12` -> str."""
    builder = _YamlBuilder("")
    node = _compose(text)
    if node is None:
        return None
    value = builder.build(node, ())
    if builder.mistakes:
        raise ValueError(builder.mistakes[0].problem)
    return value


def _shown(path: Path) -> str:
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _read_text(path: Path, shown: str) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise _broken(
                shown,
                None,
                f"larger than {_MAX_BYTES:,} bytes, too large for a run file.",
                "Check that this is the right file.",
            )
        raw = path.read_bytes()
    except OSError as exc:
        raise UsageError(
            what=f"Cannot read {shown}.", why=exc.strerror or str(exc), fix=f"Check it: ls -l {shown}"
        ) from exc
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = raw[: exc.start].count(b"\n") + 1
        fix = "Save it as UTF-8: iconv -f latin1 -t utf-8"
        raise _broken(shown, line, f"byte {raw[exc.start]:#04x} is not UTF-8.", fix) from exc


def _broken(shown: str, line: int | None, problem: str, suggestion: str = "", key: str = "file") -> RunFileError:
    return RunFileError([Mistake(shown, line, key, problem, suggestion)])


# --- YAML ------------------------------------------------------------------------------------------------------------


def _compose(text: str) -> Node | None:
    # Compose nodes instead of values, because nodes have line numbers and keep duplicate keys.
    node: Node | None = YAML(typ="rt", pure=True).compose(text)
    return node


def _parse_yaml(shown: str, text: str) -> Source:
    try:
        root = _compose(text)
    except MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line = mark.line + 1 if mark else None
        raise _broken(shown, line, *_plain_yaml_problem(exc, text, line), key="YAML") from exc
    except (YAMLError, ValueError, RecursionError) as exc:
        odd = re.search(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", text)
        line = text[: odd.start()].count("\n") + 1 if odd else 1
        problem = (
            f"contains the control character {odd[0]!r}." if odd else f"cannot be read: {str(exc).splitlines()[0]}."
        )
        raise _broken(shown, line, problem, "A run file is plain text.", key="YAML") from exc
    if root is None:
        return Source(shown, text, {})
    builder = _YamlBuilder(shown)
    data = builder.build(root, ())
    if not isinstance(data, dict):
        raise _broken(shown, root.start_mark.line + 1, "has no `key: value` lines.", "See a preset: homing new --list")
    return Source(shown, text, data, builder.lines, mistakes=builder.mistakes)


def _plain_yaml_problem(exc: MarkedYAMLError, text: str, line: int | None) -> tuple[str, str]:
    lines = text.splitlines()
    typed = lines[line - 1] if line and line <= len(lines) else ""
    if "\t" in typed[: len(typed) - len(typed.lstrip())] or "\\t" in str(exc.problem):
        return "a tab is used for indentation; YAML allows spaces only.", "Replace each tab with two spaces."
    if "another document" in str(exc.problem):
        return "a second document starts here (`---`).", "A run file is one document."
    if "undefined alias" in str(exc.problem):
        return f"{exc.problem}.", "Text that starts with * needs quotes."
    if "mapping values are not allowed" in str(exc.problem):
        return "unexpected colon.", "Check the indentation; text with `: ` in it needs quotes."
    if "could not find expected ':'" in str(exc.problem) or "cannot start any token" in str(exc.problem):
        return f"{exc.problem}.", "Is the `: ` after a key missing, or are quotes missing around text?"
    context = f" ({exc.context}, from line {exc.context_mark.line + 1})" if exc.context and exc.context_mark else ""
    return f"not valid YAML: {exc.problem}{context}.", "Check brackets, quotes and indentation there."


class _YamlBuilder:
    """Convert nodes to plain values, recording lines and invalid constructs."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.lines: dict[KeyPath, int] = {}
        self.mistakes: list[Mistake] = []
        self.num_nodes = 0

    def build(self, node: Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        self.num_nodes += 1
        # An alias may refer to its own parent, or expand to deeply nested lists. Building either would never finish.
        if self.num_nodes > _MAX_NODES or len(path) > _MAX_DEPTH:
            raise _broken(self.shown, line, "nested too deeply, or an alias refers to itself.", "Simplify the nesting.")
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.build(item, (*path, number)) for number, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        return self._scalar(node, path)

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = str(key_node.value) if isinstance(key_node, ScalarNode) else "?"
            here = (*path, key)
            if not isinstance(key_node, ScalarNode):
                self._wrong(line, here, "a key must be a plain word.")
            elif key in out:
                first = self.lines[here]
                self._wrong(line, here, f"given twice, here and on line {first}.", "Delete one of the two.")
            else:
                self.lines[here] = line
                out[key] = self.build(value_node, here)
        return out

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        kind, typed = node.tag.rsplit(":", 1)[-1] if node.tag else "str", str(node.value)
        if kind in ("str", "timestamp"):
            return typed
        if kind == "null":
            return None
        if kind == "bool":
            return typed.lower() == "true"
        if kind in ("int", "float"):
            return _number(typed)
        self._wrong(node.start_mark.line + 1, path, f"the tag {node.tag} is not supported.", "Delete the tag.")
        return typed

    def _wrong(self, line: int, path: KeyPath, problem: str, suggestion: str = "") -> None:
        self.mistakes.append(Mistake(self.shown, line, dotted(path), problem, suggestion))


def _number(typed: str) -> Any:
    plain = typed.replace("_", "").lower()
    if plain.lstrip("+-") in (".inf", ".nan"):
        return float(plain.replace(".", ""))
    for parse in (int, lambda t: int(t, 0), float):
        try:
            return parse(plain)
        except ValueError:
            continue
    return typed


# --- TOML and JSON ---------------------------------------------------------------------------------------------------


def _parse_toml(shown: str, text: str) -> Source:
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as exc:  # TOMLDecodeError, or a number that is too large
        at = re.search(r"\s*\(at line (\d+), column \d+\)", str(exc))
        line = int(at[1]) if at else len(text.splitlines())
        problem = str(exc).split(" (at ")[0]
        raise _broken(shown, line, f"not valid TOML: {problem}.", "Text needs quotes in TOML.", key="TOML") from exc
    return Source(shown, text, data, toml_lines(text))


def _parse_json(shown: str, text: str) -> Source:
    if not text.strip():
        return Source(shown, text, {})
    try:
        data = json.loads(text)
    except json.JSONDecodeError as exc:
        problem = f"not valid JSON: {exc.msg}, column {exc.colno}."
        raise _broken(shown, exc.lineno, problem, "JSON has no comments and no comma at the end.", key="JSON") from exc
    except (ValueError, RecursionError) as exc:
        raise _broken(shown, 1, "nested too deeply, or a number is too large.", key="JSON") from exc
    if not isinstance(data, dict):
        raise _broken(shown, 1, "has no object.", 'A run file in JSON starts with {"name": ...}.', key="JSON")
    lines, twice = json_lines(text)
    source = Source(shown, text, data, lines)
    source.mistakes = [
        Mistake(shown, line, dotted(path), f"given twice, here and on line {first}.", "Delete one of the two.")
        for path, first, line in twice
    ]
    return source


_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def json_lines(text: str) -> tuple[dict[KeyPath, int], list[tuple[KeyPath, int, int]]]:
    """Map each path to its line, and list every duplicate key as (path, first line, second line)."""
    lines: dict[KeyPath, int] = {(): 1}
    twice: list[tuple[KeyPath, int, int]] = []
    stack: list[list[str | int | None]] = []  # one per open bracket: the current key or None for {, the index for [
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
    counts: dict[KeyPath, int] = {}  # table name -> number of its [[...]] headers already read
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
