"""Which attention this card does best: raced at the start, each first compared with the plain one.

    candidates  cudnn | flash | efficient, as torch offers them here; math is the measure; auto (torch's own choice) is
                what is left if all fail
    a race      forward and backward on random heads of the model's own shape, timed at its whole context; compared on
                2,048 positions at most, since math holds all scores; wrong or refused: out, and said why
    segments    FlexAttention against a boolean mask, where rows hold several texts

The best differs by card (docs/engine.md, attention), and on some a candidate has been silently wrong: so nothing is
taken on trust. The choice is recorded with the run and kept when it goes on on the same card.

Shapes: B rows, H query heads, G KV heads, T positions, K head size.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from homing.lm.model.sdpa import chosen, expand_heads, set_chosen
from homing.lm.model.segments import attend_inside, can_flex, isolate
from homing.wire.run import Model

__all__ = ["ATTENTIONS", "Race", "race", "race_attention", "race_segments", "use_attention", "using_attention"]

ATTENTIONS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_COMPARED = 2048  # positions, at most
_TOKENS = 16384  # of a race: enough to fill a card, and done in milliseconds
_LAPS = 5
# Against fp32: what bf16 itself loses in sums of this length, with room. A wrong kernel is off by its whole size.
_MOST_ERROR = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 1e-3}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Race:
    winner: str
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # why

    def told(self) -> str:
        ran = [f"{name} {1e3 * seconds:.2f} ms" for name, seconds in sorted(self.seconds.items(), key=lambda x: x[1])]
        out = [f"{name} is out: {why}" for name, why in self.refused.items()]
        return "; ".join(ran + out) or "by a fixed rule, not timed"


def race_attention(shape: Model, device: torch.device, dtype: torch.dtype, is_timed: bool = True) -> Race:
    """Not `is_timed`: the first that is right of flash, efficient and cudnn, whichever is faster."""
    heads = _heads(shape, device, dtype)

    def by(backend: SDPBackend) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if backend == SDPBackend.EFFICIENT_ATTENTION:  # it takes no grouped heads, here as in training
                k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
            with sdpa_kernel([backend]):
                is_grouped = q.shape[1] != k.shape[1]
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)

        return attend

    order = ("cudnn", "flash", "efficient") if is_timed else ("flash", "efficient", "cudnn")
    candidates = {name: by(ATTENTIONS[name]) for name in order}
    return race(candidates, by(SDPBackend.MATH), heads, last="auto", is_timed=is_timed)


def race_segments(shape: Model, device: torch.device, dtype: torch.dtype, is_timed: bool = True) -> Race:
    """`mask` runs everywhere, so it is the measure and what is left; `flex` must be right and faster, or only right if
    not `is_timed`."""
    if not can_flex(shape.context, device):
        return Race("mask", refused={"flex": f"it needs CUDA and a context of whole blocks, not {shape.context}"})
    heads = _heads(shape, device, dtype)
    lengths = torch.arange(shape.context, device=device) // max(1, shape.context // 4 - 7)  # ends inside of blocks
    segments_BT = lengths.expand(len(heads[0]), -1)

    def by(is_flex: bool) -> Attend:
        masks: dict[tuple[int, int], Any] = {}  # made when they are first used: a plain one of a long row is large

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows, length = len(q), q.shape[2]
            if (rows, length) not in masks:
                masks[rows, length] = isolate(segments_BT[:rows, :length], is_flex=is_flex).mask
            return attend_inside(q, k, v, masks[rows, length])

        return attend

    candidates = {"mask": by(False), "flex": by(True)} if is_timed else {"flex": by(True)}
    return race(candidates, by(False), heads, last="mask", is_timed=is_timed)


def race(
    candidates: Mapping[str, Attend], reference: Attend, heads: tuple[Tensor, ...], *, last: str, is_timed: bool = True
) -> Race:
    """The quickest of those that are right, or the first of them; `last` where none is."""
    few = _few(heads)
    wanted = _run(reference, tuple(part.float() for part in few))
    most = _MOST_ERROR[heads[0].dtype]
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, attend in candidates.items():
        try:
            error = max(
                float((mine.float() - right).norm() / right.norm())
                for mine, right in zip(_run(attend, few), wanted, strict=True)
            )
            if not error <= most:  # also what is no number
                refused[name] = f"it differs from the plain one by {error:.1%}"
                continue
            if is_timed:
                seconds[name] = _time(attend, heads)
                continue
            _run(attend, heads)  # it must also be able to do the whole length
            return Race(name, {}, refused)
        except Exception as exc:  # not built for this card, this type or this shape: each says so in its own way
            refused[name] = (str(exc).strip().splitlines() or [type(exc).__name__])[0][:200]
    winner = min(seconds, key=lambda name: seconds[name]) if seconds else last
    return Race(winner, seconds, refused)


def use_attention(name: str) -> None:
    """From now on, in this process. What the chosen one cannot do (a mask, a cache) falls to efficient attention."""
    set_chosen(name)
    if name == "auto":
        return
    torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
    torch.backends.cuda.enable_flash_sdp(name == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(name != "math")
    torch.backends.cuda.enable_math_sdp(True)


@contextlib.contextmanager
def using_attention(name: str) -> Iterator[None]:
    """As `use_attention`, until the end of the context."""
    switches, before = torch.backends.cuda, chosen()
    is_on = (switches.cudnn_sdp_enabled(), switches.flash_sdp_enabled(), switches.mem_efficient_sdp_enabled())
    has_math = switches.math_sdp_enabled()
    try:
        use_attention(name)
        yield
    finally:
        set_chosen(before)
        switches.enable_cudnn_sdp(is_on[0])
        switches.enable_flash_sdp(is_on[1])
        switches.enable_mem_efficient_sdp(is_on[2])
        switches.enable_math_sdp(has_math)


def _heads(shape: Model, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(0)
    B = max(1, _TOKENS // shape.context)

    def drawn(num_heads: int) -> Tensor:
        # Laid out as the projections leave them: positions before heads.
        size = (B, shape.context, num_heads, shape.head_size)
        return torch.randn(size, device=device, dtype=dtype, generator=generator).transpose(1, 2)

    return drawn(shape.num_heads), drawn(shape.num_kv_heads), drawn(shape.num_kv_heads)


def _few(heads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One row, two KV heads with their queries, and at most `_COMPARED` positions: the plain way holds all scores, and
    the card may be small."""
    q, k, v = (part[:1, :, :_COMPARED] for part in heads)
    num = min(2, k.shape[1])
    return q[:, : num * (q.shape[1] // k.shape[1])], k[:, :num], v[:, :num]


def _run(attend: Attend, heads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output and the gradients of queries, keys and values."""
    with torch.enable_grad():
        leaves = tuple(part.detach().requires_grad_() for part in heads)
        y = attend(*leaves)
        return (y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y)))


def _time(attend: Attend, heads: tuple[Tensor, ...]) -> float:
    def lap() -> float:
        _wait(heads[0].device)
        begun = time.perf_counter()
        _run(attend, heads)
        _wait(heads[0].device)
        return time.perf_counter() - begun

    lap()
    return statistics.median(lap() for _ in range(_LAPS))


def _wait(device: torch.device) -> Any:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
