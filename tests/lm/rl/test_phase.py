from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from killed_trainer import kill_trainer_after
from safetensors.torch import load_file
from small import ADDITION, make_rl_run, small_model
from tiny import make_run_dir

from homing.errors import RunFailed, UsageError
from homing.lm.phases.rl import SAMPLES, Reinforce
from homing.lm.rl.prompter import stop_ids_of
from homing.lm.rl.questions import Order
from homing.lm.train.loop import train
from homing.lm.try_first_step import verify
from homing.wire import codec, file_names
from homing.wire.event_lines import Event, Metric
from homing.wire.run_json import Rl, RlTask, Run


def go(run_dir: Path, run: Run | None = None) -> list[str]:
    said: list[str] = []
    if run is not None:
        make_run_dir(run_dir, run)
    train(run_dir, say=said.append)
    return said


def metrics(run_dir: Path) -> list[Metric]:
    return [codec.loads(Metric, line) for line in (run_dir / file_names.METRICS).read_text().splitlines()]


def events(run_dir: Path, kind: str) -> list[Event]:
    found = [codec.loads(Event, line) for line in (run_dir / file_names.EVENTS).read_text().splitlines()]
    return [event for event in found if event.kind == kind]


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints/rl" / file_names.step_dir(step) / file_names.WEIGHTS)


def are_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_phase_samples_judges_learns_and_is_judged(tmp_path: Path) -> None:
    go(tmp_path / "run", make_rl_run(tmp_path / "data"))
    lines = metrics(tmp_path / "run")
    assert [line.step for line in lines] == [1, 2, 3, 4]
    wanted = {
        "reward",
        "reward_std",
        "pass_at_1",
        "pass_at_4",
        "length",
        "entropy",
        "equal_groups",
        "truncated",
        "empty",
    }
    assert all(wanted <= line.more.keys() for line in lines)
    assert {"val_reward", "val_pass_at_1", "val_pass_at_4"} <= lines[1].more.keys()
    assert lines[1].val_loss == pytest.approx(1.0 - lines[1].more["val_pass_at_1"])
    assert lines[1].val_perplexity is None
    assert "val_reward" not in lines[0].more
    assert events(tmp_path / "run", "step_skipped") == []  # nothing right yet is nothing learned, and no NaN
    assert not (tmp_path / "run/checkpoints/rl" / file_names.step_dir(4) / SAMPLES).exists()


SETTINGS: dict[str, dict[str, Any]] = {
    "fresh samples each step": {},
    "several updates on one set": {"updates_per_rollout": 3, "clip_high": 0.3, "kl": 0.1, "advantage": "mean"},
    "two tasks": {"tasks": [ADDITION, RlTask(kind="spelling", weight=2.0)], "context": 96},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_run_that_is_resumed_is_bit_for_bit_the_one_that_never_stopped(tmp_path: Path, settings: str) -> None:
    # A reward that nearly every sample gets, so that there is something to learn from: how long it is.
    reward = tmp_path / "data" / "reward.py"
    run = make_rl_run(tmp_path / "data", phase={"save_every": 1, "keep_last": 9, "eval_every": 0}, **SETTINGS[settings])
    reward.write_text("def reward(prompt, completion, answer):\n    return completion.count('e') + len(completion)\n")
    run = with_reward(run)
    go(tmp_path / "whole", run)
    assert not are_equal(weights(tmp_path / "whole", 1), weights(tmp_path / "whole", 4))
    for step in (2, 3) if settings.startswith("several") else (2,):
        resumed = tmp_path / f"resumed-{step}"
        shutil.copytree(tmp_path / "whole", resumed)
        for later in range(step + 1, 5):
            shutil.rmtree(resumed / "checkpoints/rl" / file_names.step_dir(later))
        go(resumed)
        assert are_equal(weights(resumed, 4), weights(tmp_path / "whole", 4))
        messages = [[(line.step, line.loss, line.more.get("reward")) for line in metrics(each)]
                for each in (resumed, tmp_path / "whole")]  # fmt: skip
        assert messages[0] == messages[1]


@pytest.mark.acceptance("X6")
@pytest.mark.slow
def test_a_second_phase_of_rl_goes_on_in_a_run_of_its_own_and_its_lineage_has_both(tmp_path: Path) -> None:
    run = make_rl_run(tmp_path / "data", phase={"num_steps": 2, "eval_every": 0}, context=96)
    go(tmp_path / "first", run)
    start = tmp_path / "first/checkpoints/rl" / file_names.step_dir(2)
    phase = run.phases[0]
    assert phase.rl is not None
    rl = dataclasses.replace(phase.rl, tasks=[RlTask(kind="spelling")])
    second = dataclasses.replace(phase, init_from=str(start), rl=rl)
    go(tmp_path / "second", dataclasses.replace(run, phases=[second]))
    assert str(start) in events(tmp_path / "second", "weights_loaded")[0].text
    manifest = json.loads(
        (tmp_path / "second/checkpoints/rl" / file_names.step_dir(2) / file_names.MANIFEST).read_text()
    )
    assert [link["phase"] for link in manifest["lineage"]] == ["rl", "rl"]


def test_two_phases_of_one_kind_never_share_a_folder(tmp_path: Path) -> None:
    run = make_rl_run(tmp_path / "data")
    with pytest.raises(UsageError, match="share a checkpoint folder") as caught:
        go(tmp_path / "run", dataclasses.replace(run, phases=2 * run.phases))
    assert "init_from" in caught.value.fix
    assert not (tmp_path / "run" / file_names.CHECKPOINTS).exists()


SHAPED = """\
def reward(prompt, completion, answer):
    right = float(answer in completion)
    short = max(0.0, 1.0 - len(completion) / 40)
    return 0.7 * right + 0.3 * short
"""


@pytest.mark.slow
@pytest.mark.acceptance("X6")
def test_tasks_with_weights_and_a_reward_with_weights_of_its_own_are_learned_from_together(tmp_path: Path) -> None:
    tasks = [
        RlTask(kind="prompts", file="asks.jsonl", reward="reward.py", weight=0.7),
        RlTask(kind="arithmetic", weight=0.3),
    ]
    run = make_rl_run(tmp_path / "data", tasks=tasks, prompts_per_step=10)
    asks = [json.dumps({"prompt": f"Go {number}", "answer": "e"}) for number in range(60)]
    (tmp_path / "data/asks.jsonl").write_text("\n".join(asks))
    (tmp_path / "data/reward.py").write_text(SHAPED)
    go(tmp_path / "run", run)
    lines, order = metrics(tmp_path / "run"), Order([0.7, 0.3], seed=run.seed)
    assert [order.at(number)[0] for number in range(256)].count(0) == round(0.7 * 256)
    for step, line in enumerate(lines):
        of_each = line.more["reward_prompts"], line.more["reward_arithmetic"]
        assert 0.0 < of_each[0] < 1.0, "parts of a reward count"
        share = [order.at(number)[0] for number in range(10 * step, 10 * step + 10)].count(0) / 10
        assert line.more["reward"] == pytest.approx(share * of_each[0] + (1 - share) * of_each[1])
    assert len(lines) == 4
    assert not are_equal(weights(tmp_path / "run", 2), weights(tmp_path / "run", 4))


def test_whatever_a_family_calls_it_the_end_of_a_turn_or_text_ends_a_sample() -> None:
    llama = {"<|begin_of_text|>": 7, "<|end_of_text|>": 8, "<|eot_id|>": 9, "<|python_tag|>": 10}
    assert stop_ids_of(SimpleNamespace(specials=llama, end_of_text_id=7, stop_ids=[8])) == [7, 8, 9]
    qwen = {"<|endoftext|>": 3, "<|im_start|>": 4, "<|im_end|>": 5}
    assert stop_ids_of(SimpleNamespace(specials=qwen, end_of_text_id=3, stop_ids=[3])) == [3, 5]


def with_reward(run: Run) -> Run:
    phase = run.phases[0]
    assert phase.rl is not None
    tasks = [dataclasses.replace(task, reward="reward.py") for task in phase.rl.tasks]
    rl = dataclasses.replace(phase.rl, tasks=tasks, pass_reward=3.0)
    return dataclasses.replace(run, phases=[dataclasses.replace(phase, rl=rl)])


@pytest.mark.slow
def test_samples_kept_between_two_updates_are_in_the_checkpoint_and_missing_ones_are_reported(tmp_path: Path) -> None:
    run = make_rl_run(tmp_path / "data", updates_per_rollout=2, phase={"num_steps": 3, "save_every": 3})
    go(tmp_path / "run", run)
    work = Reinforce(run, run.phases[0], tmp_path / "data")
    folder = tmp_path / "run/checkpoints/rl" / file_names.step_dir(3)
    work.load_metadata_files(folder)
    assert work.experience is not None
    assert work.experience.number == 1
    (folder / SAMPLES).unlink()
    bare = Reinforce(run, run.phases[0], tmp_path / "data")
    bare.load_metadata_files(folder)
    model, device = small_model(run), torch.device("cpu")
    with (
        bare.open_batches(model, first_row=16, device=device) as batches,
        pytest.raises(Exception, match="lacks the samples"),
    ):
        batches.next()


@pytest.mark.slow
def test_the_same_is_asked_and_sampled_whatever_the_micro_batch_and_rollout_rows(tmp_path: Path) -> None:
    messages = []
    for number, (micro_batch, rollout_rows) in enumerate([(16, 0), (3, 0), (8, 5)]):
        run = make_rl_run(
            tmp_path / "data", rollout_rows=rollout_rows, phase={"num_steps": 1, "micro_batch": micro_batch}
        )
        go(tmp_path / f"run-{number}", run)
        (line,) = metrics(tmp_path / f"run-{number}")
        messages.append({name: value for name, value in line.more.items() if not name.endswith("_s")})
    assert {"reward", "entropy"} <= messages[0].keys()
    assert messages[0] == pytest.approx(messages[1])
    assert messages[0] == pytest.approx(messages[2])


def test_ranks_together_ask_what_one_alone_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_rl_run(tmp_path / "data")
    model, device = small_model(run), torch.device("cpu")
    with Reinforce(run, run.phases[0], tmp_path / "data").open_batches(model, first_row=0, device=device) as batches:
        alone = batches.next()
    parts = []
    for rank in (0, 1):
        work = Reinforce(run, run.phases[0], tmp_path / "data")
        shared = work.open_batches(model, first_row=0, device=device, rank=rank, num_ranks=2)
        monkeypatch.setattr(shared, "_gathered", lambda mine: mine)
        monkeypatch.setattr(shared, "_summed", lambda count: count)
        with shared as batches:
            parts.append(batches.next())
    assert sum(part.num_targets for part in parts) == alone.num_targets
    rows = [row[row != -100].tolist() for part in parts for row in part.targets_RT]
    assert rows == [row[row != -100].tolist() for row in alone.targets_RT]
    with pytest.raises(UsageError, match="cannot be divided evenly among 3"):
        work.open_batches(model, first_row=0, device=device, num_ranks=3)


@pytest.mark.slow
def test_two_processes_report_the_metrics_of_both_and_count_all_targets(tmp_path: Path) -> None:
    run = make_rl_run(tmp_path / "data")
    model, device = small_model(run), torch.device("cpu")
    with Reinforce(run, run.phases[0], tmp_path / "data").open_batches(model, first_row=0, device=device) as batches:
        alone = batches.next()
    code = (
        "import json, sys\nfrom pathlib import Path\nimport torch\nimport torch.distributed as dist\n"
        "sys.path[:0] = sys.argv[2:4]\nfrom small import make_rl_run, small_model\n"
        "from homing.lm.phases.rl import Reinforce\n"
        "folder, rank = Path(sys.argv[1]), int(sys.argv[4])\n"
        "dist.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=rank, world_size=2)\n"
        "run = make_rl_run(folder / 'data')\n"
        "work = Reinforce(run, run.phases[0], folder / 'data')\n"
        "where = {'device': torch.device('cpu'), 'rank': rank, 'num_ranks': 2}\n"
        "with work.open_batches(small_model(run), first_row=0, **where) as batches:\n    batch = batches.next()\n"
        "print(json.dumps([batch.num_rows, batch.num_targets, batch.figures]))\n"
        "dist.destroy_process_group()\n"
    )
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), *here, str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    for child in children:
        with child:
            out, _ = child.communicate(timeout=200)
        num_rows, num_targets, figures = json.loads(out.splitlines()[-1])
        assert (num_rows, num_targets) == (8, alone.num_targets)
        for name in ("reward", "length", "entropy", "equal_groups"):
            assert figures[name] == pytest.approx(alone.figures[name], rel=1e-5)


@pytest.mark.slow
@pytest.mark.acceptance(91)
def test_a_collapse_is_an_event_and_is_reported_once(tmp_path: Path) -> None:
    said = go(
        tmp_path / "run", make_rl_run(tmp_path / "data", collapse_steps=2, samples_per_prompt=2, prompts_per_step=1)
    )
    collapsed = events(tmp_path / "run", "collapsed")
    assert len([event for event in collapsed if "equal" in event.text]) == 1
    assert any("rl has collapsed" in line for line in said)


def test_a_reward_that_always_fails_stops_the_run_with_its_line(tmp_path: Path) -> None:
    run = with_reward(make_rl_run(tmp_path / "data"))
    (tmp_path / "data/reward.py").write_text("def reward(prompt, completion, answer):\n    return 1 / 0\n")
    with pytest.raises(RunFailed, match="no reward for any"):
        go(tmp_path / "run", run)
    assert "line 2: ZeroDivisionError" in events(tmp_path / "run", "run_failed")[-1].text


@pytest.mark.slow
def test_evaluation_does_not_change_what_training_draws(tmp_path: Path) -> None:
    for name, eval_every in (("often", 1), ("never", 0)):
        go(tmp_path / name, make_rl_run(tmp_path / "data", phase={"eval_every": eval_every}))
    assert are_equal(weights(tmp_path / "often", 4), weights(tmp_path / "never", 4))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"samples_per_prompt": 1}, "samples_per_prompt"),
        ({"max_new_tokens": 45}, "answer_tokens"),
        ({"temperature": 0.0}, "temperature"),
        ({"advantage": "median"}, "advantage"),
        ({"graphs": "yes"}, "graphs"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, settings: dict[str, Any], word: str) -> None:
    run = make_rl_run(tmp_path / "data", **settings)
    with pytest.raises(UsageError, match="The rl phase has invalid settings") as caught:
        Reinforce(run, run.phases[0], tmp_path / "data")
    assert word in caught.value.why


def test_graphs_that_were_asked_for_by_name_are_not_left_out_in_silence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="CUDA graphs are not available"):
        go(tmp_path / "run", make_rl_run(tmp_path / "data", graphs="on"))


def test_a_phase_without_tasks_is_refused(tmp_path: Path) -> None:
    run = make_rl_run(tmp_path / "data")
    for rl in (None, Rl(tasks=[])):
        with pytest.raises(UsageError, match="has no tasks"):
            Reinforce(run, dataclasses.replace(run.phases[0], rl=rl), tmp_path / "data")


@pytest.mark.acceptance(91)
@pytest.mark.slow
def test_a_trainer_killed_in_the_middle_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    run = make_rl_run(
        tmp_path / "data", updates_per_rollout=2, phase={"num_steps": 30, "save_every": 1, "eval_every": 0}
    )
    go(tmp_path / "whole", run)
    killed = make_run_dir(tmp_path / "killed", run)
    kill_trainer_after(killed, "rl", 3)
    last = json.loads((killed / file_names.METRICS).read_text().splitlines()[-1])["step"]
    assert last < 30
    go(killed)
    assert are_equal(weights(killed, 30), weights(tmp_path / "whole", 30))


def test_verify_reads_every_file_of_questions_and_loads_every_reward(tmp_path: Path) -> None:
    run = make_rl_run(tmp_path / "data", tasks=[RlTask(kind="prompts", file="asks.jsonl", reward="reward.py")])
    (tmp_path / "data/asks.jsonl").write_text('{"prompt": "Hi", "answer": "yes"}\n' * 30)
    (tmp_path / "data/reward.py").write_text("import nothing_of_that_name\n")
    (problem,) = verify(run, tmp_path).problems
    assert "line 1: ModuleNotFoundError" in problem
    (tmp_path / "data/reward.py").write_text("def reward(prompt, completion, answer):\n    return 1.0\n")
    (tmp_path / "data/asks.jsonl").write_text('{"prompt": "Hi"}\nnot json\n')
    (problem,) = verify(run, tmp_path).problems
    assert "line 2" in problem
