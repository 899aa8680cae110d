"""`homing generate`: stream the continuation of a prompt to stdout."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from homing.api.models.generate_text import generate
from homing.cli import output
from homing.cli.model_options import Checkpoint, Device, Model, Phase, Seed, Stop, Tokens, takes_sampling
from homing.cli.options import Base, Json
from homing.errors import UsageError
from homing.sampling_settings import DEFAULT_SAMPLING, SamplingSettings
from homing.units import format_rate

__all__ = ["command"]


@takes_sampling
def command(
    run: Model = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to complete; - reads stdin.")] = "",
    tokens: Tokens = 200,
    sampling: SamplingSettings = DEFAULT_SAMPLING,
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
        sampling=sampling,
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
    ending = {"model": "the model ended the text", "stop": "--stop reached", "tokens": "--tokens reached"}[begun.ending]
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
