"""The step of fixed shapes, captured or not, gives the texts of a cache that grows; see also rl/test_decode.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator
from typing import Any, cast

import pytest
import torch
from streams import StreamsOnly

from homing.lm import cuda_graphs
from homing.lm.decoding_step import REACH, reach_for, room_for
from homing.lm.generate import generate, sampling
from homing.lm.generate.sampling import WORTH
from homing.lm.model import Decoder, lora
from homing.lm.model.frozen_linear import lora_tensors
from homing.sampling_settings import SamplingSettings
from homing.wire.run_json import Lora, Model

SHAPE = Model("stock", "qwen3", 2, 32, 4, 2, 16, 48, 3 * REACH, 100, False)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3, two heads for one": {},
    "qwen3, four heads for one": {"num_kv_heads": 1},
    "llama, as many": {"arch": "llama", "num_kv_heads": 4, "head_size": 8},
    "qwen2": {"arch": "qwen2", "head_size": 8, "is_tied": True},
    "swift": {"family": "swift", "arch": "swift", "num_layers": 4, "num_kv_heads": 4},
    "swift, two heads for one": {"family": "swift", "arch": "swift", "num_layers": 4},
}
WIDE: dict[str, dict[str, Any]] = {
    name: MODELS[name] | {"width": 256, "num_heads": 2, "num_kv_heads": 2, "head_size": 128, "ffn_width": 512}
    for name in ("qwen3, two heads for one", "swift")
}
ADAPTERS = {
    "lora": ("lora", Lora(rank=4, alpha=8.0)),
    "dora": ("lora", Lora(rank=4, alpha=8.0, is_dora=True)),
    "qlora": ("qlora", Lora(rank=4, alpha=8.0, targets=["q", "v", "down"])),
}
GREEDY = {"sampling": SamplingSettings(temperature=0.0)}
DRAWN = {"sampling": SamplingSettings(temperature=0.9, top_k=20, seed=3)}
on_a_card = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def built(**changes: Any) -> Decoder:
    model = Decoder(dataclasses.replace(SHAPE, **changes))
    model.init_weights(0)
    with torch.no_grad():  # fresh weights hardly look back: louder ones make a wrong cache visible
        for name, parameter in model.named_parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            if "proj" in name:
                parameter.mul_(2.0)
    return model


def adapted(kind: str, device: str = "cpu", precision: str = "fp32") -> Decoder:
    method, settings = ADAPTERS[kind]
    model = built().to(device)
    lora.freeze(model, lora.storage_for(method, precision))
    lora.add_lora(model, settings, seed=1)
    for number, tensor in enumerate(lora_tensors(model).values()):
        drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
        tensor += 0.2 * drawn.to(device)
    return model.set_precision(precision)


def text(model: Decoder, *, num_prompt: int = 5, num_tokens: int = 40, **settings: Any) -> list[int]:
    prompt = [(7 * place + 1) % 100 for place in range(num_prompt)]
    return list(generate(model, prompt, num_tokens=num_tokens, **settings))


def compare_logits(model: Decoder, *, tolerance: float) -> None:
    ids = torch.randint(100, (2 * REACH,), generator=torch.Generator().manual_seed(0)).tolist()
    parts = [ids[:9], *([number] for number in ids[9:])]
    steps, grown = sampling.Reader(model, capacity=len(ids), notify=pytest.fail), model.new_cache()
    for left, part in zip(range(len(parts), 0, -1), parts, strict=True):
        with torch.no_grad():
            wanted_V = model.next_logits(torch.tensor([part], device=model.device), grown)[0]
        torch.testing.assert_close(steps.read(part, num_to_come=left), wanted_V, atol=tolerance, rtol=tolerance)
    steps.close()


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of fixed shapes, of which none is captured."""
    monkeypatch.setattr(sampling, "is_stepped", lambda device: True)
    monkeypatch.setattr(sampling, "WORTH", REACH + 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamsOnly]:
    """Steps of fixed shapes, captured as on a card."""
    cuda = StreamsOnly()
    cuda.take_over(monkeypatch)
    monkeypatch.setattr(sampling, "is_stepped", lambda device: True)
    yield cuda
    assert cuda.current == "main"
    assert cuda.can_draw


def test_reach_has_few_values_and_at_most_half_of_it_is_in_vain() -> None:
    values = {reach_for(num_places) for num_places in range(1, 32_769)}
    assert sorted(values)[:6] == [REACH * number for number in (1, 2, 3, 4, 6, 8)]
    assert len(values) == 2 * 8
    for num_places in range(1, 5_000):
        assert num_places <= reach_for(num_places) <= 1.5 * room_for(num_places)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", MODELS)
def test_steps_of_fixed_shapes_give_the_text_of_a_cache_that_grows(
    name: str, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    model = built(**MODELS[name])
    wanted = text(model, num_prompt=REACH - 20, **settings)
    assert len(set(wanted)) > (4 if settings == DRAWN else 1), "one id again and again would hide a wrong place"
    request.getfixturevalue("plain")
    assert text(model, num_prompt=REACH - 20, **settings) == wanted


@pytest.mark.slow
@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("name", MODELS)
def test_their_logits_are_those_of_a_cache_that_grows(name: str) -> None:
    compare_logits(built(**MODELS[name]), tolerance=1e-4)


@pytest.mark.parametrize("name", ADAPTERS)
def test_captured_steps_match_with_frozen_weights(name: str, request: pytest.FixtureRequest) -> None:
    model = adapted(name)
    wanted = text(model, **DRAWN)
    request.getfixturevalue("plain")
    assert text(model, **DRAWN) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("num_prompt", [1, 2, 30, 32, 33, 80])
@pytest.mark.parametrize("name", ["qwen3, two heads for one", "swift"])
def test_captured_steps_match_after_the_context_is_full_and_half_of_it_is_read_again(
    name: str, num_prompt: int, request: pytest.FixtureRequest
) -> None:
    model = built(**MODELS[name], context=32)
    wanted = text(model, num_prompt=num_prompt, num_tokens=70, **DRAWN)
    request.getfixturevalue("plain")
    assert text(model, num_prompt=num_prompt, num_tokens=70, **DRAWN) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3, two heads for one", "swift"])
def test_a_captured_text_is_the_plain_one_past_every_reach_and_past_the_context(
    name: str, cuda: StreamsOnly, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(**MODELS[name])
    with monkeypatch.context() as patched:
        patched.setattr(sampling, "is_stepped", lambda device: False)
        wanted = text(model, num_prompt=REACH - 30, num_tokens=3 * REACH, **DRAWN)
    assert text(model, num_prompt=REACH - 30, num_tokens=3 * REACH, **DRAWN) == wanted
    # Past the context it is read again from its half on, where the graphs are there already.
    assert cuda.log.count("captured on side, thread_local") == 3
    # The first id comes from reading the prompt, and so does the one where it is read again.
    assert cuda.log.count("replayed") == 3 * REACH - 2


@pytest.mark.parametrize(
    ("num_prompt", "num_tokens", "num_captured"),
    [(5, WORTH, 0), (5, WORTH + 1, 1), (REACH - WORTH + 1, 2 * WORTH, 1), (REACH - WORTH, 3 * WORTH, 2)],
)  # fmt: skip
def test_a_few_ids_are_not_worth_capturing(
    cuda: StreamsOnly, num_prompt: int, num_tokens: int, num_captured: int
) -> None:
    """The last ids of a text, or before the next reach, are computed as plain calls."""
    text(built(), num_prompt=num_prompt, num_tokens=num_tokens, **DRAWN)
    assert cuda.log.count("captured on side, thread_local") == num_captured


def test_graphs_are_freed_after_the_text_and_when_the_caller_stops_early(cuda: StreamsOnly) -> None:
    model = built()
    text(model, **DRAWN)
    assert cuda.log[-1] == "emptied"
    stream = cast(Generator[int, None, None], generate(model, [1, 2], num_tokens=40, **DRAWN))
    assert [next(stream) for _ in range(20)]
    assert cuda.log[-1] == "replayed"
    stream.close()  # as Python does when it is dropped
    assert cuda.log[-1] == "emptied"


def test_a_failed_capture_is_reported_and_the_text_is_the_same(cuda: StreamsOnly) -> None:
    model, messages = built(), list[str]()
    wanted = text(model, **DRAWN)
    cuda.log.clear()
    cuda.is_failing = True
    assert text(model, notify=messages.append, **DRAWN) == wanted
    assert messages == [
        "warning: CUDA graphs failed; generation continues without them and is slower. "
        "operation failed due to a previous error during capture"
    ]
    assert "replayed" not in cuda.log
    assert cuda.log.count("emptied") == 1


def test_a_failed_capture_is_logged_as_a_warning_by_default(
    cuda: StreamsOnly, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.is_failing = True
    text(built(), **DRAWN)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "CUDA graphs failed" in caplog.text


def test_on_a_processor_nothing_is_captured_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert len(text(built(), **DRAWN)) == 40
    assert not caplog.records


# -- on a card ---------------------------------------------------------------------------------------------------------


def captured_and_plain(model: Decoder, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[list[int], list[int]]:
    """A failed capture would be reported, which fails the test."""
    captures: list[str] = []
    really = cuda_graphs.Graphs.capture

    def counted(self: Any, compute: Any) -> Any:
        captures.append("one")
        return really(self, compute)

    with monkeypatch.context() as patched:
        patched.setattr(cuda_graphs.Graphs, "capture", counted)
        found = text(model, notify=pytest.fail, **settings)
        assert captures
        captures.clear()
        patched.setattr(sampling, "WORTH", REACH + 1)
        wanted = text(model, notify=pytest.fail, **settings)
        assert not captures
    return found, wanted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("settings", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=on_a_card) for name in MODELS])
def test_on_a_card_a_captured_text_is_the_plain_one(
    name: str, settings: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(**MODELS[name]).to("cuda").set_precision(precision)
    found, wanted = captured_and_plain(model, monkeypatch, num_prompt=20, num_tokens=3 * REACH, **settings)
    assert found == wanted
    assert len(set(found)) > 1


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_a_card) for name in WIDE])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_on_a_card_also_with_the_kernels_that_wide_models_have(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(**WIDE[name]).to("cuda").set_precision(precision)
    found, wanted = captured_and_plain(model, monkeypatch, num_tokens=REACH + 40, **DRAWN)
    assert found == wanted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=on_a_card) for name in ADAPTERS])
def test_on_cuda_captured_steps_match_with_frozen_weights(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(name, "cuda", precision)
    with lora.lengths_held(model):
        found, wanted = captured_and_plain(model, monkeypatch, num_tokens=2 * REACH, **DRAWN)
    assert found == wanted


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_a_card) for name in MODELS])
def test_on_a_card_captured_steps_have_the_logits_of_a_cache_that_grows(name: str) -> None:
    compare_logits(built(**MODELS[name]).to("cuda"), tolerance=2e-3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=on_a_card) for name in ("qwen3, two heads for one", "swift")]
)
def test_on_a_card_nothing_is_held_after_a_text(name: str) -> None:
    model = built(**MODELS[name]).to("cuda").set_precision("bf16")
    text(model, notify=pytest.fail, **DRAWN)  # what is set up once for all stays
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(3):
        text(model, notify=pytest.fail, **DRAWN)
    assert torch.cuda.memory_allocated() == before[0]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before[1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=on_a_card) for name in ("qwen3, two heads for one", "swift")]
)
def test_on_a_card_a_capture_that_fails_leaves_a_card_that_works(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, messages = built(**MODELS[name]).to("cuda").set_precision("bf16"), list[str]()
    wanted = text(model, notify=pytest.fail, **DRAWN)
    plain = Decoder._logits

    def waits(self: Decoder, h: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            h.sum().item()  # the host waits for the card: not while it captures
        return plain(self, h)

    with monkeypatch.context() as patched:
        patched.setattr(Decoder, "_logits", waits)
        assert text(model, notify=messages.append, **DRAWN) == wanted
    assert len(messages) == 1
    assert text(model, notify=pytest.fail, **DRAWN) == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_random_numbers_continue_after_a_failed_capture() -> None:
    """torch moves its generator on differently while it captures, and must not be left so."""
    torch.manual_seed(1)
    first = torch.rand(4, device="cuda")
    torch.manual_seed(1)
    captures = cuda_graphs.Graphs(torch.device("cuda"))
    on_the_card = torch.ones(4, device="cuda")

    def waits() -> None:
        if torch.cuda.is_current_stream_capturing():
            on_the_card.sum().item()

    with pytest.raises(RuntimeError):
        captures.capture(waits)
    captures.forget()
    assert torch.equal(torch.rand(4, device="cuda"), first)
