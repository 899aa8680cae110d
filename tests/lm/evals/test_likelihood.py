"""Nats of tokens: the same as computed one by one, in the order asked for, with bounded memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.lm.model.open_weights.foreign_models import write_reference

from homing.errors import RunFailed
from homing.lm.evals.likelihood import Row, score_rows, windows
from homing.lm.model import Decoder, shape_from_config
from homing.lm.model.open_weights import find_weights, load_decoder
from homing.wire.run_json import Run


def plain_nats(logits: torch.Tensor, ids: list[int]) -> list[float]:
    """Of ids[1:], from the logits of ids[:-1]: nothing but the definition."""
    logs = torch.log_softmax(logits.double(), dim=-1)
    return [-float(logs[place, i]) for place, i in enumerate(ids[1:])]


@torch.no_grad()
def unbatched(model: Decoder, row: Row) -> list[float]:
    nats = plain_nats(model(torch.tensor([row.ids[:-1]]))[0], list(row.ids))
    return [one for one, is_target in zip(nats, row.is_target[1:], strict=True) if is_target]


def some_rows(vocab_size: int, context: int, count: int = 40) -> list[Row]:
    source = np.random.default_rng(4)
    rows = []
    for _ in range(count):
        length = int(source.integers(2, context + 2))
        is_target = source.random(length) < 0.5
        is_target[0], is_target[-1] = False, True
        rows.append(Row(source.integers(0, vocab_size, length).tolist(), is_target))
    return rows


@pytest.mark.parametrize("family", ["stock", "swift"])
@pytest.mark.parametrize("wants_likeliest", [False, True])
def test_many_rows_at_a_time_give_what_each_gives_alone(tiny_run: Run, family: str, wants_likeliest: bool) -> None:
    shape = tiny_run.model
    if family == "swift":
        shape = dataclasses.replace(shape, family=family, arch=family, is_tied=False)
    model = Decoder(shape)
    model.init_weights(3)
    rows = some_rows(model.shape.vocab_size, model.shape.context)
    scored = list(score_rows(model, rows, wants_likeliest=wants_likeliest, tokens_at_a_time=200))
    assert len(scored) == len(rows)
    for row, one in zip(rows, scored, strict=True):
        assert one.nats.tolist() == pytest.approx(unbatched(model, row), abs=2e-5)


def test_likeliest_is_what_greedy_writing_would_have_written(tiny_run: Run) -> None:
    model = Decoder(tiny_run.model)
    model.init_weights(3)
    ids = [0, 20, 21]
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    is_target = np.arange(len(ids)) >= 3
    (written,) = score_rows(model, [Row(ids, is_target)], wants_likeliest=True)
    assert written.is_likeliest.all()
    ids[5] = (ids[5] + 1) % model.shape.vocab_size
    (changed,) = score_rows(model, [Row(ids, is_target)], wants_likeliest=True)
    assert not changed.is_likeliest[2]


@pytest.mark.acceptance(100)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_log_likelihoods_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = write_reference(tmp_path, family)
    shape = shape_from_config(json.loads((tmp_path / "config.json").read_text()))
    model = load_decoder(find_weights(tmp_path), shape, dtype=torch.float32)
    rows = some_rows(shape.vocab_size, 30, count=12)
    for row, one in zip(rows, score_rows(model, rows), strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([row.ids[:-1]])).logits[0]
        kept = np.array(plain_nats(logits, list(row.ids)))[row.is_target[1:]]
        assert one.nats.tolist() == pytest.approx(kept.tolist(), abs=1e-3)
        assert -one.nats.sum() == pytest.approx(-kept.sum(), abs=1e-3)


@pytest.mark.parametrize(("length", "context", "stride"), [(2, 8, 4), (9, 8, 4), (10, 8, 4), (57, 8, 3), (40, 16, 1)])
def test_windows_ask_for_each_token_once_and_give_it_its_context(length: int, context: int, stride: int) -> None:
    ids = list(range(100, 100 + length))
    asked = []
    for row in windows(ids, context, stride):
        assert len(row.ids) <= context + 1
        for place in np.flatnonzero(row.is_target).tolist():
            asked.append(row.ids[place])
            assert place >= min(row.ids[place] - 100, context - stride)  # ids here are their own positions
    assert asked == ids[1:]


class Counting:
    """A decoder that remembers how much it was given at once."""

    def __init__(self, model: Decoder, most_rows: int = 10**9) -> None:
        self.shape, self.device, self.most_rows = model.shape, model.device, most_rows
        self.sizes: list[tuple[int, int]] = []
        self._model = model

    def token_losses(self, ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        self.sizes.append((ids_BT.shape[0], ids_BT.shape[1]))
        if ids_BT.shape[0] > self.most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")
        return self._model.token_losses(ids_BT, targets_BT)


def tiny_model(run: Run) -> Decoder:
    model = Decoder(run.model)
    model.init_weights(3)
    return model


def test_memory_is_bounded_by_tokens_and_rows_are_taken_as_they_are_needed(tiny_run: Run) -> None:
    model: Any = Counting(tiny_model(tiny_run))
    taken = [0]

    def rows() -> Iterator[Row]:
        for row in some_rows(50, 30, count=400):
            taken[0] += 1
            yield row

    scored = score_rows(model, rows(), tokens_at_a_time=120)
    next(scored)
    assert taken[0] < 200
    assert len(list(scored)) == 399
    assert max(num_rows * (length + 1) for num_rows, length in model.sizes) <= 120


def test_out_of_memory_computes_less_at_once_and_the_same(tiny_run: Run) -> None:
    plain = tiny_model(tiny_run)
    small: Any = Counting(plain, most_rows=3)
    rows = some_rows(50, 30)
    expected = [one.nats.tolist() for one in score_rows(plain, rows)]
    assert [one.nats.tolist() for one in score_rows(small, rows)] == [
        pytest.approx(nats, abs=1e-5) for nats in expected
    ]
    none: Any = Counting(plain, most_rows=0)
    with pytest.raises(RunFailed) as failed:
        list(score_rows(none, rows))
    assert "--window" in failed.value.fix
