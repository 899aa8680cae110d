"""Reconstructs what happened in a run: its phases (from the metrics), notable events, and selected samples."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from homing.cloud.reconcile.run_status import BY_REWARD, newest_figures
from homing.report.report_data import Happening, Phase, Sample, Validation
from homing.store import Store, run_key
from homing.wire import file_names, run_json
from homing.wire.event_lines import Event, Metric

__all__ = ["happenings", "machines", "phases", "samples", "unique"]

_MOST_POINTS = 400  # maximum number of points in a curve
_MOST_ALIKE = 3  # if one kind has more events than this, only its first and last event are shown
_MOST_TEXT = 300  # longer event texts are truncated to this many characters
_MOST_SAMPLE = 2000
# Events that occur in every run are omitted. Unknown kinds are shown, because an extra line is better than an
# overlooked problem.
_ROUTINE = frozenset((
    "run_started", "run_done", "phase_started", "phase_done", "phase_skipped", "first_step", "loading",
    "evaluating", "evaluated", "sampling", "sampled", "samples_plain", "checkpoint_saved", "cleaned_up",
    "compiling", "compile_started", "compile_finished", "compile_cache_loaded", "compile_cache_saved",
    "attention_picked", "graphs_picked", "adapters_added",
    "input_fetching", "input_fetched", "input_retried", "stage_done", "request_taken",
    "checkpoint_pushed", "model_pushed", "pushed", "billing_ended",
))  # fmt: skip


def unique(events: Iterable[Event]) -> list[Event]:
    """Return the events sorted by time, without duplicates.

    The event file of a new attempt starts with the events of earlier attempts, so an event may occur twice.
    """
    found = {(event.t, event.source, event.kind, event.text): event for event in events}
    return sorted(found.values(), key=lambda event: event.t)


def happenings(events: Sequence[Event]) -> list[Happening]:
    """Return notable events such as preemptions and failures. For frequent kinds, keep only the first and last."""
    notable = [event for event in events if event.kind not in _ROUTINE]
    alike: dict[str, list[Event]] = {}
    for event in notable:
        alike.setdefault(event.kind, []).append(event)
    shown = []
    for each in alike.values():
        if len(each) <= _MOST_ALIKE:
            shown += [_happening(event) for event in each]
        else:
            shown += [_happening(each[0], num_alike=len(each) - 2), _happening(each[-1])]
    return sorted(shown, key=lambda happening: happening.t)


def _happening(event: Event, num_alike: int = 0) -> Happening:
    text = event.text if len(event.text) <= _MOST_TEXT else event.text[:_MOST_TEXT] + " ..."
    return Happening(event.t, event.source, event.kind, text, event.phase, event.step, num_alike)


def machines(events: Iterable[Event]) -> list[str]:
    """Return the messages that trainers log at startup (homing version, device, torch), without duplicates."""
    return list(dict.fromkeys(event.text for event in events if event.kind == "run_started"))


def phases(planned: Sequence[run_json.Phase], metrics: Sequence[Metric], reached: Mapping[str, int]) -> list[Phase]:
    """Return the planned phases in order, followed by phases that appear only in the metrics.

    `reached` maps each phase to the last step named by the outcome or a checkpoint.
    """
    plan = {phase.kind: phase for phase in planned}
    kinds = dict.fromkeys([*plan, *(metric.phase for metric in metrics)])
    return [
        _phase(kind, plan.get(kind), [metric for metric in metrics if metric.phase == kind], reached.get(kind, 0))
        for kind in kinds
    ]


def _phase(kind: str, plan: run_json.Phase | None, lines: list[Metric], reached: int) -> Phase:
    is_rl = kind == BY_REWARD
    curve = [
        (line.step, value) for line in lines if (value := line.more.get("reward") if is_rl else line.loss) is not None
    ]
    checked = [
        Validation(line.step, line.val_loss, line.val_bits_per_byte) for line in lines if line.val_loss is not None
    ]
    last = lines[-1] if lines else None
    return Phase(
        kind,
        method=plan.method if plan else "",
        num_steps=plan.num_steps if plan else last.num_steps if last else 0,
        step=max(reached, last.step if last else 0),
        end_step=last.end_step if last else None,
        num_tokens=last.num_tokens if last else 0,
        batch_tokens=plan.batch_tokens if plan else 0,
        eval_tokens=plan.eval_tokens if plan and plan.rl is None else 0,
        optimizer=plan.optimizer.kind if plan else "",
        lr=plan.optimizer.lr if plan else None,
        weight_decay=plan.optimizer.weight_decay if plan else None,
        schedule=_schedule(plan.schedule) if plan else "",
        adapter=_adapter(plan.lora) if plan and plan.lora else "",
        curve_of="reward" if is_rl else "loss",
        curve=_thinned(curve),
        lr_curve=_thinned([(line.step, line.lr) for line in lines if line.lr is not None]),
        speed_curve=_thinned([(line.step, line.tokens_per_s) for line in lines if line.tokens_per_s is not None]),
        validations=checked,
        best=min(checked, key=lambda each: each.loss) if checked else None,
        last=checked[-1] if checked else None,
        tokens_per_s=_median(line.tokens_per_s for line in lines),
        mfu=_median(line.mfu for line in lines),
        seconds=_seconds(lines),
        figures=newest_figures(lines),
    )


def _schedule(schedule: run_json.Schedule) -> str:
    tail = f", {schedule.decay_steps:,} of decay" if schedule.kind != "constant" else ""
    return f"{schedule.kind}, {schedule.warmup_steps:,} steps of warm-up{tail}"


def _adapter(lora: run_json.Lora) -> str:
    return f"rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}"


def _thinned(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Thin out a curve: keep the first and last point, and the lowest and highest point of each interval.

    Every point that remains was measured, and no spike is lost.
    """
    if len(curve) <= _MOST_POINTS:
        return curve
    every = -(-len(curve) // (_MOST_POINTS // 2 - 1))
    places = {0, len(curve) - 1}
    for start in range(0, len(curve), every):
        stretch = range(start, min(start + every, len(curve)))
        places |= {min(stretch, key=lambda at: curve[at][1]), max(stretch, key=lambda at: curve[at][1])}
    return [curve[at] for at in sorted(places)]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _seconds(lines: list[Metric]) -> float | None:
    """Return the total time spent in training steps, excluding the time between attempts."""
    begun = [Metric(0.0, "", 0, 0, 0), *lines]
    took = [
        (b.step - a.step) * b.step_s for a, b in itertools.pairwise(begun) if b.step_s is not None and b.step > a.step
    ]
    return sum(took) if took else None


def samples(store: Store, run_id: str, order: Sequence[str]) -> list[Sample]:
    """Return the first, middle and last sample of each phase."""
    prefix = run_key(run_id, file_names.SAMPLES) + "/"
    found: dict[str, list[tuple[int, str]]] = {}
    for entry in store.list(prefix):
        match = re.fullmatch(r"([a-z]+)-(\d+)\.txt", entry.key[len(prefix) :])
        if match:
            found.setdefault(match[1], []).append((int(match[2]), entry.key))
    known = [phase for phase in order if phase in found]
    return [
        _sample(store, phase, *each)
        for phase in [*known, *sorted(found.keys() - set(known))]
        for each in _first_middle_last(sorted(found[phase]))
    ]


def _first_middle_last(found: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return [found[number] for number in sorted({0, len(found) // 2, len(found) - 1})]


def _sample(store: Store, phase: str, step: int, key: str) -> Sample:
    text = store.read(key).decode("utf-8", "replace").strip()
    return Sample(phase, step, text[:_MOST_SAMPLE], len(text) > _MOST_SAMPLE)
