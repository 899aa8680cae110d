"""What `homing prep` prepares besides the run's text: open weights, and the data of individual phases.

bring_base       model.from: tokenizer and template, and the weights if the instance cannot download them
take_tokenizer   copies the run's initial tokenizer if no phase has text to train one on
write_turns_of   for rl phases: the text that the template puts around a question
prepare_phases   one folder per phase below the run's data folder; reports problems line by line
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homing.api import notices
from homing.api.data.download_input_files import addresses, bring_files, part_of, say_if_less
from homing.errors import DataError
from homing.units import counted, format_bytes, format_count
from homing.wire import file_names
from homing.wire.chat_template import Unreadable, refuse_link_outside

if TYPE_CHECKING:
    from homing.config.load import Loaded
    from homing.config.resolve.phase_data import PhasePrep
    from homing.lm.data.prep import PrepOrder, Progress

__all__ = [
    "Gathered",
    "OnProgress",
    "bring_base",
    "gathered",
    "prepare_phases",
    "take_tokenizer",
    "write_turns_of",
]

_REPORT_EVERY_S = 10.0
_MAX_SHOWN = 8  # maximum number of findings to print; `homing data check` lists all
_METADATA_FILES = (file_names.TOKENIZER, file_names.TOKENIZER_CONFIG, file_names.CHAT_TEMPLATE, file_names.GENERATION)


OnProgress = Callable[["Progress | None"], None]  # called with None when this part of the work has ended


class Gathered:
    """Collects what `prepare` reports while it works, and passes each report on to `on_progress`."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self.is_reused = False
        self.warnings: list[str] = []
        self._pass_on, self._began = on_progress or _say_notes, time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def take(self, progress: Progress) -> None:
        if progress.warning:
            self.warnings.append(progress.warning)
        elif not progress.note and progress.stage == "reused":
            self.is_reused = True
        self._pass_on(progress)


@contextmanager
def gathered(on_progress: OnProgress | None) -> Iterator[Gathered]:
    try:
        yield Gathered(on_progress)
    finally:
        if on_progress is not None:
            on_progress(None)


def _say_notes(progress: Progress | None) -> None:
    """Print warnings and notes if the caller does not listen to the progress."""
    if progress is not None and (progress.warning or progress.note):
        notices.say(f"warning: {progress.warning}" if progress.warning else f"Note: {progress.note}")


def bring_base(loaded: Loaded) -> dict[str, Any] | None:
    """Fetch the run's open weights if needed, and copy their tokenizer into the data folder."""
    if loaded.source is None:
        return None
    from homing.config.weights.open_weights import bring

    source, size = loaded.source, format_bytes(loaded.source.num_weight_bytes)
    is_far = not loaded.run.store.startswith("file:")
    if is_far and source.hub_files:
        notices.say(f"Open weights: {source.address}, {size}; the instance downloads them from the Hub.")
        folder = source.metadata_dir
    else:
        why = ""
        if is_far and source.repo_id:
            why = " Downloaded locally and pushed through the store: they are not public, or the Hub did not respond."
        notices.say(f"Open weights: {source.address}, {size}.{why}")
        folder = bring(source)
    _copy_metadata(folder, loaded.prep.dir)
    return {"address": source.address, "dir": str(folder), "num_bytes": source.num_weight_bytes}


def take_tokenizer(loaded: Loaded) -> None:
    """Copy the tokenizer in tokenizer.file, or the one of the checkpoint in the first phase's init_from.

    If neither key is set, the tokenizer must already be in the data folder; otherwise raise DataError.
    """
    target, found = loaded.prep.dir, loaded.prep.tokenizer or loaded.run.phases[0].init_from
    if found:
        _copy_metadata(Path(found) if Path(found).is_dir() else Path(found).parent, target)
    if not (target / file_names.TOKENIZER).is_file():
        raise DataError(
            what="No tokenizer was given for the conversations.",
            why="No phase has text to train one on, and no configured weights include one.",
            fix="Set the initial weights (model.from or phases.0.init_from) or a tokenizer (tokenizer.file)",
        )


def write_turns_of(loaded: Loaded) -> None:
    """For rl phases, save the text around a question in the chat template, unless the template is homing's own."""
    from homing.lm.data.chat.text_around_turns import write_turns

    has_tokenizer = (loaded.prep.dir / file_names.TOKENIZER).is_file()
    problem = write_turns(loaded.prep.dir, is_base=loaded.source is not None) if has_tokenizer else ""
    if problem and any(phase.kind == "rl" for phase in loaded.run.phases):
        notices.say(f"warning: with these weights, an rl phase needs prompts given as token ids: {problem}.")


def _copy_metadata(folder: Path, target: Path) -> None:
    if folder.resolve() == target.resolve():
        return
    target.mkdir(parents=True, exist_ok=True)
    try:
        for name in _METADATA_FILES:
            refuse_link_outside(folder / name)
    except Unreadable as exc:
        raise DataError(f"Cannot use {exc.path}.", str(exc), "Put the file itself there.") from exc
    for name in _METADATA_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
        else:
            (target / name).unlink(missing_ok=True)  # otherwise, another tokenizer's file would be used with this one


def prepare_phases(
    loaded: Loaded, *, is_forced: bool, check: str, on_progress: OnProgress | None = None, is_verbose: bool = False
) -> list[dict[str, Any]]:
    """Prepare each phase in order; the run's tokenizer must exist. `check`: the command that lists all findings."""
    made = []
    for prep in loaded.phase_preps:
        made.append(
            _prepare_chat(loaded, prep, is_forced)
            if prep.kind == "chat"
            else _prepare_text(loaded, prep, is_forced, on_progress)
        )
        _say_made(loaded, prep, made[-1], check=check, is_verbose=is_verbose)
    return made


def _say_made(loaded: Loaded, prep: PhasePrep, made: dict[str, Any], *, check: str, is_verbose: bool) -> None:
    notices.say(
        f"Phase {prep.phase}: {made['num_documents']:,} {'conversations' if prep.kind == 'chat' else 'documents'}, "
        f"{format_count(made['num_train_tokens'])} tokens to train on, "
        f"{format_count(made['num_val_tokens'])} held out{', unchanged' if made['is_reused'] else ''}."
    )
    if "report" in made:
        if not made["is_reused"] or is_verbose:
            _print_report(made["report"], check)
        model = loaded.run.model
        _warn_of_length(made["report"]["fit"], prep.phase, (model.max_context or model.context) if loaded.source else 0)


def _warn_of_length(fit: dict[str, Any], phase: str, most: int) -> None:
    """Warn if more than a few conversations do not fit into the context.

    `most`: the maximum context of the open weights; 0 for a new model, which has no maximum.
    """
    from homing.lm.data.chat.prepare import MOST

    num, num_all = fit["num_too_long"], fit["num_conversations"]
    if num <= (1 - MOST) * num_all:
        return
    needed = fit["context_for_most"]
    # Suggest a power of two, because the context must divide batch_tokens, and a power of two most likely does.
    better = 1 << (needed - 1).bit_length()
    advice = f"to fit them, set in the run file: model.context: {better}"
    if most and most <= fit["context"]:
        advice = "these weights have no larger context; use shorter conversations or other weights"
    elif most and most < better:
        advice = f"set in the run file: model.context: {most}, the maximum of these weights"
    notices.say(
        f"warning: {phase}: {num:,} of {counted(num_all, 'conversation')} are longer than model.context"
        f" ({fit['context']:,} tokens) and are cut or skipped. {MOST:.0%} of all conversations fit in"
        f" {needed:,} tokens;"
        f" {advice}"
    )


def _print_report(report: dict[str, Any], check: str) -> None:
    """Print the format of each file, how many lines were kept, cut and skipped, and the first lines cut or skipped."""
    for file in report["files"]:
        notices.say(
            f"  {file['path']}: format {file['form'] or 'unknown'}, {file['num_lines']:,} lines,"
            f" {file['num_kept']:,} kept, {file['num_cut']:,} of them cut, {file['num_skipped']:,} skipped"
        )
    for source in report["sources"]:
        if source["copies"] != 1:
            notices.say(f"  {source['path']}: used {source['copies']:g} times per epoch")
    notices.say(
        f"  an epoch is {counted(report['rows_per_epoch'], 'row')} = {format_count(report['tokens_per_epoch'])} tokens,"
        f" {100 * report['padding']:.1f}% of them padding"
    )
    for finding in report["findings"][:_MAX_SHOWN]:
        notices.say(f"  {finding['path']}:{finding['line']}: {finding['action']}: {finding['text']}")
    more = sum(report["counts"].values()) - _MAX_SHOWN
    if more > 0:
        notices.say(f"  and {more:,} more: {check}")


def _prepare_text(loaded: Loaded, prep: PhasePrep, is_forced: bool, on_progress: OnProgress | None) -> dict[str, Any]:
    from homing.lm.data.prep import PrepOrder, prepare

    whole = PrepOrder(**{**vars(loaded.prep), "is_forced": is_forced})
    part = part_of(whole.take_bytes, prep.text, prep.validation)
    order: PrepOrder = replace(
        whole,
        text=bring_files(prep.text, prep.dir / "from-store", part),
        validation=bring_files(prep.validation, prep.dir / "held-out"),
        named=addresses(prep.text, prep.validation),
        val_fraction=prep.val_fraction,
        tokenizer=str(loaded.prep.dir / file_names.TOKENIZER),
        dir=prep.dir,
    )
    with gathered(on_progress) as meter:
        manifest = prepare(order, meter.take)
    say_if_less(part, prep.text, manifest)
    return _summary(prep, manifest, is_reused=meter.is_reused)


def _prepare_chat(loaded: Loaded, prep: PhasePrep, is_forced: bool) -> dict[str, Any]:
    from homing.lm.data.chat.chat_settings import ChatOrder, ChatSource
    from homing.lm.data.chat.prepare import prepare_chat

    here = bring_files([source.path for source in prep.chat], prep.dir / "from-store")
    held_out = bring_files(prep.validation, prep.dir / "held-out")
    order = ChatOrder(
        dir=prep.dir,
        chat=[ChatSource(path, source.weight, source.repeat) for path, source in zip(here, prep.chat, strict=True)],
        tokenizer=loaded.prep.dir,
        context=loaded.run.model.context,
        validation=held_out,
        val_fraction=prep.val_fraction,
        is_forced=is_forced,
        named=prep.named(),
    )
    made = prepare_chat(order, _teller(prep.phase))
    settings = made.manifest.settings
    tokens_per_epoch = settings["rows_per_epoch"] * settings["context"]
    report = {**made.report, "sources": settings["sources"], "tokens_per_epoch": tokens_per_epoch}
    return {**_summary(prep, made.manifest, is_reused=made.is_reused), "report": report}


def _teller(phase: str) -> Callable[[int, int], None]:
    """Return a progress callback that prints a line at intervals, so that a long prep is never silent."""
    last_report, say = time.monotonic(), notices.listener()  # the callback may run in another thread

    def report_progress(done: int, total: int) -> None:
        nonlocal last_report
        if time.monotonic() - last_report >= _REPORT_EVERY_S:
            last_report = time.monotonic()
            say(f"{phase}: processed {format_bytes(done)} of {format_bytes(total)} of conversations")

    return report_progress


def _summary(prep: PhasePrep, manifest: Any, *, is_reused: bool) -> dict[str, Any]:
    counts = {name: split.num_tokens for name, split in manifest.splits.items()}
    return {
        "phase": prep.phase,
        "kind": prep.kind,
        "dir": str(Path(prep.dir)),
        "num_documents": manifest.splits["train"].num_documents,
        "num_train_tokens": counts["train"],
        "num_val_tokens": counts.get("val", 0),
        "is_reused": is_reused,
    }
