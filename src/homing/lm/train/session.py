"""What all phases of a run share: device, data, tokenizer, journal and wishes, opened once."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import homing
from homing.lm.device import describe_device
from homing.lm.phases import check_phases
from homing.lm.tokenizer import Tokenizer
from homing.lm.train.choices import set_up_device
from homing.lm.train.compile_cache import keep_folders
from homing.lm.train.control import Wishes
from homing.lm.train.landing import Rates
from homing.lm.train.metrics import Journal
from homing.lm.train.passes import check_graphs
from homing.lm.train.ranks import ALONE, Ranks
from homing.lm.train.run_dir import check_data, read_papers
from homing.wire.run import Run

__all__ = ["Session", "open_session", "quiet_gc"]


@dataclass(frozen=True)
class Session:
    run: Run
    run_dir: Path
    data_dir: Path
    tokenizer: Tokenizer
    papers: dict[str, bytes]
    device: torch.device
    journal: Journal
    wishes: Wishes
    ranks: Ranks
    rates: Rates  # as far as phases measured them


def open_session(run: Run, run_dir: Path, journal: Journal, wishes: Wishes, ranks: Ranks = ALONE) -> Session:
    check_phases(run.phases)
    device = set_up_device(run.train, ranks)
    check_graphs(run.train.graphs, device)
    where = f"{describe_device(device)}, torch {torch.__version__}, CPU threads: {torch.get_num_threads()}"
    where += f", {ranks.count} ranks" if ranks.count > 1 else ""
    may_compile = device.type == "cuda" or run.train.compile == "on"  # else no folder is made for it
    if may_compile and (problem := keep_folders(os.environ)):
        journal.aloud("compile_cache_left", problem)
    journal.aloud("run_started", f"homing {homing.__version__} trains {run.name} on {where}.", device=str(device))
    data_dir, tokenizer = check_data(run, run_dir)
    papers = read_papers(run, run_dir, data_dir, tokenizer)
    return Session(run, run_dir, data_dir, tokenizer, papers, device, journal, wishes, ranks, Rates.usual_on(device))


@contextlib.contextmanager
def quiet_gc() -> Iterator[Callable[[], None]]:
    """After the first step nothing more is made that lives long: the collector's pauses would find nothing."""
    was_on = gc.isenabled()

    def settle() -> None:
        gc.collect()
        gc.freeze()
        gc.disable()

    try:
        yield settle
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
