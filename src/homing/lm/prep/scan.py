"""Pass one: every byte that is taken is read, hashed and checked, so that no bad text becomes data.

What it finds decides the rest: how many documents, how much text, where the split between train and val lies. On the
way an even sample of the text goes to whoever wants it, which is the tokenizer's trainer.

The sample keeps pace with the reading: a document is taken while the sample is no further along than the reading is.
So it is spread over the whole input, deterministic, and needs neither the unpacked size nor a second look.

Where nothing is to be learned first, its pieces can be encoded as they come, if the split is known beforehand: it is
for many documents, and the first piece tells whether there will be many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from homing.errors import DataError
from homing.lm.prep.order import Inputs, PrepOrder
from homing.lm.prep.pieces import Piece, ahead, pieces_of
from homing.lm.text.documents import Cuts, unmarked_bytes_for
from homing.lm.text.split import HASH_SPACE, Passages, SmallCorpus, SplitRule, choose
from homing.text_sources import PACKINGS
from homing.units import counted, format_bytes

__all__ = ["Scan", "Scanner", "marker_note", "part_note", "passage_note", "rule_by_passages", "scan_warnings"]


_MOST_NAMED = 20  # of the files that were cut


@dataclass(frozen=True)
class Scan:
    """What pass one found; lies in the state file, so a killed prep does not look again."""

    sha256s: list[str]  # of the files; "" of one that was not read to its end
    num_documents: int
    num_text_bytes: int
    num_val_documents: int  # of validation files; 0 with a split by hash
    threshold: int  # what has a smaller hash goes to val
    unmarked_bytes: int
    num_plain_files: int
    num_marked_files: int
    files_cut: list[str]
    windows_files: list[str] = field(default_factory=list)
    passage_bytes: int = 0  # of SplitRule
    is_by_tokens: bool = False  # whether the rule was chosen by counted tokens, after the bytes missed the share

    @property
    def rule(self) -> SplitRule:
        return SplitRule(self.threshold, self.passage_bytes)

    def with_rule(self, rule: SplitRule, *, is_by_tokens: bool = False) -> Scan:
        return replace(self, threshold=rule.threshold, passage_bytes=rule.passage_bytes, is_by_tokens=is_by_tokens)


class Scanner:
    def __init__(self, order: PrepOrder, inputs: Inputs, tell: Callable[[int], None]) -> None:
        self._order, self._inputs, self._tell = order, inputs, tell
        self._cuts = Cuts(unmarked_bytes_for(inputs.num_bytes), order.text_field)
        self._fraction = 0.0 if inputs.validation else order.val_fraction
        self._small = SmallCorpus(self._fraction)
        # Where documents are many, the rule will be this one; `result` has the final word.
        self.likely_rule = SplitRule(int(self._fraction * HASH_SPACE))
        self._sha256s: list[str] = []
        self._num_documents = self._num_val_documents = self._num_text_bytes = 0

    def sample(self) -> Iterator[bytes]:
        """Goes through all text; yields the documents of the sample. Run it to its end, then ask for the result."""
        total, sampled = self._inputs.num_bytes, 0
        with ahead(self.pieces()) as pieces:
            for piece in pieces:
                allowed = self._order.sample_bytes * piece.read_bytes / total
                for document in piece.documents if not piece.is_validation else []:
                    if sampled <= allowed:
                        sampled += len(document)
                        yield document
                self._tell(piece.read_bytes)

    def is_likely_small(self, first: Piece) -> bool:
        """Whether the threshold must be found by looking at every document, judged by the first piece of them."""
        share = first.read_bytes / self._inputs.num_bytes
        return self._small.is_small and len(first.documents) <= self._small.max_documents * share

    def check_not_blank(self) -> None:
        if self._num_documents == self._num_val_documents:
            raise DataError(
                what="There is no text in what was named.",
                why="Every document is blank.",
                fix="Name files with text: --text 'books/*.txt'",
            )

    def result(self) -> Scan:
        self.check_not_blank()
        found = Scan(
            sha256s=self._sha256s,
            num_documents=self._num_documents,
            num_text_bytes=self._num_text_bytes,
            num_val_documents=self._num_val_documents,
            threshold=self.likely_rule.threshold,
            unmarked_bytes=self._cuts.unmarked_bytes,
            num_plain_files=self._cuts.num_plain_files,
            num_marked_files=self._cuts.num_marked_files,
            files_cut=self._cuts.files_cut[:_MOST_NAMED],
            windows_files=self._cuts.windows_files[:_MOST_NAMED],
        )
        return found.with_rule(self._rule(found))

    def _rule(self, scan: Scan) -> SplitRule:
        if not self._small.is_small:
            return self.likely_rule
        choice = choose(self._fraction, self._small.hashes, self._small.sizes)
        if choice.threshold and choice.is_near(self._fraction):
            return SplitRule(choice.threshold)
        # Documents are few and long: the text is read once more, to see where they can be cut.
        return rule_by_passages(self._order, self._inputs, scan, lambda documents: [len(one) for one in documents])

    def pieces(self) -> Iterator[Piece]:
        """All text, looked at on the way. In the reading thread, so that it overlaps with the use of the pieces."""
        for piece in pieces_of(self._inputs, self._cuts, sha256s=self._sha256s):
            self._num_documents += len(piece.documents)
            self._num_text_bytes += piece.num_text_bytes
            self._num_val_documents += len(piece.documents) if piece.is_validation else 0
            if self._small.is_small:
                for document in piece.documents:
                    self._small.add(document)
            yield piece


def rule_by_passages(
    order: PrepOrder, inputs: Inputs, scan: Scan, weigh: Callable[[list[bytes]], list[int]]
) -> SplitRule:
    """The rule that holds out the right share of what `weigh` counts in each document; the scan's own if there are too
    many documents for this. Reads all text."""
    if not Passages.can_hold(scan.num_documents):
        return scan.rule
    passages = Passages(order.val_fraction, scan.num_text_bytes)
    cuts = Cuts(scan.unmarked_bytes, order.text_field, is_checked=False)
    with ahead(pieces_of(inputs, cuts)) as pieces:
        for piece in pieces:
            for document, weight in zip(piece.documents, weigh(piece.documents), strict=True):
                passages.add(document, weight)
    return passages.best_rule()


def marker_note(scan: Scan) -> str:
    """Where no text has the marker: what is a document then. Ordinary text has none, and loses nothing by it."""
    if not scan.num_plain_files or scan.num_marked_files:
        return ""
    if not scan.files_cut:
        return "<|endoftext|> never occurs in the text: each file is one document."
    num_cut = len(scan.files_cut)
    many = f"{num_cut} or more large files were" if num_cut == _MOST_NAMED else (
        f"{counted(num_cut, 'large file')} {'was' if num_cut == 1 else 'were'}"
    )  # fmt: skip
    others = "; other files are one document each" if scan.num_plain_files > num_cut else ""
    return (
        f"<|endoftext|> never occurs in the text: {many} cut at paragraph borders into documents of about"
        f" {scan.unmarked_bytes // 1024} KiB{others}."
    )


def part_note(scan: Scan, inputs: Inputs) -> str:
    return (
        f"{format_bytes(scan.num_text_bytes)} of text are taken, from every file its share of"
        f" {format_bytes(inputs.num_file_bytes)}; data.take: 0 takes all."
    )


def passage_note(scan: Scan) -> str:
    if not scan.passage_bytes:
        return ""
    return (
        f"The documents are long: passages of about {format_bytes(scan.passage_bytes)} were held out from them, cut at"
        " paragraph breaks."
    )


def scan_warnings(scan: Scan, order: PrepOrder, *, has_validation: bool) -> list[str]:
    warnings = []
    # `specials: one` is the form in which this marker, and no other, stands between documents (cs336's).
    if order.specials == "one" and (missing := marker_note(scan)):
        warnings.append(missing)
    if order.val_fraction and not has_validation and not scan.threshold:
        warnings.append(
            "No text is held out for validation: there is too little text to divide."
            " Add text, or name a file under data.validation."
        )
    if has_validation and not scan.num_val_documents:
        warnings.append("The validation files have no text.")
    if scan.windows_files:
        warnings.append(_windows_warning(scan.windows_files))
    return warnings


def _windows_warning(files: list[str]) -> str:
    """Nothing of a text is changed in silence, so a model would learn to write both kinds of lines."""
    others = len(files) - 1
    more = f" and of {counted(others, 'other file')}{' or more' if len(files) == _MOST_NAMED else ''}" if others else ""
    meant = "unpacked ones" if any(file.lower().endswith(tuple(PACKINGS)) for file in files) else "them"
    return (
        f"Lines of {files[0]}{more} end in \\r\\n, as on Windows, and are learned so."
        f" sed -i 's/\\r$//' FILES makes {meant} plain."
    )
