"""The memory of training by part, of one process or of one of several ranks that divide the model among them.

    peak = always + max(forward, step, sampling)      what the parts are: see `memory`

With `zero2`, `zero3` and `hsdp`, each rank holds its share of weights, gradients and optimizer state, and for a while
whole weights and gradients of what it computes. These shares are computed, not measured: no run on several GPUs has
been compared with them yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["CUDA_BYTES", "HOST_SHARE", "PROCESS_BYTES", "SPARE", "Memory"]

# CUDA context, cuBLAS and cuDNN workspaces of one process: 0.75 GiB on the H200, more with other drivers.
CUDA_BYTES = 2**30
# On a host with offloaded state: memory of one process (Python, torch, CUDA), and the fraction of memory to use.
PROCESS_BYTES, HOST_SHARE = 3 * 2**30, 0.9
# Allowance for what the estimate leaves out: matmul workspaces, rows of statistics, fragmentation.
SPARE = 1.04


@dataclass(frozen=True)
class Memory:
    """Memory in bytes, by part. `copies` to `block_per_row` are temporary; `*_per_row` grow with the micro-batch."""

    weights: int
    gradients: int
    optimizer: int
    copies: int
    activations_per_row: int
    logits_per_row: int
    logits_most: int
    head_gradient: int
    scratch: int
    block_per_row: int = 0  # the block that is being recomputed
    cuda: int = CUDA_BYTES
    # rl: one copy of the weights to sample from, and one as the KL reference; adapters need only the KL reference
    lean: int = 0
    rollout: int = 0  # rl: KV cache and logits of the rows that are sampled together
    is_rollout_kept: bool = False  # True with captured graphs, which need the same buffers at every step
    passing: int = 0  # rl: temporary memory while prompts are prefilled and log-probabilities of samples are computed
    host: int = 0  # offload: size of the optimizer state in host memory
    layer: int = 0  # full: the weights of one block, and those of the rest (embedding, head, final norm)
    ends: int = 0
    gathered: int = 0  # weights and gradients that are whole for a while although the ranks divide them
    is_pass_kept: bool = False  # True with train.graphs: on, because a captured graph keeps its memory after the pass

    @property
    def always(self) -> int:
        kept = self.rollout if self.is_rollout_kept else 0
        return self.weights + self.gradients + self.optimizer + self.cuda + self.lean + kept

    @property
    def checkpoint(self) -> int:
        """The checkpoint's size on disk: the trained parameters in fp32 and their optimizer state."""
        return self.gradients + self.optimizer + self.host

    def host_needed(self, num_cards: int = 1) -> int:
        """Return the host memory that a machine needs; 0 without offload.

        It holds each GPU's optimizer state, plus one copy of the weights while a checkpoint is written.
        """
        if not self.host:
            return 0
        return int((max(1, num_cards) * (self.host + PROCESS_BYTES) + self.gradients) / HOST_SHARE)

    def peak(self, micro_batch: int) -> int:
        forward, sampling = self.forward(micro_batch), self.passing + (0 if self.is_rollout_kept else self.rollout)
        if self.is_pass_kept:
            return self.always + forward + max(self.scratch, sampling)
        return self.always + max(forward, self.scratch, sampling)

    def forward(self, micro_batch: int) -> int:
        logits = min(self.logits_most, micro_batch * self.logits_per_row) + self.head_gradient
        # When the first block is recomputed, the memory of the loss has already been freed. So count the larger of
        # the two, not their sum.
        passing = max(logits, int(SPARE * micro_batch * self.block_per_row) + self.head_gradient)
        return int(self.copies + self.gathered + SPARE * micro_batch * self.activations_per_row + passing)

    def divided(self, parallel: str, num_ranks: int) -> Memory:
        """Return the memory of one of `num_ranks` ranks that divide the model as `train.parallel` says.

        The copies of the matrices in the compute type stay whole, because autograd keeps them until the backward pass
        of their block. With recompute: all, only one block has them.
        """
        if parallel == "ddp" or num_ranks == 1:
            return self
        num = num_ranks // 2 if parallel == "hsdp" else num_ranks  # each half of a machine's GPUs holds a whole model
        # Two blocks at a time: the one that is computed, and the one that is gathered or whose gradients are summed
        # meanwhile. The embedding and the head stay gathered from the beginning of a forward pass.
        weights = self.weights if parallel == "zero2" else self.ends + 2 * self.layer
        return replace(
            self,
            weights=self.weights // num,
            gradients=self.gradients // num,
            optimizer=self.optimizer // num,
            host=self.host // num,
            scratch=self.scratch // num,
            gathered=weights + self.ends + 2 * self.layer,
        )
