"""`homing export`: write a trained model in a format for other tools, and verify the result."""

from __future__ import annotations

import difflib
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from homing import __version__
from homing.api.base_weights import find_base
from homing.api.extras import need_for_export
from homing.api.find_models import find_model
from homing.api.find_runs import open_home
from homing.cli import output
from homing.cli.options import Base, Json
from homing.cli.verbs.generate import Checkpoint, Model, Phase
from homing.cloud.ledger import meter
from homing.errors import UsageError
from homing.units import counted, format_bytes
from homing.wire import codec, file_names
from homing.wire.run_json import Run

if TYPE_CHECKING:
    from homing.lm.export import Made

__all__ = ["command", "export_model", "name_of"]

KINDS = ("hf", "gguf", "ollama", "adapter", "merged")
DTYPES = ("fp32", "bf16", "fp16")
F16 = "f16"
GGUF_TYPES = ("f32", F16, "q8_0")
EXPORTS = Path("exports")

Licence = Annotated[
    str, typer.Option("--licence", "--license", metavar="NAME", help="Licence name as used on the Hub: mit, ...")
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", metavar="fp32|bf16|fp16", help="Data type for hf and merged; default: that of the checkpoint."
    ),
]
GgufType = Annotated[
    str, typer.Option("--type", metavar="f32|f16|q8_0", help="Data type for gguf and ollama; default: f16.")
]


def command(
    run: Model = None,
    to: Annotated[str, typer.Option("--to", metavar="hf|gguf|ollama|adapter|merged", help="Export format.")] = "hf",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Output folder; default: exports/NAME-KIND.")
    ] = None,
    dtype: Dtype = "",
    gguf_type: GgufType = "",
    licence: Licence = "",
    base: Base = "",
    checkpoint: Checkpoint = None,
    phase: Phase = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False,
    json_: Json = False,
) -> None:
    """Export a model as a Hugging Face folder, a GGUF file, an Ollama Modelfile, an adapter or merged weights."""
    _check(to, dtype, gguf_type)
    need_for_export(to, verb="export")
    folder = find_model(run, checkpoint=checkpoint, phase=phase)
    name = name_of(folder)
    target = out or EXPORTS / f"{name}-{to}"
    made = export_model(
        folder, to, target, name=name, dtype=dtype, gguf_type=gguf_type or F16, licence=licence, base=base, force=force
    )
    document: dict[str, Any] = {"from": str(folder), "to": to, "out": str(target), "files": made.files}
    document |= {"checked": made.checked, "notes": made.notes}
    document["proof"] = made.proof.to_dict() if made.proof is not None else None
    output.emit("export/1", document)
    if not output.is_json():
        print(target)
    for sentence in (*made.checked, *made.notes):
        output.say(f"  {sentence}")
    output.say(f"{len(made.files)} files, {format_bytes(sum(made.files.values()))}. {_next_verb(to, target, name)}")


def export_model(
    folder: Path,
    to: str,
    out: Path,
    *,
    name: str,
    dtype: str = "",
    gguf_type: str = F16,
    licence: str = "",
    base: str = "",
    force: bool = False,
) -> Made:
    from homing.lm.export import Facts, Order, export

    run = _run_of(folder)
    licence = licence or (run.base.licence if run is not None and run.base is not None else "")
    facts = Facts(name, licence=licence, cost=_cost(run), version=__version__)
    order = Order(folder, to, out, facts, dtype, gguf_type, find_base(folder, base), force)
    return export(order, notify=lambda text: output.say(f"  {text}"))


def name_of(folder: Path) -> str:
    """Return the run's name, else the folder's."""
    run = _run_of(folder)
    return re.sub(r"[^\w.-]+", "-", run.name if run is not None else folder.resolve().name).strip("-.") or "model"


def _run_of(folder: Path) -> Run | None:
    try:
        return codec.loads(Run, (folder / file_names.RUN).read_bytes())
    except (OSError, codec.WireError):
        return None  # not a run of ours; a damaged one is reported when the folder is opened


def _cost(run: Run | None) -> str:
    """Return the cost over all attempts from this ledger; "" if this home did not pay for it."""
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


def _check(to: str, dtype: str, gguf_type: str) -> None:
    known = {"--to": (to, KINDS), "--dtype": (dtype or DTYPES[0], DTYPES), "--type": (gguf_type or F16, GGUF_TYPES)}
    if re.fullmatch(r"i?q[2-6](_\w+)?", gguf_type.lower()):
        raise UsageError(
            what=f"homing cannot write --type {gguf_type}.",
            why=f"Supported types: {', '.join(GGUF_TYPES)}. llama.cpp makes smaller ones from the f16 file.",
            fix=f"--type f16, then: llama-quantize NAME-F16.gguf NAME.gguf {gguf_type.upper()}",
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
            fix=f"--to gguf --type {gguf_type}   or, for hf and merged: --dtype bf16",
        )


def _next_verb(to: str, folder: Path, name: str) -> str:
    out = shlex.quote(str(folder))
    if to == "ollama":
        return f"Use it: cd {out} && ollama create {name} -f Modelfile && ollama run {name}"
    if to == "gguf":
        return f"Use it: llama-cli -m {out}/*.gguf   or publish it: homing publish hf:OWNER/NAME {out}"
    if to == "adapter":
        return f"Publish it: homing publish hf:OWNER/NAME {out}"
    return f"Try it: homing generate {out}   Publish it: homing publish hf:OWNER/NAME {out}"
