"""Resolve the sections that do not depend on others: train, sample, limits, store and cloud.

Each key becomes one field of run.json. The `cloud` section holds the providers, the GPU and each provider's settings.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

from homing.config.parse.check import Trace
from homing.config.parse.key_suggestions import nearest
from homing.config.paths import home
from homing.config.schema.run_file import SshHost
from homing.gpus import GPUS, Gpu, nearest_gpus
from homing.wire.run_json import Cloud, Limits, Sampling, Ssh, Train

__all__ = ["resolve_cloud", "resolve_limits", "resolve_sampling", "resolve_store", "resolve_train"]

CLOUDS = ("aws", "modal", "runpod", "shadeform")  # providers with their own section, cloud.NAME
CONTAINER_CLOUDS = ("modal", "runpod")  # providers that start a container image; cloud.image sets it for all of them
PROVIDERS = ("aws", "fake", "local", "modal", "runpod", "shadeform", "ssh")


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
        trace.warn(f"cloud.image is set but not used: {' and '.join(providers)} do not start containers.")
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
        trace.warn(f"cloud.volume is set but not used: {' and '.join(providers)} have no volumes.")
    if volume and not volume.startswith("/"):
        trace.wrong(("cloud", "volume"), f"{volume!r} is not an absolute path.", "For example /workspace")
    return volume.rstrip("/")


def _is_asked(trace: Trace, name: str, providers: list[str]) -> bool:
    if name not in providers and trace.source.get(("cloud", name)) is not None:
        trace.warn(f"cloud.{name} is set but not used: cloud.providers does not include {name}.")
    return name in providers


def _settings(trace: Trace, name: str) -> dict[str, Any]:
    """Return one provider's section as its adapter reads it: validated by the schema, with dollars as strings."""
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
