"""A step of sampling as a CUDA graph, on a machine without a card: what is captured, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small import make_rl_run, small_model
from streams import StreamsOnly
from torch import Tensor

from homing.lm.decoding_step import REACH
from homing.lm.model import Decoder
from homing.lm.model.attention import RowCache
from homing.lm.rl.named_random import draws
from homing.lm.rl.rollout import Decoding

ROWS = 3
FAMILIES: dict[str, dict[str, Any]] = {
    "stock": {},
    "swift": {"family": "swift", "arch": "swift", "num_layers": 4, "is_tied": False},
}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    model = small_model(make_rl_run(tmp_path / "data", context=2 * REACH), **FAMILIES[request.param])
    with torch.no_grad():  # a fresh swift has its scales at the start; with them moved, it does look back
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model


def make_decoding(model: Decoder, messages: list[str], *, is_captured: bool = True) -> Decoding:
    cache = RowCache(model.shape, batch=ROWS, capacity=2 * REACH, device=model.device, dtype=model.compute_dtype)
    return Decoding(model, cache, temperature=1.0, top_k=0, is_captured=is_captured, notify=messages.append)


@torch.no_grad()
def walk(decoding: Decoding, places: list[int], *, ids: Sequence[int] = (5, 60, 200)) -> list[tuple[Tensor, Tensor]]:
    """One token after the other, what was picked being read next; at the same place by the same draws."""
    found, ids_B = [], torch.tensor(ids)
    for place in places:
        draws_B = torch.from_numpy(draws(ROWS, "test", place))
        picked_B, entropy_B = decoding.step(ids_B, torch.full((ROWS,), place), draws_B, furthest=place)
        ids_B = picked_B.clone()
        found.append((ids_B, entropy_B.clone()))
    return found


def is_equal(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def test_graphs_of_all_reaches_give_what_plain_calls_give_and_share_a_stream_and_a_pool(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [0, 1, 2, REACH, REACH + 1, 3]
    wanted = walk(make_decoding(model, [], is_captured=False), places)
    cuda, messages = StreamsOnly(), list[str]()
    cuda.take_over(monkeypatch)
    decoding = make_decoding(model, messages)
    found, pools = walk(decoding, places[:1]), [cuda.pool]
    found += walk(decoding, places[1:], ids=found[-1][0].tolist())
    assert is_equal(found, wanted)
    assert pools == [cuda.pool]
    assert not messages
    captured = ["side waits for main", "main waits for side", "captured on side, thread_local"]
    assert cuda.log == [*captured, *3 * ["replayed"], *captured, *3 * ["replayed"]]
    assert cuda.current == "main"


def test_after_a_capture_that_failed_sampling_goes_on_where_it_was_and_its_memory_is_given_back(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [0, 1, REACH, REACH + 1, 2]
    wanted = walk(make_decoding(model, [], is_captured=False), places)
    cuda, messages = StreamsOnly(), list[str]()
    cuda.take_over(monkeypatch)
    decoding = make_decoding(model, messages)
    found = walk(decoding, places[:2])
    cuda.is_failing = True  # the second reach, when the first has its graph
    found += walk(decoding, places[2:], ids=found[-1][0].tolist())
    assert is_equal(found, wanted)
    assert messages == ["operation failed due to a previous error during capture"]
    assert cuda.current == "main", "otherwise later kernels run on a stream that is never synchronized"
    assert cuda.log.count("emptied") == 1
    assert cuda.log[-1] == "emptied", "nothing is captured or replayed after it"
    assert not decoding.is_captured
