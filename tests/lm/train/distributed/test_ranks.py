"""Several processes, one model: the same batches and losses as one alone, and one failure ends them all readably."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import make_run, make_run_dir

from homing.errors import UsageError
from homing.lm.data.shards.pack_text import PackedStream
from homing.lm.data.shards.read_shards import open_split, read_manifest
from homing.lm.phases.pretrain import TextRows
from homing.lm.train.distributed.ranks import Ranks
from homing.lm.train.distributed.start_ranks import check_num_ranks, count_cards, pick_num_ranks
from homing.wire import codec, file_names
from homing.wire.event_lines import Outcome
from homing.wire.run_json import Optimizer, Run

DEADLINE_S = 300.0
GENTLE = Optimizer("muon", 0.002, 0.002, 0.002, 0.002, 0.0)


def start(run_dir: Path) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "homing.lm.train", str(run_dir)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train(run_dir: Path) -> tuple[int, str]:
    process = start(run_dir)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    return process.returncode, stderr


def rank_env(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    fixed = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    return os.environ | fixed | {name: str(number) for name, number in numbers.items()}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / file_names.METRICS).read_text().splitlines()]


def outcome(run_dir: Path) -> Outcome:
    return codec.loads(Outcome, (run_dir / file_names.OUTCOME).read_bytes())


def rank_pids(starter: int) -> list[int]:
    """In the order of their numbers, once all are there."""
    messages = Path(f"/proc/{starter}/task/{starter}/children").read_text().split()
    numbered = {}
    for pid in messages:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        numbers = [int(entry.split(b"=")[1]) for entry in environment if entry.startswith(b"RANK=")]
        numbered.update({number: int(pid) for number in numbers})
    return [numbered[number] for number in sorted(numbered)]


def wait_for_steps(run_dir: Path, num: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        path = run_dir / file_names.METRICS
        if path.exists() and len(path.read_text().splitlines()) >= num:
            return
        time.sleep(0.1)
    raise AssertionError(f"no {num} steps in {DEADLINE_S:.0f} s")


# -- what needs no process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num", "count"), [(7, 3), (2, 4), (8, 2), (1, 1)])
def test_shares_are_everything_once_and_in_order(num: int, count: int) -> None:
    things = list(range(num))
    assert [thing for rank in range(count) for thing in things[Ranks(rank, count).share(num)]] == things


@pytest.mark.parametrize(("num", "count"), [(7, 3), (2, 4), (8, 2), (1, 1), (0, 2)])
def test_turns_are_equally_many_and_count_everything_once(num: int, count: int) -> None:
    turns = [list(Ranks(rank, count).turns(num)) for rank in range(count)]
    assert len({len(turn) for turn in turns}) == 1
    assert sorted(index for turn in turns for index, is_counted in turn if is_counted) == list(range(num))


def test_alone_nothing_is_sent() -> None:
    alone, tensor = Ranks(), torch.ones(2, 3)
    assert alone.gather(tensor, 2) is tensor
    assert alone.agree("x") == "x"
    assert alone.worst(2) == 2


@pytest.mark.acceptance(93)
def test_the_rows_of_all_ranks_together_are_the_rows_of_one_alone(tiny_data: Path) -> None:
    manifest = read_manifest(tiny_data)
    stream = PackedStream(open_split(tiny_data, manifest, "train"), seed=3)

    def step(rank: int, num_ranks: int, first_row: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = TextRows(
            stream, rows_per_step=8, context=32, vocab_size=manifest.vocab_size, rank=rank, num_ranks=num_ranks
        )
        host = torch.empty(rows.host_shape(), dtype=torch.int32)
        batch = rows.to_batch(host, rows.read_into(first_row, host))
        return batch.ids_RT, batch.targets_RT

    for first_row in (0, 8, 40):
        ids, targets = step(0, 1, first_row)
        for num_ranks in (2, 4, 8):
            parts = [step(rank, num_ranks, first_row) for rank in range(num_ranks)]
            assert torch.equal(torch.cat([part[0] for part in parts]), ids)
            assert torch.equal(torch.cat([part[1] for part in parts]), targets)


def test_ranks_that_the_rows_do_not_divide_by_are_refused_with_those_that_do(tiny_run: Run) -> None:
    asked = dataclasses.replace(tiny_run, train=dataclasses.replace(tiny_run.train, num_ranks=3))
    with pytest.raises(UsageError) as caught:
        pick_num_ranks(asked, 1, print)
    assert "train.ranks: 2" in caught.value.fix


def test_ranks_that_another_program_started_must_fit_the_run(tiny_run: Run) -> None:
    check_num_ranks(tiny_run, 2)
    with pytest.raises(UsageError) as caught:
        check_num_ranks(tiny_run, 3)
    assert "Start 2 ranks" in caught.value.fix
    with pytest.raises(UsageError, match=r"WORLD_SIZE is 2, but train\.ranks is 4"):
        check_num_ranks(dataclasses.replace(tiny_run, train=dataclasses.replace(tiny_run.train, num_ranks=4)), 2)


def test_a_rank_reads_its_numbers_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks.from_env() == Ranks()
    monkeypatch.setenv("RANK", "9")
    assert Ranks.from_env() == Ranks()  # some container images set RANK alone
    for name, value in {"WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="MASTER_ADDR and MASTER_PORT not set"):
        Ranks.from_env()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert Ranks.from_env() == Ranks(9, 16, 1, 8)
    for name, wrong in (("RANK", "16"), ("LOCAL_RANK", "8"), ("WORLD_SIZE", "many")):
        with monkeypatch.context() as patch:
            patch.setenv(name, wrong)
            with pytest.raises(UsageError, match=f"{name}={wrong}"):
                Ranks.from_env()


def test_unused_gpus_are_reported(tiny_run: Run) -> None:
    said: list[str] = []
    run = dataclasses.replace(tiny_run, train=dataclasses.replace(tiny_run.train, device="auto"))
    assert pick_num_ranks(run, 8, said.append) == 8
    assert pick_num_ranks(run, 6, said.append) == 4
    assert "using 4 of 6 GPUs" in said[0]
    assert pick_num_ranks(tiny_run, 8, said.append) == 1  # train.device says cpu


def test_cards_that_are_hidden_from_us_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, num in (("0,2", 2), ("", 0), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_cards() == num


# -- with processes ----------------------------------------------------------------------------------------------------


@pytest.mark.acceptance(93)
@pytest.mark.slow
def test_one_two_and_four_processes_learn_the_same(tiny_data: Path, tmp_path: Path) -> None:
    found = {}
    for count in (1, 2, 4):
        run = make_run(
            tiny_data, train={"num_ranks": count}, num_steps=50, micro_batch=2, save_every=0, eval_every=50,
            optimizer=GENTLE,
        )  # fmt: skip
        run_dir = make_run_dir(tmp_path / f"run-{count}", run)
        code, stderr = train(run_dir)
        assert code == file_names.EXIT_DONE, stderr
        found[count] = losses(run_dir)
        assert len(found[count]) == 50
    for count in (2, 4):
        assert found[count] == pytest.approx(found[1], abs=1e-5)


@pytest.mark.acceptance(93)
@pytest.mark.slow
@pytest.mark.parametrize(("victim", "parallel"), [(0, "zero3"), (1, "ddp"), (1, "zero2")])
def test_a_killed_rank_fails_the_run_which_then_resumes_from_its_checkpoint(
    victim: int, parallel: str, tiny_data: Path, tmp_path: Path
) -> None:
    ranks = {"num_ranks": 2, "parallel": parallel}
    run = make_run(tiny_data, train=ranks, num_steps=400, save_every=5, eval_every=0, optimizer=GENTLE)
    run_dir = make_run_dir(tmp_path / "run", run)
    process = start(run_dir)
    wait_for_steps(run_dir, 12)
    os.kill(rank_pids(process.pid)[victim], signal.SIGKILL)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == file_names.EXIT_FAILED
    assert outcome(run_dir).state == "failed"
    assert f"Rank {victim} of 2 was killed by SIGKILL" in outcome(run_dir).reason
    assert f"Rank {victim} of 2 was killed by SIGKILL" in stderr
    assert stderr.count("Traceback") == 0  # those of the ones left alone would hide what happened

    assert f"All output of this rank is in logs/rank-{victim}.log." in outcome(run_dir).reason
    survivor = (run_dir / file_names.LOGS / f"rank-{1 - victim}.log").read_text()
    assert "gloo" in survivor  # the error of the rank that lost the other one is kept

    before = losses(run_dir)  # the last steps have been lost, and will be trained again
    again = start(run_dir)
    wait_for_steps(run_dir, 30)
    again.send_signal(signal.SIGTERM)  # to the starter, as an agent does it: rank 0 saves, and all end
    stdout, stderr = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == file_names.EXIT_STOPPED, stderr
    assert "Resumed at step" in stdout
    assert outcome(run_dir).state == "stopped"
    assert losses(run_dir)[: len(before)] == pytest.approx(before, rel=1e-5)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_ends_them_all_if_one_is_killed(tiny_data: Path, tmp_path: Path) -> None:
    run = make_run(tiny_data, train={"parallel": "zero3"}, num_steps=4000, save_every=5, eval_every=0, optimizer=GENTLE)
    run_dir = make_run_dir(tmp_path / "run", run)
    process = subprocess.Popen(
        [*TORCHRUN, "-m", "homing.lm.train", str(run_dir)], env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_steps(run_dir, 8)
    pids = rank_pids(process.pid)
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert stdout.count("Phase pretrain:") == 1  # only rank 0 reports
    first_failure = stderr[stderr.index("Root Cause") :]
    assert "rank      : 1" in first_failure
    assert "Signal 9 (SIGKILL)" in first_failure
    assert outcome(run_dir).state == "failed"


@pytest.mark.slow
def test_ranks_end_when_their_starter_is_gone(tiny_data: Path, tmp_path: Path) -> None:
    run = make_run(tiny_data, train={"num_ranks": 2}, num_steps=4000, save_every=0, eval_every=0)
    run_dir = make_run_dir(tmp_path / "run", run)
    process = start(run_dir)
    wait_for_steps(run_dir, 2)
    pids = rank_pids(process.pid)
    assert len(pids) == 2
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


RANK_THAT_CANNOT_COMPILE = """
import sys
from pathlib import Path
from homing.lm.model import Decoder
from homing.lm.train.compute import hardware_choices
from homing.lm.train.loop import train
from homing.lm.train.optim import muon
from homing.lm.train.optim.param_groups import Optimizer
from homing.lm.train.distributed.ranks import Ranks

def fails(*_):
    raise RuntimeError("no compiler on this rank")

def compile_steps(optimizer, *, is_on=True, **_):
    # As on a card, where the optimizer's steps are compiled too: the first switch is on, the next one off.
    direct = fails if Ranks.from_env().rank == 1 else (lambda *given: muon.direct_(*given))
    parts = muon.EAGER if hasattr(optimizer, "was_on") else (direct, lambda *given: muon.move_(*given))
    optimizer.was_on = True
    for group in optimizer.muon:
        group.parts = parts

hardware_choices.is_compile_worthwhile = lambda _: True
Decoder.compile_blocks = lambda model, *, is_on=True: None
Optimizer.compile_steps = compile_steps
train(Path(sys.argv[1]), say=print)
"""


@pytest.mark.slow
@pytest.mark.regression("compile-failure-ranks")
def test_if_one_rank_cannot_compile_the_optimizer_step_no_rank_does(tiny_data: Path, tmp_path: Path) -> None:
    run = make_run(
        tiny_data, train={"num_ranks": 2, "compile": "auto"}, num_steps=3, micro_batch=2, save_every=0, eval_every=0,
        optimizer=GENTLE,
    )  # fmt: skip
    run_dir = make_run_dir(tmp_path / "run", run)
    (tmp_path / "rank.py").write_text(RANK_THAT_CANNOT_COMPILE)
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "rank.py"), str(run_dir)],
            env=rank_env(rank, 2, port),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    deadline = time.monotonic() + 90.0
    try:
        while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
            time.sleep(0.2)
        waiting = [number for number, rank in enumerate(ranks) if rank.poll() is None]
        assert waiting == [], f"ranks {waiting} still wait for each other"
    finally:
        for rank in ranks:
            rank.kill()
        said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "torch.compile failed; training continues without it" in said[0]
    assert "The error occurred on another rank." in said[0]
    assert len(losses(run_dir)) == 3


WORST = """
import os, sys, time
from pathlib import Path
from homing.errors import RunFailed
from homing.lm.train.distributed.ranks import joined_ranks
with joined_ranks(is_cuda=False, run_dir=Path(sys.argv[1])) as ranks:
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{sys.argv[1]}/logs/flight-recorder-"
    assert int(os.environ["TORCH_FR_BUFFER_SIZE"]) > 0 and os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert ranks.worst(ranks.rank, within_s=60.0) == 1
    if ranks.rank == 1:
        time.sleep(8.0)  # it compiles, and compiles
        sys.exit(0)
    try:
        ranks.worst(0, within_s=2.0)
    except RunFailed as error:
        print(error)
"""


@pytest.mark.slow
def test_a_rank_that_does_not_answer_in_time_ends_the_run_readably(tmp_path: Path) -> None:
    port = free_port()
    ranks = [
        subprocess.Popen([sys.executable, "-c", WORST, str(tmp_path)], env=rank_env(rank, 2, port),
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = ranks[0].communicate(timeout=120)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert "Another rank has not responded" in said
