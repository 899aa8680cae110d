"""Optimizer state on the GPU, or offloaded to host memory and streamed through the GPU in each step.

    Place      state on the device of the parameters
    HostPlace  state in pinned host memory, copied to the GPU and back one load at a time:

        host --in--> GPU, stepped, --out--> host         load 3 copied in | load 2 stepped | load 1 copied out

Optimizer state is used once per step and never by forward or backward, so it does not have to stay on the GPU. The
result is bit-identical in either place, because a load is either a whole group of Muon matrices or a chunk of tensors
that AdamW updates element by element. Copies in and out have their own streams and synchronize with the compute stream
through events; the host never waits.
Checkpoints are identical too, so a run can resume with its state in either place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from homing.errors import RunFailed
from homing.units import format_bytes

__all__ = ["AT_A_TIME", "HostPlace", "Load", "Now", "Place", "Span", "cut"]

AT_A_TIME = 2**24  # number of elements that AdamW updates at a time; a multiple of adamw.BLOCK
# Minimum and maximum size of a slab of host memory, which several tensors share. Allocating each tensor separately
# would waste a third of the memory on average, because torch rounds pinned allocations up to a power of two. Slabs grow
# with the total size, so that the unused part of the last one is always comparatively small.
_SLAB_BYTES = (2**26, 2**30)
_SLAB_SHARE = 1 / 4
_ALIGN_BYTES = 512  # alignment of tensors in a slab; the same as torch uses for GPU memory


@dataclass(frozen=True)
class Now:
    """The values of the current step that all parameter groups need."""

    lr_scale: float
    step_count: Tensor  # number of steps that were not skipped, including this one if it is good
    is_good: Tensor  # 0-dim tensor on the device: 1, or 0 to skip the step and leave everything unchanged
    num_steps: int = 0  # number of steps taken before this one, including skipped ones
    is_rehearsed: bool = False  # whether the step only triggers compilation; if so, ranks do not communicate


@dataclass(frozen=True)
class Load:
    """State tensors that must be on the device at the same time, and the function that updates them there in place."""

    states: list[Tensor]
    step: Callable[[Sequence[Tensor], Now], None]
    is_away: bool = False  # whether `states` are in host memory; if so, `step` gets copies of them on the device

    @property
    def num_bytes(self) -> int:
        return sum(state.numel() * state.element_size() for state in self.states)


@dataclass(frozen=True)
class Span:
    """One of a group's parameters, or a range of its elements after flattening."""

    index: int
    stretch: slice | None = None

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.cut(tensors[self.index])

    def cut(self, whole: Tensor) -> Tensor:
        return whole if self.stretch is None else whole.reshape(-1)[self.stretch]


def cut(parameters: Sequence[Tensor], most: int) -> list[list[Span]]:
    """Split all parameters into parts of up to `most` elements; large parameters are split at multiples of `most`."""
    parts: list[list[Span]] = []
    size = 0
    for index, parameter in enumerate(parameters):
        # Flattening a non-contiguous parameter would copy it, and a step on the copy would not change the parameter.
        assert parameter.is_contiguous(), f"a parameter of shape {tuple(parameter.shape)} is not contiguous"
        for start in range(0, parameter.numel(), most):
            stop = min(start + most, parameter.numel())
            if not parts or size + stop - start > most:
                parts.append([])
                size = 0
            parts[-1].append(Span(index, slice(start, stop)))
            size += stop - start
    return parts


class Place:
    """Keeps optimizer state on the same device as the parameters."""

    is_away = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
        """Return a new state tensor filled with `value`."""
        return torch.full(tuple(shape), value, dtype=dtype, device=self.device)

    def pass_over(self, loads: Sequence[Load]) -> Iterator[tuple[Load, list[Tensor]]]:
        """Yield each load with its tensors on the device. In-place changes made before the next iteration are kept."""
        for load in loads:
            assert not load.is_away, "the state is in host memory, and this place does not copy it"
            yield load, load.states

    def settle(self) -> None:
        """Block until the host may read or write the state."""


class HostPlace(Place):
    """Keeps optimizer state in host memory. `device` is the GPU, or a CPU in tests, where memory is not pinned."""

    is_away = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.num_bytes = 0  # total size of all slabs
        self._slabs: list[tuple[Tensor, int]] = []  # (slab, number of its bytes that are in use)
        self._lanes = _Lanes(device) if device.type == "cuda" else None

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
        taken = self._take(math.prod(shape) * dtype.itemsize)
        return taken.view(dtype).view(tuple(shape)).fill_(value)

    def pass_over(self, loads: Sequence[Load]) -> Iterator[tuple[Load, list[Tensor]]]:
        """Yield the loads that are already on the device, then the offloaded loads from largest to smallest.

        The largest load is stepped first, because only one other offloaded load is then in GPU memory.
        """
        away = sorted((load for load in loads if load.is_away), key=lambda load: -load.num_bytes)
        try:
            coming = self._bring(away[0]) if away else None
            for load in loads:  # step the loads on the device while the first offloaded load is copied in
                if not load.is_away:
                    yield load, load.states
            gone: _Visit | None = None
            for number, load in enumerate(away):
                here = coming
                assert here is not None
                coming = self._bring(away[number + 1]) if number + 1 < len(away) else None
                here.wait()
                yield load, here.tensors
                self._send(load, here)
                if gone is not None:
                    # Freeing the previous load lets the compute stream reuse its memory, so make that stream wait until
                    # the load has been copied out.
                    gone.wait()
                gone = here
        finally:
            if self._lanes is not None:
                self._lanes.join()

    def settle(self) -> None:
        if self._lanes is not None:
            self._lanes.outward.synchronize()

    def _bring(self, load: Load) -> _Visit:
        # Allocate and free this memory on the compute stream; `_Lanes` explains why it is not reused too early.
        tensors = [torch.empty(state.shape, dtype=state.dtype, device=self.device) for state in load.states]
        return self._copy(load.states, tensors, self._lanes.inward if self._lanes else None, tensors)

    def _send(self, load: Load, visit: _Visit) -> None:
        sent = self._copy(visit.tensors, load.states, self._lanes.outward if self._lanes else None, visit.tensors)
        visit.done = sent.done

    def _copy(
        self, source: Sequence[Tensor], target: Sequence[Tensor], lane: torch.cuda.Stream | None, kept: list[Tensor]
    ) -> _Visit:
        if lane is None:
            for state, mine in zip(source, target, strict=True):
                mine.copy_(state)
            return _Visit(kept)
        lane.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(lane):
            for state, mine in zip(source, target, strict=True):
                mine.copy_(state, non_blocking=True)
            return _Visit(kept, lane.record_event())

    def _take(self, num_bytes: int) -> Tensor:
        needed = -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        for number, (slab, used) in enumerate(self._slabs):
            if slab.numel() - used >= needed:
                self._slabs[number] = (slab, used + needed)
                return slab[used : used + num_bytes]
        least, most = _SLAB_BYTES
        grown = min(most, max(least, int(_SLAB_SHARE * self.num_bytes)))
        slab = self._make_slab(max(1 << (grown.bit_length() - 1), 1 << (needed - 1).bit_length()))
        self._slabs.append((slab, needed))
        return slab[:num_bytes]

    def _make_slab(self, num_bytes: int) -> Tensor:
        try:
            slab = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._lanes is not None)
        except RuntimeError as exc:
            held, more = format_bytes(self.num_bytes), format_bytes(num_bytes)
            raise RunFailed(
                what=f"Out of host memory for the optimizer state: {held} are allocated, and {more} more are needed.",
                why=str(exc).splitlines()[0],
                fix="Use a machine with more memory, or set offload: none in the phase.",
            ) from exc
        self.num_bytes += num_bytes
        return slab


@dataclass
class _Visit:
    """A load's tensors on the device, and the event that marks the end of the latest copy in or out."""

    tensors: list[Tensor]
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Make the compute stream wait for the copy; the host does not block."""
        if self.done is not None:
            torch.cuda.current_stream(self.tensors[0].device).wait_event(self.done)


class _Lanes:
    """Two CUDA streams, one for each direction, because a GPU can copy in both directions at once.

    Every copy first waits for all work already queued on the compute stream. So a copy to the GPU never overwrites
    memory that an earlier kernel still uses, and a copy to the host never reads results before they are computed.
    Conversely, memory is freed only after the compute stream has been made to wait for the copy that used it. So there
    is no need for `record_stream`, which makes the time of reuse unpredictable.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def join(self) -> None:
        """Make the compute stream wait for all copies that have begun, even if a step has failed."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self.inward)
        computing.wait_stream(self.outward)
