"""`homing generate`: stream the continuation of a prompt to stdout."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from homing.api.extras import need
from homing.api.lookup.base_weights import find_base
from homing.api.lookup.find_models import find_model
from homing.cli import output
from homing.cli.complete import run_words
from homing.cli.options import Base, Json
from homing.errors import UsageError
from homing.units import format_rate

__all__ = ["command"]

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run name (its newest finished run), NAME@RUN, or a folder; default: the newest run.",
        autocompletion=run_words,
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Stop after this many tokens.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, max=100.0, help="Sampling temperature; 0 always takes the likeliest token.")
]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="Sample from this many likeliest tokens; 0 for all.")]
Seed = Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same text.")]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint", "--step", metavar="best|latest|STEP", help="Checkpoint to load; default: best, else latest."
    ),
]
Phase = Annotated[
    str | None, typer.Option(metavar="PHASE", help="pretrain, mid, sft or rl; default: the run's last phase.")
]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda|mps", help="Device to run on.")]


def command(
    run: Model = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to complete; - reads stdin.")] = "",
    tokens: Tokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    seed: Seed = None,
    checkpoint: Checkpoint = None,
    phase: Phase = None,
    device: Device = "auto",
    base: Base = "",
    json: Json = False,
) -> None:
    """Complete a prompt with a trained model. Without --prompt the model starts a new document."""
    need("lm", verb="generate")
    folder = find_model(run, checkpoint=checkpoint, phase=phase)
    text = _read_prompt(prompt)

    from homing.lm.device import describe_device
    from homing.lm.generate import decode_stream, generate, load_for_use

    model, tokenizer = load_for_use(folder, device, base=find_base(folder, base))
    seed = secrets.randbelow(2**31) if seed is None else seed
    where, end_of_text = describe_device(model.device), tokenizer.end_of_text_id
    output.say(f"{folder} on {where}, temperature {temperature:g}, top-k {top_k}, seed {seed}")
    prompt_ids = [end_of_text, *tokenizer.encode(text)]
    if len(prompt_ids) > model.shape.context:
        read = model.shape.context // 2
        output.say(f"The prompt has {len(prompt_ids):,} tokens; only the last {read:,} fit the model's context.")
    picked: list[int] = []
    settings: dict[str, Any] = {"num_tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    ids = generate(model, prompt_ids, stop_ids=tokenizer.stop_ids, **settings)
    _show(text, is_json=json)
    chunks, started = [], time.perf_counter()
    for piece in decode_stream(tokenizer, _noted(ids, picked)):
        chunks.append(piece)
        _show(piece, is_json=json)
    _show("\n", is_json=json)
    seconds = time.perf_counter() - started
    ending = "the model ended the text" if len(picked) < tokens else "--tokens reached"
    output.say(f"{len(picked)} tokens at {format_rate(len(picked) / seconds)}; {ending}")
    document: dict[str, Any] = {"checkpoint": str(folder), "device": where, "prompt": text, "text": "".join(chunks)}
    document |= {"num_tokens": len(picked), "is_ended": len(picked) < tokens}
    document |= {"temperature": temperature, "top_k": top_k, "seed": seed}
    output.emit("generate/1", document)


def _show(text: str, *, is_json: bool) -> None:
    if not is_json:
        print(text, end="", flush=True)


def _noted(ids: Iterable[int], picked: list[int]) -> Iterator[int]:
    for i in ids:
        picked.append(i)
        yield i


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        try:
            prompt.encode()
        except UnicodeEncodeError as exc:  # raw bytes from the shell
            raise UsageError(
                what="The prompt is not UTF-8.", why=str(exc), fix="iconv -t utf-8 FILE | homing generate -p -"
            ) from exc
        return prompt
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as exc:
        raise UsageError(
            what="The prompt on stdin is not UTF-8.", why=str(exc), fix="iconv -t utf-8 FILE | homing generate -p -"
        ) from exc
    # `echo text |` ends in a newline that is not meant as part of the prompt.
    return text.removesuffix("\n")
