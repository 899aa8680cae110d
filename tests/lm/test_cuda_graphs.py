"""Capturing, on a machine without a card: on which stream, into which memory, and what a failure leaves."""

from __future__ import annotations

import pytest
import torch
from streams import StreamsOnly

from homing.lm.cuda_graphs import Graphs, RecentGraphs

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


# -- a bounded number of graphs ----------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StreamsOnly:
    cuda = StreamsOnly()
    cuda.take_over(monkeypatch)
    return cuda


def captured(graphs: RecentGraphs, *keys: int) -> list[int]:
    for key in keys:
        graphs.capture(key, lambda key=key: torch.full((1,), key))
    return [key for key in range(10) if key in graphs]


def test_the_graph_that_was_not_used_for_longest_is_freed_first(cuda: StreamsOnly) -> None:
    graphs = RecentGraphs(CPU, most_graphs=3)
    assert captured(graphs, 1, 2, 3) == [1, 2, 3]
    assert int(graphs.replay(1)) == 1
    assert captured(graphs, 4) == [1, 3, 4]
    assert captured(graphs, 5, 6) == [4, 5, 6]
    assert int(graphs.replay(4)) == 4


def test_graphs_are_freed_until_the_rest_fits_the_memory_bound(cuda: StreamsOnly) -> None:
    cuda.graph_bytes = 400
    graphs = RecentGraphs(CPU, most_bytes=1000)
    assert captured(graphs, 1, 2, 3) == [2, 3]
    assert graphs.num_bytes == 800
    cuda.graph_bytes = 5000
    assert captured(graphs, 4) == [4], "a step needs one graph, however large"


def test_the_shared_memory_is_freed_with_the_last_graph_and_not_before(cuda: StreamsOnly) -> None:
    graphs = RecentGraphs(CPU)
    captured(graphs, 1, 2)
    graphs.discard(lambda key: key == 1)
    assert "emptied" not in cuda.log
    graphs.discard()
    assert cuda.log[-1] == "emptied"
    assert len(graphs) == 0
    graphs.discard()
    assert cuda.log.count("emptied") == 1, "there was nothing left to free"


def test_a_graph_that_cannot_be_captured_leaves_the_others(cuda: StreamsOnly) -> None:
    graphs = RecentGraphs(CPU)
    captured(graphs, 1)
    cuda.is_failing = True
    with pytest.raises(RuntimeError, match="during capture"):
        captured(graphs, 2)
    assert 1 in graphs
    assert 2 not in graphs
