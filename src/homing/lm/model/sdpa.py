"""torch's scaled dot-product attention with grouped heads, avoiding the quadratic `math` kernel on CUDA.

    kernel      grouped heads   a mask   fp32
    cudnn       yes             no       no
    flash       yes             no       no
    efficient   no              yes      yes

If the only applicable kernel does not support grouped heads, each KV head is repeated for its query heads. That makes
keys and values as large as the queries, which is still far less memory than `math` needs for the scores of all pairs of
positions.

Shapes: B rows, H query heads, G KV heads, T new positions, S positions seen, K head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["chosen", "expand_heads", "sdpa", "set_chosen"]

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
