"""Several conversations in one row, each computed as if it were alone.

    segments (B, T)  ->  where each begins  ->  positions that start over there, and a mask that looks no further back

A segment is a run of equal numbers in a row; -1 is padding, which sees only padding and is seen by nothing else. The
mask is made once and used by every layer: a plain boolean one, which any attention can read, or FlexAttention's, which
leaves out the blocks in which nothing is seen (docs/engine.md, attention).

Shapes: B batch, T positions, N blocks of positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from homing.lm.model.sdpa import sdpa

__all__ = ["BLOCK", "Isolation", "attend_inside", "can_flex", "isolate"]

BLOCK = 128  # positions on a side of FlexAttention's blocks
_compiled: dict[str, Any] = {}


@dataclass(frozen=True)
class Isolation:
    positions_BT: Tensor
    is_start_BT: Tensor
    mask: Any  # (B, 1, T, T) of booleans, or a BlockMask


def isolate(segments_BT: Tensor, *, is_flex: bool = False) -> Isolation:
    T = segments_BT.shape[1]
    is_start_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    is_start_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    at_T = torch.arange(T, device=segments_BT.device)
    begun_BT = torch.where(is_start_BT, at_T, 0).cummax(dim=1).values
    # By where it begins rather than by its number: these only grow along a row, which the block mask counts on.
    mask = _block_mask(begun_BT) if is_flex else _plain_mask(begun_BT)
    return Isolation(at_T - begun_BT, is_start_BT, mask)


def attend_inside(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: Any) -> Tensor:
    if isinstance(mask, Tensor):
        return sdpa(q_BHTK, k_BGTK, v_BGTK, mask=mask)
    is_grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
    return _flex()(q_BHTK, k_BGTK, v_BGTK, block_mask=mask, enable_gqa=is_grouped)


def can_flex(context: int, device: torch.device) -> bool:
    """FlexAttention is a Triton kernel with a backward on CUDA only, and our blocks must fill the row."""
    return device.type == "cuda" and context % BLOCK == 0


def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if "flex" not in _compiled:
        # Uncompiled it would hold all scores. Inside a block that is compiled this is simply inlined.
        _compiled["flex"] = torch.compile(flex_attention, dynamic=False)
    return _compiled["flex"]


def _plain_mask(begun_BT: Tensor) -> Tensor:
    T = begun_BT.shape[1]
    is_causal_TT = torch.ones(T, T, dtype=torch.bool, device=begun_BT.device).tril()
    return ((begun_BT.unsqueeze(2) == begun_BT.unsqueeze(1)) & is_causal_TT).unsqueeze(1)


def _block_mask(begun_BT: Tensor) -> Any:
    """Block by block from the first and last segment in each: torch's own way would look at all T x T pairs."""
    from torch.nn.attention.flex_attention import BlockMask

    T = begun_BT.shape[1]
    assert T % BLOCK == 0, f"{T} positions are not blocks of {BLOCK}"

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (begun_BT[b, q] == begun_BT[b, k])

    first_BN, last_BN = begun_BT[:, ::BLOCK], begun_BT[:, BLOCK - 1 :: BLOCK]
    before_NN = torch.ones(T // BLOCK, T // BLOCK, dtype=torch.bool, device=begun_BT.device).tril()
    # Of a block that lies before: it is seen at all where its last segment is not over, ...
    is_seen = (last_BN.unsqueeze(1) >= first_BN.unsqueeze(2)) & before_NN
    # ... and wholly where both blocks are of one segment; on the diagonal half of the pairs lie in the future.
    is_whole = (first_BN.unsqueeze(1) == last_BN.unsqueeze(2)) & before_NN.tril(-1)
    is_partly = is_seen & ~is_whole
    return BlockMask.from_kv_blocks(
        *_listed(is_partly), *_listed(is_whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(T, T)
    )


def _listed(is_in_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are in, and which: those first, in order."""
    order = torch.argsort(is_in_BNN.int(), dim=-1, descending=True, stable=True)
    return is_in_BNN.sum(-1, dtype=torch.int32).unsqueeze(1), order.to(torch.int32).unsqueeze(1)
