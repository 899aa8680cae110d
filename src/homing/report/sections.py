"""Turns a Report into headline figures and sections of sentences, tables, texts and charts, for every output format.

The sections contain plain text, much of it untrusted (samples, logs, names); `render_page` sanitizes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud.ledger.ledger import ADOPTED
from homing.cloud.ledger.meter import AT_MOST_WORDS, MARGIN_WORDS, show_usd
from homing.report.charts import Charts, make_charts
from homing.report.report_data import Attempt, Data, Phase, Report, Validation
from homing.units import UsdColumn, counted, format_bytes, format_count, format_duration, format_moment, format_rate
from homing.wire.checkpoint_manifest import MISSING_REWARD, figure_of

__all__ = ["Block", "Figure", "Section", "Table", "Verbatim", "Words", "headline", "make_figures", "make_sections"]

_MOST_RUN_FILE = 20_000  # characters
_MOST_VALIDATIONS = 12  # maximum number of validations shown per phase


@dataclass(frozen=True)
class Words:
    text: str


@dataclass(frozen=True)
class Table:
    headers: tuple[str, ...]  # empty for a table without a header row, such as a list of names and values
    rows: Sequence[Sequence[str]]
    folded: str = ""  # title of a long table that the HTML page shows only on request


@dataclass(frozen=True)
class Verbatim:
    title: str
    text: str


@dataclass(frozen=True)
class Figure:
    """A headline figure, such as the dollars spent."""

    label: str
    value: str
    share: float | None = None  # of a limit, from 0 to 1


Block = Words | Table | Verbatim | Charts


@dataclass(frozen=True)
class Section:
    title: str
    blocks: list[Block]


def headline(report: Report) -> str:
    """Return the run's state in a sentence or two, preceded by a warning if the run is not finished."""
    reason = f": {report.reason}" if report.reason else "."
    if report.is_finished:
        return f"The run is done{reason}"
    return f"NOT FINISHED. The run is {report.state}{reason} This report is as of {format_moment(report.made_at)}."


def make_figures(report: Report) -> list[Figure]:
    """Return the figures at the top of the page; those that are unknown are left out."""
    last = next((phase for phase in reversed(report.phases) if phase.curve or phase.last), None)
    tokens = sum(phase.num_tokens for phase in report.phases)
    made = [Figure("State", report.state)]
    if last is not None and last.curve:
        made.append(Figure(f"Final {last.curve_of}, {last.kind}", f"{last.curve[-1][1]:.3f}"))
    if last is not None and last.last is not None and last.curve_of == "loss":
        made.append(Figure("Validation loss", f"{last.last.loss:.3f}"))
        if last.last.bits_per_byte is not None:
            made.append(Figure("Bits per byte", f"{last.last.bits_per_byte:.3f}"))
    if tokens:
        made.append(Figure("Tokens trained", format_count(tokens)))
    if report.began_at is not None:
        took_s = (report.ended_at if report.ended_at is not None else report.made_at) - report.began_at
        made.append(Figure("Time", format_duration(max(0.0, took_s))))
    if report.spend_usd is not None and report.attempts:
        spend, limit = Decimal(report.spend_usd), report.spend_limit_usd
        of = "" if limit is None else f" of {show_usd(Decimal(limit))}"
        share = float(spend / Decimal(limit)) if limit is not None and Decimal(limit) else None
        made.append(Figure("Cost", f"{'at most ' if report.is_at_most else ''}{show_usd(spend)}{of}", share))
    if report.offer:
        num_gpus = report.offer.get("num_gpus") or 0
        made.append(Figure("Machine", f"{f'{num_gpus} x ' if num_gpus else ''}{report.offer.get('device', '')}"))
    if report.made is not None:
        made.append(Figure("Parameters", format_count(report.made.num_params)))
    return made


def make_sections(report: Report) -> list[Section]:
    found = [
        Section("Training", list(_went(report))),
        Section("Samples", list(_samples(report))),
        Section("Evaluation", list(_evals(report))),
        Section("Model and settings", list(_trained(report))),
        Section("Data", list(_learned_from(report))),
        Section("Events", list(_happened(report))),
        Section("Hardware", list(_where(report))),
        Section("Cost", list(_cost(report))),
        Section("Checkpoints", list(_model(report))),
    ]
    if report.next:
        found.append(Section("Next", [Verbatim("", "\n".join(report.next))]))
    if report.problems:
        found.append(Section("Problems", [Words(problem) for problem in report.problems]))
    return found


def _trained(report: Report) -> Iterator[Block]:
    made = report.made
    if made is None:
        yield Words("The settings (run.json) could not be read.")
    else:
        shape = made.model
        rows = [
            ("run", report.run),
            ("family", f"{shape['family']} ({shape['arch']})"),
            ("parameters", f"{made.num_params:,}"),
            (
                "shape",
                f"{shape['num_layers']} layers, width {shape['width']:,}, {shape['num_heads']} heads"
                f" ({shape['num_kv_heads']} key-value) of size {shape['head_size']},"
                f" feed-forward {shape['ffn_width']:,}, {'tied' if shape['is_tied'] else 'untied'} head",
            ),
            ("context", f"{shape['context']:,} tokens"),
            ("vocabulary", f"{shape['vocab_size']:,}"),
            ("base model", made.base + (f" ({made.base_licence})" if made.base and made.base_licence else "")),
            ("FLOPs per token", f"{made.flops_per_token:.4g}"),
            ("seed", str(made.seed)),
            ("homing", made.code_version),
            ("run file sha256", made.run_file_sha256),
        ]
        yield Table((), [row for row in rows if row[1]])
    if report.phases:
        yield _settings(report.phases)
    chosen = [
        (phase.kind, ", ".join(f"{name} {value}" for name, value in phase.choices.items())) for phase in report.phases
    ]
    if any(text for _, text in chosen):
        yield Table(("phase", "chosen on the instance"), [row for row in chosen if row[1]])
    if report.run_file:
        yield Words(
            "The run file as it was written, without --set options. The tables above show the settings that were used."
        )
        yield Verbatim("Run file", report.run_file.strip()[:_MOST_RUN_FILE])


def _settings(phases: Iterable[Phase]) -> Table:
    headers = (
        "phase",
        "method",
        "steps planned",
        "tokens per step",
        "optimizer",
        "learning rate",
        "weight decay",
        "schedule",
    )
    rows = []
    for phase in phases:
        method = phase.method + (f" ({phase.adapter})" if phase.adapter else "")
        rate, decay = ("" if value is None else f"{value:g}" for value in (phase.lr, phase.weight_decay))
        counts = [f"{number:,}" if number else "" for number in (phase.num_steps, phase.batch_tokens)]
        rows.append((phase.kind, method, *counts, phase.optimizer, rate, decay, phase.schedule))
    return Table(headers, rows)


def _learned_from(report: Report) -> Iterator[Block]:
    if not report.data:
        yield Words("No prepared data is recorded.")
        return
    rows = [(data.of, *row) for data in report.data for row in _splits(data)]
    yield Table(("data", "split", "tokens", "documents", "bytes of text"), rows)
    for data in report.data:
        details = [(f"data manifest of {data.of}, sha256", data.manifest_sha256)]
        if data.problem:
            details.append(("manifest", f"could not be read: {data.problem}"))
        else:
            details += [
                ("tokenizer", f"{data.vocab_size:,} entries, sha256 {data.tokenizer_sha256}"),
                ("sources", f"{counted(data.num_files, 'file')}, {format_bytes(data.num_bytes)}"),
                ("prepared by homing", data.code_version),
            ]
        yield Table((), [row for row in details if row[1]])
        if data.files:
            files = [(str(file["path"]), f"{file['num_bytes']:,}", str(file["sha256"])) for file in data.files]
            left = data.num_files - len(files)
            rest = [(f"{left:,} more", "", "")] if left else []
            yield Table(("file", "bytes", "sha256"), [*files, *rest], folded=f"Source files of {data.of}")


def _splits(data: Data) -> Iterator[tuple[str, ...]]:
    for name, split in data.splits.items():
        part = {"train": "training", "val": "held out"}.get(name, name)
        counts = (split.get(key) for key in ("num_tokens", "num_documents", "num_text_bytes"))
        yield (part, *("" if count is None else f"{count:,}" for count in counts))


def _went(report: Report) -> Iterator[Block]:
    if not any(phase.curve or phase.validations for phase in report.phases):
        yield Words("No metrics are recorded.")
    charts = make_charts(report)
    if charts:
        yield Charts(f"Curves of {report.name}", charts)
    if report.phases:
        headers = (
            "phase",
            "steps",
            "tokens",
            "last",
            "best held out",
            "last held out",
            "tok/s",
            "mfu",
            "time in steps",
        )
        yield Table(headers, [_course(phase) for phase in report.phases])
        yield Words("Tokens per second and MFU are medians of the logged values.")
    rows = [
        (phase.kind, f"{each.step:,}", *_validation(phase, each))
        for phase in report.phases
        for each in _few(phase.validations, phase.best)
    ]
    if rows:
        yield Table(("phase", "step", "held out", "bits per byte"), rows)
        for phase in report.phases:
            if phase.validations and phase.eval_tokens:
                yield Words(_measured_while_training(phase))
    if report.began_at is not None and report.ended_at is not None:
        took = format_duration(report.ended_at - report.began_at)
        yield Words(
            f"From {format_moment(report.began_at)} to {format_moment(report.ended_at)}, {took} wall-clock time."
        )


def _measured_while_training(phase: Phase) -> str:
    return (
        f"Each evaluation during {phase.kind} used about {phase.eval_tokens:,} held-out tokens, or all of them if there"
        " are fewer. The tokens are split into rows, and the first tokens of each row have little context."
    )


def _course(phase: Phase) -> tuple[str, ...]:
    steps = f"{phase.step:,} of {phase.num_steps:,}" if phase.step else f"not started, of {phase.num_steps:,}"
    steps += f", early end (landing) at step {phase.end_step:,}" if phase.end_step is not None else ""
    return (
        phase.kind,
        steps,
        format_count(phase.num_tokens) if phase.num_tokens else "",
        f"{phase.curve_of} {phase.curve[-1][1]:.4f}" if phase.curve else "",
        _held_out(phase, phase.best),
        _held_out(phase, phase.last),
        "" if phase.tokens_per_s is None else format_rate(phase.tokens_per_s),
        "" if phase.mfu is None else f"{phase.mfu:.1%}",
        "" if phase.seconds is None else format_duration(phase.seconds),
    )


def _held_out(phase: Phase, found: Validation | None) -> str:
    if found is None:
        return ""
    loss, bits = _validation(phase, found)
    return f"{loss}{f', {bits} bits per byte' if bits else ''} at step {found.step:,}"


def _validation(phase: Phase, found: Validation) -> tuple[str, str]:
    called = figure_of(phase.kind)
    named = called if called == MISSING_REWARD else "loss"
    return f"{named} {found.loss:.4f}", "" if found.bits_per_byte is None else f"{found.bits_per_byte:.4f}"


def _few(found: list[Validation], best: Validation | None) -> list[Validation]:
    """Return evenly spaced validations, always including the first, the best and the last."""
    if len(found) <= _MOST_VALIDATIONS:
        return found
    every = math.ceil(len(found) / (_MOST_VALIDATIONS - 2))
    return [each for number, each in enumerate(found) if number % every == 0 or each in (best, found[-1])]


def _happened(report: Report) -> Iterator[Block]:
    if not report.happenings:
        yield Words("No unusual events: no preemption, restart, back-off or early end (landing).")
        return
    rows = []
    for each in report.happenings:
        at = f"{each.phase} {each.step:,}".strip() if each.step is not None else each.phase
        more = f" (and {each.num_alike:,} more like it)" if each.num_alike else ""
        rows.append((format_moment(each.t), at, each.source, each.kind, each.text + more))
    yield Table(("time", "step", "source", "kind", "message"), rows)


def _samples(report: Report) -> Iterator[Block]:
    if not report.samples:
        yield Words("No samples are recorded.")
    for each in report.samples:
        cut = " (truncated)" if each.is_cut else ""
        yield Verbatim(f"{each.phase}, step {each.step:,}{cut}", each.text)


def _evals(report: Report) -> Iterator[Block]:
    if not report.evals:
        yield Words(f"No evaluation. To create one (evals.md and evals.json): homing eval {report.run} --out evals.md")
        yield Words(f"To include it in this report: homing report {report.run} --eval evals.json")
        return
    rows = []
    for each in report.evals:
        of = f"{each.phase} {each.step:,}" if each.step is not None else each.phase
        value = "not finite" if each.value is None else f"{each.value:.4f}"
        between = "" if each.low is None or each.high is None else f"{each.low:.4f} to {each.high:.4f}"
        tokens = "" if each.num_tokens is None else f"{each.num_tokens:,}"
        rows.append((of, each.name, tokens, each.figure, value, between, f"{each.num_units:,}"))
    yield Table(("checkpoint", "set", "tokens", "metric", "value", "95% interval", "units"), rows)
    if any(phase.validations for phase in report.phases):
        yield Words(
            "homing eval measured these values after training, on the tokens in the table, each with its full context."
            " The held-out metrics under Training were measured during training, on a subset, so they differ for the"
            " same checkpoint. To compare this model with other models, use the values from homing eval."
        )


def _where(report: Report) -> Iterator[Block]:
    if report.is_trained_here:
        yield Words("Trained with homing train on your own computer.")
    for text in report.machines or ["The trainer did not record the hardware."]:
        yield Words(text)
    if report.offer:
        yield Words(f"Last offer used: {_offer(report)}.")
    if report.attempts:
        headers = ("attempt", "provider", "offer", "from", "until", "state", "note")
        rows = [
            (str(a.number), a.provider, a.offer, format_moment(a.began_at), format_moment(a.ended_at), a.state, a.note)
            for a in report.attempts
        ]
        yield Table(headers, rows)


def _offer(report: Report) -> str:
    offer = report.offer
    cards = offer.get("num_gpus") or 0
    parts = [
        f"{cards} x {offer['device']}" if cards else str(offer.get("device", "")),
        counted(int(offer["num_cores"]), "core") if offer.get("num_cores") else "",
        format_bytes(offer["memory_bytes"]) + " memory" if offer.get("memory_bytes") else "",
        str(offer.get("region") or ""),
        "spot" if offer.get("is_spot") else "",
    ]
    return f"{offer.get('provider', '')} {offer.get('name', '')}, ".lstrip() + ", ".join(part for part in parts if part)


def _cost(report: Report) -> Iterator[Block]:
    if report.is_trained_here:
        yield Words("homing rented nothing for this run, so the ledger has no cost for it.")
        return
    if report.spend_usd is None or not report.attempts:
        yield Words("The ledger lists no instance for this run.")
        return
    headers = ("attempt", "rate", "dollars", "reported by the provider", "billing")
    spends = [Decimal(attempt.spend_usd) for attempt in report.attempts]
    provider_spends = [Decimal(attempt.provider_usd) for attempt in report.attempts if attempt.provider_usd is not None]
    column = UsdColumn.of([*spends, *provider_spends])
    yield Table(headers, [_receipt(attempt, column) for attempt in report.attempts])
    yield from _cost_by_phase(report)
    limit = None if report.spend_limit_usd is None else Decimal(report.spend_limit_usd)
    total = column.show(column.total(spends)) + ("" if limit is None else f" of {show_usd(limit)}")
    so_far = " so far" if any(attempt.ended_at is None for attempt in report.attempts) else ""
    known = "; spending by the home directory that now owns the run is not included" if report.state == ADOPTED else ""
    of = "" if limit is None else " (the limit)"
    yield Words(f"Total: {'at most ' if report.is_at_most else ''}{total}{so_far}{of}{known}.")
    if Decimal(report.spend_usd):
        yield Words(MARGIN_WORDS)
    if report.is_at_most:
        yield Words(AT_MOST_WORDS)
    if report.stored:
        yield Words(f"In the store: {report.stored}.")


def _cost_by_phase(report: Report) -> Iterator[Block]:
    """Divide the dollars by the time that each phase spent in steps; the rest is boot, evaluation and pushes."""
    total = Decimal(report.spend_usd or 0)
    hours = {phase.kind: Decimal(str(phase.seconds)) / 3600 for phase in report.phases if phase.seconds}
    billed_s = sum(((a.ended_at or report.made_at) - a.began_at for a in report.attempts), 0.0)
    if not hours or not total or billed_s <= 0:
        return
    rate = total / (Decimal(str(billed_s)) / 3600)
    rows = [(kind, format_duration(float(spent * 3600)), spent * rate) for kind, spent in hours.items()]
    rest_s = max(0.0, billed_s - float(sum(hours.values()) * 3600))
    rows.append(("boot, evaluation, checkpoints, pushes", format_duration(rest_s), Decimal(str(rest_s)) / 3600 * rate))
    yield Table(("part of the run", "time", "about"), [(name, took, show_usd(usd)) for name, took, usd in rows])


def _receipt(attempt: Attempt, column: UsdColumn) -> tuple[str, ...]:
    dollars = ("at most " if attempt.is_at_most else "") + column.show(Decimal(attempt.spend_usd))
    reported = "" if attempt.provider_usd is None else column.show(Decimal(attempt.provider_usd))
    return str(attempt.number), f"{show_usd(Decimal(attempt.rate_usd_per_hour))}/h", dollars, reported, attempt.billing


def _model(report: Report) -> Iterator[Block]:
    if not report.kept:
        yield Words("No checkpoint or model was found.")
        return
    rows = []
    for each in report.kept:
        hashes = ", ".join(f"{name} {sha256}" for name, sha256 in each.weights.items())
        called = ", ".join(each.called)
        rows.append(
            (each.where, f"{each.phase} {each.step:,}", called, format_bytes(each.num_bytes), each.problem or hashes)
        )
    yield Table(("where", "step", "named", "size", "sha256 of the weights"), rows)
    yield Words("The manifest.json next to the weights has the sha256 of every file.")
