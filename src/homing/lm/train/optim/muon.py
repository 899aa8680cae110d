"""The Muon optimizer: applies momentum, then replaces each update by the nearest orthogonal matrix.

    gradient -> Nesterov momentum -> its polar factor U V^T -> times max(1, rows/cols)^0.5 -> step

A matrix learns best when all its directions move by the same amount, which the polar factor achieves. It is computed
with five matrix polynomials ("Polar Express", arXiv:2505.16932), each optimal for the range of singular values after
the previous one. Matrices of equal shape are stacked and processed together, so that a model with hundreds of matrices
needs a handful of batched matmuls instead of thousands of small matmuls. When compiled, the element-wise work between
the matmuls takes a few passes over memory. Without compilation it takes a few dozen passes, and on a GPU these take
longer than the matmuls. With several ranks, each rank orthogonalizes its share of the matrices and sends the result to
the others. A group is always stepped as a whole, even with offloaded momentum, because matmuls of different sizes might
round differently.

Shapes: M matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from homing.lm.model.row_shards import Part
from homing.lm.train.distributed.ranks import ALONE, Ranks
from homing.lm.train.optim.offload import Load, Now, Place
from homing.wire.run_json import Optimizer

__all__ = [
    "EAGER",
    "POLAR_EXPRESS",
    "MuonGroup",
    "compiled_parts",
    "evening_factor_",
    "how_for",
    "momentum_at",
    "orthogonalize",
    "product_type",
    "shrink_",
]

# Coefficients (a, b, c) of the polynomials a x + b x^3 + c x^5, which are applied one after another. They assume
# singular values in [0.001, 1]. They are slightly more cautious than the optimal coefficients, so that bf16 rounding
# cannot push a value out of the range of convergence.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# Each matrix is divided by its Frobenius norm and by this margin. No singular value exceeds the norm; the margin allows
# for rounding errors.
NORM_MARGIN = 1.02
MOMENTUM_WARMUP_STEPS = 300
EPS = 1e-7  # added to the norm that a gradient is divided by, so that a gradient of zero stays zero
Parts = tuple[Callable[..., Any], Callable[..., Any]]  # `direct_` and `move_`, or their compiled versions


def orthogonalize(g_MRC: Tensor, kind: torch.dtype = torch.float32) -> Tensor:
    """Return the polar factor of each matrix, computed in the dtype `kind`.

    On a GPU, a 16-bit dtype is several times faster and no worse.
    """
    is_tall = g_MRC.shape[-2] > g_MRC.shape[-1]
    x = g_MRC.mT if is_tall else g_MRC  # transpose tall matrices, so that x @ x.mT has the size of the shorter side
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * NORM_MARGIN + EPS)
    x = x.to(kind)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        # Compute a x + (b gram + c gram^2) x, with the additions fused into the matmuls.
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a, alpha=1.0)
    return x.mT if is_tall else x


def product_type(device: torch.device) -> torch.dtype:
    """Return the dtype for `orthogonalize`. All values are near 1, so on GPUs without bf16, fp16 has enough range."""
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


class MuonGroup:
    """A parameter group for Muon: all matrices of one shape.

    All weights are in one stacked tensor, whose slices are the parameters; all momentum is in a second stacked tensor.
    So each operation processes all matrices at the same time, without first copying them into one tensor.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], spec: Optimizer, ranks: Ranks = ALONE,
        place: Place | None = None,
    ) -> None:  # fmt: skip
        self.names = [name for name, _ in named]
        self.parameters: list[Tensor] = [parameter for _, parameter in named]
        self.spec, self.ranks = spec, ranks
        rows, cols = self.parameters[0].shape
        self.weights_MRC = torch.stack([parameter.detach() for parameter in self.parameters])
        for parameter, weight in zip(self.parameters, self.weights_MRC.unbind(), strict=True):
            parameter.data = weight
        device = self.weights_MRC.device
        self.place = place or Place(device)
        self.momentum_MRC = self.place.full(self.weights_MRC.shape, 0.0, torch.float32)
        self.how = how_for(rows, cols, spec, device, self.ranks.share(len(named)))
        # The second moment: one number per row of each matrix or, if there are more columns than rows, per column. It
        # is empty if variance_beta is 0. It is small and always stays on the device.
        sides = (rows, 1) if self.how.along == -1 else (1, cols)
        num_squares = len(named) if spec.variance_beta else 0
        self.squares = torch.zeros(num_squares, *sides, device=device, dtype=torch.float32)
        self.parts: Parts = EAGER
        # The learning rate and momentum are 0-dim CPU tensors, which are read when a kernel is launched. If they were
        # Python numbers, every change would trigger a recompilation.
        self._rate, self._momentum = torch.zeros((), device="cpu"), torch.zeros((), device="cpu")

    @property
    def is_compiled(self) -> bool:
        return self.parts is not EAGER

    def loads(self) -> list[Load]:
        return [Load([self.momentum_MRC], self._step, self.place.is_away)]

    def state(self) -> Iterator[tuple[str, Part]]:
        """Yield (name on disk, live tensor and its place) for each state tensor."""
        for name, momentum in zip(self.names, self.momentum_MRC, strict=True):
            yield f"{name}.momentum", Part(tuple(momentum.shape), 0, momentum)
        # `squares` is empty if variance_beta is 0.
        for name, squares in zip(self.names, self.squares, strict=False):
            yield f"{name}.squares", Part(tuple(squares.shape), 0, squares)

    @torch.no_grad()
    def _step(self, states: Sequence[Tensor], now: Now) -> None:
        (momentum_MRC,) = states
        is_in_place = self.parameters[0].data_ptr() == self.weights_MRC.data_ptr()
        assert is_in_place, "the model was moved after its optimizer was created"
        g_MRC = torch.stack([_grad(p, name) for p, name in zip(self.parameters, self.names, strict=True)]).float()
        rate: Any = self.spec.lr * now.lr_scale
        momentum: Any = momentum_at(self.spec, now.num_steps)
        direct, move = self.parts
        if self.is_compiled:
            rate, momentum = self._rate.fill_(rate), self._momentum.fill_(momentum)
        mine_mRC = direct(momentum_MRC, g_MRC, now.is_good, momentum, self.how)
        update_MRC = self.ranks.gather(mine_mRC, len(g_MRC), is_rehearsed=now.is_rehearsed)
        move(self.weights_MRC, self.squares, update_MRC, now.is_good, rate, self.how)


@dataclass(frozen=True)
class How:
    """The constants of a group's optimizer step, which are compiled into the kernels."""

    scale: float
    along: int
    variance_beta: float
    decay: float
    is_cautious: bool
    kind: torch.dtype
    mine: slice  # the matrices that this rank orthogonalizes


def how_for(rows: int, cols: int, spec: Optimizer, device: torch.device, mine: slice = slice(None)) -> How:
    return How(
        # Scale up the steps of tall matrices. Without this factor a step would change their outputs less than those of
        # other matrices, because their columns are longer.
        scale=max(1.0, rows / cols) ** 0.5,
        along=-1 if rows >= cols else -2,
        variance_beta=spec.variance_beta,
        decay=spec.weight_decay,
        is_cautious=spec.is_cautious,
        kind=product_type(device),
        mine=mine,
    )


def direct_(momentum_MRC: Tensor, g_MRC: Tensor, is_good: Tensor, momentum: Any, how: How) -> Tensor:
    """Update the momentum with the gradients; return the orthogonalized updates of this rank's matrices."""
    # If the step is to be skipped, replace the gradient with the momentum, so that the momentum stays unchanged.
    g_MRC = torch.where(is_good > 0, g_MRC, momentum_MRC)
    momentum_MRC.lerp_(g_MRC, 1.0 - momentum)
    return orthogonalize(torch.lerp(g_MRC[how.mine], momentum_MRC[how.mine], momentum), how.kind)


def move_(weights_MRC: Tensor, squares: Tensor, update_MRC: Tensor, is_good: Tensor, rate: Any, how: How) -> None:
    update_MRC = update_MRC.float()
    if how.variance_beta:
        update_MRC = update_MRC * evening_factor_(squares, update_MRC, is_good, how)
    rate = rate * is_good
    shrink_(weights_MRC, update_MRC, rate, how)
    weights_MRC.sub_(update_MRC * (rate * how.scale))


def shrink_(weights: Tensor, update: Tensor, rate: Any, how: How) -> None:
    """Apply weight decay."""
    if how.decay and how.is_cautious:
        # Cautious weight decay: a weight decays only if the update moves it towards zero too.
        weights.sub_(weights * (weights * update > 0) * (rate * how.decay))
    elif how.decay:
        weights.mul_(1.0 - rate * how.decay)


def evening_factor_(squares: Tensor, update_MRC: Tensor, is_good: Tensor, how: How) -> Tensor:
    """Return a factor per row (or column) that makes all rows move equally far over time and keeps the update's norm.

    The method is from "NorMuon" (arXiv:2510.05491).
    """
    now = update_MRC.square().mean(dim=how.along, keepdim=True)
    squares.lerp_(now, (1.0 - how.variance_beta) * is_good)
    factor = squares.clamp(min=1e-10).rsqrt()
    before, after = now.sum(dim=(1, 2), keepdim=True), (now * factor.square()).sum(dim=(1, 2), keepdim=True)
    return factor * (before / after.clamp(min=1e-10)).sqrt()


EAGER: Parts = (direct_, move_)


def compiled_parts(**settings: Any) -> Parts:
    # torch compiles one graph per matrix shape, and a model may have more shapes than the default recompile limit.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    direct, move = (torch.compile(part, dynamic=False, fullgraph=True, **settings) for part in EAGER)
    return direct, move


def momentum_at(spec: Optimizer, num_steps: int) -> float:
    """Return the momentum at a step. It grows over the first steps, because gradients change quickly early on."""
    if not spec.momentum_start:
        return spec.momentum
    part = min(1.0, num_steps / MOMENTUM_WARMUP_STEPS)
    return spec.momentum_start + part * (spec.momentum - spec.momentum_start)


def _grad(parameter: Tensor, name: str) -> Tensor:
    assert parameter.grad is not None, f"{name} has no gradient; call backward() before step()"
    return parameter.grad
