"""What `homing prep` makes beside the run's own text: open weights brought here, and the data of single phases.

bring_base       model.from: tokenizer and template, and the weights where no rented machine takes them from the Hub
take_tokenizer   no phase reads text, so none can teach a tokenizer: the one that the run begins with
write_turns_of   what the template writes around a question, for phases of rl
prepare_phases   a folder each, below the run's data folder; what was wrong with which line is told
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homing.cli import talk
from homing.cli.bring_files import addresses, bring_files, part_of, say_if_less
from homing.errors import DataError
from homing.units import counted, format_bytes, format_count
from homing.wire import names
from homing.wire.template import Unreadable, refuse_link_outside

if TYPE_CHECKING:
    from homing.config import Loaded
    from homing.config.phase_data import PhasePrep
    from homing.lm.prep import PrepOrder

__all__ = ["bring_base", "needs_text", "prepare_phases", "take_tokenizer", "write_turns_of"]

_TELL_EVERY_S = 10.0
_TOLD = 8  # findings on the terminal; `homing data check` lists all
_PAPERS = (names.TOKENIZER, names.TOKENIZER_CONFIG, names.CHAT_TEMPLATE, names.GENERATION)


def needs_text(loaded: Loaded) -> bool:
    """Whether any phase learns from the text of the run itself."""
    own = {prep.phase for prep in loaded.phase_preps}
    return any(phase.kind in ("pretrain", "mid") and phase.kind not in own for phase in loaded.run.phases)


def bring_base(loaded: Loaded) -> dict[str, Any] | None:
    """The open weights of the run here, and their tokenizer in its data folder."""
    if loaded.source is None:
        return None
    from homing.config.open_weights import bring

    source, size = loaded.source, format_bytes(loaded.source.num_weight_bytes)
    is_far = not loaded.run.store.startswith("file:")
    if is_far and source.hub_files:
        talk.say(f"Open weights: {source.address}, {size}: the rented machine takes them from the Hub itself.")
        folder = source.papers_dir
    else:
        why = ""
        if is_far and source.repo_id:
            why = " They come here and go through the store: they are not public, or the Hub could not be asked."
        talk.say(f"Open weights: {source.address}, {size}.{why}")
        folder = bring(source)
    _copy_papers(folder, loaded.prep.dir)
    return {"address": source.address, "dir": str(folder), "num_bytes": source.num_weight_bytes}


def take_tokenizer(loaded: Loaded) -> None:
    """Of tokenizer.file, or of the checkpoint that the first phase starts from; else it lies there already."""
    target, found = loaded.prep.dir, loaded.prep.tokenizer or loaded.run.phases[0].init_from
    if found:
        _copy_papers(Path(found) if Path(found).is_dir() else Path(found).parent, target)
    if not (target / names.TOKENIZER).is_file():
        raise DataError(
            what="Nothing says with which tokenizer the conversations are to be read.",
            why="No phase reads text from which one could be learned, and no weights are named that bring one.",
            fix="Name what the run begins with: model.from or phases.0.init_from; or a tokenizer: tokenizer.file",
        )


def write_turns_of(loaded: Loaded) -> None:
    """How a phase of rl asks, where the tokenizer has a template that is not homing's own."""
    from homing.lm.chat.take_apart import write_turns

    has_tokenizer = (loaded.prep.dir / names.TOKENIZER).is_file()
    problem = write_turns(loaded.prep.dir, is_base=loaded.source is not None) if has_tokenizer else ""
    if problem and any(phase.kind == "rl" for phase in loaded.run.phases):
        talk.say(f"warning: rl can ask these weights only in prompts given as ids: {problem}.")


def _copy_papers(folder: Path, target: Path) -> None:
    if folder.resolve() == target.resolve():
        return
    target.mkdir(parents=True, exist_ok=True)
    try:
        for name in _PAPERS:
            refuse_link_outside(folder / name)
    except Unreadable as exc:
        raise DataError(f"{exc.path} cannot be used.", str(exc), "Put the file itself there.") from exc
    for name in _PAPERS:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
        else:
            (target / name).unlink(missing_ok=True)  # one of another tokenizer would be taken for this one's


def prepare_phases(loaded: Loaded, *, is_forced: bool, check: str) -> list[dict[str, Any]]:
    """In the order of the phases; the tokenizer of the run is there by now. `check`: the command that finds the same
    and tells all of it."""
    return [_prepare(loaded, prep, is_forced=is_forced, check=check) for prep in loaded.phase_preps]


def _prepare(loaded: Loaded, prep: PhasePrep, *, is_forced: bool, check: str) -> dict[str, Any]:
    made = _prepare_chat(loaded, prep, is_forced) if prep.kind == "chat" else _prepare_text(loaded, prep, is_forced)
    talk.say(
        f"Phase {prep.phase}: {made['num_documents']:,} {'conversations' if prep.kind == 'chat' else 'documents'}, "
        f"{format_count(made['num_train_tokens'])} tokens to learn from, "
        f"{format_count(made['num_val_tokens'])} held out{', as before' if made['is_reused'] else ''}."
    )
    if "report" in made:
        if not made["is_reused"] or talk.is_verbose():
            _tell_report(made["report"], check)
        model = loaded.run.model
        _warn_of_length(made["report"]["fit"], prep.phase, (model.max_context or model.context) if loaded.source else 0)
    return made


def _warn_of_length(fit: dict[str, Any], phase: str, most: int) -> None:
    """Where more than a few conversations do not fit: it is the model that is too small for them. `most`: the context
    that open weights were made for; 0: a model of one's own, which may have any."""
    from homing.lm.chat.prepare import MOST

    num, num_all = fit["num_too_long"], fit["num_conversations"]
    if num <= (1 - MOST) * num_all:
        return
    needed = fit["context_for_most"]
    # A power of two: batch_tokens, which are whole rows, most likely stay as they are.
    better = 1 << (needed - 1).bit_length()
    advice = f"in the run file: model.context: {better}"
    if most and most <= fit["context"]:
        advice = "these weights read no more; shorter conversations, or weights with a larger context"
    elif most and most < better:
        advice = f"in the run file: model.context: {most}, the most that these weights read"
    talk.say(
        f"warning: {phase}: {num:,} of {counted(num_all, 'conversation')} are longer than model.context,"
        f" {fit['context']:,} tokens, and are cut or left out. {MOST:.0%} of them are whole from {needed:,} tokens on;"
        f" {advice}"
    )


def _tell_report(report: dict[str, Any], check: str) -> None:
    """Form, kept, cut and skipped of each file, and the first lines that were not taken whole."""
    for file in report["files"]:
        talk.say(
            f"  {file['path']}: form {file['form'] or 'unknown'}, {file['num_lines']:,} lines,"
            f" {file['num_kept']:,} kept, {file['num_cut']:,} of them cut, {file['num_skipped']:,} skipped"
        )
    for source in report["sources"]:
        if source["copies"] != 1:
            talk.say(f"  {source['path']}: {source['copies']:g} times an epoch")
    talk.say(
        f"  an epoch is {counted(report['rows_per_epoch'], 'row')} = {format_count(report['tokens_per_epoch'])} tokens,"
        f" {100 * report['padding']:.1f}% of them padding"
    )
    for finding in report["findings"][:_TOLD]:
        talk.say(f"  {finding['path']}:{finding['line']}: {finding['action']}: {finding['text']}")
    more = sum(report["counts"].values()) - _TOLD
    if more > 0:
        talk.say(f"  and {more:,} more: {check}")


def _prepare_text(loaded: Loaded, prep: PhasePrep, is_forced: bool) -> dict[str, Any]:
    from homing.cli.prep_report import Meter
    from homing.lm.prep import PrepOrder, prepare

    whole = PrepOrder(**{**vars(loaded.prep), "is_forced": is_forced})
    part = part_of(whole.take_bytes, prep.text, prep.validation)
    order: PrepOrder = replace(
        whole,
        text=bring_files(prep.text, prep.dir / "from-store", part),
        validation=bring_files(prep.validation, prep.dir / "held-out"),
        named=addresses(prep.text, prep.validation),
        val_fraction=prep.val_fraction,
        tokenizer=str(loaded.prep.dir / names.TOKENIZER),
        dir=prep.dir,
    )
    with Meter() as meter:
        manifest = prepare(order, meter.show)
    say_if_less(part, prep.text, manifest)
    return _told(prep, manifest, is_reused=meter.is_reused)


def _prepare_chat(loaded: Loaded, prep: PhasePrep, is_forced: bool) -> dict[str, Any]:
    from homing.lm.chat.order import ChatOrder, ChatSource
    from homing.lm.chat.prepare import prepare_chat

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
    return {**_told(prep, made.manifest, is_reused=made.is_reused), "report": report}


def _teller(phase: str) -> Callable[[int, int], None]:
    """A line now and then, so that no long prep is silent."""
    told = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _TELL_EVERY_S:
            told = time.monotonic()
            talk.say(f"{phase}: {format_bytes(done)} of {format_bytes(total)} of conversations")

    return tell


def _told(prep: PhasePrep, manifest: Any, *, is_reused: bool) -> dict[str, Any]:
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
