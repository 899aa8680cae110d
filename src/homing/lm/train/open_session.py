"""Opens the resources that all phases of a run share: device, data, tokenizer, journal and stop requests."""

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
from homing.lm.train.compute.compile_cache import keep_folders
from homing.lm.train.compute.forward_backward import check_graphs
from homing.lm.train.compute.hardware_choices import set_up_device
from homing.lm.train.distributed.ranks import ALONE, Ranks
from homing.lm.train.landing import Rates
from homing.lm.train.metrics import Journal
from homing.lm.train.read_run_dir import check_data, read_metadata_files
from homing.lm.train.stop_requests import ControlRequests
from homing.wire.run_json import Run

__all__ = ["Session", "open_session", "quiet_gc"]


@dataclass(frozen=True)
class Session:
    run: Run
    run_dir: Path
    data_dir: Path
    tokenizer: Tokenizer
    metadata_files: dict[str, bytes]
    device: torch.device
    journal: Journal
    requests: ControlRequests
    ranks: Ranks
    rates: Rates  # the machine's speeds, which each phase updates with its measurements


def open_session(run: Run, run_dir: Path, journal: Journal, requests: ControlRequests, ranks: Ranks = ALONE) -> Session:
    check_phases(run.phases)
    device = set_up_device(run.train, ranks)
    check_graphs(run.train.graphs, device)
    where = f"{describe_device(device)}, torch {torch.__version__}, CPU threads: {torch.get_num_threads()}"
    where += f", {ranks.count} ranks" if ranks.count > 1 else ""
    may_compile = device.type == "cuda" or run.train.compile == "on"  # without compilation, no cache folder is needed
    if may_compile and (problem := keep_folders(os.environ)):
        journal.notice("compile_cache_left", problem)
    journal.notice("run_started", f"homing {homing.__version__} is training {run.name} on {where}.", device=str(device))
    data_dir, tokenizer = check_data(run, run_dir)
    metadata_files = read_metadata_files(run, run_dir, data_dir, tokenizer)
    return Session(
        run, run_dir, data_dir, tokenizer, metadata_files, device, journal, requests, ranks, Rates.usual_on(device)
    )


@contextlib.contextmanager
def quiet_gc() -> Iterator[Callable[[], None]]:
    """Yield a function that disables the garbage collector; restore it on exit.

    After the first step no more long-lived objects are created, so garbage collection would only cause pauses. Objects
    that the calling program has frozen stay frozen, because `gc.unfreeze` would release them together with ours.
    """
    was_on, is_ours = gc.isenabled(), gc.get_freeze_count() == 0

    def settle() -> None:
        gc.collect()
        if is_ours:
            gc.freeze()
        gc.disable()

    try:
        yield settle
    finally:
        if is_ours:
            gc.unfreeze()
        if was_on:
            gc.enable()
