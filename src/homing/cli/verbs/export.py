"""`homing export`: write a trained model in a format for other tools, and verify the result."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from homing.api.models.export_model import export_model
from homing.cli import output
from homing.cli.model_options import Checkpoint, Model, Phase
from homing.cli.options import Base, Json
from homing.units import format_bytes

__all__ = ["Dtype", "GgufType", "Licence", "command"]

Licence = Annotated[
    str, typer.Option("--licence", "--license", metavar="NAME", help="Licence identifier on the Hub, such as mit.")
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", metavar="fp32|bf16|fp16", help="Data type of hf and merged exports; default: that of the checkpoint."
    ),
]
GgufType = Annotated[
    str, typer.Option("--type", metavar="f32|f16|q8_0", help="Data type of gguf and ollama exports; default: f16.")
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
    done = export_model(
        run,
        to=to,
        out=out,
        dtype=dtype,
        gguf_type=gguf_type,
        licence=licence,
        base=base,
        checkpoint=checkpoint,
        phase=phase,
        force=force,
    )
    made = done.made
    output.emit("export/1", done.to_dict())
    if not output.is_json():
        print(done.out)
    for sentence in (*made.checked, *made.notes):
        output.say(f"  {sentence}")
    next_verb = _next_verb(to, done.out, done.name)
    output.say(f"{len(made.files)} files, {format_bytes(sum(made.files.values()))}. {next_verb}")


def _next_verb(to: str, folder: Path, name: str) -> str:
    out = shlex.quote(str(folder))
    if to == "ollama":
        return f"Use it: cd {out} && ollama create {name} -f Modelfile && ollama run {name}"
    if to == "gguf":
        return f"Use it: llama-cli -m {out}/*.gguf   or publish it: homing publish hf:OWNER/NAME {out}"
    if to == "adapter":
        return f"Publish it: homing publish hf:OWNER/NAME {out}"
    return f"Try it: homing generate {out}   Publish it: homing publish hf:OWNER/NAME {out}"
