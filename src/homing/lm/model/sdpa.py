"""torch's scaled dot-product attention with grouped heads, and its masks for several conversations in one row.

    kernel      grouped heads   a mask   fp32
    cudnn       yes             no       no
    flash       yes             no       no
    efficient   no              yes      yes

If the only applicable kernel does not support grouped heads, each KV head is repeated for its query heads. That makes
keys and values as large as the queries, which is still far less memory than `math` needs for the scores of all pairs of
positions: the quadratic `math` kernel is avoided on CUDA.

Conversations packed into one row are isolated, so that each is computed as if it were alone:

    segments (B, T)  ->  start of each segment  ->  positions that restart there, and a mask that hides earlier segments

A segment is a run of equal numbers in a row. The number -1 marks padding: it attends only to padding, and no segment
attends to it. The mask is created once and used by every layer: either a boolean mask, which any attention kernel can
read, or FlexAttention's block mask, which skips blocks in which nothing is visible (docs/development/engine.md,
attention).

Shapes: B rows, H query heads, G KV heads, T new positions, S positions seen, K head size, N blocks of positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BLOCK", "Isolation", "attend_inside", "can_flex", "chosen", "expand_heads", "isolate", "sdpa", "set_chosen"]

BLOCK = 128  # number of positions along each side of one of FlexAttention's blocks
_compiled: dict[str, Any] = {}
_chosen = "auto"  # the attention kernel that this process uses, set by `attention_backends.use_attention`


def chosen() -> str:
    return _chosen


def set_chosen(name: str) -> None:
    global _chosen
    _chosen = name


def sdpa(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, *, mask: Tensor | None = None, is_causal: bool = False,
    has_cudnn: bool = True,
) -> Tensor:  # fmt: skip
    """Compute scaled dot-product attention. Pass `has_cudnn=False` if cuDNN attention is disabled."""
    is_grouped = q_BHTK.shape[1] != k_BGSK.shape[1]
    if is_grouped and q_BHTK.is_cuda and not _takes_groups(q_BHTK, mask, has_cudnn):
        k_BGSK, v_BGSK = expand_heads(k_BGSK, q_BHTK.shape[1]), expand_heads(v_BGSK, q_BHTK.shape[1])
        is_grouped = False
    return F.scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSK, attn_mask=mask, is_causal=is_causal, enable_gqa=is_grouped
    )


def expand_heads(x_BGSK: Tensor, num_heads: int) -> Tensor:
    """Return keys or values with each KV head repeated for each of its query heads."""
    B, G, S, K = x_BGSK.shape
    return x_BGSK.unsqueeze(2).expand(B, G, num_heads // G, S, K).flatten(1, 2)


def _takes_groups(q_BHTK: Tensor, mask: Tensor | None, has_cudnn: bool) -> bool:
    # The math kernel supports grouped heads. Use it if the user chose it, or for a single new position, where its
    # memory use is not quadratic.
    if _chosen == "math" or q_BHTK.shape[2] == 1:
        return True
    if mask is not None or q_BHTK.dtype == torch.float32:
        return False
    return _chosen in ("auto", "flash") or (_chosen == "cudnn" and has_cudnn)


@dataclass(frozen=True)
class Isolation:
    positions_BT: Tensor
    is_start_BT: Tensor
    mask: Any  # a boolean tensor (B, 1, T, T), or FlexAttention's BlockMask


def isolate(segments_BT: Tensor, *, is_flex: bool = False) -> Isolation:
    T = segments_BT.shape[1]
    is_start_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    is_start_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    at_T = torch.arange(T, device=segments_BT.device)
    begun_BT = torch.where(is_start_BT, at_T, 0).cummax(dim=1).values
    # Identify segments by their start rather than their number: the block mask needs values that increase along a row.
    mask = _block_mask(begun_BT) if is_flex else _plain_mask(begun_BT)
    return Isolation(at_T - begun_BT, is_start_BT, mask)


def attend_inside(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: Any) -> Tensor:
    if isinstance(mask, Tensor):
        return sdpa(q_BHTK, k_BGTK, v_BGTK, mask=mask)
    is_grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
    return _flex()(q_BHTK, k_BGTK, v_BGTK, block_mask=mask, enable_gqa=is_grouped)


def can_flex(context: int, device: torch.device) -> bool:
    """Return whether FlexAttention can be used: it needs CUDA, and a context that is a multiple of BLOCK."""
    return device.type == "cuda" and context % BLOCK == 0


def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if "flex" not in _compiled:
        # Compile FlexAttention, because it would otherwise keep all scores in memory. A compiled block inlines it.
        _compiled["flex"] = torch.compile(flex_attention, dynamic=False)
    return _compiled["flex"]


def _plain_mask(begun_BT: Tensor) -> Tensor:
    T = begun_BT.shape[1]
    is_causal_TT = torch.ones(T, T, dtype=torch.bool, device=begun_BT.device).tril()
    return ((begun_BT.unsqueeze(2) == begun_BT.unsqueeze(1)) & is_causal_TT).unsqueeze(1)


def _block_mask(begun_BT: Tensor) -> Any:
    """Build the mask from the first and last segment of each block, unlike torch, which evaluates all T x T pairs."""
    from torch.nn.attention.flex_attention import BlockMask

    T = begun_BT.shape[1]
    assert T % BLOCK == 0, f"{T} positions are not blocks of {BLOCK}"

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (begun_BT[b, q] == begun_BT[b, k])

    first_BN, last_BN = begun_BT[:, ::BLOCK], begun_BT[:, BLOCK - 1 :: BLOCK]
    before_NN = torch.ones(T // BLOCK, T // BLOCK, dtype=torch.bool, device=begun_BT.device).tril()
    # An earlier block is at least partly visible to a later one if its last segment continues into the later block.
    is_seen = (last_BN.unsqueeze(1) >= first_BN.unsqueeze(2)) & before_NN
    # An earlier block is entirely visible to a later one if a single segment spans both. A block is never entirely
    # visible to itself, because no position can see the positions after it.
    is_whole = (first_BN.unsqueeze(1) == last_BN.unsqueeze(2)) & before_NN.tril(-1)
    is_partly = is_seen & ~is_whole
    return BlockMask.from_kv_blocks(
        *_listed(is_partly), *_listed(is_whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(T, T)
    )


def _listed(is_in_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of selected blocks in each row, and the indices of all blocks, with the selected ones first."""
    order = torch.argsort(is_in_BNN.int(), dim=-1, descending=True, stable=True)
    return is_in_BNN.sum(-1, dtype=torch.int32).unsqueeze(1), order.to(torch.int32).unsqueeze(1)
