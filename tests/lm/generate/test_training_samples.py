"""Samples: the same for the same weights and seed, and no trace in the state that training draws from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import make_run

from homing.lm.generate import complete
from homing.lm.generate.chat_and_text import sample_texts, write_samples
from homing.lm.model import Decoder, frozen_linear, lora
from homing.lm.model.frozen_linear import lora_tensors
from homing.lm.tokenizer import load_tokenizer
from homing.sampling_settings import SamplingSettings
from homing.wire.run_json import Lora, Sampling


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


def test_what_dora_needs_of_the_weights_is_computed_once_and_not_at_each_token(
    tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = Decoder(make_run(tiny_data).model), load_tokenizer(tiny_data)
    model.init_weights(1)
    lora.freeze(model, "fp32")
    lora.add_lora(model, Lora(rank=4, alpha=8.0, targets=["q", "up"], is_dora=True), seed=1)
    for tensor in lora_tensors(model).values():
        tensor += 0.3
    one_by_one = [
        "".join(complete(model, tokenizer, prompt, num_tokens=20, sampling=SamplingSettings(seed=4 + n)))
        for n, prompt in enumerate("ab")
    ]
    really, asked = frozen_linear.row_norms, list[frozen_linear.FrozenWeight]()

    def counted(weight: frozen_linear.FrozenWeight, adapter: frozen_linear.Adapter) -> torch.Tensor:
        asked.append(weight)
        return really(weight, adapter)

    monkeypatch.setattr(frozen_linear, "row_norms", counted)
    texts = sample_texts(model, tokenizer, Sampling(prompts=["a", "b"], num_tokens=20), seed=4)
    assert [text for _, text in texts] == one_by_one
    assert len(asked) == 2 * model.shape.num_layers
    with torch.no_grad():
        model(torch.tensor([[1, 2]]))
    assert len(asked) == 4 * model.shape.num_layers, "afterwards they follow what is learned again"
