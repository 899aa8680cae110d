"""NF4 against the published rule and against bitsandbytes, value for value."""

from __future__ import annotations

import math

import pytest
import torch

from homing.errors import DataError
from homing.lm.model import nf4
from homing.lm.model.frozen_linear import FrozenWeight, adapted_product

CPU = torch.device("cpu")
SHAPES = [(64, 128), (256, 1024), (96, 40), (1000, 64)]  # the third ends inside a block


def matrix(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 0.02).to(dtype)


def nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (values.double().unsqueeze(-1) - table.double()).abs().argmin(dim=-1)


def is_near_an_edge(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """bitsandbytes rounds by a table of 65,536 entries on the CPU: within one of them either side is right there."""
    edges = (table[:-1] + table[1:]) / 2
    return (values.unsqueeze(-1) - edges).abs().amin(dim=-1) < 2 / 65536


def test_the_sixteen_values_are_quantiles_of_a_normal_distribution() -> None:
    """Even steps of probability from 0.5 to 0.9677083, eight above zero and seven below, scaled to end at 1."""
    normal = torch.distributions.Normal(0.0, 1.0)
    above = normal.icdf(torch.linspace(0.9677083, 0.5, 9)[:-1])
    below = -normal.icdf(torch.linspace(0.9677083, 0.5, 8)[:-1])
    table = torch.cat([above, below, torch.zeros(1)]).sort().values
    torch.testing.assert_close(table / table.max(), torch.tensor(nf4.NF4_CODE), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_weight_is_the_nearest_value_of_its_block(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The rule written out, block by block, without anything of ours but the two tables."""
    weight = matrix(shape, dtype)
    parts = nf4.quantize(weight)
    flat, table = weight.flatten().float(), torch.tensor(nf4.NF4_CODE)
    steps = nf4.dynamic_map(is_signed=True, device=CPU)
    blocks = list(flat.split(64))
    largest = torch.stack([block.abs().max() for block in blocks])
    high, low = parts.packed >> 4, parts.packed & 15
    indices = torch.stack([high, low], dim=1).flatten()
    for block, most, found in zip(blocks, largest, indices.split(64), strict=True):
        assert torch.equal(nearest(block / most, table), found.long())
    rest = largest - largest.mean()
    for number, (part, found) in enumerate(zip(rest.split(256), parts.scales.split(256), strict=True)):
        assert parts.super_scales[number] == part.abs().max()
        is_equal = nearest(part / part.abs().max(), steps) == found.long()
        assert (is_equal | is_near_an_edge(part / part.abs().max(), steps)).all()
    back = nf4.dequantize(parts, shape, torch.float32)
    widest = 0.16 * largest.max()  # half of the widest gap, and the scales' rounding
    assert (back - weight.float()).abs().max() < widest
    assert torch.equal(nf4.dequantize(parts, shape, torch.bfloat16), back.bfloat16())


@pytest.mark.acceptance(95)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_values_equal_those_of_bitsandbytes() -> None:
    reference = pytest.importorskip("bitsandbytes.functional")
    for is_signed in (True, False):
        assert torch.equal(
            nf4.dynamic_map(is_signed=is_signed, device=CPU), reference.create_dynamic_map(signed=is_signed)
        )
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            weight = matrix(shape, dtype)
            packed, state = reference.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
            parts = nf4.quantize(weight)
            assert torch.equal(parts.packed, packed.view(-1))
            assert torch.equal(parts.super_scales, state.state2.absmax)
            assert torch.equal(parts.offset, state.offset)
            differs = parts.scales != state.absmax
            most = parts.super_scales.repeat_interleave(256)[: len(parts.scales)]
            largest = torch.stack([block.abs().max() for block in weight.flatten().float().split(64)])
            steps = nf4.dynamic_map(is_signed=True, device=CPU)
            assert (~differs | is_near_an_edge((largest - parts.offset) / most, steps)).all()
            # With their scales ours must give their weights to the last bit.
            same = parts._replace(scales=state.absmax)
            assert torch.equal(nf4.dequantize(same, shape, dtype), reference.dequantize_4bit(packed, state).view(shape))


def test_a_weight_takes_four_bits_and_an_eighth() -> None:
    parts = nf4.quantize(matrix((1024, 1024)))
    assert 8 * parts.num_bytes / 1024**2 == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=1e-3)


def test_a_block_of_zeros_stays_zeros() -> None:
    weight = matrix((64, 128))
    weight[3:9] = 0.0
    back = nf4.dequantize(nf4.quantize(weight), (64, 128), torch.float32)
    assert torch.equal(back[3:9], torch.zeros(6, 128))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_weights_that_are_no_numbers_are_refused(value: float) -> None:
    weight = matrix((64, 128))
    weight[5, 5] = value
    with pytest.raises(DataError, match="cannot be quantized"):
        nf4.quantize(weight)


@pytest.mark.acceptance(95)
def test_a_product_keeps_no_dense_weight_for_backward() -> None:
    """What autograd holds is counted: four-bit parts and nothing of the dense matrix's size."""
    weight = FrozenWeight(128, 256).fill(matrix((256, 128)), "nf4", CPU)
    x = torch.randn(4, 128, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = adapted_product(x, [weight], [None], [None])
    assert sum(t.numel() * t.element_size() for t in kept) < 256 * 128
    dense = weight.dense_weight(torch.float32)
    torch.testing.assert_close(y, x @ dense.t())
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(dx, 2 * (x @ dense.t() @ dense).detach(), rtol=1e-4, atol=1e-5)


def test_the_way_taken_is_said() -> None:
    assert nf4.dequantize_path(CPU) == "plain torch"
    assert "Triton" in nf4.dequantize_path(torch.device("cuda"))


@pytest.mark.gpu
def test_the_kernel_equals_plain_torch() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for shape in SHAPES:
        parts = nf4.quantize(matrix(shape))
        there = nf4.Nf4(*(part.cuda() for part in parts))
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(nf4.dequantize(there, shape, dtype).cpu(), nf4.dequantize(parts, shape, dtype))
