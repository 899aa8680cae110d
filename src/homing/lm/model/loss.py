"""Cross-entropy of the head, without ever holding the logits of all tokens.

    h_ND, W_VD, targets_N  ->  in pieces of N: logits = h W^T -> loss, and already its gradients for h and W

At a vocabulary of 32,768 the fp32 logits of 64k tokens are 8.6 GB, and backward would want them twice. The gradient of
such a sum needs nothing from above but one factor, so each piece computes its own gradients while its logits
are alive. That is three matrix products, as many as the plain way, and one piece of memory. On CUDA one kernel turns a
piece of logits, in the type of h, into their gradients in place; elsewhere, or without Triton, plain torch does it.

The op is opaque to torch.compile: traced, the pieces would be planned together, and all be alive at once.

Shapes: N tokens, n tokens of a piece, D width, V vocabulary, P vocabulary with padding rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from homing.lm.model import fused
from homing.lm.model.opaque import opaque

__all__ = ["IGNORED", "PIECE_LOGITS", "cap", "mean_loss", "token_losses"]

IGNORED = -100  # a target that is not to be learned

# Logits of one piece. 2^26 fp32 numbers are 256 MB; smaller batches are one piece.
# On CUDA they are kept in bf16, and a larger piece fills the card better.
PIECE_LOGITS = 2**26
PIECE_LOGITS_CUDA = 2**28


def mean_loss(
    h_ND: Tensor,
    head_PD: Tensor,
    targets_N: Tensor,
    vocab_size: int,
    softcap: float = 0.0,
    *,
    weights_N: Tensor | None = None,
    num_targets: int | Tensor | None = None,
) -> Tensor:
    """Nats over the targets that are not IGNORED, each times its weight, divided by their number or by `num_targets`,
    the number in a whole of which these are a part (as a tensor: of fp32, on the device, at least 1). 0 where there are
    none, so an empty row teaches nothing."""
    if num_targets is None:
        count = (targets_N != IGNORED).sum().clamp(min=1).float()
    elif isinstance(num_targets, Tensor):
        count = num_targets
    else:
        count = torch.full((), float(max(1, num_targets)), device=h_ND.device)  # a fill: the device is not waited for
    if torch.is_grad_enabled() and (h_ND.requires_grad or head_PD.requires_grad):
        return _PiecewiseLoss.apply(h_ND, head_PD, targets_N, count, weights_N, vocab_size, softcap)
    losses_N = token_losses(h_ND, head_PD, targets_N, vocab_size, softcap)
    return (losses_N if weights_N is None else losses_N * weights_N).sum() / count


def token_losses(h_ND: Tensor, head_PD: Tensor, targets_N: Tensor, vocab_size: int, softcap: float = 0.0) -> Tensor:
    """Nats of each target, 0 where IGNORED. For evaluation: backward through it would hold all logits."""
    num_pieces = _num_pieces(h_ND, head_PD)
    losses = [
        F.cross_entropy(_logits(h_nD, head_PD, vocab_size, softcap), targets_n, ignore_index=IGNORED, reduction="none")
        for h_nD, targets_n in zip(h_ND.chunk(num_pieces), targets_N.chunk(num_pieces), strict=True)
    ]
    return torch.cat(losses)


def cap(logits: Tensor, softcap: float) -> Tensor:
    """Logits held inside +-softcap; 0: as they are."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


class _PiecewiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_ND: Tensor,
        head_PD: Tensor,
        targets_N: Tensor,
        count: Tensor,
        weights_N: Tensor | None,
        vocab_size: int,
        softcap: float,
    ) -> Tensor:
        # A head that stands still, under adapters, is spared a gradient of its own size and a third of the work.
        has_dhead = ctx.needs_input_grad[1]
        loss, dh_ND, dhead_PD = _loss_and_gradients(
            h_ND, head_PD, targets_N, count, weights_N, vocab_size, softcap, has_dhead
        )
        ctx.save_for_backward(dh_ND, dhead_PD if has_dhead else None)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dh_ND, dhead_PD = ctx.saved_tensors
        dhead_PD = None if dhead_PD is None else dhead_PD * dloss
        return (dh_ND * dloss).to(dh_ND.dtype), dhead_PD, None, None, None, None, None


def _loss_and_gradients_like(
    h_ND: Tensor,
    head_PD: Tensor,
    targets_N: Tensor,
    count: Tensor,
    weights_N: Tensor | None,
    vocab_size: int,
    softcap: float,
    has_dhead: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    loss = torch.empty((), device=h_ND.device, dtype=torch.float32)
    dhead_PD = torch.empty(head_PD.shape if has_dhead else 0, device=h_ND.device, dtype=torch.float32)
    return loss, torch.empty_like(h_ND), dhead_PD


@opaque("loss_and_gradients", like=_loss_and_gradients_like)
def _loss_and_gradients(
    h_ND: Tensor,
    head_PD: Tensor,
    targets_N: Tensor,
    count: Tensor,
    weights_N: Tensor | None,
    vocab_size: int,
    softcap: float,
    has_dhead: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and its gradients for h (in its type) and for the head (in fp32; empty where nobody asks for it)."""
    head = head_PD.to(h_ND.dtype)
    num_pieces = _num_pieces(h_ND, head_PD)
    loss = torch.zeros((), device=h_ND.device)
    # fp32 sum over the pieces: in bf16 a late piece would vanish against the sum of the early ones.
    dhead_PD = torch.zeros(head_PD.shape if has_dhead else 0, device=h_ND.device, dtype=torch.float32)
    dh_ND = torch.empty_like(h_ND)
    chunks = h_ND.chunk(num_pieces)
    weights = [None] * len(chunks) if weights_N is None else weights_N.chunk(num_pieces)
    pieces = zip(chunks, dh_ND.chunk(num_pieces), targets_N.chunk(num_pieces), weights, strict=True)
    for h_nD, dh_nD, targets_n, weights_n in pieces:
        logits_nP = F.linear(h_nD, head)
        differentiate = _differentiate_by_kernel if h_ND.is_cuda and fused.HAS_TRITON else _differentiate
        losses_n, dlogits_nP = differentiate(logits_nP, targets_n, count, vocab_size, softcap)
        if weights_n is not None:
            losses_n = losses_n * weights_n
            dlogits_nP.mul_(weights_n.unsqueeze(1))
        loss += losses_n.sum()
        torch.mm(dlogits_nP, head, out=dh_nD)
        if has_dhead:
            _add_product(dhead_PD, dlogits_nP.t(), h_nD)
    return loss / count, dh_ND, dhead_PD


def _differentiate(
    logits_nP: Tensor, targets_n: Tensor, count: Tensor, vocab_size: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and d mean loss / d logits = (softmax - one hot) / count, with nothing for ignored
    targets and padding rows."""
    capped_nV = cap(logits_nP[:, :vocab_size].float(), softcap)
    is_kept_n1 = (targets_n != IGNORED).unsqueeze(1)
    safe_n1 = targets_n.clamp(min=0).unsqueeze(1)
    # In place from here on: on a CPU every pass over so many numbers counts.
    dlogits_nV = torch.log_softmax(capped_nV, dim=1)
    losses_n1 = -dlogits_nV.gather(1, safe_n1) * is_kept_n1
    dlogits_nV.exp_().scatter_add_(1, safe_n1, -torch.ones_like(losses_n1))
    dlogits_nV *= is_kept_n1 / count
    if softcap:
        dlogits_nV *= 1.0 - (capped_nV / softcap) ** 2
    padding = logits_nP.shape[1] - vocab_size
    dlogits_nV = dlogits_nV.to(logits_nP.dtype)
    return losses_n1.squeeze(1), F.pad(dlogits_nV, (0, padding)) if padding else dlogits_nV


def _differentiate_by_kernel(
    logits_nP: Tensor, targets_n: Tensor, count: Tensor, vocab_size: int, softcap: float
) -> tuple[Tensor, Tensor]:
    from homing.lm.model.kernels import cross_entropy  # Triton is there only where CUDA is

    losses_n = cross_entropy.differentiate_(logits_nP, targets_n.contiguous(), count, vocab_size, softcap)
    return losses_n, logits_nP


def _add_product(sum_PD: Tensor, left_Pn: Tensor, right_nD: Tensor) -> None:
    """sum += left @ right in fp32, also where the factors are bf16: CUDA's products can write wider than they read."""
    if sum_PD.is_cuda and left_Pn.dtype != torch.float32:
        torch.addmm(sum_PD, left_Pn, right_nD, out_dtype=torch.float32, out=sum_PD)
    elif left_Pn.dtype == torch.float32:
        sum_PD.addmm_(left_Pn, right_nD)
    else:
        sum_PD += left_Pn @ right_nD


def _logits(h_nD: Tensor, head_PD: Tensor, vocab_size: int, softcap: float) -> Tensor:
    return cap(F.linear(h_nD, head_PD.to(h_nD.dtype))[:, :vocab_size].float(), softcap)


def _num_pieces(h_ND: Tensor, head_PD: Tensor) -> int:
    """As few as keep a piece under its bound; at least one, and never more than there are tokens."""
    most = PIECE_LOGITS_CUDA if h_ND.is_cuda and fused.HAS_TRITON else PIECE_LOGITS
    return max(1, min(h_ND.shape[0], -(-h_ND.shape[0] * head_PD.shape[0] // most)))
