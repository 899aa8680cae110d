"""Every line of chat files looked at before anything is rented: kept, cut or skipped, and why, with its number.

    file -> lines -> form -> rules -> seen before? -> on both sides? -> rendered -> does it fit?

Nothing is mended in silence and nothing replaced: a line is learned from as it stands, or up to its last answer that
fits, or not at all, and each is counted. Without a renderer (no tokenizer yet) all but the length is looked at.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from homing.errors import DataError
from homing.lm.chat.forms import to_messages, unused_fields, which_form
from homing.lm.chat.lines import BrokenFile, Line, values_of
from homing.lm.chat.messages import Conversation, Fault
from homing.lm.chat.render import Example, Renderer
from homing.lm.chat.rules import check, drop_unanswered
from homing.lm.text.read import Reading
from homing.text_sources import Source

__all__ = ["HARMLESS", "Doctor", "FileReport", "Finding", "Kept"]

# Worth saying, and no reason to mend the file: the rest of it is learned from all the same.
HARMLESS = frozenset({"duplicate", "too-long", "unanswered", "marker", "replacement", "unused-fields"})
# All are counted; these many are told one by one.
MAX_FINDINGS = 10_000
_AT_ONCE = 256  # conversations rendered together


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    kind: str
    text: str
    action: str  # skipped | cut | kept | stops: nothing after it in the file was looked at

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
    num_lines: int = 0  # with something on them
    num_kept: int = 0  # of which the cut ones are a part
    num_cut: int = 0
    num_skipped: int = 0
    num_faults: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Kept:
    line: int
    conversation: Conversation
    examples: list[Example]  # none without a renderer


@dataclass
class Doctor:
    renderer: Renderer | None = None
    context: int = 0  # of the model; 0: however long
    files: list[FileReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    fixes: dict[str, str] = field(default_factory=dict)  # of files that cannot be read at all: what to do about each
    lengths: dict[str, array[int]] = field(default_factory=dict)  # by side: the context that each needs to be whole
    tell: Callable[[int], None] = lambda num_bytes: None  # how much of the file has been read, now and then
    _seen: dict[str, dict[bytes, str]] = field(default_factory=lambda: {"train": {}, "val": {}})
    _held_out: dict[bytes, str] = field(default_factory=dict)

    @property
    def num_faults(self) -> int:
        return sum(file.num_faults for file in self.files)

    def told(self) -> list[Finding]:
        """Faults first, then what was cut and what is worth knowing, each file by its lines."""
        places = {file.path: number for number, file in enumerate(self.files)}
        actions = ("stops", "skipped", "cut", "kept")
        return sorted(self.findings, key=lambda f: (not f.is_fault, actions.index(f.action), places[f.path], f.line))

    def examine(self, source: Source, side: str) -> Iterator[Kept]:
        """What is kept, in order. Validation files come first: what is in them is skipped in those for training."""
        report = FileReport(source.path, side)
        self.files.append(report)
        with Reading(source, is_hashed=True) as reading:
            try:
                wellformed = self._wellformed(values_of(reading), report)
                while some := list(islice(wellformed, _AT_ONCE)):
                    yield from self._fitting(some, report)
                    self.tell(reading.num_bytes_read)
            except BrokenFile as exc:
                self._tell(report, exc.line, Fault("broken-file", exc.what.split(": ", 1)[-1]), "stops")
                raise
            except DataError as exc:
                self.fixes[source.path] = exc.fix
                self._tell(report, report.num_lines + 1, Fault("broken-file", f"{exc.what} {exc.why}"), "stops")
                raise
            report.sha256 = reading.sha256()
        if not report.num_lines:
            self._tell(report, 1, Fault("empty-file", "nothing is in it"), "stops")

    def _wellformed(self, lines: Iterator[Line], report: FileReport) -> Iterator[tuple[int, Conversation, bool]]:
        """Line, conversation, and whether something of it was dropped already."""
        noted: set[str] = set()
        for line in lines:
            report.num_lines += 1
            try:
                conversation, dropped = self._conversation(line.value, report)
                self._check_new(conversation, line.number, report)
            except Fault as fault:
                self._tell(report, line.number, fault, "skipped")
                report.num_skipped += 1
                continue
            if dropped:
                turns = "1 turn" if dropped == 1 else f"{dropped} turns"
                self._tell(report, line.number, Fault("unanswered", f"{turns} after the last answer left out"), "cut")
            for kind, text in _notes(conversation, self.renderer, line.value, report.form, noted):
                self._tell(report, line.number, Fault(kind, text), "kept")
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
                self._tell(report, line, fault, "skipped")
                report.num_skipped += 1
                continue
            if shortened:
                self._tell(report, line, Fault("too-long", shortened), "cut")
            report.num_kept += 1
            report.num_cut += bool(is_cut or shortened)
            yield Kept(line, conversation, examples)

    def _fit(self, row: list[Example] | Fault) -> tuple[list[Example], str]:
        """What fits, and a sentence if that is not all. The last token is only a target: one more than the context."""
        if isinstance(row, Fault):
            raise row
        whole = [example.up_to_answer() for example in row]
        if not self.context or all(len(example.ids) <= self.context + 1 for example in whole):
            return whole, ""
        fitting = [example.cut(end) for example in whole if (end := _last_end(example, self.context + 1))]
        longest = max(len(example.ids) for example in whole)
        text = f"{longest:,} tokens, the context is {self.context:,}"
        if not fitting:
            raise Fault("too-long", f"{text}, and not even the first answer fits")
        num_left = sum(len(example.turn_ends) for example in fitting)
        return fitting, f"{text}; {num_left} of {sum(len(example.turn_ends) for example in whole)} answers fit"

    def _tell(self, report: FileReport, line: int, fault: Fault, action: str) -> None:
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
    """What is kept all the same; each kind once a file where it says nothing about the line."""
    texts = [str(message["content"]) for message in conversation.messages]
    if any("\ufffd" in text for text in texts):
        yield "replacement", "has U+FFFD, the sign of text that was decoded wrongly once"
    if renderer is not None and any(renderer.tokens.markers_in(text) for text in texts):
        yield "marker", "spells a marker of the chat template; it is read as text"
    fresh = [name for name in unused_fields(value, form) if name not in noted]
    if fresh:
        noted.update(fresh)
        yield "unused-fields", f"fields that are not used: {', '.join(fresh)}"
