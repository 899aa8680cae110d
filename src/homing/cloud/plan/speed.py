"""Estimates how fast a machine trains each phase of a run, and says where the figure comes from.

    measured   a run of the same shape on the same device, kept in $HOMING_HOME/speed.json; or a benchmark of that shape
               on that GPU, from the table that ships with the package (measured_speeds.py)
    probed     matrix products on this CPU, in a separate process that loads torch. Other programs can only
               slow a probe down, so it is repeated at different times, and the best result counts
    modelled   from measurements of other shapes and GPUs, with the peak and bandwidth of this GPU; corrected by what
               the same shape reached on other GPUs, and consistent with the data sheets: a GPU that is at least as
               good in every figure is never rated slower
    assumed    a typical fraction of what such a machine can do, labelled as such
    unknown    a GPU that is not in our table: assumed as slow as the slowest GPU in it, so that the user's own machine
               has an estimate at all; plan leaves out rented machines with such a GPU

When a run has finished, its speeds, and the time that it spent outside its steps (`Trip`), are added to speed.json. The
speeds that `homing train` measured are added by the next `homing plan`.

The speed of several GPUs is modelled as the speed of one GPU multiplied by the number of GPUs, and the text says so. No
figure exceeds the device's peak.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from homing.cloud.contact.heartbeats import Tail, read_document
from homing.cloud.contact.read_metrics import MetricLog
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.plan import measured_speeds
from homing.cloud.providers.base import Needs, Offer
from homing.config.estimate.memory import training_memory
from homing.config.estimate.params_and_flops import flops_of_step, flops_of_token
from homing.errors import HomingError
from homing.gpus import GPUS, Gpu, find_gpu
from homing.store import FileStore, Store, run_key
from homing.wire import codec, file_names
from homing.wire.event_lines import Event, Outcome
from homing.wire.run_json import Model, Phase, Run

__all__ = [
    "FORWARD_SHARE",
    "Pace",
    "Speed",
    "Trip",
    "estimate",
    "learn_here",
    "measure_trip",
    "recall",
    "remember",
    "remember_speed",
    "shape_key",
]

FILE = "speed.json"
_NUM_LEARNED = 5  # number of the newest local runs whose speeds a plan reads
CPU_SHARE = 0.35  # fraction of pure matmul speed that an eager training step of a small decoder reaches
FLOPS_PER_CORE = 8e9  # assumed fp32 speed if nothing could be measured: a typical CPU core of the last ten years
PROBE_TIMEOUT_S = 60.0
MOST_PROBES = 3  # maximum number of probes per device, spread over several plans; the best result is kept
# Minimum pause between two probes. Without a pause, other programs would slow down both of them in the same way.
PROBE_AGAIN_S = 30.0
# Time to evaluate on a token, as a fraction of the time to train on it. The forward pass alone would be a third, but
# evaluation uses smaller batches.
FORWARD_SHARE = 0.5
# How many times longer rl takes per token than other training if there is no GPU. In rl, each token must also be
# sampled, one at a time.
SAMPLED_SHARE = 4.0
HOST_BYTES_PER_S = 20e9  # transfer speed between host and GPU in each direction, as with PCIe 4 x16
SOURCES = ("measured", "probed", "modelled", "assumed", "unknown")  # most reliable first

# Prints the FLOP/s of fp32 matmuls that are small enough for the CPU's cache, like those of a small decoder. If other
# programs run, a matmul on all threads waits for them and may seem ten times slower. So one thread is also measured by
# the CPU time that it got, times the number of threads. On an idle computer with 2 cores, both agree within 1%.
_PROBE = """
import time, torch
a, b = torch.randn(512, 512), torch.randn(512, 512)
best, threads = 0.0, torch.get_num_threads()
torch.set_num_threads(1)
for _ in range(24):
    start = time.thread_time()
    a @ b
    best = max(best, threads * 2 * 512 ** 3 / max(time.thread_time() - start, 1e-6))
torch.set_num_threads(threads)
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
    """The training and evaluation speed of one phase. In rl, both include sampling."""

    tokens_per_s: float
    eval_tokens_per_s: float
    source: str = ""
    text: str = ""


@dataclass(frozen=True)
class _Anchor:
    """The speed that this phase reached on one kind of GPU, as a reference for other kinds."""

    gpu: Gpu
    pace: Pace
    name: str  # the GPU's name, plus the run's id if the speed was measured by one of the user's runs


@dataclass(frozen=True)
class Speed:
    tokens_per_s: float  # speed of the first phase
    source: str  # one of SOURCES; with several phases, the least reliable source among them
    text: str  # a sentence that says where the figures come from
    # Maps the kind of a phase to its speed. A phase that is missing here trains at tokens_per_s.
    phases: Mapping[str, Pace] = field(default_factory=dict)


@dataclass(frozen=True)
class Trip:
    """The time that one run spent outside its training steps."""

    arrive_s: float  # from the create call to the trainer's start
    start_s: float  # from the trainer's start to its first step
    home_s: float  # from the end of training until billing ends, excluding the upload of the last checkpoint
    push_bytes_per_s: float


def shape_key(model: Model) -> str:
    return (
        f"{model.family}-{model.arch}-{model.num_layers}x{model.width}-h{model.num_heads}.{model.num_kv_heads}"
        f"-f{model.ffn_width}-c{model.context}-v{model.vocab_size}"
    )


def _run_key(run: Run) -> str:
    """Return the key for measured speeds. Only speeds with the same key can be compared.

    LoRA trains about 1.5x as fast as full fine-tuning of the same shape, so they have different keys. So do runs with
    and without optimizer offload.
    """
    methods = sorted({phase.method for phase in run.phases} - {"full"})
    offloads = sorted({f"offload.{phase.offload}" for phase in run.phases} - {"offload.none"})
    return "-".join([shape_key(run.model), *methods, *offloads])


def estimate(run: Run, offer: Offer, home: Home, *, may_probe: bool = True) -> Speed:
    """Return the expected training speed of each phase of this run on this offer, in tokens per second."""
    known = _load(home)
    paces = {phase.kind: _pace(run, phase, offer, home, known, may_probe=may_probe) for phase in run.phases}
    texts = list(dict.fromkeys(pace.text for pace in paces.values()))
    parts = texts if len(texts) == 1 else [f"{kind}: {pace.text}" for kind, pace in paces.items()]
    return Speed(
        tokens_per_s=paces[run.phases[0].kind].tokens_per_s,
        source=max((pace.source for pace in paces.values()), key=SOURCES.index),
        text="; ".join(parts),
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
        text = f"unknown GPU: {offer.device}; assumed as slow as {slowest.name}, the slowest known GPU"
        return replace(pace, source="unknown", text=text)
    is_here = may_probe and offer.provider == "local" and not offer.num_gpus
    probed = _probe(offer, home, known) if is_here else None
    if probed is not None:
        text = f"probed: {probed / 1e9:.0f} GFLOP/s in local matrix products, {CPU_SHARE:.0%} of it assumed in training"
        return _pace_on_processor(run, phase, probed, "probed", text)
    text = f"assumed: {FLOPS_PER_CORE / 1e9:.0f} GFLOP/s per core, {CPU_SHARE:.0%} of it in training"
    return _pace_on_processor(run, phase, FLOPS_PER_CORE * max(1, offer.num_cores), "assumed", text)


def _rate_of(entry: dict[str, Any], phase: Phase) -> float | None:
    """Return this phase's measured speed, or None if unknown. Older entries contain one figure for all phases."""
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
    """Return the speed on this kind of GPU: measured, or predicted and then adjusted to what other GPUs reached."""
    anchors = _anchors(run, phase, num_gpus, known)
    pace = anchors[gpu.name].pace if gpu.name in anchors else _modelled(run, phase, gpu, num_gpus)
    others = [anchor for anchor in anchors.values() if anchor.gpu != gpu]
    rate = pace.tokens_per_s
    if others and gpu.name not in anchors:
        # Measured speed divided by predicted speed, averaged over the GPUs on which this shape has run.
        off = statistics.geometric_mean(
            each.pace.tokens_per_s / _modelled(run, phase, each.gpu, num_gpus).tokens_per_s for each in others
        )
        rate = min(rate * off, num_gpus * _peak_rate(run, phase, gpu))
    rate = _between(rate, gpu, others)
    if rate == pace.tokens_per_s:
        return pace
    seen = f"based on this shape measured on {', '.join(sorted(anchor.name for anchor in others))}"
    text = _say(run, phase, gpu, num_gpus, rate, seen)
    if phase.offload != "none":
        text += "; the optimizer's state is transferred once per step"
    return Pace(rate, pace.eval_tokens_per_s * rate / pace.tokens_per_s, "modelled", text)


def _anchors(run: Run, phase: Phase, num_gpus: int, known: dict[str, Any]) -> dict[str, _Anchor]:
    """Return one measurement per GPU: from the user's newest run with that many GPUs, or from the shipped table."""
    found: dict[str, _Anchor] = {}
    table = measured_speeds.load_table()
    for card in table.cards:
        row = measured_speeds.find_row(table, card, run, phase)
        if row is not None and _is_possible(run, phase, row.tokens_per_s, GPUS[card], 1):
            text, source = f"measured on one {card} ({row.source})", "measured"
            if num_gpus > 1:
                text, source = f"modelled: {text}, {_scaled(num_gpus)}", "modelled"
            pace = _with_offload(_even_pace(phase, num_gpus * row.tokens_per_s, source, text), run, phase)
            found[card] = _Anchor(GPUS[card], pace, card)
    for entry in known["measured"]:  # newest last
        gpu, rate = find_gpu(entry["device"]), _rate_of(entry, phase)
        if gpu is None or (entry["num_gpus"], entry["shape"]) != (num_gpus, _run_key(run)):
            continue
        if rate and _is_possible(run, phase, rate, gpu, num_gpus):
            pace = _even_pace(phase, rate, "measured", f"measured on {gpu.name} by {entry['run_id']}")
            found[gpu.name] = _Anchor(gpu, pace, f"{gpu.name} by {entry['run_id']}")
    return found


def _between(rate: float, gpu: Gpu, anchors: Sequence[_Anchor]) -> float:
    """Clamp the rate: at most what an equal or better GPU reached, at least what an equal or worse GPU reached."""
    for anchor in anchors:
        if anchor.gpu.is_at_least(gpu):
            rate = min(rate, anchor.pace.tokens_per_s)
    for anchor in anchors:
        if gpu.is_at_least(anchor.gpu):
            rate = max(rate, anchor.pace.tokens_per_s)
    return rate


def _modelled(run: Run, phase: Phase, gpu: Gpu, num_gpus: int) -> Pace:
    """Return the speed predicted from the GPU's data sheet, by a formula fitted to measurements of all shapes."""
    table = measured_speeds.load_table()
    if phase.rl is None:
        pace = _even_pace(phase, num_gpus * measured_speeds.tokens_per_s(table, gpu, run, phase), "modelled", "")
    else:
        # Do not scale the speed of one GPU: the GPUs share the prompts, but each reads all weights for every new token.
        step_s = measured_speeds.rl_step_s(table, gpu, run, phase, num_gpus)
        eval_s = measured_speeds.rl_eval_s(table, gpu, run, phase)
        eval_tokens = phase.rl.eval_prompts * phase.rl.eval_samples * phase.rl.max_new_tokens
        pace = Pace(phase.batch_tokens / step_s, eval_tokens / eval_s, "modelled")
    seen = f"based on measurements on {', '.join(table.cards)}"
    text = _say(run, phase, gpu, num_gpus, pace.tokens_per_s, seen)
    return _with_offload(replace(pace, text=text), run, phase)


def _say(run: Run, phase: Phase, gpu: Gpu, num_gpus: int, rate: float, seen: str) -> str:
    if phase.rl is not None:
        what = f"{phase.batch_tokens / rate:.1f} s per RL step on {num_gpus}x {gpu.name}"
    else:
        share = rate * flops_of_token(run, phase) / (num_gpus * gpu.peak_flops(run.train.precision))
        what = f"{share:.0%} of peak on {num_gpus}x {gpu.name}"
    return f"modelled: {what}, {seen}" + (f", {_scaled(num_gpus)}" if num_gpus > 1 else "")


def _scaled(num_gpus: int) -> str:
    return f"scaled linearly to {num_gpus} GPUs (not measured)"


def _peak_rate(run: Run, phase: Phase, gpu: Gpu) -> float:
    """Return the tokens per second that one GPU of this kind cannot exceed."""
    flops = flops_of_step(run, phase)
    return gpu.peak_flops(run.train.precision) * phase.batch_tokens / flops if flops else math.inf


def _with_offload(pace: Pace, run: Run, phase: Phase) -> Pace:
    """Add the time to transfer the optimizer state to the GPU and back in each step, in parallel on all GPUs."""
    if phase.offload == "none":
        return pace
    passing_s = training_memory(run, phase).host / HOST_BYTES_PER_S
    step_s = phase.batch_tokens / pace.tokens_per_s
    text = f"{pace.text}; plus {passing_s:.1f} s per step for the optimizer's state, at an assumed"
    return replace(
        pace, tokens_per_s=phase.batch_tokens / (step_s + passing_s), source="modelled",
        text=f"{text} {HOST_BYTES_PER_S / 1e9:.0f} GB/s each way",
    )  # fmt: skip


def _is_possible(run: Run, phase: Phase, rate: float, gpu: Gpu | None, num_gpus: int) -> bool:
    """Return True if GPUs of this kind can reach this rate, or if nothing is known about them."""
    if gpu is None:
        return True
    return rate <= num_gpus * _peak_rate(run, phase, gpu)


def recall(run: Run, offer: Offer, home: Home) -> dict[str, float] | None:
    """Return the fields of the `Trip` measured in the newest comparable run, or None.

    A comparable run has the same shape, device, number of GPUs, provider and kind of store.
    """
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
    """Record a run's measured speeds as the newest entry, which replaces any earlier entry for the same run.

    Rates above the GPU's peak are discarded. If `tokens_per_s` is a single number, it applies to every phase.
    """
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


def learn_here(home: Home) -> None:
    """Store the speeds that the newest runs of `homing train` measured on this computer, for plans on `local`."""
    seen, runs = {entry["run_id"] for entry in _load(home)["measured"]}, home.run_dir("x").parent
    try:
        names = home.world.listdir(runs)
    except OSError:
        return  # no run was trained here yet
    # A launched run has a note of its launch; its speeds are added when it has finished.
    trained = [
        runs / name
        for name in sorted(set(names) - seen)
        if home.world.exists(runs / name / file_names.OUTCOME) and not home.world.exists(runs / name / LAUNCH_NOTE)
    ]
    store = FileStore(str(home.path), home.world, create=False)
    for folder in trained[-_NUM_LEARNED:]:
        # These values only improve plans, so an error must not make a plan fail.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, HomingError):
            (offer,) = home.provider("local").offers(Needs())
            run = codec.loads(Run, home.world.read(folder / file_names.RUN))
            if middle := _middle_speeds(store, folder.name):
                remember(replace(run, id=folder.name), offer.device, offer.num_gpus, middle, home, provider="local")


def _middle_speeds(store: Store, run_id: str) -> dict[str, float]:
    """Return the median speed of each phase that reported at least three speeds."""
    speeds: dict[str, list[float]] = {}
    for metric in MetricLog(store, run_key(run_id, file_names.METRICS)).fresh():
        if metric.tokens_per_s:
            speeds.setdefault(metric.phase, []).append(metric.tokens_per_s)
    return {phase: sorted(seen)[len(seen) // 2] for phase, seen in speeds.items() if len(seen) >= 3}


def remember_speed(home: Home, run: RunRow, store: Store) -> None:
    """Store a run's measured speeds and times for the next plan, if the run's files are on this computer."""
    folder = home.run_dir(run.id)
    try:
        resolved = codec.loads(Run, home.world.read(folder / file_names.RUN))
        offer = json.loads(home.world.read(folder / LAUNCH_NOTE))["offer"]
        middle = _middle_speeds(store, run.id)
        if middle:
            trip = _trip_of(home, run, store)
            remember(resolved, offer["device"], offer["num_gpus"], middle, home, provider=offer["provider"], trip=trip)
    except (OSError, ValueError, KeyError, TypeError, HomingError):
        return  # these values only improve later plans, so an error must not make a command fail


def _trip_of(home: Home, run: RunRow, store: Store) -> dict[str, float] | None:
    """Return the fields of the last attempt's `Trip`, or None if the attempt failed or has not ended."""
    last, outcome = home.ledger.lines(run.id)[-1], read_document(store, run_key(run.id, file_names.OUTCOME), Outcome)
    if outcome is None or outcome.state == "failed" or last.created_at is None or last.destroyed_at is None:
        return None
    events = Tail(store, run_key(run.id, file_names.EVENTS)).documents(Event)
    trip = measure_trip(events, outcome, last.created_at, last.destroyed_at)
    return asdict(trip) if trip is not None else None


def measure_trip(events: Sequence[Event], outcome: Outcome, created_at: float, ended_at: float) -> Trip | None:
    """Compute the `Trip` of one attempt from its events and outcome. Return None if something is missing."""
    own = [event for event in events if event.t >= created_at]
    first = next((event for event in own if event.kind == "first_step"), None)
    pushes = [event.data for event in own if event.kind == "checkpoint_pushed" and event.data.get("seconds")]
    if first is None or not pushes or ended_at <= outcome.t:
        return None
    start_s = float(first.data["seconds"])
    rate = statistics.median(push["num_bytes"] / push["seconds"] for push in pushes)
    last_push_s = float(pushes[-1]["seconds"])
    return Trip(
        arrive_s=round(max(0.0, first.t - start_s - created_at), 2),
        start_s=round(start_s, 2),
        home_s=round(max(1.0, ended_at - outcome.t - last_push_s), 2),
        push_bytes_per_s=round(rate, 1),
    )


def _probe(offer: Offer, home: Home, known: dict[str, Any]) -> float | None:
    """Return the highest FLOP/s of several probes, or None if torch is not installed here."""
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
    """Return the content of speed.json, or an empty cache if the file cannot be read."""
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
