"""Samples at a checkpoint: samples/<phase>-<step>.txt, the same text for the same weights and seed.

Sampling has a generator of its own: it neither sees nor moves the state that training draws from.
"""

from __future__ import annotations

import os
from pathlib import Path

from homing.lm.generate import complete
from homing.lm.model import Decoder
from homing.lm.tokenizer import Tokenizer
from homing.wire import names
from homing.wire.run import Sampling

__all__ = ["sample_texts", "write_samples"]


def sample_texts(model: Decoder, tokenizer: Tokenizer, sampling: Sampling, *, seed: int) -> list[tuple[str, str]]:
    """(prompt, what the model made of it); with no prompts, one text from the start of a document."""
    texts = []
    for number, prompt in enumerate(sampling.prompts or [""]):
        pieces = complete(
            model,
            tokenizer,
            prompt,
            num_tokens=sampling.num_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            seed=seed + number,
        )
        texts.append((prompt, "".join(pieces)))
    return texts


def write_samples(run_dir: Path, phase: str, step: int, texts: list[tuple[str, str]]) -> Path:
    folder = run_dir / names.SAMPLES
    folder.mkdir(exist_ok=True)
    path = folder / f"{phase}-{step:08d}.txt"
    aside = path.with_name(f".{path.name}.aside")
    aside.write_text("".join(f"[{prompt}]{text}\n\n" for prompt, text in texts), encoding="utf-8")
    os.replace(aside, path)
    return path
