"""`homing eval`: measure a model, with confidence intervals, or compare two models."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from homing.api.models.eval_model import Evaluation, eval_model
from homing.cli import output
from homing.cli.model_options import Checkpoint, Device, Model, Phase
from homing.cli.options import Base, Json

if TYPE_CHECKING:
    from homing.lm.evals.compare_and_report import Difference

__all__ = ["command"]


def command(
    run: Model = None,
    text: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Text to evaluate on; repeatable.")] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK",
            help="Task: FILE.jsonl, gsm8k:FILE, arithmetic[:1-5] or spelling[:1-5]; repeatable.",
        ),
    ] = None,
    chat: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Held-out conversations; repeatable.")] = None,
    text_field: Annotated[
        str,
        typer.Option("--text-field", metavar="NAME", help="Text field of a .jsonl or .parquet file given as --text."),
    ] = "text",
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Compare two runs or folders on the same evaluation sets."),
    ] = None,
    pass_at: Annotated[
        list[int] | None, typer.Option("--pass-at", metavar="K", min=1, help="Also compute pass@K; repeatable.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Answers to sample per question; default: the largest --pass-at.")
    ] = 0,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=100.0, help="Sampling temperature; default: 0 for one answer per question, otherwise 0.8."
        ),
    ] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option("--new-tokens", min=1, help="Maximum tokens per answer; default: 256, or fewer if fewer fit."),
    ] = None,
    window: Annotated[int, typer.Option(min=0, help="Tokens to process at a time; default: the context length.")] = 0,
    at_most: Annotated[
        int, typer.Option("--at-most", min=0, help="Use at most this many items from each set; 0 for all.")
    ] = 0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Random seed for the intervals and the sampled answers.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="report.md", help="Write the report to this file, and a .json file next to it."),
    ] = None,
    checkpoint: Checkpoint = None,
    phase: Phase = None,
    base: Base = "",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Measure a trained model: bits per byte, perplexity, tasks and answers, each with a 95% interval.

    Without --text, --task or --chat, it uses the conversations or questions that the last phase held out, and
    the run's held-out text.
    """
    done = eval_model(
        run,
        text=text or [],
        task=task or [],
        chat=chat or [],
        text_field=text_field,
        compare=compare,
        pass_at=pass_at or [],
        samples=samples,
        temperature=temperature,
        new_tokens=new_tokens,
        window=window,
        at_most=at_most,
        seed=seed,
        out=out,
        checkpoint=checkpoint,
        phase=phase,
        base=base,
        device=device,
    )
    _show(done.document, done.differences)
    output.emit("eval/1", done.document)
    _say_next(done)


def _show(document: dict[str, Any], differences: list[Difference]) -> None:
    from homing.lm.evals.compare_and_report import count_words, format_score, interval_words

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


def _say_next(done: Evaluation) -> None:
    if done.files:
        output.say(f"Written: {' and '.join(map(str, done.files))}")
    if len(done.models) == 1:
        model = shlex.quote(done.models[0])
        output.say(f"Compare it: homing eval --compare {model} OTHER   Chat with it: homing chat {model}")
    elif not done.files:
        output.say("Save the results: --out report.md")
