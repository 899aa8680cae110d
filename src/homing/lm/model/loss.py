"""The output head and its cross-entropy loss, computed without ever holding the logits of all tokens in memory.

    h_ND, W_VD, targets_N  ->  for each chunk of N: logits = h W^T -> loss, and its gradients for h and W

With a vocabulary of 32,768 the fp32 logits of 64k tokens are 8.6 GB, and the backward pass would need twice that. The
forward pass computes each chunk's gradients while its logits are in memory, because the backward pass only multiplies
them by one factor. That takes three matmuls, as many as the usual method, but only as much memory as one chunk needs.
On CUDA, one kernel overwrites a chunk of logits (in the dtype of h) with their gradient; without CUDA or Triton, plain
torch does this.

The op is opaque to torch.compile, which would otherwise schedule the chunks together, so that all of them would be in
memory at once.

Shapes: N tokens, n tokens of a chunk, D width, V vocabulary, P vocabulary with padding rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from homing.lm.model import fused_ops
from homing.lm.model.fused_ops import opaque

__all__ = ["IGNORED", "PIECE_LOGITS", "cap", "mean_loss", "token_losses"]

IGNORED = -100  # target value for positions that are excluded from the loss

# Maximum number of logits per chunk; a smaller batch is a single chunk. 2^26 fp32 numbers are 256 MB. On CUDA, logits
# are kept in bf16, and a larger chunk uses the GPU better.
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
    """Return the mean loss in nats over the targets that are not IGNORED; each loss is multiplied by its weight.

    The sum is divided by the number of these targets, or by `num_targets` (the number in the whole batch) if the tokens
    are only a part of a batch. If `num_targets` is a tensor, it must be fp32, on the device and at least 1. The result
    is 0 if there are no targets, so an empty row has no effect.
    """
    if num_targets is None:
        count = (targets_N != IGNORED).sum().clamp(min=1).float()
    elif isinstance(num_targets, Tensor):
        count = num_targets
    else:
        # torch.full does not make the host wait for the device; copying a number to the device would.
        count = torch.full((), float(max(1, num_targets)), device=h_ND.device)
    if torch.is_grad_enabled() and (h_ND.requires_grad or head_PD.requires_grad):
        return _PiecewiseLoss.apply(h_ND, head_PD, targets_N, count, weights_N, vocab_size, softcap)
    losses_N = token_losses(h_ND, head_PD, targets_N, vocab_size, softcap)
    return (losses_N if weights_N is None else losses_N * weights_N).sum() / count


def token_losses(h_ND: Tensor, head_PD: Tensor, targets_N: Tensor, vocab_size: int, softcap: float = 0.0) -> Tensor:
    """Return the loss of each target in nats, or 0 for targets that are IGNORED.

    Use this only for evaluation: a backward pass through it would keep all logits in memory.
    """
    num_chunks = _num_chunks(h_ND, head_PD)
    losses = [
        F.cross_entropy(_logits(h_nD, head_PD, vocab_size, softcap), targets_n, ignore_index=IGNORED, reduction="none")
        for h_nD, targets_n in zip(h_ND.chunk(num_chunks), targets_N.chunk(num_chunks), strict=True)
    ]
    return torch.cat(losses)


def cap(logits: Tensor, softcap: float) -> Tensor:
    """Soft-cap logits to +-softcap, or return them unchanged if `softcap` is 0."""
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
        # With adapters, the head is frozen. Skipping its gradient saves an amount of memory equal to the size of the
        # head, and a third of the work.
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
    """Return the loss and its gradients for h (in its dtype) and for the head (in fp32; empty if not needed)."""
    head = head_PD.to(h_ND.dtype)
    num_chunks = _num_chunks(h_ND, head_PD)
    loss = torch.zeros((), device=h_ND.device)
    # Sum over the chunks in fp32: in bf16, a late chunk would be rounded away when added to the sum of earlier ones.
    dhead_PD = torch.zeros(head_PD.shape if has_dhead else 0, device=h_ND.device, dtype=torch.float32)
    dh_ND = torch.empty_like(h_ND)
    chunks = h_ND.chunk(num_chunks)
    weights = [None] * len(chunks) if weights_N is None else weights_N.chunk(num_chunks)
    zipped = zip(chunks, dh_ND.chunk(num_chunks), targets_N.chunk(num_chunks), weights, strict=True)
    for h_nD, dh_nD, targets_n, weights_n in zipped:
        logits_nP = F.linear(h_nD, head)
        differentiate = _differentiate_by_kernel if h_ND.is_cuda and fused_ops.HAS_TRITON else _differentiate
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
    """Return the loss of each token, and d mean loss / d logits = (softmax - one hot) / count.

    The gradient is zero for ignored targets and padding rows.
    """
    capped_nV = cap(logits_nP[:, :vocab_size].float(), softcap)
    is_kept_n1 = (targets_n != IGNORED).unsqueeze(1)
    safe_n1 = targets_n.clamp(min=0).unsqueeze(1)
    # The operations below work in place, because on a CPU every pass over this much memory takes noticeable time.
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
    from homing.lm.model.kernels import row_ops  # Triton is installed only with CUDA

    losses_n = row_ops.differentiate_(logits_nP, targets_n.contiguous(), count, vocab_size, softcap)
    return losses_n, logits_nP


def _add_product(sum_PD: Tensor, left_Pn: Tensor, right_nD: Tensor) -> None:
    """Add left @ right to `sum_PD` in fp32. Even if both factors are bf16, CUDA matmuls can output fp32."""
    if sum_PD.is_cuda and left_Pn.dtype != torch.float32:
        torch.addmm(sum_PD, left_Pn, right_nD, out_dtype=torch.float32, out=sum_PD)
    elif left_Pn.dtype == torch.float32:
        sum_PD.addmm_(left_Pn, right_nD)
    else:
        sum_PD += left_Pn @ right_nD


def _logits(h_nD: Tensor, head_PD: Tensor, vocab_size: int, softcap: float) -> Tensor:
    return cap(F.linear(h_nD, head_PD.to(h_nD.dtype))[:, :vocab_size].float(), softcap)


def _num_chunks(h_ND: Tensor, head_PD: Tensor) -> int:
    """Return the smallest number of chunks that keeps each within the size limit, between 1 and one per token."""
    most = PIECE_LOGITS_CUDA if h_ND.is_cuda and fused_ops.HAS_TRITON else PIECE_LOGITS
    return max(1, min(h_ND.shape[0], -(-h_ND.shape[0] * head_PD.shape[0] // most)))
