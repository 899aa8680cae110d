"""Samples: the same for the same weights and seed, and no trace in the state that training draws from."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import make_run

from homing.lm.evals.samples import sample_texts, write_samples
from homing.lm.model import Decoder
from homing.lm.tokenizer import load_tokenizer
from homing.wire.run import Sampling


def test_a_seed_gives_one_text_and_the_random_state_is_untouched(tiny_data: Path) -> None:
    model, tokenizer = Decoder(make_run(tiny_data).model), load_tokenizer(tiny_data)
    model.init_weights(1)
    before = torch.get_rng_state()
    first = sample_texts(model, tokenizer, Sampling(prompts=["the", "a"], num_tokens=60), seed=4)
    assert first == sample_texts(model, tokenizer, Sampling(prompts=["the", "a"], num_tokens=60), seed=4)
    assert first != sample_texts(model, tokenizer, Sampling(prompts=["the", "a"], num_tokens=60), seed=5)
    assert torch.equal(before, torch.get_rng_state())


def test_without_prompts_one_text_begins_a_document(tiny_data: Path, tmp_path: Path) -> None:
    model = Decoder(make_run(tiny_data).model)
    model.init_weights(1)
    texts = sample_texts(model, load_tokenizer(tiny_data), Sampling(num_tokens=5), seed=0)
    assert [prompt for prompt, _ in texts] == [""]
    path = write_samples(tmp_path, "pretrain", 1200, texts)
    assert path == tmp_path / "samples/pretrain-00001200.txt"
    assert path.read_text(encoding="utf-8").startswith("[]")
