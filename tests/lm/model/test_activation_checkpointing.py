"""Blocks computed again in backward: the same gradients, and less of a forward is kept."""

from __future__ import annotations

import pytest
import torch

from homing.lm.model import Decoder
from homing.wire.run_json import Model

STOCK = Model(
    family="stock", arch="qwen3", num_layers=4, width=32, num_heads=4, num_kv_heads=2, head_size=8, ffn_width=48,
    context=32, vocab_size=100, is_tied=False,
)  # fmt: skip
SWIFT = Model(
    family="swift", arch="swift", num_layers=4, width=32, num_heads=4, num_kv_heads=2, head_size=8, ffn_width=48,
    context=32, vocab_size=100, is_tied=False,
)  # fmt: skip


def computed(shape: Model, kind: str, *, has_segments: bool = False) -> tuple[dict[str, torch.Tensor], int]:
    """Every gradient, and the bytes that the forward kept for backward."""
    model = Decoder(shape)
    model.init_weights(0)
    with torch.no_grad():  # zeros, as swift begins with, would hide most of the gradients
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    model.set_recompute(kind)
    tokens = torch.randint(100, (2, 33), generator=torch.Generator().manual_seed(2))
    segments = torch.arange(32).div(9, rounding_mode="floor").int().expand(2, -1) if has_segments else None
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:], segments=segments)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sum(kept.values())


@pytest.mark.parametrize("has_segments", [False, True], ids=["plain", "segments"])
@pytest.mark.parametrize("shape", [STOCK, SWIFT], ids=["stock", "swift"])
def test_gradients_are_the_same_to_the_last_bit(shape: Model, has_segments: bool) -> None:
    plain, most = computed(shape, "none", has_segments=has_segments)
    for kind in ("half", "all"):
        again, kept = computed(shape, kind, has_segments=has_segments)
        assert plain.keys() == again.keys()
        assert all(torch.equal(plain[name], again[name]) for name in plain)
        assert kept < most


def test_half_keeps_about_half_and_all_keeps_the_inputs() -> None:
    most, half, least = (computed(STOCK, kind)[1] for kind in ("none", "half", "all"))
    assert least < half < most
    assert 0.35 < (half - least) / (most - least) < 0.65
