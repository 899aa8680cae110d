"""Checks every line of chat files before anything is rented, and reports which lines are cut or skipped, and why.

    file -> lines -> format -> rules -> duplicate? -> in both splits? -> rendered -> does it fit?

No line is silently fixed or replaced. A line is kept unchanged, cut after the last answer that fits, or skipped, and
the lines in each group are counted. If there is no renderer (because there is no tokenizer yet), everything except the
length is checked.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from homing.errors import DataError
from homing.find_source_files import Source
from homing.lm.data.chat.messages import Conversation, Fault, to_messages, unused_fields, which_form
from homing.lm.data.chat.read_rows import BrokenFile, Line, values_of
from homing.lm.data.chat.render import Example, Renderer
from homing.lm.data.chat.rules import check, drop_unanswered
from homing.lm.data.text.read_bytes import Reading

__all__ = ["HARMLESS", "Doctor", "FileReport", "Finding", "Kept"]

# Kinds of findings that are reported, but do not require the user to fix the file.
HARMLESS = frozenset({"duplicate", "too-long", "unanswered", "marker", "replacement", "unused-fields"})
# Maximum number of findings to list. The counts include all findings.
MAX_FINDINGS = 10_000
_AT_ONCE = 256  # conversations rendered together


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    kind: str
    text: str
    action: str  # skipped | cut | kept | stops (the rest of the file was not checked)

    @property
    def is_fault(self) -> bool:
        return self.kind not in HARMLESS

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.action}: {self.text}"


@dataclass
class FileReport:
    path: str
    side: str  # train | val
    form: str = ""
    num_lines: int = 0  # not counting blank lines
    num_kept: int = 0  # number of conversations kept, including those that were cut
    num_cut: int = 0
    num_skipped: int = 0
    num_faults: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Kept:
    line: int
    conversation: Conversation
    examples: list[Example]  # empty without a renderer


@dataclass
class Doctor:
    renderer: Renderer | None = None
    context: int = 0  # maximum context length of the model; 0 if there is no limit
    files: list[FileReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    fixes: dict[str, str] = field(default_factory=dict)  # path -> how to fix the file, for files that cannot be read
    # split -> the context length that each of its conversations needs in order not to be cut
    lengths: dict[str, array[int]] = field(default_factory=dict)
    # Called periodically with the number of bytes read from the current file.
    notify: Callable[[int], None] = lambda num_bytes: None
    _seen: dict[str, dict[bytes, str]] = field(default_factory=lambda: {"train": {}, "val": {}})
    _held_out: dict[bytes, str] = field(default_factory=dict)

    @property
    def num_faults(self) -> int:
        return sum(file.num_faults for file in self.files)

    def sorted_findings(self) -> list[Finding]:
        """Return the findings: faults, then cut conversations, then notes. Each group is sorted by file and line."""
        places = {file.path: number for number, file in enumerate(self.files)}
        actions = ("stops", "skipped", "cut", "kept")
        return sorted(self.findings, key=lambda f: (not f.is_fault, actions.index(f.action), places[f.path], f.line))

    def examine(self, source: Source, side: str) -> Iterator[Kept]:
        """Yield the conversations to keep, in order.

        Call this for the validation files first, because training files must not repeat conversations from them.
        """
        report = FileReport(source.path, side)
        self.files.append(report)
        with Reading(source, is_hashed=True) as reading:
            try:
                wellformed = self._wellformed(values_of(reading), report)
                while some := list(islice(wellformed, _AT_ONCE)):
                    yield from self._fitting(some, report)
                    self.notify(reading.num_bytes_read)
            except BrokenFile as exc:
                self._notify(report, exc.line, Fault("broken-file", exc.what.split(": ", 1)[-1]), "stops")
                raise
            except DataError as exc:
                self.fixes[source.path] = exc.fix
                self._notify(report, report.num_lines + 1, Fault("broken-file", f"{exc.what} {exc.why}"), "stops")
                raise
            report.sha256 = reading.sha256()
        if not report.num_lines:
            self._notify(report, 1, Fault("empty-file", "the file is empty"), "stops")

    def _wellformed(self, lines: Iterator[Line], report: FileReport) -> Iterator[tuple[int, Conversation, bool]]:
        """Yield the line number, the conversation, and whether part of it has already been dropped."""
        noted: set[str] = set()
        for line in lines:
            report.num_lines += 1
            try:
                conversation, dropped = self._conversation(line.value, report)
                self._check_new(conversation, line.number, report)
            except Fault as fault:
                self._notify(report, line.number, fault, "skipped")
                report.num_skipped += 1
                continue
            if dropped:
                turns = "1 turn" if dropped == 1 else f"{dropped} turns"
                self._notify(report, line.number, Fault("unanswered", f"dropped {turns} after the last answer"), "cut")
            for kind, text in _notes(conversation, self.renderer, line.value, report.form, noted):
                self._notify(report, line.number, Fault(kind, text), "kept")
            yield line.number, conversation, bool(dropped)

    def _conversation(self, value: Any, report: FileReport) -> tuple[Conversation, int]:
        if isinstance(value, Fault):
            raise value
        report.form = report.form or which_form(value)
        return drop_unanswered(check(to_messages(value, report.form)))

    def _check_new(self, conversation: Conversation, line: int, report: FileReport) -> None:
        here, seen = f"{report.path}:{line}", self._seen[report.side]
        digest, loose = conversation.digest(), conversation.loose_digest()
        if (first := seen.setdefault(digest, here)) != here:
            raise Fault("duplicate", f"the same conversation as {first}")
        if report.side == "val":
            self._held_out.setdefault(loose, here)
        elif leaked := self._held_out.get(loose):
            raise Fault("leak", f"also held out for validation, in {leaked}")

    def _fitting(self, some: list[tuple[int, Conversation, bool]], report: FileReport) -> Iterator[Kept]:
        rows: list[list[Example] | Fault] = [[] for _ in some]
        if self.renderer is not None:
            rows = self.renderer.render_all([conversation for _, conversation, _ in some])
        for (line, conversation, is_cut), row in zip(some, rows, strict=True):
            if not isinstance(row, Fault) and row:
                longest = max(len(example.up_to_answer().ids) for example in row)
                self.lengths.setdefault(report.side, array("L")).append(longest - 1)
            try:
                examples, shortened = self._fit(row)
            except Fault as fault:
                self._notify(report, line, fault, "skipped")
                report.num_skipped += 1
                continue
            if shortened:
                self._notify(report, line, Fault("too-long", shortened), "cut")
            report.num_kept += 1
            report.num_cut += bool(is_cut or shortened)
            yield Kept(line, conversation, examples)

    def _fit(self, row: list[Example] | Fault) -> tuple[list[Example], str]:
        """Return the part of a conversation that fits the context and, if anything was cut, a message that says so.

        The last token is only a target and never an input, so context + 1 tokens fit.
        """
        if isinstance(row, Fault):
            raise row
        whole = [example.up_to_answer() for example in row]
        if not self.context or all(len(example.ids) <= self.context + 1 for example in whole):
            return whole, ""
        fitting = [example.cut(end) for example in whole if (end := _last_end(example, self.context + 1))]
        longest = max(len(example.ids) for example in whole)
        text = f"{longest:,} tokens exceed the context of {self.context:,}"
        if not fitting:
            raise Fault("too-long", f"{text}; not even the first answer fits")
        num_left = sum(len(example.turn_ends) for example in fitting)
        return fitting, f"{text}; {num_left} of {sum(len(example.turn_ends) for example in whole)} answers fit"

    def _notify(self, report: FileReport, line: int, fault: Fault, action: str) -> None:
        finding = Finding(report.path, line, fault.kind, fault.text, action)
        report.num_faults += finding.is_fault
        self.counts[fault.kind] += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)


def _last_end(example: Example, limit: int) -> int:
    return max((end for end in example.turn_ends if end <= limit), default=0)


def _notes(
    conversation: Conversation, renderer: Renderer | None, value: Any, form: str, noted: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield notes about a line that is kept. A note about an unused field is yielded only once per file."""
    texts = [str(message["content"]) for message in conversation.messages]
    if any("\ufffd" in text for text in texts):
        yield "replacement", "contains U+FFFD, a sign of text decoded with the wrong encoding"
    if renderer is not None and any(renderer.tokens.markers_in(text) for text in texts):
        yield "marker", "contains a marker of the chat template; it is encoded as plain text"
    fresh = [name for name in unused_fields(value, form) if name not in noted]
    if fresh:
        noted.update(fresh)
        yield "unused-fields", f"unused fields: {', '.join(fresh)}"
