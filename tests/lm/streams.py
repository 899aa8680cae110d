"""torch.cuda as far as capturing goes, for machines without a card."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from homing.lm import cuda_graphs

__all__ = ["Recorder", "StreamsOnly"]


class Recorder(TorchDispatchMode):
    """Every op, as it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, list[Tensor]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; to say so torch would load its compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, _tensors_in(result)))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, before in self.ops:
            for old, new in zip(before, _tensors_in(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():  # else a view, or changed in place
                    old.copy_(new)


def _tensors_in(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


class StreamsOnly:
    """With torch's manner of leaving the stream of a failed capture in place, and its generator capturing. A graph does
    again what was computed while it was captured, on the same memory. `is_failing`: all that share a pool."""

    def __init__(self, *, is_failing: bool = False) -> None:
        self.is_failing, self.current, self.log = is_failing, "main", list[str]()
        self.pool: object = None
        self.captured_ops: list[str] = []
        self.can_draw = True
        self.free = 10_000  # bytes on the card; each capture takes `graph_bytes`
        self.graph_bytes = 0

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        doubled = ("current_stream", "Stream", "stream", "set_stream", "graph_pool_handle", "CUDAGraph", "graph")
        for name in (*doubled, "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(cuda_graphs, "free_on", lambda device: self.free)
        # One of this test's own, not kept for the next.
        monkeypatch.setattr(cuda_graphs, "side_stream", lambda device: torch.cuda.Stream(device))

    def current_stream(self, device: torch.device) -> Any:
        return self._named(self.current)

    def Stream(self, device: torch.device) -> Any:
        return self._named("side")

    def _named(self, name: str) -> Any:
        def waits(other: Any) -> None:
            self.log.append(f"{name} waits for {other.name}")

        return types.SimpleNamespace(name=name, wait_stream=waits)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def set_stream(self, stream: Any) -> None:
        self.current = stream.name

    def graph_pool_handle(self) -> object:
        return object()

    def CUDAGraph(self) -> Any:
        recorder = Recorder()

        def replay() -> None:
            self.log.append("replayed")
            recorder.replay()

        return types.SimpleNamespace(recorder=recorder, replay=replay)

    @contextlib.contextmanager
    def graph(self, graph: Any, *, pool: object = None, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.log.append(f"captured on {stream.name}, {capture_error_mode}")
        before, self.current, self.can_draw = self.current, stream.name, False
        self.pool = self.pool if pool is None else pool
        with graph.recorder:
            yield
        self.captured_ops += [str(func) for func, *_ in graph.recorder.ops]
        if self.is_failing and pool is not None:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.free -= self.graph_bytes
        self.current, self.can_draw = before, True

    def empty_cache(self) -> None:
        self.log.append("emptied")
