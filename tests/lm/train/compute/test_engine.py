"""What a phase does with the memory of a card, shown without one."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import make_data, make_run, make_run_dir

from homing.errors import RunFailed
from homing.lm.cuda_graphs import Graphs
from homing.lm.evals import likelihood
from homing.lm.train.compute import engine as engine_module
from homing.lm.train.compute.engine import Engine
from homing.lm.train.compute.hardware_choices import Choices
from homing.lm.train.distributed.ranks import ALONE
from homing.wire.run_json import Run

CARD = torch.device("cuda")
ON_A_CARD = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def nothing(*_: Any, **__: Any) -> None:
    pass


def bare_engine(run: Run) -> Engine:
    """Of a phase on a card, with what `settle` and `_shrink` ask for."""
    engine = object.__new__(Engine)
    phase = dataclasses.replace(run.phases[0], micro_batch=0)
    engine.s = SimpleNamespace(run=run, device=CARD, ranks=ALONE)  # type: ignore[assignment]
    engine.phase, engine.notify, engine.num_rows, engine.micro_batch = phase, nothing, 8, 8
    engine.model = SimpleNamespace(set_precision=nothing, set_recompute=nothing, has_flex=False)  # type: ignore[assignment]
    engine.compiling = SimpleNamespace(switch=nothing)  # type: ignore[assignment]
    engine.passes = SimpleNamespace(settle=nothing)  # type: ignore[assignment]
    return engine


@pytest.mark.regression("peak-memory")
def test_each_phase_has_a_peak_of_its_own(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    picked = Choices("cuda (NVIDIA H200)", "bf16", False, "flash", "mask", 8)
    monkeypatch.setattr(engine_module, "pick_choices", lambda *_: (picked, []))
    monkeypatch.setattr(engine_module, "pick_attention", lambda *_: (picked, []))
    monkeypatch.setattr(engine_module, "use_attention", nothing)
    reset: list[object] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    bare_engine(tiny_run).settle({})
    assert reset == [CARD]


class Cycle:
    """Garbage that only the collector finds; in a run it holds tensors."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """With the collector off, as while training: whether garbage was still there at each empty_cache."""
    seen: list[bool] = []
    gc.collect()
    gc.disable()
    held = weakref.ref(Cycle())
    assert held() is not None
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(held() is not None))
    yield seen
    gc.enable()


def shrinking(run: Run) -> None:
    bare_engine(run)._shrink("out of memory")


def forgetting(run: Run) -> None:
    Graphs(CARD).forget()


def scoring(run: Run) -> None:
    rows = [SimpleNamespace(ids=[1, 2])] * 2
    with pytest.raises(RunFailed):
        likelihood._score(rows, None, False)  # type: ignore[arg-type]


@pytest.mark.regression("empty-cache")
@pytest.mark.parametrize("do", [shrinking, forgetting, scoring], ids=lambda do: do.__name__)
def test_garbage_is_collected_before_memory_is_given_back(
    do: Callable[[Run], None], tiny_run: Run, left: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate too much")

    monkeypatch.setattr(likelihood, "_compute", full)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 0)
    do(tiny_run)
    assert left
    assert not any(left)


# -- on a card ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_runs", [pytest.param(2, marks=ON_A_CARD)])
def test_deterministic_runs_begun_twice_are_bit_for_bit_the_same(num_runs: int, tmp_path: Path) -> None:
    """In processes of their own, as two launches are; the second while another program holds some of the card."""
    import json
    import os
    import subprocess
    import sys

    make_data(tmp_path / "data")
    found, held = [], []
    for number in range(num_runs):
        train = {"device": "cuda", "is_deterministic": True, "num_ranks": 1}
        run = make_run(tmp_path / "data", num_steps=6, micro_batch=0, save_every=0, eval_every=0, train=train)
        run_dir = make_run_dir(tmp_path / f"run-{number}", run)
        command = [sys.executable, "-m", "homing.lm.train", str(run_dir)]
        done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        found.append([(json.loads(line)["loss"], json.loads(line)["grad_norm"]) for line in lines])
        held.append(torch.empty(8 << 30, dtype=torch.uint8, device="cuda"))
    assert found[0] == found[1]
    assert len(found[0]) == 6


@pytest.mark.parametrize("size", [pytest.param(1 << 28, marks=ON_A_CARD)])
def test_memory_in_cycles_is_given_back_on_a_card(size: int) -> None:
    """With the collector off; without collecting first, the tensor would stay."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    gc.disable()
    try:
        cycle = Cycle()
        cycle.tensor = torch.empty(size, dtype=torch.uint8, device="cuda")  # type: ignore[attr-defined]
        del cycle
        assert torch.cuda.memory_reserved() >= before + size
        Graphs(CARD).forget()
        assert torch.cuda.memory_reserved() <= before
    finally:
        gc.enable()
