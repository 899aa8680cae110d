"""Write a trained model in a format for other tools, and verify the result. Implements `homing export`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homing import __version__, progress
from homing.api import notices
from homing.api.extras import need_for_export
from homing.api.lookup.find_adapter_base import find_base
from homing.api.lookup.find_runs import open_home
from homing.api.models.open_model import OpenModel, find_folder
from homing.cloud.ledger import meter
from homing.errors import UsageError
from homing.units import counted
from homing.wire import codec, file_names
from homing.wire.run_json import Run

if TYPE_CHECKING:
    from homing.lm.export import Made

__all__ = ["DTYPES", "EXPORTS", "GGUF_TYPES", "KINDS", "Exported", "export_model", "name_of", "write_export"]

KINDS = ("hf", "gguf", "ollama", "adapter", "merged")
DTYPES = ("fp32", "bf16", "fp16")
F16 = "f16"
GGUF_TYPES = ("f32", F16, "q8_0")
EXPORTS = Path("exports")


@dataclass(frozen=True)
class Exported:
    folder: Path  # the model
    to: str
    out: Path
    name: str
    made: Made

    def to_dict(self) -> dict[str, Any]:
        made = self.made
        return {
            "from": str(self.folder),
            "to": self.to,
            "out": str(self.out),
            "files": made.files,
            "checked": made.checked,
            "notes": made.notes,
            "proof": made.proof.to_dict() if made.proof is not None else None,
        }


def export_model(
    run: str | Path | OpenModel | None = None,
    *,
    to: str = "hf",
    out: Path | None = None,
    dtype: str = "",
    gguf_type: str = "",
    licence: str = "",
    base: str = "",
    checkpoint: str | None = None,
    phase: str | None = None,
    force: bool = False,
) -> Exported:
    """Write a model for other tools and verify it. `out` defaults to exports/NAME-KIND."""
    _check_formats(to, dtype, gguf_type)
    need_for_export(to, verb="export")
    folder = find_folder(run, checkpoint=checkpoint, phase=phase)
    name = name_of(folder)
    target = out or EXPORTS / f"{name}-{to}"
    made = write_export(
        folder, to, target, name=name, dtype=dtype, gguf_type=gguf_type, licence=licence, base=base, force=force
    )
    return Exported(folder, to, target, name, made)


def write_export(
    folder: Path,
    to: str,
    out: Path,
    *,
    name: str,
    dtype: str = "",
    gguf_type: str = "",
    licence: str = "",
    base: str = "",
    force: bool = False,
) -> Made:
    """Export the model in `folder` to `out`."""
    from homing.lm.export import Facts, Order, export

    run = _run_of(folder)
    licence = licence or (run.base.licence if run is not None and run.base is not None else "")
    facts = Facts(name, licence=licence, cost=_cost(run), version=__version__)
    order = Order(folder, to, out, facts, dtype, gguf_type or F16, find_base(folder, base), force)

    def notify(text: str) -> None:
        notices.say(f"  {text}")
        progress.report(f"Exporting: {text}")

    try:
        return export(order, notify=notify)
    finally:
        progress.finished()


def name_of(folder: Path) -> str:
    """Return the name of the model's run, or the folder's name if the model is not from a run."""
    run = _run_of(folder)
    return re.sub(r"[^\w.-]+", "-", run.name if run is not None else folder.resolve().name).strip("-.") or "model"


def _run_of(folder: Path) -> Run | None:
    try:
        return codec.loads(Run, (folder / file_names.RUN).read_bytes())
    except (OSError, codec.WireError):
        return None  # not a homing run, or a damaged run.json, which is reported when the folder is opened


def _cost(run: Run | None) -> str:
    """Return the total cost of the run's attempts according to the local ledger; "" if the ledger has none."""
    if run is None or not run.id:
        return ""
    with open_home() as home:
        if not home.has_ledger:
            return ""
        lines = home.ledger.lines(run.id)
        if not lines:
            return ""
        total = meter.total_spend(lines, home.world.now())
        where = ", ".join(dict.fromkeys(f"{line.provider} {line.offer}".strip() for line in lines))
        return f"{meter.at_most(*lines)}{meter.show_usd(total)} for {counted(len(lines), 'instance')} ({where})."


def _check_formats(to: str, dtype: str, gguf_type: str) -> None:
    known = {"--to": (to, KINDS), "--dtype": (dtype or DTYPES[0], DTYPES), "--type": (gguf_type or F16, GGUF_TYPES)}
    if re.fullmatch(r"i?q[2-6](_\w+)?", gguf_type.lower()):
        raise UsageError(
            what=f"homing cannot write --type {gguf_type}.",
            why=f"Supported types: {', '.join(GGUF_TYPES)}. llama.cpp makes smaller ones from the f16 file.",
            fix=f"Use --type f16, then: llama-quantize NAME-F16.gguf NAME.gguf {gguf_type.upper()}",
        )
    for flag, (value, values) in known.items():
        if value not in values:
            nearest = next(iter(difflib.get_close_matches(value, values, 1, cutoff=0.4)), values[0])
            raise UsageError(f"{flag}: unknown value {value}.", f"Use one of {', '.join(values)}.", f"{flag} {nearest}")
    if dtype and to not in ("hf", "merged"):
        raise UsageError(
            what=f"--dtype does not apply to --to {to}.",
            why="Adapters are always fp32, and GGUF files have their own types.",
            fix="Leave it out, or use --type f32|f16|q8_0 for a GGUF.",
        )
    if gguf_type and to not in ("gguf", "ollama"):
        raise UsageError(
            what=f"--type does not apply to --to {to}.",
            why="It sets the data type of a GGUF file.",
            fix=f"Use --to gguf --type {gguf_type}   or, for hf and merged: --dtype bf16",
        )
