"""Muon: momentum, then the nearest orthogonal matrix as the step; all matrices of one shape at once.

    gradient -> Nesterov momentum -> polar factor U V^T of it -> times max(1, rows/cols)^0.5 -> step

A matrix is learned best when every direction of it moves by the same amount, and the polar factor does that. It comes
from five matrix polynomials ("Polar Express", arXiv:2505.16932), each the best one for the range of singular values
that the one before leaves. Matrices of equal shape are stacked, so that a model with hundreds of them needs a handful
of batched products instead of thousands of small ones.

Shapes: M matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from homing.wire.run import Optimizer

__all__ = ["POLAR_EXPRESS", "MuonGroup", "momentum_at", "orthogonalize"]

# x -> a x + b x^3 + c x^5, one after the other. They assume singular values in [0.001, 1] and lie a little inside
# the optimal ones, so that rounding in bf16 cannot push a value out of the range where they converge.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
NORM_MARGIN = 1.02  # the Frobenius norm bounds the largest singular value; the rest is for rounding
MOMENTUM_WARMUP_STEPS = 300
EPS = 1e-7  # a gradient of zeros stays zeros


def orthogonalize(g_MRC: Tensor) -> Tensor:
    """The polar factor of each matrix, in fp32. In bf16 on CUDA, where it is several times faster and no worse."""
    is_tall = g_MRC.shape[-2] > g_MRC.shape[-1]
    x = g_MRC.mT if is_tall else g_MRC  # the products below are over the shorter side
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * NORM_MARGIN + EPS)
    x = x.to(torch.bfloat16 if x.device.type == "cuda" else torch.float32)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        # a x + (b gram + c gram^2) x, with the sums folded into the products.
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a, alpha=1.0)
    return (x.mT if is_tall else x).float()


class MuonGroup:
    """The matrices of one shape, with their momentum in one tensor."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], spec: Optimizer) -> None:
        self.names = [name for name, _ in named]
        self.parameters: list[Tensor] = [parameter for _, parameter in named]
        self.spec = spec
        rows, cols = self.parameters[0].shape
        # Without it a tall matrix, whose columns are longer, would change its outputs less per step than a square one.
        self.scale = max(1.0, rows / cols) ** 0.5
        device = self.parameters[0].device
        self.momentum_MRC = torch.zeros(len(named), rows, cols, device=device, dtype=torch.float32)
        # The mean square of each row or column, whichever are more; empty where it is not asked for.
        self.along = -1 if rows >= cols else -2
        sides = (rows, 1) if self.along == -1 else (1, cols)
        num_squares = len(named) if spec.variance_beta else 0
        self.squares = torch.zeros(num_squares, *sides, device=device, dtype=torch.float32)

    @torch.no_grad()
    def step(self, lr_scale: float, is_good: Tensor, num_steps: int) -> None:
        """`is_good` is one number on the device, 1 or 0: with 0 nothing changes, whatever the gradients hold."""
        lr, momentum = self.spec.lr * lr_scale, momentum_at(self.spec, num_steps)
        g_MRC = torch.stack([_grad(p, name) for p, name in zip(self.parameters, self.names, strict=True)]).float()
        # In the place of a gradient that is no number, the momentum: which moves itself nowhere.
        g_MRC = torch.where(is_good > 0, g_MRC, self.momentum_MRC)
        self.momentum_MRC.lerp_(g_MRC, 1.0 - momentum)
        update_MRC = orthogonalize(g_MRC.lerp_(self.momentum_MRC, momentum))
        if self.spec.variance_beta:
            self._even_out(update_MRC, is_good)
        self._decay(update_MRC, lr * is_good)
        torch._foreach_add_(self.parameters, update_MRC.mul_(is_good).unbind(), alpha=-lr * self.scale)

    def _even_out(self, update_MRC: Tensor, is_good: Tensor) -> None:
        """Rows (or columns) that move more than others over time are slowed, the others hurried; the update's size
        stays as it is. ("NorMuon", arXiv:2510.05491)"""
        squares = update_MRC.square().mean(dim=self.along, keepdim=True)
        self.squares.lerp_(squares, (1.0 - self.spec.variance_beta) * is_good)
        factor = self.squares.clamp(min=1e-10).rsqrt()
        before, after = squares.sum(dim=(1, 2), keepdim=True), (squares * factor.square()).sum(dim=(1, 2), keepdim=True)
        update_MRC.mul_(factor * (before / after.clamp(min=1e-10)).sqrt())

    def _decay(self, update_MRC: Tensor, lr: Tensor) -> None:
        if not self.spec.weight_decay:
            return
        if not self.spec.is_cautious:
            torch._foreach_mul_(self.parameters, 1.0 - lr * self.spec.weight_decay)
            return
        # Only where the step itself goes towards zero: decay helps it along and never works against it.
        for parameter, update in zip(self.parameters, update_MRC, strict=True):
            parameter.sub_(parameter * (parameter * update > 0) * (lr * self.spec.weight_decay))


def momentum_at(spec: Optimizer, num_steps: int) -> float:
    """Young weights turn quickly and want a short memory; it grows to its full length over the first steps."""
    if not spec.momentum_start:
        return spec.momentum
    part = min(1.0, num_steps / MOMENTUM_WARMUP_STEPS)
    return spec.momentum_start + part * (spec.momentum - spec.momentum_start)


def _grad(parameter: Tensor, name: str) -> Tensor:
    assert parameter.grad is not None, f"{name} has no gradient; backward before step"
    return parameter.grad
