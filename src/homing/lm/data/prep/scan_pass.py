"""Pass one of prep: reads, hashes and checks all text that prep will use, so that no invalid text reaches the shards.

It also counts documents and bytes, determines the split between train and val, and yields an evenly spread sample of
the text, on which the tokenizer is trained.

A document is added whenever the sample is not filling up faster than the input is being read. So the sample covers the
whole input evenly, is deterministic, and needs neither a second pass nor the decompressed file sizes.

If no tokenizer has to be trained, the chunks can be encoded as they arrive, provided that the split is known in
advance. It is known if there are many documents, and the first chunk shows whether that is likely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from homing.errors import DataError
from homing.find_source_files import PACKINGS
from homing.lm.data.prep.chunks import Chunk, ahead, read_chunks
from homing.lm.data.prep.prep_settings import Inputs, PrepOrder
from homing.lm.data.text.documents import Cuts, unmarked_bytes_for
from homing.lm.data.text.split import HASH_SPACE, Passages, SmallCorpus, SplitRule, choose
from homing.units import counted, format_bytes

__all__ = ["Scan", "Scanner", "marker_note", "part_note", "passage_note", "rule_by_passages", "scan_warnings"]


_MOST_NAMED = 20  # maximum number of file names to record in each list


@dataclass(frozen=True)
class Scan:
    """The result of pass one. It is stored in the state file, so that prep can resume without repeating pass one."""

    sha256s: list[str]  # hash of each file; "" if it was not read completely
    num_documents: int
    num_text_bytes: int
    num_val_documents: int  # number of documents in validation files; 0 if the split is by hash
    threshold: int  # documents with a smaller hash go to val
    unmarked_bytes: int
    num_plain_files: int
    num_marked_files: int
    files_cut: list[str]
    windows_files: list[str] = field(default_factory=list)
    passage_bytes: int = 0  # see SplitRule
    is_by_tokens: bool = False  # whether the rule is based on token counts, because byte counts were too inaccurate

    @property
    def rule(self) -> SplitRule:
        return SplitRule(self.threshold, self.passage_bytes)

    def with_rule(self, rule: SplitRule, *, is_by_tokens: bool = False) -> Scan:
        return replace(self, threshold=rule.threshold, passage_bytes=rule.passage_bytes, is_by_tokens=is_by_tokens)


class Scanner:
    def __init__(self, order: PrepOrder, inputs: Inputs, notify: Callable[[int], None]) -> None:
        self._order, self._inputs, self._notify = order, inputs, notify
        num_text_bytes = inputs.num_bytes if inputs.is_part else inputs.num_text_bytes
        self._cuts = Cuts(unmarked_bytes_for(num_text_bytes), order.text_field)
        self._fraction = 0.0 if inputs.validation else order.val_fraction
        self._small = SmallCorpus(self._fraction)
        # The split rule to use if there are many documents. `result` determines whether there are.
        self.likely_rule = SplitRule(int(self._fraction * HASH_SPACE))
        self._sha256s: list[str] = []
        self._num_documents = self._num_val_documents = self._num_text_bytes = 0

    def sample(self) -> Iterator[bytes]:
        """Read all text and yield the sample's documents. Exhaust this generator before calling `result`."""
        total, sampled = self._inputs.num_bytes, 0
        with ahead(self.chunks()) as chunks:
            for chunk in chunks:
                allowed = self._order.sample_bytes * chunk.read_bytes / total
                for document in chunk.documents if not chunk.is_validation else []:
                    if sampled <= allowed:
                        sampled += len(document)
                        yield document
                self._notify(chunk.read_bytes)

    def is_likely_small(self, first: Chunk) -> bool:
        """Return whether the first chunk suggests that there are too few documents for the usual way of splitting."""
        share = first.read_bytes / self._inputs.num_bytes
        return self._small.is_small and len(first.documents) <= self._small.max_documents * share

    def check_not_blank(self) -> None:
        if self._num_documents == self._num_val_documents:
            raise DataError(
                what="The text files contain no text.",
                why="Every document is blank.",
                fix="Choose files that contain text: --text 'books/*.txt'",
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
        # There are only a few long documents, so read the text once more to see where they can be split.
        return rule_by_passages(self._order, self._inputs, scan, lambda documents: [len(one) for one in documents])

    def chunks(self) -> Iterator[Chunk]:
        """Yield all text in chunks and collect statistics. Runs in the reader thread, ahead of the consumer."""
        for chunk in read_chunks(self._inputs, self._cuts, sha256s=self._sha256s):
            self._num_documents += len(chunk.documents)
            self._num_text_bytes += chunk.num_text_bytes
            self._num_val_documents += len(chunk.documents) if chunk.is_validation else 0
            if self._small.is_small:
                for document in chunk.documents:
                    self._small.add(document)
            yield chunk


def rule_by_passages(
    order: PrepOrder, inputs: Inputs, scan: Scan, weigh: Callable[[list[bytes]], list[int]]
) -> SplitRule:
    """Read all text and return the rule that holds out the requested fraction, measured by `weigh` (bytes or tokens).

    If there are too many documents to do this, return the rule from the scan without reading the text.
    """
    if not Passages.can_hold(scan.num_documents):
        return scan.rule
    passages = Passages(order.val_fraction, scan.num_text_bytes)
    cuts = Cuts(scan.unmarked_bytes, order.text_field, is_checked=False)
    with ahead(read_chunks(inputs, cuts)) as chunks:
        for chunk in chunks:
            for document, weight in zip(chunk.documents, weigh(chunk.documents), strict=True):
                passages.add(document, weight)
    return passages.best_rule()


def marker_note(scan: Scan) -> str:
    """If the text has no <|endoftext|> marker, return a note on what counts as a document, else ""."""
    if not scan.num_plain_files or scan.num_marked_files:
        return ""
    if not scan.files_cut:
        return "The text has no <|endoftext|> marker, so each file is one document."
    num_cut = len(scan.files_cut)
    many = f"{num_cut} or more large files were" if num_cut == _MOST_NAMED else (
        f"{counted(num_cut, 'large file')} {'was' if num_cut == 1 else 'were'}"
    )  # fmt: skip
    others = "; each of the other files is one document" if scan.num_plain_files > num_cut else ""
    return (
        f"The text has no <|endoftext|> marker: {many} split at paragraph breaks into passages of about"
        f" {scan.unmarked_bytes // 1024} KiB, each treated as one document{others}."
    )


def part_note(scan: Scan, inputs: Inputs) -> str:
    """Return a note on how much of the text is used; "" if all of it is used."""
    if all(scan.sha256s):  # every file was read to its end
        return ""
    about = "about " if inputs.num_text_bytes != inputs.num_file_bytes else ""
    return (
        f"Using {format_bytes(scan.num_text_bytes)} out of {about}{format_bytes(inputs.num_text_bytes)} of text, in"
        " proportion from each file; set data.take: 0 to use all of it."
    )


def passage_note(scan: Scan) -> str:
    if not scan.passage_bytes:
        return ""
    return (
        f"There are few documents, so homing held out passages of about {format_bytes(scan.passage_bytes)} instead of"
        " whole documents."
    )


def scan_warnings(scan: Scan, order: PrepOrder, *, has_validation: bool) -> list[str]:
    warnings = []
    # With `specials: one`, only this marker separates documents (as in cs336).
    if order.specials == "one" and (missing := marker_note(scan)):
        warnings.append(missing)
    if order.val_fraction and not has_validation and not scan.threshold:
        warnings.append(
            "No text is held out for validation, because there is too little text to split."
            " Add text, or set data.validation to a file."
        )
    if has_validation and not scan.num_val_documents:
        warnings.append("The validation files contain no text.")
    if scan.windows_files:
        warnings.append(_windows_warning(scan.windows_files))
    return warnings


def _windows_warning(files: list[str]) -> str:
    """Return a warning about CRLF line endings.

    Text is never changed silently, so a model would learn to write both kinds of line endings.
    """
    others = len(files) - 1
    more = f" and in {counted(others, 'other file')}{' or more' if len(files) == _MOST_NAMED else ''}" if others else ""
    meant = "decompressed copies" if any(file.lower().endswith(tuple(PACKINGS)) for file in files) else "them"
    return (
        f"Lines in {files[0]}{more} end in \\r\\n (Windows line endings), and the model would learn to write them."
        f" Convert {meant}: sed -i 's/\\r$//' FILES"
    )
