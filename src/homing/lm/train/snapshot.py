"""What a checkpoint holds, copied to host memory while training waits; the disk is then written while it goes on.

    tensors on the device -> buffers on the host (pinned for CUDA, kept for the next time) -> the thread that writes

Training waits for the copy only: for a card, gigabytes in a tenth of a second, where disk and hashing take many.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from homing.lm.train.host import free_bytes

__all__ = ["Snapshot"]

_SPARE = 1.25  # of the copy: what else the host needs while it is held


class Snapshot:
    """One at a time: `take` writes over what the one before held."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def has_room(self, **groups: Mapping[str, Tensor]) -> bool:
        """Whether the host can hold a copy of these beside all else; what the one before has got is there already.
        Where nobody says how much is free, it can."""
        missing = [t for group, tensors in groups.items() for name, t in tensors.items()
                   if self._buffer(f"{group}/{name}", t) is None]  # fmt: skip
        free = free_bytes()
        return free is None or free > _SPARE * sum(map(_host_bytes, missing))

    def take(self, **groups: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Group -> name -> host tensor with storage of its own, as safetensors wants it."""
        taken = {group: {name: self._copy(f"{group}/{name}", t) for name, t in tensors.items()}
                 for group, tensors in groups.items()}  # fmt: skip
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the copies were only begun
        return taken

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffer(name, tensor)
        if buffer is None:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor | None:
        buffer = self._buffers.get(name)
        is_fit = buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype
        return buffer if is_fit else None


def _host_bytes(tensor: Tensor) -> int:
    """torch takes pinned memory in powers of two."""
    size = tensor.numel() * tensor.element_size()
    return 1 << (size - 1).bit_length() if size and tensor.is_cuda else size
