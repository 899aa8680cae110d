"""Options shared by several verbs, defined once."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.cli.complete import change_words, run_words

__all__ = [
    "All",
    "Base",
    "Gpu",
    "HeldOutPaths",
    "Json",
    "Last",
    "Phases",
    "RunName",
    "RunRequired",
    "Sets",
    "TextPaths",
    "TrackerName",
    "Trackers",
    "Wandb",
    "Yes",
]

RunName = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Run or run file; default: the newest.", autocompletion=run_words),
]
RunRequired = Annotated[str, typer.Argument(metavar="RUN", help="Run or run file.", autocompletion=run_words)]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a run file key, such as --set model.depth=8.",
        autocompletion=change_words,
    ),
]
Phases = Annotated[
    str | None,
    typer.Option("--phase", metavar="NAMES", help="Use only these phases, such as mid+sft; overrides train.only."),
]
Gpu = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="Use only this GPU, such as H100; overrides cloud.gpu.")
]
TextPaths = Annotated[
    list[str] | None, typer.Option("--text", metavar="PATH", help="Text file, glob or directory; repeatable.")
]
HeldOutPaths = Annotated[
    list[str] | None, typer.Option("--validation", metavar="PATH", help="Held-out text; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Last = Annotated[
    int,
    typer.Option(
        "--last",
        metavar="N",
        min=0,
        help="Show the N newest entries; entries that may still be billing are always shown.",
    ),
]
All = Annotated[bool, typer.Option("--all", help="Show all.")]
Trackers = Annotated[
    list[str] | None,
    typer.Option("--tracker", metavar="NAME", help="Also log to tensorboard, wandb, mlflow or trackio; repeatable."),
]
Wandb = Annotated[bool, typer.Option("--wandb", help="Also log to Weights & Biases; offline if there is no API key.")]
TrackerName = Annotated[
    str | None,
    typer.Option("--run-name", metavar="NAME", help="Name of the run in experiment trackers; default: the run id."),
]
Base = Annotated[
    str, typer.Option("--base", metavar="FOLDER|hf:...", help="Base weights that the adapter was trained on.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Confirm without asking.")]
