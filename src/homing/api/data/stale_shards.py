"""Refuse shards that do not match the text and the settings in the current run file.

run file + manifest.json of each data folder -> the first difference -> DataError with the command that fixes it

plan, verify, launch and train check this before they use the shards. Needs neither torch nor the extra `lm`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homing.config.prepared_data import (
    FilesNow,
    Prepared,
    changed_files,
    changed_settings,
    files_now,
    read_prepared,
    sha256_of,
)
from homing.errors import DataError
from homing.find_source_files import find_chat_files, find_sources, is_in_store, may_exceed
from homing.wire import file_names

if TYPE_CHECKING:
    from homing.config.load import Loaded
    from homing.config.resolve.phase_data import PhasePrep

__all__ = ["refuse_stale", "stale_shards"]

_KEYS = {"val_fraction": "the held-out fraction", "text_field": "data.text_field", "take_bytes": "data.take"}


def refuse_stale(loaded: Loaded, typed: str) -> None:
    """Raise DataError if any shards are stale.

    `typed`: the run as the user typed it, with --set and --smoke, for the command in the error's fix.
    """
    for folder, why in stale_shards(loaded):
        raise DataError(
            what=f"The shards in {folder} do not match {loaded.file}.",
            why=f"Difference: {why}.",
            fix=f"homing prep {typed}",
        )


def stale_shards(loaded: Loaded) -> Iterator[tuple[Path, str]]:
    """Yield each data folder that does not match the run file, with the first difference."""
    prep = loaded.prep
    # If no text is configured, there is nothing to compare: either the run file names its shards only by data.dir, or
    # it is a run's record, whose shards are fixed.
    if prep.text and loaded.needs_text and (prepared := read_prepared(prep.dir)) is not None:
        wanted = {"text": prep.text, "validation": prep.validation, "val_fraction": prep.val_fraction}
        if why := _of_text(loaded, prepared, wanted) or _of_tokenizer(loaded, prepared):
            yield prep.dir, why
    for own in loaded.phase_preps:
        prepared = read_prepared(own.dir)
        if prepared is None:
            continue
        if why := _of_chat(own, prepared) if own.kind == "chat" else _of_text(loaded, prepared, vars(own)):
            yield own.dir, why


def _of_text(loaded: Loaded, prepared: Prepared, wanted: dict[str, Any]) -> str:
    manifest, settings = prepared.manifest, prepared.manifest.settings
    if why := _of_store(settings, wanted["text"], wanted["validation"]):
        return why
    stamps, count = _stamps(prepared.dir / "prep.json"), settings.get("num_text_files", len(manifest.source))
    held_out = _now(wanted["validation"])
    text = _now(wanted["text"])
    text = FilesNow({path: file for path, file in text.files.items() if path not in held_out.files}, text.gone)
    for sources, now in ((manifest.source[:count], text), (manifest.source[count:], held_out)):
        if why := changed_files(sources, stamps, now):
            return why
    values = {
        "val_fraction": 0.0 if wanted["validation"] else float(wanted["val_fraction"]),
        "text_field": loaded.prep.text_field,
        "take_bytes": loaded.prep.take_bytes if may_exceed(loaded.prep.take_bytes, manifest.source) else 0,
    }
    return changed_settings({"take_bytes": 0, **settings} if settings else {}, values, _KEYS)


def _of_store(settings: dict[str, Any], text: list[str], validation: list[str]) -> str:
    """Compare addresses in a store by name only, without contacting the store."""
    named = settings.get("named", {})
    for key, now in (("text", text), ("validation", validation)):
        far, then = ([path for path in paths if is_in_store(path)] for paths in (now, named.get(key, [])))
        if list(far) != list(then):
            return (
                f"data.{key} names the store addresses {', '.join(far) or 'none'}; when the shards were"
                f" made, they were {', '.join(then) or 'none'}"
            )
    return ""


def _of_tokenizer(loaded: Loaded, prepared: Prepared) -> str:
    settings, prep = prepared.manifest.settings, loaded.prep
    if prep.tokenizer:
        path = Path(prep.tokenizer)
        path = path / file_names.TOKENIZER if path.is_dir() else path
        is_same = not path.is_file() or sha256_of(path) == prepared.manifest.tokenizer_sha256
        return "" if is_same else f"they were made with a tokenizer other than {path}"
    if settings.get("tokenizer_sha256") or "split" not in settings:
        return ""
    if settings["split"] != prep.split:
        return f"tokenizer.split is {prep.split} now and was {settings['split']} then"
    return ""


def _of_chat(own: PhasePrep, prepared: Prepared) -> str:
    manifest = prepared.manifest
    if manifest.settings.get("order", {}).get("named") != own.named():
        return "the conversations, weights or held-out fractions in the run file have changed"
    named = [*own.validation, *(source.path for source in own.chat)]
    now = _now(named, lambda patterns: find_chat_files(patterns)[0])
    return changed_files(manifest.source, _stamps(prepared.dir / "report.json"), now)


def _now(patterns: list[str], find: Any = None) -> FilesNow:
    here = [path for path in patterns if not is_in_store(path)]
    return files_now(here, find or (lambda each: find_sources(each, key="text").sources))


def _stamps(path: Path) -> list[list[Any]]:
    try:
        return list(json.loads(path.read_bytes())["stamps"])
    except (OSError, ValueError, KeyError, TypeError):
        return []  # no file stamps were recorded, so every file is hashed
