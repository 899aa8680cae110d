"""Resolve the `model` section to its final shape: from its own keys, or from open weights (`model.from`).

Every invalid number is reported with the nearest valid ones. Open weights set the shape and are the base of the run;
the run file may not set keys that they determine.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from homing.config.estimate.params import round_up
from homing.config.parse.check import Trace
from homing.config.resolve.depth_dial import CONTEXT, HEAD_SIZE, REFERENCE_DEPTH, SWIFT_ROPE_BASE, ffn_width_of
from homing.config.schema.run_file import SHAPE
from homing.config.weights.open_weights import Source, read_source
from homing.errors import HomingError
from homing.wire.run_json import Base, HubFile, Model

__all__ = ["read_base", "resolve_base", "resolve_model", "shape_of_base"]

_OWN_CONTEXT = 1024


def resolve_model(trace: Trace, vocab_size: int) -> Model:
    has_dial = trace.is_given(("model", "depth")) or not any(trace.is_given(("model", name)) for name in SHAPE)
    depth = trace.file.model.depth or REFERENCE_DEPTH
    why = "derived from model.depth" if trace.is_given(("model", "depth")) else "default"
    num_layers = trace.take("model.num_layers", ("model", "layers"), depth, why)
    why_width = why if has_dial else "derived from model.layers"
    width = trace.take(
        "model.width", ("model", "width"), round_up(64 * (depth if has_dial else num_layers), 128), why_width
    )
    num_heads, head_size = _heads(trace, width, has_dial, why)
    num_kv_heads = trace.take("model.num_kv_heads", ("model", "kv_heads"), num_heads, "derived from model.heads")
    _check(trace, width, num_heads, num_kv_heads, head_size)
    family = trace.plain("model.family", ("model", "family"))
    is_swift = family == "swift"
    if is_swift:
        _refuse_in_swift(trace)
    return Model(
        family=family,
        arch="swift" if is_swift else trace.plain("model.arch", ("model", "arch")),
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        ffn_width=trace.take(
            "model.ffn_width", ("model", "ffn_width"), ffn_width_of(width, family), "derived from model.width"
        ),
        context=trace.take("model.context", ("model", "context"), CONTEXT if has_dial else _OWN_CONTEXT, why),
        vocab_size=vocab_size,
        is_tied=trace.take("model.is_tied", ("model", "tied"), not has_dial and not is_swift, why),
        rope_base=trace.take(
            "model.rope_base", ("model", "rope_base"), SWIFT_ROPE_BASE if is_swift else trace.file.model.rope_base
        ),
        norm_eps=trace.plain("model.norm_eps", ("model", "norm_eps")),
    )


def _refuse_in_swift(trace: Trace) -> None:
    if trace.is_given(("model", "arch")):
        trace.wrong(("model", "arch"), "does not apply to family: swift.", "Delete it, or use family: stock.")
    if trace.is_given(("model", "tied")) and trace.file.model.tied:
        trace.wrong(("model", "tied"), "swift never ties its embeddings.", "Delete it, or use family: stock.")
    trace.note("model.arch", "swift")


def _heads(trace: Trace, width: int, has_dial: bool, why: str) -> tuple[int, int]:
    """Return the number of heads and the head size, each derived from the other and the width if not given."""
    heads_path, size_path = ("model", "heads"), ("model", "head_size")
    if trace.is_given(heads_path):
        num_heads = trace.take("model.num_heads", heads_path, 1)
        if width % num_heads and not trace.is_given(size_path) and trace.is_sound(("model", "width"), size_path):
            near = _nearest_divisors(width, num_heads)
            trace.wrong(
                heads_path,
                f"the width {width} is not divisible by {num_heads} heads.",
                f"Nearest that are: {near}. Or set model.head_size.",
            )
        size = max(2, width // num_heads)
        return num_heads, trace.take("model.head_size", size_path, size, "derived from model.width and model.heads")
    usual = HEAD_SIZE if has_dial else next((n for n in (64, 32, 16, 8, 4, 2) if width % n == 0), 2)
    # The user may set depth and also a width; the heads then follow the width.
    if width % usual:
        usual = next((n for n in (64, 32, 16, 8, 4, 2) if width % n == 0), 2)
    head_size = trace.take("model.head_size", size_path, usual, why if has_dial else "derived from model.width")
    if width % head_size and trace.is_sound(("model", "width"), heads_path):
        below = max(head_size, width - width % head_size)
        near = " or ".join(f"{n}" for n in dict.fromkeys((below, width - width % head_size + head_size)))
        at = size_path if trace.is_given(size_path) else ("model", "width")
        trace.wrong(
            at,
            f"the width {width} is not a multiple of the head size {head_size}.",
            f"Nearest widths: {near}. Or set model.heads.",
        )
    num_heads = max(1, width // head_size)
    trace.note("model.num_heads", "derived from model.width and model.head_size")
    return num_heads, head_size


def _check(trace: Trace, width: int, num_heads: int, num_kv_heads: int, head_size: int) -> None:
    kv_path = ("model", "kv_heads")
    if num_heads % num_kv_heads and trace.is_sound(kv_path, ("model", "heads")):
        near = _nearest_divisors(num_heads, num_kv_heads)
        trace.wrong(
            kv_path,
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly.",
            f"Nearest that can: {near}.",
        )
    is_even_split = width % num_heads == 0 or trace.is_given(("model", "head_size"))  # otherwise already reported
    if (
        head_size % 2
        and is_even_split
        and trace.is_sound(("model", "head_size"), ("model", "heads"), ("model", "width"))
    ):
        at = ("model", "head_size") if trace.is_given(("model", "head_size")) else ("model", "heads")
        fix = "Choose an even head size." if at[1] == "head_size" else "Choose heads so that width / heads is even."
        trace.wrong(at, f"the head size {head_size} is odd; RoPE rotates pairs.", fix)
    if trace.file.model.arch == "qwen2" and num_heads * head_size != width and trace.is_given(("model", "head_size")):
        trace.wrong(
            ("model", "head_size"),
            f"qwen2 needs heads x head_size = width; {num_heads} x {head_size} is not {width}.",
            "Delete model.head_size, or use arch: qwen3 or llama.",
        )


def _nearest_divisors(number: int, near: int) -> str:
    """Return the divisors on both sides of `near`."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below = [n for n in divisors if n < near][-1:]
    above = [n for n in divisors if n > near][:1]
    return " or ".join(str(n) for n in below + above)


# used if the run file sets none: almost all current open weights support it, and it fits on most GPUs
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
