"""That it learns: a model that was shown a few sums gets better at them by reward alone."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small import make_rl_run
from tiny import count_params, make_run_dir

from homing.lm.model import Decoder
from homing.lm.phases.rl import Reinforce
from homing.lm.rl.grpo import rows_of
from homing.lm.rl.rollout import Sample
from homing.lm.train.compute.batch import Batch
from homing.lm.train.loop import train
from homing.wire import codec, file_names
from homing.wire.event_lines import Metric
from homing.wire.run_json import Lora, Optimizer, Run, Schedule

RATE = 1e-3


def make_learning_run(folder: Path) -> Run:
    run = make_rl_run(
        folder / "data", prompts_per_step=16, samples_per_prompt=8, max_new_tokens=4, eval_prompts=10, eval_samples=16,
        phase={
            "num_steps": 150, "micro_batch": 128, "eval_every": 0, "save_every": 0, "init_from": str(folder / "warm"),
            "optimizer": Optimizer("adamw", RATE, RATE, RATE, RATE, 0.0), "schedule": Schedule("wsd", 0, 120, 0.05),
        },
    )  # fmt: skip
    model = dataclasses.replace(run.model, width=64, num_heads=4, num_kv_heads=4, ffn_width=128)
    num_params, num_matmul_params = count_params(model)
    sizes = dataclasses.replace(run.sizes, num_params=num_params, num_matmul_params=num_matmul_params)
    return dataclasses.replace(run, model=model, sizes=sizes)


def warm_up(run: Run, folder: Path, num_steps: int) -> None:
    """As sft does it: right answers, for a while."""
    work, model = Reinforce(run, run.phases[0], folder / "data"), Decoder(run.model)
    model.init_weights(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3 * RATE, weight_decay=0.0)
    end = work.tokenizer.specials["<|im_end|>"]
    for step in range(num_steps):
        questions = [work.tasks[0].draw(step * 64 + number) for number in range(64)]
        answers = [[*work.tokenizer.encode(question.answer), end] for question in questions]
        samples = [Sample(ids, [True] * len(ids), True, 0.0) for ids in answers]
        prompts = [question.ids for question in questions]
        rows = rows_of(step, prompts, samples, [1.0] * 64, context=run.model.context, device=model.device)
        Batch(rows.ids_RT, rows.targets_RT, rows.num_targets).loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    (folder / "warm").mkdir()
    save_file(model.weights_for_disk(), folder / "warm" / file_names.WEIGHTS)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that every method continues, with its data and initial weights."""
    folder = tmp_path_factory.mktemp("warm")
    run = make_learning_run(folder)
    warm_up(run, folder, num_steps=110)
    return run


ADAPTERS = {"lora": Lora(rank=8, alpha=16.0), "optimizer": Optimizer("adamw", *[8 * RATE] * 4, 0.0)}


@pytest.mark.acceptance(91)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_reward_rises_well_above_its_start(warm: Run, tmp_path: Path, method: str) -> None:
    run = warm
    if method != "full":
        run = dataclasses.replace(run, phases=[dataclasses.replace(run.phases[0], method=method, **ADAPTERS)])
    train(make_run_dir(tmp_path / "run", run), say=print)
    lines = (tmp_path / "run" / file_names.METRICS).read_text().splitlines()
    rewards = [codec.loads(Metric, line).more["reward"] for line in lines]
    first, last = statistics.mean(rewards[:5]), statistics.mean(rewards[-10:])
    print(f"reward {first:.2f} -> {last:.2f}")
    assert first < 0.6
    assert last > first + 0.25
