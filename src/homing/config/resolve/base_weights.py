"""`model.from`: start from open weights, which set the model's shape and the base of the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from homing.config.resolve.origins import Trace
from homing.config.weights.open_weights import Source, read_source
from homing.errors import HomingError
from homing.wire.run_json import Base, HubFile, Model

__all__ = ["read_base", "resolve_base", "shape_of_base"]

# used if the run file sets none: within the limit of almost all current open weights, and fits most GPUs
_CONTEXT = 2048
_SET_BY_WEIGHTS = (
    "depth",
    "arch",
    "layers",
    "width",
    "heads",
    "kv_heads",
    "head_size",
    "ffn_width",
    "tied",
    "rope_base",
)


def read_base(trace: Trace) -> Source | None:
    typed = str(getattr(trace.file.model, "from"))
    if not typed:
        return None
    for name in (*_SET_BY_WEIGHTS, "norm_eps", "family"):
        if trace.is_given(("model", name)):
            trace.wrong(("model", name), "is set by the open weights.", "Delete it, or delete model.from.")
    for name in ("vocab_size", "file", "split", "specials", "sample"):
        if trace.is_given(("tokenizer", name)):
            trace.wrong(
                ("tokenizer", name), "open weights come with their own tokenizer.", "Delete it, or delete model.from."
            )
    try:
        return read_source(typed)
    except HomingError as exc:
        trace.wrong(("model", "from"), f"{exc.what} {exc.why}".strip(), exc.fix)
        return None


def shape_of_base(trace: Trace, source: Source) -> Model:
    path, most = ("model", "context"), source.shape.context
    context = trace.take("model.context", path, min(_CONTEXT, most), "default with model.from")
    if context > most and trace.is_sound(path):
        trace.wrong(path, f"{context:,} exceeds the context of the weights.", f"Allowed: at most {most:,}.")
        context = most
    for field in dataclasses.fields(Model):
        if field.name not in ("context", "max_context"):
            trace.note(f"model.{field.name}", f"model.from: {source.address}")
    trace.note("model.max_context", f"model.from: {source.address}")
    return dataclasses.replace(source.shape, context=context, max_context=most if context < most else 0)


def resolve_base(trace: Trace, source: Source | None) -> Base | None:
    if source is None:
        return None
    hub_keys = [
        f"hub_files.{n}.{name}" for n in range(len(source.hub_files)) for name in ("name", "num_bytes", "sha256")
    ]
    for name in ("address", "dir", "dtype", "licence", *(hub_keys or ["hub_files"])):
        trace.note(f"base.{name}", "model.from")
    if source.note:
        trace.warn(source.note)
    missing = [file for file in source.files if not (Path(source.metadata_dir) / file.name).is_file()]
    return Base(
        address=source.address,
        dir=str(source.metadata_dir) if set(missing) <= set(source.hub_files) else "",
        dtype=source.dtype,
        licence=source.licence,
        hub_files=[HubFile(file.name, file.num_bytes, file.sha256) for file in source.hub_files],
    )
