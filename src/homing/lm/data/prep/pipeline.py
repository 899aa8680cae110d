"""Runs all of prep: order -> scan and tokenizer -> shards -> manifest, skipping each stage that is already done."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from homing import __version__
from homing.errors import DataError, HomingError, MissingExtra
from homing.lm.data.prep.chunks import Chunk, ahead, read_chunks
from homing.lm.data.prep.encode_pass import AnyEncoder, encode_all, last_mark, position_of
from homing.lm.data.prep.prep_settings import (
    Inputs,
    PrepOrder,
    Progress,
    check_order,
    existing_tokenizer,
    file_sha256,
    find_inputs,
    settings_of,
)
from homing.lm.data.prep.scan_pass import (
    Scan,
    Scanner,
    marker_note,
    part_note,
    passage_note,
    rule_by_passages,
    scan_warnings,
)
from homing.lm.data.prep.work_folder import Work, disk_full, find_finished, open_work, publish, write_whole
from homing.lm.data.shards.write_shards import ShardWriter, dtype_for
from homing.lm.data.text.documents import Cuts
from homing.lm.data.text.split import SplitRule
from homing.lm.tokenizer.encode import Encoder, TheirEncoder, warm_up
from homing.lm.tokenizer.train_bpe import MIN_VOCAB, learn_merges, too_little_text
from homing.lm.tokenizer.trim_heap import keep_large_blocks_out
from homing.lm.tokenizer.write_files import Facts, build_tokenizer_json, read_facts, write_extras
from homing.wire.codec import loads
from homing.wire.file_names import TOKENIZER
from homing.wire.shard_manifest import DataManifest, SourceFile, Split, val_share

__all__ = ["prepare"]

# If the held-out fraction differs from the requested one by more than the first value, it is corrected by counting
# tokens. If it then differs by more than the second value, the user is warned.
_SHARE_RETRY, _SHARE_WARN = 0.0075, 0.01

Report = Callable[[Progress], None]


def prepare(order: PrepOrder, report: Report) -> DataManifest:
    """Write shards, tokenizer and manifest to `order.dir`. If prep is killed, the next call continues the work."""
    _need("rustbpe", "gigatoken", "tokenizers")
    facts = check_order(order)
    inputs = find_inputs(order)
    for warning in inputs.warnings:
        report(Progress("scan", warning=warning))
    settings = settings_of(order, facts, inputs)
    keep_large_blocks_out()
    with open_work(order.dir) as work:
        done = None if order.is_forced else find_finished(order.dir, settings, inputs)
        if done is not None:
            report(Progress("reused", inputs.num_bytes, inputs.num_bytes, _num_tokens(done.splits)))
            if warning := _share_warning(done):
                report(Progress("reused", warning=warning))
            return done
        fingerprint = {"settings": settings, "stamps": inputs.stamps, "version": __version__}
        if work.begin(fingerprint, is_forced=order.is_forced):
            report(Progress("resumed"))
        return _work_through(_Job(order, facts, inputs, settings, work, report))


@dataclass(frozen=True)
class _Job:
    order: PrepOrder
    facts: Facts
    inputs: Inputs
    settings: dict[str, Any]
    work: Work
    report: Report


def _work_through(job: _Job) -> DataManifest:
    work, num_bytes = job.work, job.inputs.num_bytes
    try:
        if "manifest" in work.state:
            manifest = loads(DataManifest, work.state["manifest"])
        else:
            manifest = _make(job)
    except HomingError:
        if "scan" not in work.state:
            work.discard()  # nothing worth resuming
        raise
    job.report(Progress("publish", num_bytes, num_bytes, _num_tokens(manifest.splits)))
    publish(work, manifest, job.inputs)
    if warning := _share_warning(manifest):
        job.report(Progress("publish", warning=warning))
    return manifest


def _make(job: _Job) -> DataManifest:
    """Run all stages of prep except publishing the result; return the manifest."""
    work, splits = job.work, None
    # If there is an existing tokenizer, load it in another thread while reading begins.
    with ThreadPoolExecutor(1, "prefetch") as executor:
        if job.order.tokenizer:
            _take_existing(job)
            _say_if_slow(job)
            encoder = executor.submit(_load_encoder, job)
            scan, splits = _scan_and_encode(job, encoder.result)
        else:
            executor.submit(warm_up)
            scan = _scan_and_learn(job)
            job = _as_learned(job)
            encoder = executor.submit(_load_encoder, job)
        for warning in scan_warnings(scan, job.order, has_validation=bool(job.inputs.validation)):
            job.report(Progress("scan", warning=warning))
        if job.order.specials != "one" and (note := marker_note(scan)):
            job.report(Progress("scan", note=note))
        if job.inputs.is_part and (note := part_note(scan, job.inputs)):
            job.report(Progress("scan", note=note))
        splits = splits or _encode(job, scan, encoder.result)
        better = _rule_by_tokens(job, scan, splits, encoder.result)
        if better is not None:
            scan, splits = better, _encode(job, better, encoder.result)
        if note := passage_note(scan):
            job.report(Progress("encode", note=note))
    _check_unchanged(job.inputs, work)
    return _manifest(job, scan, splits)


def _take_existing(job: _Job) -> None:
    if "scan" not in job.work.state:
        source = existing_tokenizer(job.order)
        write_whole(job.work.folder / TOKENIZER, source.read_bytes())
        for name in job.settings.get("metadata", {}):
            write_whole(job.work.folder / name, (source.parent / name).read_bytes())


def _load_encoder(job: _Job) -> AnyEncoder:
    path = job.work.folder / TOKENIZER
    return TheirEncoder(path, job.facts.end_id) if job.facts.why_slow else Encoder(path)


def _say_if_slow(job: _Job) -> None:
    if job.facts.why_slow:
        warning = (
            f"The fast encoder does not support {existing_tokenizer(job.order)}: {job.facts.why_slow}."
            " Using the tokenizers library instead: the same token ids, but slower."
        )
        job.report(Progress("scan", warning=warning))


def _scan_and_encode(job: _Job, encoder: Callable[[], AnyEncoder]) -> tuple[Scan, dict[str, Split] | None]:
    """With an existing tokenizer, scan and encode in one pass if the split is known in advance, else only scan.

    The split is known in advance if there are many documents. If there turn out to be few after all, the shards are
    written again. If a pass is killed, its mark (resume point) exists, but the result of its scan does not. In that
    case all text is scanned again, and the encoded part is kept if the split is the same.
    """
    if "scan" in job.work.state:
        return Scan(**job.work.state["scan"]), None
    report_scan = _teller("scan", job)
    scanner = Scanner(job.order, job.inputs, lambda done: report_scan(done, 0))
    chunks = scanner.chunks()
    first = next(chunks)
    rule, splits = scanner.likely_rule, None
    if "mark" in job.work.state or scanner.is_likely_small(first):
        with ahead(chain([first], chunks)) as all_chunks:
            for chunk in all_chunks:
                report_scan(chunk.read_bytes, 0)
    else:
        plain = sum(s.num_bytes for s in job.inputs.sources if not s.packing and s.form == "plain")
        _check_disk(job, min(plain, job.inputs.num_bytes))
        splits = _encode_chunks(job, chain([first], chunks), rule, encoder, mark={})
    scan = _save_scan(job, scanner)
    return scan, splits if scan.rule == rule else None


def _scan_and_learn(job: _Job) -> Scan:
    """Run pass one: scan all text and train the tokenizer, which is written to the work folder."""
    if "scan" in job.work.state:
        return Scan(**job.work.state["scan"])
    notify = _teller("train", job)
    scanner = Scanner(job.order, job.inputs, lambda done: notify(done, 0))
    text = _learn(job, scanner)
    write_whole(job.work.folder / TOKENIZER, text.encode())
    return _save_scan(job, scanner)


def _save_scan(job: _Job, scanner: Scanner) -> Scan:
    scan = scanner.result()
    job.work.save(scan=asdict(scan))
    job.report(Progress("scanned", job.inputs.num_bytes, job.inputs.num_bytes))
    return scan


def _learn(job: _Job, scanner: Scanner) -> str:
    facts, num_bytes = job.facts, job.inputs.num_bytes

    def sample_then_say() -> Any:
        yield from scanner.sample()
        job.report(Progress("merge", num_bytes, num_bytes))

    merges = learn_merges(sample_then_say(), num_merges=facts.num_merges, split=facts.split)
    scanner.check_not_blank()  # if the text is blank, this raises a more useful error
    if len(merges) < facts.num_merges:
        problem = too_little_text(facts.vocab_size, len(facts.specials), len(merges))
        if job.order.is_vocab_firm:
            raise problem
        # The last merges join very rare pairs, whose tokens would get almost no training.
        merges = merges[: (len(merges) + 1) // 2]
        size = MIN_VOCAB + len(facts.specials) + len(merges)
        taken = (
            f"{problem.what} You did not set a vocabulary size, so homing uses {size:,},"
            " which keeps half of the merges."
        )
        job.report(Progress("merge", num_bytes, num_bytes, warning=taken))
    return build_tokenizer_json(merges, facts.specials, facts.split)


def _as_learned(job: _Job) -> _Job:
    """Return the job with the actual vocabulary size, which may be smaller than requested.

    The settings keep the requested size.
    """
    learned = read_facts(job.work.folder / TOKENIZER)
    return replace(job, facts=replace(job.facts, vocab_size=learned.vocab_size, num_merges=learned.num_merges))


def _encode(job: _Job, scan: Scan, encoder: Callable[[], AnyEncoder]) -> dict[str, Split]:
    """Run pass two, starting from the last mark (resume point)."""
    _check_disk(job, scan.num_text_bytes)
    mark = last_mark(job.work, scan.rule)
    cuts = Cuts(scan.unmarked_bytes, job.order.text_field, is_checked=False)
    chunks = read_chunks(job.inputs, cuts, start=position_of(mark))
    return _encode_chunks(job, chunks, scan.rule, encoder, mark)


def _rule_by_tokens(job: _Job, scan: Scan, splits: dict[str, Split], encoder: Callable[[], AnyEncoder]) -> Scan | None:
    """Return the scan with a better split rule if the held-out fraction is off, or None if no rule is better.

    The first rule is chosen by bytes, because the tokenizer may not exist yet. Languages differ in bytes per token, so
    the fraction of tokens can be off. In that case the tokens are counted, which takes as long as encoding, and the
    shards are made again.
    """
    wanted = 0.0 if job.inputs.validation else job.order.val_fraction
    if not wanted or scan.is_by_tokens or abs(val_share(splits) - wanted) <= _SHARE_RETRY:
        return None

    def count_tokens(documents: list[bytes]) -> list[int]:
        _, starts = encoder().encode(documents)
        return [int(count) for count in np.diff(starts)]

    rule = rule_by_passages(job.order, job.inputs, scan, count_tokens)
    if rule == scan.rule:
        return None
    better = scan.with_rule(rule, is_by_tokens=True)
    job.work.save(scan=asdict(better))
    return better


def _share_warning(manifest: DataManifest) -> str:
    """Return a warning if the held-out fraction is off by more than one percentage point, else ""."""
    wanted, share = manifest.settings["val_fraction"], val_share(manifest.splits)
    if not wanted or not share or abs(share - wanted) <= _SHARE_WARN:
        return ""
    return (
        f"{100 * share:.1f}% of the tokens are held out for validation instead of {100 * wanted:g}%: there is too"
        " little text to split, or too much of it is repeated. Add text, or set data.validation to a file."
    )


def _encode_chunks(
    job: _Job, chunks: Iterator[Chunk], rule: SplitRule, encoder: Callable[[], AnyEncoder], mark: dict[str, Any]
) -> dict[str, Split]:
    return encode_all(
        job.work,
        chunks,
        rule,
        encoder,
        _writers(job),
        is_slow=bool(job.facts.why_slow),
        mark=mark,
        notify=_teller("encode", job),
        meanwhile=lambda: None if job.facts.why_slow else write_extras(job.work.folder),
    )


def _writers(job: _Job) -> Callable[[str, Any], ShardWriter]:
    def writer(split: str, state: Any) -> ShardWriter:
        return ShardWriter(
            job.work.folder,
            split,
            dtype=dtype_for(job.facts.vocab_size),
            end_of_text_id=job.facts.mark_id,
            shard_tokens=job.order.shard_tokens,
            state=state,
        )

    return writer


def _manifest(job: _Job, scan: Scan, splits: dict[str, Split]) -> DataManifest:
    facts, inputs = job.facts, job.inputs
    source = [
        SourceFile(source.path, source.num_bytes, sha256)
        for source, sha256 in zip(inputs.sources, scan.sha256s, strict=True)
    ]
    roles = ["text"] * len(inputs.text) + ["validation"] * len(inputs.validation)
    lines = "".join(f"{role} {file.num_bytes} {file.sha256}\n" for role, file in zip(roles, source, strict=True))
    return DataManifest(
        dtype=dtype_for(facts.vocab_size),
        vocab_size=facts.vocab_size,
        tokenizer_sha256=file_sha256(job.work.folder / TOKENIZER),
        specials=list(facts.specials),
        splits=splits,
        source=source,
        source_sha256=hashlib.sha256(lines.encode()).hexdigest(),
        settings=job.settings,
        code_version=__version__,
        is_cut=bool(scan.passage_bytes or scan.files_cut),
    )


def _check_disk(job: _Job, num_text_bytes: int) -> None:
    # This assumes four bytes of text per token. Text with more tokens may still fill the disk.
    target, width = job.order.dir, 2 if dtype_for(job.facts.vocab_size) == "uint16" else 4
    needed, free = num_text_bytes // 4 * width, shutil.disk_usage(target).free
    if free < needed:
        raise disk_full(target, f"The shards need about {needed / 1e6:,.0f} MB; {free / 1e6:,.0f} MB are free.")


def _check_unchanged(inputs: Inputs, work: Work) -> None:
    for source in inputs.sources:
        stat = os.stat(source.path)
        if (stat.st_size, stat.st_mtime_ns) != (source.num_bytes, source.mtime_ns):
            work.discard()
            raise DataError(
                what=f"{source.path} changed while homing was reading it.",
                why="Its size or modification time is not what it was at the start,"
                " so the shards would mix two versions.",
                fix="Wait until the file is no longer being modified, then run the same command again.",
            )


def _teller(stage: str, job: _Job) -> Callable[[int, int], None]:
    started, first = time.monotonic(), -1
    total_bytes, is_given = job.inputs.num_bytes, bool(job.order.tokenizer)

    def notify(done_bytes: int, num_tokens: int) -> None:
        nonlocal first
        elapsed_s = time.monotonic() - started
        first = done_bytes if first < 0 else first
        # Measure the speed from the first report on, so that text that was encoded before prep resumed does not count.
        speed = (done_bytes - first) / elapsed_s if done_bytes > first and elapsed_s > 0 else 0.0
        eta_s = (total_bytes - done_bytes) / speed if speed else None
        job.report(Progress(stage, done_bytes, total_bytes, num_tokens, elapsed_s, eta_s, is_tokenizer_given=is_given))

    return notify


def _num_tokens(splits: dict[str, Split]) -> int:
    return sum(split.num_tokens for split in splits.values())


def _need(*modules: str) -> None:
    import importlib.util

    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingExtra("prep", "lm", module)
