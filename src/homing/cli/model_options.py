"""Options of the verbs that use a model: which one, where it runs, and how its tokens are picked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer

from homing.cli.complete import run_words
from homing.sampling_settings import DEFAULT_SAMPLING, SamplingSettings

__all__ = ["Checkpoint", "Device", "Model", "Phase", "Seed", "Stop", "Tokens", "takes_sampling"]

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run name (selects its newest finished run), NAME@RUN or a folder; default: the newest run.",
        autocompletion=run_words,
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Stop after this many tokens.")]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="Stop generating at this text and leave it out; repeatable."),
]
Seed = Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same text.")]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint", "--step", metavar="best|latest|STEP", help="Checkpoint to load; default: best, else latest."
    ),
]
Phase = Annotated[
    str | None,
    typer.Option(metavar="PHASE", help="Phase to use: pretrain, mid, sft or rl; default: the run's last phase."),
]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda|mps", help="Device to run on.")]

# -- how tokens are picked ---------------------------------------------------------------------------------------------

_Temperature = Annotated[
    float, typer.Option(min=0.0, max=100.0, help="Sampling temperature; 0 always takes the most likely token.")
]
_TopK = Annotated[int, typer.Option("--top-k", min=0, help="Sample from only the N most likely tokens; 0 for all.")]
_TopP = Annotated[
    float,
    typer.Option(
        "--top-p", min=0.0, max=1.0, help="Sample only from the most likely tokens whose probabilities add up to this."
    ),
]
_MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        min=0.0,
        max=1.0,
        help="Exclude tokens whose probability is below this fraction of the most likely token's.",
    ),
]
_RepetitionPenalty = Annotated[
    float,
    typer.Option(
        min=0.01, max=100.0, help="Values over 1 make tokens that have already occurred less likely; try 1.1."
    ),
]
_PresencePenalty = Annotated[
    float,
    typer.Option(
        min=-100.0, max=100.0, help="Penalty subtracted once from the logit of each token that is in the new text."
    ),
]
_FrequencyPenalty = Annotated[
    float,
    typer.Option(
        min=-100.0, max=100.0, help="Penalty subtracted from a token's logit for each time it occurs in the new text."
    ),
]

_SAMPLING: dict[str, Any] = {
    "temperature": _Temperature,
    "top_k": _TopK,
    "top_p": _TopP,
    "min_p": _MinP,
    "repetition_penalty": _RepetitionPenalty,
    "presence_penalty": _PresencePenalty,
    "frequency_penalty": _FrequencyPenalty,
}
# Not options: a request of the server sets the bias, and the seed is an option of its own.
_WITHOUT = {"logit_bias", "seed"}
assert set(_SAMPLING) | _WITHOUT == {each.name for each in fields(SamplingSettings)}, "each setting is decided on"


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the sampling options in place of its parameter `sampling`, which receives their values."""
    signature = inspect.signature(command, eval_str=True)
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=getattr(DEFAULT_SAMPLING, name), annotation=annotation
        )
        for name, annotation in _SAMPLING.items()
    ]

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        sampling = SamplingSettings(**{name: given.pop(name) for name in _SAMPLING})
        command(**given, sampling=sampling)

    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        replaced = options if parameter.name == "sampling" else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
        parameters += replaced
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # read by typer
    return with_options
