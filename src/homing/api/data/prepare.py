"""Turn text into a tokenizer and token shards, and report the steps and epochs. Implements `homing prep`.

  prep_run(run or text, ...)      the run file and the given settings -> Ordered
                                  -> download, tokenize, write shards -> the document that `homing prep --json` prints

If there is a run file, the settings passed as arguments are written into it when the work is done, so that later steps
use the same data; `sets` and `smoke` affect this call only.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homing.api import notices
from homing.api.extras import need
from homing.config.load import as_typed
from homing.errors import DataError, UsageError

if TYPE_CHECKING:
    from homing.api.data.prepare_phases import Gathered, OnProgress
    from homing.config.load import Loaded
    from homing.lm.data.prep import PrepOrder
    from homing.wire.shard_manifest import DataManifest, Split

__all__ = ["Prepared", "prep_run"]


@dataclass(frozen=True)
class Ordered:
    """What to prepare."""

    order: PrepOrder
    loaded: Loaded | None  # None if there is no run file
    changes: list[str]  # changes to the run file that apply to this call only
    is_smoke: bool
    remembered: dict[str, str]  # settings to write into the run file


@dataclass(frozen=True)
class Prepared:
    document: dict[str, Any]
    warnings: list[str]
    dir: Path
    is_run: bool  # False if prepared from text files, without a run file


def prep_run(
    run: str | None = None,
    *,
    text: Sequence[str] = (),
    validation: Sequence[str] = (),
    out: str | None = None,
    vocab_size: str | int | None = None,
    use_existing_tokenizer: bool = False,
    tokenizer: str | None = None,
    specials: str | None = None,
    text_field: str | None = None,
    val_fraction: str | float | None = None,
    take: str | None = None,
    force: bool = False,
    smoke: bool = False,
    sets: Sequence[str] = (),
    on_progress: OnProgress | None = None,
    is_verbose: bool = False,
) -> Prepared:
    """Prepare everything that a run needs, or only the given texts. If interrupted, call it again to continue."""
    ordered = _order_prep(
        run,
        {
            "data.text": list(text),
            "data.validation": list(validation),
            "data.dir": out,
            "data.text_field": text_field,
            "data.val_fraction": val_fraction,
            "data.take": take,
            "tokenizer.vocab_size": vocab_size,
            "tokenizer.specials": specials,
            "tokenizer.file": tokenizer,
        },
        sets=list(sets),
        is_existing=use_existing_tokenizer,
        force=force,
        is_smoke=smoke,
    )
    return _prepare(ordered, on_progress, is_verbose)


def _order_prep(
    run: str | None,
    given: dict[str, Any],
    *,
    sets: list[str] | None = None,
    is_existing: bool = False,
    force: bool = False,
    is_smoke: bool = False,
) -> Ordered:
    """Read the run file or, if there is none, use the settings in `given`.

    `given` maps keys such as data.text to values; None means that the setting was not given.
    """
    need("lm", verb="prep")
    given = _given(given)
    flags = {key: _as_value(value) for key, value in given.items()}
    changes = [*(sets or []), *(f"{key}={value}" for key, value in flags.items())]
    if run is None and given.get("data.text"):
        if is_smoke or sets:
            raise UsageError(
                what="--smoke and --set need a run file.",
                why="With --text and no RUN, prep takes all settings from its options.",
                fix="Name the run: homing prep RUN --smoke",
            )
        loaded, order = None, _order_from_flags(given, is_existing, force)
    else:
        loaded, order = _order_from_run(run, changes, is_existing, force, is_smoke)
    return Ordered(order, loaded, changes, is_smoke, {} if sets or is_smoke else flags)


def _prepare(ordered: Ordered, on_progress: OnProgress | None, is_verbose: bool) -> Prepared:
    from homing.api.data.prepare_phases import bring_base, prepare_phases, take_tokenizer, write_turns_of
    from homing.config.home_and_run_files import typed_name

    order, loaded, sets, is_smoke = ordered.order, ordered.loaded, ordered.changes, ordered.is_smoke
    base = bring_base(loaded) if loaded else None
    if loaded and not base and not loaded.needs_text:
        take_tokenizer(loaded)
    result: dict[str, Any] = (
        _prepare_run_text(order, on_progress) if loaded is None or loaded.needs_text else {"dir": str(order.dir)}
    )
    if base:
        result["base"] = base
    if loaded:
        write_turns_of(loaded)
    if loaded and loaded.phase_preps:
        result["own"] = prepare_phases(
            loaded,
            is_forced=order.is_forced,
            check=_check_command(loaded, sets, is_smoke),
            on_progress=on_progress,
            is_verbose=is_verbose,
        )
    if loaded and ordered.remembered and _remember(loaded.file, ordered.remembered):
        sets = []
    after = _reload(loaded, sets, is_smoke)
    result["phases"] = _budget(after)
    typed = f"{typed_name(loaded.file)}{as_typed(sets, is_smoke=is_smoke)}" if loaded else "NAME"
    result["next"] = f"homing verify {typed}"
    return Prepared(result, list(after.warnings) if after else [], order.dir, loaded is not None)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that were given, with vocab_size as a number, because messages show it as a --set option."""
    found = {key: value for key, value in flags.items() if value not in (None, [])}
    if str(found.get("tokenizer.vocab_size", "")).isdecimal():
        found["tokenizer.vocab_size"] = int(found["tokenizer.vocab_size"])
    return found


def _as_value(value: Any) -> str:
    """Format a value for --set: a path or a size unquoted, everything else as JSON, which is also YAML."""
    is_plain = isinstance(value, str) and re.fullmatch(r"[\w.-]*/[\w./-]+|\d+[kMGTB]i?B?|[\d.]+%?", value)
    return value if is_plain else json.dumps(value)


def _order_from_flags(given: dict[str, Any], is_existing: bool, force: bool) -> PrepOrder:
    from homing.config.schema.value_types import parse_number
    from homing.lm.data.prep import PrepOrder
    from homing.units import parse_bytes, parse_count

    if "data.dir" not in given:
        raise UsageError(
            what="No output folder for the shards.",
            why="With --text and no RUN, prep takes all settings from its options.",
            fix="Add --out DIR, such as --out data/mine, or name a run: homing prep RUN",
        )
    folder = Path(given["data.dir"]).expanduser().absolute()
    tokenizer = given.get("tokenizer.file") or (str(folder / "tokenizer.json") if is_existing else "")
    try:
        vocab_size = parse_count(given["tokenizer.vocab_size"]) if "tokenizer.vocab_size" in given else None
    except ValueError as exc:
        raise UsageError(f"--vocab-size: {exc}.", fix="For example: --vocab-size 10000") from exc
    try:
        take_bytes = parse_bytes(given.get("data.take", 0))
    except ValueError as exc:
        raise UsageError(f"--take: {exc}.", fix="For example: --take 100MB") from exc
    if vocab_size is None:
        vocab_size = _size_of(tokenizer) if tokenizer else 32768
    rest = {key: given[f"data.{key}"] for key in ("validation", "text_field") if f"data.{key}" in given}
    try:
        rest |= {"val_fraction": parse_number(given["data.val_fraction"])} if "data.val_fraction" in given else {}
    except ValueError as exc:
        raise UsageError(f"--val-fraction: {exc}.", fix="For example: --val-fraction 5%") from exc
    return PrepOrder(
        text=given["data.text"],
        dir=folder,
        vocab_size=vocab_size,
        is_vocab_firm="tokenizer.vocab_size" in given,
        specials=given.get("tokenizer.specials", "standard"),
        tokenizer=tokenizer,
        take_bytes=take_bytes,
        is_forced=force,
        **rest,
    )


def _order_from_run(
    run: str | None, sets: list[str], is_existing: bool, force: bool, is_smoke: bool
) -> tuple[Loaded, PrepOrder]:
    from homing.config.home_and_run_files import newest_run
    from homing.config.load import load_run
    from homing.lm.data.prep import PrepOrder

    name, sets = run or newest_run(), list(sets)
    loaded = load_run(name, sets, is_smoke=is_smoke, is_for_prep=True)
    if is_existing and not loaded.prep.tokenizer:
        existing = loaded.prep.dir / "tokenizer.json"
        _size_of(str(existing))
        sets.append(f"tokenizer.file={json.dumps(str(existing))}")
        loaded = load_run(name, sets, is_smoke=is_smoke, is_for_prep=True)
    return loaded, PrepOrder(**{**vars(loaded.prep), "is_forced": force})


def _size_of(path: str) -> int:
    """Return the vocabulary size of the tokenizer at this path; raise DataError if there is none."""
    from homing.lm.tokenizer.write_files import read_facts

    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.exists():
        raise DataError(
            what=f"No tokenizer found at {file}.",
            why="You asked for an existing tokenizer, so prep does not train one.",
            fix="Pass --tokenizer PATH, or leave out --use-existing-tokenizer to train one.",
        )
    return read_facts(file).vocab_size


def _remember(file: Path, flags: dict[str, str]) -> bool:
    """Write the settings that were given as flags into the run file. Called once the data has been prepared with them.

    Print what was written, or why it could not be written.
    """
    from homing.config.home_and_run_files import preset_dir
    from homing.config.parse.edit import write_keys

    if file.resolve().parent == preset_dir().resolve():
        return False
    changes = ", ".join(f"{key}: {value}" for key, value in flags.items())
    if problem := write_keys(file, flags):
        notices.say(
            f"warning: could not write {changes} to {file}: {problem}. Pass --set to later commands, as shown below."
        )
        return False
    notices.say(f"Saved in {file} for later commands: {changes}")
    return True


def _check_command(loaded: Loaded, sets: list[str], is_smoke: bool) -> str:
    """Return the matching `data check` command. It has no --smoke, so pass the smoke run's tokenizer and context."""
    from homing.config.home_and_run_files import typed_name

    small = f" --tokenizer {shlex.quote(str(loaded.prep.dir))} --context {loaded.run.model.context}" * is_smoke
    return f"homing data check {typed_name(loaded.file)}{as_typed(sets)}{small}"


def _prepare_run_text(order: PrepOrder, on_progress: OnProgress | None) -> dict[str, Any]:
    from homing.api.data.download_input_files import addresses, bring_files, part_of, say_if_less
    from homing.api.data.prepare_phases import gathered
    from homing.lm.data.prep import prepare

    named, part = order.text, part_of(order.take_bytes, order.text, order.validation)
    text = bring_files(named, order.dir / "from-store", part)
    held_out = bring_files(order.validation, order.dir / "held-out")
    order = replace(order, text=text, validation=held_out, named=addresses(order.text, order.validation))
    with gathered(on_progress) as meter:
        manifest = prepare(order, meter.take)
    say_if_less(part, named, manifest)
    return _document(order, manifest, meter)


def _document(order: PrepOrder, manifest: DataManifest, meter: Gathered) -> dict[str, Any]:
    """Return the document that --json prints. The printed report is built from it too."""
    from homing.lm.data.prep.work_folder import tokenizer_files
    from homing.wire.shard_manifest import val_share

    num_text = int(manifest.settings["num_text_files"])
    return {
        "dir": str(order.dir),
        "is_reused": meter.is_reused,
        "vocab_size": manifest.vocab_size,
        "num_merges": _num_merges(manifest),
        "specials": manifest.specials,
        "is_tokenizer_trained": not manifest.settings.get("tokenizer_sha256"),
        "tokenizer": order.tokenizer,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "tokenizer_files": tokenizer_files(manifest),
        "dtype": manifest.dtype,
        "text": list(order.text),
        "validation": list(order.validation),
        "splits": {
            name: _split(split, manifest.source[:num_text] if name == "train" else manifest.source[num_text:])
            for name, split in manifest.splits.items()
        },
        "is_cut": manifest.is_cut,
        "val_share": round(val_share(manifest.splits), 6),
        "source_sha256": manifest.source_sha256,
        "elapsed_s": round(meter.elapsed_s, 3),
        "warnings": meter.warnings,
    }


def _num_merges(manifest: DataManifest) -> int | None:
    """Return the number of merges learned, which for a small text is lower than the settings allow."""
    from homing.lm.tokenizer.train_bpe import MIN_VOCAB

    if manifest.settings.get("tokenizer_sha256"):
        return manifest.settings.get("num_merges")  # an existing tokenizer was used, and its file has this number
    return manifest.vocab_size - MIN_VOCAB - len(manifest.specials)


def _split(split: Split, source: list[Any]) -> dict[str, Any]:
    num_bytes = sum(shard.num_bytes for shard in split.shards)
    return {
        "num_tokens": split.num_tokens,
        "num_documents": split.num_documents,
        "num_text_bytes": split.num_text_bytes,
        "num_file_bytes": sum(file.num_bytes for file in source),
        "num_bytes": num_bytes,
        "compression_ratio": round(split.num_text_bytes / num_bytes, 4) if num_bytes else None,
        "bytes_per_token": round(split.num_text_bytes / split.num_tokens, 4) if split.num_tokens else None,
        "shards": [shard.name for shard in split.shards],
    }


def _reload(loaded: Loaded | None, sets: list[str], is_smoke: bool) -> Loaded | None:
    """Load the run file again now that the tokens are counted, to get its steps, epochs and epoch warning."""
    if loaded is None:
        return None
    from homing.config.load import load_run

    return load_run(str(loaded.file), sets, is_smoke=is_smoke)


def _budget(after: Loaded | None) -> list[dict[str, Any]]:
    if after is None:
        return []
    from homing.config.estimate.params_and_flops import num_epochs

    whole = after.run.data.num_train_tokens
    return [
        {
            "phase": phase.kind,
            "batch_tokens": phase.batch_tokens,
            "num_steps": phase.num_steps,
            "num_tokens": phase.num_steps * phase.batch_tokens,
            "epochs": num_epochs(
                phase.num_steps, phase.batch_tokens, phase.data.num_train_tokens if phase.data else whole
            ),
        }
        for phase in after.run.phases
        if phase.kind != "rl"  # rl generates its training data as it runs
    ]
