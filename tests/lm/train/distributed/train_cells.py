"""Trains several run directories, one after another, in one group of ranks: `train_cells.py GROUP_DIR RUN_DIR...`.

Started once per rank, with the environment that torchrun sets. Loading torch takes longer than training a tiny model,
so tests that compare many settings share the processes. `resave:RUN_DIR` loads the newest checkpoint and saves it again
without training.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from homing.lm.model.row_shards import local
from homing.lm.train import build_phase, loop
from homing.lm.train.compute.engine import Engine
from homing.lm.train.distributed.ranks import joined_ranks


def main() -> None:
    group_dir, *cells = sys.argv[1:]
    take_steps, update = loop._Phase._take_steps, Engine.update

    def save_at_once(phase: loop._Phase) -> None:
        phase._save(is_needed=True)

    def count_gradients(engine: Engine, *given: Any, **named: Any) -> None:
        grads = [p.grad for p in engine.model.parameters() if p.grad is not None]
        note(engine.s.run_dir, ranks.rank, gradients=sum(local(grad).nbytes for grad in grads))
        update(engine, *given, **named)

    Engine.update = count_gradients  # type: ignore[method-assign]
    loop.build = counted  # type: ignore[assignment]
    with joined_ranks(is_cuda=False, run_dir=Path(group_dir)) as ranks:
        loop.joined_ranks = lambda **_: contextlib.nullcontext(ranks)  # type: ignore[assignment]
        for cell in cells:
            is_resaved = cell.startswith("resave:")
            loop._Phase._take_steps = save_at_once if is_resaved else take_steps  # type: ignore[method-assign]
            loop.train(Path(cell.removeprefix("resave:")), say=print)
            ranks.agree(None)  # the first rank may still be hashing a checkpoint that the next cell reads


def counted(session: loop.Session, *given: Any) -> build_phase.Built:
    built = build_phase.build(session, *given)
    weights = sum(part.tensor.nbytes for part in built.model.weight_parts().values())
    state = sum(part.tensor.nbytes for part in built.optimizer.state_parts().values())
    note(session.run_dir, session.ranks.rank, weights=weights, state=state)
    return built


def note(run_dir: Path, rank: int, **num_bytes: int) -> None:
    """Record how many bytes this rank holds."""
    path = run_dir / f"bytes-{rank}.json"
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | num_bytes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
