"""What a command leaves behind in a folder and a home, in a form that two commands of the same kind share.

    before = look(home, project)    path below its folder -> lines; the rows of a ledger as `FILE: TABLE`
    print(difference(one, other))   a unified diff; "" if nothing differs

Two runs of the same command differ in their run ids, instance ids, moments, durations, ports and processes, and in the
hashes of files that contain one of those. All of these are replaced by a placeholder; everything else is compared.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Left", "difference", "look"]

Left = dict[str, list[str]]

_MOMENT_OF_RUN = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")  # in a run id
_INSTANCE = re.compile(r"\b(?:i|vol|key)-\d{6}\b")  # of the fake cloud
_ACCOUNT = re.compile(r"\baccount-[0-9a-f]{8}\b")  # of a fake cloud
_OWNER = re.compile(r"(?<=homing-)[a-z0-9]{6}(?=-)")  # of a home, in a mark
_REHEARSAL = re.compile(r"(?<=rehearsals/)[^/]*?(\d{8}-\d{6}-[0-9a-f]{4})")
_SHA256 = re.compile(r"\b[0-9a-f]{64}\b")
_ADDRESS = re.compile(r"(?<=http://127\.0\.0\.1:)\d+")
_CURVES = re.compile(r"(?<=tfevents\.)[^/]*")  # moment, host and process in the name of a file of TensorBoard
_MEASURED = re.compile(r"\b[\d.,]+[kM]? tok/s|\b\d+(?:\.\d+)?s\b|\b\d+\.\d s\b|\b[\d.]+ [KMGT]?B free\b")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?Z?")
_PASSING = re.compile(  # keys whose values depend on the clock, on chance or on the machine's load
    r"t|at|now|when|.*_at|.*_s|seconds|boottime|since|until|pid|.*_pid|port|token|nonce|spend_usd|usd|use"
    r"|.*age|word|best_flops|boot_id|land_by|disk_bytes|commit|bill_usd|ledger_usd|difference_usd"
    r"|total_usd|step_seconds|planned_speeds|export\.json"
)
_SKIPPED = re.compile(  # neither written by a verb nor the same twice
    r"(.*/)?(__pycache__/.*|.*\.lock|.*\.sqlite-(wal|shm)|launching/.*|clock|use\.json|heard\.json|boot\.log|agent\.lock"
    r"|logs/(agent|sync|dead-man|lookout)\.log|fake/(state|server)\.json)"
)


def look(*folders: Path, documents: dict[str, Any] | None = None) -> Left:
    """Read every file and ledger below these folders, which are named by their last part.

    `documents`: by name, what else is compared, such as what a command printed or a function returned.
    """
    found = {f"{top.name}/{path.relative_to(top)}": path for top in folders for path in _files(top)}
    return _Plain(found, documents or {}).left()


def difference(one: Left, other: Left, *, names: tuple[str, str] = ("command line", "library")) -> str:
    """Return what differs as a unified diff, file by file; "" if nothing does."""
    lines: list[str] = []
    for name in sorted({*one, *other}):
        if one.get(name) == other.get(name):
            continue
        if name not in one or name not in other:
            lines.append(f"{name}: only by the {names[name in other]}")
            continue
        lines += difflib.unified_diff(
            one[name], other[name], f"{name} ({names[0]})", f"{name} ({names[1]})", lineterm="", n=1
        )
    return "\n".join(lines)


def _files(top: Path) -> Iterator[Path]:
    for path in sorted(top.rglob("*")):
        if path.is_file() and not _SKIPPED.fullmatch(str(path.relative_to(top))):
            yield path


class _Plain:
    """Replaces what differs from one run of a command to the next."""

    def __init__(self, files: dict[str, Path], documents: dict[str, Any]) -> None:
        self._documents = documents
        self._data = {name: b"" if path.suffix == ".sqlite" else path.read_bytes() for name, path in files.items()}
        self._ledgers = {name: _rows(path) for name, path in files.items() if path.suffix == ".sqlite"}
        texts = [*files, *(data.decode("utf-8", "replace") for data in self._data.values())]
        texts += [json.dumps(documents)]
        texts += [str(row) for tables in self._ledgers.values() for rows in tables.values() for row in rows]
        # The folder of a rehearsal has an id of its own, made in the same second as that of its run.
        rehearsals = {each for name in files for each in _REHEARSAL.findall(name)}
        self._names = {
            **_numbered("run", {each for text in texts for each in _MOMENT_OF_RUN.findall(text)} - rehearsals),
            **_numbered("instance", {each for text in texts for each in _INSTANCE.findall(text)}),
            **_numbered("account", {each for text in texts for each in _ACCOUNT.findall(text)}),
            **_numbered("owner", {each for text in texts for each in _OWNER.findall(text)}),
            **dict.fromkeys(rehearsals, "<rehearsal>"),
        }
        # A file with a run id or a moment in it has another hash each time: its placeholder is that of its plain lines.
        self._hashes: dict[str, str] = {}
        for name, data in self._data.items():
            plain = "\n".join(self._lines(name, data))
            self._hashes[hashlib.sha256(data).hexdigest()] = f"<{hashlib.sha256(plain.encode()).hexdigest()[:12]}>"

    def left(self) -> Left:
        left = {self._text(name): self._lines(name, data) for name, data in self._data.items()}
        for name, tables in self._ledgers.items():
            del left[self._text(name)]
            for table, rows in tables.items():
                left[f"{self._text(name)}: {table}"] = sorted(self._json(row) for row in rows)
        for name, document in self._documents.items():
            left[name] = json.dumps(self._value(document), indent=1, sort_keys=True).splitlines()
        return left

    def _lines(self, name: str, data: bytes) -> list[str]:
        if name.endswith(("/owner", "/billing-ended")):  # an id, and a moment
            return [f"<{Path(name).name}>"]
        if _CURVES.search(name):  # begins with the moment it was made
            return [f"{len(data)} bytes"]
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return [f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()[:16]}"]
        if name.endswith("events.jsonl"):  # written by several processes
            return sorted({self._json(json.loads(line)) for line in text.splitlines()})
        if name.endswith(".jsonl"):
            return [self._json(json.loads(line)) for line in text.splitlines()]
        try:
            found = json.loads(text)
        except ValueError:
            return self._text(text).splitlines()
        return json.dumps(self._value(found), indent=1).splitlines()

    def _json(self, value: Any) -> str:
        return json.dumps(self._value(value))

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            # Of a whole store, whose files contain moments.
            if "num_bytes" in value and {"rate", "num_files"} & value.keys():
                value = {**value, "num_bytes": "<size>"}
            return {self._text(key): _passing(key, self._value(each)) for key, each in value.items()}
        if isinstance(value, list):
            return [self._value(each) for each in value]
        if isinstance(value, float | int) and value > (1e9 if isinstance(value, float) else 1e15):  # an int: in ns
            return "<moment>"
        if isinstance(value, str) and value.startswith('{"'):  # a document in a column of the ledger
            with contextlib.suppress(ValueError):
                return self._value(json.loads(value))
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        if text in self._names:  # such as an owner, without the mark that it is part of
            return self._names[text]
        text = _MOMENT_OF_RUN.sub(lambda match: self._names[match[0]], text)
        text = _OWNER.sub(lambda match: self._names[match[0]], text)
        text = _ACCOUNT.sub(lambda match: self._names[match[0]], text)
        text = _INSTANCE.sub(lambda match: self._names[match[0]], text)
        text = _SHA256.sub(lambda match: self._hashes.get(match[0], "<hash of no file here>"), text)
        text = _MOMENT.sub("<moment>", _MEASURED.sub("<measured>", text))
        return _CURVES.sub("<process>", _ADDRESS.sub("<port>", text))


def _passing(key: str, value: Any) -> Any:
    is_some = value not in (None, "", 0, "0")
    return f"<{key}>" if _PASSING.fullmatch(key) and is_some else value


def _numbered(word: str, found: set[str]) -> dict[str, str]:
    return {each: f"<{word} {number}>" for number, each in enumerate(sorted(found), start=1)}


def _rows(path: Path) -> dict[str, list[dict[str, Any]]]:
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as ledger:
        ledger.row_factory = sqlite3.Row
        tables = [row[0] for row in ledger.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {table: [dict(row) for row in ledger.execute(f"SELECT * FROM {table}")] for table in tables}
