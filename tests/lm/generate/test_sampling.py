"""Generation with a cache equals reading everything again for every id."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from homing.errors import UsageError
from homing.lm.generate import generate
from homing.lm.generate.sampling import fit_window, pick
from homing.lm.model import Decoder
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
def by_full_forward(
    model: Decoder, prompt: list[int], num_tokens: int, *, temperature: float, top_k: int, seed: int
) -> list[int]:
    """The reference: no cache, the whole window anew each time."""
    generator = torch.Generator().manual_seed(seed)
    context = model.shape.context
    window, out = list(prompt), []
    for _ in range(num_tokens):
        window = fit_window(window, context)
        logits = model(torch.tensor([window]))[0, -1]
        out.append(pick(logits, temperature=temperature, top_k=top_k, generator=generator))
        window = [*window, out[-1]]
    return out


@pytest.mark.parametrize(("arch", "num_kv_heads"), [("llama", 4), ("qwen2", 2), ("qwen3", 1)])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (1.0, 0), (0.7, 5)])
def test_the_cache_changes_nothing(arch: str, num_kv_heads: int, temperature: float, top_k: int) -> None:
    model = built(arch, num_kv_heads)
    settings = {"temperature": temperature, "top_k": top_k, "seed": 3}
    prompt = [5, 17, 99, 0, 42]
    found = list(generate(model, prompt, num_tokens=19, **settings))
    assert found == by_full_forward(model, prompt, 19, **settings)
    assert len(set(found)) > 1


@pytest.mark.parametrize("prompt_length", [1, 23, 24, 25, 60])
def test_a_text_longer_than_the_context_slides_on_by_half(prompt_length: int) -> None:
    model = built()
    prompt = [(7 * i) % 100 for i in range(prompt_length)]
    settings = {"temperature": 0.8, "top_k": 20, "seed": 1}
    found = list(generate(model, prompt, num_tokens=70, **settings))
    assert found == by_full_forward(model, prompt, 70, **settings)


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
    texts = [list(generate(model, [1], num_tokens=30, temperature=1.0, top_k=0, seed=s)) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_sampling_does_not_touch_the_global_random_state_or_gradients() -> None:
    model = built()
    torch.manual_seed(0)
    stream = generate(model, [1], num_tokens=3, seed=1)
    next(stream)
    assert torch.is_grad_enabled()
    list(stream)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))


def test_a_stop_id_ends_the_text_and_is_not_given_out() -> None:
    model = built()
    free = list(generate(model, [1], num_tokens=20, temperature=0.0))
    stop = free[7]
    stopped = list(generate(model, [1], num_tokens=20, temperature=0.0, stop_ids=[stop]))
    assert stopped == free[: free.index(stop)]


def test_top_k_never_picks_outside_the_k_likeliest() -> None:
    logits = torch.tensor([1.0, 5.0, 4.0, 4.0, 4.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    picked = {pick(logits, temperature=2.0, top_k=3, generator=generator) for _ in range(300)}
    assert len(picked) == 3
    assert picked < {1, 2, 3, 4}


def test_sampling_follows_the_softmax_at_its_temperature() -> None:
    logits, generator = torch.tensor([0.0, 1.0, 2.0]), torch.Generator().manual_seed(0)
    counts = torch.zeros(3)
    for _ in range(4000):
        counts[pick(logits, temperature=0.5, top_k=0, generator=generator)] += 1
    torch.testing.assert_close(counts / 4000, torch.softmax(logits / 0.5, 0), atol=0.03, rtol=0)


def test_temperature_zero_takes_the_likeliest() -> None:
    assert pick(torch.tensor([0.0, 3.0, 2.9]), temperature=0.0, top_k=0, generator=torch.Generator()) == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt_ids": []}, "no tokens"),
        ({"prompt_ids": [100]}, "outside the vocabulary of 100"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top-k"),
        ({"num_tokens": -5}, "-5"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_the_call(changes: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {"prompt_ids": [1], "num_tokens": 1} | changes
    with pytest.raises(UsageError) as caught:
        generate(built(), **arguments)
    assert named in caught.value.why
