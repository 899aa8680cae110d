"""What a phase trains with: its data opened, the model with the weights it starts from, and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from homing.lm.model import Decoder
from homing.lm.phases import PhaseWork, open_phase
from homing.lm.train import checkpoint
from homing.lm.train.optim import Optimizer, build_optimizer
from homing.lm.train.run_dir import check_count
from homing.lm.train.session import Session
from homing.wire.run import Phase

__all__ = ["Built", "build"]


@dataclass(frozen=True)
class Built:
    work: PhaseWork
    model: Decoder
    optimizer: Optimizer
    start: Path | None  # the checkpoint whose weights it starts from; None: fresh ones

    @property
    def checkpoint_bytes(self) -> int:
        """About: the weights, and two moments each, as AdamW has them."""
        return 3 * sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())


def build(session: Session, phase: Phase, previous: Path | None) -> Built:
    """`previous`: the final checkpoint of the phase before."""
    run = session.run
    work = open_phase(run, phase, session.data_dir)
    model = Decoder(run.model)
    check_count(run, model)
    model.init_weights(run.seed)
    torch.manual_seed(run.seed)
    start = Path(phase.init_from) if phase.init_from else previous
    if start:
        model.load_weights(checkpoint.load_weights(start))
    model.to(session.device)
    return Built(work, model, build_optimizer(model, phase.optimizer), start)
