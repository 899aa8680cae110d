"""The whole of prep: order -> scan and tokenizer -> shards -> manifest, each skipped when it is done already."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from homing import __version__
from homing.errors import DataError, HomingError, MissingExtra
from homing.lm.prep.encode import encode_all
from homing.lm.prep.order import (
    Inputs,
    PrepOrder,
    Progress,
    check_order,
    file_sha256,
    find_inputs,
    settings_of,
)
from homing.lm.prep.publish import find_finished, publish
from homing.lm.prep.scan import Scan, Scanner, scan_warnings
from homing.lm.prep.work import Work, disk_full, open_work, write_whole
from homing.lm.shards.write import ShardWriter, dtype_for
from homing.lm.tokenizer.encode import Encoder, warm_up
from homing.lm.tokenizer.files import Facts, build_tokenizer_json, write_extras
from homing.lm.tokenizer.specials import END_OF_TEXT
from homing.lm.tokenizer.train import learn_merges, too_little_text
from homing.wire.codec import loads
from homing.wire.data import DataManifest, SourceFile, Split
from homing.wire.names import TOKENIZER

__all__ = ["prepare"]

Report = Callable[[Progress], None]


def prepare(order: PrepOrder, report: Report) -> DataManifest:
    """Shards, tokenizer and manifest in `order.dir`. May be repeated and killed at any point."""
    _need("rustbpe", "gigatoken", "tokenizers")
    facts = check_order(order)
    inputs = find_inputs(order)
    for warning in inputs.warnings:
        report(Progress("scan", warning=warning))
    settings = settings_of(order, facts, inputs)
    with open_work(order.dir) as work:
        done = None if order.is_forced else find_finished(order.dir, settings, inputs)
        if done is not None:
            report(Progress("reused", inputs.num_bytes, inputs.num_bytes, _num_tokens(done.splits)))
            return done
        fingerprint = {"settings": settings, "stamps": inputs.stamps, "version": __version__}
        if work.begin(fingerprint, is_forced=order.is_forced):
            report(Progress("resumed"))
        return _work_through(order, facts, inputs, settings, work, report)


def _work_through(
    order: PrepOrder, facts: Facts, inputs: Inputs, settings: dict[str, Any], work: Work, report: Report
) -> DataManifest:
    warming = warm_up()
    scan = _scan_and_learn(order, facts, inputs, work, report)
    warming.join()
    for warning in scan_warnings(scan, order, has_validation=bool(inputs.validation)):
        report(Progress("scan", warning=warning))
    if "manifest" in work.state:
        manifest = loads(DataManifest, work.state["manifest"])
    else:
        _check_disk(order.dir, facts, scan)
        splits = _encode(order, facts, inputs, scan, work, report)
        _check_unchanged(inputs, work)
        manifest = _manifest(facts, inputs, settings, scan, splits, work)
    report(Progress("publish", inputs.num_bytes, inputs.num_bytes, _num_tokens(manifest.splits)))
    publish(work, manifest, inputs)
    return manifest


def _scan_and_learn(order: PrepOrder, facts: Facts, inputs: Inputs, work: Work, report: Report) -> Scan:
    """Pass one, with the tokenizer in the work folder at its end."""
    if "scan" in work.state:
        return Scan(**work.state["scan"])
    tell = _teller("scan" if order.tokenizer else "train", inputs.num_bytes, report)
    scanner = Scanner(order, inputs, lambda done: tell(done, 0))
    try:
        if order.tokenizer:
            for _ in scanner.sample():
                pass
            source = Path(order.tokenizer)
            text = (source / TOKENIZER if source.is_dir() else source).read_text(encoding="utf-8")
        else:
            text = _learn(order, facts, inputs, scanner, report)
        scan = scanner.result()
    except HomingError:
        work.discard()  # nothing here is worth going on from
        raise
    write_whole(work.folder / TOKENIZER, text.encode())
    write_extras(work.folder)
    work.save(scan=asdict(scan))
    report(Progress("scanned", inputs.num_bytes, inputs.num_bytes))
    return scan


def _learn(order: PrepOrder, facts: Facts, inputs: Inputs, scanner: Scanner, report: Report) -> str:
    def sample_then_say() -> Any:
        yield from scanner.sample()
        report(Progress("merge", inputs.num_bytes, inputs.num_bytes))

    merges = learn_merges(sample_then_say(), num_merges=facts.num_merges, split=facts.split)
    scanner.result()  # blank text is the better complaint
    if len(merges) < facts.num_merges:
        raise too_little_text(facts.vocab_size, len(facts.specials), len(merges))
    return build_tokenizer_json(merges, facts.specials, facts.split)


def _encode(order: PrepOrder, facts: Facts, inputs: Inputs, scan: Scan, work: Work, report: Report) -> dict[str, Split]:
    def writer(split: str, state: Any) -> ShardWriter:
        return ShardWriter(
            work.folder,
            split,
            dtype=dtype_for(facts.vocab_size),
            end_of_text_id=facts.specials.index(END_OF_TEXT),
            shard_tokens=order.shard_tokens,
            state=state,
        )

    encoder = Encoder(work.folder / TOKENIZER)
    tell = _teller("encode", inputs.num_bytes, report)
    return encode_all(work, inputs, scan, encoder, writer, text_field=order.text_field, tell=tell)


def _manifest(
    facts: Facts, inputs: Inputs, settings: dict[str, Any], scan: Scan, splits: dict[str, Split], work: Work
) -> DataManifest:
    source = [
        SourceFile(source.path, source.num_bytes, sha256)
        for source, sha256 in zip(inputs.sources, scan.sha256s, strict=True)
    ]
    roles = ["text"] * len(inputs.text) + ["validation"] * len(inputs.validation)
    lines = "".join(f"{role} {file.num_bytes} {file.sha256}\n" for role, file in zip(roles, source, strict=True))
    return DataManifest(
        dtype=dtype_for(facts.vocab_size),
        vocab_size=facts.vocab_size,
        tokenizer_sha256=file_sha256(work.folder / TOKENIZER),
        specials=list(facts.specials),
        splits=splits,
        source=source,
        source_sha256=hashlib.sha256(lines.encode()).hexdigest(),
        settings=settings,
        code_version=__version__,
        made_at=time.time(),
    )


def _check_disk(target: Path, facts: Facts, scan: Scan) -> None:
    # Four bytes of text a token is usual; where text is denser, the disk itself will say so.
    width = 2 if dtype_for(facts.vocab_size) == "uint16" else 4
    needed, free = scan.num_text_bytes // 4 * width, shutil.disk_usage(target).free
    if free < needed:
        raise disk_full(target, f"About {needed / 1e6:,.0f} MB of shards are to come, {free / 1e6:,.0f} MB are free.")


def _check_unchanged(inputs: Inputs, work: Work) -> None:
    for source in inputs.sources:
        stat = os.stat(source.path)
        if (stat.st_size, stat.st_mtime_ns) != (source.num_bytes, source.mtime_ns):
            work.discard()
            raise DataError(
                what=f"{source.path} changed while it was read.",
                why="Its size or its time of change is another than at the start, so the shards would be of two texts.",
                fix="Run the same command again when it has settled.",
            )


def _teller(stage: str, total_bytes: int, report: Report) -> Callable[[int, int], None]:
    started, first = time.monotonic(), -1

    def tell(done_bytes: int, num_tokens: int) -> None:
        nonlocal first
        elapsed_s = time.monotonic() - started
        first = done_bytes if first < 0 else first
        # From the second report on: what a resumed prep skipped says nothing about speed.
        speed = (done_bytes - first) / elapsed_s if done_bytes > first and elapsed_s > 0 else 0.0
        eta_s = (total_bytes - done_bytes) / speed if speed else None
        report(Progress(stage, done_bytes, total_bytes, num_tokens, elapsed_s, eta_s))

    return tell


def _num_tokens(splits: dict[str, Split]) -> int:
    return sum(split.num_tokens for split in splits.values())


def _need(*modules: str) -> None:
    import importlib.util

    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingExtra("prep", "lm", module)
