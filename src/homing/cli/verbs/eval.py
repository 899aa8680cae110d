"""`homing eval`: measure a model, with confidence intervals, or compare two models.

open and check sets -> load model -> measure each set -> table, report, JSON -> the same for B, then compare
"""

from __future__ import annotations

import json as json_
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from homing import __version__
from homing.api.evaluate import open_sets
from homing.api.extras import need
from homing.api.lookup.base_weights import find_base
from homing.api.lookup.find_models import find_model
from homing.cli import output
from homing.cli.options import Base, Json
from homing.cli.verbs.generate import Checkpoint, Device, Model, Phase
from homing.errors import UsageError

if TYPE_CHECKING:
    from homing.lm.evals.eval_report import Difference
    from homing.lm.evals.eval_result import Measured
    from homing.lm.evals.run_evals import How, Subject, What

__all__ = ["command"]

_REPORT_EVERY_S = 15.0


def command(
    run: Model = None,
    text: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Text to evaluate on; repeatable.")] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK",
            help="FILE.jsonl, gsm8k:FILE, arithmetic[:1-5] or spelling[:1-5]; repeatable.",
        ),
    ] = None,
    chat: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Held-out conversations; repeatable.")] = None,
    text_field: Annotated[
        str,
        typer.Option("--text-field", metavar="NAME", help="Text field of a .jsonl or .parquet file given as --text."),
    ] = "text",
    compare: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Compare two runs or folders on the same sets.")
    ] = None,
    pass_at: Annotated[
        list[int] | None, typer.Option("--pass-at", metavar="K", min=1, help="Also compute pass@K; repeatable.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Answers sampled per question; default: the largest K.")] = 0,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, max=100.0, help="Sampling temperature; default: 0 for one answer, else 0.8."),
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option("--new-tokens", min=1, help="Maximum tokens per answer; default: 256 or what fits.")
    ] = None,
    window: Annotated[int, typer.Option(min=0, help="Tokens of text read at once; default: the context.")] = 0,
    at_most: Annotated[
        int, typer.Option("--at-most", min=0, help="Use at most this many items of each set; 0 for all.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Random seed for intervals and sampled answers.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="report.md", help="Write the report, and a .json next to it.")
    ] = None,
    checkpoint: Checkpoint = None,
    phase: Phase = None,
    base: Base = "",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Measure a trained model: bits per byte, perplexity, tasks and answers, each with a 95% interval.

    Without --text, --task and --chat it uses what the last phase held out (conversations, questions) and the run's
    held-out text.
    """
    need("lm", verb="eval")
    if compare is not None and run is not None:
        raise UsageError(
            what=f"Three models given: {run}, {compare[0]} and {compare[1]}.",
            why="--compare already takes both models.",
            fix=f"homing eval --compare {shlex.join(compare)}",
        )
    named: list[str | None] = list(compare) if compare is not None else [run]
    folders = [find_model(name, checkpoint=checkpoint, phase=phase) for name in named]

    from homing.lm.evals.question_sets import Asking
    from homing.lm.evals.run_evals import How
    from homing.lm.generate import read_card

    asking = Asking(tuple(pass_at or ()), samples, temperature, new_tokens, seed)
    asking.check()
    cards = [read_card(folder) for folder in folders]
    sets = open_sets(cards[0], text or [], task or [], chat or [], text_field=text_field, at_most=at_most)
    of_answers = {"--pass-at": pass_at, "--samples": samples, "--temperature": temperature, "--new-tokens": new_tokens}
    _refuse_idle([flag for flag, value in of_answers.items() if value not in (None, 0, [])], window, sets)
    if not (text or task or chat):
        _warn_of_leaks(cards, named)
    how = How(window, at_most, asking)
    document, differences = _evaluate(folders, [str(name) for name in named], sets, how, seed, device, base)
    _show(document, differences)
    if out is not None:
        _write(out, document)
    output.emit("eval/1", document)
    _say_next([name or str(folder) for name, folder in zip(named, folders, strict=True)], out)


def _refuse_idle(of_answers: list[str], window: int, sets: list[What]) -> None:
    """Refuse a flag that applies to none of the sets, because ignoring it silently would be misleading."""
    from homing.lm.evals.task_file import TaskFile
    from homing.lm.evals.text_files import Text

    if of_answers and not any(isinstance(one, TaskFile) and one.asks_for_answers for one in sets):
        raise UsageError(
            what=f"{of_answers[0]} applies to generated answers, and no set has questions.",
            why=f"Sets: {', '.join(one.name for one in sets)}.",
            fix="Add questions, such as --task arithmetic:1, or leave it out.",
        )
    if window and not any(isinstance(one, Text) for one in sets):
        raise UsageError(
            what="--window applies to text, and no set is text.",
            why=f"Sets: {', '.join(one.name for one in sets)}.",
            fix="Add --text FILE, or leave it out.",
        )


def _evaluate(
    folders: list[Path], named: list[str], sets: list[What], how: How, seed: int, device: str, base: str
) -> tuple[dict[str, Any], list[Difference]]:
    import torch

    from homing.lm.device import describe_device
    from homing.lm.evals.eval_report import compare
    from homing.lm.evals.eval_result import identity_of
    from homing.lm.evals.run_evals import load_subject

    started = time.monotonic()
    models, measured, made = [], [], {}
    for folder in folders:  # one after the other: two models need not fit in memory together
        subject = load_subject(folder, device, find_base(folder, base))
        where, precision = describe_device(subject.model.device), str(subject.model.compute_dtype).split(".")[-1]
        output.say(f"{folder} on {where} in {precision}")
        models.append(identity_of(subject.card))
        measured.append([_measure(subject, what, how) for what in sets])
        made = {"version": __version__, "torch": torch.__version__, "device": where, "precision": precision}
        del subject
    differences: list[Difference] = []
    if len(measured) == 2:
        names = (named[0], named[1])
        differences = [
            one for a, b in zip(measured[0], measured[1], strict=True) for one in compare(a, b, names, seed=seed)
        ]
    document = {
        "models": models,
        "results": [[one.to_dict(seed) for one in each] for each in measured],
        "differences": [difference.to_dict() for difference in differences],
        "seed": seed,
        "made": {**made, "seconds": round(time.monotonic() - started, 3)},
    }
    return document, differences


def _measure(subject: Subject, what: What, how: How) -> Measured:
    from homing.lm.evals.run_evals import measure

    return measure(subject, what, how, notify=_now_and_then(what.name))


def _now_and_then(name: str) -> Callable[[str], None]:
    last_report = time.monotonic()

    def report_progress(done: str) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > _REPORT_EVERY_S:
            output.say(f"  {name}: {done}")
            last_report = time.monotonic()

    return report_progress


def _warn_of_leaks(cards: list[Any], named: list[str | None]) -> None:
    """Warn if the held-out text of one run may be training data of the other."""
    if len(cards) < 2:
        return
    first, second = (card.run.data.manifest_sha256 if card.run is not None else "" for card in cards)
    if first != second:
        output.say(
            f"warning: the text is held out for {named[0]}; {named[1]} has other data and may have trained on it."
        )


def _show(document: dict[str, Any], differences: list[Difference]) -> None:
    from homing.lm.evals.eval_report import count_words, format_score, interval_words

    for model, sets in zip(document["models"], document["results"], strict=True):
        rows = [
            (one["name"], score["name"], format_score(score["value"]), interval_words(score),
             f"{score['num_units']:,}", score["method"])
            for one in sets for score in one["scores"]
        ]  # fmt: skip
        title = str(model["folder"]) if len(document["models"]) > 1 else ""
        output.table(["set", "figure", "value", "95% interval", "units", "interval by"], rows, title=title)
        for one in sets:
            output.say(f"{one['name']}: {count_words(one)}.{''.join(f' {note}' for note in one['notes'])}")
    if not output.is_json():
        for difference in differences:
            print(difference.sentence)


def _write(out: Path, document: dict[str, Any]) -> None:
    """Write report.md and report.json, each atomically."""
    from homing.lm.evals.eval_report import as_markdown

    out.parent.mkdir(parents=True, exist_ok=True)
    whole = json_.dumps({"schema": "homing.eval/1", **document}, indent=1, ensure_ascii=False, allow_nan=False)
    for path, text in ((out.with_suffix(".md"), as_markdown(document)), (out.with_suffix(".json"), whole)):
        temporary = path.with_name(f".{path.name}.partial")
        temporary.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        os.replace(temporary, path)


def _say_next(models: list[str], out: Path | None) -> None:
    if out is not None:
        output.say(f"Written: {out.with_suffix('.md')} and {out.with_suffix('.json')}")
    if len(models) == 1:
        model = shlex.quote(models[0])
        output.say(f"Compare it: homing eval --compare {model} OTHER   Chat with it: homing chat {model}")
    elif out is None:
        output.say("Save the results: --out report.md")
