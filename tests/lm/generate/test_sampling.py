"""Generation with a cache equals reading everything again for every id."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from homing.errors import UsageError
from homing.lm.generate import generate
from homing.lm.generate.pick_token import TokenPicker, pick_tokens
from homing.lm.generate.sampling import fit_window
from homing.lm.model import Decoder
from homing.sampling_settings import SamplingSettings
from homing.wire.run_json import Model

SHAPE = Model("stock", "qwen3", 2, 32, 4, 2, 16, 48, 24, 100, False)


def built(arch: str = "qwen3", num_kv_heads: int = 2) -> Decoder:
    head_size = 16 if arch == "qwen3" else 8
    model = Decoder(dataclasses.replace(SHAPE, arch=arch, num_kv_heads=num_kv_heads, head_size=head_size))
    model.init_weights(0)
    with torch.no_grad():
        # Fresh weights hardly look at what came before; louder ones make a wrong cache visible.
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(4.0)
    return model


@torch.no_grad()
def by_full_forward(model: Decoder, prompt: list[int], num_tokens: int, sampling: SamplingSettings) -> list[int]:
    """The reference: no cache, the whole window anew each time."""
    picker = TokenPicker(sampling, prompt)
    context = model.shape.context
    window, out = list(prompt), []
    for _ in range(num_tokens):
        window = fit_window(window, context)
        out.append(pick_tokens(model(torch.tensor([window]))[:, -1], [picker])[0].id)
        window = [*window, out[-1]]
    return out


@pytest.mark.parametrize(("arch", "num_kv_heads"), [("llama", 4), ("qwen2", 2), ("qwen3", 1)])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSettings(temperature=0.0),
        SamplingSettings(temperature=1.0, top_k=0, seed=3),
        SamplingSettings(temperature=0.7, top_k=5, seed=3),
        SamplingSettings(top_p=0.8, repetition_penalty=1.3, frequency_penalty=0.5, seed=3),
    ],
    ids=["greedy", "all", "top-k", "penalties"],
)
def test_the_cache_changes_nothing(arch: str, num_kv_heads: int, sampling: SamplingSettings) -> None:
    model = built(arch, num_kv_heads)
    prompt = [5, 17, 99, 0, 42]
    found = list(generate(model, prompt, num_tokens=19, sampling=sampling))
    assert found == by_full_forward(model, prompt, 19, sampling)
    assert len(set(found)) > 1


@pytest.mark.parametrize("prompt_length", [1, 23, 24, 25, 60])
def test_a_text_longer_than_the_context_slides_on_by_half(prompt_length: int) -> None:
    model = built()
    prompt = [(7 * i) % 100 for i in range(prompt_length)]
    sampling = SamplingSettings(top_k=20, seed=1)
    found = list(generate(model, prompt, num_tokens=70, sampling=sampling))
    assert found == by_full_forward(model, prompt, 70, sampling)


def test_logits_through_the_cache_are_those_of_the_full_forward() -> None:
    model = built()
    ids = torch.randint(100, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full = model(ids)
        cache = model.new_cache(batch=2)
        parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 7), (7, 8), (8, 15), (15, 20))]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-5, rtol=1e-4)
    assert cache.length == 20


def test_of_a_prompt_only_the_last_position_is_held_against_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = built(), []
    plain = Decoder._logits

    def counted(self: Decoder, h: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(h.shape))
        return plain(self, h)

    monkeypatch.setattr(Decoder, "_logits", counted)
    assert len(list(generate(model, list(range(1, 9)), num_tokens=3))) == 3
    assert shapes == [(1, model.shape.width)] * 3


def test_one_seed_is_one_text_and_another_seed_another() -> None:
    model = built()
    settings = [SamplingSettings(temperature=1.0, top_k=0, seed=seed) for seed in (1, 1, 2)]
    texts = [list(generate(model, [1], num_tokens=30, sampling=sampling)) for sampling in settings]
    assert texts[0] == texts[1] != texts[2]


def test_sampling_does_not_touch_the_global_random_state_or_gradients() -> None:
    model = built()
    torch.manual_seed(0)
    stream = generate(model, [1], num_tokens=3, sampling=SamplingSettings(seed=1))
    next(stream)
    assert torch.is_grad_enabled()
    list(stream)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))


def test_a_stop_id_ends_the_text_and_is_not_given_out() -> None:
    model = built()
    free = list(generate(model, [1], num_tokens=20, sampling=SamplingSettings(temperature=0.0)))
    stop = free[7]
    stopped = list(generate(model, [1], num_tokens=20, sampling=SamplingSettings(temperature=0.0), stop_ids=[stop]))
    assert stopped == free[: free.index(stop)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt_ids": []}, "no tokens"),
        ({"prompt_ids": [100]}, "outside the vocabulary of 100"),
        ({"sampling": SamplingSettings(temperature=-1.0)}, "temperature is -1.0; it must be 0 or more"),
        ({"sampling": SamplingSettings(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingSettings(top_k=-1)}, "top_k"),
        ({"sampling": SamplingSettings(top_p=0.0)}, "top_p is 0.0; it must be more than 0 and at most 1"),
        ({"sampling": SamplingSettings(min_p=1.5)}, "min_p"),
        ({"sampling": SamplingSettings(repetition_penalty=0.0)}, "repetition_penalty"),
        ({"sampling": SamplingSettings(presence_penalty=float("inf"))}, "presence_penalty"),
        ({"sampling": SamplingSettings(logit_bias={100: 1.0})}, "logit_bias names token 100"),
        ({"num_tokens": -5}, "-5"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_the_call(changes: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {"prompt_ids": [1], "num_tokens": 1} | changes
    with pytest.raises(UsageError) as caught:
        generate(built(), **arguments)
    assert named in caught.value.why
