"""Each kernel against plain torch, for tensors in every order that autograd may hand over.

On the CPU in Triton's interpreter, and the same on a card (`-m gpu`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from homing.lm.model import fp8, fused_ops, nf4
from homing.lm.model.layers import Rope
from homing.lm.model.loss import IGNORED, mean_loss

T, H, G, K = 6, 4, 2, 16
EPS = 1e-6
MOST_ERROR = 1e-4  # in fp32: a GPU rounds exponentials more coarsely; a kernel that misreads memory is off by 1
NO_CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CARD])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        request.getfixturevalue("interpreter")
    return request.param


def as_it_is(x: Tensor) -> Tensor:
    return x.contiguous()


def other_way_round(x: Tensor) -> Tensor:
    """The same numbers, with the second side before the first in memory: (1, H, T, K) by heads or by positions."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def one_number(x: Tensor) -> Tensor:
    """As the gradient of a sum is: one number in memory, seen everywhere."""
    return x.flatten()[0].expand(x.shape)


SHOWN = pytest.mark.regression("rope-gradients")
ORDERS = [as_it_is, pytest.param(other_way_round, marks=SHOWN), pytest.param(one_number, marks=SHOWN)]


def drawn(*sides: int, device: str, seed: int = 0) -> Tensor:
    return torch.randn(*sides, generator=torch.Generator().manual_seed(seed)).to(device)


def error(mine: Tensor, right: Tensor) -> float:
    mine, right = mine.detach().float(), right.detach().float()
    return float((mine - right).norm() / right.norm())


def turned_plainly(qkv: Tensor, cos: Tensor, sin: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
    q, k, v = (part.transpose(1, 2) for part in qkv.view(*qkv.shape[:2], -1, K).split([H, G, G], dim=2))
    q, k = (F.rms_norm(part, (K,), None if weights is None else weights[i], EPS) for i, part in enumerate((q, k)))
    return Rope.rotate(q, cos, sin), Rope.rotate(k, cos, sin), v


@pytest.mark.parametrize(
    ("num_rows", "order"),
    [
        pytest.param(1, as_it_is, marks=SHOWN),
        (1, other_way_round),
        pytest.param(1, one_number, marks=SHOWN),
        (2, as_it_is),
        (2, other_way_round),
        pytest.param(2, one_number, marks=SHOWN),
    ],
)
@pytest.mark.parametrize("has_weights", [True, False])
def test_gradients_of_queries_keys_and_values_in_any_order(
    device: str, num_rows: int, order: Callable[[Tensor], Tensor], has_weights: bool
) -> None:
    qkv = drawn(num_rows, T, (H + 2 * G) * K, device=device).requires_grad_()
    angles = drawn(T, K // 2, device=device, seed=1)
    weights = drawn(2, K, device=device, seed=2).requires_grad_() if has_weights else None
    leaves = [qkv] if weights is None else [qkv, weights]
    gradients = [order(drawn(num_rows, heads, T, K, device=device, seed=3 + heads)) for heads in (H, G, G)]
    found = []
    for is_kernel in (True, False):
        cos, sin = angles.cos(), angles.sin()
        if is_kernel:
            parts = fused_ops.rotate(
                qkv, cos, sin, weights, num_heads=H, num_kv_heads=G, has_norm=True, scale=1.0, eps=EPS
            )
        else:
            parts = turned_plainly(qkv, cos, sin, weights)
        found.append([*parts, *torch.autograd.grad(parts, leaves, gradients)])
    for mine, right in zip(*found, strict=True):
        assert error(mine, right) < MOST_ERROR


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_gradients_of_swiglu_in_any_order(device: str, order: Callable[[Tensor], Tensor]) -> None:
    x = drawn(1, T, 40, device=device).requires_grad_()
    dy = order(drawn(1, T, 20, device=device, seed=1))
    gate, up = x.chunk(2, dim=-1)
    found = [torch.autograd.grad(y, x, dy)[0] for y in (fused_ops.swiglu(x), F.silu(gate) * up)]
    assert error(*found) < MOST_ERROR


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_sums_and_norms_in_any_order(device: str, order: Callable[[Tensor], Tensor]) -> None:
    x, y = (order(drawn(1, T, 24, device=device, seed=seed)).requires_grad_() for seed in (0, 1))
    weight = drawn(24, device=device, seed=2).requires_grad_()
    gradients = [order(drawn(1, T, 24, device=device, seed=seed)) for seed in (3, 4)]
    plain = (x + y, F.rms_norm(x + y, (24,), weight, EPS))
    found = [
        [*parts, *torch.autograd.grad(parts, (x, y, weight), gradients)]
        for parts in (fused_ops.sum_norm(x, y, weight, EPS), plain)
    ]
    for mine, right in zip(*found, strict=True):
        assert error(mine, right) < MOST_ERROR


def test_the_loss_of_targets_in_any_order(device: str) -> None:
    from homing.lm.model.loss import _differentiate, _differentiate_by_kernel

    logits = drawn(8, 70, device=device)
    every = torch.randint(60, (16,), generator=torch.Generator().manual_seed(0)).to(device)
    every[4] = IGNORED
    count = torch.full((), 7.0, device=device)
    right = _differentiate(logits.clone(), every[::2], count, 60, 5.0)
    mine = _differentiate_by_kernel(logits.clone(), every[::2], count, 60, 5.0)
    for a, b in zip(mine, right, strict=True):
        assert error(a, b) < MOST_ERROR


def test_nf4_comes_back_as_by_plain_torch(device: str) -> None:
    from homing.lm.model.kernels.number_formats import dequantize_nf4

    parts = nf4.quantize(drawn(48, 100, device="cpu"))
    right = nf4.dequantize(parts, (4800,), torch.float32)
    held = [part.to(device) for part in parts]
    tables = nf4.code(held[0].device), nf4.dynamic_map(is_signed=True, device=held[0].device)
    mine = dequantize_nf4(*held, *tables, torch.float32, block=nf4.BLOCK, super_block=nf4.SUPER_BLOCK)
    assert torch.equal(mine.cpu(), right)
    with pytest.raises(ValueError, match="scales"):
        dequantize_nf4(held[0], held[1][:3], *held[2:], *tables, torch.float32, block=64, super_block=256)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # by the interpreter, of infinity x 0
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_cast_to_fp8_keeps_what_is_no_number_and_fits_the_rest(device: str, kind: torch.dtype) -> None:
    from homing.lm.model.kernels.number_formats import cast_both_ways

    x = drawn(70, 100, device=device)
    x[3, 5] = float("nan")
    x8, x8_t, inverse = cast_both_ways(x, kind)
    assert torch.equal(x8_t.t().contiguous().view(torch.uint8), x8.view(torch.uint8))
    is_nan = x8.float().isnan()
    assert is_nan.nonzero().tolist() == [[3, 5]]
    # The interpreter's own conversion drops a carry here and there; a card must be as near as the type allows.
    most = {torch.float8_e4m3fn: 0.03, torch.float8_e5m2: 0.06}[kind] if device == "cuda" else 0.2
    assert error((x8.float() * inverse)[~is_nan], x[~is_nan]) < most
    assert float(x8.float()[~is_nan].abs().max()) == torch.finfo(kind).max
    x[3, 5] = float("inf")  # everything else becomes 0 relative to it
    x8, _, inverse = cast_both_ways(x, kind)
    assert not (x8.float() * inverse)[3, 5].isfinite()


def test_a_kernel_refuses_what_it_would_misread(device: str) -> None:
    from homing.lm.model.kernels import number_formats, rope, row_ops

    across = drawn(8, 8, device=device).t()  # not contiguous
    plain = drawn(8, 8, device=device)
    weight, targets = torch.ones(8, device=device), torch.zeros(8, device=device, dtype=torch.int64)
    one = torch.ones((), device=device)
    table = drawn(8, 1, device=device)
    heads = drawn(8, 2, 2, device=device)
    for call in (
        lambda: row_ops.swiglu(across),
        lambda: row_ops.swiglu_backward(drawn(8, 16, device=device), across),
        lambda: row_ops.sum_norm(plain, across, weight, EPS),
        lambda: row_ops.sum_norm_backward(plain, plain, across, weight, EPS),
        lambda: rope.rotate(across, table, table, None, 2, 1, False, 1.0, EPS),
        lambda: rope.rotate_backward(plain, heads, heads[:, :1], heads[:, 1:], table, table, None, False, 1.0, EPS),
        lambda: number_formats.cast_both_ways(across, torch.float8_e4m3fn),
        lambda: row_ops.differentiate_(across, targets, one, 8, 0.0),
        lambda: row_ops.differentiate_(plain.clone(), targets.repeat(2)[::2], one, 8, 0.0),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            call()
    with pytest.raises(ValueError, match="not on"):
        row_ops.swiglu_backward(drawn(8, 16, device=device), plain.to("meta"))
    with pytest.raises(ValueError, match="fp32"):
        rope.rotate(plain, table.double(), table.double(), None, 2, 1, False, 1.0, EPS)


def product_of_16(
    a8: Tensor, b8: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, **_: object
) -> Tensor:
    """torch._scaled_mm on the CPU, with the rule of the card's kernels: every side is a multiple of 16."""
    for side in (*a8.shape[1:], *b8.shape):
        assert side % 16 == 0, f"Expected trailing dimension to be divisible by 16, not {side}"
    return ((a8.float() @ b8.float()) * scale_a * scale_b).to(out_dtype)


@pytest.mark.regression("fp8-rows")
@pytest.mark.parametrize("rows", [(1, 5), (3, 7)])
def test_fp8_takes_any_number_of_rows(device: str, rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setattr(torch, "_scaled_mm", product_of_16)
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    x, w = drawn(*rows, 128, device=device).to(kind), drawn(144, 128, device=device, seed=1)
    x.requires_grad_(), w.requires_grad_()
    dy = drawn(*rows, 144, device=device, seed=2).to(kind)
    found = []
    for y in (fp8.fp8_product(x, w), F.linear(x, w.to(kind))):
        assert y.shape == dy.shape
        found.append([y, *torch.autograd.grad(y, (x, w), dy)])
    for mine, right in zip(*found, strict=True):
        assert mine.shape == right.shape
        assert error(mine, right) < (0.1 if device == "cuda" else 0.25)  # the interpreter drops carries


@pytest.mark.regression("fp8-rows")
def test_fp8_says_before_what_its_products_return() -> None:
    """torch.compile plans by this; the product of 3 rows keeps 16 of them for backward."""
    with FakeTensorMode():
        x, w = torch.empty(1, 3, 128, device="cuda", dtype=torch.bfloat16), torch.empty(144, 128, device="cuda")
        y, x8, *_ = torch.ops.homing.fp8_product(x, w)
        assert (y.shape, x8.shape) == ((1, 3, 144), (128, 16))


class OnCard(Tensor):
    """A tensor of the CPU that says that it is on a card."""

    is_cuda = True


@pytest.mark.regression("loss-without-triton")
def test_the_loss_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_ops, "HAS_TRITON", False)
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("homing.lm.model.kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    head, targets = drawn(64, 16, device="cpu"), torch.randint(60, (8,), generator=torch.Generator().manual_seed(0))
    h = drawn(8, 16, device="cpu").requires_grad_()
    right = F.cross_entropy((h @ head.t())[:, :60], targets)
    (dh,) = torch.autograd.grad(right, h)
    there = h.detach().as_subclass(OnCard).requires_grad_()
    try:
        loss = mean_loss(there, head, targets, 60)
    except ImportError as exc:
        pytest.fail(f"the loss imports Triton: {exc}")
    assert error(loss, right) < MOST_ERROR
    assert error(torch.autograd.grad(loss, there)[0], dh) < MOST_ERROR


def test_kernels_are_launched_on_the_gpu_that_holds_the_tensors() -> None:
    from homing.lm.model.kernels import launching

    with FakeTensorMode():
        x = torch.empty(2, device="cuda:1")
        context = launching(x=x)
    assert isinstance(context, torch.cuda.device)
    assert context.idx == 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_compute_on_the_second_gpu_while_the_first_is_current() -> None:
    torch.cuda.set_device(0)
    x = drawn(4, 40, device="cuda:1")
    gate, up = x.chunk(2, dim=-1)
    assert error(fused_ops.swiglu(x), F.silu(gate) * up) < MOST_ERROR
    assert torch.cuda.current_device() == 0
