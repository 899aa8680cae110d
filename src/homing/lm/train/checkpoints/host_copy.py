"""Copies a checkpoint's tensors to host memory, so that they can be written to disk while training continues.

    tensors on the device -> host buffers (pinned for CUDA, reused for the next save) -> the writing thread

Training waits only for the copy: gigabytes in a tenth of a second from a GPU, where disk and hashing take many seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from homing.lm.train.compute.host_memory import free_bytes

__all__ = ["Snapshot"]

_SPARE = 1.25  # margin for other host memory needed meanwhile


class Snapshot:
    """Host copies of tensors, one set at a time: `take` overwrites the previous one."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def has_room(self, **groups: Mapping[str, Tensor]) -> bool:
        """Return whether a copy fits in host memory, reusing the buffers of the previous one.

        True if the amount of free memory is unknown.
        """
        missing = [t for group, tensors in groups.items() for name, t in tensors.items()
                   if self._buffer(f"{group}/{name}", t) is None]  # fmt: skip
        free = free_bytes()
        return free is None or free > _SPARE * sum(map(_host_bytes, missing))

    def take(self, **groups: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return group -> name -> host tensor, each with its own storage as safetensors requires."""
        taken = {group: {name: self._copy(f"{group}/{name}", t) for name, t in tensors.items()}
                 for group, tensors in groups.items()}  # fmt: skip
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the copies are asynchronous
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
    """Return the size in host memory; torch rounds pinned allocations up to a power of two."""
    size = tensor.numel() * tensor.element_size()
    return 1 << (size - 1).bit_length() if size and tensor.is_cuda else size
