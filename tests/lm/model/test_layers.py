"""Hand-written gradients equal autograd's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from homing.lm.model.layers import has_manual_backward, normed, rotated


def plainly_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def compare(one: Tensor, other: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    above = torch.randn(one.shape, generator=torch.Generator().manual_seed(5))
    for mine, wanted in zip(
        torch.autograd.grad(one, inputs, above), torch.autograd.grad(other, inputs, above), strict=True
    ):
        torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [(3, 5, 24), (2, 4, 6, 8)], ids=["stream", "heads"])
def test_hand_written_gradient_of_rms_norm_equals_autograd(size: tuple[int, ...]) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(size[-1], generator=torch.Generator().manual_seed(1)).requires_grad_()
    compare(normed(x, weight, 1e-3), F.rms_norm(x, (size[-1],), weight, 1e-3), [x, weight])


@pytest.mark.parametrize("angles", [(6, 4), (2, 1, 6, 4)], ids=["one row", "own positions"])
def test_hand_written_gradient_of_rope_equals_autograd(angles: tuple[int, ...]) -> None:
    x = torch.randn(2, 6, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    angle = torch.randn(angles, generator=torch.Generator().manual_seed(1))
    heads = x.transpose(1, 2)
    compare(rotated(heads, angle.cos(), angle.sin()), plainly_turned(heads, angle.cos(), angle.sin()), [x])


def test_it_is_for_training_on_a_cpu_in_fp32() -> None:
    x = torch.zeros(2)
    assert has_manual_backward(x)
    assert not has_manual_backward(x.bfloat16())
    with torch.no_grad():
        assert not has_manual_backward(x)
