"""A model that the ranks divide among them learns what one process would, and moves between numbers of ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from parallel_cells import EIGHT, MOST_DIFFERENCE, Cell, Group
from safetensors.torch import load_file
from tiny import make_run_dir

from homing.errors import UsageError
from homing.lm.model.open_weights.load_and_save import save_tensors
from homing.lm.model.row_shards import Part
from homing.lm.train.checkpoints.shared_files import SharedFile, leave_marker, wait_for_markers
from homing.lm.train.distributed.ranks import Ranks
from homing.lm.train.distributed.shard_model import held_bytes, pick_parallel
from homing.lm.train.optim.muon_shards import assign
from homing.wire import file_names
from homing.wire.run_json import Run


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


@pytest.mark.parametrize("can_reserve", [True, False])
def test_ranks_write_the_same_file_as_one_process(
    can_reserve: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_reserve:
        monkeypatch.delattr("os.posix_fallocate")
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
    trained, warm = last(group.folder / "finished"), Cell("pretrain", "adamw", "zero3", 2)
    group.train(1, [*map(group.made, alone), f"resave:{moved}", group.made_from(trained, warm.alone)])
    (group.folder / "after-1.json").write_text(json.dumps([before, hashes(last(moved))]))
    make_run_dir(moved, group.run(Cell("pretrain", "muon", "zero2", 2), save_every=5))
    shutil.copytree(moved, group.folder / "continued")
    group.train(2, [*map(group.made, [*EIGHT[:4], swift]), f"resave:{moved}", group.folder / "continued",
                    group.made_from(trained, warm)])  # fmt: skip
    return group


@pytest.mark.slow
@pytest.mark.parametrize("cell", [*EIGHT, Cell("swift", "muon", "zero3", 2)], ids=lambda cell: cell.name)
def test_ranks_that_divide_the_model_learn_what_one_process_learns(group: Group, cell: Cell) -> None:
    assert len(group.losses(group.folder / cell.name)) == group.num_steps
    assert group.difference(cell) <= MOST_DIFFERENCE


@pytest.mark.slow
@pytest.mark.parametrize("cell", EIGHT, ids=lambda cell: cell.name)
def test_ranks_that_each_evaluate_a_part_find_the_loss_of_one_process(group: Group, cell: Cell) -> None:
    found = group.evaluations(cell)
    assert len(found) == 2
    assert found == pytest.approx(group.evaluations(cell.alone), rel=MOST_DIFFERENCE)


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
def test_ranks_that_divide_the_model_start_from_the_weights_of_another_run(group: Group) -> None:
    one, two = (group.losses(group.folder / f"from-pretrain-adamw-{name}") for name in ("ddp-1", "zero3-2"))
    assert one == pytest.approx(two, rel=MOST_DIFFERENCE)
    assert one[0] < group.losses(group.folder / "finished")[0] - 0.5


@pytest.mark.slow
def test_a_divided_model_is_sampled_like_a_whole_one(group: Group) -> None:
    texts = [
        (group.folder / cell.name / file_names.SAMPLES / "pretrain-00000010.txt").read_text()
        for cell in (EIGHT[0], EIGHT[4], EIGHT[0].alone)
    ]
    assert texts[0] == texts[1] == texts[2] != ""


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
