"""Forward and backward of a micro-batch: by plain calls, or as one captured CUDA graph where the card waits for them.

    plain     rows -> loss -> gradients, one kernel after the other as the host comes to it
    graph     rows into buffers -> one launch -> loss and gradients in buffers; the same kernels, so the same numbers

    decide    after the first step, when everything is compiled: a few passes are timed whose gradients are thrown away.
              Where handing one over takes the host most of its time, one is captured, compared with the plain pass and
              raced against it; the faster way stays, and is told
    begin     at each step: gradients go to buffers that stay where they are; a shape that comes again gets its graph
    run       one micro-batch

A small micro-batch is a long row of short kernels, and launching them may take longer than running them; a graph is
launched at once. Nothing in it is decided by the host any more, so what the host decides anew for each pass forbids it.
What a graph needs of memory nobody else can have. It knows nothing of steps, checkpoints or optimizers.
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
from homing.lm.device import describe_device
from homing.lm.graphs import WARM, Graphs
from homing.lm.model import Decoder
from homing.lm.train.batch import Batch
from homing.lm.train.control import Hopeless
from homing.lm.train.metrics import Tell

__all__ = ["Card", "Lap", "Passes", "card_of", "check_graphs"]

_HOST_BOUND = 0.75  # of a pass's time, spent by the host on handing it over: from here on the card waits for it
_WORTH = 0.9  # of the plain pass's time, at most: what is hardly faster is not worth the memory it keeps
_ROOM = 0.8  # of the card's memory, at most, with one pass more than was ever held at once; the rest is for evaluations
_LAPS = 5
# Of loss and gradients, against the plain pass: sums of bf16 in another order differ by far less, old rows by more.
_MOST_ERROR = 0.01
_LEAST_LOSS = 0.01  # a loss nearer to zero, as rl has them, is all rounding
Shape = tuple[tuple[int, ...], bool, bool]


@dataclass(frozen=True)
class Lap:
    host_s: float  # until all of it was handed over
    whole_s: float  # until the card was done


class Card(Graphs):
    """What of CUDA a pass needs; tests have one of their own."""

    def lap(self, run: Callable[[], object]) -> Lap:
        torch.cuda.synchronize(self._device)
        begun = time.perf_counter()
        run()
        handed = time.perf_counter()
        torch.cuda.synchronize(self._device)
        return Lap(handed - begun, time.perf_counter() - begun)

    def has_room(self) -> bool:
        """For what one pass takes, beside the most that was ever held: the optimizer's scratch and evaluations come
        while a graph keeps its memory, and so does a plain pass if capturing fails."""
        free, _ = torch.cuda.mem_get_info(self._device)
        ours = free + torch.cuda.memory_reserved(self._device)
        peak, now = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
        return peak + (peak - now) <= _ROOM * ours


def card_of(device: torch.device) -> Card | None:
    return Card(device) if device.type == "cuda" else None


def check_graphs(asked: str, device: torch.device) -> None:
    """Refuses what was asked for by name and cannot be, before anything is loaded."""
    if asked == "on" and card_of(device) is None:
        raise UsageError(
            what=f"train.graphs: on is for CUDA cards, and this is {describe_device(device)}.",
            why="Only CUDA can capture a pass and launch it at once.",
            fix="Set train.graphs: auto, or off, as in --set train.graphs=off",
        )


class Passes:
    """Of one phase. `asked`: auto | on | off."""

    def __init__(self, model: Decoder, device: torch.device, asked: str, tell: Tell, num_ranks: int = 1) -> None:
        self.picked = ""  # on | off, once it was found out: rides in checkpoints
        self.has_tried = False  # timed or captured anything
        self._model, self._asked, self._tell, self._num_ranks = model, asked, tell, num_ranks
        self._card = card_of(device)
        self._is_on = False
        self._graphs: dict[Shape, _Graph] = {}
        self._seen: set[Shape] = set()
        self._plain_ones: set[Shape] = set()  # that are not captured, which was told
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []

    def settle(self, kept: str) -> None:
        """`kept`: what was found out on this card before, or nothing."""
        self.picked = kept if self._asked == "auto" else ""

    def run(self, piece: Batch) -> Tensor:
        """Adds its gradients; its loss, in a buffer that the next pass may write over."""
        graph = self._graphs.get(_shape(piece))
        return self._plain(piece) if graph is None else graph.run(piece)

    def begin(self, pieces: Sequence[Batch]) -> None:
        """Before the first of a step, whose gradients are None."""
        if not self._is_on:
            return
        for piece in pieces:
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
        """Between two steps, with a micro-batch like those to come. Its gradients are thrown away."""
        if self._card is None or self._asked == "off" or self.picked == "off":
            return
        if problem := self._why_not(piece):
            self._leave("Micro-batches", problem)
            return
        self.has_tried = True
        if self._asked == "on" or self.picked == "on":
            if self._capture(piece):
                self._settle_on("Each micro-batch is one captured CUDA graph.")
        else:
            self._race(self._card, piece)
        self._detach()

    def forget(self) -> None:
        """Gives back all memory; what comes again is captured again."""
        self._detach()
        self._gradients = []
        self._graphs.clear()
        if self._card is not None:
            self._card.forget()

    # -- finding out -------------------------------------------------------------------------------------------------

    def _why_not(self, piece: Batch) -> str:
        """What forbids to capture it: what the host decides in each pass, what is untried, or too little memory."""
        lora = self._model.lora
        if self._num_ranks > 1:
            return f"{self._num_ranks} cards train together, and with that it is untried"
        if lora is not None and lora.dropout:
            return "the host draws anew for each of them what dropout leaves out"
        if piece.segments_RT is not None and self._model.has_flex:
            return "FlexAttention's block masks are made anew for each of them, with code of the host"
        assert self._card is not None, "asked without a card"
        if not self._card.has_room():
            return f"they would keep what a pass takes, and {1 - _ROOM:.0%} of the card must stay free beside it"
        return ""

    def _race(self, card: Card, piece: Batch) -> None:
        self._attach()
        plain = _median_lap(card, lambda: self._plain(piece))
        told = f"{_ms(plain.whole_s)} by plain calls, which the host takes {_ms(plain.host_s)} to make"
        if plain.host_s < _HOST_BOUND * plain.whole_s:
            self.forget()
            self._settle_off(f"A micro-batch takes {told}: the card does not wait for the host.", plain)
            return
        if not self._capture(piece):
            return
        captured = _median_lap(card, lambda: self.run(piece))
        if captured.whole_s > _WORTH * plain.whole_s:
            self.forget()
            self._settle_off(
                f"A micro-batch takes {told}, and {_ms(captured.whole_s)} as a CUDA graph.", plain, captured
            )
            return
        text = f"Each micro-batch is one captured CUDA graph: {_ms(captured.whole_s)}, and {told}."
        self._settle_on(text, plain, captured)

    def _capture(self, piece: Batch) -> bool:
        """Leaves gradients that mean nothing. False: it failed, and all is as if it had never been tried."""
        assert self._card is not None, "captured without a card"
        graph: _Graph | None = None
        try:
            self._attach()
            graph = _Graph(self._card, self._model, piece)
            problem = self._compare(graph, piece)
        except Exception as exc:  # a kernel that may not be captured, a compiler, memory: each in its own way
            problem = f"{type(exc).__name__}: {(str(exc).strip().splitlines() or [''])[0][:300]}"
        # Out of the `except`, so that what the failed pass holds is no longer held by the exception.
        if graph is not None and not problem:
            self._graphs[_shape(piece)] = graph
            return True
        graph = None
        self.forget()
        if self._asked == "on":
            raise Hopeless(
                what="A micro-batch cannot be captured as a CUDA graph here.",
                why=problem,
                fix="Set train.graphs: off (the same numbers), or auto to go on without them when it fails.",
            )
        self._is_on, self.picked = False, "off"
        text = f"warning: CUDA graphs failed; training goes on by plain calls. {problem}"
        self._tell("graphs_failed", text, aloud=True)
        return False

    def _compare(self, graph: _Graph, piece: Batch) -> str:
        """With the plain pass, on other rows than were captured: those from right to left. "": they agree."""
        other = _with_tensors(piece, [tensor.flip(1) for tensor in _tensors(piece)])
        found = []
        for run in (self._plain, graph.run):
            self._attach()
            loss = run(other).float()
            norms = torch.stack(torch._foreach_norm([gradient for _, gradient in self._gradients]))
            # A model that has gone astray may have no numbers to compare; the loop is who ends its run.
            found.append([torch.nan_to_num(each, 0.0, 0.0, 0.0) for each in (loss.clone(), norms)])
        (loss, norms), (graph_loss, graph_norms) = found
        error = (graph_norms - norms).norm() / norms.norm().clamp(min=1e-30)
        error = torch.maximum(error, (graph_loss - loss).abs() / loss.abs().clamp(min=_LEAST_LOSS))
        return "" if float(error) <= _MOST_ERROR else f"It differs from the plain pass by {float(error):.1%}."

    def _settle_on(self, text: str, *laps: Lap) -> None:
        self._is_on, self.picked = True, "on"
        self._tell_picked(text, laps)

    def _settle_off(self, text: str, *laps: Lap) -> None:
        self._is_on, self.picked = False, "off"
        self._tell_picked(text, laps)

    def _tell_picked(self, text: str, laps: Sequence[Lap]) -> None:
        seconds: dict[str, Any] = dict(zip(("plain_s", "graph_s"), (lap.whole_s for lap in laps), strict=False))
        self._tell("graphs_picked", text, aloud=True, graphs=self.picked, **seconds)

    def _leave(self, what: str, problem: str) -> None:
        self._tell("graphs_left", f"{what} are not captured as CUDA graphs: {problem}.", aloud=True)

    # -- computing ---------------------------------------------------------------------------------------------------

    def _plain(self, piece: Batch) -> Tensor:
        loss = piece.loss(self._model)
        loss.backward()
        return loss.detach()

    def _attach(self) -> None:
        """Gradients to their buffers, which are at zero: a graph adds to the memory it was captured with, whatever
        became of it."""
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
    """The pass of one shape, captured, with the buffers that it reads and writes."""

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
        for mine, theirs in zip(_tensors(self._rows), _tensors(piece), strict=True):
            mine.copy_(theirs, non_blocking=True)
        # Another number in each step: as a number of the host it would be captured with the rest.
        self._count.fill_(float(max(1, piece.num_targets)))


def _shape(piece: Batch) -> Shape:
    return tuple(piece.ids_RT.shape), piece.segments_RT is not None, piece.weights_RT is not None


def _tensors(piece: Batch) -> list[Tensor]:
    every = (piece.ids_RT, piece.targets_RT, piece.segments_RT, piece.weights_RT)
    return [tensor for tensor in every if tensor is not None]


def _with_tensors(piece: Batch, tensors: Sequence[Tensor]) -> Batch:
    """`tensors` in the order of `_tensors`."""
    ids, targets, *rest = tensors
    return dataclasses.replace(
        piece,
        ids_RT=ids,
        targets_RT=targets,
        segments_RT=None if piece.segments_RT is None else rest[0],
        weights_RT=None if piece.weights_RT is None else rest[-1],
    )


def _median_lap(card: Card, run: Callable[[], object]) -> Lap:
    for _ in range(WARM):
        run()
    return sorted((card.lap(run) for _ in range(_LAPS)), key=lambda lap: lap.whole_s)[_LAPS // 2]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
