"""Where the optimizer's state lives, and how it comes to its step: on the card, or in the host's memory.

    Place      on the device of the parameters; every part of it is there when its step comes
    HostPlace  in pinned memory of the host; it passes over the card a load at a time:

        host --in--> card, stepped, --out--> host        load 3 comes in | load 2 is stepped | load 1 goes out

State is used once in an optimizer step and by no forward or backward, so a card need not hold it in between. What is
computed is the same, bit for bit: a load is a whole group of Muon's matrices, or a stretch of what AdamW steps number
by number. Copies in and out have streams of their own and wait for the step that computes by events; the host waits for
nothing. What is on disk is the same too: a run goes on with its state in either place.
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

AT_A_TIME = 2**24  # numbers of a parameter that AdamW steps at a time; whole blocks of adam8
# torch rounds pinned memory up to a power of two, which for every tensor by itself would be a third more on average. So
# many tensors share a slab, and slabs grow with what there is already: the last one is never much of it.
_SLAB_BYTES = (2**26, 2**30)
_SLAB_SHARE = 1 / 4
_ALIGN_BYTES = 512  # as torch's own memory on cards


@dataclass(frozen=True)
class Now:
    """What all groups are told of one step."""

    lr_scale: float
    step_count: Tensor  # counts this step, if it is good
    is_good: Tensor  # one number on the device, 1 or 0: with 0 nothing changes
    num_steps: int = 0  # of the run so far
    is_rehearsed: bool = False  # for the compiler only: no rank waits for another


@dataclass(frozen=True)
class Load:
    """State that is on the device at one time, and the step that changes it there, in place."""

    states: list[Tensor]
    step: Callable[[Sequence[Tensor], Now], None]
    is_away: bool = False  # `states` are the host's; the step gets tensors like them on the device

    @property
    def num_bytes(self) -> int:
        return sum(state.numel() * state.element_size() for state in self.states)


@dataclass(frozen=True)
class Span:
    """A parameter of a group, or a stretch of its numbers."""

    index: int
    stretch: slice | None = None

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.cut(tensors[self.index])

    def cut(self, whole: Tensor) -> Tensor:
        return whole if self.stretch is None else whole.reshape(-1)[self.stretch]


def cut(parameters: Sequence[Tensor], most: int) -> list[list[Span]]:
    """All of them, in parts of at most so many numbers. A large one is cut at multiples of that."""
    parts: list[list[Span]] = []
    size = 0
    for index, parameter in enumerate(parameters):
        # A stretch of it would be a copy, and stepping that would change nothing.
        assert parameter.is_contiguous(), f"a parameter of {tuple(parameter.shape)} does not lie in one piece"
        for start in range(0, parameter.numel(), most):
            stop = min(start + most, parameter.numel())
            if not parts or size + stop - start > most:
                parts.append([])
                size = 0
            parts[-1].append(Span(index, slice(start, stop)))
            size += stop - start
    return parts


class Place:
    """On the device."""

    is_away = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
        """State that begins with the same value everywhere."""
        return torch.full(tuple(shape), value, dtype=dtype, device=self.device)

    def pass_over(self, loads: Sequence[Load]) -> Iterator[tuple[Load, list[Tensor]]]:
        """Each load with its tensors on the device. What is done to them until the next one is asked for is kept."""
        for load in loads:
            assert not load.is_away, "state of the host, and nobody who brings it"
            yield load, load.states

    def settle(self) -> None:
        """Until the state may be read or written by the host."""


class HostPlace(Place):
    """In the host's memory. `device` is the card; a processor will do, to try it, and then nothing is pinned."""

    is_away = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.num_bytes = 0  # of all slabs
        self._slabs: list[tuple[Tensor, int]] = []  # and how much of each is taken
        self._lanes = _Lanes(device) if device.type == "cuda" else None

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
        taken = self._take(math.prod(shape) * dtype.itemsize)
        return taken.view(dtype).view(tuple(shape)).fill_(value)

    def pass_over(self, loads: Sequence[Load]) -> Iterator[tuple[Load, list[Tensor]]]:
        """Largest first, so that the largest has no neighbour on one side."""
        away = sorted((load for load in loads if load.is_away), key=lambda load: -load.num_bytes)
        try:
            coming = self._bring(away[0]) if away else None
            for load in loads:  # while the first comes in
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
                    # Whoever gets its memory next computes, or copies, after this stream: and so after it has gone.
                    gone.wait()
                gone = here
        finally:
            if self._lanes is not None:
                self._lanes.join()

    def settle(self) -> None:
        if self._lanes is not None:
            self._lanes.outward.synchronize()

    def _bring(self, load: Load) -> _Visit:
        # Made on the stream that computes, which frees it again: `_Lanes` says why no other stream may use it sooner.
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
                what=f"The host has no memory left for the optimizer's state: it gave {held}, and not {more} more.",
                why=str(exc).splitlines()[0],
                fix="Take a machine with more memory, or set offload: none in the phase.",
            ) from exc
        self.num_bytes += num_bytes
        return slab


@dataclass
class _Visit:
    """A load's tensors on the device, and the copy that was begun last: in, then out."""

    tensors: list[Tensor]
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Makes the stream that computes wait for the copy; the host goes on."""
        if self.done is not None:
            torch.cuda.current_stream(self.tensors[0].device).wait_event(self.done)


class _Lanes:
    """One stream for each way: a card copies both ways at once.

    Every copy begins by waiting for all that the computing stream was told before it. So a copy in never writes to
    memory that an earlier kernel still uses, and a copy out never reads what is not yet computed. The other way round,
    memory is given back only after the computing stream was made to wait for the copy that used it; `record_stream`,
    which would leave to chance when it is free again, is not needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def join(self) -> None:
        """All that was begun, also where a step has failed in between, comes before what is computed next."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self.inward)
        computing.wait_stream(self.outward)
