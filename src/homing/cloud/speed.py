"""How fast a machine trains each phase of a run, and how we know.

    measured   a run of the same shape on the same device, kept in $HOMING_HOME/speed.json; or a benchmark of that shape
               on that card, in the table that ships with the package (see `measured`)
    probed     this processor multiplied matrices, in a process of its own, because torch lives there. Other programs
               only slow a probe down, so there are several, at different times, and the best counts
    modelled   from what was measured on other shapes and cards, with the peak and bandwidth of this one; corrected by
               what the same shape reached on another card, and never against the data sheets: a card that is at least
               as good in every figure is not rated slower
    assumed    a usual share of what such a machine can do, said as such
    unknown    a GPU that is not in our table: as slow as the slowest that is, so that a person's own machine has a
               figure at all; plan offers no rented one by it

Several GPUs are modelled as that many times one, and the text says so. No figure is above the device's peak.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from homing.cloud import measured
from homing.cloud.home import Home
from homing.cloud.providers.base import Offer
from homing.config.flops import flops_of_step, flops_of_token
from homing.config.memory import training_memory
from homing.gpus import GPUS, Gpu, find_gpu
from homing.wire.run import Model, Phase, Run

__all__ = ["FORWARD_SHARE", "Pace", "Speed", "estimate", "recall", "remember", "shape_key"]

FILE = "speed.json"
CPU_SHARE = 0.35  # of bare matrix products: what an eager training step of a small decoder reaches
FLOPS_PER_CORE = 8e9  # fp32, where nothing could be asked: an ordinary core of the last ten years
PROBE_TIMEOUT_S = 60.0
MOST_PROBES = 3  # of one device, by as many plans; the best is kept
PROBE_AGAIN_S = 30.0  # sooner it would meet the same load as the one before
FORWARD_SHARE = 0.5  # an evaluated token costs the forward third of a trained one, in smaller batches
SAMPLED_SHARE = 4.0  # without a card: a token of rl is first sampled, one after the other, and then trained on
HOST_BYTES_PER_S = 20e9  # between a host and its card, each way: PCIe 4 with sixteen lanes
SOURCES = ("measured", "probed", "modelled", "assumed", "unknown")  # the surest first

# Prints FLOP/s of fp32 products at a size that stays in cache, as a small decoder's do.
_PROBE = """
import time, torch
a, b = torch.randn(512, 512), torch.randn(512, 512)
best = 0.0
for pause_s in (0.0, 0.2, 0.4):
    time.sleep(pause_s)
    for _ in range(8):
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
class _Anchor:
    """What this very phase reached on some card."""

    gpu: Gpu
    pace: Pace
    name: str  # of what measured it


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
        return _pace_on_card(run, phase, gpu, offer.num_gpus, known)
    if offer.num_gpus:
        slowest = min(GPUS.values(), key=lambda gpu: gpu.peak_flops(run.train.precision))
        pace = _modelled(run, phase, slowest, offer.num_gpus)
        text = f"unknown GPU: {offer.device}; assumed as slow as {slowest.name}, the slowest GPU we know"
        return replace(pace, source="unknown", text=text)
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


def _pace_on_card(run: Run, phase: Phase, gpu: Gpu, num_gpus: int, known: dict[str, Any]) -> Pace:
    """As measured on one such card, or as modelled; either way in line with what was measured on other cards."""
    anchors = _anchors(run, phase, num_gpus, known)
    pace = anchors[gpu.name].pace if gpu.name in anchors else _modelled(run, phase, gpu, num_gpus)
    others = [anchor for anchor in anchors.values() if anchor.gpu != gpu]
    rate = pace.tokens_per_s
    if others and gpu.name not in anchors:
        # How far the model is off on this shape, by the cards that have computed it.
        off = statistics.geometric_mean(
            each.pace.tokens_per_s / _modelled(run, phase, each.gpu, num_gpus).tokens_per_s for each in others
        )
        rate = min(rate * off, num_gpus * _peak_rate(run, phase, gpu))
    rate = _between(rate, gpu, others)
    if rate == pace.tokens_per_s:
        return pace
    seen = f"from this shape as measured on {', '.join(sorted(anchor.name for anchor in others))}"
    text = _say(run, phase, gpu, num_gpus, rate, seen)
    if phase.offload != "none":
        text += "; the optimizer's state passes once a step"
    return Pace(rate, pace.eval_tokens_per_s * rate / pace.tokens_per_s, "modelled", text)


def _anchors(run: Run, phase: Phase, num_gpus: int, known: dict[str, Any]) -> dict[str, _Anchor]:
    """By card: the newest run of this home on as many of them, else the row of the table that ships."""
    found: dict[str, _Anchor] = {}
    table = measured.load_table()
    for card in table.cards:
        row = measured.find_row(table, card, run, phase)
        if row is not None and _is_possible(run, phase, row.tokens_per_s, GPUS[card], 1):
            text, source = f"measured on one {card} ({row.source})", "measured"
            if num_gpus > 1:
                text, source = f"modelled: {text}, {_scaled(num_gpus)}", "modelled"
            pace = _with_offload(_even_pace(phase, num_gpus * row.tokens_per_s, source, text), run, phase)
            found[card] = _Anchor(GPUS[card], pace, card)
    for entry in known["measured"]:  # the newest last
        gpu, rate = find_gpu(entry["device"]), _rate_of(entry, phase)
        if gpu is None or (entry["num_gpus"], entry["shape"]) != (num_gpus, _run_key(run)):
            continue
        if rate and _is_possible(run, phase, rate, gpu, num_gpus):
            pace = _even_pace(phase, rate, "measured", f"measured on {gpu.name} by {entry['run_id']}")
            found[gpu.name] = _Anchor(gpu, pace, f"{gpu.name} by {entry['run_id']}")
    return found


def _between(rate: float, gpu: Gpu, anchors: Sequence[_Anchor]) -> float:
    """Not above what a card reached that is no worse in any figure, nor below what one did that is no better."""
    for anchor in anchors:
        if anchor.gpu.is_at_least(gpu):
            rate = min(rate, anchor.pace.tokens_per_s)
    for anchor in anchors:
        if gpu.is_at_least(anchor.gpu):
            rate = max(rate, anchor.pace.tokens_per_s)
    return rate


def _modelled(run: Run, phase: Phase, gpu: Gpu, num_gpus: int) -> Pace:
    """By its data sheet, from the rows of all shapes."""
    table = measured.load_table()
    if phase.rl is None:
        pace = _even_pace(phase, num_gpus * measured.tokens_per_s(table, gpu, run, phase), "modelled", "")
    else:
        # Prompts are shared out among the cards; reading the weights for each new token is not.
        step_s = measured.rl_step_s(table, gpu, run, phase, num_gpus)
        eval_s = measured.rl_eval_s(table, gpu, run, phase)
        eval_tokens = phase.rl.eval_prompts * phase.rl.eval_samples * phase.rl.max_new_tokens
        pace = Pace(phase.batch_tokens / step_s, eval_tokens / eval_s, "modelled")
    seen = f"from what was measured on {', '.join(table.cards)}"
    text = _say(run, phase, gpu, num_gpus, pace.tokens_per_s, seen)
    return _with_offload(replace(pace, text=text), run, phase)


def _say(run: Run, phase: Phase, gpu: Gpu, num_gpus: int, rate: float, seen: str) -> str:
    if phase.rl is not None:
        what = f"{phase.batch_tokens / rate:.1f} s a step of rl on {num_gpus}x {gpu.name}"
    else:
        share = rate * flops_of_token(run, phase) / (num_gpus * gpu.peak_flops(run.train.precision))
        what = f"{share:.0%} of the peak of {num_gpus}x {gpu.name}"
    return f"modelled: {what}, {seen}" + (f", {_scaled(num_gpus)}" if num_gpus > 1 else "")


def _scaled(num_gpus: int) -> str:
    return f"scaled linearly to {num_gpus} GPUs, which nobody has measured"


def _peak_rate(run: Run, phase: Phase, gpu: Gpu) -> float:
    """Tokens per second that one such card cannot exceed."""
    flops = flops_of_step(run, phase)
    return gpu.peak_flops(run.train.precision) * phase.batch_tokens / flops if flops else math.inf


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
    return rate <= num_gpus * _peak_rate(run, phase, gpu)


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
    """FLOP/s, the best of several probes; None without torch here."""
    before = known["probes"].get(offer.device, {"best_flops": None, "num_probes": 0, "at": -math.inf})
    is_soon = 0 <= home.world.now() - before["at"] < PROBE_AGAIN_S
    if before["best_flops"] is not None and (is_soon or before["num_probes"] >= MOST_PROBES):
        return float(before["best_flops"])
    answer = home.world.run([home.world.python(), "-c", _PROBE], timeout_s=PROBE_TIMEOUT_S)
    try:
        flops = float(answer.out)
    except ValueError:
        return None if before["best_flops"] is None else float(before["best_flops"])
    best = max(flops, before["best_flops"] or 0.0)
    known["probes"][offer.device] = {
        "best_flops": best,
        "num_probes": before["num_probes"] + 1,
        "at": home.world.now(),
    }
    _save(home, known)
    return best


def _load(home: Home) -> dict[str, Any]:
    """A cache: one that cannot be read is begun anew."""
    try:
        known = json.loads(home.world.read(home.path / FILE))
        assert isinstance(known["measured"], list), FILE
        assert all(each["best_flops"] > 0 and each["num_probes"] > 0 for each in known["probes"].values()), FILE
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        return {"schema": "homing.speed/1", "measured": [], "probes": {}}
    return dict(known)


def _save(home: Home, known: dict[str, Any]) -> None:
    home.world.mkdir(home.path)
    home.world.write(home.path / FILE, json.dumps(known, indent=1).encode())
