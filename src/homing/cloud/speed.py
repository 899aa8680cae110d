"""How fast a machine trains each phase of a run, and how we know.

    measured   a run of the same shape on the same device, kept in $HOMING_HOME/speed.json; or a benchmark of that shape
               on that card, in the table that ships with the package (see `measured`)
    probed     this processor multiplied matrices for a moment, in a process of its own, because torch lives there
    modelled   from what was measured on other shapes and cards, with the peak and bandwidth of this one
    assumed    a usual share of what such a machine can do, said as such

No figure above the device's peak is ever given out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from homing.cloud import measured
from homing.cloud.home import Home
from homing.cloud.providers.base import Offer
from homing.config.flops import flops_of_step, flops_of_token
from homing.config.memory import training_memory
from homing.gpus import Gpu, find_gpu
from homing.wire.run import Model, Phase, Run

__all__ = ["FORWARD_SHARE", "Pace", "Speed", "estimate", "recall", "remember", "shape_key"]

FILE = "speed.json"
CPU_SHARE = 0.35  # of bare matrix products: what an eager training step of a small decoder reaches
FLOPS_PER_CORE = 8e9  # fp32, where nothing could be asked: an ordinary core of the last ten years
PROBE_TIMEOUT_S = 60.0
FORWARD_SHARE = 0.5  # an evaluated token costs the forward third of a trained one, in smaller batches
SAMPLED_SHARE = 4.0  # without a card: a token of rl is first sampled, one after the other, and then trained on
HOST_BYTES_PER_S = 20e9  # between a host and its card, each way: PCIe 4 with sixteen lanes
SOURCES = ("measured", "probed", "modelled", "assumed")  # the surest first

# Prints FLOP/s of fp32 products at a size that stays in cache, as a small decoder's do.
_PROBE = """
import time, torch
a, b = torch.randn(512, 512), torch.randn(512, 512)
best = 0.0
for _ in range(12):
    start = time.perf_counter()
    for _ in range(4): a @ b
    best = max(best, 4 * 2 * 512 ** 3 / (time.perf_counter() - start))
print(best)
"""


@dataclass(frozen=True)
class Pace:
    """Of one phase: tokens of its batches, and of its evaluations. In rl those are sampled, and sampling is in both."""

    tokens_per_s: float
    eval_tokens_per_s: float
    source: str = ""
    text: str = ""


@dataclass(frozen=True)
class Speed:
    tokens_per_s: float  # of the first phase
    source: str  # of SOURCES; of several phases that which is least sure
    text: str  # where the figures come from, for people
    phases: Mapping[str, Pace] = field(default_factory=dict)  # by kind; those that are not here go at tokens_per_s


def shape_key(model: Model) -> str:
    return (
        f"{model.family}-{model.arch}-{model.num_layers}x{model.width}-h{model.num_heads}.{model.num_kv_heads}"
        f"-f{model.ffn_width}-c{model.context}-v{model.vocab_size}"
    )


def _run_key(run: Run) -> str:
    """Adapters beside frozen weights are half as fast again as the same shape trained whole: no figure for both. Nor
    for a step that waits for its optimizer's state and one that does not."""
    methods = sorted({phase.method for phase in run.phases} - {"full"})
    offloads = sorted({f"offload.{phase.offload}" for phase in run.phases} - {"offload.none"})
    return "-".join([shape_key(run.model), *methods, *offloads])


def estimate(run: Run, offer: Offer, home: Home, *, may_probe: bool = True) -> Speed:
    """Tokens per second of each phase of this run on this offer."""
    known = _load(home)
    paces = {phase.kind: _pace(run, phase, offer, home, known, may_probe=may_probe) for phase in run.phases}
    texts = list(dict.fromkeys(pace.text for pace in paces.values()))
    told = texts if len(texts) == 1 else [f"{kind}: {pace.text}" for kind, pace in paces.items()]
    return Speed(
        tokens_per_s=paces[run.phases[0].kind].tokens_per_s,
        source=max((pace.source for pace in paces.values()), key=SOURCES.index),
        text="; ".join(told),
        phases=paces,
    )


def _pace(run: Run, phase: Phase, offer: Offer, home: Home, known: dict[str, Any], *, may_probe: bool) -> Pace:
    gpu = find_gpu(offer.device) if offer.num_gpus else None
    for entry in reversed(known["measured"]):
        if (entry["device"], entry["num_gpus"], entry["shape"]) == (offer.device, offer.num_gpus, _run_key(run)):
            rate = _rate_of(entry, phase)
            if rate and _is_possible(run, phase, rate, gpu, offer.num_gpus):
                return _even_pace(phase, rate, "measured", f"measured on {offer.device} by {entry['run_id']}")
    if gpu is not None:
        return _with_offload(_pace_on_card(run, phase, gpu, offer.num_gpus), run, phase)
    is_here = may_probe and offer.provider == "local" and not offer.num_gpus
    probed = _probe(offer, home, known) if is_here else None
    if probed is not None:
        text = f"probed: {probed / 1e9:.0f} GFLOP/s in matrix products here, {CPU_SHARE:.0%} of it assumed in training"
        return _pace_on_processor(run, phase, probed, "probed", text)
    text = f"assumed: {FLOPS_PER_CORE / 1e9:.0f} GFLOP/s per core, {CPU_SHARE:.0%} of it in training"
    return _pace_on_processor(run, phase, FLOPS_PER_CORE * max(1, offer.num_cores), "assumed", text)


def _rate_of(entry: dict[str, Any], phase: Phase) -> float | None:
    """Of this phase in a run that was measured; None where it had none. Earlier entries have one figure for all."""
    by_phase = entry.get("phases")
    if by_phase is not None:
        return float(by_phase[phase.kind]) if phase.kind in by_phase else None
    return float(entry["tokens_per_s"]) / (SAMPLED_SHARE if phase.rl else 1.0)


def _even_pace(phase: Phase, rate: float, source: str, text: str) -> Pace:
    return Pace(rate, rate / (1.0 if phase.rl else FORWARD_SHARE), source, text)


def _pace_on_processor(run: Run, phase: Phase, flops_per_s: float, source: str, text: str) -> Pace:
    rate = (
        flops_per_s
        * CPU_SHARE
        / (SAMPLED_SHARE * run.sizes.flops_per_token if phase.rl else flops_of_token(run, phase))
    )
    return _even_pace(phase, rate, source, text)


def _pace_on_card(run: Run, phase: Phase, gpu: Gpu, num_gpus: int) -> Pace:
    table = measured.load_table()
    row = measured.find_row(table, gpu.name, run, phase)
    if row is not None and _is_possible(run, phase, row.tokens_per_s, gpu, 1):
        text = f"measured on one {gpu.name} ({row.source})"
        if num_gpus > 1:
            return _even_pace(
                phase, num_gpus * row.tokens_per_s, "modelled", f"modelled: {num_gpus} times what was {text}"
            )
        return _even_pace(phase, row.tokens_per_s, "measured", text)
    seen = f"from what was measured on {', '.join(table.cards)}"
    if phase.rl is not None:
        # Prompts are shared out among the cards; reading the weights for each new token is not.
        step_s = measured.rl_step_s(table, gpu, run, phase, num_gpus)
        eval_s = measured.rl_eval_s(table, gpu, run, phase)
        eval_tokens = phase.rl.eval_prompts * phase.rl.eval_samples * phase.rl.max_new_tokens
        text = f"modelled: {step_s:.1f} s a step of rl on {num_gpus}x {gpu.name}, {seen}"
        return Pace(phase.batch_tokens / step_s, eval_tokens / eval_s, "modelled", text)
    rate = num_gpus * measured.tokens_per_s(table, gpu, run, phase)
    share = rate * flops_of_token(run, phase) / (num_gpus * gpu.peak_flops(run.train.precision))
    return _even_pace(phase, rate, "modelled", f"modelled: {share:.0%} of the peak of {num_gpus}x {gpu.name}, {seen}")


def _with_offload(pace: Pace, run: Run, phase: Phase) -> Pace:
    """And once a step, the optimizer's state to the card and back: both ways at once, on every card at once."""
    if phase.offload == "none":
        return pace
    passing_s = training_memory(run, phase).host / HOST_BYTES_PER_S
    step_s = phase.batch_tokens / pace.tokens_per_s
    text = f"{pace.text}; and {passing_s:.1f} s a step for the optimizer's state, at an assumed"
    return replace(
        pace, tokens_per_s=phase.batch_tokens / (step_s + passing_s), source="modelled",
        text=f"{text} {HOST_BYTES_PER_S / 1e9:.0f} GB/s each way",
    )  # fmt: skip


def _is_possible(run: Run, phase: Phase, rate: float, gpu: Gpu | None, num_gpus: int) -> bool:
    """Whether such a card could do it at all; where nothing is known of it, yes."""
    if gpu is None:
        return True
    flops = flops_of_step(run, phase) / max(1, phase.batch_tokens)
    return rate * flops <= gpu.peak_flops(run.train.precision) * num_gpus


def recall(run: Run, offer: Offer, home: Home) -> dict[str, float] | None:
    """What the newest run of this shape, here and to such a store, took beside its steps; None: none was measured."""
    wanted = (offer.device, offer.num_gpus, _run_key(run), offer.provider, run.store.split(":")[0])
    for entry in reversed(_load(home)["measured"]):
        where = (entry["device"], entry["num_gpus"], entry["shape"], entry.get("provider"), entry.get("store"))
        if where == wanted and entry.get("trip"):
            return dict(entry["trip"])
    return None


def remember(
    run: Run,
    offer_device: str,
    num_gpus: int,
    tokens_per_s: float | Mapping[str, float],
    home: Home,
    *,
    provider: str = "",
    trip: dict[str, float] | None = None,
) -> None:
    """After a run: one entry per run, the newest last. What no card can do is not believed. One figure is that of every
    phase."""
    gpu = find_gpu(offer_device) if num_gpus else None
    by_kind = {phase.kind: phase for phase in run.phases}
    rates = tokens_per_s if isinstance(tokens_per_s, Mapping) else dict.fromkeys(by_kind, tokens_per_s)
    believed = {
        kind: round(rate, 1)
        for kind, rate in rates.items()
        if kind in by_kind and rate > 0 and _is_possible(run, by_kind[kind], rate, gpu, num_gpus)
    }
    if not believed:
        return
    known = _load(home)
    known["measured"] = [entry for entry in known["measured"] if entry["run_id"] != run.id]
    known["measured"].append(
        {
            "device": offer_device,
            "num_gpus": num_gpus,
            "shape": _run_key(run),
            "tokens_per_s": next(iter(believed.values())),
            "phases": believed,
            "run_id": run.id,
            "at": home.world.now(),
            "provider": provider,
            "store": run.store.split(":")[0],
            "trip": trip,
        }
    )
    _save(home, known)


def _probe(offer: Offer, home: Home, known: dict[str, Any]) -> float | None:
    cached = known["probes"].get(offer.device)
    if cached is not None:
        return float(cached)
    answer = home.world.run([home.world.python(), "-c", _PROBE], timeout_s=PROBE_TIMEOUT_S)
    try:
        flops = float(answer.out)
    except ValueError:
        return None  # no torch here
    known["probes"][offer.device] = flops
    _save(home, known)
    return flops


def _load(home: Home) -> dict[str, Any]:
    """A cache: one that cannot be read is begun anew."""
    try:
        known = json.loads(home.world.read(home.path / FILE))
        assert isinstance(known["measured"], list), FILE
        assert isinstance(known["probes"], dict), FILE
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        return {"schema": "homing.speed/1", "measured": [], "probes": {}}
    return dict(known)


def _save(home: Home, known: dict[str, Any]) -> None:
    home.world.mkdir(home.path)
    home.world.write(home.path / FILE, json.dumps(known, indent=1).encode())
