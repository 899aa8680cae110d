"""Samples at a checkpoint: samples/<phase>-<step>.txt, the same text for the same weights and seed.

A model that learns from conversations is asked in turns of ChatML; any other goes on from the prompt, and so does one
whose tokenizer lacks their marks (`lacks_turns`), which whoever asks for samples should say. Sampling has a generator
of its own: it neither sees nor moves the state that training draws from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from homing.lm.generate import ChatTurns, complete, generate, text_pieces
from homing.lm.generate.sample import warn
from homing.lm.model import Decoder, lora
from homing.lm.tokenizer import Tokenizer
from homing.lm.tokenizer.specials import lacks_turns
from homing.wire import names
from homing.wire.run import Sampling

__all__ = ["sample_texts", "write_samples"]

_GREETING = "Hello! Who are you?"  # where the run file names no prompt


def sample_texts(
    model: Decoder, tokenizer: Tokenizer, sampling: Sampling, *, seed: int, is_chat: bool = False,
    tell: Callable[[str], None] = warn,
) -> list[tuple[str, str]]:  # fmt: skip
    """(prompt, what the model made of it); with no prompts, one text from the start of a document, or one answer.
    `tell`: called when it goes slower than it should."""
    is_turn = is_chat and not lacks_turns(tokenizer.specials)
    texts = []
    with lora.lengths_held(model):
        # One after the other: products of several rows at once round otherwise, and a text would hang on the others.
        for number, prompt in enumerate(sampling.prompts or [_GREETING if is_turn else ""]):
            pieces = (_answer if is_turn else _continuation)(model, tokenizer, prompt, sampling, seed + number, tell)
            texts.append((prompt, "".join(pieces)))
    return texts


def _continuation(
    model: Decoder, tokenizer: Tokenizer, prompt: str, sampling: Sampling, seed: int, tell: Callable[[str], None]
) -> Iterator[str]:
    return complete(
        model, tokenizer, prompt, num_tokens=sampling.num_tokens, temperature=sampling.temperature,
        top_k=sampling.top_k, seed=seed, tell=tell,
    )  # fmt: skip


def _answer(
    model: Decoder, tokenizer: Tokenizer, prompt: str, sampling: Sampling, seed: int, tell: Callable[[str], None]
) -> Iterator[str]:
    turns = ChatTurns(tokenizer)
    picked = generate(
        model, turns.ask(prompt), num_tokens=sampling.num_tokens, temperature=sampling.temperature,
        top_k=sampling.top_k, seed=seed, stop_ids=turns.stop_ids, tell=tell,
    )  # fmt: skip
    return text_pieces(tokenizer, picked)


def write_samples(run_dir: Path, phase: str, step: int, texts: list[tuple[str, str]]) -> Path:
    folder = run_dir / names.SAMPLES
    folder.mkdir(exist_ok=True)
    path = folder / f"{phase}-{step:08d}.txt"
    aside = path.with_name(f".{path.name}.aside")
    aside.write_text("".join(f"[{prompt}]{text}\n\n" for prompt, text in texts), encoding="utf-8")
    os.replace(aside, path)
    return path
