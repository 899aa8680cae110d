"""Capturing, on a machine without a card: on which stream, into which memory, and what a failure leaves."""

from __future__ import annotations

import pytest
import torch
from streams import StreamsOnly

from homing.lm.cuda_graphs import Graphs

CPU = torch.device("cpu")


def test_a_capture_warms_up_on_the_stream_it_is_captured_on_and_polices_this_thread_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = StreamsOnly()
    cuda.take_over(monkeypatch)
    replay = Graphs(CPU).capture(lambda: cuda.log.append(f"computed on {cuda.current}"))
    replay()
    assert cuda.log == [
        "side waits for main", "computed on side", "computed on side", "main waits for side",
        "captured on side, thread_local", "computed on side", "replayed",
    ]  # fmt: skip
    assert cuda.current == "main"


def test_where_no_capture_was_begun_none_is_ended_and_nothing_is_put_on_a_card_that_may_be_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = StreamsOnly()
    cuda.take_over(monkeypatch)

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        Graphs(CPU).capture(full)
    assert cuda.current == "main"
    assert not [line for line in cuda.log if "captured" in line]


def test_what_ends_a_failed_capture_needs_no_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = StreamsOnly(is_failing=True)
    cuda.take_over(monkeypatch)
    with pytest.raises(RuntimeError, match="during capture"):
        Graphs(CPU).capture(lambda: None)
    assert [op for op in cuda.captured_ops if "zero" in op or "empty" in op] == ["aten.zero_.default"]


def test_after_a_capture_that_failed_the_stream_and_the_pool_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = StreamsOnly(is_failing=True)
    cuda.take_over(monkeypatch)
    graphs = Graphs(CPU)
    with pytest.raises(RuntimeError, match="during capture"):
        graphs.capture(lambda: None)
    assert cuda.current == "main"
    assert cuda.can_draw
    first, cuda.is_failing = cuda.pool, False
    graphs.forget()
    assert cuda.log[-1] == "emptied"
    graphs.capture(lambda: None)
    second = cuda.pool
    assert second is not first  # its name may be gone with what used it
    graphs.capture(lambda: None)
    assert cuda.pool is second
