"""Mean cross-entropy of the head, without ever holding the logits of all tokens.

    h_ND, W_VD, targets_N  ->  in pieces of N: logits = h W^T -> loss, and already its gradients for h and W

At a vocabulary of 32,768 the fp32 logits of 64k tokens are 8.6 GB, and backward would want them twice. The gradient of
a mean cross-entropy needs nothing from above but one factor, so each piece computes its own gradients while its logits
are alive. That is three matrix products, as many as the plain way, and one piece of memory.

Shapes: N tokens, n tokens of a piece, D width, V vocabulary, P vocabulary with padding rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["IGNORED", "PIECE_LOGITS", "mean_loss", "token_losses"]

IGNORED = -100  # a target that is not to be learned

# Logits of one piece: 2^26 fp32 numbers are 256 MB. Smaller batches are one piece, by the plain and fastest way.
PIECE_LOGITS = 2**26


def mean_loss(h_ND: Tensor, head_PD: Tensor, targets_N: Tensor, vocab_size: int) -> Tensor:
    """Mean nats over the targets that are not IGNORED; 0 where there are none, so an empty row teaches nothing."""
    num_pieces = _num_pieces(h_ND, head_PD)
    count = (targets_N != IGNORED).sum().clamp(min=1).float()
    if num_pieces == 1:
        logits_NV = _logits(h_ND, head_PD, vocab_size)
        return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum") / count
    if torch.is_grad_enabled() and (h_ND.requires_grad or head_PD.requires_grad):
        return _PiecewiseLoss.apply(h_ND, head_PD, targets_N, count, vocab_size, num_pieces)
    return token_losses(h_ND, head_PD, targets_N, vocab_size).sum() / count


def token_losses(h_ND: Tensor, head_PD: Tensor, targets_N: Tensor, vocab_size: int) -> Tensor:
    """Nats of each target, 0 where IGNORED. For evaluation: backward through it would hold all logits."""
    num_pieces = _num_pieces(h_ND, head_PD)
    losses = [
        F.cross_entropy(_logits(h_nD, head_PD, vocab_size), targets_n, ignore_index=IGNORED, reduction="none")
        for h_nD, targets_n in zip(h_ND.chunk(num_pieces), targets_N.chunk(num_pieces), strict=True)
    ]
    return torch.cat(losses)


class _PiecewiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_ND: Tensor, head_PD: Tensor, targets_N: Tensor, count: Tensor, vocab_size: int, num_pieces: int
    ) -> Tensor:
        head = head_PD.to(h_ND.dtype)
        loss = torch.zeros((), device=h_ND.device)
        # fp32 sum over the pieces: in bf16 a late piece would vanish against the sum of the early ones.
        dhead_PD = torch.zeros_like(head_PD, dtype=torch.float32)
        dh_pieces = []
        for h_nD, targets_n in zip(h_ND.chunk(num_pieces), targets_N.chunk(num_pieces), strict=True):
            logits_nV = _logits(h_nD, head, vocab_size)
            is_kept_n = targets_n != IGNORED
            safe_n1 = targets_n.clamp(min=0).unsqueeze(1)
            log_sum_n1 = torch.logsumexp(logits_nV, dim=1, keepdim=True)
            loss_n1 = (log_sum_n1 - logits_nV.gather(1, safe_n1)) * is_kept_n.unsqueeze(1)
            loss = loss + loss_n1.sum()
            # d loss / d logits = (softmax - one hot) / count, and nothing for ignored targets and padding rows.
            dlogits_nV = torch.exp(logits_nV - log_sum_n1)
            dlogits_nV = dlogits_nV.scatter_add(1, safe_n1, -torch.ones_like(log_sum_n1))
            dlogits_nV = dlogits_nV * (is_kept_n.unsqueeze(1) / count)
            dlogits_nP = F.pad(dlogits_nV.to(h_ND.dtype), (0, head_PD.shape[0] - vocab_size))
            dh_pieces.append(dlogits_nP @ head)
            dhead_PD += dlogits_nP.t() @ h_nD
        ctx.save_for_backward(torch.cat(dh_pieces), dhead_PD)
        return loss / count

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dh_ND, dhead_PD = ctx.saved_tensors
        return (dh_ND * dloss).to(dh_ND.dtype), dhead_PD * dloss, None, None, None, None


def _logits(h_nD: Tensor, head_PD: Tensor, vocab_size: int) -> Tensor:
    return F.linear(h_nD, head_PD.to(h_nD.dtype))[:, :vocab_size].float()


def _num_pieces(h_ND: Tensor, head_PD: Tensor) -> int:
    """As few as keep a piece under PIECE_LOGITS; at least one, and never more than there are tokens."""
    return max(1, min(h_ND.shape[0], -(-h_ND.shape[0] * head_PD.shape[0] // PIECE_LOGITS)))
