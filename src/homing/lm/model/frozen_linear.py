"""Matmuls with frozen base weights plus trained LoRA adapters.

    y = x W^T + b + scale * drop(x) A^T B^T        W: fp32, bf16 or NF4, never with a gradient; A, B: trained

Layers that read the same x are computed together: each writes its columns of a shared y, and if their weights are in
one tensor, a single matmul computes them all. The backward pass reads W again (NF4 is dequantized a second time), so
only x and the low-rank x A^T are saved for it. The op is opaque to torch.compile, which optimizes the code around it.

Dropout seeds its random generator with (seed, step, row, layer) and keeps no other state, so a resumed run drops the
same elements, and so does a block that is recomputed in the backward pass.

Shapes: N tokens, D inputs, F outputs of all layers concatenated, R rank times the number of layers with an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from homing.errors import DataError
from homing.lm.model.fused_ops import opaque
from homing.lm.model.nf4 import Nf4, dequantize, quantize

__all__ = [
    "STORAGES",
    "Adapter",
    "DropoutClock",
    "FrozenLinear",
    "FrozenWeight",
    "adapted_product",
    "lay_together",
    "load_adapter",
    "lora_tensors",
    "row_norms",
]

_PEFT_PREFIX = "base_model.model."  # prefix of each name in adapter_model.safetensors
STORAGES = {"fp32": torch.float32, "bf16": torch.bfloat16, "nf4": torch.uint8}


class FrozenWeight(nn.Module):
    """One frozen matrix (F, D) in its storage format.

    Its tensors are buffers, so they move with the model but are invisible to optimizers.
    """

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.shape = (num_out, num_in)
        self.parts: list[str] = []
        # If `lay_together` has joined this weight with others, the tensor that contains them all; else None.
        self.together: Tensor | None = None

    @torch.no_grad()
    def fill(self, weight: Tensor, storage: str, device: torch.device) -> FrozenWeight:
        assert tuple(weight.shape) == self.shape, f"{tuple(weight.shape)} is not {self.shape}"
        # Quantize on the target device: a GPU takes milliseconds for a matrix, a CPU seconds.
        stored = {"dense": weight.to(device, STORAGES[storage])} if storage != "nf4" else None
        stored = stored or quantize(weight.to(device))._asdict()
        for name, tensor in stored.items():
            self.register_buffer(name, tensor.contiguous(), persistent=False)
        self.parts = list(stored)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenWeight:
        """Discard the joined tensor if this weight was moved in memory and is therefore no longer a slice of it."""
        before = [tensor.data_ptr() for tensor in self.tensors()]
        super()._apply(fn, recurse)
        if before != [tensor.data_ptr() for tensor in self.tensors()]:
            self.together = None
        return self

    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.parts]

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        return _dense(self.tensors(), self.shape, dtype)


@torch.no_grad()
def lay_together(weights: Sequence[FrozenWeight]) -> None:
    """Join the weights of layers that read the same x into one tensor; each weight becomes a slice of it.

    NF4 weights are not joined, because they are dequantized one at a time.
    """
    if any(len(weight.parts) > 1 for weight in weights):
        return
    together = torch.cat([tensor for weight in weights for tensor in weight.tensors()])
    for weight, rows in zip(weights, together.split([weight.shape[0] for weight in weights]), strict=True):
        setattr(weight, weight.parts[0], rows)
    weights[0].together = together


class DropoutClock:
    """The dropout seed shared by all layers of a model. It is set at each step and advanced by each forward pass."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step, self.row = 0, 0
        # The key stays on the CPU, where the op can read its value without waiting for a GPU.
        self.key = torch.zeros((), dtype=torch.int64, device="cpu")

    def begin_step(self, step: int, first_row: int = 0) -> None:
        self.step, self.row = step, first_row

    def next_piece(self, num_rows: int) -> None:
        self.key = torch.tensor(_mix(self.seed, self.step, self.row), dtype=torch.int64, device="cpu")
        self.row += num_rows


class Adapter(nn.Module):
    """LoRA's matrices A and B, plus DoRA's magnitude per output if used; always fp32, even on a quantized base."""

    def __init__(self, num_in: int, num_out: int, rank: int, salt: int, clock: DropoutClock, device: Any) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, num_in, device=device))
        self.lora_B = nn.Parameter(torch.zeros(num_out, rank, device=device))
        self.magnitude: nn.Parameter | None = None
        self.scale, self.dropout, self.clock = 1.0, 0.0, clock
        # The salt is not registered as a buffer, so that it stays on the CPU when the model moves.
        self.salt = torch.tensor(salt, dtype=torch.int64, device="cpu")
        self.lengths: Tensor | None = None  # DoRA's row norms, as of the last call to `hold_lengths`
        self.is_held = False

    @torch.no_grad()
    def hold_lengths(self, weight: FrozenWeight) -> None:
        found = row_norms(weight, self)
        self.lengths = found if self.lengths is None else self.lengths.copy_(found)
        self.is_held = True


class FrozenLinear(nn.Module):
    """A replacement for Linear with a frozen weight in its storage format, a frozen bias and an optional adapter."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = FrozenWeight(num_in, num_out)
        self.bias: Tensor | None
        self.register_buffer("bias", None, persistent=False)
        self.adapter: Adapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        return adapted_product(x, [self.weight], [self.bias], [self.adapter])


@dataclass(frozen=True)
class _Plan:
    """The arguments of a matrix product that are not tensors."""

    widths: tuple[int, ...]  # number of outputs of each layer
    has_adapter: tuple[bool, ...]
    num_parts: int  # number of tensors per stored weight: 1, or 4 in NF4; 0 if all weights are in a single fused tensor
    has_bias: bool
    scale: float
    dropout: float


def adapted_product(
    x: Tensor, weights: Sequence[FrozenWeight], biases: Sequence[Tensor | None], adapters: Sequence[Adapter | None]
) -> Tensor:
    """Apply several layers to x; return their outputs concatenated."""
    trained = [adapter for adapter in adapters if adapter is not None]
    has_dora = any(adapter.magnitude is not None for adapter in trained)
    is_training = torch.is_grad_enabled()
    widths = tuple(weight.shape[0] for weight in weights)
    together = weights[0].together
    is_one = together is not None and together.shape[0] == sum(widths)
    plan = _Plan(
        widths=widths,
        has_adapter=tuple(adapter is not None for adapter in adapters),
        num_parts=0 if is_one else len(weights[0].parts),
        has_bias=biases[0] is not None and not has_dora,
        scale=trained[0].scale if trained else 1.0,
        dropout=trained[0].dropout if trained and is_training else 0.0,
    )
    stored = [tensor for weight in weights for tensor in weight.tensors()]
    if is_one and together is not None:
        stored = [together]
    if plan.has_bias:
        stored += [bias for bias in biases if bias is not None]
    a_RD, b_Fr, key = None, None, None
    if trained:
        a_RD = torch.cat([adapter.lora_A.to(x.dtype) for adapter in trained])
        b_Fr = torch.cat([adapter.lora_B.to(x.dtype) for adapter in trained])
    if plan.dropout:
        key = torch.stack([trained[0].clock.key, *(adapter.salt for adapter in trained)])
    y = _Adapted.apply(x, a_RD, b_Fr, key, plan, *stored)
    return _as_dora(y, weights, biases, adapters) if has_dora else y


def _as_dora(
    y: Tensor, weights: Sequence[FrozenWeight], biases: Sequence[Tensor | None], adapters: Sequence[Adapter | None]
) -> Tensor:
    """Scale every output so that its weight row has the norm given by DoRA's magnitude, then add biases.

    The row norms are treated as constants in the backward pass, as in the paper (arXiv:2402.09353, 4.3). Dropout
    applies only to the adapter's input, not to the input of the base weights.
    """
    factors = []
    for weight, adapter in zip(weights, adapters, strict=True):
        if adapter is None or adapter.magnitude is None:
            factors.append(torch.ones(weight.shape[0], device=y.device))
        else:
            lengths = adapter.lengths if adapter.is_held else None
            factors.append(adapter.magnitude / (row_norms(weight, adapter) if lengths is None else lengths))
    y = y * torch.cat(factors).to(y.dtype)
    return y if biases[0] is None else y + torch.cat([bias for bias in biases if bias is not None]).to(y.dtype)


def row_norms(weight: FrozenWeight, adapter: Adapter) -> Tensor:
    """Return the norm of each row of W + scale B A, in fp32."""
    return _row_norms(weight.tensors(), adapter.lora_A.detach(), adapter.lora_B.detach(), adapter.scale)


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a_RD: Tensor | None, b_Fr: Tensor | None, key: Tensor | None, plan: _Plan, *stored: Tensor
    ) -> Tensor:
        y, h_NR = _product(
            x, a_RD, b_Fr, key, list(stored), list(plan.widths), list(plan.has_adapter), plan.num_parts, plan.has_bias,
            plan.scale, plan.dropout,
        )  # fmt: skip
        # The backward pass needs x only for the gradient of A, so without an adapter only the weights are saved.
        ctx.save_for_backward(x if a_RD is not None else None, a_RD, b_Fr, h_NR, key, *stored)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, a_RD, b_Fr, h_NR, key, *stored = ctx.saved_tensors
        plan: _Plan = ctx.plan
        dx, da_RD, db_Fr = _product_backward(
            dy, x, a_RD, b_Fr, h_NR, key, stored, list(plan.widths), list(plan.has_adapter), plan.num_parts,
            plan.scale, plan.dropout, ctx.needs_input_grad[0],
        )  # fmt: skip
        has_adapter = a_RD is not None
        return (
            dx if ctx.needs_input_grad[0] else None,
            da_RD if has_adapter else None,
            db_Fr if has_adapter else None,
            None,
            None,
            *(None for _ in stored),
        )


def _adapted_product_like(
    x: Tensor, a_RD: Tensor | None, b_Fr: Tensor | None, key: Tensor | None, stored: list[Tensor], widths: list[int],
    has_adapter: list[bool], num_parts: int, has_bias: bool, scale: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_narrow = 0 if a_RD is None else a_RD.shape[0]
    return x.new_empty(*x.shape[:-1], sum(widths)), x.new_empty(x.numel() // x.shape[-1], num_narrow)


@opaque("adapted_product", like=_adapted_product_like)
def _product(
    x: Tensor, a_RD: Tensor | None, b_Fr: Tensor | None, key: Tensor | None, stored: list[Tensor], widths: list[int],
    has_adapter: list[bool], num_parts: int, has_bias: bool, scale: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y, and h = drop(x) A^T, which the backward pass needs."""
    x_ND = x.reshape(-1, x.shape[-1])
    y_NF = x.new_empty(len(x_ND), sum(widths))
    h_NR = x.new_empty(len(x_ND), 0) if a_RD is None else _narrow(x_ND, a_RD, key, dropout)
    # Compute the low-rank products before the wide ones. A wide matmul can accumulate into y at no extra cost, but a
    # low-rank one would have to read all of y again.
    is_begun = has_bias or b_Fr is not None
    for part in _parts(widths, has_adapter) if is_begun else ():
        y_Nf = y_NF[:, part.columns]
        bias_f = stored[len(stored) - len(widths) + part.number].to(x.dtype) if has_bias else None
        if part.adapter is None or b_Fr is None:
            y_Nf.zero_() if bias_f is None else y_Nf.copy_(bias_f)
            continue
        b_fr = b_Fr[part.trained_rows]
        h_Nr, beta = h_NR[:, part.narrow(b_fr.shape[1])], 0 if bias_f is None else 1
        torch.addmm(y_Nf if bias_f is None else bias_f, h_Nr, b_fr.t(), beta=beta, alpha=scale, out=y_Nf)
    for columns, tensors, width in _products(stored, widths, num_parts):
        y_Nf = y_NF[:, columns]
        weight_fD = _dense(tensors, (width, x.shape[-1]), x.dtype)
        torch.addmm(y_Nf, x_ND, weight_fD.t(), beta=1 if is_begun else 0, out=y_Nf)
        del weight_fD  # free the dequantized copy of an NF4 weight before the next one is created
    return y_NF.view(*x.shape[:-1], -1), h_NR


def _adapted_product_backward_like(
    dy: Tensor, x: Tensor | None, a_RD: Tensor | None, b_Fr: Tensor | None, h_NR: Tensor, key: Tensor | None,
    stored: list[Tensor], widths: list[int], has_adapter: list[bool], num_parts: int, scale: float, dropout: float,
    needs_dx: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    num_in = _num_in(stored, widths, num_parts)
    dx = dy.new_empty(*dy.shape[:-1], num_in) if needs_dx else dy.new_empty(0)
    da_RD, db_Fr = (dy.new_empty(0) if t is None else torch.empty_like(t) for t in (a_RD, b_Fr))
    return dx, da_RD, db_Fr


@opaque("adapted_product_backward", like=_adapted_product_backward_like)
def _product_backward(
    dy: Tensor, x: Tensor | None, a_RD: Tensor | None, b_Fr: Tensor | None, h_NR: Tensor, key: Tensor | None,
    stored: list[Tensor], widths: list[int], has_adapter: list[bool], num_parts: int, scale: float, dropout: float,
    needs_dx: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, A and B; an unneeded gradient is an empty tensor."""
    dy_NF = dy.reshape(-1, dy.shape[-1])
    num_in = _num_in(stored, widths, num_parts)
    dx_ND = dy.new_empty(len(dy_NF), num_in) if needs_dx else dy.new_empty(0)
    da_RD, db_Fr = (dy.new_empty(0) if t is None else torch.empty_like(t) for t in (a_RD, b_Fr))
    is_begun = False
    if a_RD is not None and b_Fr is not None and x is not None:
        dh_NR = torch.empty_like(h_NR)
        for part in _parts(widths, has_adapter):
            if part.adapter is None:
                continue
            dy_Nf, columns = dy_NF[:, part.columns], part.narrow(b_Fr.shape[1])
            torch.mm(dy_Nf, b_Fr[part.trained_rows], out=dh_NR[:, columns])
            torch.mm(dy_Nf.t(), h_NR[:, columns], out=db_Fr[part.trained_rows])
        dh_NR.mul_(scale)
        db_Fr.mul_(scale)
        _narrow_backward(x.reshape(-1, num_in), a_RD, dh_NR, key, dropout, da_RD, dx_ND if needs_dx else None)
        is_begun = True
    for columns, tensors, width in _products(stored, widths, num_parts) if needs_dx else ():
        weight_fD = _dense(tensors, (width, num_in), dy.dtype)
        dx_ND.addmm_(dy_NF[:, columns], weight_fD, beta=1 if is_begun else 0)
        is_begun = True
        del weight_fD
    return dx_ND.view(*dy.shape[:-1], num_in) if needs_dx else dx_ND, da_RD, db_Fr


def _row_norms_like(stored: list[Tensor], a_rD: Tensor, b_fr: Tensor, scale: float) -> Tensor:
    return b_fr.new_empty(b_fr.shape[0])


@opaque("row_norms", like=_row_norms_like)
def _row_norms(stored: list[Tensor], a_rD: Tensor, b_fr: Tensor, scale: float) -> Tensor:
    weight_fD = _dense(stored, (b_fr.shape[0], a_rD.shape[1]), torch.float32)
    return torch.addmm(weight_fD, b_fr, a_rD, alpha=scale).norm(dim=1)


@dataclass(frozen=True)
class _Part:
    """The position of one layer within a matrix product that computes several layers."""

    number: int
    width: int
    columns: slice  # columns of y that the layer writes
    adapter: int | None  # index of the layer's adapter among all adapters; None: the layer has no adapter
    trained_rows: slice  # rows of the joint B that belong to the layer's adapter

    def narrow(self, rank: int) -> slice:
        """Return the range of columns of h that belongs to this layer's adapter."""
        assert self.adapter is not None, "this layer has no adapter"
        return slice(self.adapter * rank, (self.adapter + 1) * rank)


def _parts(widths: list[int], has_adapter: list[bool]) -> list[_Part]:
    parts, start, row, adapter = [], 0, 0, 0
    for number, (width, is_adapted) in enumerate(zip(widths, has_adapter, strict=True)):
        own, rows = (adapter, slice(row, row + width)) if is_adapted else (None, slice(0, 0))
        parts.append(_Part(number, width, slice(start, start + width), own, rows))
        start += width
        adapter, row = (adapter + 1, row + width) if is_adapted else (adapter, row)
    return parts


def _products(stored: list[Tensor], widths: list[int], num_parts: int) -> Iterator[tuple[slice, list[Tensor], int]]:
    """Yield (columns of y, stored tensors of the weight, number of columns) for each matrix product."""
    if not num_parts:
        yield slice(0, sum(widths)), stored[:1], sum(widths)
        return
    start = 0
    for number, width in enumerate(widths):
        yield slice(start, start + width), stored[number * num_parts :][:num_parts], width
        start += width


def _narrow(x_ND: Tensor, a_RD: Tensor, key: Tensor | None, dropout: float) -> Tensor:
    if key is None:
        return x_ND @ a_RD.t()
    adapters = a_RD.chunk(len(key) - 1)
    return torch.cat([(x_ND * _kept(x_ND, key, n, dropout)) @ a.t() for n, a in enumerate(adapters)], dim=1)


def _narrow_backward(
    x_ND: Tensor, a_RD: Tensor, dh_NR: Tensor, key: Tensor | None, dropout: float, da_RD: Tensor, dx_ND: Tensor | None
) -> None:
    """Write the gradient of A into `da_RD`, and the adapter's part of x's gradient into `dx_ND` unless `dx_ND` is None.

    The caller adds the base weights' part of the gradient of x.
    """
    if key is None:
        torch.mm(dh_NR.t(), x_ND, out=da_RD)
        if dx_ND is not None:
            torch.mm(dh_NR, a_RD, out=dx_ND)
        return
    num_adapters = len(key) - 1
    rank = len(a_RD) // num_adapters
    for adapter in range(num_adapters):
        rows = slice(adapter * rank, (adapter + 1) * rank)
        kept_ND = _kept(x_ND, key, adapter, dropout)
        torch.mm(dh_NR[:, rows].t(), x_ND * kept_ND, out=da_RD[rows])
        if dx_ND is not None:
            through = (dh_NR[:, rows] @ a_RD[rows]).mul_(kept_ND)
            dx_ND.copy_(through) if adapter == 0 else dx_ND.add_(through)


def _kept(x_ND: Tensor, key: Tensor, adapter: int, dropout: float) -> Tensor:
    """Return the dropout mask: 0 for dropped elements, else 1 / (1 - dropout). The same key gives the same mask."""
    generator = torch.Generator(x_ND.device).manual_seed(_mix(int(key[0]), int(key[adapter + 1])))
    kept_ND = torch.empty_like(x_ND).bernoulli_(1.0 - dropout, generator=generator)
    return kept_ND.mul_(1.0 / (1.0 - dropout))


def _dense(parts: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return parts[0].to(dtype) if len(parts) == 1 else dequantize(Nf4(*parts), shape, dtype)


def _num_in(stored: list[Tensor], widths: list[int], num_parts: int) -> int:
    return stored[0].shape[1] if num_parts <= 1 else 2 * stored[0].numel() // widths[0]


def _mix(*numbers: int) -> int:
    """Hash several integers to 63 bits, so that similar inputs give very different hashes (splitmix64's finalizer)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 0x9E3779B97F4A7C15 + number + 0x632BE59BD9B4E019) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return mixed % 2**63


def lora_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict of the adapters' tensors in fp32, with peft's names, as stored in adapter_model.safetensors."""
    return {_peft_name(name): p.detach() for name, p in model.named_parameters() if ".adapter." in name}


@torch.no_grad()
def load_adapter(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors`, as returned by `lora_tensors`, into the adapters. A DataError lists the names that do not fit."""
    live = lora_tensors(model)
    problems = [f"{name} is missing." for name in live if name not in tensors]
    problems += [f"{name} is not in this adapter." for name in tensors if name not in live]
    for name in live.keys() & tensors.keys():
        if live[name].shape != tensors[name].shape:
            problems.append(f"{name} has shape {tuple(tensors[name].shape)}, not {tuple(live[name].shape)}.")
    if problems:
        raise DataError(
            what="The adapter does not fit the model.",
            why="\n".join(sorted(problems)[:12]),
            fix="Use the rank and targets that the adapter was trained with; its adapter_config.json lists them.",
        )
    for name, tensor in live.items():
        tensor.copy_(tensors[name])


def _peft_name(name: str) -> str:
    path, kind = name.split(".adapter.")
    ending = "lora_magnitude_vector" if kind == "magnitude" else f"{kind}.weight"
    return f"{_PEFT_PREFIX}{path}.{ending}"
