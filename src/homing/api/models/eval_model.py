"""Measure a model, with confidence intervals, or compare two models. Implements `homing eval` and `Model.eval`.

open and check sets -> load model -> measure each set -> document, report -> the same for B, then compare
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homing import __version__
from homing.api import notices
from homing.api.extras import need
from homing.api.lookup.find_adapter_base import find_base
from homing.api.models.eval_sets import open_sets
from homing.api.models.open_model import OpenModel, find_folder
from homing.errors import UsageError

if TYPE_CHECKING:
    from homing.lm.evals.compare_and_report import Difference
    from homing.lm.evals.run_evals import How, Subject, What
    from homing.lm.generate import Card

__all__ = ["Evaluation", "eval_model"]

_REPORT_EVERY_S = 15.0

Named = str | Path | OpenModel | None


@dataclass(frozen=True)
class Evaluation:
    document: dict[str, Any]  # as `homing eval --json` prints it
    differences: list[Difference]  # between two models
    models: list[str]  # the names that the caller used, or the models' folders
    files: list[Path]


def eval_model(
    run: Named = None,
    *,
    text: Sequence[str] = (),
    task: Sequence[str] = (),
    chat: Sequence[str] = (),
    text_field: str = "text",
    compare: tuple[str, str] | None = None,
    pass_at: Sequence[int] = (),
    samples: int = 0,
    temperature: float | None = None,
    new_tokens: int | None = None,
    window: int = 0,
    at_most: int = 0,
    seed: int = 0,
    out: Path | None = None,
    checkpoint: str | None = None,
    phase: str | None = None,
    base: str = "",
    device: str = "auto",
) -> Evaluation:
    """Measure a model, or the two in `compare`, on each set, and write the report to `out` (.md and .json) if given.

    If `text`, `task` and `chat` are empty, the sets are the data that the last phase held out, and the run's held-out
    text.
    """
    need("lm", verb="eval")
    if compare is not None and run is not None:
        raise UsageError(
            what=f"Three models were given: {run}, {compare[0]} and {compare[1]}.",
            why="--compare already takes both models.",
            fix=f"homing eval --compare {shlex.join(compare)}",
        )
    named: list[Named] = list(compare) if compare is not None else [run]
    folders = [find_folder(name, checkpoint=checkpoint, phase=phase) for name in named]
    names = [str(folder) if isinstance(name, OpenModel) or not name else str(name)
             for name, folder in zip(named, folders, strict=True)]  # fmt: skip

    from homing.lm.evals.generated_answers import Asking
    from homing.lm.evals.run_evals import How, Subject, load_subject
    from homing.lm.generate import read_card

    asking = Asking(tuple(pass_at), samples, temperature, new_tokens, seed)
    asking.check()
    cards = [read_card(folder) for folder in folders]
    sets = open_sets(cards[0], list(text), list(task), list(chat), text_field=text_field, at_most=at_most)
    of_answers = {"--pass-at": pass_at, "--samples": samples, "--temperature": temperature, "--new-tokens": new_tokens}
    _refuse_idle([flag for flag, value in of_answers.items() if value not in (None, 0, [], ())], window, sets)
    if not (text or task or chat):
        _warn_of_leaks(cards, names)

    def load(number: int) -> Subject:
        one, folder = named[number], folders[number]
        if isinstance(one, OpenModel):
            return Subject(cards[number], one.model, one.tokenizer)
        return load_subject(folder, device, find_base(folder, base))

    document, differences = _evaluate(load, names, sets, How(window, at_most, asking), seed)
    return Evaluation(document, differences, names, _write(out, document) if out is not None else [])


def _refuse_idle(of_answers: list[str], window: int, sets: list[What]) -> None:
    """Raise UsageError for an option that applies to none of the sets; ignoring it silently would be misleading."""
    from homing.lm.evals.task_file import TaskFile
    from homing.lm.evals.text_loss import Text

    if of_answers and not any(isinstance(one, TaskFile) and one.asks_for_answers for one in sets):
        raise UsageError(
            what=f"{of_answers[0]} applies only to generated answers, but no set has questions.",
            why=f"Sets: {', '.join(one.name for one in sets)}.",
            fix="Add questions, such as --task arithmetic:1, or leave out the option.",
        )
    if window and not any(isinstance(one, Text) for one in sets):
        raise UsageError(
            what="--window applies only to text, but no set is text.",
            why=f"Sets: {', '.join(one.name for one in sets)}.",
            fix="Add --text FILE, or leave out the option.",
        )


def _warn_of_leaks(cards: list[Card], names: list[str]) -> None:
    """Warn if the held-out text of one run may be training data of the other."""
    if len(cards) < 2:
        return
    first, second = (card.run.data.manifest_sha256 if card.run is not None else "" for card in cards)
    if first != second:
        notices.say(
            f"warning: the text was held out of {names[0]}'s training data;"
            f" {names[1]} was trained on other data, which may include the text."
        )


def _evaluate(
    load: Callable[[int], Subject], names: list[str], sets: list[What], how: How, seed: int
) -> tuple[dict[str, Any], list[Difference]]:
    import torch

    from homing.lm.device import describe_device
    from homing.lm.evals.compare_and_report import compare
    from homing.lm.evals.eval_result import identity_of
    from homing.lm.evals.run_evals import measure

    started = time.monotonic()
    models, measured, made = [], [], {}
    for number in range(len(names)):  # one at a time, so that two models need not fit in memory together
        subject = load(number)
        where, precision = describe_device(subject.model.device), str(subject.model.compute_dtype).split(".")[-1]
        notices.say(f"Evaluating {subject.card.folder} on {where} in {precision}")
        models.append(identity_of(subject.card))
        measured.append([measure(subject, what, how, notify=_now_and_then(what.name)) for what in sets])
        made = {"version": __version__, "torch": torch.__version__, "device": where, "precision": precision}
        del subject
    differences: list[Difference] = []
    if len(measured) == 2:
        both = (names[0], names[1])
        differences = [
            one for a, b in zip(measured[0], measured[1], strict=True) for one in compare(a, b, both, seed=seed)
        ]
    document = {
        "models": models,
        "results": [[one.to_dict(seed) for one in each] for each in measured],
        "differences": [difference.to_dict() for difference in differences],
        "seed": seed,
        "made": {**made, "seconds": round(time.monotonic() - started, 3)},
    }
    return document, differences


def _now_and_then(name: str) -> Callable[[str], None]:
    last_report = time.monotonic()

    def report_progress(done: str) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > _REPORT_EVERY_S:
            notices.say(f"  {name}: {done}")
            last_report = time.monotonic()

    return report_progress


def _write(out: Path, document: dict[str, Any]) -> list[Path]:
    """Write report.md and report.json, each atomically."""
    from homing.lm.evals.compare_and_report import as_markdown

    out.parent.mkdir(parents=True, exist_ok=True)
    whole = json.dumps({"schema": "homing.eval/1", **document}, indent=1, ensure_ascii=False, allow_nan=False)
    pages = [(out.with_suffix(".md"), as_markdown(document)), (out.with_suffix(".json"), whole)]
    for path, text in pages:
        temporary = path.with_name(f".{path.name}.partial")
        temporary.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        os.replace(temporary, path)
    return [path for path, _ in pages]
