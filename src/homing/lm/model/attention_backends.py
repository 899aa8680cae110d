"""Selects the attention kernel for this GPU by verifying and timing the candidates at the start of a run.

    candidates  cudnn | flash | efficient, where torch supports them; math is the reference; auto (torch's own choice)
                is the fallback if all candidates fail
    timing      the forward and backward passes of each candidate are timed on random heads of the model's shape, at its
                full context
    checking    results are compared on at most 2,048 positions, because math keeps all scores in memory; wrong or
                unsupported candidates are excluded, and the reason is recorded
    segments    for rows that contain several texts, FlexAttention is compared with a boolean mask

The fastest kernel depends on the GPU (docs/development/engine.md, attention), and on some GPUs a candidate silently
returned wrong results, so every candidate is verified. The choice is recorded in checkpoints and reused when the run
resumes on the same GPU model.

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

from homing.lm.model.sdpa import attend_inside, can_flex, chosen, expand_heads, isolate, set_chosen
from homing.wire.run_json import Model

__all__ = ["ATTENTIONS", "Race", "race", "race_attention", "race_segments", "use_attention", "using_attention"]

ATTENTIONS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_COMPARED = 2048  # maximum number of positions on which a candidate is compared with the reference
_TOKENS = 16384  # number of tokens in a timed pass: enough to keep a GPU busy for a few milliseconds
_NUM_TIMINGS = 5
# Maximum relative error of a kernel compared with fp32: the rounding error of the dtype in sums of this length, plus a
# margin. A wrong kernel is off by about 100%.
_MOST_ERROR = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 1e-3}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Race:
    winner: str
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # name -> reason

    def summary(self) -> str:
        ran = [f"{name} {1e3 * seconds:.2f} ms" for name, seconds in sorted(self.seconds.items(), key=lambda x: x[1])]
        out = [f"{name} excluded: {why}" for name, why in self.refused.items()]
        return "; ".join(ran + out) or "chosen by a fixed rule, not timed"


def race_attention(shape: Model, device: torch.device, dtype: torch.dtype, is_timed: bool = True) -> Race:
    """Return the fastest correct kernel, or the first correct one of flash, efficient and cudnn if not `is_timed`."""
    heads = _heads(shape, device, dtype)

    def by(backend: SDPBackend) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # The efficient kernel does not support grouped KV heads, so expand them here, as in training.
            if backend == SDPBackend.EFFICIENT_ATTENTION:
                k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
            with sdpa_kernel([backend]):
                is_grouped = q.shape[1] != k.shape[1]
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)

        return attend

    order = ("cudnn", "flash", "efficient") if is_timed else ("flash", "efficient", "cudnn")
    candidates = {name: by(ATTENTIONS[name]) for name in order}
    return race(candidates, by(SDPBackend.MATH), heads, last="auto", is_timed=is_timed)


def race_segments(shape: Model, device: torch.device, dtype: torch.dtype, is_timed: bool = True) -> Race:
    """Choose between FlexAttention and a boolean mask for attention within segments.

    `mask` works everywhere, so it is the reference and the fallback. `flex` is chosen only if it is correct and faster;
    without `is_timed`, being correct is enough.
    """
    if not can_flex(shape.context, device):
        return Race("mask", refused={"flex": f"it needs CUDA and a context of whole blocks (here: {shape.context})"})
    heads = _heads(shape, device, dtype)
    # Choose segment lengths that are not multiples of FlexAttention's block size, so that segments end inside a block.
    lengths = torch.arange(shape.context, device=device) // max(1, shape.context // 4 - 7)
    segments_BT = lengths.expand(len(heads[0]), -1)

    def by(is_flex: bool) -> Attend:
        masks: dict[tuple[int, int], Any] = {}  # each mask is created at first use, because it is large for a long row

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
    """Return the fastest correct candidate (the first correct one if not `is_timed`), or `last` if none is correct."""
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
            if not error <= most:  # also true for NaN
                refused[name] = f"it differs from the reference by {error:.1%}"
                continue
            if is_timed:
                seconds[name] = _time(attend, heads)
                continue
            _run(attend, heads)  # raises if the kernel does not support the full context
            return Race(name, {}, refused)
        # A kernel that does not support this GPU, dtype or shape may raise almost any kind of exception.
        except Exception as exc:
            refused[name] = (str(exc).strip().splitlines() or [type(exc).__name__])[0][:200]
    winner = min(seconds, key=lambda name: seconds[name]) if seconds else last
    return Race(winner, seconds, refused)


def use_attention(name: str) -> None:
    """Use the attention kernel `name` in this process from now on.

    Calls that the kernel does not support (those with a mask or a cache) use efficient attention.
    """
    set_chosen(name)
    if name == "auto":
        return
    torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
    torch.backends.cuda.enable_flash_sdp(name == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(name != "math")
    torch.backends.cuda.enable_math_sdp(True)


@contextlib.contextmanager
def using_attention(name: str) -> Iterator[None]:
    """Use the attention kernel `name` inside this context, and restore the previous choice on exit."""
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
        # Use the same memory layout as the model's q, k and v projections, with positions before heads.
        size = (B, shape.context, num_heads, shape.head_size)
        return torch.randn(size, device=device, dtype=dtype, generator=generator).transpose(1, 2)

    return drawn(shape.num_heads), drawn(shape.num_kv_heads), drawn(shape.num_kv_heads)


def _few(heads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a part of `heads` for comparing kernels: one row, two KV heads with their queries, and few positions.

    This part is small because the reference (math) keeps all scores in memory, and the GPU may be small.
    """
    q, k, v = (part[:1, :, :_COMPARED] for part in heads)
    num = min(2, k.shape[1])
    return q[:, : num * (q.shape[1] // k.shape[1])], k[:, :num], v[:, :num]


def _run(attend: Attend, heads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the attention output and the gradients of queries, keys and values."""
    with torch.enable_grad():
        leaves = tuple(part.detach().requires_grad_() for part in heads)
        y = attend(*leaves)
        return (y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y)))


def _time(attend: Attend, heads: tuple[Tensor, ...]) -> float:
    def timing() -> float:
        _wait(heads[0].device)
        begun = time.perf_counter()
        _run(attend, heads)
        _wait(heads[0].device)
        return time.perf_counter() - begun

    timing()
    return statistics.median(timing() for _ in range(_NUM_TIMINGS))


def _wait(device: torch.device) -> Any:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
