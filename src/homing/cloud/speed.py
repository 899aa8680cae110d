"""How fast a machine trains a shape, and how we know.

    measured   a run of the same shape on the same device, kept in $HOMING_HOME/speed.json
    probed     this processor multiplied matrices for a moment, in a process of its own, because torch lives there
    assumed    the data sheet's peak and a usual share of it, said as such

No figure above the device's peak is ever given out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from homing.cloud.home import Home
from homing.cloud.providers.base import Offer
from homing.gpus import find_gpu
from homing.wire.run import Model, Run

__all__ = ["Speed", "estimate", "recall", "remember", "shape_key"]

FILE = "speed.json"
GPU_SHARE = 0.35  # of the bf16 peak: what a compiled decoder of ordinary width reaches on one card
CPU_SHARE = 0.35  # of bare matrix products: what an eager training step of a small decoder reaches
FLOPS_PER_CORE = 8e9  # fp32, where nothing could be asked: an ordinary core of the last ten years
PROBE_TIMEOUT_S = 60.0

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
class Speed:
    tokens_per_s: float
    source: str  # measured | probed | assumed
    text: str  # where the figure comes from, for people


def shape_key(model: Model) -> str:
    return (
        f"{model.family}-{model.arch}-{model.num_layers}x{model.width}-h{model.num_heads}.{model.num_kv_heads}"
        f"-f{model.ffn_width}-c{model.context}-v{model.vocab_size}"
    )


def _run_key(run: Run) -> str:
    """Adapters beside frozen weights are half as fast again as the same shape trained whole: no figure for both."""
    methods = sorted({phase.method for phase in run.phases} - {"full"})
    return "-".join([shape_key(run.model), *methods])


def estimate(run: Run, offer: Offer, home: Home, *, may_probe: bool = True) -> Speed:
    """Tokens per second of this run on this offer."""
    known = _load(home)
    flops = run.sizes.flops_per_token
    peak = _peak_flops(offer)
    for entry in reversed(known["measured"]):
        if (entry["device"], entry["num_gpus"], entry["shape"]) == (offer.device, offer.num_gpus, _run_key(run)):
            rate = float(entry["tokens_per_s"])
            if peak is None or rate * flops <= peak:
                return Speed(rate, "measured", f"measured on {offer.device} by {entry['run_id']}")
    if peak is not None:
        text = f"assumed: {GPU_SHARE:.0%} of the peak of {offer.num_gpus}x {offer.device}"
        return Speed(peak * GPU_SHARE / flops, "assumed", text)
    is_here = may_probe and offer.provider == "local" and not offer.num_gpus
    probed = _probe(offer, home, known) if is_here else None
    if probed is not None:
        text = f"probed: {probed / 1e9:.0f} GFLOP/s in matrix products here, {CPU_SHARE:.0%} of it assumed in training"
        return Speed(probed * CPU_SHARE / flops, "probed", text)
    guess = FLOPS_PER_CORE * max(1, offer.num_cores)
    text = f"assumed: {FLOPS_PER_CORE / 1e9:.0f} GFLOP/s per core, {CPU_SHARE:.0%} of it in training"
    return Speed(guess * CPU_SHARE / flops, "assumed", text)


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
    tokens_per_s: float,
    home: Home,
    *,
    provider: str = "",
    trip: dict[str, float] | None = None,
) -> None:
    """After a run: one entry per run, the newest last. What no card can do is not believed."""
    gpu = find_gpu(offer_device) if num_gpus else None
    if tokens_per_s <= 0 or (gpu and tokens_per_s * run.sizes.flops_per_token > gpu.bf16_tflops * 1e12 * num_gpus):
        return
    known = _load(home)
    known["measured"] = [entry for entry in known["measured"] if entry["run_id"] != run.id]
    known["measured"].append(
        {
            "device": offer_device,
            "num_gpus": num_gpus,
            "shape": _run_key(run),
            "tokens_per_s": round(tokens_per_s, 1),
            "run_id": run.id,
            "at": home.world.now(),
            "provider": provider,
            "store": run.store.split(":")[0],
            "trip": trip,
        }
    )
    _save(home, known)


def _peak_flops(offer: Offer) -> float | None:
    gpu = find_gpu(offer.device) if offer.num_gpus else None
    return gpu.bf16_tflops * 1e12 * offer.num_gpus if gpu else None


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
