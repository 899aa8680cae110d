from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from small import make_rl_run, small_model
from streams import StreamsOnly

from homing.errors import RunFailed
from homing.lm.generate import generate
from homing.lm.model import Decoder, lora
from homing.lm.model.frozen_linear import lora_tensors
from homing.lm.rl.calculator import Calculator
from homing.lm.rl.named_random import BITS, draws, pick_rows
from homing.lm.rl.rollout import Sampler, lean_copy
from homing.lm.tokenizer import Tokenizer, load_tokenizer
from homing.sampling_settings import SamplingSettings
from homing.wire.run_json import Lora

PROMPTS = [[0, 1, 40, 41, 42, 43], [0, 5, 60], [0, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99], [0, 200]]
FAMILIES = {
    "one KV head for two": {},
    "as many KV heads": {"num_kv_heads": 2},
    "swift": {"family": "swift", "arch": "swift", "num_layers": 4, "is_tied": False},
}


def sampler(model: Decoder, **changes: Any) -> Sampler:
    settings = {"stop_ids": [], "calculator": None, "max_new_tokens": 10, "temperature": 1.0, "top_k": 0}
    return Sampler(model, **(settings | changes))


def drawn(num_prompts: int, repeats: int, num_new: int = 10) -> np.ndarray[Any, Any]:
    return np.stack([draws(num_new, "test", prompt, n) for prompt in range(num_prompts) for n in range(repeats)])


@pytest.fixture
def model(tmp_path: Path) -> Decoder:
    return small_model(make_rl_run(tmp_path / "data"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_likeliest_tokens_of_all_prompts_at_once_are_those_of_each_alone(tmp_path: Path, family: str) -> None:
    model = small_model(make_rl_run(tmp_path / "data"), **FAMILIES[family])
    with torch.no_grad():  # a fresh swift has its scales at the start; with them moved, nothing is left out by accident
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    together = sampler(model, temperature=0.0).sample(PROMPTS, drawn(4, 1))
    alone = [
        list(generate(model, prompt, num_tokens=10, sampling=SamplingSettings(temperature=0.0))) for prompt in PROMPTS
    ]
    assert [sample.ids for sample in together] == alone
    assert len({tuple(ids) for ids in alone}) > 1


def test_a_sample_depends_on_its_own_draws_and_not_on_who_is_sampled_with_it(model: Decoder) -> None:
    wanted = sampler(model).sample(PROMPTS, drawn(4, 3))
    in_batches = sampler(model, rows_at_a_time=3).sample(PROMPTS, drawn(4, 3))
    alone = sampler(model).sample(PROMPTS[2:3], drawn(4, 3)[6:9])
    assert [sample.ids for sample in wanted] == [sample.ids for sample in in_batches]
    assert [sample.ids for sample in alone] == [sample.ids for sample in wanted[6:9]]
    assert len({tuple(sample.ids) for sample in wanted}) == 12


ADAPTERS = {
    "lora": ("fp32", Lora(rank=4, alpha=8.0)),
    "dora": ("fp32", Lora(rank=4, alpha=8.0, is_dora=True)),
    "qlora": ("nf4", Lora(rank=4, alpha=8.0, targets=["q", "v", "down"])),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_with_frozen_weights_samples_follow_the_adapters_and_nothing_is_copied(model: Decoder, kind: str) -> None:
    storage, settings = ADAPTERS[kind]
    lora.freeze(model, storage)
    lora.add_lora(model, settings, seed=1)
    assert all(sampler(model.set_precision(precision))._reader is model for precision in ("bf16", "fp32"))
    made = sampler(model, temperature=0.0)
    before = [sample.ids for sample in made.sample(PROMPTS, drawn(4, 1))]
    for turn in (1, 2):  # DoRA's lengths, held in the first, are those of the second
        with torch.no_grad():
            for number, tensor in enumerate(lora_tensors(model).values()):
                tensor += 0.5 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(10 * number + turn))
        after = [sample.ids for sample in made.sample(PROMPTS, drawn(4, 1))]
        alone = [
            list(generate(model, prompt, num_tokens=10, sampling=SamplingSettings(temperature=0.0)))
            for prompt in PROMPTS
        ]
        assert after == alone != before, "by the adapters as they are now, computed token by token"
        before = after


def test_the_adapters_as_they_were_are_the_frozen_weights_alone_or_a_copy_and_what_learns_is_put_back(
    model: Decoder,
) -> None:
    ids = torch.tensor(PROMPTS[2:3])
    plain = model(ids).detach()
    lora.freeze(model, "fp32")
    lora.add_lora(model, Lora(rank=4, alpha=8.0, targets=["q", "up"]), seed=1)
    new, learned = lora.adapters_now(model), lora_tensors(model)
    assert set(new.values()) == {None}
    for tensor in learned.values():
        tensor += 0.3
    with torch.no_grad():
        moved = model(ids)
        later = lora.adapters_now(model)
        with lora.adapters_as(model, new):
            assert torch.allclose(model(ids), plain, atol=1e-6)
        assert torch.equal(model(ids), moved)
        for tensor in learned.values():
            tensor -= 0.2
        with lora.adapters_as(model, later):
            assert torch.equal(model(ids), moved)
        assert not torch.allclose(model(ids), moved, atol=1e-3)
    live = lora_tensors(model)
    assert all(live[name].data_ptr() == learned[name].data_ptr() for name in learned)


def test_bf16_samples_come_from_a_lean_copy_that_follows_the_weights(model: Decoder) -> None:
    model.set_precision("bf16")
    made = sampler(model)
    before = [sample.ids for sample in made.sample(PROMPTS, drawn(4, 1))]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    after = [sample.ids for sample in made.sample(PROMPTS, drawn(4, 1))]
    fresh = [sample.ids for sample in sampler(model).sample(PROMPTS, drawn(4, 1))]
    assert after == fresh != before


def test_weights_that_are_stored_as_they_are_computed_with_are_not_copied(model: Decoder) -> None:
    """As `load_for_use` loads them on a GPU: a second copy of a large model would not fit."""
    as_loaded = lean_copy(model, torch.bfloat16)
    made = sampler(as_loaded)
    assert made._reader is as_loaded
    wanted = sampler(model.set_precision("bf16")).sample(PROMPTS, drawn(4, 1))
    assert [sample.ids for sample in made.sample(PROMPTS, drawn(4, 1))] == [sample.ids for sample in wanted]


def test_a_sample_ends_with_its_stop_token_and_the_others_go_on(model: Decoder) -> None:
    free = sampler(model).sample(PROMPTS, drawn(4, 2))
    stop = free[3].ids[4]
    stopped = sampler(model, stop_ids=[stop]).sample(PROMPTS, drawn(4, 2))
    for before, after in zip(free, stopped, strict=True):
        cut = before.ids.index(stop) + 1 if stop in before.ids else len(before.ids)
        assert (after.ids, after.is_ended) == (before.ids[:cut], stop in before.ids)
    assert stopped[3].is_ended
    assert not all(sample.is_ended for sample in stopped)


def test_sampling_neither_sees_nor_moves_the_state_that_training_draws_from(model: Decoder) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = sampler(model).sample(PROMPTS, drawn(4, 1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert sampler(model).sample(PROMPTS, drawn(4, 1)) == first


def test_the_entropy_is_that_of_what_was_chosen_from(model: Decoder) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # every token is as likely
    (sample,) = sampler(model).sample(PROMPTS[:1], drawn(1, 1))
    assert sample.entropy == pytest.approx(np.log(model.shape.vocab_size), rel=1e-5)


def test_out_of_memory_lowers_the_rows_at_a_time_with_a_notice_and_keeps_the_samples_the_same(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = sampler(model).sample(PROMPTS, drawn(4, 3))
    messages: list[tuple[str, str]] = []
    poor = sampler(model, notify=lambda kind, text: messages.append((kind, text)))
    really = poor._sample

    def of_few(prompts: Any, draws_BN: Any, may_call: Any) -> Any:
        if len(draws_BN) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return really(prompts, draws_BN, may_call)

    monkeypatch.setattr(poor, "_sample", of_few)
    room = 3
    assert [sample.ids for sample in poor.sample(PROMPTS, drawn(4, 3))] == [sample.ids for sample in wanted]
    assert [kind for kind, _ in messages] == ["rollout_rows_lowered"] * 2
    room = 2
    with pytest.raises(RunFailed, match="Out of memory while sampling 3 answers to one prompt"):
        poor.sample(PROMPTS, drawn(4, 3))


@pytest.mark.parametrize("graphs", ["auto", "on"])
def test_graphs_that_cannot_be_captured_are_reported_or_refused_and_never_change_a_sample(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, graphs: str
) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    wanted = [sample.ids for sample in sampler(model).sample(PROMPTS, drawn(4, 1))]
    StreamsOnly().take_over(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    messages: list[tuple[str, str]] = []
    made = sampler(model, graphs=graphs, notify=lambda kind, text: messages.append((kind, text)))
    made._is_captured = True  # as on a card
    if graphs == "on":
        with pytest.raises(RunFailed, match="Capturing the sampling steps as CUDA graphs failed"):
            made.sample(PROMPTS, drawn(4, 1))
        return
    assert [sample.ids for sample in made.sample(PROMPTS, drawn(4, 1))] == wanted
    assert [kind for kind, _ in messages] == ["graphs_failed"]
    assert "not permitted" in messages[0][1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_card_a_captured_step_gives_what_plain_calls_give(tmp_path: Path, family: str) -> None:
    model = small_model(make_rl_run(tmp_path / "data"), **FAMILIES[family]).to("cuda").set_precision("bf16")
    plain, captured = sampler(model, graphs="off"), sampler(model, graphs="on")
    for turn in range(2):  # the second one runs graphs that the first one captured, on other weights
        wanted = [sample.ids for sample in plain.sample(PROMPTS, drawn(4, 3))]
        assert [sample.ids for sample in captured.sample(PROMPTS, drawn(4, 3))] == wanted, turn
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.neg_()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_on_a_card_a_captured_step_reads_the_adapters_as_they_are_now(tmp_path: Path, kind: str) -> None:
    storage, settings = ADAPTERS[kind]
    model = small_model(make_rl_run(tmp_path / "data")).to("cuda")
    lora.freeze(model, "bf16" if storage == "fp32" else storage)
    lora.add_lora(model, settings, seed=1)
    model.set_precision("bf16")
    plain, captured = sampler(model, graphs="off"), sampler(model, graphs="on")
    seen = []
    for turn in range(2):
        wanted = [sample.ids for sample in plain.sample(PROMPTS, drawn(4, 3))]
        assert [sample.ids for sample in captured.sample(PROMPTS, drawn(4, 3))] == wanted, turn
        seen.append(wanted)
        for tensor in lora_tensors(model).values():
            tensor += 0.5
    assert seen[0] != seen[1]


class Scripted(torch.nn.Module):
    """A model that generates the given ids, row by row, whatever it reads."""

    def __init__(self, model: Decoder, lines: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.inner, self.lines, self.said = model, lines, [0] * len(lines)
        self.shape, self.compute_dtype, self.device = model.shape, model.compute_dtype, model.device
        self.lora = None
        self.model, self.new_cache = model.model, model.new_cache

    def forward(self, ids: torch.Tensor, **rest: Any) -> torch.Tensor:
        logits = self.inner(ids, **rest) * 0.0
        for row, line in enumerate(self.lines):
            logits[row, -1, line[min(self.said[row], len(line) - 1)]] = 50.0
            self.said[row] += 1
        return logits


@pytest.fixture
def tokenizer(tmp_path: Path, model: Decoder) -> Tokenizer:
    return load_tokenizer(tmp_path / "data")


def test_the_result_of_a_tool_call_follows_in_the_same_turn_and_is_not_trained_on(
    model: Decoder, tokenizer: Tokenizer
) -> None:
    calculator, end = Calculator(tokenizer), tokenizer.specials["<|im_end|>"]
    call, call_end = tokenizer.specials["<|tool_call|>"], tokenizer.specials["<|tool_call_end|>"]
    said = [call, *tokenizer.encode("6*7"), call_end]
    # While the calculator speaks, the model's own choices are passed over: four tokens of them here.
    line = [*said, *tokenizer.encode("xxxx"), *tokenizer.encode("ok"), end]
    said_by = cast(Decoder, Scripted(model, [line, line]))
    made = sampler(said_by, stop_ids=[end], calculator=calculator, max_new_tokens=20)
    with_tool, without = made.sample([[0, 1, 2]] * 2, drawn(2, 1, 20), may_call=[True, False])
    assert tokenizer.decode(with_tool.ids) == (
        "<|tool_call|>6*7<|tool_call_end|><|tool_result|>42<|tool_result_end|>ok<|im_end|>"
    )
    assert with_tool.is_own == [True] * 5 + [False] * 4 + [True] * 3
    assert with_tool.is_ended
    assert tokenizer.decode(without.ids) == "<|tool_call|>6*7<|tool_call_end|>xxxxok<|im_end|>"
    assert all(without.is_own)


def test_a_call_that_ends_the_turn_is_answered_by_a_turn_of_the_tool(model: Decoder, tokenizer: Tokenizer) -> None:
    calculator, end = Calculator(tokenizer), tokenizer.specials["<|im_end|>"]
    call, call_end = tokenizer.specials["<|tool_call|>"], tokenizer.specials["<|tool_call_end|>"]
    said = [call, *tokenizer.encode('{"arguments": {"e": "1/4"}}'), call_end, end]
    messages = "\n<|im_start|>tool\n<|tool_result|>0.25<|tool_result_end|><|im_end|>\n<|im_start|>assistant\n"
    num_reported = 1 + 1 + 5 + 1 + 4 + 1 + 1 + 1 + 1 + 10
    line = [*said, *tokenizer.encode("x" * num_reported), *tokenizer.encode("ok"), end]
    run_length = len(line) + 4
    wide = small_model_with_context(model, 96)
    said_by = cast(Decoder, Scripted(wide, [line]))
    made = sampler(said_by, stop_ids=[end], calculator=calculator, max_new_tokens=run_length)
    (sample,) = made.sample([[0, 1, 2]], drawn(1, 1, run_length))
    assert tokenizer.decode(sample.ids) == tokenizer.decode(said) + messages + "ok<|im_end|>"
    assert sample.is_own == [True] * len(said) + [False] * num_reported + [True] * 3
    assert sample.is_ended


def small_model_with_context(model: Decoder, context: int) -> Decoder:
    wide = Decoder(dataclasses.replace(model.shape, context=context))
    wide.load_weights(model.weights_for_disk())
    return wide


def test_picking_follows_the_probabilities_and_takes_no_token_outside_the_likeliest_k() -> None:
    logits_BV = torch.tensor([[0.0, 1.0, 2.0, -9.0]]).repeat(20_000, 1)
    draws_B = torch.from_numpy(draws(20_000, "many"))
    shares = torch.bincount(pick_rows(logits_BV, draws_B, temperature=1.0, top_k=0), minlength=4) / 20_000
    assert torch.allclose(shares, torch.softmax(logits_BV[0], dim=0), atol=0.01)
    picked = pick_rows(logits_BV, draws_B, temperature=1.0, top_k=2)
    assert set(picked.tolist()) == {1, 2}
    assert pick_rows(logits_BV[:1], draws_B[:1], temperature=0.0, top_k=0).tolist() == [2]


def test_the_smallest_and_largest_draw_pick_tokens_that_can_be() -> None:
    logits_BV = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]] * 2)
    assert pick_rows(logits_BV, torch.tensor([0, 2**BITS - 1]), temperature=1.0, top_k=0).tolist() == [1, 2]
    broken = torch.full((1, 4), float("nan"))
    assert 0 <= int(pick_rows(broken, torch.tensor([5]), temperature=1.0, top_k=0)) < 4


def test_draws_are_the_same_on_every_machine() -> None:
    # Written down once: another numpy that gave others would break every resume.
    assert draws(4, "sample", 7, 0, 0).tolist() == [995630897, 1302521429, 2126341008, 263366720]
