"""What `homing prep` makes beside the run's own text: open weights brought here, and the data of single phases."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homing.cli import talk
from homing.units import format_bytes, format_count
from homing.wire import names

if TYPE_CHECKING:
    from homing.config import Loaded
    from homing.config.phase_data import PhasePrep
    from homing.lm.prep import PrepOrder

__all__ = ["bring_base", "needs_text", "prepare_phases"]

_PAPERS = (names.TOKENIZER, names.TOKENIZER_CONFIG, "chat_template.jinja", "generation_config.json")


def needs_text(loaded: Loaded) -> bool:
    """Whether any phase learns from the text of the run itself."""
    own = {prep.phase for prep in loaded.phase_preps}
    return any(phase.kind in ("pretrain", "mid") and phase.kind not in own for phase in loaded.run.phases)


def bring_base(loaded: Loaded) -> dict[str, Any] | None:
    """The open weights of the run here, and their tokenizer in its data folder."""
    if loaded.source is None:
        return None
    from homing.config.open_weights import bring

    source = loaded.source
    talk.say(f"Open weights: {source.address}, {format_bytes(source.num_weight_bytes)}.")
    folder = bring(source)
    loaded.prep.dir.mkdir(parents=True, exist_ok=True)
    for name in _PAPERS:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, loaded.prep.dir / name)
    return {"address": source.address, "dir": str(folder), "num_bytes": source.num_weight_bytes}


def prepare_phases(loaded: Loaded, *, is_forced: bool) -> list[dict[str, Any]]:
    """In the order of the phases; the tokenizer of the run is there by now."""
    return [_prepare(loaded, prep, is_forced=is_forced) for prep in loaded.phase_preps]


def _prepare(loaded: Loaded, prep: PhasePrep, *, is_forced: bool) -> dict[str, Any]:
    made = _prepare_chat(loaded, prep, is_forced) if prep.kind == "chat" else _prepare_text(loaded, prep, is_forced)
    talk.say(
        f"Phase {prep.phase}: {made['num_documents']:,} {'conversations' if prep.kind == 'chat' else 'documents'}, "
        f"{format_count(made['num_train_tokens'])} tokens to learn from, "
        f"{format_count(made['num_val_tokens'])} held out{', as before' if made['is_reused'] else ''}."
    )
    return made


def _prepare_text(loaded: Loaded, prep: PhasePrep, is_forced: bool) -> dict[str, Any]:
    from homing.cli.prep_report import Meter
    from homing.lm.prep import PrepOrder, prepare

    whole = PrepOrder(**{**vars(loaded.prep), "is_forced": is_forced})
    order: PrepOrder = replace(
        whole,
        text=prep.text,
        validation=prep.validation,
        val_fraction=prep.val_fraction,
        tokenizer=str(loaded.prep.dir / names.TOKENIZER),
        dir=prep.dir,
    )
    with Meter() as meter:
        manifest = prepare(order, meter.show)
    return _told(prep, manifest, is_reused=meter.is_reused)


def _prepare_chat(loaded: Loaded, prep: PhasePrep, is_forced: bool) -> dict[str, Any]:
    from homing.lm.chat.order import ChatOrder, ChatSource
    from homing.lm.chat.prepare import prepare_chat

    order = ChatOrder(
        dir=prep.dir,
        chat=[ChatSource(source.path, source.weight, source.repeat) for source in prep.chat],
        tokenizer=loaded.prep.dir,
        context=loaded.run.model.context,
        validation=prep.validation,
        val_fraction=prep.val_fraction,
        is_forced=is_forced,
    )
    made = prepare_chat(order)
    return {**_told(prep, made.manifest, is_reused=made.is_reused), "report": made.report}


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
