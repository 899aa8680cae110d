"""Optimizer state in the host's memory: the same bits, the same files, never more than three loads on the card."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.lm.train.test_loop import events, figures, go, weights
from tiny import make_data, make_run
from torch import Tensor

from homing.errors import RunFailed, UsageError
from homing.lm.model import Decoder
from homing.lm.train import build_phase
from homing.lm.train.optim import adamw, offload
from homing.lm.train.optim.offload import HostPlace, Load, Now, Place, cut
from homing.lm.train.optim.param_groups import Optimizer, build_optimizer, state_bytes
from homing.lm.train.stop_requests import FatalError
from homing.wire import file_names
from homing.wire.run_json import Model
from homing.wire.run_json import Optimizer as Spec

CPU = torch.device("cpu")
SHAPE = Model(
    family="stock", arch="qwen3", num_layers=3, width=64, num_heads=2, num_kv_heads=1, head_size=32, ffn_width=128,
    context=16, vocab_size=300, is_tied=False,
)  # fmt: skip
MUON = Spec("muon", 0.02, 0.01, 0.01, 0.01, 0.1, variance_beta=0.9, momentum_start=0.85, is_cautious=True)
SPECS = {
    "muon": MUON,
    "adamw": dataclasses.replace(MUON, kind="adamw", lr=1e-2),
    "int8": dataclasses.replace(MUON, kind="adamw", lr=1e-2, states="int8"),
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return folder


@pytest.fixture
def small_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that even these matrices are cut, and there are many loads."""
    monkeypatch.setattr(adamw, "AT_A_TIME", 2048)
    monkeypatch.setattr(adamw, "STRETCH", 2048)


def built(spec: Spec, place: Place | None) -> tuple[Decoder, Optimizer]:
    model = Decoder(SHAPE)
    model.init_weights(3)
    return model, build_optimizer(model, spec, place=place)


def stepped(model: Decoder, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.randint(SHAPE.vocab_size, (4, 17), generator=torch.Generator().manual_seed(step))
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        # The third is skipped, as one that is not finite.
        optimizer.step(1.0 - step / 20, torch.tensor(0.0 if step == 2 else 1.0), num_steps=step)
        optimizer.zero_grad()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.acceptance(96)
@pytest.mark.usefixtures("small_loads")
@pytest.mark.parametrize("kind", SPECS)
def test_weights_and_state_are_the_same_bit_for_bit(kind: str) -> None:
    (ours, near), (reference, far) = built(SPECS[kind], None), built(SPECS[kind], HostPlace(CPU))
    assert len([load for load in far._loads if load.is_away]) > 4
    assert not any(load.is_away for load in near._loads)
    for model, optimizer in ((ours, near), (reference, far)):
        stepped(model, optimizer, range(6))
    assert same(ours.weights_for_disk(), reference.weights_for_disk())
    assert same(near.state_tensors(), far.state_tensors())
    assert near.num_steps == far.num_steps == 5


@pytest.mark.slow
@pytest.mark.usefixtures("small_loads")
@pytest.mark.parametrize("is_away_first", [True, False])
@pytest.mark.parametrize("kind", SPECS)
def test_state_saved_on_the_gpu_loads_into_host_memory_and_back(kind: str, is_away_first: bool) -> None:
    straight, whole = built(SPECS[kind], None)
    stepped(straight, whole, range(6))
    places = [HostPlace(CPU), None] if is_away_first else [None, HostPlace(CPU)]
    model, optimizer = built(SPECS[kind], places[0])
    stepped(model, optimizer, range(3))
    disk = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    later, other = built(SPECS[kind], places[1])
    later.load_weights({name: tensor.clone() for name, tensor in model.weights_for_disk().items()})
    other.load_state_tensors(disk)
    stepped(later, other, range(3, 6))
    assert same(straight.weights_for_disk(), later.weights_for_disk())
    assert same(whole.state_tensors(), other.state_tensors())


def test_a_rehearsed_step_changes_no_state() -> None:
    model, optimizer = built(MUON, HostPlace(CPU))
    stepped(model, optimizer, range(2))
    before = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    for group in optimizer.muon:
        group.parts = tuple(lambda *a, part=part: part(*a) for part in group.parts)  # as if compiled
        assert group.is_compiled
    optimizer.rehearse()
    assert same(before, optimizer.state_tensors())


def test_all_numbers_are_in_one_part_and_none_is_larger_than_asked_for() -> None:
    parameters = [torch.zeros(10), torch.zeros(3, 100), torch.zeros(2)]
    parts = cut(parameters, 128)
    seen = [torch.zeros(p.numel()) for p in parameters]
    for part in parts:
        assert sum(span.of(parameters).numel() for span in part) <= 128
        for span in part:
            seen[span.index][span.stretch] += 1
    assert all(bool((counts == 1).all()) for counts in seen)
    with pytest.raises(AssertionError, match="not contiguous"):
        cut([torch.zeros(4, 6).t()], 128)


# --- the host's memory ---


def test_slabs_waste_little_where_each_tensor_alone_would_be_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(self: HostPlace, size: int) -> Tensor:
        assert size & (size - 1) == 0, "torch would round it up"
        self.num_bytes += size
        return torch.empty(size, dtype=torch.uint8, device="meta")

    monkeypatch.setattr(HostPlace, "_make_slab", count)
    place = HostPlace(CPU)
    # Two moments of each matrix of Qwen2.5-1.5B.
    shapes = [(151936, 1536)] + 28 * [(1536, 1536), (256, 1536), (256, 1536), (1536, 1536)] + 84 * [(8960, 1536)]
    needed = 0
    for shape in [shape for shape in shapes for _ in range(2)]:
        assert place.full(shape, 0.0, torch.float32).shape == shape
        needed += 4 * shape[0] * shape[1]
    assert needed < place.num_bytes < 1.05 * needed


def test_a_host_that_gives_no_more_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **settings: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nand a long tale")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RunFailed, match="Out of host memory for the optimizer state") as caught:
        HostPlace(CPU).full([1000], 0.0, torch.float32)
    assert caught.value.why == "CUDA error: out of memory"
    assert "offload: none" in caught.value.fix


def test_the_bytes_are_known_before_they_are_taken() -> None:
    for spec in SPECS.values():
        model, optimizer = built(spec, HostPlace(CPU))
        away = sum(load.num_bytes for load in optimizer._loads if load.is_away)
        assert state_bytes(model, spec) == pytest.approx(away, rel=0.01)


# --- streams, on a machine that has none: who waits for whom ---


class Stream:
    """A CUDA stream with a vector clock: records what has completed before each operation queued on it."""

    every: ClassVar[list[Stream]] = []

    def __init__(self, device: object = None) -> None:
        self.clock: dict[int, int] = {id(self): 0}
        Stream.every.append(self)

    def tick(self) -> dict[int, int]:
        self.clock[id(self)] += 1
        return dict(self.clock)

    def wait_event(self, event: dict[int, int]) -> None:
        for stream, time in event.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> dict[int, int]:
        return dict(self.clock)


def is_before(one: dict[int, int], other: dict[int, int]) -> bool:
    return all(other.get(stream, 0) >= time for stream, time in one.items())


class Watched:
    """Every use of a piece of memory, by the stream that uses it. Two uses of which one writes must be in order."""

    def __init__(self) -> None:
        self.uses: dict[int, list[tuple[dict[int, int], bool]]] = {}
        self.num_alive = self.most_alive = 0

    def use(self, where: int, stream: Stream, *, writes: bool) -> None:
        now, before = stream.tick(), self.uses.setdefault(where, [])
        for then, wrote in before:
            if writes or wrote:
                assert is_before(then, now), "two uses of the same memory are not in order"
        before.append((now, writes))

    def made(self, tensor: Tensor) -> None:
        self.num_alive += 1
        self.most_alive = max(self.most_alive, self.num_alive)
        weakref.finalize(tensor, self.gone)

    def gone(self) -> None:
        self.num_alive -= 1


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A place whose card is the processor, with streams that are watched. Memory that is freed is handed out again at
    once, as torch does on one stream: so one address represents all memory of the card that was ever freed."""
    computing, watched = Stream(), Watched()
    current = [computing]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    place = HostPlace(CPU)
    place._lanes = offload._Lanes(CPU)
    monkeypatch.setattr(place, "_make_slab", lambda size: torch.empty(size, dtype=torch.uint8))
    slots: dict[int, int] = {}  # id of a tensor of the card -> its address
    free: list[int] = []
    empty, copy = torch.empty, Tensor.copy_

    def make(*args: Any, **settings: Any) -> Tensor:
        tensor = empty(*args, **settings)
        if settings.get("device") == CPU:
            key = id(tensor)
            slots[key] = free.pop() if free else len(slots) + 1
            weakref.finalize(tensor, lambda: free.append(slots.pop(key)))
            watched.made(tensor)
        return tensor

    def moved(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            for tensor, writes in ((source, False), (self, True)):
                watched.use(slots.get(id(tensor), -id(tensor)), current[-1], writes=writes)
        return copy(self, source)

    monkeypatch.setattr(torch, "empty", make)
    monkeypatch.setattr(Tensor, "copy_", moved)

    def step(states: list[Tensor], now: Now) -> None:
        for state in states:
            watched.use(slots.get(id(state), -id(state)), current[-1], writes=True)
            state += 1

    yield SimpleNamespace(place=place, watched=watched, step=step, computing=computing)
    Stream.every.clear()


def loads_of(card: SimpleNamespace, sizes: list[int]) -> list[Load]:
    away = [Load([card.place.full([size], 0.0, torch.float32)], card.step, True) for size in sizes]
    return [*away, Load([torch.zeros(4)], card.step)]


def take(card: SimpleNamespace, loads: list[Load]) -> None:
    for load, states in card.place.pass_over(loads):
        load.step(states, Now(1.0, torch.ones(()), torch.ones(())))


@pytest.mark.acceptance(96)
@pytest.mark.slow
def test_no_two_streams_use_memory_at_once_and_three_loads_are_there_at_most(card: SimpleNamespace) -> None:
    loads = loads_of(card, [5, 9, 3, 9, 7, 1])
    for _ in range(3):
        take(card, loads)
        gc.collect()
        assert card.watched.num_alive == 0
    assert card.watched.most_alive == 3
    assert [int(load.states[0].sum()) for load in loads] == [3 * 5, 3 * 9, 3 * 3, 3 * 9, 3 * 7, 3 * 1, 3 * 4]
    # What is computed next comes after every copy: the next forward may have the memory of the last load.
    assert all(is_before(stream.clock, card.computing.clock) for stream in Stream.every)


@pytest.mark.parametrize("left_out", ["inward", "outward", "arrival", "departure", "join"])
def test_the_watch_sees_a_wait_that_is_left_out(
    card: SimpleNamespace, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes, wait = card.place._lanes, offload._Visit.wait

    def one_wait(self: Any) -> None:
        is_departure = hasattr(self, "has_waited")
        self.has_waited = True
        if is_departure != (left_out == "departure"):
            wait(self)

    if left_out in ("inward", "outward"):
        monkeypatch.setattr(getattr(lanes, left_out), "wait_stream", lambda other: None)
    elif left_out == "join":
        monkeypatch.setattr(offload._Lanes, "join", lambda self: None)
    else:
        monkeypatch.setattr(offload._Visit, "wait", one_wait)

    def twice() -> None:
        loads = loads_of(card, [5, 9, 3, 9])
        take(card, loads)
        gc.collect()
        take(card, loads)
        assert all(is_before(stream.clock, card.computing.clock) for stream in Stream.every)

    with pytest.raises(AssertionError):
        twice()


def test_a_step_that_fails_leaves_nothing_on_its_way(card: SimpleNamespace) -> None:
    def fail(states: list[Tensor], now: Now) -> None:
        raise torch.OutOfMemoryError("no room")

    loads = loads_of(card, [5, 9, 3])
    loads[0] = dataclasses.replace(loads[0], step=fail)
    with pytest.raises(torch.OutOfMemoryError):
        take(card, loads)
    gc.collect()
    assert all(is_before(stream.clock, card.computing.clock) for stream in Stream.every)


# --- the trainer ---


@pytest.mark.acceptance(96)
def test_on_a_processor_it_is_refused(tmp_path: Path, data_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"phases\.0\.offload needs a CUDA GPU, but the device is cpu"):
        go(tmp_path, make_run(data_dir, num_steps=2, offload="optimizer"))


@pytest.mark.acceptance(96)
@pytest.mark.slow
def test_a_run_resumes_bit_equal_with_its_optimizer_state_in_the_other_place(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_phase, "OFFLOADS_FROM", ("cpu", "cuda"))
    monkeypatch.setattr(adamw, "AT_A_TIME", 2048)
    near, far = (make_run(data_dir, num_steps=8, save_every=4, offload=kind) for kind in ("none", "optimizer"))
    go(tmp_path / "near", near)
    _, said = go(tmp_path / "far", far)
    assert any("is in host memory and is streamed through the GPU" in line for line in said)
    assert len(events(tmp_path / "far", "state_offloaded")) == 1
    assert figures(tmp_path / "far") == figures(tmp_path / "near")
    for begun, other in (("near", far), ("far", near)):
        folder = tmp_path / f"from-{begun}"
        shutil.copytree(tmp_path / begun, folder)
        shutil.rmtree(folder / "checkpoints/pretrain" / file_names.step_dir(8))
        go(folder, other)
        assert figures(folder) == figures(tmp_path / "near")
        assert same(weights(folder, 8), weights(tmp_path / "near", 8))
        optimizers = [(path / "checkpoints/pretrain" / file_names.step_dir(8) / file_names.OPTIMIZER).read_bytes()
                      for path in (folder, tmp_path / "near")]  # fmt: skip
        assert optimizers[0] == optimizers[1]


@pytest.mark.acceptance(96)
@pytest.mark.slow
def test_a_host_that_is_too_small_is_refused_before_anything_is_taken(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_phase, "OFFLOADS_FROM", ("cpu",))
    run = make_run(data_dir, num_steps=2, offload="optimizer")
    needed = state_bytes(Decoder(run.model), run.phases[0].optimizer)
    monkeypatch.setattr(build_phase, "free_host_bytes", lambda: int(needed / 0.9) - 10)
    with pytest.raises(FatalError, match="does not fit in host memory") as caught:
        go(tmp_path, run)
    assert "offload: none" in caught.value.fix
    for free in (int(needed / 0.9) + 10, None):
        monkeypatch.setattr(build_phase, "free_host_bytes", lambda free=free: free)
        go(tmp_path / str(free), run)


@pytest.mark.acceptance(99)
def test_out_of_memory_names_the_levers_that_are_left(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*args: Any, **settings: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    run = make_run(data_dir, num_steps=2)
    monkeypatch.setattr(Optimizer, "step", no_room)
    with pytest.raises(FatalError, match="Out of memory in the optimizer step") as caught:
        go(tmp_path / "step", run)
    assert caught.value.fix.startswith("Set offload: optimizer in the phase,")
    monkeypatch.setattr(build_phase, "build_optimizer", no_room)
    with pytest.raises(FatalError, match="does not fit on the GPU next to the weights") as caught:
        go(tmp_path / "state", run)
    assert caught.value.fix.startswith("Set recompute: all or offload: optimizer in the phase,")
