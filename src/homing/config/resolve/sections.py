"""Resolve the sections that do not depend on the data: model, train, sample, limits, store and cloud.

`model` gets its final shape from its own keys, or from open weights (`model.from`). Every invalid number is reported
with the nearest valid ones. If a run starts from open weights, they determine its shape, and the run file may not set
the keys for it. In the other sections, each key becomes one field of run.json. The `cloud` section contains the
providers, the GPU and each provider's settings.
"""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from pathlib import Path
from typing import Any

from homing.config.estimate.params_and_flops import round_up
from homing.config.home_and_run_files import home
from homing.config.parse.check import Trace
from homing.config.parse.key_suggestions import nearest
from homing.config.resolve.depth_dial import CONTEXT, HEAD_SIZE, REFERENCE_DEPTH, SWIFT_ROPE_BASE, ffn_width_of
from homing.config.schema.run_file import SHAPE, SshHost
from homing.config.weights.open_weights import Source, read_source
from homing.errors import HomingError
from homing.gpus import GPUS, Gpu, nearest_gpus
from homing.wire.run_json import Base, Cloud, HubFile, Limits, Model, Sampling, Ssh, Train

__all__ = [
    "read_base",
    "resolve_base",
    "resolve_cloud",
    "resolve_limits",
    "resolve_model",
    "resolve_sampling",
    "resolve_store",
    "resolve_train",
    "shape_of_base",
]

_OWN_CONTEXT = 1024
# Default context for open weights: almost all current models support this length, and it fits on most GPUs.
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
CLOUDS = ("aws", "modal", "runpod", "shadeform")  # providers with their own section, cloud.NAME
CONTAINER_CLOUDS = ("modal", "runpod")  # providers that start a container image; cloud.image applies to all of them
PROVIDERS = ("aws", "fake", "local", "modal", "runpod", "shadeform", "ssh")


# --- model ---


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
    """Return the number of heads and the head size. If one is not given, derive it from the other and the width."""
    heads_path, size_path = ("model", "heads"), ("model", "head_size")
    if trace.is_given(heads_path):
        num_heads = trace.take("model.num_heads", heads_path, 1)
        if width % num_heads and not trace.is_given(size_path) and trace.is_sound(("model", "width"), size_path):
            near = _nearest_divisors(width, num_heads)
            trace.wrong(
                heads_path,
                f"the width {width} is not divisible by {num_heads} heads.",
                f"Nearest valid: {near}. Or set model.head_size.",
            )
        size = max(2, width // num_heads)
        return num_heads, trace.take("model.head_size", size_path, size, "derived from model.width and model.heads")
    usual = HEAD_SIZE if has_dial else next((n for n in (64, 32, 16, 8, 4, 2) if width % n == 0), 2)
    # If the usual head size does not divide the width (the user may set both depth and width), use a smaller size.
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
            f"Nearest valid: {near}.",
        )
    is_even_split = width % num_heads == 0 or trace.is_given(("model", "head_size"))  # otherwise already reported
    if (
        head_size % 2
        and is_even_split
        and trace.is_sound(("model", "head_size"), ("model", "heads"), ("model", "width"))
    ):
        at = ("model", "head_size") if trace.is_given(("model", "head_size")) else ("model", "heads")
        fix = "Choose an even head size." if at[1] == "head_size" else "Choose heads so that width / heads is even."
        trace.wrong(at, f"the head size {head_size} is odd, but RoPE rotates pairs.", fix)
    if trace.file.model.arch == "qwen2" and num_heads * head_size != width and trace.is_given(("model", "head_size")):
        trace.wrong(
            ("model", "head_size"),
            f"qwen2 needs heads x head_size = width; {num_heads} x {head_size} is not {width}.",
            "Delete model.head_size, or use arch: qwen3 or llama.",
        )


def _nearest_divisors(number: int, near: int) -> str:
    """Return the nearest divisors of `number` below and above `near`."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below = [n for n in divisors if n < near][-1:]
    above = [n for n in divisors if n > near][:1]
    return " or ".join(str(n) for n in below + above)


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


# --- train, sample, limits, cloud, store ---


def resolve_train(trace: Trace) -> Train:
    limit = trace.file.limits.time
    why = "derived from limits.time" if limit else "default"
    return Train(
        device=trace.plain("train.device", ("train", "device")),
        precision=trace.plain("train.precision", ("train", "precision")),
        compile=trace.plain("train.compile", ("train", "compile")),
        attention=trace.plain("train.attention", ("train", "attention")),
        graphs=trace.plain("train.graphs", ("train", "graphs")),
        is_deterministic=trace.plain("train.is_deterministic", ("train", "deterministic")),
        num_threads=trace.plain("train.num_threads", ("train", "threads")),
        num_ranks=trace.plain("train.num_ranks", ("train", "ranks")),
        parallel=trace.plain("train.parallel", ("train", "parallel")),
        log_every=trace.plain("train.log_every", ("train", "log_every")),
        max_bad_steps=trace.plain("train.max_bad_steps", ("train", "max_bad_steps")),
        time_limit_s=trace.take("train.time_limit_s", ("train", "time_limit"), limit, why),
        writes_csv=trace.plain("train.writes_csv", ("train", "csv")),
    )


def resolve_sampling(trace: Trace) -> Sampling:
    return Sampling(
        prompts=list(trace.plain("sampling.prompts", ("sample", "prompts"))),
        num_tokens=trace.plain("sampling.num_tokens", ("sample", "tokens")),
        temperature=trace.plain("sampling.temperature", ("sample", "temperature")),
        top_k=trace.plain("sampling.top_k", ("sample", "top_k")),
    )


def resolve_limits(trace: Trace) -> Limits:
    spend = trace.plain("limits.spend_usd", ("limits", "spend"))
    rate = trace.plain("limits.rate_usd_per_hour", ("limits", "rate"))
    return Limits(
        spend_usd=None if spend is None else str(spend),
        time_s=trace.plain("limits.time_s", ("limits", "time")),
        idle_s=trace.plain("limits.idle_s", ("limits", "idle")),
        unsaved_s=trace.plain("limits.unsaved_s", ("limits", "unsaved")),
        stall_factor=trace.plain("limits.stall_factor", ("limits", "stall_factor")),
        rate_usd_per_hour=None if rate is None else str(rate),
        on_divergence=trace.plain("limits.on_divergence", ("limits", "on_divergence")),
        on_slow=trace.plain("limits.on_slow", ("limits", "on_slow")),
        relaunches=trace.plain("limits.relaunches", ("limits", "relaunches")),
    )


def resolve_store(trace: Trace) -> str:
    default = f"file:{(home() / 'store').absolute()}"
    typed = trace.take("store", ("store",), default, "default")
    if typed.startswith("file:") and not typed.startswith("file:/"):
        return f"file:{Path(typed.removeprefix('file:')).expanduser().absolute()}"
    return typed


def resolve_cloud(trace: Trace) -> Cloud:
    providers = list(trace.plain("cloud.providers", ("cloud", "providers")))
    for number, provider in enumerate(providers):
        if provider not in PROVIDERS:
            near = nearest(provider.lower(), list(PROVIDERS))
            hint = f"Did you mean {near}? " if near else ""
            trace.wrong(
                ("cloud", "providers", number),
                f"{provider!r} is not a provider.",
                f"{hint}Known: {', '.join(PROVIDERS)}.",
            )
    typed = trace.plain("cloud.gpu", ("cloud", "gpu"))
    gpu = _card(typed)
    if typed and gpu is None:
        near_gpus = nearest_gpus(typed)
        hint = f"Did you mean {' or '.join(near_gpus)}?" if near_gpus else "`homing verify` lists the known GPUs."
        trace.wrong(("cloud", "gpu"), f"{typed!r} is not a known GPU.", hint)
    if trace.is_given(("cloud", "image")) and not set(providers) & set(CONTAINER_CLOUDS):
        trace.warn(f"cloud.image is set but not used: no containers are started on {' and '.join(providers)}.")
    return Cloud(
        providers=providers,
        gpu=gpu.name if gpu else "",
        num_gpus=trace.plain("cloud.num_gpus", ("cloud", "num_gpus")),
        on_preempt=trace.plain("cloud.on_preempt", ("cloud", "on_preempt")),
        ssh=_ssh(trace, is_used="ssh" in providers),
        settings={name: _settings(trace, name) for name in CLOUDS if _is_asked(trace, name, providers)},
        volume=_volume(trace, providers),
    )


def _volume(trace: Trace, providers: list[str]) -> str:
    volume = str(trace.plain("cloud.volume", ("cloud", "volume")))
    if volume and set(providers) <= {"fake", "local"}:
        trace.warn(f"cloud.volume is set but not used: volumes are not supported on {' and '.join(providers)}.")
    if volume and not volume.startswith("/"):
        trace.wrong(("cloud", "volume"), f"{volume!r} is not an absolute path.", "For example /workspace")
    return volume.rstrip("/")


def _is_asked(trace: Trace, name: str, providers: list[str]) -> bool:
    if name not in providers and trace.source.get(("cloud", name)) is not None:
        trace.warn(f"cloud.{name} is set but not used: cloud.providers does not include {name}.")
    return name in providers


def _settings(trace: Trace, name: str) -> dict[str, Any]:
    """Return one provider's section in the form its adapter reads: validated by the schema, with dollars as strings."""
    fields = type(getattr(trace.file.cloud, name)).model_fields
    taken = {field: trace.plain(f"cloud.{name}.{field}", ("cloud", name, field)) for field in fields}
    if name in CONTAINER_CLOUDS and not taken["image"] and trace.is_given(("cloud", "image")):
        taken["image"] = trace.value(("cloud", "image"))
        trace.note(f"cloud.{name}.image", trace.source.origin(("cloud", "image")))
    return {field: str(value) if isinstance(value, Decimal) else value for field, value in taken.items()}


def _ssh(trace: Trace, *, is_used: bool) -> Ssh | None:
    taken = {name: trace.plain(f"cloud.ssh.{name}", ("cloud", "ssh", name)) for name in SshHost.model_fields}
    if is_used and not taken["host"]:
        trace.wrong(("cloud", "providers"), "ssh needs a host.", "Set cloud.ssh.host")
    if not is_used:
        if any(trace.is_given(("cloud", "ssh", name)) for name in taken):
            trace.warn("cloud.ssh is set but not used: cloud.providers does not include ssh.")
        for name in taken:
            trace.origin.pop(f"cloud.ssh.{name}")
        trace.note("cloud.ssh", "not used")
        return None
    trace.origin["cloud.ssh.rate_usd_per_hour"] = trace.origin.pop("cloud.ssh.rate")
    return Ssh(rate_usd_per_hour=str(taken.pop("rate")), **taken)


def _card(typed: str) -> Gpu | None:
    """Return the GPU with exactly this name, or None.

    `find_gpu` also accepts driver strings and would match H1000 to H100.
    """
    wanted = _plain_name(typed)
    return next((g for g in GPUS.values() if wanted in {_plain_name(name) for name in (g.name, *g.aliases)}), None)


def _plain_name(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum()).removeprefix("nvidia").removeprefix("geforce")
