"""A model that the ranks divide among them learns what one process would, and moves between numbers of ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_data, make_run, make_run_dir

from homing.errors import UsageError
from homing.lm.data.chat.chat_settings import ChatOrder, ChatSource
from homing.lm.data.chat.prepare import prepare_chat
from homing.lm.model.model_shape import count_params
from homing.lm.model.open_weights.load_and_save import save_tensors
from homing.lm.model.row_shards import Part
from homing.lm.tokenizer.tokenizer import CHAT_TEMPLATE
from homing.lm.train.checkpoints.shared_files import SharedFile, leave_marker, wait_for_markers
from homing.lm.train.distributed.ranks import Ranks
from homing.lm.train.distributed.shard_model import held_bytes, pick_parallel
from homing.lm.train.optim.muon_shards import assign
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

    def run(self, cell: Cell, save_every: int = 0) -> Run:
        data = {"data": self.chat, "batch_tokens": 8 * CHAT_CONTEXT} if cell.kind == "sft" else {}
        run = make_run(
            self.folder / "data", train={"parallel": cell.parallel, "num_ranks": cell.num_ranks},
            kind="sft" if cell.kind == "sft" else "pretrain", num_steps=self.num_steps, micro_batch=1,
            save_every=save_every, eval_every=5, optimizer=OPTIMIZERS[cell.optimizer], **data,
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

    def train(self, num_ranks: int, run_dirs: Sequence[Path | str]) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        fixed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                 "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}  # fmt: skip
        command = [sys.executable, str(Path(__file__).with_name("train_cells.py")), str(self.folder)]
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

    def losses(self, folder: Path) -> list[float]:
        return [json.loads(line)["loss"] for line in (folder / file_names.METRICS).read_text().splitlines()]

    def difference(self, cell: Cell) -> float:
        pairs = zip(*(self.losses(self.folder / each.name) for each in (cell, cell.alone)), strict=True)
        return max(abs(mine - other) / other for mine, other in pairs)

    def held(self, cell: Cell, rank: int) -> dict[str, int]:
        found: dict[str, int] = json.loads((self.folder / cell.name / f"bytes-{rank}.json").read_text())
        return found


def hashes(folder: Path) -> dict[str, str]:
    names = (file_names.WEIGHTS, file_names.OPTIMIZER)
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def last(run_dir: Path) -> Path:
    return max((run_dir / file_names.CHECKPOINTS / "pretrain").glob("step-*"))


# -- what needs no process ---------------------------------------------------------------------------------------------


def test_auto_divides_the_model_only_as_far_as_memory_demands(tiny_run: Run) -> None:
    phase, num = tiny_run.phases[0], 10**9
    needed = {kind: held_bytes(kind, phase, num, 8, "bf16") for kind in ("ddp", "zero2", "zero3")}
    assert needed["ddp"] > needed["zero2"] > needed["zero3"]
    for kind, size in needed.items():
        picked, reason = pick_parallel("auto", phase, num, Ranks(0, 8, 0, 8), int(size * 1.4), "bf16")
        assert picked == kind
        assert f"train.parallel: {kind}, which is the first that fits in" in reason
    picked, reason = pick_parallel("auto", phase, num, Ranks(0, 8, 0, 8), 2**30, "bf16")
    assert (picked, "needs the least" in reason) == ("zero3", True)
    assert pick_parallel("auto", phase, num, Ranks(0, 8, 0, 8), None, "bf16") == ("ddp", "")  # without a GPU
    adapters = dataclasses.replace(phase, method="lora")
    assert pick_parallel("auto", adapters, num, Ranks(0, 8, 0, 8), 2**30, "bf16") == ("ddp", "")


def test_a_single_rank_says_that_it_divides_nothing(tiny_run: Run) -> None:
    picked, reason = pick_parallel("zero3", tiny_run.phases[0], 10**9, Ranks(), None, "bf16")
    assert (picked, reason) == ("ddp", "train.parallel: zero3 has no effect with one rank.")


def test_hsdp_needs_two_groups_of_two(tiny_run: Run) -> None:
    with pytest.raises(UsageError, match="at least 4, but there are 2") as caught:
        pick_parallel("hsdp", tiny_run.phases[0], 10**9, Ranks(0, 2, 0, 2), None, "fp32")
    assert "zero3" in caught.value.fix


def test_the_owners_of_matrices_are_about_equally_busy() -> None:
    llama = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *3 * [(14336, 4096)]] * 32
    owners = assign(llama, 8)
    busy = [sum(r * c * min(r, c) for (r, c), owner in zip(llama, owners, strict=True) if owner == rank)
            for rank in range(8)]  # fmt: skip
    assert max(busy) < 1.05 * min(busy)
    assert owners == assign(llama, 8)


def test_ranks_write_the_same_file_as_one_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = {"b": torch.randn(7, 3), "a": torch.randn(2), "count": torch.tensor(5), "c": torch.randn(1, 4)}
    save_tensors(whole, tmp_path / "alone", metadata={"format": "pt"})

    def part(tensor: torch.Tensor, rank: int) -> Part:
        if not tensor.dim():
            return Part((), 0, tensor, rank == 0)
        each = -(-len(tensor) // 3)
        return Part(tuple(tensor.shape), min(len(tensor), rank * each), tensor[rank * each : (rank + 1) * each])

    parts = [{name: part(tensor, rank) for name, tensor in whole.items()} for rank in range(3)]
    files = [SharedFile.of("shared", mine, {"format": "pt"}) for mine in parts]
    assert files[0] == files[1] == files[2]
    files[0].create(tmp_path)
    for rank in (2, 0, 1):
        files[rank].write(tmp_path, parts[rank], {name: each.tensor for name, each in parts[rank].items()})
    assert (tmp_path / "shared").read_bytes() == (tmp_path / "alone").read_bytes()


def test_a_rank_that_cannot_write_its_part_fails_the_checkpoint(tmp_path: Path) -> None:
    leave_marker(tmp_path, 1)
    leave_marker(tmp_path, 2, "No space left on device")
    with pytest.raises(OSError, match="Rank 2: No space left on device"):
        wait_for_markers(tmp_path, 3)


# -- with processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Group:
    """Eight cells and what they are compared with, and a run that goes through 4, 1 and 2 ranks."""
    group = Group(tmp_path_factory.mktemp("group"), num_steps=10)
    moved = group.made(Cell("pretrain", "muon", "zero3", 4), save_every=5)
    swift = Cell("swift", "muon", "zero3", 2)
    group.train(4, [*map(group.made, EIGHT[4:]), moved])
    shutil.copytree(moved, group.folder / "finished")
    shutil.rmtree(last(moved))  # continue from the checkpoint in the middle
    before = hashes(last(moved))
    make_run_dir(moved, group.run(Cell("pretrain", "muon", "ddp", 1), save_every=5))
    alone = sorted({cell.alone for cell in [*EIGHT, swift]}, key=lambda cell: cell.name)
    group.train(1, [*map(group.made, alone), f"resave:{moved}"])
    (group.folder / "after-1.json").write_text(json.dumps([before, hashes(last(moved))]))
    make_run_dir(moved, group.run(Cell("pretrain", "muon", "zero2", 2), save_every=5))
    shutil.copytree(moved, group.folder / "continued")
    group.train(2, [*map(group.made, [*EIGHT[:4], swift]), f"resave:{moved}", group.folder / "continued"])
    return group


@pytest.mark.slow
@pytest.mark.parametrize("cell", [*EIGHT, Cell("swift", "muon", "zero3", 2)], ids=lambda cell: cell.name)
def test_ranks_that_divide_the_model_learn_what_one_process_learns(group: Group, cell: Cell) -> None:
    assert len(group.losses(group.folder / cell.name)) == group.num_steps
    assert group.difference(cell) <= MOST_DIFFERENCE


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "share"), [(EIGHT[0], 2), (EIGHT[5], 4), (EIGHT[4], 2)])
def test_each_rank_holds_its_share_of_weights_gradients_and_state(group: Group, cell: Cell, share: int) -> None:
    whole = group.held(cell.alone, 0)
    for rank in range(cell.num_ranks):
        held = group.held(cell, rank)
        for kind in ("weights", "gradients", "state"):
            # Small tensors are not divisible, and padding rows may all be on one rank.
            assert held[kind] <= 1.2 * whole[kind] / share + 4096


@pytest.mark.slow
def test_a_checkpoint_moves_between_4_1_and_2_ranks_bit_by_bit(group: Group) -> None:
    before, after = json.loads((group.folder / "after-1.json").read_text())
    moved = group.folder / "pretrain-muon-zero3-4"
    assert before == after == hashes(last(moved))
    assert any(name.endswith(".squares") for name in load_file(last(moved) / file_names.OPTIMIZER))


@pytest.mark.slow
def test_a_run_continues_on_fewer_ranks_with_the_same_losses(group: Group) -> None:
    finished, continued = (group.losses(group.folder / name) for name in ("finished", "continued"))
    assert len(continued) == len(finished) == group.num_steps
    assert continued == pytest.approx(finished, rel=MOST_DIFFERENCE)


@pytest.mark.prove
def test_every_way_to_divide_the_model_learns_the_same_over_50_steps(tmp_path: Path) -> None:
    group = Group(tmp_path, num_steps=50)
    for num_ranks in (1, 2, 4):
        cells = {cell.alone for cell in EVERY} if num_ranks == 1 else [c for c in EVERY if c.num_ranks == num_ranks]
        group.train(num_ranks, [group.made(cell) for cell in cells])
    far = {cell.name: group.difference(cell) for cell in EVERY if group.difference(cell) > MOST_DIFFERENCE}
    assert far == {}
