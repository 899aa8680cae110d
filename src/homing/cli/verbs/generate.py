"""`homing generate`: stream the continuation of a prompt to stdout."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from homing.api.models.generate_text import generate
from homing.cli import output
from homing.cli.complete import run_words
from homing.cli.options import Base, Json
from homing.errors import UsageError
from homing.sampling_settings import SamplingSettings
from homing.units import format_rate

__all__ = ["command"]

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run name (selects its newest finished run), NAME@RUN or a folder; default: the newest run.",
        autocompletion=run_words,
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Stop after this many tokens.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, max=100.0, help="Sampling temperature; 0 always takes the most likely token.")
]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="Sample from only the N most likely tokens; 0 for all.")]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", min=0.0, max=1.0, help="Sample only from the most likely tokens whose probabilities add up to this."
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        min=0.0,
        max=1.0,
        help="Exclude tokens whose probability is below this fraction of the most likely token's.",
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        min=0.01, max=100.0, help="Values over 1 make tokens that have already occurred less likely; try 1.1."
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        min=-100.0, max=100.0, help="Penalty subtracted once from the logit of each token that is in the new text."
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        min=-100.0, max=100.0, help="Penalty subtracted from a token's logit for each time it occurs in the new text."
    ),
]
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


def command(
    run: Model = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to complete; - reads stdin.")] = "",
    tokens: Tokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    stop: Stop = None,
    seed: Seed = None,
    checkpoint: Checkpoint = None,
    phase: Phase = None,
    device: Device = "auto",
    base: Base = "",
    json: Json = False,
) -> None:
    """Complete a prompt with a trained model. Without --prompt the model starts a new document."""
    begun = generate(
        run,
        prompt=_read_prompt(prompt),
        tokens=tokens,
        sampling=SamplingSettings(
            temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty
        ),
        stop=stop or (),
        seed=seed,
        checkpoint=checkpoint,
        phase=phase,
        device=device,
        base=base,
    )
    _show(begun.prompt, is_json=json)
    for piece in begun:
        _show(piece, is_json=json)
    _show("\n", is_json=json)
    ending = "the model ended the text" if begun.is_ended else "--tokens reached"
    output.say(f"{begun.num_tokens} tokens at {format_rate(begun.num_tokens / begun.seconds)}; {ending}")
    output.emit("generate/1", begun.to_dict())


def _show(text: str, *, is_json: bool) -> None:
    if not is_json:
        print(text, end="", flush=True)


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as exc:
        raise UsageError(
            what="The prompt on stdin is not UTF-8.", why=str(exc), fix="iconv -t utf-8 FILE | homing generate -p -"
        ) from exc
    # Text piped from `echo` ends in a newline that is not meant to be part of the prompt.
    return text.removesuffix("\n")
