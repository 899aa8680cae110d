"""Several texts in one row: each must come out as if it were alone, and FlexAttention's mask must say the same."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from homing.lm.model import Decoder
from homing.lm.model.loss import IGNORED
from homing.lm.model.sdpa import BLOCK, isolate
from homing.wire.run_json import Model

STOCK = Model("stock", "qwen3", 3, 32, 4, 2, 8, 48, 64, 100, is_tied=False)
SWIFT = Model("swift", "swift", 3, 32, 4, 2, 8, 48, 64, 100, is_tied=False)
LENGTHS = [[20, 1, 30, 13], [64], [5, 40]]  # of the texts in each row; what is left is padding


def built(shape: Model) -> Decoder:
    model = Decoder(shape)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # fresh scales and gates are nearly 0, and would hide what they let through
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(100, (len(LENGTHS), 64), generator=generator)
    targets = torch.randint(100, (len(LENGTHS), 64), generator=generator)
    segments = torch.full((len(LENGTHS), 64), -1, dtype=torch.int32)
    for row, lengths in enumerate(LENGTHS):
        begin = 0
        for number, length in enumerate(lengths):
            segments[row, begin : begin + length] = number
            begin += length
    return ids, targets.masked_fill(segments < 0, IGNORED), segments


def alone(segments: torch.Tensor) -> list[tuple[int, slice]]:
    return [
        (row, slice(int((segments[row] == number).nonzero()[0]), int((segments[row] == number).nonzero()[-1]) + 1))
        for row in range(len(segments))
        for number in range(int(segments[row].max()) + 1)
    ]


@pytest.mark.parametrize("shape", [STOCK, SWIFT], ids=["stock", "swift"])
def test_texts_in_one_row_give_the_logits_they_give_alone(shape: Model) -> None:
    model = built(shape)
    ids, targets, segments = packed()
    with torch.no_grad():
        logits = model(ids, segments=segments)
        losses = model.token_losses(ids, targets, segments=segments)
        assert torch.isfinite(logits).all()
        for row, where in alone(segments):
            one, goals = ids[row, where].unsqueeze(0), targets[row, where].unsqueeze(0)
            torch.testing.assert_close(logits[row, where], model(one)[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(losses[row, where], model.token_losses(one, goals)[0], atol=1e-5, rtol=1e-5)
        assert (losses[segments < 0] == 0).all()


@pytest.mark.parametrize("shape", [STOCK, SWIFT], ids=["stock", "swift"])
def test_texts_in_one_row_give_the_gradients_they_give_alone(shape: Model) -> None:
    together, apart = built(shape), built(shape)
    ids, targets, segments = packed()
    loss = together.loss(ids, targets, segments=segments)
    loss.backward()
    num_targets = int((targets != IGNORED).sum())
    total = torch.zeros(())
    for row, where in alone(segments):
        one = apart.token_losses(ids[row, where].unsqueeze(0), targets[row, where].unsqueeze(0)).sum() / num_targets
        one.backward()
        total += one.detach()
    torch.testing.assert_close(loss.detach(), total, atol=1e-5, rtol=1e-5)
    wanted = dict(apart.named_parameters())
    for name, parameter in together.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, wanted[name].grad, atol=1e-5, rtol=1e-4, msg=name)


def test_what_another_text_says_changes_nothing() -> None:
    model = built(SWIFT)
    ids, _, segments = packed()
    other = ids.clone()
    other[0, :20] = (other[0, :20] + 1) % 100
    with torch.no_grad():
        before, after = model(ids, segments=segments), model(other, segments=segments)
        without = model(ids)
    assert torch.equal(before[0, 20:], after[0, 20:])
    assert not torch.allclose(before[0, :20], after[0, :20])
    assert not torch.allclose(before[0, 20:], without[0, 20:])  # or the test would hold for a model that ignores them


def test_one_segment_over_the_whole_row_is_the_plain_row() -> None:
    model = built(STOCK)
    ids, _, segments = packed()
    with torch.no_grad():
        torch.testing.assert_close(model(ids, segments=torch.zeros_like(segments)), model(ids), atol=1e-5, rtol=1e-5)


def blocks() -> torch.Tensor:
    """Texts that begin and end inside, at the edge of and across blocks; padding too."""
    lengths = [[10, 2 * BLOCK, BLOCK - 10, 100], [BLOCK, BLOCK, 2 * BLOCK], [4 * BLOCK], [1]]
    rows = [
        torch.cat([torch.full((length,), number) for number, length in enumerate(row)] + [torch.full((4 * BLOCK,), -1)])
        for row in lengths
    ]
    return torch.stack([row[: 4 * BLOCK] for row in rows]).int()


def test_the_block_mask_names_the_blocks_that_torch_finds_by_looking_at_every_pair() -> None:
    segments = blocks()
    ours = isolate(segments, is_flex=True).mask
    reference = create_block_mask(ours.mask_mod, len(segments), None, 4 * BLOCK, 4 * BLOCK, device="cpu")
    for kind in ("kv", "full_kv", "q", "full_q"):
        num, which = getattr(ours, f"{kind}_num_blocks"), getattr(ours, f"{kind}_indices")
        their_num, their_which = getattr(reference, f"{kind}_num_blocks"), getattr(reference, f"{kind}_indices")
        assert torch.equal(num, their_num), kind
        for at in torch.cartesian_prod(*(torch.arange(size) for size in num.shape)):
            count, at = int(num[tuple(at)]), tuple(at)
            assert torch.equal(which[at][:count].sort().values, their_which[at][:count].sort().values), kind


def test_flex_attention_with_the_block_mask_equals_the_plain_mask() -> None:
    segments = blocks()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(len(segments), heads, 4 * BLOCK, 16, generator=generator) for heads in (4, 2, 2))
    plain = isolate(segments).mask
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow uncompiled
        found = flex_attention(q, k, v, block_mask=isolate(segments, is_flex=True).mask, enable_gqa=True)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=plain, enable_gqa=True)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
