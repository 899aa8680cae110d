"""Runs a micro-batch's forward and backward pass: eagerly, or as one CUDA graph if launching kernels is slow.

    plain     rows -> loss -> gradients, kernel by kernel
    graph     rows into buffers -> one launch -> loss and gradients in buffers; the same kernels, so the same numbers

    decide    after the first step, when everything is compiled: time a few passes and discard their gradients. If
              launching kernels takes up most of the time, capture a graph, compare its result with the plain pass and
              time it too; keep the faster one and report it
    begin     at each step: use gradient buffers at fixed addresses; capture a graph for each shape seen a second time
    run       one micro-batch

A small micro-batch is a long sequence of short kernels, and launching them can take longer than running them; a graph
needs a single launch. Nothing runs on the host during a replay, so a pass in which the host makes decisions cannot be
captured. A graph's memory cannot be used for anything else.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from homing.errors import UsageError
from homing.lm.cuda_graphs import WARM, Graphs
from homing.lm.device import describe_device
from homing.lm.model import Decoder
from homing.lm.train.compute.batch import Batch
from homing.lm.train.metrics import Notify
from homing.lm.train.stop_requests import FatalError

__all__ = ["Card", "Passes", "Timing", "card_of", "check_graphs"]

# If launching the kernels takes more than this share of a pass, assume that the GPU is waiting for the host.
_HOST_BOUND = 0.75
# A graph is worth its memory only if a pass with it takes at most this share of the time of a pass without it.
_WORTH = 0.9
# Maximum share of GPU memory for the peak measured until now plus one more pass. Evaluations need the rest.
_ROOM = 0.8
_NUM_TIMINGS = 5
# Maximum relative difference in loss and gradients between a graph and the plain pass. Summing bf16 numbers in
# a different order causes far smaller differences; a graph that reads stale rows causes larger ones.
_MOST_ERROR = 0.01
_LEAST_LOSS = 0.01  # minimum divisor for the relative error: a loss close to zero, as in rl, is mostly rounding error
Shape = tuple[tuple[int, ...], bool, bool]


@dataclass(frozen=True)
class Timing:
    host_s: float  # time until the host had launched all kernels
    whole_s: float  # time until the GPU had finished all kernels


class Card(Graphs):
    """The CUDA operations that `Passes` needs. Tests substitute their own class."""

    def timing(self, run: Callable[[], object]) -> Timing:
        torch.cuda.synchronize(self._device)
        begun = time.perf_counter()
        run()
        handed = time.perf_counter()
        torch.cuda.synchronize(self._device)
        return Timing(handed - begun, time.perf_counter() - begun)

    def has_room(self) -> bool:
        """Return whether the GPU has room for the memory of one more pass on top of the peak memory measured so far.

        A graph never releases its memory, and the optimizer, evaluations, and a plain pass after a failed capture need
        additional memory.
        """
        free, _ = torch.cuda.mem_get_info(self._device)
        ours = free + torch.cuda.memory_reserved(self._device)
        peak, now = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
        return peak + (peak - now) <= _ROOM * ours


def card_of(device: torch.device) -> Card | None:
    return Card(device) if device.type == "cuda" else None


def check_graphs(asked: str, device: torch.device) -> None:
    """Raise UsageError if graphs are `on` but the device does not support them. Call this before loading anything."""
    if asked == "on" and card_of(device) is None:
        raise UsageError(
            what=f"train.graphs: on needs a CUDA GPU, but the device is {describe_device(device)}.",
            why="Capturing a pass as a graph requires CUDA.",
            fix="Use --set train.graphs=auto   or   --set train.graphs=off",
        )


class Passes:
    """Runs the micro-batches of one phase. `asked` is the setting for CUDA graphs: auto | on | off."""

    def __init__(self, model: Decoder, device: torch.device, asked: str, notify: Notify, num_ranks: int = 1) -> None:
        self.picked = ""  # whether to use graphs: on | off, or "" if not yet decided; stored in checkpoints
        self.has_tried = False  # whether a pass has been timed or captured
        self._model, self._asked, self._notify, self._num_ranks = model, asked, notify, num_ranks
        self._card = card_of(device)
        self._is_on = False
        self._graphs: dict[Shape, _Graph] = {}
        self._seen: set[Shape] = set()
        self._plain_ones: set[Shape] = set()  # shapes already reported as impossible to capture
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []

    def settle(self, kept: str) -> None:
        """Reuse `kept`, the decision about graphs made earlier on the same GPU model; it is "" if none was made."""
        self.picked = kept if self._asked == "auto" else ""

    def run(self, piece: Batch) -> Tensor:
        """Add a micro-batch's gradients to `grad`; return its loss, in a buffer that the next pass may overwrite."""
        graph = self._graphs.get(_shape(piece))
        return self._plain(piece) if graph is None else graph.run(piece)

    def begin(self, micro_batches: Sequence[Batch]) -> None:
        """Prepare graphs and gradient buffers. Call before a step's first micro-batch, while gradients are None."""
        if not self._is_on:
            return
        for piece in micro_batches:
            shape = _shape(piece)
            if shape in self._graphs or shape in self._plain_ones:
                continue
            if shape not in self._seen:
                self._seen.add(shape)
            elif problem := self._why_not(piece):
                self._plain_ones.add(shape)
                self._leave(f"Micro-batches of {shape[0][0]} x {shape[0][1]} tokens", problem)
            elif not self._capture(piece):
                return
        self._attach()

    def decide(self, piece: Batch) -> None:
        """Decide whether to use graphs by running a typical micro-batch, `piece`. Its gradients are discarded."""
        if self._card is None or self._asked == "off" or self.picked == "off":
            return
        if problem := self._why_not(piece):
            self._leave("Micro-batches", problem)
            return
        self.has_tried = True
        if self._asked == "on" or self.picked == "on":
            if self._capture(piece):
                self._settle_on("Each micro-batch runs as one CUDA graph.")
        else:
            self._race(self._card, piece)
        self._detach()

    def forget(self) -> None:
        """Free all graphs and buffers. Shapes that occur again will be captured again."""
        self._detach()
        self._gradients = []
        self._graphs.clear()
        if self._card is not None:
            self._card.forget()

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _why_not(self, piece: Batch) -> str:
        """Return the reason why a micro-batch cannot be captured as a graph, or "" if it can.

        Possible reasons are a decision that the host must make in each pass, an untested combination, or too little
        memory.
        """
        lora = self._model.lora
        if self._num_ranks > 1:
            return f"graphs are not tested with several GPUs, and this run uses {self._num_ranks}"
        if lora is not None and lora.dropout:
            return "the host draws a new dropout mask for each micro-batch"
        if piece.segments_RT is not None and self._model.has_flex:
            return "the host builds new FlexAttention block masks for each micro-batch"
        assert self._card is not None, "call this only on CUDA"
        if not self._card.has_room():
            return f"a graph would hold the memory of a pass, and {1 - _ROOM:.0%} of GPU memory must stay free"
        return ""

    def _race(self, card: Card, piece: Batch) -> None:
        self._attach()
        plain = _median_timing(card, lambda: self._plain(piece))
        without = f"{_ms(plain.whole_s)} without CUDA graphs, {_ms(plain.host_s)} of it launching kernels"
        if plain.host_s < _HOST_BOUND * plain.whole_s:
            self.forget()
            self._settle_off(
                f"CUDA graphs not used: a micro-batch takes {without}; the GPU does not wait for the host.", plain
            )
            return
        if not self._capture(piece):
            return
        captured = _median_timing(card, lambda: self.run(piece))
        if captured.whole_s > _WORTH * plain.whole_s:
            self.forget()
            self._settle_off(
                f"CUDA graphs not used: a micro-batch takes {without}, but {_ms(captured.whole_s)} as a CUDA graph.",
                plain,
                captured,
            )
            return
        text = f"Each micro-batch runs as one CUDA graph: {_ms(captured.whole_s)}, compared with {without}."
        self._settle_on(text, plain, captured)

    def _capture(self, piece: Batch) -> bool:
        """Capture a graph; return False if that failed, in which case all graphs are freed.

        The gradients are meaningless afterwards.
        """
        assert self._card is not None, "call this only on CUDA"
        graph: _Graph | None = None
        try:
            self._attach()
            graph = _Graph(self._card, self._model, piece)
            problem = self._compare(graph, piece)
        except Exception as exc:  # capturing, compiling or allocating memory may raise almost any kind of exception
            problem = f"{type(exc).__name__}: {(str(exc).strip().splitlines() or [''])[0][:300]}"
        # Handle the error outside the `except` block, where the exception no longer references tensors of the pass.
        if graph is not None and not problem:
            self._graphs[_shape(piece)] = graph
            return True
        graph = None
        self.forget()
        if self._asked == "on":
            raise FatalError(
                what="Capturing a micro-batch as a CUDA graph failed.",
                why=problem,
                fix="Set train.graphs: off (same results), or auto to continue without graphs when capturing fails.",
            )
        self._is_on, self.picked = False, "off"
        text = f"warning: CUDA graphs failed; training continues without them. {problem}"
        self._notify("graphs_failed", text, notice=True)
        return False

    def _compare(self, graph: _Graph, piece: Batch) -> str:
        """Compare the graph with the plain pass; return "" if the results agree, else a description of the difference.

        Both process the rows of the capture with the tokens in reverse order. A graph that still read the original rows
        would therefore give a different result.
        """
        other = _with_tensors(piece, [tensor.flip(1) for tensor in _tensors(piece)])
        found = []
        for run in (self._plain, graph.run):
            self._attach()
            loss = run(other).float()
            norms = torch.stack(torch._foreach_norm([gradient for _, gradient in self._gradients]))
            # Ignore NaNs here: if the model has diverged, the training loop will end the run.
            found.append([torch.nan_to_num(each, 0.0, 0.0, 0.0) for each in (loss.clone(), norms)])
        (loss, norms), (graph_loss, graph_norms) = found
        error = (graph_norms - norms).norm() / norms.norm().clamp(min=1e-30)
        error = torch.maximum(error, (graph_loss - loss).abs() / loss.abs().clamp(min=_LEAST_LOSS))
        return "" if float(error) <= _MOST_ERROR else f"The graph differs from the plain pass by {float(error):.1%}."

    def _settle_on(self, text: str, *timings: Timing) -> None:
        self._is_on, self.picked = True, "on"
        self._report_picked(text, timings)

    def _settle_off(self, text: str, *timings: Timing) -> None:
        self._is_on, self.picked = False, "off"
        self._report_picked(text, timings)

    def _report_picked(self, text: str, timings: Sequence[Timing]) -> None:
        seconds: dict[str, Any] = dict(
            zip(("plain_s", "graph_s"), (timing.whole_s for timing in timings), strict=False)
        )
        self._notify("graphs_picked", text, notice=True, graphs=self.picked, **seconds)

    def _leave(self, what: str, problem: str) -> None:
        self._notify("graphs_left", f"{what} are not captured as CUDA graphs: {problem}.", notice=True)

    # -- computing ---------------------------------------------------------------------------------------------------

    def _plain(self, piece: Batch) -> Tensor:
        loss = piece.loss(self._model)
        loss.backward()
        return loss.detach()

    def _attach(self) -> None:
        """Make the fixed buffers the parameters' gradients, and zero them, because replaying a graph adds to them."""
        if not self._gradients:
            trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            self._gradients = [(parameter, torch.zeros_like(parameter)) for parameter in trained]
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        torch._foreach_zero_([gradient for _, gradient in self._gradients])

    def _detach(self) -> None:
        for parameter, _ in self._gradients:
            parameter.grad = None


class _Graph:
    """A captured pass for micro-batches of one shape, with its input and output buffers."""

    def __init__(self, card: Card, model: Decoder, piece: Batch) -> None:
        rows = [tensor.clone(memory_format=torch.contiguous_format) for tensor in _tensors(piece)]
        self._rows = dataclasses.replace(_with_tensors(piece, rows), figures={}, notices=())
        self._count = torch.ones((), device=model.device)
        self._loss = torch.zeros((), device=model.device)
        self._fill(piece)
        mine, count, found = self._rows, self._count, self._loss

        def compute() -> None:
            loss = mine.loss(model, count)
            loss.backward()
            found.copy_(loss.detach())

        self._replay = card.capture(compute)

    def run(self, piece: Batch) -> Tensor:
        self._fill(piece)
        self._replay()
        return self._loss

    def _fill(self, piece: Batch) -> None:
        for mine, source in zip(_tensors(self._rows), _tensors(piece), strict=True):
            mine.copy_(source, non_blocking=True)
        # The number of targets differs from step to step, so it must be a tensor; a Python number would be captured as
        # a constant.
        self._count.fill_(float(max(1, piece.num_targets)))


def _shape(piece: Batch) -> Shape:
    return tuple(piece.ids_RT.shape), piece.segments_RT is not None, piece.weights_RT is not None


def _tensors(piece: Batch) -> list[Tensor]:
    every = (piece.ids_RT, piece.targets_RT, piece.segments_RT, piece.weights_RT)
    return [tensor for tensor in every if tensor is not None]


def _with_tensors(piece: Batch, tensors: Sequence[Tensor]) -> Batch:
    """Return the batch with its tensors replaced by `tensors`, which are in the order of `_tensors`."""
    ids, targets, *rest = tensors
    return dataclasses.replace(
        piece,
        ids_RT=ids,
        targets_RT=targets,
        segments_RT=None if piece.segments_RT is None else rest[0],
        weights_RT=None if piece.weights_RT is None else rest[-1],
    )


def _median_timing(card: Card, run: Callable[[], object]) -> Timing:
    for _ in range(WARM):
        run()
    return sorted((card.timing(run) for _ in range(_NUM_TIMINGS)), key=lambda timing: timing.whole_s)[_NUM_TIMINGS // 2]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
