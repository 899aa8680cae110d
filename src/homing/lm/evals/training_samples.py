"""Samples at a checkpoint, in samples/<phase>-<step>.txt: the same text for the same weights and seed.

A model trained on conversations is prompted in ChatML turns; any other continues the prompt, and so does one with a
tokenizer that lacks the turn markers (`lacks_turns`), which the caller should report. Sampling has its own generator
and does not affect the random state of training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from homing.lm.generate import ChatTurns, complete, decode_stream, generate
from homing.lm.generate.sampling import warn
from homing.lm.model import Decoder, lora
from homing.lm.tokenizer import Tokenizer
from homing.lm.tokenizer.specials import lacks_turns
from homing.wire import file_names
from homing.wire.run_json import Sampling

__all__ = ["sample_texts", "write_samples"]

_GREETING = "Hello! Who are you?"  # if the run file names no prompt


def sample_texts(
    model: Decoder, tokenizer: Tokenizer, sampling: Sampling, *, seed: int, is_chat: bool = False,
    notify: Callable[[str], None] = warn,
) -> list[tuple[str, str]]:  # fmt: skip
    """Return (prompt, generated text) pairs; without prompts, one text from the start of a document, or one answer.

    `tell` is called with a warning if generation is slower than it should be.
    """
    is_turn = is_chat and not lacks_turns(tokenizer.specials)
    texts = []
    with lora.lengths_held(model):
        # One at a time: matmuls over several rows round differently, and a text would depend on the others.
        for number, prompt in enumerate(sampling.prompts or [_GREETING if is_turn else ""]):
            chunks = (_answer if is_turn else _continuation)(model, tokenizer, prompt, sampling, seed + number, notify)
            texts.append((prompt, "".join(chunks)))
    return texts


def _continuation(
    model: Decoder, tokenizer: Tokenizer, prompt: str, sampling: Sampling, seed: int, notify: Callable[[str], None]
) -> Iterator[str]:
    return complete(
        model, tokenizer, prompt, num_tokens=sampling.num_tokens, temperature=sampling.temperature,
        top_k=sampling.top_k, seed=seed, notify=notify,
    )  # fmt: skip


def _answer(
    model: Decoder, tokenizer: Tokenizer, prompt: str, sampling: Sampling, seed: int, notify: Callable[[str], None]
) -> Iterator[str]:
    turns = ChatTurns(tokenizer)
    picked = generate(
        model, turns.ask(prompt), num_tokens=sampling.num_tokens, temperature=sampling.temperature,
        top_k=sampling.top_k, seed=seed, stop_ids=turns.stop_ids, notify=notify,
    )  # fmt: skip
    return decode_stream(tokenizer, picked)


def write_samples(run_dir: Path, phase: str, step: int, texts: list[tuple[str, str]]) -> Path:
    folder = run_dir / file_names.SAMPLES
    folder.mkdir(exist_ok=True)
    path = folder / f"{phase}-{step:08d}.txt"
    temporary = path.with_name(f".{path.name}.aside")
    temporary.write_text("".join(f"[{prompt}]{text}\n\n" for prompt, text in texts), encoding="utf-8")
    os.replace(temporary, path)
    return path
