"""Evaluation against a plain computation: every target once, specials without bytes, nothing past the split."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny import make_run, write_byte_tokenizer, write_manifest, write_shards

from homing.lm.data.shards.pack_text import PackedStream
from homing.lm.data.shards.read_shards import TokenSplit, open_split
from homing.lm.evals.bits_per_byte import Evaluation, evaluate
from homing.lm.model import Decoder
from homing.lm.tokenizer import load_tokenizer


@pytest.fixture
def model(tiny_data: Path) -> Decoder:
    model = Decoder(make_run(tiny_data).model)
    model.init_weights(3)
    return model


def split_of(folder: Path, documents: list[list[int]]) -> TokenSplit:
    write_byte_tokenizer(folder)
    return open_split(folder, write_manifest(folder, {"val": write_shards(folder, "val", documents)}), "val")


def naive(model: Decoder, split: TokenSplit, token_bytes: list[int]) -> tuple[float, float]:
    tokens = torch.from_numpy(PackedStream(split, seed=0).read(0, split.num_tokens)).long()
    context, nats = model.shape.context, []
    for start in range(0, len(tokens) - 1, context):
        ids, targets = tokens[start : start + context], tokens[start + 1 : start + context + 1]
        logits = model(ids[None, : len(targets)])[0]
        nats.append(F.cross_entropy(logits, targets, reduction="none").detach().double())
    losses, targets = torch.cat(nats), tokens[1:]
    sizes = torch.tensor(token_bytes)[targets]
    return losses.mean().item(), losses[sizes > 0].sum().item() / math.log(2) / sizes.sum().item()


@pytest.mark.acceptance(100)
@pytest.mark.parametrize("num_tokens", [2, 33, 65, 150])
@pytest.mark.parametrize("rows_at_a_time", [1, 3])
def test_it_agrees_with_a_plain_computation_also_on_a_last_row_that_is_not_full(
    tmp_path: Path, model: Decoder, num_tokens: int, rows_at_a_time: int
) -> None:
    documents = [[0, *range(20, 21 + n % 7)] for n in range(num_tokens)]
    tokens = [token for document in documents for token in document][:num_tokens]
    split = split_of(tmp_path / "split", [tokens])
    token_bytes = load_tokenizer(tmp_path / "split").token_bytes()
    got = evaluate(model, split, token_bytes=token_bytes, num_tokens=0, rows_at_a_time=rows_at_a_time)
    loss, bits = naive(model, split, token_bytes)
    assert got.num_tokens == num_tokens - 1
    assert got.loss == pytest.approx(loss, rel=1e-5)
    assert got.bits_per_byte == pytest.approx(bits, rel=1e-5)


def test_fewer_tokens_can_be_asked_for_and_progress_is_reported(
    tmp_path: Path, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.lm.evals.bits_per_byte._REPORT_EVERY_S", -1.0)
    split = split_of(tmp_path / "split", [[0, *([20] * 500)]])
    messages: list[tuple[int, int]] = []
    got = evaluate(
        model,
        split,
        token_bytes=[1] * 272,
        num_tokens=64,
        rows_at_a_time=1,
        notify=lambda a, b: messages.append((a, b)),
    )
    assert got.num_tokens == 64
    assert messages == [(1, 2), (2, 2)]


def test_targets_without_bytes_have_no_bits_per_byte(tmp_path: Path, model: Decoder) -> None:
    split = split_of(tmp_path / "split", [[0, 0, 0, 0]])
    got = evaluate(model, split, token_bytes=[0] * 272, num_tokens=0, rows_at_a_time=1)
    assert got.bits_per_byte is None
    assert got.loss > 0


def test_perplexity_of_a_huge_loss_is_infinite_and_not_an_error() -> None:
    assert Evaluation(loss=1000.0, bits_per_byte=None, num_tokens=1).perplexity == math.inf
    assert Evaluation(loss=math.log(4), bits_per_byte=None, num_tokens=1).perplexity == pytest.approx(4)
