"""Load a trained model, given its run or folder, for `homing.load` and the commands that use a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from homing.api.extras import need
from homing.api.lookup.find_adapter_base import find_base
from homing.api.lookup.find_models import PHASES, find_model
from homing.errors import UsageError

if TYPE_CHECKING:
    from homing.lm.model import Decoder
    from homing.lm.tokenizer import Tokenizer

__all__ = ["ModelWord", "OpenModel", "find_folder", "open_model", "read_model_word"]

_CHECKPOINT = re.compile(r"best|latest|(?:step-)?(\d+)")


@dataclass(frozen=True, repr=False, eq=False)
class OpenModel:
    """A loaded model, its tokenizer and the folder that contains both."""

    folder: Path
    model: Decoder
    tokenizer: Tokenizer


def open_model(
    name_or_path: str | Path | None,
    *,
    verb: str,
    checkpoint: str | None = None,
    phase: str | None = None,
    device: str = "auto",
    base: str = "",
) -> OpenModel:
    """Load a model. `verb` is named in the error if the extra `lm` is missing."""
    need("lm", verb=verb)
    folder = find_folder(name_or_path, checkpoint=checkpoint, phase=phase)

    from homing.lm.generate import load_for_use

    return OpenModel(folder, *load_for_use(folder, device, base=find_base(folder, base)))


def find_folder(
    model: str | Path | OpenModel | None, *, checkpoint: str | None = None, phase: str | None = None
) -> Path:
    """Return the folder of a model; a Path is always a folder, never the name of a run."""
    if isinstance(model, OpenModel):
        return model.folder
    if isinstance(model, Path):
        model = str(model) if model.is_absolute() else f"./{model}"
    return find_model(model, checkpoint=checkpoint, phase=phase)


@dataclass(frozen=True)
class ModelWord:
    """A model as `homing serve` takes it: RUN[:PHASE][:CHECKPOINT], such as first:step-400 or first:sft:best."""

    run: str
    phase: str | None = None
    checkpoint: str | None = None  # best, latest or a step


def read_model_word(word: str) -> ModelWord:
    """Split `RUN[:PHASE][:CHECKPOINT]`. RUN is a run, NAME@RUN or a folder; a folder's name may contain colons."""
    run, phase, checkpoint = word, None, None
    head, colon, last = run.rpartition(":")
    if colon and (found := _CHECKPOINT.fullmatch(last)):
        run, checkpoint = head, found[1] or last
        head, colon, last = run.rpartition(":")
    if colon and last in PHASES:
        run, phase = head, last
    if not run or (":" in run and not Path(run).expanduser().exists()):
        raise UsageError(
            what=f"Invalid model: {word!r}.",
            why="A model is RUN[:PHASE][:CHECKPOINT]. RUN is a run, NAME@RUN or a folder."
            f" PHASE is {', '.join(PHASES[:-1])} or {PHASES[-1]}. CHECKPOINT is best, latest or step-N.",
            fix="For example: first:step-400, first:sft or first:sft:latest",
        )
    return ModelWord(run, phase, checkpoint)
