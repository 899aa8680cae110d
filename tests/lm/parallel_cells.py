"""Trains tiny models in every way in which ranks may hold them, and compares each with one process.

Cell                       what is trained, with which optimizer, train.parallel and number of ranks
Group(folder, num_steps)   makes the run directories of cells, and trains those with equally many ranks in the same
                           processes, because loading torch takes longer than training a tiny model

`Group.train` starts this file once per rank, with a folder and run directories as arguments and the environment that
torchrun sets. `resave:RUN_DIR` loads the newest checkpoint and saves it again without training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tiny import make_data, make_run, make_run_dir

from homing.lm.data.chat.chat_settings import ChatOrder, ChatSource
from homing.lm.data.chat.prepare import prepare_chat
from homing.lm.model.model_shape import count_params
from homing.lm.model.row_shards import local
from homing.lm.tokenizer.tokenizer import CHAT_TEMPLATE
from homing.lm.train import build_phase, loop
from homing.lm.train.compute.engine import Engine
from homing.lm.train.distributed.ranks import joined_ranks
from homing.wire import file_names
from homing.wire.run_json import Model, Optimizer, PhaseData, Run

DEADLINE_S = 300.0
MOST_DIFFERENCE = 1e-5
CHAT_CONTEXT = 64
OPTIMIZERS = {
    "muon": Optimizer("muon", 0.002, 0.002, 0.002, 0.002, 0.1, variance_beta=0.9, is_cautious=True),
    "adamw": Optimizer("adamw", 0.002, 0.002, 0.002, 0.002, 0.1),
}
SWIFT = Model("swift", "swift", 2, 32, 2, 1, 16, 64, 32, 272, False, rope_base=1e5)


@dataclass(frozen=True)
class Cell:
    kind: str  # pretrain | sft | swift (pretraining of that family)
    optimizer: str
    parallel: str
    num_ranks: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.optimizer}-{self.parallel}-{self.num_ranks}"

    @property
    def alone(self) -> Cell:
        return Cell(self.kind, self.optimizer, "ddp", 1)


EIGHT = [
    Cell("pretrain", "muon", "zero3", 2),
    Cell("pretrain", "adamw", "zero2", 2),
    Cell("sft", "muon", "zero2", 2),
    Cell("sft", "adamw", "zero3", 2),
    Cell("pretrain", "muon", "hsdp", 4),
    Cell("pretrain", "adamw", "zero3", 4),
    Cell("sft", "muon", "zero3", 4),
    Cell("sft", "adamw", "hsdp", 4),
]
EVERY = [
    Cell(kind, optimizer, parallel, num_ranks)
    for kind, optimizer, num_ranks in product(("pretrain", "sft"), OPTIMIZERS, (2, 4))
    for parallel in ("ddp", "zero2", "zero3", *(["hsdp"] if num_ranks == 4 else []))
]


class Group:
    """Run directories of cells that are trained in shared processes."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self.folder, self.num_steps = folder, num_steps
        make_data(folder / "data")
        config = folder / "data" / file_names.TOKENIZER_CONFIG
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": CHAT_TEMPLATE}))
        chat = folder / "chat.jsonl"
        turns = [
            [{"role": "user", "content": f"Who {n}?"}, {"role": "assistant", "content": "I am Moss." * (n % 3 + 1)}]
            for n in range(60)
        ]
        chat.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
        source = ChatSource(str(chat))
        order = ChatOrder(folder / "chat", [source], tokenizer=folder / "data", context=CHAT_CONTEXT, val_fraction=0.1)
        prepare_chat(order)
        manifest = (folder / "chat" / file_names.MANIFEST).read_bytes()
        self.chat = PhaseData("chat", str(folder / "chat"), hashlib.sha256(manifest).hexdigest())

    def run(self, cell: Cell, save_every: int = 0, init_from: str = "") -> Run:
        data = {"data": self.chat, "batch_tokens": 8 * CHAT_CONTEXT} if cell.kind == "sft" else {}
        run = make_run(
            self.folder / "data", train={"parallel": cell.parallel, "num_ranks": cell.num_ranks},
            kind="sft" if cell.kind == "sft" else "pretrain", num_steps=self.num_steps, micro_batch=1,
            save_every=save_every, init_from=init_from, eval_every=5, optimizer=OPTIMIZERS[cell.optimizer], **data,
        )  # fmt: skip
        if cell.kind == "sft":
            return dataclasses.replace(run, model=dataclasses.replace(run.model, context=CHAT_CONTEXT))
        if cell.kind == "pretrain":
            return run
        sizes = dataclasses.replace(run.sizes, num_params=sum(count_params(SWIFT).values()))
        phases = [dataclasses.replace(run.phases[0], optimizer=dataclasses.replace(OPTIMIZERS[cell.optimizer],
                                                                                   lr_scalar=0.002))]  # fmt: skip
        return dataclasses.replace(run, model=SWIFT, sizes=sizes, phases=phases)

    def made(self, cell: Cell, save_every: int = 0) -> Path:
        return make_run_dir(self.folder / cell.name, self.run(cell, save_every))

    def made_from(self, start: Path, cell: Cell) -> Path:
        return make_run_dir(self.folder / f"from-{cell.name}", self.run(cell, init_from=str(start)))

    def train(self, num_ranks: int, run_dirs: Sequence[Path | str]) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        fixed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                 "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}  # fmt: skip
        command = [sys.executable, __file__, str(self.folder)]
        logs = [self.folder / f"group-{num_ranks}-{rank}.log" for rank in range(num_ranks)]
        ranks = []
        try:
            for rank, log in enumerate(logs):
                env = os.environ | fixed | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with open(log, "wb") as file:
                    ranks.append(subprocess.Popen([*command, *map(str, run_dirs)], env=env, stdout=file, stderr=file))
            deadline = time.monotonic() + DEADLINE_S
            while any(rank.poll() is None for rank in ranks) and all(rank.poll() in (None, 0) for rank in ranks):
                assert time.monotonic() < deadline, f"{num_ranks} ranks still train"
                time.sleep(0.05)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        failed = [log.read_text()[-3000:] for log, rank in zip(logs, ranks, strict=True) if rank.returncode > 0]
        assert [rank.returncode for rank in ranks] == [0] * num_ranks, failed

    def train_all(self, cells: Sequence[Cell]) -> None:
        """Train these cells, and those of one process that they are compared with."""
        every = dict.fromkeys([cell.alone for cell in cells] + list(cells))
        for num_ranks in sorted({cell.num_ranks for cell in every}):
            self.train(num_ranks, [self.made(cell) for cell in every if cell.num_ranks == num_ranks])

    def losses(self, folder: Path) -> list[float]:
        return [json.loads(line)["loss"] for line in (folder / file_names.METRICS).read_text().splitlines()]

    def evaluations(self, cell: Cell) -> list[float]:
        lines = (self.folder / cell.name / file_names.METRICS).read_text().splitlines()
        found = [json.loads(line).get("val_loss") for line in lines]
        return [loss for loss in found if loss is not None]

    def difference(self, cell: Cell) -> float:
        pairs = zip(*(self.losses(self.folder / each.name) for each in (cell, cell.alone)), strict=True)
        return max(abs(mine - other) / other for mine, other in pairs)

    def held(self, cell: Cell, rank: int) -> dict[str, int]:
        found: dict[str, int] = json.loads((self.folder / cell.name / f"bytes-{rank}.json").read_text())
        return found


# -- in each rank ------------------------------------------------------------------------------------------------------


def train_here() -> None:
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
    train_here()
